//! Answers on their way: from the events of the serving core to parts.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel},
    },
    time::Instant,
};

use moeflux::{
    Error, Finish, GenerateRequest,
    base::Stats,
    serve::{EventSink, RequestEvent, RequestHandle, SinkState},
    text::{self, AnswerText, EndTokens, Text, TokenLogprobs, ToolCall, ToolSet},
};

use crate::{
    fault::Fault,
    request_options::random_word,
    shared_model::SharedModel,
    wait::{Cancel, POLL, Waiting},
};

/// Events that a caller has not read. More pause the request.
const UNREAD: usize = 256;

/// Called on a thread of the library when there is something to read. It must not block.
pub type Wake = Arc<dyn Fn() + Send + Sync>;

/// Part of an answer. Whole characters.
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct Delta {
    /// Text.
    pub text: String,
    /// Thoughts.
    pub reasoning: String,
    /// A complete call of a tool.
    pub tool_call: Option<ToolCall>,
    /// Tokens of the part, and of parts before it that had no text.
    pub tokens: Vec<u32>,
}

/// Parts of calls until they are complete.
#[derive(Debug, Default)]
pub(crate) struct PartBuilder {
    open_call: Option<ToolCall>,
    /// Calls that are complete.
    pub(crate) calls: Vec<ToolCall>,
    /// Whether the last text was a thought.
    is_thinking: bool,
}

impl PartBuilder {
    /// Adds a delta of the engine to a part.
    pub(crate) fn add(&mut self, part: &mut Delta, delta: text::Delta<'_>) {
        match delta {
            text::Delta::Text(text) => {
                part.text += text;
                self.is_thinking = false;
            }
            text::Delta::Reasoning(text) => {
                part.reasoning += text;
                self.is_thinking = true;
            }
            text::Delta::CallStart { index, name } => {
                // Unique over the turns of a conversation.
                let (id, name) = (format!("call_{index}_{:08x}", random_word()), name.to_owned());
                self.open_call = Some(ToolCall { id, name, arguments: String::new() });
                self.is_thinking = false;
            }
            text::Delta::CallArguments { json, .. } => {
                if let Some(call) = &mut self.open_call {
                    call.arguments += json;
                }
            }
            text::Delta::CallEnd { is_broken, .. } => {
                if let Some(call) = self.open_call.take().filter(|_| !is_broken) {
                    self.calls.push(call.clone());
                    part.tool_call = Some(call);
                }
            }
            _ => {}
        }
    }
}

impl Delta {
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.reasoning.is_empty() && self.tool_call.is_none()
    }
}

/// Tokens of an answer and its prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens that were not computed.
    pub reused_tokens: usize,
    /// Tokens of the answer.
    pub completion_tokens: usize,
    /// Of these, tokens of thoughts.
    pub reasoning_tokens: usize,
}

/// Log-probability of a token.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct TokenLogprob {
    /// The token.
    pub token: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The likeliest tokens.
    pub top: Vec<(u32, f32)>,
}

/// An answer, as far as it is complete.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Answer {
    /// Text without thoughts, end token and stop string.
    pub text: String,
    /// Thoughts.
    pub reasoning: String,
    /// Calls of tools.
    pub tool_calls: Vec<ToolCall>,
    /// Tokens, with the end token.
    pub tokens: Vec<u32>,
    /// `stop`, `length`, `tool_calls` or `cancelled`.
    pub finish: &'static str,
    /// Counts of tokens.
    pub usage: Usage,
    /// Log-probabilities, if they were asked for.
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// The same of the prompt's tokens but the first.
    pub prompt_logprobs: Option<Vec<TokenLogprob>>,
    /// Seconds since the request was made, and since its first token.
    pub seconds: f64,
    /// Seconds from the first token to the last.
    pub decode_seconds: f64,
    /// Counters of the model while the answer was computed, other requests included.
    pub stats: Stats,
}

