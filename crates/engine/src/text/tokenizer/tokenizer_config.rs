//! `tokenizer_config.json`: chat template and special tokens.

use std::{collections::BTreeMap, path::Path, path::PathBuf};

use serde_json::Value;

use super::Tokenizer;
use crate::base::error::Error;

/// Settings of `tokenizer_config.json` that `tokenizer.json` lacks. Without the file: `default()`.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct TokenizerConfig {
    /// Chat template, if it is not in a separate file.
    pub chat_template: Option<String>,
    /// Text of the special tokens by role: `bos_token`, `eos_token`, ...
    pub special_tokens: BTreeMap<String, String>,
    /// The file, for error messages.
    pub path: PathBuf,
}

impl TokenizerConfig {
    /// Reads the contents of a `tokenizer_config.json`; `path` is for error messages.
    ///
    /// A token is a string or an object with `content`. A template is a string, or a list of
    /// `{name, template}` with an entry `default`.
    ///
    /// # Errors
    /// [`Error::Text`] if the bytes are not a JSON object, or the template is neither.
    pub fn from_bytes(tokenizer_config_json: &[u8], path: &Path) -> Result<TokenizerConfig, Error> {
        let problem = |problem: String| Error::Text { path: path.to_path_buf(), problem };
        let config: serde_json::Map<String, Value> = serde_json::from_slice(tokenizer_config_json)
            .map_err(|e| problem(format!("not a JSON object: {e}")))?;
        let chat_template =
            config.get("chat_template").map(template).transpose().map_err(problem)?.flatten();
        let special_tokens = config
            .iter()
            .filter(|(role, _)| role.ends_with("_token"))
            .filter_map(|(role, token)| Some((role.clone(), token_text(token)?.to_owned())))
            .collect();
        Ok(TokenizerConfig { chat_template, special_tokens, path: path.to_path_buf() })
    }

    /// Id of the token that ends an answer, if it is named and the tokenizer has it.
    pub fn eos_token(&self, tokenizer: &Tokenizer) -> Option<u32> {
        tokenizer.token_to_id(self.special_tokens.get("eos_token")?)
    }
}

fn token_text(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

fn template(value: &Value) -> Result<Option<String>, String> {
    let wrong =
        || "chat_template must be a string, or a list of objects with name and template".to_owned();
    match value {
        Value::Null => Ok(None),
        Value::String(source) => Ok(Some(source.clone())),
        Value::Array(list) => {
            let mut names = Vec::new();
            for entry in list {
                let field = |key| entry.get(key).and_then(Value::as_str).ok_or_else(wrong);
                let (name, source) = (field("name")?, field("template")?);
                if name == "default" {
                    return Ok(Some(source.to_owned()));
                }
                names.push(name);
            }
            Err(format!(
                "chat_template has no template \"default\", only {names:?}; --raw runs without one"
            ))
        }
        _ => Err(wrong()),
    }
}
