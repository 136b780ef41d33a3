//! Responses: events of a stream, and the whole response, with which it ends.

use super::{
    input::ToolNames,
    items::{
        EventPlace, IncompleteReason, ItemStatus, OutputItem, OutputPart, ResponseError,
        ResponseEvent, ResponseObject, encrypted,
    },
};
use crate::{
    apis::openai::logprobs::ContentToken,
    requests::{
        delta::{AnswerFinish, AnswerNote, AnswerUsage, Delta},
        respond::{Encoder, Fold},
    },
    transport::{error::ApiError, ids, unix_time::now},
};

/// Start of a response's id. The rest is in the ids of its items.
pub(super) const ID_PREFIX: &str = "resp_";

/// Form of an answer, by its request.
#[derive(Clone, Debug, Default)]
pub(super) struct ResponseForm {
    /// Whether thoughts also come as their summary.
    pub(super) summary: bool,
    /// Whether thoughts also come in the form that stateless clients send back.
    pub(super) encrypted: bool,
    /// Names of tools in namespaces.
    pub(super) names: ToolNames,
}

/// Encoder of one answer. Its items come one after another.
#[derive(Clone, Debug)]
pub(super) struct ResponseEncoder {
    /// The response so far, with the items that are closed.
    response: ResponseObject,
    form: ResponseForm,
    open: Option<OutputItem>,
    /// White space that begins a message if text follows.
    held: String,
    /// Log-probabilities of the next text.
    logprobs: Vec<ContentToken>,
    /// Events so far.
    sequence: u64,
    events: Vec<ResponseEvent>,
}

impl ResponseEncoder {
    /// Encoder of an answer that starts as `response`.
    pub(super) fn new(response: ResponseObject, form: ResponseForm) -> Self {
        Self {
            response,
            form,
            open: None,
            held: String::new(),
            logprobs: Vec::new(),
            sequence: 0,
            events: Vec::new(),
        }
    }

    /// Bytes of the only event of a response that failed before its answer.
    pub(super) fn failed(error: &ApiError) -> String {
        let response = ResponseObject {
            id: ids::random_id(ID_PREFIX),
            object: "response",
            created_at: now(),
            ..ResponseObject::default()
        };
        Self::new(response, ResponseForm::default()).error(error)
    }

    /// The response so far.
    pub(super) fn response(&self) -> &ResponseObject {
        &self.response
    }

    fn event(&mut self, event: ResponseEvent) {
        let sequence_number = self.sequence;
        self.sequence += 1;
        self.events.push(ResponseEvent { sequence_number, ..event });
    }

    /// An event with the whole response.
    fn state(&mut self, kind: &'static str) {
        let response = Some(self.response.clone());
        self.event(ResponseEvent { kind, response, ..ResponseEvent::default() });
    }

    /// Place of the open item.
    fn place(&self) -> EventPlace {
        EventPlace {
            item_id: self.open.as_ref().map(|item| item.id().to_owned()),
            output_index: Some(self.response.output.len()),
            ..EventPlace::default()
        }
    }

    /// Place of the open item's content.
    fn content(&self) -> EventPlace {
        EventPlace { content_index: Some(0), ..self.place() }
    }

    /// Place of the summary of the open item.
    fn summary(&self) -> EventPlace {
        EventPlace { summary_index: Some(0), ..self.place() }
    }

    /// Id of the next item.
    fn item_id(&self, prefix: &str) -> String {
        let id = self.response.id.trim_start_matches(ID_PREFIX);
        format!("{prefix}_{id}_{}", self.response.output.len())
    }

    fn open(&mut self, item: OutputItem) {
        let output_index = Some(self.response.output.len());
        let place = EventPlace { output_index, ..EventPlace::default() };
        let kind = "response.output_item.added";
        self.open = Some(item.clone());
        self.event(ResponseEvent { kind, place, item: Some(item), ..ResponseEvent::default() });
    }

    fn part(&mut self, kind: &'static str, place: EventPlace, part: OutputPart) {
        let part = Some(part);
        self.event(ResponseEvent { kind, place, part, ..ResponseEvent::default() });
    }

    fn delta(&mut self, kind: &'static str, place: EventPlace, delta: String) {
        let delta = Some(delta);
        self.event(ResponseEvent { kind, place, delta, ..ResponseEvent::default() });
    }

