//! Messages: events of a stream, and the whole answer as their fold.

use serde::Serialize;
use serde_json::Value;

use crate::{
    requests::{
        delta::{AnswerFinish, AnswerNote, AnswerUsage, Delta},
        respond::{Encoder, Fold},
    },
    transport::{error::ApiError, error_shape::ApiShape},
};

/// Event of a stream.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum MessageEvent {
    MessageStart {
        message: AnswerBlocks,
    },
    ContentBlockStart {
        index: usize,
        content_block: ContentBlock,
    },
    ContentBlockDelta {
        index: usize,
        delta: BlockDelta,
    },
    ContentBlockStop {
        index: usize,
    },
    Ping,
    MessageDelta {
        delta: MessageEnd,
        usage: MessageUsage,
        #[serde(skip_serializing_if = "Option::is_none")]
        moeflux: Option<AnswerNote>,
    },
    MessageStop,
}

/// Block of an answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum ContentBlock {
    Thinking { thinking: String, signature: String },
    Text { text: String },
    ToolUse { id: String, name: String, input: Value },
}

/// Part of a block.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(tag = "type")]
pub(crate) enum BlockDelta {
    #[serde(rename = "thinking_delta")]
    Thinking { thinking: String },
    #[serde(rename = "signature_delta")]
    Signature { signature: String },
    #[serde(rename = "text_delta")]
    Text { text: String },
    #[serde(rename = "input_json_delta")]
    Input { partial_json: String },
}

/// Reason for the end.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct MessageEnd {
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
}

/// Tokens of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub(crate) struct MessageUsage {
    /// Tokens of the prompt that were computed.
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    /// Tokens of the prompt that were not.
    cache_read_input_tokens: usize,
    output_tokens: usize,
}

impl From<AnswerUsage> for MessageUsage {
    fn from(usage: AnswerUsage) -> Self {
        Self {
            input_tokens: usage.prompt - usage.cached,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: usage.cached,
            output_tokens: usage.generated,
        }
    }
}

/// A whole answer: the fold of its events.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct AnswerBlocks {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    role: &'static str,
    model: String,
    content: Vec<ContentBlock>,
    #[serde(flatten)]
    end: MessageEnd,
    usage: MessageUsage,
    #[serde(skip_serializing_if = "Option::is_none")]
    moeflux: Option<AnswerNote>,
    /// Arguments so far of the last call.
    #[serde(skip)]
    arguments: String,
}

impl Fold<MessageEvent> for AnswerBlocks {
    fn add(&mut self, event: MessageEvent) {
        match event {
            MessageEvent::MessageStart { message } => *self = message,
            MessageEvent::ContentBlockStart { content_block, .. } => {
                self.content.push(content_block);
            }
            MessageEvent::ContentBlockDelta { delta, .. } => match (self.content.last_mut(), delta)
            {
                (
                    Some(ContentBlock::Thinking { thinking, .. }),
                    BlockDelta::Thinking { thinking: part },
                ) => thinking.push_str(&part),
                (
                    Some(ContentBlock::Thinking { signature, .. }),
                    BlockDelta::Signature { signature: part },
                ) => signature.push_str(&part),
                (Some(ContentBlock::Text { text }), BlockDelta::Text { text: part }) => {
                    text.push_str(&part);
                }
                (_, BlockDelta::Input { partial_json }) => {
                    self.arguments.push_str(&partial_json);
                }
                _ => {}
            },
            MessageEvent::ContentBlockStop { .. } => {
                let arguments = std::mem::take(&mut self.arguments);
                if let Some(ContentBlock::ToolUse { input, .. }) = self.content.last_mut()
                    && let Ok(object) = serde_json::from_str(&arguments)
                {
                    *input = object;
                }
            }
            MessageEvent::MessageDelta { delta, usage, moeflux } => {
                (self.end, self.usage, self.moeflux) = (delta, usage, moeflux);
            }
            MessageEvent::Ping | MessageEvent::MessageStop => {}
        }
    }
}

/// Kind of the block that is open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpenBlock {
    Thinking,
    Text,
    Call,
}

/// Encoder of one answer. Its blocks come one after another.
#[derive(Clone, Debug)]
pub(crate) struct MessageEncoder {
    id: String,
    model: String,
    /// Blocks so far.
    blocks: usize,
    open: Option<OpenBlock>,
    /// White space that begins a text block if text follows.
    held: String,
    /// Whether there is a block besides thoughts, without which clients take an answer for broken.
    has_content: bool,
    events: Vec<MessageEvent>,
}

