//! Generation and statistics, shared by `run` and `chat`.

use std::{
    hash::{BuildHasher, Hasher},
    ops::ControlFlow,
};

use moeflux::{
    Answer, ChatOptions, Engine, Finish, GenerateRequest, MemoryPlan, Sampling, Session,
    StepControl,
    base::SystemMemory,
    serve::Phase,
    session::Prompt,
    text::{Delta, Text},
};
use moeflux_bench::{describe, units};
use serde::Serialize;

use super::persist::{PrefixCacheReport, PromptCache};
use crate::{
    args::{AnswerArgs, Switch},
    hub::ModelDownload,
    interrupt, out,
    progress::Ui,
    wrong_use::WrongUse,
};

impl AnswerArgs {
    /// Request with the model's recommended sampling where no option is given. Broken
    /// recommendations are a note.
    ///
    /// # Errors
    /// The tokenizer has no such end token.
    pub(crate) fn request(&self, text: &Text, ui: Ui) -> anyhow::Result<GenerateRequest> {
        let recommended = match text.generation() {
            Ok(generation) => generation.sampling.clone(),
            Err(error) => {
                if self.temperature.is_none() {
                    ui.note(format_args!("sampling is not as the model's authors advise: {error}"));
                }
                Sampling::default()
            }
        };
        let sampling = Sampling::default()
            .temperature(self.temperature.unwrap_or(recommended.temperature))
            .top_k(self.top_k.unwrap_or(recommended.top_k))
            .top_p(self.top_p.unwrap_or(recommended.top_p))
            .min_p(self.min_p.unwrap_or(recommended.min_p))
            .repetition_penalty(self.repetition_penalty.unwrap_or(recommended.repetition_penalty))
            .presence_penalty(self.presence_penalty.unwrap_or(recommended.presence_penalty))
            .frequency_penalty(self.frequency_penalty.unwrap_or(recommended.frequency_penalty))
            .seed(self.seed.unwrap_or_else(random_seed));
        let max_tokens = self.max_tokens.map(Into::into);
        let end_tokens = self.end_token.iter().map(|token| end_token(text, token));
        Ok(GenerateRequest::default()
            .sampling(sampling)
            .max_tokens(max_tokens)
            .end_tokens(end_tokens.collect::<Result<_, _>>()?)
            .stop(self.stop.clone()))
    }

    pub(crate) fn chat_options(&self) -> ChatOptions {
        ChatOptions::default().thinking(self.thinking.map(|s| matches!(s, Switch::On)))
    }
}

/// Id of a token that the user names by its text or its id.
///
/// # Errors
/// The tokenizer does not have it.
fn end_token(text: &Text, token: &str) -> Result<u32, WrongUse> {
    text.tokenizer().token_to_id(token).or_else(|| token.parse().ok()).ok_or_else(|| {
        WrongUse(format!(
            "--end-token {token}: the tokenizer has no such token; for a text that is several \
             tokens, give --stop"
        ))
    })
}

/// Random seed of 32 bits: short to copy, and exact in every JSON parser.
fn random_seed() -> u64 {
    // Hashers of the standard library have random keys.
    std::collections::hash_map::RandomState::new().build_hasher().finish() & 0xFFFF_FFFF
}

/// Share of a prompt that is all of it, but for rounding.
const WHOLE: f64 = 1.0 - 1e-9;

