//! Chat completions: chunks of a stream, and the whole answer as their fold.

use serde::Serialize;

use super::{
    logprobs::ContentLogprobs,
    usage::{AnswerTimings, PromptProgress, TokenUsage, UsageSum},
};
use crate::{
    requests::{
        answer_head::AnswerHead,
        ask::AskedReports,
        delta::{AnswerFinish, AnswerNote, Delta, TokenEntry},
        models::ServedModel,
        prompt::Prompt,
        respond::{Encoder, Fold},
    },
    transport::error::ApiError,
};

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
    #[serde(flatten)]
    reports: ChunkReports,
}

/// Fields of llama.cpp's server, and our own, in a chunk or a whole answer.
#[derive(Clone, Debug, Default, Serialize)]
struct ChunkReports {
    /// In the last chunk, or as the request asks for them.
    #[serde(skip_serializing_if = "Option::is_none")]
    timings: Option<AnswerTimings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_progress: Option<PromptProgress>,
    #[serde(rename = "__verbose", skip_serializing_if = "Option::is_none")]
    verbose: Option<VerbosePrompt>,
    /// At the end of an answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    moeflux: Option<AnswerNote>,
}

/// Text of the prompt as the model read it.
#[derive(Clone, Debug, Serialize)]
struct VerbosePrompt {
    prompt: String,
}

#[derive(Clone, Debug, Serialize)]
struct ChunkChoice {
    index: usize,
    delta: ChunkDelta,
    logprobs: Option<ContentLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Clone, Debug, Default, Serialize)]
struct ChunkDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    /// Thoughts, under both names that clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ChunkCall>,
}

/// Part of a call. Id, type and name are in its first part only.
#[derive(Clone, Debug, Serialize)]
struct ChunkCall {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: ChunkFunction,
}

#[derive(Clone, Debug, Serialize)]
struct ChunkFunction {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    arguments: String,
}

/// Encoder of one answer.
#[derive(Clone, Debug)]
pub(crate) struct ChatEncoder {
    head: AnswerHead,
    include_usage: bool,
    sum: UsageSum,
    /// Log-probabilities for the next chunk of each choice.
    logprobs: Vec<Vec<TokenEntry>>,
    asked: AskedReports,
    /// Reports for the next chunk.
    reports: ChunkReports,
    /// Whether the last chunk has the text of the prompt.
    is_verbose: bool,
    verbose: Option<VerbosePrompt>,
}

impl ChatEncoder {
    /// Encoder of an answer with `choices` choices.
    pub(crate) fn new(head: AnswerHead, choices: usize, include_usage: bool) -> Self {
        Self {
            head,
            include_usage,
            sum: UsageSum::new(1, choices),
            logprobs: vec![Vec::new(); choices],
            asked: AskedReports::default(),
            reports: ChunkReports::default(),
            is_verbose: false,
            verbose: None,
        }
    }

    /// Encoder that reports as `asked`, and the text of the prompt at the end.
    pub(super) fn reports(self, asked: AskedReports, is_verbose: bool) -> Self {
        Self { asked, is_verbose, ..self }
    }

    fn chunk(
        &mut self,
        index: usize,
        delta: ChunkDelta,
        finish_reason: Option<&'static str>,
    ) -> ChatChunk {
        let logprobs = ContentLogprobs::new(std::mem::take(&mut self.logprobs[index]));
        ChatChunk {
            object: "chat.completion.chunk",
            head: self.head.clone(),
            choices: vec![ChunkChoice { index, delta, logprobs, finish_reason }],
            usage: self.include_usage.then_some(None),
            reports: std::mem::take(&mut self.reports),
        }
    }
}

impl Encoder for ChatEncoder {
    type Event = ChatChunk;
    type Whole = ChatCompletion;

    const END: &'static str = "data: [DONE]\n\n";

    fn prompts(&mut self, model: &ServedModel, prompts: &[Prompt]) -> Result<(), ApiError> {
        if self.is_verbose
            && let Some(prompt) = prompts.first()
        {
            let prompt = model.text()?.tokenizer().decode(&prompt.tokens, false)?;
            self.verbose = Some(VerbosePrompt { prompt });
        }
        Ok(())
    }

