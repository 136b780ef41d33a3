//! Messages to the one text that the model was trained to continue: the checkpoint's own chat template.

mod python;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, path::Path, path::PathBuf, str};

use minijinja::{AutoEscape, Environment, Value, syntax::SyntaxConfig, value::Serde};
use serde::{Deserialize, Serialize};

use crate::{base::error::Error, text::tokenizer::TokenizerConfig};

/// Stands for an answer where only what comes behind it is wanted: a text that no template has.
const ANSWER: &str = "(what was answered)";

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Who speaks: `system`, `user` or `assistant`; some templates know more.
    pub role: String,
    /// What is said.
    pub content: String,
}

impl Message {
    /// A message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into() }
    }

    /// What the model is told before the conversation.
    pub fn system(content: impl Into<String>) -> Message {
        Message::new("system", content)
    }

    /// A question or an order.
    pub fn user(content: impl Into<String>) -> Message {
        Message::new("user", content)
    }

    /// What the model answered.
    pub fn assistant(content: impl Into<String>) -> Message {
        Message::new("assistant", content)
    }
}

/// What a template may be told besides the messages.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct ChatOptions {
    /// Whether the model thinks before it answers, for templates that can choose (`enable_thinking`, and `thinking` in
    /// DeepSeek's). Default: the template's own.
    pub thinking: Option<bool>,
    /// Further variables, by the names that the template has for them (gpt-oss: `reasoning_effort`). They win over all
    /// others.
    pub variables: serde_json::Map<String, serde_json::Value>,
}

/// A chat template: Jinja with the Python methods and helpers that `transformers` offers to templates
/// (`raise_exception`, `strftime_now` in UTC, `tojson` without HTML escapes, loop controls, `{% generation %}`).
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    special_tokens: BTreeMap<String, String>,
    path: PathBuf,
}

impl ChatTemplate {
    /// A template from its source. `special_tokens` are variables of it, such as `bos_token` to `<s>`; `path` is for
    /// error messages.
    ///
    /// # Errors
    /// [`Error::Text`] when the source is no template.
    pub fn new(
        source: &str,
        path: &Path,
        special_tokens: &BTreeMap<String, String>,
    ) -> Result<ChatTemplate, Error> {
        let template = ChatTemplate {
            env: environment().map_err(|e| advise(path, &e))?,
            source: python::without_generation_tags(source),
            special_tokens: special_tokens.clone(),
            path: path.to_path_buf(),
        };
        template.compile()?;
        Ok(template)
    }

    /// The template of a checkpoint: the contents of its `chat_template.jinja` with their path, else what
    /// `tokenizer_config.json` has. `None` when there is neither, see [`ChatTemplate::missing`].
    ///
    /// # Errors
    /// [`Error::Text`] when the source is no template or no UTF-8.
    pub fn from_files(
        jinja: Option<(&[u8], &Path)>,
        config: &TokenizerConfig,
    ) -> Result<Option<ChatTemplate>, Error> {
        let (source, path) = match (jinja, &config.chat_template) {
            (Some((bytes, path)), _) => {
                (str::from_utf8(bytes).map_err(|e| advise(path, &e))?, path)
            }
            (None, Some(source)) => (source.as_str(), config.path.as_path()),
            (None, None) => return Ok(None),
        };
        ChatTemplate::new(source, path, &config.special_tokens).map(Some)
    }

    /// The error for a checkpoint in `folder` that has no template where one is needed.
    pub fn missing(folder: &Path) -> Error {
        let problem = "the checkpoint has no chat template (chat_template.jinja, or chat_template in \
            tokenizer_config.json); it may be a base model: --raw gives it the prompt as it is";
        Error::Text { path: folder.to_path_buf(), problem: problem.into() }
    }

    /// The text of `messages`; with `add_generation_prompt` it ends where the assistant's answer begins.
    ///
    /// # Errors
    /// [`Error::Text`] when the template fails or refuses the messages (`raise_exception`), with its reason.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
        options: &ChatOptions,
    ) -> Result<String, Error> {
        let mut variables: BTreeMap<&str, Value> = BTreeMap::new();
        variables.extend(
            self.special_tokens.iter().map(|(role, token)| (role.as_str(), Value::from(token))),
        );
        variables.insert("messages", Value::from(Serde(messages)));
        variables.insert("add_generation_prompt", Value::from(add_generation_prompt));
        // `transformers` defines these two always, and templates compare them with none.
        variables.extend(["tools", "documents"].map(|name| (name, Value::from(()))));
        if let Some(thinking) = options.thinking {
            variables
                .extend(["enable_thinking", "thinking"].map(|name| (name, Value::from(thinking))));
        }
        variables.extend(
            options
                .variables
                .iter()
                .map(|(name, value)| (name.as_str(), Value::from(Serde(value)))),
        );
        self.compile()?.render(Value::from(variables)).map_err(|e| advise(&self.path, &e))
    }

    /// The text that asks `question` behind an answer: what ends the answer, the question, and where the next one begins.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; also when the template does not show answers as they are.
    pub fn render_on(&self, question: &str, options: &ChatOptions) -> Result<String, Error> {
        let messages =
            [Message::user("(a question)"), Message::assistant(ANSWER), Message::user(question)];
        // The question comes later, so it may say what it likes.
        match self.render(&messages, true, options)?.split_once(ANSWER) {
            Some((_, behind)) => Ok(behind.to_owned()),
            None => {
                let problem = "the chat template does not show what was answered, so that nothing can be asked behind it; --raw \
                    runs without the template";
                Err(Error::Text { path: self.path.clone(), problem: problem.into() })
            }
        }
    }

    /// A compiled template borrows its source, so it is compiled where it is used: once per answer.
    fn compile(&self) -> Result<minijinja::Template<'_, '_>, Error> {
        self.env
            .template_from_named_str("chat template", &self.source)
            .map_err(|e| advise(&self.path, &e))
    }
}

fn advise(path: &Path, error: &dyn std::error::Error) -> Error {
    let problem = format!("the chat template fails: {error}; --raw runs without the template");
    Error::Text { path: path.to_path_buf(), problem }
}

/// Jinja as `transformers` sets it up.
fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(python::method);
    env.add_filter("tojson", python::tojson);
    env.add_test("iterable", python::is_iterable);
    env.add_test("sequence", python::is_sequence);
    env.add_function("raise_exception", python::raise_exception);
    env.add_function("strftime_now", python::strftime_now);
    Ok(env)
}
