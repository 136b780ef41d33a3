//! What `run` and `chat` share: a prompt becomes an answer, and the answer a report.

use std::{
    hash::{BuildHasher, Hasher},
    ops::ControlFlow,
};

use moeflux::{
    Answer, ChatOptions, Engine, Finish, GenerateRequest, MemoryPlan, Phase, Sampling, Session,
    StepControl, SystemMemory, Text,
};
use serde::Serialize;

use super::keep::{Prefilled, PrefixCache};
use crate::{
    args::{AnswerArgs, Switch},
    interrupt, load, out,
    progress::Ui,
    units,
};

impl AnswerArgs {
    /// The makers' advice where nothing else is asked for.
    pub(crate) fn request(&self, text: &Text) -> GenerateRequest {
        let advice = &text.generation().sampling;
        let sampling = Sampling {
            temperature: self.temperature.unwrap_or(advice.temperature),
            top_k: self.top_k.unwrap_or(advice.top_k),
            top_p: self.top_p.unwrap_or(advice.top_p),
            min_p: self.min_p.unwrap_or(advice.min_p),
            repetition_penalty: self.repetition_penalty.unwrap_or(advice.repetition_penalty),
            presence_penalty: self.presence_penalty.unwrap_or(advice.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(advice.frequency_penalty),
            seed: self.seed.unwrap_or_else(any_seed),
        };
        let max_tokens = self.max_tokens.map(Into::into);
        GenerateRequest {
            sampling,
            max_tokens,
            stop: self.stop.clone(),
            ..GenerateRequest::default()
        }
    }

    pub(crate) fn chat_options(&self) -> ChatOptions {
        ChatOptions {
            thinking: self.thinking.map(|s| matches!(s, Switch::On)),
            ..ChatOptions::default()
        }
    }
}

/// Another one each time. 32 bits: people copy it, and every JSON reader keeps it whole.
fn any_seed() -> u64 {
    // The standard library's hashers are keyed at random, which is as good as asking the system.
    std::collections::hash_map::RandomState::new().build_hasher().finish() & 0xFFFF_FFFF
}

/// Answers `prompt`, from `cache` as far as that has it; `sink` gets the text as it is made. Ctrl-C ends the answer, and so does
/// whoever reads no more of it.
///
/// # Errors
/// The engine failed, or `sink` for another reason.
pub(crate) fn answer(
    session: &mut Session,
    prompt: &[u32],
    request: &GenerateRequest,
    cache: Option<&PrefixCache>,
    ui: Ui,
    sink: &mut dyn FnMut(&str) -> anyhow::Result<()>,
) -> anyhow::Result<(Answer, Option<Prefilled>)> {
    let armed = interrupt::arm();
    let bar = ui.share(&format!("prefill, {}", units::plural(prompt.len() as u64, "token")));
    let mut progress = |share: f64| bar.share(share);
    let mut watch = StepControl {
        cancel: Some(armed.flag()),
        progress: Some(&mut progress),
        ..StepControl::default()
    };
    let prefilled =
        cache.map(|cache| cache.prefill(session, prompt, &mut watch, ui)).transpose()?;
    let mut failed = None;
    let mut answer = moeflux::generate(session, prompt, request, &mut watch, &mut |piece| {
        bar.clear();
        if failed.is_none() {
            failed = sink(piece).err();
        }
        if failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    if let Some(prefilled) = &prefilled {
        answer.reused = prefilled.reused.min(answer.reused);
        answer.prefill = both(prefilled.phase, answer.prefill);
    }
    match failed.filter(|error| !error.is::<out::Closed>()) {
        Some(error) => Err(error),
        None => Ok((answer, prefilled)),
    }
}

/// Two stretches of work as one.
fn both(a: Phase, b: Phase) -> Phase {
    Phase {
        tokens: a.tokens + b.tokens,
        seconds: a.seconds + b.seconds,
        stats: a.stats.plus(&b.stats),
    }
}

/// What answers have cost so far.
#[derive(Clone, Copy, Default)]
pub(crate) struct Cost {
    prefill: Phase,
    decode: Phase,
}

impl Cost {
    pub(crate) fn of(answer: &Answer) -> Self {
        Self { prefill: answer.prefill, decode: answer.decode }
    }

    pub(crate) fn add(&mut self, answer: &Answer) {
        self.prefill = both(self.prefill, answer.prefill);
        self.decode = both(self.decode, answer.decode);
    }

    /// One line for people.
    pub(crate) fn line(&self, engine: &Engine) -> String {
        let statistics = Statistics::of(self);
        let phase = |what: &str, phase: &Phase| {
            let tokens = units::plural(phase.tokens, "token");
            format!("{what} {tokens} at {}", units::rate(phase.tokens_per_second()))
        };
        let mut parts = Vec::new();
        // A prompt that was kept costs nothing.
        if self.prefill.tokens > 0 || self.decode.tokens == 0 {
            parts.push(phase("prefill", &self.prefill));
        }
        if self.decode.tokens > 0 {
            parts.push(phase("decode", &self.decode));
        }
        let per_token = statistics.bytes_per_token;
        parts.push(format!("{} read per token", units::disk(per_token)));
        parts.push(format!("{} in all", units::disk(statistics.bytes_read as f64)));
        parts.push(format!("hit rate {}", units::percent(statistics.hit_rate)));
        parts.push(load::peak(engine.plan(), statistics.peak_memory));
        parts.push(load::on(engine.device(), statistics.dispatches));
        parts.join("; ")
    }
}

/// Statistics for programs. Sizes are bytes.
#[derive(Serialize)]
pub(crate) struct Statistics {
    prefill: PhaseStatistics,
    decode: PhaseStatistics,
    /// By all tokens together.
    bytes_read: u64,
    /// Per decoded token; per token of the prompt when none was decoded.
    bytes_per_token: f64,
    /// Of the same tokens.
    hit_rate: f64,
    peak_memory: u64,
    /// Kernels that a graphics adapter was given; zero where none computes.
    dispatches: u64,
}

#[derive(Serialize)]
struct PhaseStatistics {
    tokens: u64,
    seconds: f64,
    tokens_per_second: f64,
    bytes_read: u64,
    bytes_per_token: f64,
    experts_needed: u64,
    experts_read: u64,
    hit_rate: f64,
    stalled_seconds: f64,
    dispatches: u64,
    submissions: u64,
    waits: u64,
}

impl PhaseStatistics {
    fn of(phase: &Phase) -> Self {
        let s = &phase.stats;
        Self {
            tokens: phase.tokens,
            seconds: phase.seconds,
            tokens_per_second: phase.tokens_per_second(),
            bytes_read: s.bytes_read,
            bytes_per_token: s.bytes_read as f64 / phase.tokens.max(1) as f64,
            experts_needed: s.experts_needed,
            experts_read: s.experts_read,
            hit_rate: s.hit_rate(),
            stalled_seconds: s.stalled_ns as f64 / 1e9,
            dispatches: s.dispatches,
            submissions: s.submissions,
            waits: s.waits,
        }
    }
}

impl Statistics {
    pub(crate) fn of(cost: &Cost) -> Self {
        let (prefill, decode) =
            (PhaseStatistics::of(&cost.prefill), PhaseStatistics::of(&cost.decode));
        let telling = if decode.tokens > 0 { &decode } else { &prefill };
        Self {
            bytes_read: prefill.bytes_read + decode.bytes_read,
            bytes_per_token: telling.bytes_per_token,
            hit_rate: telling.hit_rate,
            peak_memory: SystemMemory::now().peak,
            dispatches: prefill.dispatches + decode.dispatches,
            prefill,
            decode,
        }
    }
}

/// What a user should know of how an answer ended.
pub(crate) fn ending(answer: &Answer, plan: &MemoryPlan) -> Option<String> {
    match answer.finish {
        Finish::Context => Some(format!(
            "the answer is cut off: the context of {} tokens is full; --ctx allows more",
            plan.context
        )),
        Finish::Cancelled => Some("the answer was interrupted".to_owned()),
        Finish::EndToken | Finish::StopString | Finish::MaxTokens => None,
    }
}
