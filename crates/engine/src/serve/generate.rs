//! An answer: prefill, then token by token until something ends it.

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

/// What is asked for.
#[derive(Clone, Debug, Default)]
pub struct GenerateRequest {
    /// How tokens are chosen. What the model's makers advise is in [`Text::generation`](crate::Text::generation).
    pub sampling: Sampling,
    /// At most this many tokens; by default as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer; they are not part of it. Where an answer comes as tokens, those up to the one that completes such
    /// a text come all the same, and [`StopStrings`] takes it out of what they say.
    pub stop: Vec<String>,
    /// Lengths of prefixes of the prompt that other prompts are likely to share, in ascending order: [`Session::sync_with`] keeps
    /// points there. A [`Scheduler`](crate::Scheduler) does not look at them.
    pub ends: Vec<usize>,
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
        if self.tokens == 0 || self.seconds <= 0.0 {
            0.0
        } else {
            self.tokens as f64 / self.seconds
        }
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

/// Finds stop strings in what an answer's tokens say.
pub(crate) struct Stops {
    decoder: Decoder,
    strings: StopStrings,
    found: bool,
}

impl Stops {
    /// For a request's stop strings; `None` where it has none.
    pub(crate) fn of(engine: &Engine, request: &GenerateRequest) -> Result<Option<Self>, Error> {
        if request.stop.is_empty() {
            return Ok(None);
        }
        let (decoder, strings) =
            (engine.text()?.decoder(), StopStrings::new(request.stop.clone())?);
        Ok(Some(Self { decoder, strings, found: false }))
    }

    /// Takes the next token.
    pub(crate) fn push(&mut self, token: u32) -> Result<(), Error> {
        self.found |= self.strings.push(self.decoder.push(token)?).stopped;
        Ok(())
    }

    /// Whether one has come.
    pub(crate) fn found(&self) -> bool {
        self.found
    }
}

/// The tokens of an answer, as they are made: see [`Session::generate`].
pub struct Tokens<'a> {
    session: &'a mut Session,
    sampler: Sampler,
    end: EndTokens,
    stops: Option<Stops>,
    cancel: Option<&'a CancelToken>,
    synced: Synced,
    limit: usize,
    made: usize,
    last: Option<u32>,
    finish: Option<Finish>,
    failed: bool,
}

impl<'a> Tokens<'a> {
    pub(crate) fn begin<'w: 'a>(
        session: &'a mut Session,
        prompt: &[u32],
        request: &GenerateRequest,
        stops: Option<Stops>,
        watch: &mut StepControl<'w>,
    ) -> Result<Self, Error> {
        let mut sampler =
            Sampler::new(request.sampling.clone(), session.engine().blueprint().vocab)?;
        sampler.prompt(prompt);
        let end = session.engine().end();
        let synced = session.sync_with(prompt, &request.ends, watch)?;
        Ok(Self {
            session,
            sampler,
            end,
            stops,
            cancel: watch.cancel,
            synced,
            limit: request.max_tokens.unwrap_or(usize::MAX),
            made: 0,
            last: None,
            finish: None,
            failed: false,
        })
    }

    /// The session. It holds all tokens but the last one, which goes in when the next one is asked for.
    pub fn session(&self) -> &Session {
        self.session
    }

    /// What was done for the prompt.
    pub fn synced(&self) -> Synced {
        self.synced
    }

    /// Why there are no more tokens; `None` while there may be some, and after an error.
    pub fn finish(&self) -> Option<Finish> {
        self.finish
    }

    /// Whether something ends it before the next token.
    fn ends(&self) -> Option<Finish> {
        let full = self.session.tokens().len() == self.session.engine().plan().context;
        match self.last {
            Some(last) if self.end.contains(last) => Some(Finish::EndToken),
            _ if self.stops.as_ref().is_some_and(Stops::found) => Some(Finish::StopString),
            Some(_) if full => Some(Finish::Context),
            _ if self.made >= self.limit => Some(Finish::MaxTokens),
            _ if self.cancel.is_some_and(CancelToken::is_cancelled) => Some(Finish::Cancelled),
            _ => None,
        }
    }
}

impl Iterator for Tokens<'_> {
    type Item = Result<u32, Error>;

    /// The next token. After an error there are no more; the session stands at its last good token.
    fn next(&mut self) -> Option<Self::Item> {
        if self.failed || self.finish.is_some() {
            return None;
        }
        self.finish = self.ends();
        if self.finish.is_some() {
            return None;
        }
        let mut watch = StepControl { cancel: self.cancel, ..StepControl::default() };
        let chosen = match self.last {
            None => self.sampler.sample(self.session.logits()),
            Some(last) => self.session.next(&[last], &mut self.sampler, &mut watch),
        };
        let read =
            |token| self.stops.as_mut().map_or(Ok(()), |stops| stops.push(token)).map(|()| token);
        match chosen.and_then(read) {
            Ok(token) => {
                self.last = Some(token);
                self.made += 1;
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
    watch: &mut StepControl<'_>,
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
    let mut timer = Timer::start(session);
    // Stop strings are found in the text here.
    let mut tokens = match Tokens::begin(session, prompt, request, None, watch) {
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
    // What the decoder and the stop strings held back is part of every answer that nobody cut short.
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

impl Session {
    /// Brings the session to `prompt` and continues it: an iterator of tokens, each of them chosen as `request.sampling` says.
    /// It ends after an end token of the model, a stop string, `request.max_tokens`, or when the context is full; setting
    /// `watch.cancel` ends it at the next layer. `watch.progress` is told of the prompt.
    ///
    /// # Errors
    /// As [`Session::sync`]; a sampling value is out of range; a stop string is empty, or the checkpoint has no tokenizer to find
    /// one with.
    pub fn generate<'a, 'w: 'a>(
        &'a mut self,
        prompt: &[u32],
        request: &GenerateRequest,
        watch: &mut StepControl<'w>,
    ) -> Result<Tokens<'a>, Error> {
        let stops = Stops::of(self.engine(), request)?;
        Tokens::begin(self, prompt, request, stops, watch)
    }
}