impl Answer {
    /// Tokens per second after the first one.
    pub fn tokens_per_second(&self) -> f64 {
        let later = self.tokens.len().saturating_sub(1) as f64;
        if self.decode_seconds > 0.0 { later / self.decode_seconds } else { 0.0 }
    }

    /// Answer of a session.
    pub(crate) fn of_session(text: &Text, answer: moeflux::Answer, calls: Vec<ToolCall>) -> Self {
        let entry = |(token, logprobs): (&u32, &TokenLogprobs)| entry(text, *token, logprobs);
        let logprobs: Vec<_> = answer.tokens.iter().zip(&answer.logprobs).map(entry).collect();
        let mut stats = answer.prefill.stats.plus(&answer.decode.stats);
        stats.tokens = answer.prefill.tokens + answer.decode.tokens;
        Self {
            usage: Usage {
                prompt_tokens: answer.prompt_tokens,
                reused_tokens: answer.reused,
                completion_tokens: answer.tokens.len(),
                reasoning_tokens: 0,
            },
            logprobs: (!logprobs.is_empty()).then_some(logprobs),
            finish: finish_name(answer.finish, !calls.is_empty()),
            tool_calls: calls,
            seconds: answer.prefill.seconds + answer.decode.seconds,
            decode_seconds: answer.decode.seconds,
            text: answer.text,
            reasoning: answer.reasoning,
            tokens: answer.tokens,
            stats,
            ..Self::default()
        }
    }
}

fn finish_name(finish: Finish, has_calls: bool) -> &'static str {
    match finish {
        Finish::EndToken | Finish::StopString if has_calls => "tool_calls",
        Finish::EndToken | Finish::StopString => "stop",
        Finish::MaxTokens | Finish::Context => "length",
        Finish::Cancelled => "cancelled",
    }
}

fn entry(text: &Text, token: u32, logprobs: &TokenLogprobs) -> TokenLogprob {
    TokenLogprob {
        token,
        bytes: text.tokenizer().token_bytes(token).unwrap_or_default(),
        logprob: logprobs.logprob,
        top: logprobs.top.iter().map(|top| (top.token, top.logprob)).collect(),
    }
}

/// Sink of a request's events, on the thread of the serving core.
struct ChannelSink {
    events: SyncSender<RequestEvent>,
    wake: Option<Wake>,
}

impl EventSink for ChannelSink {
    fn send(&mut self, event: RequestEvent) -> SinkState {
        let state = match self.events.try_send(event) {
            Ok(()) => SinkState::Taken,
            Err(TrySendError::Full(event)) => SinkState::Full(event),
            Err(TrySendError::Disconnected(_)) => SinkState::Closed,
        };
        self.wake.iter().for_each(|wake| wake());
        state
    }
}

impl Drop for ChannelSink {
    fn drop(&mut self) {
        // Its reader finds the end.
        self.wake.iter().for_each(|wake| wake());
    }
}

/// Ends a request from any thread. Clones share it.
#[derive(Clone)]
pub struct RequestStopper(Arc<StopState>);

struct StopState {
    handle: Arc<RequestHandle>,
    is_stopped: AtomicBool,
}

impl RequestStopper {
    /// Ends the request at its next layer or step.
    pub fn stop(&self) {
        self.0.is_stopped.store(true, Ordering::SeqCst);
        self.0.handle.cancel();
    }

    fn is_set(&self) -> bool {
        self.0.is_stopped.load(Ordering::SeqCst)
    }
}

/// An answer on its way. Dropping it ends the request.
pub struct Request {
    model: SharedModel,
    stop: RequestStopper,
    /// `None` once the answer has ended.
    events: Option<Receiver<RequestEvent>>,
    source: AnswerText,
    end_tokens: EndTokens,
    prompt: Vec<u32>,
    parts: PartBuilder,
    answer: Answer,
    /// Tokens of no part yet.
    tokens: Vec<u32>,
    since: Instant,
    /// When the caller looked for signals last.
    looked: Instant,
    first_token: Option<Instant>,
    before: Stats,
    embedding: Option<Vec<f32>>,
    prefilled: usize,
}

