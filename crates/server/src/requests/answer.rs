//! One answer: from the events of the serving core to deltas, whatever the API.

use std::time::Instant;

use moeflux::{
    Finish,
    serve::{EventSink, RequestEvent, SinkState},
    text::{self, AnswerText, Decoder, EndTokens, StopStrings, TokenLogprobs, Tokenizer},
};
use tokio::sync::mpsc::{Sender, error::TrySendError};

use super::{
    ask::AskedReports,
    delta::{AnswerFinish, AnswerUsage, Delta, TokenEntry, TopEntry},
    latency::AnswerTimer,
    line_limits::{LimitedLines, LineLimits},
    turns::TurnRecorder,
};
use crate::transport::{error::ApiError, ids};

/// Events of a request that its client has not read. More pause the request.
pub(crate) const UNREAD: usize = 256;

/// Sink of a request's events: a bounded channel to the task of its connection.
pub(crate) struct ChannelSink(pub(crate) Sender<RequestEvent>);

impl EventSink for ChannelSink {
    fn send(&mut self, event: RequestEvent) -> SinkState {
        match self.0.try_send(event) {
            Ok(()) => SinkState::Taken,
            Err(TrySendError::Full(event)) => SinkState::Full(event),
            Err(TrySendError::Closed(_)) => SinkState::Closed,
        }
    }
}

/// Text of an answer.
pub(crate) enum AnswerSource {
    /// Thoughts, text and calls, as the model's dialect marks them.
    Parsed(Box<AnswerText>),
    /// Text only, as the tokens spell it.
    Raw(Box<RawText>),
}

/// Text up to a stop string, or a limit of its lines.
pub(crate) struct RawText {
    decoder: Decoder,
    stops: StopStrings,
    lines: LimitedLines,
    text: String,
}

impl RawText {
    /// Text of `decoder`'s tokens that ends before the first of `stops`, within `limits`.
    pub(crate) fn new(decoder: Decoder, stops: StopStrings, limits: LineLimits) -> Self {
        Self { decoder, stops, lines: LimitedLines::new(limits), text: String::new() }
    }

    /// Takes the next token. Returns the reason for the end of the text, if it completes one.
    fn push(&mut self, token: u32) -> Result<Option<Finish>, ApiError> {
        self.stops.count_token();
        let found = self.stops.push(self.decoder.push(token)?);
        let limited = self.lines.push(found.emit, Instant::now());
        self.text = limited.text.to_owned();
        let limit = limited.is_end.then_some(Finish::MaxTokens);
        Ok(limit.or(found.stopped.then_some(Finish::StopString)))
    }
}

impl AnswerSource {
    /// Takes the next token. Returns the reason for the end of the text, if it completes one.
    fn push(&mut self, token: u32) -> Result<Option<Finish>, ApiError> {
        match self {
            Self::Parsed(text) => Ok(text.push(token)?.then_some(Finish::StopString)),
            Self::Raw(raw) => raw.push(token),
        }
    }

    /// Takes an end token, which is no part of the answer.
    fn end_token(&mut self) {
        match self {
            Self::Parsed(text) => text.end_token(),
            Self::Raw(raw) => raw.text.clear(),
        }
    }

    fn finish(&mut self) -> Result<(), ApiError> {
        match self {
            Self::Parsed(text) => text.finish()?,
            Self::Raw(raw) => {
                raw.text = raw.stops.push(raw.decoder.finish()?).emit.to_owned();
                raw.text += raw.stops.finish();
            }
        }
        Ok(())
    }

    /// Parts that the last token, or the end, completed.
    fn deltas(&self) -> Vec<Delta> {
        match self {
            Self::Parsed(text) => text.deltas().filter_map(owned).collect(),
            Self::Raw(raw) if raw.text.is_empty() => Vec::new(),
            Self::Raw(raw) => vec![Delta::Text(raw.text.clone())],
        }
    }

    fn stop_string(&self) -> Option<&str> {
        match self {
            Self::Parsed(text) => text.stop_string(),
            Self::Raw(raw) => raw.stops.found(),
        }
    }

    /// Whether the answer so far never left its thoughts.
    fn is_all_thoughts(&self) -> bool {
        matches!(self, Self::Parsed(text) if text.is_all_thoughts())
    }
}