impl MessageEncoder {
    pub(crate) fn new(id: String, model: String) -> Self {
        Self {
            id,
            model,
            blocks: 0,
            open: None,
            held: String::new(),
            has_content: false,
            events: Vec::new(),
        }
    }

    /// Opens a block, unless one of its kind is open that goes on.
    fn open(&mut self, kind: OpenBlock, block: ContentBlock) {
        if self.open == Some(kind) && kind != OpenBlock::Call {
            return;
        }
        self.close();
        self.has_content |= kind != OpenBlock::Thinking;
        let index = self.blocks;
        self.events.push(MessageEvent::ContentBlockStart { index, content_block: block });
        self.open = Some(kind);
    }

    fn part(&mut self, delta: BlockDelta) {
        self.events.push(MessageEvent::ContentBlockDelta { index: self.blocks, delta });
    }

    fn close(&mut self) {
        self.held.clear();
        let Some(kind) = self.open.take() else { return };
        if kind == OpenBlock::Thinking {
            // Clients send it back as it is, and refuse thoughts without one.
            self.part(BlockDelta::Signature { signature: self.id.clone() });
        }
        self.events.push(MessageEvent::ContentBlockStop { index: self.blocks });
        self.blocks += 1;
    }

    fn text(&mut self, text: String) {
        if self.open != Some(OpenBlock::Text) && text.trim().is_empty() {
            self.held.push_str(&text);
            return;
        }
        let text = std::mem::take(&mut self.held) + &text;
        self.open(OpenBlock::Text, ContentBlock::Text { text: String::new() });
        self.part(BlockDelta::Text { text });
    }

    fn end(&mut self, finish: AnswerFinish, usage: AnswerUsage) {
        self.close();
        if !self.has_content {
            self.open(OpenBlock::Text, ContentBlock::Text { text: String::new() });
            self.close();
        }
        let stop_reason = match &finish {
            AnswerFinish::Stop | AnswerFinish::Cancelled => "end_turn",
            AnswerFinish::StopString(_) => "stop_sequence",
            AnswerFinish::Length => "max_tokens",
            AnswerFinish::Context => "model_context_window_exceeded",
            AnswerFinish::Calls => "tool_use",
        };
        let stop_sequence = match finish {
            AnswerFinish::StopString(stop) => Some(stop),
            _ => None,
        };
        let delta = MessageEnd { stop_reason: Some(stop_reason), stop_sequence };
        let moeflux = AnswerNote::new(&usage);
        self.events.push(MessageEvent::MessageDelta { delta, usage: usage.into(), moeflux });
        self.events.push(MessageEvent::MessageStop);
    }
}

impl Encoder for MessageEncoder {
    type Event = MessageEvent;
    type Whole = AnswerBlocks;

    fn on(&mut self, _choice: usize, delta: Delta) -> Vec<MessageEvent> {
        match delta {
            Delta::Start(usage) => {
                let message = AnswerBlocks {
                    id: self.id.clone(),
                    kind: "message",
                    role: "assistant",
                    model: self.model.clone(),
                    usage: usage.into(),
                    ..AnswerBlocks::default()
                };
                self.events.push(MessageEvent::MessageStart { message });
                self.events.push(MessageEvent::Ping);
            }
            Delta::Reasoning(thinking) => {
                let block =
                    ContentBlock::Thinking { thinking: String::new(), signature: String::new() };
                self.open(OpenBlock::Thinking, block);
                self.part(BlockDelta::Thinking { thinking });
            }
            // This API has none.
            Delta::Usage(_) | Delta::Token(_) | Delta::Logprobs(_) => {}
            Delta::Text(text) => self.text(text),
            Delta::CallStart { id, name, .. } => {
                let input = Value::Object(serde_json::Map::new());
                self.open(OpenBlock::Call, ContentBlock::ToolUse { id, name, input });
            }
            Delta::CallArguments { json, .. } => {
                self.part(BlockDelta::Input { partial_json: json });
            }
            Delta::CallEnd { .. } => self.close(),
            Delta::End { finish, usage } => self.end(finish, usage),
        }
        std::mem::take(&mut self.events)
    }