/// Answers `prompt`, reusing `cache`; `sink` receives thoughts and text as they are generated. The
/// rest of a `download` is fetched from the first token on. Ctrl-C ends the answer, and so does a
/// closed stdout.
///
/// # Errors
/// The engine or `sink` failed.
pub(crate) fn answer(
    session: &mut Session,
    prompt: &[u32],
    request: &GenerateRequest,
    cache: Option<&PromptCache>,
    mut download: Option<&mut ModelDownload>,
    ui: Ui,
    sink: &mut dyn FnMut(Delta<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<(Answer, Option<PrefixCacheReport>)> {
    let armed = interrupt::arm();
    let bar = ui.share(&format!("prefill, {}", units::plural(prompt.len() as u64, "token")));
    let mut progress = |share: f64| {
        bar.share(share);
        if share >= WHOLE
            && let Some(download) = download.as_deref_mut()
        {
            download.on_first_token();
        }
    };
    let mut control = StepControl::default().cancel(armed.flag()).progress(&mut progress);
    let with_images = Prompt::new(prompt, &request.images);
    let prefilled =
        cache.map(|cache| cache.prefill(session, with_images, &mut control, ui)).transpose()?;
    let mut failed = None;
    let mut answer = moeflux::generate(session, prompt, request, &mut control, &mut |delta| {
        bar.clear();
        if failed.is_none() {
            failed = sink(delta).err();
        }
        if failed.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    if let Some(prefilled) = &prefilled {
        answer.reused = prefilled.reused.min(answer.reused);
        answer.prefill = prefilled.phase.plus(&answer.prefill);
    }
    match failed.filter(|error| !error.is::<out::Closed>()) {
        Some(error) => Err(error),
        None => Ok((answer, prefilled)),
    }
}

/// Accumulated cost of answers.
#[derive(Clone, Copy, Default)]
pub(crate) struct AnswerCost {
    prefill: Phase,
    decode: Phase,
}

impl AnswerCost {
    pub(crate) fn new(answer: &Answer) -> Self {
        Self { prefill: answer.prefill, decode: answer.decode }
    }

    pub(crate) fn add(&mut self, answer: &Answer) {
        self.prefill = self.prefill.plus(&answer.prefill);
        self.decode = self.decode.plus(&answer.decode);
    }

    /// Statistics as one line of text.
    pub(crate) fn line(&self, engine: &Engine) -> String {
        let statistics = AnswerStatistics::of(self);
        let phase = |what: &str, phase: &Phase| {
            let tokens = units::plural(phase.tokens, "token");
            format!("{what} {tokens} at {}", units::rate(phase.tokens_per_second()))
        };
        let mut parts = Vec::new();
        // A cached prompt has no prefill.
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
        let plan = engine.plan();
        // A card that holds every expert has all hits.
        if let Some(rate) = statistics.card_hit_rate
            && plan.card().is_some()
            && plan.slots() < engine.blueprint().experts()
        {
            parts.push(format!("on the card {} of the experts used", units::percent(rate)));
        }
        let DraftStatistics { drafted, accepted, seconds_won } = statistics.drafts;
        if drafted > 0 {
            parts.push(format!(
                "{} drafted, {} right",
                units::plural(drafted, "token"),
                units::percent(accepted as f64 / drafted as f64)
            ));
            match seconds_won {
                won if won > 0.0 => parts.push(format!("{} won by drafts", units::time(won))),
                won if won < 0.0 => parts.push(format!("{} lost by drafts", units::time(-won))),
                _ => {}
            }
        }
        let on_host = statistics.prefill.experts_on_host + statistics.decode.experts_on_host;
        if on_host > 0 {
            let needed = statistics.prefill.experts_needed + statistics.decode.experts_needed;
            let share = units::percent(on_host as f64 / needed as f64);
            parts.push(format!("{share} of the experts computed on the host"));
        }
        if let Some(number) = plan.experts_number() {
            parts.push(format!("experts divided by plan {number}"));
        }
        parts.push(describe::peak_memory(&plan, statistics.peak_memory));
        parts.push(describe::device(engine.device(), statistics.dispatches));
        parts.join("; ")
    }
}

/// Statistics as JSON. Sizes are bytes.
#[derive(Serialize)]
pub(crate) struct AnswerStatistics {
    prefill: PhaseStatistics,
    decode: PhaseStatistics,
    /// Bytes read for all tokens together.
    bytes_read: u64,
    /// Per decoded token; per prompt token if none was decoded.
    bytes_per_token: f64,
    /// Hit rate of the same tokens.
    hit_rate: f64,
    /// Share of their uses of experts that a card's own memory had; null if none was counted.
    card_hit_rate: Option<f64>,
    drafts: DraftStatistics,
    peak_memory: u64,
    /// GPU dispatches; zero on the CPU.
    dispatches: u64,
}

/// Drafts of decoded tokens.
#[derive(Clone, Copy, Serialize)]
struct DraftStatistics {
    /// Tokens that steps have checked.
    drafted: u64,
    /// Of these, tokens that were right.
    accepted: u64,
    /// Negative if they have cost time.
    seconds_won: f64,
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
    /// Computed by the processor beside a GPU.
    experts_on_host: u64,
    hit_rate: f64,
    /// Share of uses of experts that a GPU's own memory had; null if none was counted.
    card_hit_rate: Option<f64>,
    /// Experts on a GPU that were exchanged for ones in host memory that are used more.
    experts_exchanged: u64,
    stalled_seconds: f64,
    /// Rows read from tables on disk, their bytes, and the share of the time of their reads that
    /// was not waited for.
    rows_read: u64,
    row_bytes_read: u64,
    rows_hidden: Option<f64>,
    /// Waits for GPU kernels to be compiled.
    compiling_seconds: f64,
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
            experts_on_host: s.experts_on_host,
            hit_rate: s.hit_rate(),
            card_hit_rate: s.card_hit_rate(),
            experts_exchanged: s.experts_exchanged,
            stalled_seconds: s.stalled_ns as f64 / 1e9,
            rows_read: s.rows_read,
            row_bytes_read: s.row_bytes_read,
            rows_hidden: s.rows_hidden(),
            compiling_seconds: s.compiling_ns as f64 / 1e9,
            dispatches: s.dispatches,
            submissions: s.submissions,
            waits: s.waits,
        }
    }
}

impl AnswerStatistics {
    pub(crate) fn of(cost: &AnswerCost) -> Self {
        let (prefill, decode) =
            (PhaseStatistics::of(&cost.prefill), PhaseStatistics::of(&cost.decode));
        let main = if decode.tokens > 0 { &decode } else { &prefill };
        Self {
            bytes_read: prefill.bytes_read + decode.bytes_read,
            bytes_per_token: main.bytes_per_token,
            hit_rate: main.hit_rate,
            card_hit_rate: main.card_hit_rate,
            drafts: DraftStatistics {
                drafted: cost.decode.stats.drafted,
                accepted: cost.decode.stats.accepted,
                seconds_won: cost.decode.stats.seconds_won(),
            },
            peak_memory: SystemMemory::now().peak,
            dispatches: prefill.dispatches + decode.dispatches,
            prefill,
            decode,
        }
    }
}

/// Note on an answer that ended early.
pub(crate) fn ending(answer: &Answer, plan: &MemoryPlan) -> Option<String> {
    match answer.finish {
        Finish::Context => Some(format!(
            "the answer is cut off: the context of {} tokens is full; --ctx allows more",
            plan.context
        )),
        Finish::Cancelled => Some("the answer was interrupted".to_owned()),
        Finish::EndToken | Finish::StopString | Finish::MaxTokens => {
            let has_only_thoughts = answer.text.is_empty() && !answer.reasoning.is_empty();
            (has_only_thoughts || answer.unfinished_reasoning).then(|| ONLY_THOUGHTS.to_owned())
        }
    }
}

/// Note on an answer without text.
pub(crate) const ONLY_THOUGHTS: &str = "the answer ended in its thoughts, before its text began";