    fn thoughts(&mut self, more: String) {
        if !matches!(self.open, Some(OutputItem::Reasoning { .. })) {
            self.close_before_next();
            self.drop_held();
            self.open(OutputItem::Reasoning {
                id: self.item_id("rs"),
                status: ItemStatus::InProgress,
                summary: Vec::new(),
                content: Vec::new(),
                encrypted_content: None,
            });
            let text = String::new;
            if self.form.summary {
                let part = OutputPart::Summary { text: text() };
                self.part("response.reasoning_summary_part.added", self.summary(), part);
            }
            let part = OutputPart::Reasoning { text: text() };
            self.part("response.content_part.added", self.content(), part);
            if let Some(OutputItem::Reasoning { summary, content, .. }) = &mut self.open {
                let is_requested = self.form.summary;
                summary.extend(is_requested.then(|| OutputPart::Summary { text: text() }));
                content.push(OutputPart::Reasoning { text: text() });
            }
        }
        if let Some(OutputItem::Reasoning { summary, content, .. }) = &mut self.open {
            summary.iter_mut().chain(content).for_each(|part| part.push(&more));
        }
        if self.form.summary {
            let kind = "response.reasoning_summary_text.delta";
            self.delta(kind, self.summary(), more.clone());
        }
        self.delta("response.reasoning_text.delta", self.content(), more);
    }

    fn text(&mut self, text: String) {
        if !matches!(self.open, Some(OutputItem::Message { .. })) {
            if text.trim().is_empty() {
                self.held.push_str(&text);
                return;
            }
            self.close_before_next();
            self.open(OutputItem::Message {
                id: self.item_id("msg"),
                status: ItemStatus::InProgress,
                role: "assistant",
                content: Vec::new(),
            });
            let part = OutputPart::output(String::new(), Vec::new());
            self.part("response.content_part.added", self.content(), part.clone());
            if let Some(OutputItem::Message { content, .. }) = &mut self.open {
                content.push(part);
            }
        }
        let text = std::mem::take(&mut self.held) + &text;
        let logprobs = std::mem::take(&mut self.logprobs);
        if let Some(OutputItem::Message { content, .. }) = &mut self.open {
            content.iter_mut().for_each(|part| part.push(&text));
            if let Some(OutputPart::Output { logprobs: all, .. }) = content.last_mut() {
                all.extend(logprobs.iter().cloned());
            }
        }
        let (place, kind) = (self.content(), "response.output_text.delta");
        let (delta, logprobs) = (Some(text), Some(logprobs));
        self.event(ResponseEvent { kind, place, delta, logprobs, ..ResponseEvent::default() });
    }

    /// Drops white space that no text followed.
    fn drop_held(&mut self) {
        self.held.clear();
        self.logprobs.clear();
    }

    fn call(&mut self, call_id: String, seen: &str) {
        self.close_before_next();
        self.drop_held();
        let (name, namespace) = self.form.names.of(seen);
        self.open(OutputItem::FunctionCall {
            id: self.item_id("fc"),
            status: ItemStatus::InProgress,
            call_id,
            name,
            namespace,
            arguments: String::new(),
        });
    }

    fn arguments(&mut self, json: String) {
        if let Some(OutputItem::FunctionCall { arguments, .. }) = &mut self.open {
            arguments.push_str(&json);
        }
        self.delta("response.function_call_arguments.delta", self.place(), json);
    }

    /// Closes the open item before another one. A call has had its end, or is broken.
    fn close_before_next(&mut self) {
        let is_call = matches!(self.open, Some(OutputItem::FunctionCall { .. }));
        self.close(if is_call { ItemStatus::Incomplete } else { ItemStatus::Completed });
    }

