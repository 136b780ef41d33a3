//! Decode loop: prefill, then one token after another until a stop condition.

use std::{ops::ControlFlow, time::Instant};

use serde::Serialize;

use crate::{
    base::{error::Error, stats::Stats},
    runtime::control::{CancelToken, StepControl},
    session::{
        engine::Engine,
        session::{Session, Synced},
    },
    text::{
        sampling::{EndTokens, Sampler, Sampling, StopStrings},
        tokenizer::Decoder,
    },
};

/// A generation request.
#[derive(Clone, Debug, Default)]
pub struct GenerateRequest {
    /// Sampling parameters. The model's recommended ones are in
    /// [`Text::generation`](crate::Text::generation).
    pub sampling: Sampling,
    /// Maximum tokens to generate. Default: up to the context length.
    pub max_tokens: Option<usize>,
    /// Stop strings; not part of the text. A token stream includes the tokens up to the one that
    /// completes a stop string; [`StopStrings`] removes it from the decoded text.
    pub stop: Vec<String>,
    /// Lengths of prompt prefixes that other prompts are likely to share, ascending: see
    /// [`Session::sync_with`]. A [`Scheduler`](crate::Scheduler) ignores them.
    pub ends: Vec<usize>,
}

/// Reason for the end of a generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model produced an end token.
    EndToken,
    /// A stop string occurred.
    StopString,
    /// The requested number of tokens is reached.
    MaxTokens,
    /// The context is full.
    Context,
    /// The caller cancelled.
    Cancelled,
}

/// Prefill or decode, with its cost.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Phase {
    /// Tokens that ran through the model.
    pub tokens: u64,
    /// Wall time in seconds.
    pub seconds: f64,
    /// Counters of this phase.
    pub stats: Stats,
}

impl Phase {
    /// Tokens per second; zero if nothing was computed.
    pub fn tokens_per_second(&self) -> f64 {
        if self.tokens == 0 || self.seconds <= 0.0 {
            0.0
        } else {
            self.tokens as f64 / self.seconds
        }
    }
}

/// A finished response.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// Text without end token and stop string.
    pub text: String,
    /// Generated tokens, including the end token if one occurred.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, tokens that did not have to be computed.
    pub reused: usize,
    /// Reason for the end.
    pub finish: Finish,
    /// Cost of the prompt.
    pub prefill: Phase,
    /// Cost of the generated tokens.
    pub decode: Phase,
}

/// Detects stop strings in the decoded text.
pub(crate) struct StopDetector {
    decoder: Decoder,
    strings: StopStrings,
    found: bool,
}

impl StopDetector {
    /// For a request's stop strings; `None` if there are none.
    pub(crate) fn for_request(
        engine: &Engine,
        request: &GenerateRequest,
    ) -> Result<Option<Self>, Error> {
        if request.stop.is_empty() {
            return Ok(None);
        }
        let (decoder, strings) =
            (engine.text()?.decoder(), StopStrings::new(request.stop.clone())?);
        Ok(Some(Self { decoder, strings, found: false }))
    }

    /// Consumes the next token.
    pub(crate) fn push(&mut self, token: u32) -> Result<(), Error> {
        self.found |= self.strings.push(self.decoder.push(token)?).stopped;
        Ok(())
    }

    /// Whether a stop string has occurred.
    pub(crate) fn found(&self) -> bool {
        self.found
    }
}

/// Iterator over generated tokens: see [`Session::generate`].
pub struct Tokens<'a> {
    session: &'a mut Session,
    sampler: Sampler,
    end_tokens: EndTokens,
    stops: Option<StopDetector>,
    cancel: Option<&'a CancelToken>,
    synced: Synced,
    max_tokens: usize,
    generated: usize,
    last: Option<u32>,
    finish: Option<Finish>,
    failed: bool,
}

impl<'a> Tokens<'a> {
    pub(crate) fn start<'w: 'a>(
        session: &'a mut Session,
        prompt: &[u32],
        request: &GenerateRequest,
        stops: Option<StopDetector>,
        control: &mut StepControl<'w>,
    ) -> Result<Self, Error> {
        let mut sampler =
            Sampler::new(request.sampling.clone(), session.engine().blueprint().vocab)?;
        sampler.prompt(prompt);
        let end_tokens = session.engine().end_tokens();
        let synced = session.sync_with(prompt, &request.ends, control)?;
        Ok(Self {
            session,
            sampler,
            end_tokens,
            stops,
            cancel: control.cancel,
            synced,
            max_tokens: request.max_tokens.unwrap_or(usize::MAX),
            generated: 0,
            last: None,
            finish: None,
            failed: false,
        })
    }

    /// The session. It holds all tokens but the last one, which is fed when the next one is
    /// requested.
    pub fn session(&self) -> &Session {
        self.session
    }

    /// Reuse and work for the prompt.
    pub fn synced(&self) -> Synced {
        self.synced
    }

    /// Reason for the end; `None` while generating, and after an error.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Stop condition that holds before the next token.
    fn stop_condition(&self) -> Option<Finish> {
        let full = self.session.tokens().len() == self.session.engine().plan().context;
        match self.last {
            Some(last) if self.end_tokens.contains(last) => Some(Finish::EndToken),
            _ if self.stops.as_ref().is_some_and(StopDetector::found) => Some(Finish::StopString),
            Some(_) if full => Some(Finish::Context),
            _ if self.generated >= self.max_tokens => Some(Finish::MaxTokens),
            _ if self.cancel.is_some_and(CancelToken::is_cancelled) => Some(Finish::Cancelled),
            _ => None,
        }
    }
}

