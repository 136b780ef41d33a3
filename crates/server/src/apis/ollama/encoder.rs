//! Answers of Ollama's API: lines of a stream, and the whole answer as their fold.

use std::time::{Duration, Instant};

use axum::response::Response;
use serde::Serialize;
use serde_json::{Map, Value};

use super::models::timestamp;
use crate::{
    apis::openai::logprobs::ContentToken,
    requests::{
        answer_head::AnswerHead,
        delta::{AnswerFinish, AnswerNote, AnswerUsage, Delta},
        models::ServedModel,
        prompt::Prompt,
        respond::{Encoder, Fold},
    },
    transport::{error::ApiError, error_shape::ApiShape, json, unix_time::now},
};

/// Place of the text in a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TextPlace {
    /// In a message: `/api/chat`.
    Message,
    /// In the field `response`: `/api/generate`.
    Response,
}

/// Line of a stream, or the whole answer: they have the same form.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(super) struct AnswerLine {
    model: String,
    created_at: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<LineMessage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<String>,
    /// Thoughts beside `response`.
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    /// Log-probabilities of the tokens of the text, if they are asked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    logprobs: Vec<ContentToken>,
    done: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    done_reason: Option<&'static str>,
    /// Tokens of prompt and answer beside `response`, which a later prompt continues.
    #[serde(skip_serializing_if = "Option::is_none")]
    context: Option<Vec<u32>>,
    #[serde(flatten)]
    cost: Option<AnswerCost>,
    #[serde(skip_serializing_if = "Option::is_none")]
    moeflux: Option<AnswerNote>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct LineMessage {
    role: &'static str,
    content: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    thinking: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<LineCall>,
}

/// A call, whole.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct LineCall {
    id: String,
    function: LineFunction,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct LineFunction {
    index: usize,
    name: String,
    arguments: Value,
}

/// Tokens and times of an answer, in nanoseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct AnswerCost {
    total_duration: u64,
    load_duration: u64,
    prompt_eval_count: usize,
    prompt_eval_duration: u64,
    eval_count: usize,
    eval_duration: u64,
}

/// Times of an answer since its request.
#[derive(Clone, Copy, Debug, Default)]
struct AnswerTimes {
    started: Duration,
    /// When the first part came.
    first: Option<Duration>,
}

/// Encoder of one answer.
#[derive(Clone, Debug)]
pub(super) struct OllamaEncoder<C = Instant> {
    head: AnswerHead,
    form: TextPlace,
    clock: C,
    times: AnswerTimes,
    /// Call whose arguments are not complete.
    call: Option<LineFunction>,
    call_id: String,
    arguments: String,
    /// Log-probabilities for the next line.
    logprobs: Vec<ContentToken>,
    /// Tokens of prompt and answer, if the answer has them.
    context: Option<Vec<u32>>,
}

/// Time since a request.
pub(super) trait AnswerClock: Send + Unpin + 'static {
    fn elapsed(&self) -> Duration;
}

impl AnswerClock for Instant {
    fn elapsed(&self) -> Duration {
        Self::elapsed(self)
    }
}

impl OllamaEncoder {
    pub(super) fn new(head: AnswerHead, form: TextPlace) -> Self {
        Self::timed(head, form, Instant::now())
    }

    /// Encoder of an answer that ends with the tokens of prompt and answer, if `is_asked`.
    pub(super) fn context(self, is_asked: bool) -> Self {
        Self { context: is_asked.then(Vec::new), ..self }
    }
}

impl<C: AnswerClock> OllamaEncoder<C> {
    fn timed(head: AnswerHead, form: TextPlace, clock: C) -> Self {
        let (times, call) = (AnswerTimes::default(), None);
        let (call_id, arguments) = (String::new(), String::new());
        let (logprobs, context) = (Vec::new(), None);
        Self { head, form, clock, times, call, call_id, arguments, logprobs, context }
    }

    fn line(&mut self, text: String, thoughts: Option<String>, calls: Vec<LineCall>) -> AnswerLine {
        let logprobs = std::mem::take(&mut self.logprobs);
        let line = AnswerLine::new(&self.head, self.form, text);
        AnswerLine { logprobs, ..line.with(thoughts, calls) }
    }

