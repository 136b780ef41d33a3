//! Messages of a conversation.

use serde::{Deserialize, Serialize};

use super::tools::ToolCall;

/// Image in the content of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MessageImage {
    /// Byte offset in the content before which the image is.
    pub at: usize,
    /// Tokens that stand for it in a prompt.
    pub tokens: usize,
    /// SHA-256 of its pixels as the model sees them.
    pub digest: [u8; 32],
}

/// One message of a conversation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Message {
    /// Speaker: `system`, `user`, `assistant` or `tool`; some templates have more roles.
    pub role: String,
    /// Text of the message.
    pub content: String,
    /// Images in the content, ascending by offset.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<MessageImage>,
    /// Thoughts before the text of an answer, if it has any. Templates decide which of them the
    /// next prompt repeats.
    #[serde(
        default,
        alias = "reasoning",
        alias = "thinking",
        skip_serializing_if = "Option::is_none"
    )]
    pub reasoning_content: Option<String>,
    /// Calls of tools behind the text of an answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call to which a message of the role `tool` is the result. Without it, results are those
    /// of the calls in their order.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// Name of the speaker, or of the tool.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl Message {
    /// A message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into(), ..Message::default() }
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

    /// The result of a call.
    pub fn tool(tool_call_id: impl Into<String>, content: impl Into<String>) -> Message {
        Message { tool_call_id: Some(tool_call_id.into()), ..Message::new("tool", content) }
    }

    /// The message with the thoughts before it; empty ones are none.
    #[must_use]
    pub fn reasoning(mut self, reasoning: impl Into<String>) -> Message {
        self.reasoning_content = Some(reasoning.into()).filter(|text| !text.is_empty());
        self
    }

    /// The message with calls of tools behind it.
    #[must_use]
    pub fn tool_calls(mut self, tool_calls: Vec<ToolCall>) -> Message {
        self.tool_calls = tool_calls;
        self
    }

    /// The message with images in its content.
    #[must_use]
    pub fn images(mut self, images: Vec<MessageImage>) -> Message {
        self.images = images;
        self
    }

    /// The message with the name of its speaker, or of its tool.
    #[must_use]
    pub fn name(mut self, name: impl Into<String>) -> Message {
        self.name = Some(name.into());
        self
    }

    /// All strings of the message.
    pub(crate) fn strings(&self) -> impl Iterator<Item = &str> {
        let calls = self.tool_calls.iter().flat_map(|c| [&c.id, &c.name, &c.arguments]);
        let others = [&self.reasoning_content, &self.tool_call_id, &self.name];
        [&self.role, &self.content]
            .into_iter()
            .chain(others.into_iter().flatten())
            .chain(calls)
            .map(String::as_str)
    }
}
