//! Answers in text: the decode loop with its text and timings.

use std::{ops::ControlFlow, time::Instant};

use moeflux_base::Error;
use moeflux_sampling::TokenLogprobs;
use moeflux_text::{AnswerText, Delta};
use serde::Serialize;

use crate::{
    experts::stats::Stats,
    runtime::control::StepControl,
    serve::{
        decode::Tokens,
        request::{AnswerEnd, Finish, GenerateRequest},
    },
    session::session::Session,
};

/// Prefill or decode, with its cost.
#[derive(Clone, Copy, Debug, Default, Serialize)]
#[non_exhaustive]
pub struct Phase {
    /// Tokens that ran through the model.
    pub tokens: u64,
    /// Wall time in seconds.
    pub seconds: f64,
    /// Counters of this phase.
    pub stats: Stats,
}

impl Phase {
    /// The cost of steps with these counters.
    pub fn new(seconds: f64, stats: Stats) -> Self {
        Self { tokens: stats.tokens, seconds, stats }
    }

    /// Sum of two phases.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self::new(self.seconds + other.seconds, self.stats.plus(&other.stats))
    }

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
#[non_exhaustive]
pub struct Answer {
    /// Thoughts before the text, if the model has them; otherwise empty.
    pub reasoning: String,
    /// Whether the answer ended in its thoughts, before its text began.
    pub unfinished_reasoning: bool,
    /// Text without thoughts, end token and stop string.
    pub text: String,
    /// Generated tokens, including the end token if one occurred.
    pub tokens: Vec<u32>,
    /// Log-probabilities of these tokens, if the request asks for them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub logprobs: Vec<TokenLogprobs>,
    /// Log-probabilities of the prompt's tokens but the first, if the request asks for them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub prompt_logprobs: Vec<TokenLogprobs>,
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

/// Brings `session` to `prompt` and generates from there. `on_delta` receives thoughts and text in
/// pieces of whole characters; `Break` ends the generation as cancelled.
///
/// # Errors
/// The checkpoint has no tokenizer; the prompt is empty or longer than the context; a sampling
/// value is out of range; an expert cannot be read.
pub fn generate(
    session: &mut Session,
    prompt: &[u32],
    request: &GenerateRequest,
    control: &mut StepControl<'_>,
    on_delta: &mut dyn FnMut(Delta<'_>) -> ControlFlow<()>,
) -> Result<Answer, Error> {
    let end = AnswerEnd::with_text(session.engine(), prompt, request)?;
    let mut answer = Answer {
        reasoning: String::new(),
        unfinished_reasoning: false,
        text: String::new(),
        tokens: Vec::new(),
        logprobs: Vec::new(),
        prompt_logprobs: Vec::new(),
        prompt_tokens: prompt.len(),
        reused: 0,
        finish: Finish::Cancelled,
        prefill: Phase::default(),
        decode: Phase::default(),
    };
    let mut timer = PhaseTimer::start(session);
    let mut tokens = match Tokens::start(session, prompt, request, end, control) {
        Ok(tokens) => tokens,
        Err(Error::Cancelled) => {
            answer.prefill = timer.lap(session);
            return Ok(answer);
        }
        Err(error) => return Err(error),
    };
    answer.reused = tokens.synced().reused;
    answer.prompt_logprobs = tokens.prompt_logprobs().to_vec();
    answer.prefill = timer.lap(tokens.session());
    answer.finish = loop {
        match tokens.next() {
            Some(token) => {
                answer.tokens.push(token?);
                answer.logprobs.extend(tokens.logprobs().cloned());
            }
            None => break tokens.finish().unwrap_or(Finish::Cancelled),
        }
        if emit(&mut tokens, &mut answer, on_delta).is_break() {
            // The text has these, too.
            for chosen in tokens.take_rest() {
                answer.tokens.push(chosen.token);
                answer.logprobs.extend(chosen.logprobs.map(|logprobs| *logprobs));
            }
            break Finish::Cancelled;
        }
    };
    // Flushes text held back by the decoder and the stop strings, unless the response was cut off.
    if !matches!(answer.finish, Finish::StopString | Finish::Cancelled) {
        tokens.text().map_or(Ok(()), AnswerText::finish)?;
        let _ = emit(&mut tokens, &mut answer, on_delta);
    }
    answer.unfinished_reasoning = tokens.text().is_some_and(|text| text.is_all_thoughts());
    answer.decode = timer.lap(tokens.session());
    Ok(answer)
}

/// Appends the new parts of an answer and passes them on.
fn emit(
    tokens: &mut Tokens<'_>,
    answer: &mut Answer,
    on_delta: &mut dyn FnMut(Delta<'_>) -> ControlFlow<()>,
) -> ControlFlow<()> {
    for delta in tokens.text().into_iter().flat_map(|text| text.deltas()) {
        match delta {
            Delta::Reasoning(piece) => answer.reasoning.push_str(piece),
            Delta::Text(piece) => answer.text.push_str(piece),
            // Calls: no tools were offered.
            _ => {}
        }
        on_delta(delta)?;
    }
    tokens.text().into_iter().for_each(AnswerText::take_deltas);
    ControlFlow::Continue(())
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
        Phase::new(seconds, stats)
    }
}