    fn end(&mut self, finish: &AnswerFinish, usage: AnswerUsage) -> AnswerLine {
        let AnswerTimes { started, first } = self.times;
        let end = self.clock.elapsed();
        let first = first.unwrap_or(end);
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let reason = match finish {
            AnswerFinish::Length | AnswerFinish::Context => "length",
            _ => "stop",
        };
        let cost = AnswerCost {
            total_duration: nanos(end),
            load_duration: nanos(started),
            prompt_eval_count: usage.prompt,
            prompt_eval_duration: nanos(first.saturating_sub(started)),
            eval_count: usage.generated,
            eval_duration: nanos(end.saturating_sub(first)),
        };
        let context = self.context.take();
        let line = self.line(String::new(), None, Vec::new());
        let (done_reason, cost, moeflux) = (Some(reason), Some(cost), AnswerNote::new(&usage));
        AnswerLine { done: true, done_reason, context, cost, moeflux, ..line }
    }
}

impl AnswerLine {
    fn new(head: &AnswerHead, form: TextPlace, text: String) -> Self {
        let (model, created_at) = (head.model.clone(), timestamp(head.created));
        let line = Self { model, created_at, ..Self::default() };
        match form {
            TextPlace::Message => {
                let (thinking, tool_calls) = (None, Vec::new());
                let message =
                    LineMessage { role: "assistant", content: text, thinking, tool_calls };
                Self { message: Some(message), ..line }
            }
            TextPlace::Response => Self { response: Some(text), ..line },
        }
    }

    /// The line with thoughts and calls.
    fn with(mut self, thoughts: Option<String>, calls: Vec<LineCall>) -> Self {
        match &mut self.message {
            Some(message) => (message.thinking, message.tool_calls) = (thoughts, calls),
            None => self.thinking = thoughts,
        }
        self
    }
}

impl<C: AnswerClock> Encoder for OllamaEncoder<C> {
    type Event = AnswerLine;
    type Whole = AnswerLine;

    const STREAM_TYPE: &'static str = "application/x-ndjson";
    /// White space before the next line: clients take an empty line for broken JSON.
    const EARLY_PING: &'static str = " ";
    const IS_STREAM: bool = true;

    fn prompts(&mut self, _model: &ServedModel, prompts: &[Prompt]) -> Result<(), ApiError> {
        if let (Some(context), Some(prompt)) = (&mut self.context, prompts.first()) {
            context.extend_from_slice(&prompt.tokens);
        }
        Ok(())
    }

    fn on(&mut self, _choice: usize, delta: Delta) -> Vec<AnswerLine> {
        match &delta {
            Delta::Start(_) => self.times.started = self.clock.elapsed(),
            Delta::End { .. } | Delta::Usage(_) => {}
            _ if self.times.first.is_none() => self.times.first = Some(self.clock.elapsed()),
            _ => {}
        }
        match delta {
            Delta::Reasoning(thoughts) => {
                vec![self.line(String::new(), Some(thoughts), Vec::new())]
            }
            Delta::Text(text) => vec![self.line(text, None, Vec::new())],
            Delta::CallStart { index, id, name } => {
                self.call = Some(LineFunction { index, name, arguments: Value::Null });
                (self.call_id, self.arguments) = (id, String::new());
                Vec::new()
            }
            Delta::CallArguments { json, .. } => {
                self.arguments.push_str(&json);
                Vec::new()
            }
            Delta::CallEnd { .. } => {
                let Some(mut function) = self.call.take() else { return Vec::new() };
                // A call is complete only with an object.
                let object = serde_json::from_str::<Map<String, Value>>(&self.arguments);
                let Ok(object) = object else { return Vec::new() };
                function.arguments = Value::Object(object);
                let call = LineCall { id: std::mem::take(&mut self.call_id), function };
                vec![self.line(String::new(), None, vec![call])]
            }
            Delta::End { finish, usage } => vec![self.end(&finish, usage)],
            Delta::Logprobs(entries) => {
                self.logprobs.extend(entries.into_iter().map(ContentToken::new));
                Vec::new()
            }
            Delta::Token(token) => {
                self.context.iter_mut().for_each(|context| context.push(token));
                Vec::new()
            }
            // This API has none.
            Delta::Start(_) | Delta::Usage(_) => Vec::new(),
        }
    }

    fn write(line: &AnswerLine, out: &mut String) -> Result<(), ApiError> {
        *out += &json::line(line)?;
        out.push('\n');
        Ok(())
    }

    fn early_error(error: &ApiError) -> String {
        error.to_json(ApiShape::Ollama, None) + "\n"
    }
}

