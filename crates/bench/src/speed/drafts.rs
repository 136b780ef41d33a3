//! Answers with drafts beside the same answers without.

use std::{fmt, sync::Arc, time::Instant};

use moeflux::{
    Engine, GenerateRequest, Sampling, Session, StepControl,
    base::Stats,
    runtime::CancelToken,
    session::{DraftMode, DraftScript, StepTime},
};
use serde::Serialize;

use super::measure::TokenFeed;
use crate::{table::Table, units};

/// Measurement of drafts that a benchmark makes.
#[derive(Clone, Copy, Debug)]
pub struct DraftRequest {
    /// How tokens are drafted.
    pub mode: DraftMode,
    /// Share of drafts that are right, by a script of the answer; `None` for the drafters of the
    /// mode.
    pub acceptance: Option<f64>,
}

/// Figures of answers with drafts, of all repeats.
#[derive(Clone, Debug, Serialize)]
pub struct DraftFigures {
    /// Share of drafts that the script made right, if there was one.
    asked_acceptance: Option<f64>,
    /// Medians of the repeats.
    plain_tokens_per_second: f64,
    tokens_per_second: f64,
    /// Median of the repeats' ratios.
    ratio: f64,
    steps: u64,
    tokens_per_step: f64,
    drafted: u64,
    accepted: u64,
    /// Times of steps, by which the gate decides; empty if the number of drafts was given.
    step_times: Vec<StepTime>,
}

/// Time and counters of an answer.
struct TimedAnswer {
    tokens: Vec<u32>,
    seconds: f64,
    stats: Stats,
}

impl TimedAnswer {
    /// Answers a prompt in a new session. The time begins after the first token.
    fn measure(
        engine: &Engine,
        prompt: &[u32],
        request: &GenerateRequest,
        cancel: Option<&CancelToken>,
    ) -> anyhow::Result<Self> {
        let mut session: Session = engine.session()?;
        let mut control = StepControl::default().cancel(cancel);
        let mut tokens = session.generate(prompt, request, &mut control)?;
        let mut made: Vec<u32> = tokens.next().transpose()?.into_iter().collect();
        let (since, before) = (Instant::now(), tokens.session().stats());
        for token in tokens.by_ref() {
            made.push(token?);
        }
        let seconds = since.elapsed().as_secs_f64();
        Ok(Self { tokens: made, seconds, stats: tokens.session().stats().since(&before) })
    }

    fn tokens_per_second(&self) -> f64 {
        self.tokens.len().saturating_sub(1) as f64 / self.seconds
    }
}

impl DraftFigures {
    /// Measures answers of the model itself to random prompts, without and with drafts in turn.
    pub(super) fn measure(
        engine: &Engine,
        request: DraftRequest,
        feed: TokenFeed,
        repeats: u64,
        cancel: Option<&CancelToken>,
    ) -> anyhow::Result<Self> {
        let DraftRequest { mode, acceptance } = request;
        // Greedy answers of random weights repeat themselves.
        let sampling = Sampling::default().temperature(1.0).top_k(40);
        let (mut plain_speeds, mut speeds, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        let (mut tokens, mut steps, mut stats) = (0, 0, Stats::default());
        for seed in 0..repeats {
            let (prompt, _) = TokenFeed { seed, ..feed }.tokens(engine.blueprint().vocab);
            let prompt = if prompt.is_empty() { vec![0] } else { prompt };
            let plain = GenerateRequest::default()
                .sampling(sampling.clone().seed(seed))
                .max_tokens(feed.answer + 1)
                .ignore_eos(true)
                .draft(DraftMode::Off);
            let without = TimedAnswer::measure(engine, &prompt, &plain, cancel)?;
            let script = acceptance.map(|acceptance| {
                let answer = &without.tokens[..];
                Arc::new(DraftScript::new(prompt.len(), answer, acceptance, seed)) as _
            });
            let drafted = plain.draft(mode).drafter(script);
            let with = TimedAnswer::measure(engine, &prompt, &drafted, cancel)?;
            plain_speeds.push(without.tokens_per_second());
            speeds.push(with.tokens_per_second());
            ratios.push(with.tokens_per_second() / without.tokens_per_second());
            stats = stats.plus(&with.stats);
            let made = with.tokens.len().saturating_sub(1) as u64;
            (tokens, steps) = (tokens + made, steps + made.saturating_sub(with.stats.accepted));
        }
        Ok(Self {
            asked_acceptance: acceptance,
            plain_tokens_per_second: median(plain_speeds),
            tokens_per_second: median(speeds),
            ratio: median(ratios),
            steps,
            tokens_per_step: tokens as f64 / steps.max(1) as f64,
            drafted: stats.drafted,
            accepted: stats.accepted,
            step_times: engine.step_times(),
        })
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

impl fmt::Display for DraftFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let share = units::percent(self.accepted as f64 / self.drafted.max(1) as f64);
        writeln!(
            f,
            "answers of the model itself: {} without drafts, {} with them, {:.2} times; \
             {:.2} tokens per step, {} drafted, {share} right",
            units::rate(self.plain_tokens_per_second),
            units::rate(self.tokens_per_second),
            self.ratio,
            self.tokens_per_step,
            units::plural(self.drafted, "token"),
        )?;
        if self.step_times.is_empty() {
            return Ok(());
        }
        let mut table = Table::new(0);
        table.head(["drafts", "steps", "time of a step"]);
        for time in self.step_times.iter().filter(|time| time.sequences == 1) {
            table.row([time.drafts.to_string(), time.steps.to_string(), units::time(time.seconds)]);
        }
        write!(f, "{table}")
    }
}