/// Deltas of one answer.
pub(crate) struct AnswerDeltas {
    source: AnswerSource,
    end_tokens: EndTokens,
    progress: AnswerProgress,
    tokenizer: Tokenizer,
    /// Text before the answer that belongs to it.
    echo: Option<Echo>,
    /// Tokens of the prompt whose log-probabilities follow.
    echoed: Vec<u32>,
    /// Set until the answer ends, if it is to be remembered.
    recorder: Option<TurnRecorder>,
    timer: AnswerTimer,
    /// Reports between the parts of the text.
    reports: AskedReports,
}

/// A prompt before its answer.
#[derive(Clone, Debug)]
pub(crate) struct Echo {
    pub(crate) text: String,
    /// Tokens of the prompt, if their log-probabilities belong to the answer.
    pub(crate) logprobs: Option<Vec<u32>>,
}

/// The part of an answer that was seen.
#[derive(Debug, Default)]
struct AnswerProgress {
    usage: AnswerUsage,
    complete_calls: usize,
    /// The call that is not complete.
    open_call: Option<OpenCall>,
    /// Whether an earlier call was closed before it was complete.
    has_broken_call: bool,
    /// Whether the answer ends with its first complete call.
    one_call: bool,
    /// Whether the answer is calls only: text is the part of a call that was cut off.
    calls_only: bool,
    is_thinking: bool,
    is_ended: bool,
}

/// A call, and its arguments so far.
#[derive(Debug)]
struct OpenCall {
    index: usize,
    json: String,
}

impl AnswerDeltas {
    /// Deltas of the answer to a prompt of `prompt` tokens.
    pub(crate) fn new(
        source: AnswerSource,
        text: &text::Text,
        prompt: usize,
        timer: AnswerTimer,
    ) -> Self {
        let usage = AnswerUsage { prompt, ..AnswerUsage::default() };
        let progress = AnswerProgress { usage, ..AnswerProgress::default() };
        let (end_tokens, tokenizer) = (text.end().clone(), text.tokenizer().clone());
        let (echo, echoed, recorder) = (None, Vec::new(), None);
        let reports = AskedReports::default();
        Self { source, end_tokens, progress, tokenizer, echo, echoed, recorder, timer, reports }
    }

    /// Tokens that end the answer.
    pub(crate) fn end_tokens(self, end_tokens: EndTokens) -> Self {
        Self { end_tokens, ..self }
    }

    /// Tokens and times are reported as they change, or each token with its text.
    pub(crate) fn reports(self, reports: AskedReports) -> Self {
        Self { reports, ..self }
    }

    /// The answer ends with its first complete call.
    pub(crate) fn one_call(mut self, one_call: bool) -> Self {
        self.progress.one_call = one_call;
        self
    }

    /// The answer behind its thoughts is calls only, by its grammar.
    pub(crate) fn calls_only(mut self, calls_only: bool) -> Self {
        self.progress.calls_only = calls_only;
        self
    }

    /// The answer starts with its prompt.
    pub(crate) fn echo(self, echo: Option<Echo>) -> Self {
        Self { echo, ..self }
    }

    /// The answer is remembered at its end.
    pub(crate) fn recorder(self, recorder: Option<TurnRecorder>) -> Self {
        Self { recorder, ..self }
    }

    /// Whether the last delta was returned.
    pub(crate) fn is_ended(&self) -> bool {
        self.progress.is_ended
    }

