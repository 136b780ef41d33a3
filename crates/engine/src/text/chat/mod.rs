//! Chat templates: messages to prompt text, by the checkpoint's Jinja template.

mod python;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, path::Path, path::PathBuf, str};

use minijinja::{AutoEscape, Environment, Value, syntax::SyntaxConfig, value::Serde};
use serde::{Deserialize, Serialize};

use crate::{
    base::{error::Error, setters::setters},
    checkpoint::TextFile,
    text::tokenizer::TokenizerConfig,
};

/// Placeholder for an answer, to find the text that follows it. No template contains it.
const ANSWER_PLACEHOLDER: &str = "(what was answered)";

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Message {
    /// Speaker: `system`, `user` or `assistant`; some templates have more roles.
    pub role: String,
    /// Text of the message.
    pub content: String,
}

impl Message {
    /// A message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into() }
    }

    /// A system prompt.
    pub fn system(content: impl Into<String>) -> Message {
        Message::new("system", content)
    }

    /// A message of the user.
    pub fn user(content: impl Into<String>) -> Message {
        Message::new("user", content)
    }

    /// An answer of the model.
    pub fn assistant(content: impl Into<String>) -> Message {
        Message::new("assistant", content)
    }
}

/// Variables of a template besides the messages.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ChatOptions {
    /// Whether the model thinks before it answers, for templates with that option
    /// (`enable_thinking`, and `thinking` in DeepSeek's). Default: the template's default.
    pub thinking: Option<bool>,
    /// Further variables by the template's names (gpt-oss: `reasoning_effort`). They override all
    /// others.
    pub variables: serde_json::Map<String, serde_json::Value>,
}

setters!(ChatOptions {
    thinking: impl Into<Option<bool>>,
    variables: serde_json::Map<String, serde_json::Value>,
});

/// A chat template: Jinja with the Python methods and helpers that `transformers` provides
/// (`raise_exception`, `strftime_now` in UTC, `tojson` without HTML escapes, loop controls,
/// `{% generation %}`).
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    special_tokens: BTreeMap<String, String>,
    path: PathBuf,
}

impl ChatTemplate {
    /// Compiles a template. `special_tokens` become variables, such as `bos_token` with the value
    /// `<s>`; `path` is for error messages.
    ///
    /// # Errors
    /// [`Error::Text`] if the source is not a valid template.
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

    /// The template of a checkpoint: its `chat_template.jinja`, or else the template in
    /// `tokenizer_config.json`. `None` without either, see [`ChatTemplate::missing`].
    ///
    /// # Errors
    /// [`Error::Text`] if the source is not a valid template or not UTF-8.
    pub fn from_files(
        jinja: Option<&TextFile<'_>>,
        config: &TokenizerConfig,
    ) -> Result<Option<ChatTemplate>, Error> {
        let (source, path) = match (jinja, &config.chat_template) {
            (Some(TextFile { bytes, path }), _) => {
                (str::from_utf8(bytes).map_err(|e| advise(path, &e))?, path.as_path())
            }
            (None, Some(source)) => (source.as_str(), config.path.as_path()),
            (None, None) => return Ok(None),
        };
        ChatTemplate::new(source, path, &config.special_tokens).map(Some)
    }

    /// Error for a checkpoint in `folder` that lacks a template.
    pub fn missing(folder: &Path) -> Error {
        let problem = "the checkpoint has no chat template (chat_template.jinja, or chat_template \
                       in tokenizer_config.json); it may be a base model: --raw gives it the \
                       prompt unchanged";
        Error::Text { path: folder.to_path_buf(), problem: problem.into() }
    }

    /// Renders `messages`. With `add_generation_prompt` the text ends at the start of the
    /// assistant's answer.
    ///
    /// # Errors
    /// [`Error::Text`] if the template fails or rejects the messages (`raise_exception`), with its
    /// reason.
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
        // `transformers` always defines these two, and templates compare them with none.
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

    /// Renders the text after an answer: the end of the answer, `question`, and the start of the
    /// next answer.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; also if the template does not include answers verbatim.
    pub fn render_follow_up(&self, question: &str, options: &ChatOptions) -> Result<String, Error> {
        let messages = [
            Message::user("(a question)"),
            Message::assistant(ANSWER_PLACEHOLDER),
            Message::user(question),
        ];
        // The first match is the answer, even if the question contains the placeholder.
        match self.render(&messages, true, options)?.split_once(ANSWER_PLACEHOLDER) {
            Some((_, follow_up)) => Ok(follow_up.to_owned()),
            None => {
                let problem = "the chat template does not show previous answers, so a conversation \
                               cannot be continued; --raw runs without the template";
                Err(Error::Text { path: self.path.clone(), problem: problem.into() })
            }
        }
    }

    /// Compiles the template, once per answer: a compiled template borrows its source.
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

/// Jinja environment with the settings of `transformers`.
fn environment() -> Result<Environment<'static>, minijinja::Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(python::call_method);
    env.add_filter("tojson", python::tojson);
    env.add_test("iterable", python::is_iterable);
    env.add_test("sequence", python::is_sequence);
    env.add_function("raise_exception", python::raise_exception);
    env.add_function("strftime_now", python::strftime_now);
    Ok(env)
}
