//! Messages of a conversation.

use minijinja::{Value, value::Serde};
use serde::{Deserialize, Serialize};

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Message {
    /// Speaker: `system`, `user` or `assistant`; some templates have more roles.
    pub role: String,
    /// Text of the message.
    pub content: String,
    /// Thoughts before the text of an answer, if it has any. Templates decide which of them the
    /// next prompt repeats.
    #[serde(
        default,
        alias = "reasoning",
        alias = "thinking",
        skip_serializing_if = "Option::is_none"
    )]
    pub reasoning_content: Option<String>,
}

impl Message {
    /// A message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into(), reasoning_content: None }
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

    /// The message with the thoughts before it; empty ones are none.
    #[must_use]
    pub fn reasoning(mut self, reasoning: impl Into<String>) -> Message {
        self.reasoning_content = Some(reasoning.into()).filter(|text| !text.is_empty());
        self
    }

    /// The message as templates see it. They look for thoughts under three names.
    pub(super) fn template_value(&self) -> Value {
        let Message { role, content, reasoning_content } = self;
        let reasoning = reasoning_content.as_deref();
        Value::from(Serde(TemplateMessage {
            role,
            content,
            reasoning_content: reasoning,
            reasoning,
            thinking: reasoning,
        }))
    }

    /// Bytes of the message.
    pub(super) fn len(&self) -> usize {
        self.role.len()
            + self.content.len()
            + self.reasoning_content.as_ref().map_or(0, String::len)
    }
}

/// Fields of a message in a template, in their order.
#[derive(Serialize)]
struct TemplateMessage<'a> {
    role: &'a str,
    content: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<&'a str>,
}