impl Fold<AnswerLine> for AnswerLine {
    fn add(&mut self, line: AnswerLine) {
        let add = |whole: &mut Option<String>, part: Option<String>| {
            if let Some(part) = part {
                whole.get_or_insert_default().push_str(&part);
            }
        };
        match (&mut self.message, line.message) {
            (Some(whole), Some(part)) => {
                whole.content.push_str(&part.content);
                add(&mut whole.thinking, part.thinking);
                whole.tool_calls.extend(part.tool_calls);
            }
            (whole @ None, part) => *whole = part,
            (Some(_), None) => {}
        }
        add(&mut self.response, line.response);
        add(&mut self.thinking, line.thinking);
        self.logprobs.extend(line.logprobs);
        self.context = line.context;
        (self.model, self.created_at) = (line.model, line.created_at);
        (self.done, self.done_reason, self.cost) = (line.done, line.done_reason, line.cost);
        self.moeflux = line.moeflux;
    }
}

/// Response to a request without a prompt.
pub(super) fn loaded(model: &str, form: TextPlace, reason: &'static str) -> Response {
    let head = AnswerHead { created: now(), model: model.to_owned(), ..AnswerHead::default() };
    let line = AnswerLine::new(&head, form, String::new());
    json::response(&AnswerLine { done: true, done_reason: Some(reason), ..line })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::requests::respond::testing::parallel_calls;

    /// A clock that stands still.
    struct Stopped;

    impl AnswerClock for Stopped {
        fn elapsed(&self) -> Duration {
            Duration::from_nanos(5)
        }
    }

    fn encode(form: TextPlace, deltas: Vec<Delta>) -> Vec<AnswerLine> {
        let head = AnswerHead { model: "m".into(), ..AnswerHead::default() };
        let mut encoder = OllamaEncoder::timed(head, form, Stopped);
        deltas.into_iter().flat_map(|delta| encoder.on(0, delta)).collect()
    }

    fn fold(lines: Vec<AnswerLine>) -> Value {
        let mut whole = AnswerLine::default();
        lines.into_iter().for_each(|line| whole.add(line));
        json!(whole)
    }

    /// The last line, with this text.
    fn last(mut text: Value, reason: &str) -> Value {
        let line = json!({
            "model": "m", "created_at": "1970-01-01T00:00:00Z", "done": true,
            "done_reason": reason, "total_duration": 5, "load_duration": 5,
            "prompt_eval_count": 10, "prompt_eval_duration": 0, "eval_count": 5,
            "eval_duration": 0,
        });
        text.as_object_mut().unwrap().extend(line.as_object().unwrap().clone());
        text
    }

    #[test]
    fn calls_are_whole_with_an_object_of_arguments() {
        let lines = encode(TextPlace::Message, parallel_calls());
        let messages: Vec<Value> = lines.iter().map(|line| json!(line.message)).collect();
        let call = |index: usize, id: &str, name: &str, arguments: Value| {
            json!({
                "id": id, "function": {"index": index, "name": name, "arguments": arguments},
            })
        };
        let calls =
            [call(0, "call_a", "list", json!({"path": "."})), call(1, "call_b", "read", json!({}))];
        let empty = || json!({"role": "assistant", "content": ""});
        let with = |name: &str, value: Value| {
            let mut message = empty();
            message[name] = value;
            message
        };
        assert_eq!(
            messages,
            [
                with("thinking", json!("Hm.")),
                with("content", json!("Let me look.\n")),
                with("tool_calls", json!([calls[0]])),
                with("tool_calls", json!([calls[1]])),
                empty(),
            ]
        );
        let mut text = String::new();
        OllamaEncoder::<Stopped>::write(&lines[0], &mut text).unwrap();
        assert_eq!(
            text,
            concat!(
                r#"{"model":"m","created_at":"1970-01-01T00:00:00Z","message":"#,
                r#"{"role":"assistant","content":"","thinking":"Hm."},"done":false}"#,
                "\n",
            )
        );
        assert_eq!(json!(lines[4]), last(json!({"message": empty()}), "stop"));
        let message = json!({
            "role": "assistant", "content": "Let me look.\n", "thinking": "Hm.",
            "tool_calls": calls,
        });
        assert_eq!(fold(lines), last(json!({"message": message}), "stop"));
    }

    #[test]
    fn an_answer_to_a_prompt_is_a_text() {
        let usage = AnswerUsage { prompt: 10, generated: 5, ..AnswerUsage::default() };
        let deltas = vec![
            Delta::Start(usage),
            Delta::Reasoning("Hm.".into()),
            Delta::Text("a".into()),
            Delta::Text("b".into()),
            Delta::End { finish: AnswerFinish::Length, usage },
        ];
        let lines = encode(TextPlace::Response, deltas);
        assert_eq!(json!(lines[1])["response"], "a");
        let text = json!({"response": "ab", "thinking": "Hm."});
        assert_eq!(fold(lines), last(text, "length"));
    }
}
