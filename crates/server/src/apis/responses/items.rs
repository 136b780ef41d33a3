//! Items of an answer, the response that has them, and the events of its stream.

use moeflux::{Message, text::ToolCall};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::{
    apis::openai::logprobs::ContentToken,
    requests::delta::{AnswerNote, AnswerUsage},
};

/// Start of encrypted thoughts. They are text, as the client may read it anyway.
const ENCRYPTED: &str = "moeflux:";

/// State of a response or an item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ItemStatus {
    #[default]
    InProgress,
    Completed,
    Incomplete,
    Failed,
    Cancelled,
}

/// Item of an answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum OutputItem {
    Reasoning {
        id: String,
        status: ItemStatus,
        /// The thoughts, if a summary is requested.
        summary: Vec<OutputPart>,
        content: Vec<OutputPart>,
        encrypted_content: Option<String>,
    },
    Message {
        id: String,
        status: ItemStatus,
        role: &'static str,
        content: Vec<OutputPart>,
    },
    FunctionCall {
        id: String,
        status: ItemStatus,
        call_id: String,
        name: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        arguments: String,
    },
}

/// Part of an item.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type")]
pub(super) enum OutputPart {
    #[serde(rename = "summary_text")]
    Summary { text: String },
    #[serde(rename = "reasoning_text")]
    Reasoning { text: String },
    #[serde(rename = "output_text")]
    Output { text: String, annotations: [(); 0], logprobs: Vec<ContentToken> },
}

/// A response: a whole answer, or as much of it as there is.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct ResponseObject {
    pub(super) id: String,
    pub(super) object: &'static str,
    pub(super) created_at: u64,
    pub(super) status: ItemStatus,
    pub(super) error: Option<ResponseError>,
    pub(super) incomplete_details: Option<IncompleteReason>,
    pub(super) model: String,
    pub(super) output: Vec<OutputItem>,
    pub(super) usage: Option<ResponseUsage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) moeflux: Option<AnswerNote>,
    /// Fields of the request.
    #[serde(flatten)]
    pub(super) request: Map<String, Value>,
}

/// Failure of an answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct ResponseError {
    pub(super) code: &'static str,
    pub(super) message: String,
}

/// Reason for an incomplete answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct IncompleteReason {
    pub(super) reason: &'static str,
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct ResponseUsage {
    input_tokens: usize,
    input_tokens_details: InputTokens,
    output_tokens: usize,
    output_tokens_details: OutputTokens,
    total_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct InputTokens {
    /// Tokens that were not computed.
    cached_tokens: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct OutputTokens {
    reasoning_tokens: usize,
}

/// Event of a stream. Which fields it has depends on its kind.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct ResponseEvent {
    #[serde(rename = "type")]
    pub(super) kind: &'static str,
    /// Number of the event within its stream, from 0.
    pub(super) sequence_number: u64,
    #[serde(flatten)]
    pub(super) place: EventPlace,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) response: Option<ResponseObject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) item: Option<OutputItem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) part: Option<OutputPart>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) delta: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) logprobs: Option<Vec<ContentToken>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) arguments: Option<String>,
}

/// Item and part of an event.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct EventPlace {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) item_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) output_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content_index: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) summary_index: Option<usize>,
}

impl From<AnswerUsage> for ResponseUsage {
    fn from(usage: AnswerUsage) -> Self {
        Self {
            input_tokens: usage.prompt,
            input_tokens_details: InputTokens { cached_tokens: usage.cached },
            output_tokens: usage.generated,
            output_tokens_details: OutputTokens { reasoning_tokens: usage.reasoning },
            total_tokens: usage.prompt + usage.generated,
        }
    }
}

impl OutputPart {
    /// Text of the model.
    pub(super) fn output(text: String, logprobs: Vec<ContentToken>) -> Self {
        Self::Output { text, annotations: [], logprobs }
    }

    pub(super) fn text(&self) -> &str {
        let (Self::Summary { text } | Self::Reasoning { text } | Self::Output { text, .. }) = self;
        text
    }

    /// Appends text.
    pub(super) fn push(&mut self, more: &str) {
        let (Self::Summary { text } | Self::Reasoning { text } | Self::Output { text, .. }) = self;
        text.push_str(more);
    }
}

impl OutputItem {
    pub(super) fn id(&self) -> &str {
        match self {
            Self::Reasoning { id, .. } | Self::Message { id, .. } => id,
            Self::FunctionCall { id, .. } => id,
        }
    }

    pub(super) fn set_status(&mut self, new: ItemStatus) {
        let (Self::Reasoning { status, .. }
        | Self::Message { status, .. }
        | Self::FunctionCall { status, .. }) = self;
        *status = new;
    }
}

impl ResponseObject {
    /// The answer as a message of the next conversation. Calls that were cut off are not in it.
    pub(super) fn message(&self) -> Message {
        let mut message = Message::assistant("");
        for item in &self.output {
            match item {
                OutputItem::Reasoning { content, .. } => {
                    let thoughts = message.reasoning_content.get_or_insert_default();
                    content.iter().for_each(|part| thoughts.push_str(part.text()));
                }
                OutputItem::Message { content, .. } => {
                    content.iter().for_each(|part| message.content.push_str(part.text()));
                }
                OutputItem::FunctionCall {
                    status: ItemStatus::Completed,
                    call_id,
                    name,
                    arguments,
                    ..
                } => {
                    let (id, name, arguments) = (call_id.clone(), name.clone(), arguments.clone());
                    message.tool_calls.push(ToolCall { id, name, arguments });
                }
                OutputItem::FunctionCall { .. } => {}
            }
        }
        message
    }
}

/// Thoughts in the form in which stateless clients send them back.
pub(super) fn encrypted(thoughts: &str) -> String {
    format!("{ENCRYPTED}{thoughts}")
}

/// Thoughts of [`encrypted`]; `None` for those of other servers.
pub(super) fn decrypted(content: &str) -> Option<&str> {
    content.strip_prefix(ENCRYPTED)
}