/// Part of an answer that may be on its way.
pub enum NextPart {
    /// A part.
    Delta(Delta),
    /// None yet.
    Pending,
    /// The answer has ended.
    End,
}

impl Request {
    /// Submits a request to the model's serving core.
    ///
    /// # Errors
    /// The model was closed, or too many requests wait.
    pub(crate) fn submit(
        model: &SharedModel,
        prompt: Vec<u32>,
        tools: &ToolSet,
        request: GenerateRequest,
        wake: Option<Wake>,
    ) -> Result<Self, Fault> {
        let (sender, events) = sync_channel(UNREAD);
        let sink = Box::new(ChannelSink { events: sender, wake });
        model.with_core(|core| {
            let text = core.engine().text()?;
            let parser = text.parser(&prompt, tools)?;
            let source = AnswerText::new(parser, request.stop_strings()?);
            let end_tokens = request.all_end_tokens(text.end());
            let wants = (request.logprobs.is_some(), request.prompt_logprobs);
            let before = core.stats().steps;
            let handle = Arc::new(core.submit(prompt.clone(), request, sink)?);
            model.adopt_request(&handle);
            let mut answer = Answer { finish: "cancelled", ..Answer::default() };
            answer.usage.prompt_tokens = prompt.len();
            answer.logprobs = wants.0.then(Vec::new);
            answer.prompt_logprobs = wants.1.then(Vec::new);
            Ok(Self {
                model: model.clone(),
                stop: RequestStopper(Arc::new(StopState {
                    handle,
                    is_stopped: AtomicBool::new(false),
                })),
                events: Some(events),
                source,
                end_tokens,
                prompt,
                parts: PartBuilder::default(),
                answer,
                tokens: Vec::new(),
                since: Instant::now(),
                looked: Instant::now(),
                first_token: None,
                before,
                embedding: None,
                prefilled: 0,
            })
        })
    }

    /// Ends the request at its next layer or step.
    pub fn cancel(&self) {
        self.stop.stop();
    }

    /// Ends the request from another thread.
    pub fn stopper(&self) -> RequestStopper {
        self.stop.clone()
    }

    /// The answer so far.
    pub fn answer(&self) -> Answer {
        let mut answer = self.answer.clone();
        answer.usage.completion_tokens = answer.tokens.len();
        if self.events.is_some() {
            answer.seconds = self.since.elapsed().as_secs_f64();
        }
        answer
    }

    /// The embedding of the prompt, if the request was for one.
    pub fn take_embedding(&mut self) -> Option<Vec<f32>> {
        self.embedding.take()
    }

    /// Tokens of the prompt that are computed.
    pub fn prefilled(&self) -> usize {
        self.prefilled
    }

    /// The next part, once it is there. Returns `None` after the last one.
    ///
    /// # Errors
    /// The request failed; the error of `waiting`, which ends it.
    pub fn next(
        &mut self,
        cancel: Option<&Cancel>,
        waiting: &mut Waiting<'_>,
    ) -> Result<Option<Delta>, Fault> {
        loop {
            self.model.check_process()?;
            if cancel.is_some_and(Cancel::is_set) {
                self.cancel();
            }
            // Also while tokens come without a pause.
            if self.looked.elapsed() >= POLL {
                self.looked = Instant::now();
                let share = self.prefilled as f64 / self.prompt.len().max(1) as f64;
                if let Err(fault) = waiting(share) {
                    self.cancel();
                    self.events = None;
                    return Err(fault);
                }
            }
            let Some(events) = &self.events else { return Ok(None) };
            let event = match events.recv_timeout(POLL) {
                Ok(event) => Some(event),
                Err(RecvTimeoutError::Disconnected) => None,
                Err(RecvTimeoutError::Timeout) => continue,
            };
            if let Some(delta) = self.take(event)? {
                return Ok(Some(delta));
            }
        }
    }