    /// Takes an event; `None` is a channel that closed. Returns the deltas that it completes.
    ///
    /// # Errors
    /// The request failed, or was ended before its answer.
    pub(crate) fn on(&mut self, event: Option<RequestEvent>) -> Result<Vec<Delta>, ApiError> {
        let mut deltas = Vec::new();
        match event {
            Some(RequestEvent::Started(synced)) => {
                self.timer.started();
                let usage = &mut self.progress.usage;
                (usage.cached, usage.prefilled) = (synced.reused, synced.reused);
                deltas.push(Delta::Start(*usage));
                self.report(&mut deltas);
                if let Some(Echo { text, logprobs }) = self.echo.take() {
                    self.echoed = logprobs.unwrap_or_default();
                    if let Some(first) = self.echoed.first() {
                        let (text, bytes) = self.spelled(*first);
                        let entry = TokenEntry { text, bytes, logprob: None, top: Vec::new() };
                        deltas.push(Delta::Logprobs(vec![entry]));
                    }
                    deltas.push(Delta::Text(text));
                }
            }
            Some(RequestEvent::Prefilled { done, .. }) => self.prefilled(done, &mut deltas),
            Some(RequestEvent::PromptLogprobs { first, logprobs }) => {
                let tokens = self.echoed.iter().skip(first).zip(&logprobs);
                let entries = tokens.map(|(token, logprobs)| self.entry(*token, logprobs));
                deltas.push(Delta::Logprobs(entries.collect()));
            }
            Some(RequestEvent::Token { token, logprobs, drafts }) => {
                self.timer.token();
                self.progress.usage.drafts = drafts;
                self.prefilled(self.progress.usage.prompt, &mut deltas);
                self.progress.usage.generated += 1;
                self.report(&mut deltas);
                if self.end_tokens.contains(token) && !self.end_tokens.includes(token) {
                    self.source.end_token();
                    return Ok(deltas);
                }
                self.recorder.iter_mut().for_each(|recorder| recorder.push(token));
                let end = self.source.push(token)?;
                let parts = self.source.deltas();
                deltas.extend(self.reports.tokens.then_some(Delta::Token(token)));
                if let Some(logprobs) = logprobs
                    && self.progress.is_text(&parts)
                {
                    deltas.push(Delta::Logprobs(vec![self.entry(token, &logprobs)]));
                }
                self.progress.take(parts, &mut deltas);
                self.progress.usage.reasoning += usize::from(self.progress.is_thinking);
                if let Some(end) = end {
                    self.progress.end(end, self.source.stop_string(), &mut deltas);
                }
            }
            Some(RequestEvent::Finished(finish)) => {
                if finish != Finish::StopString {
                    self.source.finish()?;
                    self.progress.take(self.source.deltas(), &mut deltas);
                }
                self.progress.usage.is_all_thoughts = self.source.is_all_thoughts();
                self.progress.end(finish, self.source.stop_string(), &mut deltas);
            }
            Some(RequestEvent::Failed(error)) => {
                self.timer.ended();
                return Err(ApiError::from(&*error));
            }
            Some(_) => {}
            None => {
                let message = "the request was ended: its client did not read, or the server stops";
                return Err(ApiError::internal(message));
            }
        }
        self.recorder.iter_mut().for_each(|recorder| deltas.iter().for_each(|d| recorder.on(d)));
        if self.progress.is_ended {
            self.timer.ended();
            self.recorder.take().into_iter().for_each(TurnRecorder::finish);
        }
        Ok(deltas)
    }

    /// Takes the number of prompt tokens that are in the session.
    fn prefilled(&mut self, done: usize, deltas: &mut Vec<Delta>) {
        if self.progress.usage.prefilled < done {
            self.progress.usage.prefilled = done;
            self.report(deltas);
        }
    }

    /// Updates the times, and adds a report if one is asked for.
    fn report(&mut self, deltas: &mut Vec<Delta>) {
        let usage = &mut self.progress.usage;
        (usage.prefill, usage.decode) = (self.timer.prefill(), self.timer.decode());
        let is_asked = self.reports.progress || self.reports.timings;
        deltas.extend(is_asked.then_some(Delta::Usage(*usage)));
    }

    /// Ends the answer, as another request cancels it. It is not remembered.
    pub(crate) fn cancel(&mut self) -> Vec<Delta> {
        let mut deltas = Vec::new();
        self.recorder = None;
        self.timer.ended();
        self.progress.usage.is_all_thoughts = self.source.is_all_thoughts();
        self.progress.close(AnswerFinish::Cancelled, &mut deltas);
        deltas
    }

    /// A token and its log-probabilities, with the texts of tokens.
    fn entry(&self, token: u32, logprobs: &TokenLogprobs) -> TokenEntry {
        let TokenLogprobs { logprob, top } = logprobs;
        let top = top.iter().map(|top| {
            let (text, bytes) = self.spelled(top.token);
            TopEntry { text, bytes, logprob: top.logprob.into() }
        });
        let (text, bytes) = self.spelled(token);
        TokenEntry { text, bytes, logprob: Some(f64::from(*logprob)), top: top.collect() }
    }