    fn on(&mut self, choice: usize, delta: Delta) -> Vec<ChatChunk> {
        let part = match delta {
            Delta::Start(_) => ChunkDelta {
                role: Some("assistant"),
                content: Some(String::new()),
                ..ChunkDelta::default()
            },
            Delta::Usage(usage) if usage.generated > 0 => {
                self.reports.timings = self.asked.timings.then_some(usage.into());
                return Vec::new();
            }
            Delta::Usage(usage) => {
                self.reports.prompt_progress = self.asked.progress.then_some(usage.into());
                if !self.asked.progress {
                    return Vec::new();
                }
                ChunkDelta::default()
            }
            Delta::Reasoning(thoughts) => ChunkDelta {
                reasoning_content: Some(thoughts.clone()),
                reasoning: Some(thoughts),
                ..ChunkDelta::default()
            },
            Delta::Text(text) => ChunkDelta { content: Some(text), ..ChunkDelta::default() },
            Delta::CallStart { index, id, name } => {
                let function = ChunkFunction { name: Some(name), arguments: String::new() };
                let call = ChunkCall { index, id: Some(id), kind: Some("function"), function };
                ChunkDelta { tool_calls: vec![call], ..ChunkDelta::default() }
            }
            Delta::CallArguments { index, json } => {
                let function = ChunkFunction { name: None, arguments: json };
                let call = ChunkCall { index, id: None, kind: None, function };
                ChunkDelta { tool_calls: vec![call], ..ChunkDelta::default() }
            }
            Delta::Logprobs(entries) => {
                self.logprobs[choice].extend(entries);
                return Vec::new();
            }
            Delta::CallEnd { .. } | Delta::Token(_) => return Vec::new(),
            Delta::End { finish, usage } => {
                self.reports.timings = Some(usage.into());
                self.reports.verbose = self.verbose.clone();
                self.reports.moeflux = AnswerNote::new(&usage);
                let end = self.chunk(choice, ChunkDelta::default(), Some(finish_reason(&finish)));
                let sum = self.sum.add(choice, usage).filter(|_| self.include_usage);
                let usage = sum.map(|sum| ChatChunk {
                    choices: Vec::new(),
                    usage: Some(Some(sum)),
                    ..end.clone()
                });
                return [Some(end), usage].into_iter().flatten().collect();
            }
        };
        vec![self.chunk(choice, part, None)]
    }
}

/// Reason for the end, in OpenAI's words.
pub(super) fn finish_reason(finish: &AnswerFinish) -> &'static str {
    match finish {
        AnswerFinish::Stop | AnswerFinish::StopString(_) | AnswerFinish::Cancelled => "stop",
        AnswerFinish::Length | AnswerFinish::Context => "length",
        AnswerFinish::Calls => "tool_calls",
    }
}

/// A whole answer: the fold of its chunks.
#[derive(Debug, Default, Serialize)]
pub(crate) struct ChatCompletion {
    object: &'static str,
    #[serde(flatten)]
    head: AnswerHead,
    choices: Vec<ChatChoice>,
    usage: TokenUsage,
    #[serde(flatten)]
    reports: ChunkReports,
}

#[derive(Debug, Default, Serialize)]
struct ChatChoice {
    index: usize,
    message: AnswerMessage,
    logprobs: Option<ContentLogprobs>,
    finish_reason: Option<&'static str>,
}

#[derive(Debug, Default, Serialize)]
struct AnswerMessage {
    role: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning: Option<String>,
    content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<AnswerCall>,
}

#[derive(Debug, Serialize)]
struct AnswerCall {
    id: String,
    #[serde(rename = "type")]
    kind: &'static str,
    function: CalledFunction,
}

#[derive(Debug, Serialize)]
struct CalledFunction {
    name: String,
    arguments: String,
}

impl Fold<ChatChunk> for ChatCompletion {
    fn add(&mut self, chunk: ChatChunk) {
        (self.object, self.head) = ("chat.completion", chunk.head);
        // The last chunk has the end of the answer.
        let moeflux = chunk.reports.moeflux.or(self.reports.moeflux);
        self.reports = ChunkReports { prompt_progress: None, moeflux, ..chunk.reports };
        for choice in chunk.choices {
            while self.choices.len() <= choice.index {
                let index = self.choices.len();
                self.choices.push(ChatChoice { index, ..ChatChoice::default() });
            }
            let whole = &mut self.choices[choice.index];
            whole.message.add(choice.delta);
            ContentLogprobs::add(&mut whole.logprobs, choice.logprobs);
            whole.finish_reason = choice.finish_reason.or(whole.finish_reason);
        }
        self.usage = chunk.usage.flatten().unwrap_or(self.usage);
    }
}

