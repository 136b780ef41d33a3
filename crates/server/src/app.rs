//! State of the server, and answers of the serving core.

use std::{
    sync::Arc,
    task::{Context, Poll},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use moeflux::{
    GenerateRequest,
    serve::{RequestEvent, RequestHandle, ServingCore},
    text::{AnswerText, MaskSource, StopStrings},
};
use tokio::sync::{
    Semaphore,
    mpsc::{self, Receiver},
};

use crate::{
    access::RequestLog,
    answer::{AnswerDeltas, AnswerSource, ChannelSink, Delta, RawText, UNREAD},
    ask::{Ask, AskPrompt},
    body::BODIES_BYTES,
    error::ApiError,
    guard::Guard,
    ids,
    latency::{AnswerTimer, Latencies},
    metrics::RequestCounters,
    openai::chat_encoder::AnswerHead,
    overflow::Overflow,
    prompt::Prompt,
    responses::ResponseStore,
    server::Timeouts,
    turn_folder::TurnFolder,
    turns::{TurnMemory, TurnRecorder},
};

/// State of the server.
pub(crate) struct App {
    pub(crate) core: ServingCore,
    pub(crate) guard: Guard,
    pub(crate) log: RequestLog,
    /// Masks of all answers.
    masks: Vec<Arc<dyn MaskSource>>,
    pub(crate) counters: RequestCounters,
    pub(crate) latencies: Arc<Latencies>,
    /// Rule for a prompt over the context, unless its request says it.
    pub(crate) overflow: Overflow,
    /// Name of the model in answers.
    pub(crate) model: String,
    /// Start of the server, in seconds since 1970.
    pub(crate) created: u64,
    /// Bytes that bodies may still take.
    pub(crate) body_room: Arc<Semaphore>,
    /// Answers for the next turns.
    pub(crate) turns: Arc<TurnMemory>,
    /// Responses that later requests continue.
    pub(crate) responses: Arc<ResponseStore>,
    /// Time in which a body must arrive.
    pub(crate) body_time: Duration,
    /// Speed of the disk as it was measured, in bytes per second.
    pub(crate) disk_speed: Option<f64>,
}

/// A request that the serving core accepted. Dropping it cancels the request.
struct Accepted {
    events: Receiver<RequestEvent>,
    deltas: AnswerDeltas,
    _handle: RequestHandle,
}

/// Answers to a request. Dropping them cancels the request.
pub(crate) struct Answers {
    /// Choices by index; `None` after their end.
    choices: Vec<Option<Accepted>>,
    /// Choice that is asked first, so that each has its turn.
    next: usize,
    /// Messages that were dropped, as the prompt did not fit the context.
    pub(crate) dropped_messages: usize,
}

/// Deltas of one choice.
pub(crate) struct ChoiceDeltas {
    pub(crate) choice: usize,
    pub(crate) deltas: Vec<Delta>,
}

impl Answers {
    /// Deltas that are ready; `None` after the last ones. Not again after an error.
    ///
    /// # Errors
    /// A request failed, or was ended before its answer.
    pub(crate) fn poll(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<ChoiceDeltas>, ApiError>> {
        let count = self.choices.len();
        for choice in (0..count).map(|i| (self.next + i) % count) {
            let Some(accepted) = &mut self.choices[choice] else { continue };
            if let Poll::Ready(event) = accepted.events.poll_recv(cx) {
                let deltas = accepted.deltas.on(event)?;
                if accepted.deltas.is_ended() {
                    self.choices[choice] = None;
                }
                self.next = choice + 1;
                return Poll::Ready(Ok(Some(ChoiceDeltas { choice, deltas })));
            }
        }
        match self.choices.iter().all(Option::is_none) {
            true => Poll::Ready(Ok(None)),
            false => Poll::Pending,
        }
    }
}

impl App {
    pub(crate) fn new(core: ServingCore, guard: Guard, model: String) -> Self {
        let turns = Arc::new(TurnMemory::new(core.engine().model(), None));
        Self {
            core,
            guard,
            log: RequestLog::default(),
            masks: Vec::new(),
            counters: RequestCounters::default(),
            latencies: Arc::default(),
            overflow: Overflow::default(),
            model,
            created: now(),
            body_room: Arc::new(Semaphore::new(BODIES_BYTES)),
            turns,
            responses: Arc::default(),
            body_time: Timeouts::default().body,
            disk_speed: None,
        }
    }

    /// The state with a receiver of records.
    pub(crate) fn log(self, log: RequestLog) -> Self {
        Self { log, ..self }
    }

    /// The state with a rule for prompts over the context.
    pub(crate) fn overflow(self, overflow: Overflow) -> Self {
        Self { overflow, ..self }
    }

    /// The state with masks of all answers.
    pub(crate) fn masks(self, masks: Vec<Arc<dyn MaskSource>>) -> Self {
        Self { masks, ..self }
    }

    /// The state with turns that outlive the process.
    pub(crate) fn turn_folder(self, folder: Option<TurnFolder>) -> Self {
        let turns = Arc::new(TurnMemory::new(self.core.engine().model(), folder));
        Self { turns, ..self }
    }

    /// The state with a time in which a body must arrive.
    pub(crate) fn body_time(self, body_time: Duration) -> Self {
        Self { body_time, ..self }
    }

    /// The state with the speed of the disk.
    pub(crate) fn disk_speed(self, disk_speed: Option<f64>) -> Self {
        Self { disk_speed, ..self }
    }

    /// Submits the prompts of a request, each for all of its choices.
    ///
    /// # Errors
    /// The waiting line is full, or the server stops.
    pub(crate) fn submit(&self, ask: &Ask, prompts: Vec<Prompt>) -> Result<Answers, ApiError> {
        let dropped_messages = prompts.iter().map(|prompt| prompt.dropped_messages).sum();
        self.counters.add_dropped(dropped_messages);
        let mut choices = Vec::new();
        for prompt in prompts {
            for choice in 0..ask.choices {
                let mut request = ask.request.clone();
                request.sampling.seed = request.sampling.seed.wrapping_add(choice as u64);
                choices.push(Some(self.accept(ask, prompt.clone(), request)?));
            }
        }
        Ok(Answers { choices, next: 0, dropped_messages })
    }

    fn accept(
        &self,
        ask: &Ask,
        prompt: Prompt,
        mut request: GenerateRequest,
    ) -> Result<Accepted, ApiError> {
        let text = self.core.engine().text()?;
        let Prompt { tokens, ends, echo, turn, masks, .. } = prompt;
        let source = match &ask.prompt {
            AskPrompt::Conversation(conversation) => {
                let tools = conversation.callable();
                let parser = text.parser(&tokens, tools)?;
                // The core needs them to find the step with which a stop string ends the answer.
                if !request.stop.is_empty() {
                    request.tools = tools.clone();
                }
                AnswerSource::Parsed(Box::new(AnswerText::new(parser, request.stop.clone())?))
            }
            AskPrompt::Raw { .. } => {
                let stops = StopStrings::new(request.stop.clone())?;
                AnswerSource::Raw(RawText::new(text.decoder(), stops))
            }
        };
        let recorder = turn.map(|start| TurnRecorder::new(&self.turns, start));
        let timer = AnswerTimer::start(&self.latencies);
        let deltas = AnswerDeltas::new(source, text, tokens.len(), timer);
        let deltas = deltas.one_call(ask.one_call).echo(echo).recorder(recorder);
        let deltas = deltas.reports(ask.reports.progress || ask.reports.timings);
        request.masks.extend(masks.into_iter().chain(self.masks.iter().cloned()));
        let (sink, events) = mpsc::channel(UNREAD);
        let handle = self.core.submit(tokens, request.ends(ends), Box::new(ChannelSink(sink)))?;
        Ok(Accepted { events, deltas, _handle: handle })
    }

    /// Fields that all parts of an answer share. `prefix` starts its id.
    pub(crate) fn head(&self, prefix: &str) -> AnswerHead {
        let (id, created) = (ids::random_id(prefix), now());
        AnswerHead { id, created, model: self.model.clone(), ..AnswerHead::default() }
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