    /// Text and bytes of a token. The text of a part of a character has U+FFFD in its place.
    fn spelled(&self, token: u32) -> (String, Option<Vec<u8>>) {
        let bytes = self.tokenizer.token_bytes(token);
        let text = bytes.as_deref().map(String::from_utf8_lossy).unwrap_or_default();
        (text.into_owned(), bytes)
    }
}

impl AnswerProgress {
    /// Whether the token that completed `parts` belongs to the text.
    fn is_text(&self, parts: &[Delta]) -> bool {
        match parts.last() {
            None => !self.is_thinking && self.open_call.is_none(),
            Some(last) => matches!(last, Delta::Text(_)),
        }
    }

    /// Adds `parts` up to the end of the answer.
    fn take(&mut self, parts: Vec<Delta>, deltas: &mut Vec<Delta>) {
        for part in parts {
            if self.is_ended {
                return;
            }
            self.is_thinking = matches!(part, Delta::Reasoning(_));
            if self.calls_only && matches!(part, Delta::Text(_)) {
                continue;
            }
            let is_call_end = matches!(part, Delta::CallEnd { .. });
            match &part {
                Delta::CallStart { index, .. } => {
                    self.has_broken_call |= self.open_call.is_some();
                    self.open_call = Some(OpenCall { index: *index, json: String::new() });
                }
                Delta::CallArguments { json, .. } => {
                    self.open_call.iter_mut().for_each(|call| call.json.push_str(json));
                }
                Delta::CallEnd { .. } => {
                    self.open_call = None;
                    self.complete_calls += 1;
                }
                _ => {}
            }
            deltas.push(part);
            if self.one_call && is_call_end {
                self.end(Finish::EndToken, None, deltas);
            }
        }
    }

    /// Adds the end, once.
    fn end(&mut self, finish: Finish, stop: Option<&str>, deltas: &mut Vec<Delta>) {
        let finish = match (finish, stop) {
            (Finish::MaxTokens, _) => AnswerFinish::Length,
            (Finish::Context, _) => AnswerFinish::Context,
            // Clients run no calls of an answer that was cut off.
            _ if self.has_broken_call || self.open_call.is_some() => AnswerFinish::Length,
            _ if self.complete_calls > 0 => AnswerFinish::Calls,
            (Finish::StopString, Some(stop)) => AnswerFinish::StopString(stop.to_owned()),
            _ => AnswerFinish::Stop,
        };
        self.close(finish, deltas);
    }

    /// Adds the end, once. A call that was cut off becomes valid JSON before it.
    fn close(&mut self, finish: AnswerFinish, deltas: &mut Vec<Delta>) {
        if self.is_ended {
            return;
        }
        self.is_ended = true;
        if let Some(OpenCall { index, json }) = self.open_call.take()
            && let Some(json) = closing(&json)
            && !json.is_empty()
        {
            deltas.push(Delta::CallArguments { index, json });
        }
        deltas.push(Delta::End { finish, usage: self.usage });
    }
}

/// A delta of the engine that clients see.
fn owned(delta: text::Delta<'_>) -> Option<Delta> {
    match delta {
        text::Delta::Reasoning(thoughts) => Some(Delta::Reasoning(thoughts.into())),
        text::Delta::Text(text) => Some(Delta::Text(text.into())),
        text::Delta::CallStart { index, name } => {
            Some(Delta::CallStart { index, id: ids::random_id("call_"), name: name.into() })
        }
        text::Delta::CallArguments { index, json } => {
            Some(Delta::CallArguments { index, json: json.into() })
        }
        // A call that was closed early is never complete: its arguments lack a part.
        text::Delta::CallEnd { is_broken: true, .. } => None,
        text::Delta::CallEnd { index, .. } => Some(Delta::CallEnd { index }),
        _ => None,
    }
}