    /// Closes the open item. Clients run a call once it is done: one that was cut off is not.
    fn close(&mut self, status: ItemStatus) {
        let Some(mut item) = self.open.clone() else { return };
        item.set_status(status);
        let is_cut = status == ItemStatus::Incomplete;
        match &mut item {
            OutputItem::Reasoning { summary, content, encrypted_content, .. } => {
                for part in summary.iter().cloned() {
                    let kind = "response.reasoning_summary_text.done";
                    self.done(kind, self.summary(), &part);
                    self.part("response.reasoning_summary_part.done", self.summary(), part);
                }
                for part in content.iter().cloned() {
                    if self.form.encrypted {
                        *encrypted_content = Some(encrypted(part.text()));
                    }
                    self.done("response.reasoning_text.done", self.content(), &part);
                    self.part("response.content_part.done", self.content(), part);
                }
            }
            OutputItem::Message { content, .. } => {
                for part in content.iter().cloned() {
                    self.done("response.output_text.done", self.content(), &part);
                    self.part("response.content_part.done", self.content(), part);
                }
            }
            OutputItem::FunctionCall { name, arguments, .. } if !is_cut => {
                let (name, arguments) = (Some(name.clone()), Some(arguments.clone()));
                let (kind, place) = ("response.function_call_arguments.done", self.place());
                let event = ResponseEvent { kind, place, name, ..ResponseEvent::default() };
                self.event(ResponseEvent { arguments, ..event });
            }
            OutputItem::FunctionCall { .. } => {}
        }
        if !(is_cut && matches!(item, OutputItem::FunctionCall { .. })) {
            let place = EventPlace { item_id: None, ..self.place() };
            let (kind, item) = ("response.output_item.done", Some(item.clone()));
            self.event(ResponseEvent { kind, place, item, ..ResponseEvent::default() });
        }
        self.open = None;
        self.response.output.push(item);
    }

    /// The end of a part's text.
    fn done(&mut self, kind: &'static str, place: EventPlace, part: &OutputPart) {
        let logprobs = match part {
            OutputPart::Output { logprobs, .. } => Some(logprobs.clone()),
            _ => None,
        };
        let text = Some(part.text().to_owned());
        self.event(ResponseEvent { kind, place, text, logprobs, ..ResponseEvent::default() });
    }

    fn end(&mut self, finish: &AnswerFinish, usage: AnswerUsage) {
        let (status, reason) = match finish {
            AnswerFinish::Stop | AnswerFinish::StopString(_) | AnswerFinish::Calls => {
                (ItemStatus::Completed, None)
            }
            AnswerFinish::Length | AnswerFinish::Context => {
                (ItemStatus::Incomplete, Some("max_output_tokens"))
            }
            AnswerFinish::Cancelled => (ItemStatus::Cancelled, None),
        };
        let is_call = matches!(self.open, Some(OutputItem::FunctionCall { .. }));
        let is_whole = status == ItemStatus::Completed;
        // An open call is never complete.
        self.close(if is_call || !is_whole { ItemStatus::Incomplete } else { status });
        self.response.status = status;
        // Clients know no other event of a response that ended early.
        let kind = if is_whole { "response.completed" } else { "response.incomplete" };
        self.response.incomplete_details = reason.map(|reason| IncompleteReason { reason });
        self.response.moeflux = AnswerNote::new(&usage);
        self.response.usage = Some(usage.into());
        self.state(kind);
    }
}

impl Encoder for ResponseEncoder {
    type Event = ResponseEvent;
    type Whole = ResponseObject;

    fn on(&mut self, _choice: usize, delta: Delta) -> Vec<ResponseEvent> {
        match delta {
            Delta::Start(_) => {
                self.state("response.created");
                self.state("response.in_progress");
            }
            Delta::Usage(_) | Delta::Token(_) => {}
            Delta::Reasoning(thoughts) => self.thoughts(thoughts),
            Delta::Logprobs(entries) => {
                self.logprobs.extend(entries.into_iter().map(ContentToken::new));
            }
            Delta::Text(text) => self.text(text),
            Delta::CallStart { id, name, .. } => self.call(id, &name),
            Delta::CallArguments { json, .. } => self.arguments(json),
            Delta::CallEnd { .. } => self.close(ItemStatus::Completed),
            Delta::End { finish, usage } => self.end(&finish, usage),
        }
        std::mem::take(&mut self.events)
    }

    fn name(event: &ResponseEvent) -> Option<&'static str> {
        Some(event.kind)
    }

    /// An event, as clients count the time without events. Their first one must be the response's.
    fn ping(&mut self) -> String {
        if self.sequence == 0 {
            return ": ping\n\n".to_owned();
        }
        self.event(ResponseEvent { kind: "keepalive", ..ResponseEvent::default() });
        self.take_bytes()
    }

    fn error(&mut self, error: &ApiError) -> String {
        let (code, message) = (error.response_code(), error.message().to_owned());
        self.close(ItemStatus::Incomplete);
        self.response.status = ItemStatus::Failed;
        self.response.error = Some(ResponseError { code, message });
        self.state("response.failed");
        self.take_bytes()
    }
}