    /// The next part, if it is there.
    ///
    /// # Errors
    /// The request failed.
    pub fn try_next(&mut self) -> Result<NextPart, Fault> {
        loop {
            let Some(events) = &self.events else { return Ok(NextPart::End) };
            let event = match events.try_recv() {
                Ok(event) => Some(event),
                Err(TryRecvError::Empty) => return Ok(NextPart::Pending),
                Err(TryRecvError::Disconnected) => None,
            };
            if let Some(delta) = self.take(event)? {
                return Ok(NextPart::Delta(delta));
            }
        }
    }

    /// Takes an event; `None` is a channel that closed.
    fn take(&mut self, event: Option<RequestEvent>) -> Result<Option<Delta>, Fault> {
        match event {
            Some(RequestEvent::Started(synced)) => {
                self.answer.usage.reused_tokens = synced.reused;
                self.prefilled = synced.reused;
            }
            Some(RequestEvent::Prefilled { done, .. }) => self.prefilled = done,
            Some(RequestEvent::PromptLogprobs { first, logprobs }) => {
                let tokens = self.prompt[first..].iter().zip(&logprobs);
                let entries = self.model.with_text(|text| {
                    Ok(tokens.map(|(token, logprobs)| entry(text, *token, logprobs)).collect())
                });
                let entries: Vec<_> = entries?;
                self.answer.prompt_logprobs.get_or_insert_default().extend(entries);
            }
            Some(RequestEvent::Embedding(values)) => self.embedding = Some(values),
            Some(RequestEvent::Token { token, logprobs, .. }) => {
                self.first_token.get_or_insert_with(Instant::now);
                self.prefilled = self.prompt.len();
                self.answer.tokens.push(token);
                self.tokens.push(token);
                if let (Some(all), Some(logprobs)) = (&mut self.answer.logprobs, logprobs) {
                    let entry = self.model.with_text(|text| Ok(entry(text, token, &logprobs)))?;
                    all.push(entry);
                }
                if self.end_tokens.contains(token) && !self.end_tokens.includes(token) {
                    self.source.end_token();
                    return Ok(None);
                }
                self.source.push(token)?;
                let delta = self.parts();
                self.answer.usage.reasoning_tokens += usize::from(self.parts.is_thinking);
                return Ok(delta);
            }
            Some(RequestEvent::Finished(finish)) => {
                let mut delta = None;
                if finish != Finish::StopString {
                    self.source.finish()?;
                    delta = self.parts();
                }
                self.end(finish_name(finish, !self.parts.calls.is_empty()));
                return Ok(delta);
            }
            Some(RequestEvent::Failed(error)) => {
                self.end("cancelled");
                return Err(Fault::Engine(error));
            }
            Some(_) => {}
            None => {
                self.end("cancelled");
                if !self.stop.is_set() {
                    self.model.check()?;
                    return Err(Error::internal("the scheduler has ended the request").into());
                }
            }
        }
        Ok(None)
    }

    fn end(&mut self, finish: &'static str) {
        let now = Instant::now();
        self.events = None;
        self.answer.finish = finish;
        self.answer.tool_calls = std::mem::take(&mut self.parts.calls);
        self.answer.seconds = now.duration_since(self.since).as_secs_f64();
        let decode = self.first_token.map(|first| now.duration_since(first).as_secs_f64());
        self.answer.decode_seconds = decode.unwrap_or(0.0);
        let stats = self.model.with_core(|core| Ok(core.stats().steps));
        self.answer.stats = stats.map_or_else(|_| Stats::default(), |s| s.since(&self.before));
    }

    /// Parts that the last token completed.
    fn parts(&mut self) -> Option<Delta> {
        let mut part = Delta::default();
        self.source.deltas().for_each(|delta| self.parts.add(&mut part, delta));
        self.answer.text += &part.text;
        self.answer.reasoning += &part.reasoning;
        if part.is_empty() {
            return None;
        }
        part.tokens = std::mem::take(&mut self.tokens);
        Some(part)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        self.cancel();
    }
}