impl AnswerMessage {
    fn add(&mut self, delta: ChunkDelta) {
        self.role = delta.role.unwrap_or(self.role);
        for (whole, part) in [
            (&mut self.reasoning_content, delta.reasoning_content),
            (&mut self.reasoning, delta.reasoning),
        ] {
            if let Some(part) = part {
                whole.get_or_insert_default().push_str(&part);
            }
        }
        self.content.push_str(&delta.content.unwrap_or_default());
        for ChunkCall { id, function: ChunkFunction { name, arguments }, .. } in delta.tool_calls {
            match (id, name) {
                (Some(id), Some(name)) => self.tool_calls.push(AnswerCall {
                    id,
                    kind: "function",
                    function: CalledFunction { name, arguments },
                }),
                // The calls of an answer come one after another.
                _ => self.tool_calls.last_mut().into_iter().for_each(|call| {
                    call.function.arguments.push_str(&arguments);
                }),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::requests::{delta::AnswerUsage, respond::testing::parallel_calls};

    fn encoder(choices: usize) -> ChatEncoder {
        let head = AnswerHead { id: "chatcmpl-1".into(), ..AnswerHead::default() };
        ChatEncoder::new(head, choices, true)
    }

    #[test]
    fn parallel_calls_have_their_index_and_their_own_arguments() {
        let mut encoder = encoder(1);
        let chunks: Vec<ChatChunk> =
            parallel_calls().into_iter().flat_map(|delta| encoder.on(0, delta)).collect();
        let deltas: Vec<Value> =
            chunks.iter().filter_map(|chunk| Some(json!(chunk.choices.first()?.delta))).collect();
        let function = |name: &str| json!({"name": name, "arguments": ""});
        assert_eq!(
            deltas,
            [
                json!({"role": "assistant", "content": ""}),
                json!({"reasoning_content": "Hm.", "reasoning": "Hm."}),
                json!({"content": "Let me look.\n"}),
                json!({"tool_calls": [{"index": 0, "id": "call_a", "type": "function",
                    "function": function("list")}]}),
                json!({"tool_calls": [{"index": 0, "function": {"arguments": "{\"path\": "}}]}),
                json!({"tool_calls": [{"index": 0, "function": {"arguments": "\".\"}"}}]}),
                json!({"tool_calls": [{"index": 1, "id": "call_b", "type": "function",
                    "function": function("read")}]}),
                json!({"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}),
                json!({}),
            ]
        );
        let mut whole = ChatCompletion::default();
        chunks.into_iter().for_each(|chunk| whole.add(chunk));
        let whole = json!(whole);
        assert_eq!(whole["choices"][0]["finish_reason"], "tool_calls");
        assert_eq!(
            whole["choices"][0]["message"],
            json!({
                "role": "assistant", "reasoning_content": "Hm.", "reasoning": "Hm.",
                "content": "Let me look.\n",
                "tool_calls": [
                    {"id": "call_a", "type": "function",
                        "function": {"name": "list", "arguments": "{\"path\": \".\"}"}},
                    {"id": "call_b", "type": "function",
                        "function": {"name": "read", "arguments": "{}"}},
                ],
            })
        );
        assert_eq!(
            whole["usage"],
            json!({
                "prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15,
                "prompt_tokens_details": {"cached_tokens": 4},
                "completion_tokens_details": {"reasoning_tokens": 1},
            })
        );
    }

    #[test]
    fn choices_are_folded_by_index_and_share_the_tokens_of_their_prompt() {
        let mut encoder = encoder(2);
        let usage = AnswerUsage { prompt: 10, generated: 2, ..AnswerUsage::default() };
        let mut whole = ChatCompletion::default();
        for (choice, delta) in [
            (1, Delta::Start(usage)),
            (1, Delta::Text("b".into())),
            (0, Delta::Start(usage)),
            (0, Delta::Text("a".into())),
            (1, Delta::End { finish: AnswerFinish::Stop, usage }),
            (0, Delta::End { finish: AnswerFinish::Length, usage }),
        ] {
            encoder.on(choice, delta).into_iter().for_each(|chunk| whole.add(chunk));
        }
        let whole = json!(whole);
        assert_eq!(whole["choices"][0]["message"]["content"], "a");
        assert_eq!(whole["choices"][0]["finish_reason"], "length");
        assert_eq!(whole["choices"][1]["message"]["content"], "b");
        assert_eq!(
            (&whole["usage"]["prompt_tokens"], &whole["usage"]["total_tokens"]),
            (&json!(10), &json!(14))
        );
    }
}
