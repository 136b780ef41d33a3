//! Chat completions: chunks of a stream, and the whole answer as their fold.

use moeflux::Finish;
use serde::Serialize;

use crate::answer::{Delta, TokenUsage};

/// Fields that all chunks of an answer share.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct AnswerHead {
    pub(crate) id: String,
    /// Seconds since 1970.
    pub(crate) created: u64,
    pub(crate) model: String,
}

/// Chunk of a stream.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ChatChunk {
    object: &'static str,
    #[serde(flatten)]
    head: AnswerHead,
    /// One, or none in the chunk with the usage.
    choices: Vec<ChunkChoice>,
    /// Absent unless requested; `null` in all chunks but the last one.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<TokenUsage>>,
}

#[derive(Clone, Debug, Serialize)]
struct ChunkChoice {
    index: u32,
    delta: ChunkDelta,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

#[derive(Clone, Debug, Default, Serialize)]
struct ChunkDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
}

/// Encoder of one answer.
#[derive(Clone, Debug)]
pub(crate) struct ChatEncoder {
    head: AnswerHead,
    include_usage: bool,
}

impl ChatEncoder {
    pub(crate) fn new(head: AnswerHead, include_usage: bool) -> Self {
        Self { head, include_usage }
    }

    /// The first chunk, which has the role.
    pub(crate) fn start(&self) -> ChatChunk {
        let delta = ChunkDelta {
            role: Some("assistant"),
            content: Some(String::new()),
            ..ChunkDelta::default()
        };
        self.chunk(delta, None)
    }

    /// Chunks of a delta.
    pub(crate) fn on(&self, delta: Delta) -> Vec<ChatChunk> {
        match delta {
            Delta::Reasoning(thoughts) => {
                let delta =
                    ChunkDelta { reasoning_content: Some(thoughts), ..ChunkDelta::default() };
                vec![self.chunk(delta, None)]
            }
            Delta::Text(text) => {
                vec![self.chunk(ChunkDelta { content: Some(text), ..ChunkDelta::default() }, None)]
            }
            Delta::End { finish, usage } => {
                let end = self.chunk(ChunkDelta::default(), Some(finish_reason(finish)));
                let usage = self.include_usage.then(|| ChatChunk {
                    choices: Vec::new(),
                    usage: Some(Some(usage)),
                    ..end.clone()
                });
                [Some(end), usage].into_iter().flatten().collect()
            }
        }
    }

    fn chunk(&self, delta: ChunkDelta, finish_reason: Option<&'static str>) -> ChatChunk {
        ChatChunk {
            object: "chat.completion.chunk",
            head: self.head.clone(),
            choices: vec![ChunkChoice { index: 0, delta, logprobs: None, finish_reason }],
            usage: self.include_usage.then_some(None),
        }
    }
}

/// Reason for the end, in OpenAI's words.
fn finish_reason(finish: Finish) -> &'static str {
    match finish {
        Finish::EndToken | Finish::StopString | Finish::Cancelled => "stop",
        Finish::MaxTokens | Finish::Context => "length",
    }
}

/// A whole answer: the fold of its chunks.
#[derive(Debug, Serialize)]
pub(crate) struct ChatCompletion {
    object: &'static str,
    #[serde(flatten)]
    head: AnswerHead,
    choices: [ChatChoice; 1],
    usage: TokenUsage,
}

#[derive(Debug, Serialize)]
struct ChatChoice {
    index: u32,
    message: AnswerMessage,
    logprobs: Option<()>,
    finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
struct AnswerMessage {
    role: &'static str,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    content: String,
}

impl ChatCompletion {
    /// The answer that starts with `first`.
    pub(crate) fn new(first: ChatChunk) -> Self {
        let mut completion = Self {
            object: "chat.completion",
            head: first.head.clone(),
            choices: [ChatChoice {
                index: 0,
                message: AnswerMessage::default(),
                logprobs: None,
                finish_reason: None,
            }],
            usage: TokenUsage::default(),
        };
        completion.add(first);
        completion
    }

    /// Adds the next chunk.
    pub(crate) fn add(&mut self, chunk: ChatChunk) {
        let [whole] = &mut self.choices;
        for choice in chunk.choices {
            whole.message.role = choice.delta.role.unwrap_or(whole.message.role);
            let thoughts = choice.delta.reasoning_content.unwrap_or_default();
            whole.message.reasoning_content.push_str(&thoughts);
            whole.message.content.push_str(&choice.delta.content.unwrap_or_default());
            whole.finish_reason = choice.finish_reason.or(whole.finish_reason);
        }
        self.usage = chunk.usage.flatten().unwrap_or(self.usage);
    }
}
