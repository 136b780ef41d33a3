//! `tokenizer_config.json`: chat template and special tokens.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use moeflux_base::{Error, seam::json};
use serde_json::{Map, Value};

use super::tokenizer::Tokenizer;

/// Settings of `tokenizer_config.json` that `tokenizer.json` lacks. Without the file: `default()`.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct TokenizerConfig {
    /// Chat template, if it is not in a separate file.
    pub chat_template: Option<String>,
    /// Text of the special tokens by role: `bos_token`, `eos_token`, ...
    pub special_tokens: BTreeMap<String, String>,
    /// Whether `bos_token` and `eos_token` are put around a text, where the class of the tokenizer
    /// decides that, not `tokenizer.json`.
    pub around: Option<AroundText>,
    /// The file, for error messages.
    pub path: PathBuf,
}

/// Special tokens that are put around a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AroundText {
    /// Whether the text begins with `bos_token`.
    pub bos: bool,
    /// Whether the text ends with `eos_token`.
    pub eos: bool,
}

/// Beginnings of the names of the tokenizer classes that read `add_bos_token` and `add_eos_token`,
/// whatever `tokenizer.json` does.
const ADDING_CLASSES: [&str; 4] = ["Llama", "CodeLlama", "Gemma", "Cohere"];

/// Maps in the file that may name further special tokens.
const NESTED_TOKENS: [&str; 2] = ["extra_special_tokens", "model_specific_special_tokens"];

/// Roles of the tokens that end an answer.
const END_ROLES: [&str; 2] = ["eos_token", "eot_token"];

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
        let config = object(tokenizer_config_json, path)?;
        let chat_template =
            config.get("chat_template").map(template).transpose().map_err(problem)?.flatten();
        let nested = NESTED_TOKENS.iter().filter_map(|key| config.get(*key)?.as_object());
        let special_tokens = nested.chain([&config]).flat_map(special_tokens).collect();
        Ok(TokenizerConfig {
            chat_template,
            special_tokens,
            around: around(&config),
            path: path.to_path_buf(),
        })
    }

    /// Adds the special tokens of a `special_tokens_map.json` for roles that have none.
    ///
    /// # Errors
    /// [`Error::Text`] if the bytes are not a JSON object.
    pub fn add_special_tokens(&mut self, map_json: &[u8], path: &Path) -> Result<(), Error> {
        for (role, token) in special_tokens(&object(map_json, path)?) {
            self.special_tokens.entry(role).or_insert(token);
        }
        Ok(())
    }

    /// Template of a `chat_template.json`.
    ///
    /// # Errors
    /// [`Error::Text`] if the bytes are not a JSON object, or have no template.
    pub fn chat_template_json(json: &[u8], path: &Path) -> Result<Option<String>, Error> {
        let found = object(json, path)?.get("chat_template").map(template).transpose();
        let problem = |problem: String| Error::Text { path: path.to_path_buf(), problem };
        Ok(found.map_err(problem)?.flatten())
    }

    /// Ids of the tokens that end an answer, as far as they are named and the tokenizer has them.
    pub fn end_tokens(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let id = |role: &&str| tokenizer.token_to_id(self.special_tokens.get(*role)?);
        END_ROLES.iter().filter_map(id).collect()
    }
}

/// Parses a JSON object.
fn object(bytes: &[u8], path: &Path) -> Result<Map<String, Value>, Error> {
    json::parse(bytes).map_err(|e| Error::Text {
        path: path.to_path_buf(),
        problem: format!("not a JSON object: {}", json::problem(&e)),
    })
}

/// Special tokens of a map, by role.
fn special_tokens(map: &Map<String, Value>) -> impl Iterator<Item = (String, String)> {
    map.iter()
        .filter(|(role, _)| role.ends_with("_token"))
        .filter_map(|(role, token)| Some((role.clone(), token_text(token)?.to_owned())))
}

/// Tokens around a text, if the tokenizer's class reads these keys and the file has one.
fn around(config: &Map<String, Value>) -> Option<AroundText> {
    let class = config.get("tokenizer_class")?.as_str()?;
    let [bos, eos] =
        ["add_bos_token", "add_eos_token"].map(|key| config.get(key).and_then(Value::as_bool));
    let reads = ADDING_CLASSES.iter().any(|name| class.starts_with(name));
    // The classes' defaults.
    (reads && (bos.is_some() || eos.is_some()))
        .then(|| AroundText { bos: bos.unwrap_or(true), eos: eos.unwrap_or(false) })
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