    fn name(event: &MessageEvent) -> Option<&'static str> {
        Some(match event {
            MessageEvent::MessageStart { .. } => "message_start",
            MessageEvent::ContentBlockStart { .. } => "content_block_start",
            MessageEvent::ContentBlockDelta { .. } => "content_block_delta",
            MessageEvent::ContentBlockStop { .. } => "content_block_stop",
            MessageEvent::Ping => "ping",
            MessageEvent::MessageDelta { .. } => "message_delta",
            MessageEvent::MessageStop => "message_stop",
        })
    }

    fn ping(&mut self) -> String {
        "event: ping\ndata: {\"type\":\"ping\"}\n\n".to_owned()
    }

    fn early_error(error: &ApiError) -> String {
        format!("event: error\ndata: {}\n\n", error.to_json(ApiShape::Anthropic, None))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::requests::respond::testing::parallel_calls;

    fn encode(deltas: Vec<Delta>) -> Vec<MessageEvent> {
        let mut encoder = MessageEncoder::new("msg_1".into(), "m".into());
        deltas.into_iter().flat_map(|delta| encoder.on(0, delta)).collect()
    }

    fn fold(events: Vec<MessageEvent>) -> Value {
        let mut whole = AnswerBlocks::default();
        events.into_iter().for_each(|event| whole.add(event));
        json!(whole)
    }

    #[test]
    fn blocks_of_thoughts_text_and_calls_come_one_after_another() {
        let events = encode(parallel_calls());
        let short: Vec<Value> = events[2..].iter().map(|event| json!(event)).collect();
        let event = |kind: &str, index: usize, name: &str, value: Value| {
            let mut event = json!({"type": kind, "index": index});
            event[name] = value;
            event
        };
        let start = |index, block| event("content_block_start", index, "content_block", block);
        let delta = |index, delta| event("content_block_delta", index, "delta", delta);
        let stop = |index: usize| json!({"type": "content_block_stop", "index": index});
        let input = |json: &str| json!({"type": "input_json_delta", "partial_json": json});
        let usage = json!({
            "input_tokens": 6, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4,
            "output_tokens": 5,
        });
        assert_eq!(
            short,
            [
                start(0, json!({"type": "thinking", "thinking": "", "signature": ""})),
                delta(0, json!({"type": "thinking_delta", "thinking": "Hm."})),
                delta(0, json!({"type": "signature_delta", "signature": "msg_1"})),
                stop(0),
                start(1, json!({"type": "text", "text": ""})),
                delta(1, json!({"type": "text_delta", "text": "Let me look.\n"})),
                stop(1),
                start(2, json!({"type": "tool_use", "id": "call_a", "name": "list", "input": {}})),
                delta(2, input("{\"path\": ")),
                delta(2, input("\".\"}")),
                stop(2),
                start(3, json!({"type": "tool_use", "id": "call_b", "name": "read", "input": {}})),
                delta(3, input("{}")),
                stop(3),
                json!({
                    "type": "message_delta", "usage": usage,
                    "delta": {"stop_reason": "tool_use", "stop_sequence": null},
                }),
                json!({"type": "message_stop"}),
            ]
        );
        assert_eq!(json!(events[1]), json!({"type": "ping"}));
        let first = json!(events[0]);
        assert_eq!(
            (&first["type"], &first["message"]["content"]),
            (&json!("message_start"), &json!([]))
        );
        assert_eq!(
            fold(events),
            json!({
                "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "msg_1"},
                    {"type": "text", "text": "Let me look.\n"},
                    {"type": "tool_use", "id": "call_a", "name": "list", "input": {"path": "."}},
                    {"type": "tool_use", "id": "call_b", "name": "read", "input": {}},
                ],
                "stop_reason": "tool_use", "stop_sequence": null, "usage": usage,
            })
        );
    }

    #[test]
    fn an_answer_always_has_a_block_besides_thoughts() {
        let end = |finish| Delta::End { finish, usage: AnswerUsage::default() };
        let start = || Delta::Start(AnswerUsage::default());
        let thoughts = || Delta::Reasoning("Hm".into());
        let text = |text: &str| Delta::Text(text.into());
        let whole =
            fold(encode(vec![start(), thoughts(), text("\n\n"), end(AnswerFinish::Length)]));
        assert_eq!(whole["content"][1], json!({"type": "text", "text": ""}));
        assert_eq!(whole["stop_reason"], "max_tokens");
        let stop = AnswerFinish::StopString("END".into());
        let deltas = vec![start(), text("\n"), text("\n a"), text("\n"), end(stop)];
        let whole = fold(encode(deltas));
        assert_eq!(whole["content"], json!([{"type": "text", "text": "\n\n a\n"}]));
        assert_eq!(
            (&whole["stop_reason"], &whole["stop_sequence"]),
            (&json!("stop_sequence"), &json!("END"))
        );
    }
}