impl ResponseEncoder {
    /// Bytes of the events that are left.
    fn take_bytes(&mut self) -> String {
        let mut out = String::new();
        for event in std::mem::take(&mut self.events) {
            // An event is made of strings and numbers, which always have a JSON form.
            let _ = Self::write(&event, &mut out);
        }
        out
    }
}

impl Fold<ResponseEvent> for ResponseObject {
    fn add(&mut self, event: ResponseEvent) {
        if let Some(response) = event.response {
            *self = response;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Map, Value, json};

    use super::*;
    use crate::requests::{delta::TokenEntry, respond::testing::parallel_calls};

    fn encoder(form: ResponseForm) -> ResponseEncoder {
        let mut request = Map::new();
        request.insert("store".into(), json!(false));
        let response = ResponseObject {
            id: "resp_1".into(),
            object: "response",
            created_at: 7,
            model: "m".into(),
            request,
            ..ResponseObject::default()
        };
        ResponseEncoder::new(response, form)
    }

    /// Events, whose sequence numbers have no gaps.
    fn encode(form: ResponseForm, deltas: Vec<Delta>) -> Vec<Value> {
        let mut encoder = encoder(form);
        let events = deltas.into_iter().flat_map(|delta| encoder.on(0, delta));
        let events: Vec<Value> = events.map(|event| json!(event)).collect();
        for (i, event) in events.iter().enumerate() {
            assert_eq!(event["sequence_number"], i);
        }
        events
    }

    fn kinds(events: &[Value]) -> Vec<&str> {
        let kinds = events.iter().map(|event| event["type"].as_str().unwrap());
        kinds.map(|kind| kind.strip_prefix("response.").unwrap()).collect()
    }

    fn usage(generated: usize) -> AnswerUsage {
        AnswerUsage { prompt: 10, cached: 4, generated, reasoning: 1, ..AnswerUsage::default() }
    }

    #[test]
    fn items_of_thoughts_text_and_calls_come_one_after_another() {
        let form = ResponseForm { summary: true, encrypted: true, ..ResponseForm::default() };
        let events = encode(form, parallel_calls());
        assert_eq!(
            kinds(&events),
            [
                "created",
                "in_progress",
                "output_item.added",
                "reasoning_summary_part.added",
                "content_part.added",
                "reasoning_summary_text.delta",
                "reasoning_text.delta",
                "reasoning_summary_text.done",
                "reasoning_summary_part.done",
                "reasoning_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "content_part.added",
                "output_text.delta",
                "output_text.done",
                "content_part.done",
                "output_item.done",
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
                "output_item.added",
                "function_call_arguments.delta",
                "function_call_arguments.done",
                "output_item.done",
                "completed",
            ]
        );
        let place = |event: &Value| {
            ["item_id", "output_index", "content_index", "summary_index"].map(|n| event[n].clone())
        };
        let null = Value::Null;
        assert_eq!(place(&events[5]), [json!("rs_1_0"), json!(0), null.clone(), json!(0)]);
        assert_eq!(place(&events[6]), [json!("rs_1_0"), json!(0), json!(0), null.clone()]);
        assert_eq!(place(&events[14]), [json!("msg_1_1"), json!(1), json!(0), null.clone()]);
        assert_eq!(place(&events[19]), [json!("fc_1_2"), json!(2), null.clone(), null.clone()]);
        assert_eq!(place(&events[22]), [null.clone(), json!(2), null.clone(), null]);
        assert_eq!(
            events[14],
            json!({
                "type": "response.output_text.delta", "sequence_number": 14, "item_id": "msg_1_1",
                "output_index": 1, "content_index": 0, "delta": "Let me look.\n", "logprobs": [],
            })
        );
        assert_eq!(events[21]["arguments"], "{\"path\": \".\"}");
        let last = &events[events.len() - 1]["response"];
        let text = |kind: &str, text: &str| json!({"type": kind, "text": text});
        let call = |i: usize, id: &str, name: &str, arguments: &str| {
            json!({
                "type": "function_call", "id": format!("fc_1_{i}"), "status": "completed",
                "call_id": id, "name": name, "arguments": arguments,
            })
        };
        let output = json!([
            {
                "type": "reasoning", "id": "rs_1_0", "status": "completed",
                "summary": [text("summary_text", "Hm.")],
                "content": [text("reasoning_text", "Hm.")],
                "encrypted_content": "moeflux:Hm.",
            },
            {
                "type": "message", "id": "msg_1_1", "status": "completed", "role": "assistant",
                "content": [{
                    "type": "output_text", "text": "Let me look.\n", "annotations": [],
                    "logprobs": [],
                }],
            },
            call(2, "call_a", "list", "{\"path\": \".\"}"),
            call(3, "call_b", "read", "{}"),
        ]);
        assert_eq!(
            *last,
            json!({
                "id": "resp_1", "object": "response", "created_at": 7, "status": "completed",
                "error": null, "incomplete_details": null, "model": "m", "output": output,
                "usage": {
                    "input_tokens": 10, "input_tokens_details": {"cached_tokens": 4},
                    "output_tokens": 5, "output_tokens_details": {"reasoning_tokens": 1},
                    "total_tokens": 15,
                },
                "store": false,
            })
        );
        let done = events.iter().filter(|event| event["type"] == "response.output_item.done");
        assert_eq!(done.map(|event| event["item"].clone()).collect::<Value>(), output);
        assert_eq!(events[0]["response"]["status"], "in_progress");
        assert_eq!(events[0]["response"]["output"], json!([]));
    }

    #[test]
    fn an_answer_that_is_cut_off_is_incomplete_and_its_call_not_done() {
        let text = |text: &str| Delta::Text(text.into());
        let call = Delta::CallStart { index: 0, id: "call_a".into(), name: "f".into() };
        let arguments = Delta::CallArguments { index: 0, json: "{}".into() };
        let end = |finish| Delta::End { finish, usage: usage(3) };
        let start = || Delta::Start(usage(0));
        let bytes = Some(b"a".to_vec());
        let entry = TokenEntry { text: "a".into(), bytes, logprob: Some(-1.0), top: Vec::new() };
        let logprobs = Delta::Logprobs(vec![entry]);
        let deltas = vec![start(), text("\n"), logprobs, text("a"), call, arguments];
        let deltas = deltas.into_iter().chain([end(AnswerFinish::Length)]).collect();
        let events = encode(ResponseForm::default(), deltas);
        let kinds = kinds(&events);
        assert_eq!(
            kinds[8..],
            ["output_item.added", "function_call_arguments.delta", "incomplete"]
        );
        let response = &events[10]["response"];
        assert_eq!(response["status"], "incomplete");
        assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
        let [message, call] = [&response["output"][0], &response["output"][1]];
        let content = &message["content"][0];
        assert_eq!((&message["status"], &content["text"]), (&json!("completed"), &json!("\na")));
        assert_eq!(content["logprobs"][0]["token"], "a");
        assert_eq!((&call["status"], &call["call_id"]), (&json!("incomplete"), &json!("call_a")));
        let deltas = vec![start(), text("a"), text(" b"), end(AnswerFinish::Context)];
        let events = encode(ResponseForm::default(), deltas);
        let message = &events[events.len() - 1]["response"]["output"][0];
        assert_eq!(message["status"], "incomplete");
        assert_eq!(message["content"][0]["text"], "a b");
    }

    #[test]
    fn failures_and_silence_are_events_of_the_stream() {
        let mut encoder = encoder(ResponseForm::default());
        assert_eq!(encoder.ping(), ": ping\n\n");
        let text = Delta::Text("a".into());
        let events = [Delta::Start(usage(0)), text].map(|delta| encoder.on(0, delta).len());
        assert_eq!(events, [2, 3]);
        assert_eq!(
            encoder.ping(),
            "event: keepalive\ndata: {\"type\":\"keepalive\",\"sequence_number\":5}\n\n"
        );
        let bytes = encoder.error(&ApiError::context(9, 8));
        let last = bytes.trim_end().rsplit('\n').next().unwrap();
        let failed: Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(failed["type"], "response.failed");
        assert_eq!(failed["response"]["status"], "failed");
        assert_eq!(failed["response"]["error"]["code"], "context_length_exceeded");
    }
}
