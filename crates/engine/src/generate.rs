//! An answer: prefill, then token by token until something ends it.

use std::{ops::ControlFlow, time::Instant};

use serde::Serialize;

use crate::{Error, Sampler, Sampling, Session, StopStrings, model::Watch, stats::Stats};

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub struct GenerateRequest {
    /// How tokens are chosen.
    pub sampling: Sampling,
    /// At most this many tokens; by default as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
}

/// Why an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Finish {
    /// The model ended it.
    EndToken,
    /// A stop string came.
    StopString,
    /// It has as many tokens as were asked for.
    MaxTokens,
    /// The context is full.
    Context,
    /// Somebody cancelled it.
    Cancelled,
}

/// A stretch of work.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Phase {
    /// Tokens that went through the model.
    pub tokens: u64,
    /// Wall time.
    pub seconds: f64,
    /// What it cost.
    pub stats: Stats,
}

impl Phase {
    /// Tokens per second; zero when nothing was done.
    pub fn tokens_per_second(&self) -> f64 {
        if self.tokens == 0 || self.seconds <= 0.0 { 0.0 } else { self.tokens as f64 / self.seconds }
    }
}

/// A finished answer.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// The text, without end token and stop string.
    pub text: String,
    /// Its tokens, the end token included if one came.
    pub tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, the ones that the session had already.
    pub reused: usize,
    /// Why it ended.
    pub finish: Finish,
    /// Computing the prompt.
    pub prefill: Phase,
    /// Computing the answer.
    pub decode: Phase,
}

/// Brings `session` to `prompt` and continues it. `on_text` gets the answer in pieces, each of whole characters;
/// breaking there ends the answer as cancelled.
///
/// # Errors
/// The checkpoint has no tokenizer; the prompt is empty or longer than the context; a sampling value is out of
/// range; an expert cannot be read.
pub fn generate(
    session: &mut Session,
    prompt: &[u32],
    request: &GenerateRequest,
    watch: &mut Watch<'_>,
    on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Answer, Error> {
    let engine = session.engine().clone();
    let text = engine.text()?;
    let mut sampler = Sampler::new(request.sampling.clone(), engine.blueprint().vocab)?;
    let mut stops = StopStrings::new(request.stop.clone())?;
    let mut decoder = text.decoder();
    sampler.prompt(prompt);

    let mut timer = Timer::start(session);
    let synced = match session.sync(prompt, watch) {
        Ok(synced) => Some(synced),
        Err(Error::Cancelled) => None,
        Err(error) => return Err(error),
    };
    let mut answer = Answer {
        text: String::new(),
        tokens: Vec::new(),
        prompt_tokens: prompt.len(),
        reused: synced.map_or(0, |s| s.reused),
        finish: Finish::Cancelled,
        prefill: timer.lap(session),
        decode: Phase::default(),
    };
    if synced.is_none() {
        return Ok(answer);
    }
    let limit = request.max_tokens.unwrap_or(usize::MAX);
    answer.finish = loop {
        let last = answer.tokens.last().copied();
        if last.is_some() && session.tokens().len() == engine.plan().context {
            break Finish::Context;
        }
        if answer.tokens.len() >= limit {
            break Finish::MaxTokens;
        }
        if watch.is_cancelled() {
            break Finish::Cancelled;
        }
        let mut inner = Watch { cancel: watch.cancel, ..Watch::default() };
        let chosen = match last {
            None => sampler.sample(session.logits()),
            Some(last) => session.next(&[last], &mut sampler, &mut inner),
        };
        let token = match chosen {
            Ok(token) => token,
            Err(Error::Cancelled) => break Finish::Cancelled,
            Err(error) => return Err(error),
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
    // What the decoder and the stop strings held back is part of every answer that nobody cut short.
    if !matches!(answer.finish, Finish::StopString | Finish::Cancelled) {
        let rest = stops.push(decoder.finish()?).emit.to_owned();
        let _ = emit(&rest, &mut answer.text, on_text);
        let _ = emit(stops.finish(), &mut answer.text, on_text);
    }
    answer.decode = timer.lap(session);
    Ok(answer)
}

fn emit(piece: &str, text: &mut String, on_text: &mut dyn FnMut(&str) -> ControlFlow<()>) -> ControlFlow<()> {
    if piece.is_empty() {
        return ControlFlow::Continue(());
    }
    text.push_str(piece);
    on_text(piece)
}

/// Splits a session's work into phases.
pub(crate) struct Timer {
    since: Instant,
    stats: Stats,
}

impl Timer {
    pub(crate) fn start(session: &Session) -> Self {
        Self { since: Instant::now(), stats: session.stats() }
    }

    /// The work since the start or the last lap.
    pub(crate) fn lap(&mut self, session: &Session) -> Phase {
        let now = Self::start(session);
        let stats = now.stats.since(&self.stats);
        let seconds = now.since.duration_since(self.since).as_secs_f64();
        *self = now;
        Phase { tokens: stats.tokens, seconds, stats }
    }
}
