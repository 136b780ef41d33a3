//! An answer with its prompt, and the hashes by which it is found.

use std::fmt::{self, Display};

use moeflux::{
    Message,
    text::{ToolCall, Turn},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

/// Most bytes of remembered turns. The least recently used ones are forgotten.
pub(crate) const TURNS_BYTES: usize = 24 << 20;

/// Bytes of an entry beside its text and tokens.
pub(super) const ENTRY_BYTES: usize = 256;

/// Whether clients of an API send the ids of calls back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CallIds {
    #[default]
    Kept,
    /// They are numbers that stand for lost ones.
    Dropped,
}

/// SHA-256 of a model and of the messages of a conversation, or of the id of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TurnHash([u8; 32]);

impl TurnHash {
    pub(crate) fn of_model(model: impl Display) -> Self {
        Self(Sha256::digest(model.to_string()).into())
    }

    /// Hash of the first call of an answer, by its random id.
    pub(super) fn call(self, id: &str) -> Self {
        self.with("call", [id])
    }

    /// Hash of the messages with this hash, and of the next one. Thoughts do not count, as a client
    /// may send them or not. Without `ids`, calls count by name and arguments.
    pub(super) fn message(self, message: &Message, ids: CallIds) -> Self {
        let Message { role, content, images, tool_calls, tool_call_id, .. } = message;
        let places = images.iter().map(|image| format!("{} {}", image.at, Self(image.digest)));
        let places: Vec<String> = places.collect();
        let before = match places.is_empty() {
            true => self,
            false => self.with("images", places.iter().map(String::as_str)),
        };
        if ids == CallIds::Kept {
            let calls = tool_calls.iter().map(|call| &*call.id);
            let texts = [role, content.trim(), tool_call_id.as_deref().unwrap_or_default()];
            return before.with("message", texts.into_iter().chain(calls));
        }
        let calls = tool_calls.iter().flat_map(|call| {
            // Clients write the same arguments in another order.
            let arguments = serde_json::from_str::<Value>(&call.arguments).map(|mut value| {
                value.sort_all_objects();
                value.to_string()
            });
            [call.name.clone(), arguments.unwrap_or_else(|_| call.arguments.clone())]
        });
        let calls: Vec<String> = calls.collect();
        let texts = [role, content.trim()].into_iter().chain(calls.iter().map(String::as_str));
        before.with("message without ids", texts)
    }

    fn with<'a>(self, kind: &str, texts: impl IntoIterator<Item = &'a str>) -> Self {
        let mut hasher = Sha256::new().chain_update(self.0).chain_update(kind);
        for text in texts {
            hasher.update((text.len() as u64).to_le_bytes());
            hasher.update(text);
        }
        Self(hasher.finalize().into())
    }
}

impl Display for TurnHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A prompt and its answer.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AnsweredTurn {
    pub(crate) message: Message,
    pub(crate) turn: Turn,
}

impl AnsweredTurn {
    /// Whether a client's message is this answer, with its thoughts or without.
    pub(super) fn is_same(&self, message: &Message, ids: CallIds) -> bool {
        let ours = &self.message;
        let is_same_call = |(a, b): (&ToolCall, &ToolCall)| {
            (ids == CallIds::Dropped || a.id == b.id)
                && a.name == b.name
                && same_json(&a.arguments, &b.arguments)
        };
        let thoughts = |message: &Message| message.reasoning_content.clone().unwrap_or_default();
        ours.content.trim() == message.content.trim()
            && ours.tool_calls.len() == message.tool_calls.len()
            && ours.tool_calls.iter().zip(&message.tool_calls).all(is_same_call)
            && (message.reasoning_content.is_none()
                || thoughts(ours).trim() == thoughts(message).trim())
    }

    /// Bytes in memory.
    pub(crate) fn bytes(&self) -> usize {
        let Message { content, reasoning_content, tool_calls, .. } = &self.message;
        let calls = tool_calls.iter().map(|c| c.id.len() + c.name.len() + c.arguments.len());
        let thoughts = reasoning_content.as_ref().map_or(0, String::len);
        self.turn.bytes() + content.len() + thoughts + calls.sum::<usize>() + ENTRY_BYTES
    }
}

/// Whether two texts are the same JSON, or the same text.
fn same_json(a: &str, b: &str) -> bool {
    let value = |text: &str| serde_json::from_str::<Value>(text).ok();
    a == b || value(a).is_some_and(|a| Some(a) == value(b))
}