impl Iterator for Tokens<'_> {
    type Item = Result<u32, Error>;

    /// The next token. Ends after an error; the session is then at its last good token.
    fn next(&mut self) -> Option<Self::Item> {
        if self.failed || self.finish.is_some() {
            return None;
        }
        self.finish = self.stop_condition();
        if self.finish.is_some() {
            return None;
        }
        let mut control = StepControl { cancel: self.cancel, ..StepControl::default() };
        let sampled = match self.last {
            None => self.sampler.sample(self.session.logits()),
            Some(last) => self.session.next(&[last], &mut self.sampler, &mut control),
        };
        let detect_stop =
            |token| self.stops.as_mut().map_or(Ok(()), |stops| stops.push(token)).map(|()| token);
        match sampled.and_then(detect_stop) {
            Ok(token) => {
                self.last = Some(token);
                self.generated += 1;
                Some(Ok(token))
            }
            Err(Error::Cancelled) => {
                self.finish = Some(Finish::Cancelled);
                None
            }
            Err(error) => {
                self.failed = true;
                Some(Err(error))
            }
        }
    }
}

/// Brings `session` to `prompt` and generates from there. `on_text` receives the text in pieces of
/// whole characters; `Break` ends the generation as cancelled.
///
/// # Errors
/// The checkpoint has no tokenizer; the prompt is empty or longer than the context; a sampling
/// value is out of range; an expert cannot be read.
pub fn generate(
    session: &mut Session,
    prompt: &[u32],
    request: &GenerateRequest,
    control: &mut StepControl<'_>,
    on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Answer, Error> {
    let engine = session.engine().clone();
    let text = engine.text()?;
    let mut stops = StopStrings::new(request.stop.clone())?;
    let mut decoder = text.decoder();
    let mut answer = Answer {
        text: String::new(),
        tokens: Vec::new(),
        prompt_tokens: prompt.len(),
        reused: 0,
        finish: Finish::Cancelled,
        prefill: Phase::default(),
        decode: Phase::default(),
    };
    let mut timer = PhaseTimer::start(session);
    // No [`StopDetector`]: stop strings are detected in the text below.
    let mut tokens = match Tokens::start(session, prompt, request, None, control) {
        Ok(tokens) => tokens,
        Err(Error::Cancelled) => {
            answer.prefill = timer.lap(session);
            return Ok(answer);
        }
        Err(error) => return Err(error),
    };
    answer.reused = tokens.synced().reused;
    answer.prefill = timer.lap(tokens.session());
    answer.finish = loop {
        let token = match tokens.next() {
            Some(token) => token?,
            None => break tokens.finish().unwrap_or(Finish::Cancelled),
        };
        answer.tokens.push(token);
        if text.end().contains(token) {
            break Finish::EndToken;
        }
        let found = stops.push(decoder.push(token)?);
        if emit(found.emit, &mut answer.text, on_text).is_break() {
            break Finish::Cancelled;
        }
        if found.stopped {
            break Finish::StopString;
        }
    };
    // Flushes text held back by the decoder and the stop strings, unless the response was cut off.
    if !matches!(answer.finish, Finish::StopString | Finish::Cancelled) {
        let rest = stops.push(decoder.finish()?).emit.to_owned();
        let _ = emit(&rest, &mut answer.text, on_text);
        let _ = emit(stops.finish(), &mut answer.text, on_text);
    }
    answer.decode = timer.lap(tokens.session());
    Ok(answer)
}

fn emit(
    piece: &str,
    text: &mut String,
    on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> ControlFlow<()> {
    if piece.is_empty() {
        return ControlFlow::Continue(());
    }
    text.push_str(piece);
    on_text(piece)
}

/// Splits a session's work into phases.
pub(crate) struct PhaseTimer {
    since: Instant,
    stats: Stats,
}

impl PhaseTimer {
    pub(crate) fn start(session: &Session) -> Self {
        Self { since: Instant::now(), stats: session.stats() }
    }

    /// Work since the start or the last lap.
    pub(crate) fn lap(&mut self, session: &Session) -> Phase {
        let now = Self::start(session);
        let stats = now.stats.since(&self.stats);
        let seconds = now.since.duration_since(self.since).as_secs_f64();
        *self = now;
        Phase { tokens: stats.tokens, seconds, stats }
    }
}

impl Session {
    /// Brings the session to `prompt` and generates tokens by `request.sampling`. The iterator ends
    /// after an end token, a stop string, `request.max_tokens`, or when the context is full.
    /// Setting `control.cancel` ends it at the next layer. `control.progress` covers the prompt.
    ///
    /// # Errors
    /// As [`Session::sync`]; also if a sampling value is out of range, a stop string is empty, or
    /// the checkpoint has no tokenizer for stop strings.
    pub fn generate<'a, 'w: 'a>(
        &'a mut self,
        prompt: &[u32],
        request: &GenerateRequest,
        control: &mut StepControl<'w>,
    ) -> Result<Tokens<'a>, Error> {
        let stops = StopDetector::for_request(self.engine(), request)?;
        Tokens::start(self, prompt, request, stops, control)
    }
}