/// Shortest of a few endings that make the start of a JSON object valid; `None` if none does.
fn closing(json: &str) -> Option<String> {
    /// Endings of a string, an escape, a key, a number and a literal that were cut off.
    const ENDINGS: [&str; 25] = [
        "",
        "\"",
        "\\\"",
        "0\"",
        "00\"",
        "000\"",
        "0000\"",
        "null",
        ":null",
        "\":null",
        "\\\":null",
        "\"\":null",
        "0",
        "e",
        "ue",
        "rue",
        "se",
        "lse",
        "alse",
        "l",
        "ll",
        "ull",
        "\\ude00\"",
        "ude00\"",
        "de00\"",
    ];
    if json.trim().is_empty() {
        return Some("{}".to_owned());
    }
    let mut brackets = Vec::new();
    let (mut in_string, mut is_escaped) = (false, false);
    for byte in json.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if in_string => is_escaped = true,
            b'"' => in_string = !in_string,
            b'{' if !in_string => brackets.push('}'),
            b'[' if !in_string => brackets.push(']'),
            b'}' | b']' if !in_string => drop(brackets.pop()),
            _ => {}
        }
    }
    let brackets: String = brackets.into_iter().rev().collect();
    let mut endings = ENDINGS.iter().map(|ending| format!("{ending}{brackets}"));
    endings.find(|ending| {
        let whole = format!("{json}{ending}");
        serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(&whole).is_ok()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_that_are_cut_anywhere_become_valid_json() {
        let whole = concat!(
            r#"{"path": "a\"\\b\u00e9\n", "n": -1.5e3, "#,
            r#""deep": {"list": [true, false, null, {"x": "é"}]}, "": {}}"#,
        );
        for end in (0..=whole.len()).filter(|end| whole.is_char_boundary(*end)) {
            let cut = &whole[..end];
            let closing = closing(cut).unwrap_or_else(|| panic!("{cut}"));
            serde_json::from_str::<serde_json::Map<_, _>>(&format!("{cut}{closing}")).unwrap();
        }
        assert_eq!(closing(whole).unwrap(), "");
        assert_eq!(closing("").unwrap(), "{}");
        assert_eq!(closing("not JSON"), None);
    }

    fn ended(progress: &mut AnswerProgress, parts: Vec<Delta>, finish: Finish) -> Vec<Delta> {
        let mut deltas = Vec::new();
        progress.take(parts, &mut deltas);
        progress.end(finish, None, &mut deltas);
        deltas
    }

    fn call(index: usize, json: &str) -> [Delta; 2] {
        let name = "f".to_owned();
        [
            Delta::CallStart { index, id: format!("call_{index}"), name },
            Delta::CallArguments { index, json: json.to_owned() },
        ]
    }

    #[test]
    fn a_call_that_is_cut_off_is_closed_and_is_no_reason_for_the_end() {
        let mut progress = AnswerProgress::default();
        let deltas = ended(&mut progress, call(0, "{\"a\": [1").to_vec(), Finish::MaxTokens);
        assert_eq!(deltas[2], Delta::CallArguments { index: 0, json: "]}".to_owned() });
        let usage = AnswerUsage::default();
        assert_eq!(deltas[3], Delta::End { finish: AnswerFinish::Length, usage });
        // Nor is one that the model left open, or one that was closed early.
        for parts in [call(0, "{").to_vec(), [call(0, "{}"), call(1, "{}")].concat()] {
            let deltas = ended(&mut AnswerProgress::default(), parts, Finish::EndToken);
            let end = Delta::End { finish: AnswerFinish::Length, usage };
            assert_eq!(deltas.last(), Some(&end));
        }
        let parts = [call(0, "{}").to_vec(), vec![Delta::CallEnd { index: 0 }]].concat();
        let deltas = ended(&mut AnswerProgress::default(), parts, Finish::EndToken);
        assert_eq!(deltas[3], Delta::End { finish: AnswerFinish::Calls, usage });
    }

    #[test]
    fn an_answer_with_one_call_ends_with_it() {
        let end = |index| vec![Delta::CallEnd { index }];
        let parts = [call(0, "{}").to_vec(), end(0), call(1, "{}").to_vec(), end(1)].concat();
        let mut progress = AnswerProgress { one_call: true, ..AnswerProgress::default() };
        let deltas = ended(&mut progress, parts.clone(), Finish::MaxTokens);
        assert_eq!(deltas[..3], parts[..3]);
        let usage = AnswerUsage::default();
        assert_eq!(deltas[3..], [Delta::End { finish: AnswerFinish::Calls, usage }]);
    }
}
