//! Timed runs: prefill of a prompt, then decode of an answer, in one session or several.

use std::time::{Duration, Instant};

use moeflux::{
    Engine, Sampling, Session, StepControl,
    base::{LayerStats, ReadCounters, SplitMix64, Stats},
    runtime::CancelToken,
    session::{BatchEntry, EntryKind},
    text::Sampler,
    tools::{ExpertDemand, MinimumTime, RooflineLimits, TokenCosts},
};
use serde::Serialize;

use super::setting::BenchSetting;

/// One phase, prefill or decode, of one repeat.
#[derive(Debug, Serialize)]
pub struct PhaseMeasurement {
    pub(super) tokens: u64,
    pub(super) seconds: f64,
    pub(super) tokens_per_second: f64,
    /// Bytes of experts read from disk.
    pub(super) bytes_per_token: f64,
    pub(super) hit_rate: f64,
    pub(super) stats: Stats,
    /// Bytes read from files, including the padding of aligned blocks.
    pub(super) file_bytes: u64,
    /// Seconds with at least one read in flight.
    pub(super) disk_seconds: f64,
    /// Reads that were retried.
    pub(super) retries: u64,
    /// Seconds of each decode step; with several sessions, a step is one token of each.
    pub(super) token_seconds: Vec<f64>,
    /// Memory bandwidth measured between the tokens; `None` if it was not measured.
    pub(super) memory_bytes_per_second: Option<f64>,
    /// Roofline time of these tokens with their actual misses.
    #[serde(skip)]
    pub(super) least: Option<MinimumTime>,
}

/// One repeat: a prompt and an answer.
#[derive(Debug, Serialize)]
pub struct RepeatMeasurement {
    /// Tokens of the prompt.
    pub(super) context: usize,
    /// Sessions that shared the steps, if several were asked for.
    pub(super) sessions: Option<usize>,
    pub(super) prefill: Option<PhaseMeasurement>,
    pub(super) decode: Option<PhaseMeasurement>,
}

/// Tokens of one repeat.
#[derive(Clone, Copy)]
pub(super) struct TokenFeed {
    pub(super) setting: BenchSetting,
    /// Tokens that are decoded.
    pub(super) answer: usize,
    /// Seed of the random tokens.
    pub(super) seed: u64,
}

/// Data for the roofline of decode steps.
#[derive(Clone, Copy)]
pub(super) struct RooflineModel<'a> {
    pub(super) costs: &'a TokenCosts,
    pub(super) limits: RooflineLimits,
    /// Threads of the bandwidth probe between steps.
    pub(super) threads: usize,
}

/// Callbacks of a repeat.
pub(super) struct RepeatHooks<'a> {
    /// Cancels the step in flight when set.
    pub(super) cancel: Option<&'a CancelToken>,
    /// Receives the fraction that is done.
    pub(super) progress: &'a mut dyn FnMut(f64),
    /// Called between prefill and decode.
    pub(super) prompted: &'a mut dyn FnMut() -> anyhow::Result<()>,
}

/// Feeds a prompt at once and an answer token by token, to a new session or several.
pub(super) fn repeat(
    feed: TokenFeed,
    engine: &Engine,
    roofline: Option<RooflineModel<'_>>,
    mut hooks: RepeatHooks<'_>,
) -> anyhow::Result<RepeatMeasurement> {
    if let Some(sessions) = feed.setting.sessions {
        return batched(sessions, feed, engine, roofline, hooks);
    }
    let vocab = engine.blueprint().vocab;
    let (prompt, answer) = feed.tokens(vocab);
    let mut run = SessionRun {
        session: engine.session()?,
        engine,
        sampler: Sampler::new(Sampling::greedy(), vocab)?,
        total: (prompt.len() + answer.len()) as f64,
    };
    let prompt_step: Vec<&[u32]> = [&prompt[..]].into_iter().filter(|p| !p.is_empty()).collect();
    let decode_steps: Vec<&[u32]> = answer.chunks(1).collect();
    let prefill = run.phase(&prompt_step, None, &mut hooks)?;
    (hooks.prompted)()?;
    let decode = run.phase(&decode_steps, roofline, &mut hooks)?;
    Ok(RepeatMeasurement { context: prompt.len(), sessions: None, prefill, decode })
}

impl TokenFeed {
    /// Random tokens of prompt and answer.
    pub(super) fn tokens(&self, vocab: usize) -> (Vec<u32>, Vec<u32>) {
        let mut random = SplitMix64::new(self.seed);
        let mut tokens = |n| (0..n).map(|_| (random.next_u64() % vocab as u64) as u32).collect();
        (tokens(self.setting.prompt), tokens(self.answer))
    }
}

/// Prefill of `n` sessions with a prompt each, as many tokens in a step as fit, and batched decode.
fn batched(
    n: usize,
    feed: TokenFeed,
    engine: &Engine,
    roofline: Option<RooflineModel<'_>>,
    hooks: RepeatHooks<'_>,
) -> anyhow::Result<RepeatMeasurement> {
    let RepeatHooks { cancel, progress, prompted } = hooks;
    let vocab = engine.blueprint().vocab;
    let mut samplers = vec![Sampler::new(Sampling::greedy(), vocab)?; n];
    let steps = n + feed.answer;
    let (mut sessions, mut prompts) = (Vec::with_capacity(n), Vec::with_capacity(n));
    let mut answers = Vec::with_capacity(n);
    for i in 0..n {
        // The first session gets the same tokens as a session that runs alone.
        let seed = feed.seed | (i as u64) << 32;
        let (prompt, answer) = TokenFeed { seed, ..feed }.tokens(vocab);
        sessions.push(engine.session()?);
        prompts.push(prompt);
        answers.push(answer);
    }
    let reads = engine.read_counters();
    let (mut stats, mut seconds) = (Stats::default(), Vec::new());
    loop {
        let mut room = engine.plan().chunk;
        let mut entries = Vec::with_capacity(n);
        for ((session, prompt), sampler) in sessions.iter_mut().zip(&prompts).zip(&mut samplers) {
            let rest = &prompt[session.tokens().len()..];
            let tokens = &rest[..rest.len().min(room)];
            room -= tokens.len();
            if !tokens.is_empty() {
                let sampler = (tokens.len() == rest.len()).then_some(sampler);
                let kind = EntryKind::Prompt { tokens: prompt.len() };
                entries.push(BatchEntry::new(session, tokens).kind(kind).sampler(sampler));
            }
        }
        if entries.is_empty() {
            break;
        }
        let mut control = StepControl::default().cancel(cancel);
        let since = Instant::now();
        stats = stats.plus(&engine.step(&mut entries, &mut control)?);
        entries.into_iter().filter_map(|entry| entry.chosen).collect::<Result<Vec<_>, _>>()?;
        seconds.push(since.elapsed().as_secs_f64());
        let fed: usize = sessions.iter().map(|session| session.tokens().len()).sum();
        progress(fed as f64 / feed.setting.prompt.max(1) as f64 / steps as f64);
    }
    let prefill = PhaseMeasurement::new(stats, [reads, engine.read_counters()], &seconds);
    prompted()?;
    let reads = engine.read_counters();
    let (mut stats, mut seconds) = (Stats::default(), Vec::with_capacity(feed.answer));
    let mut meter = RooflineMeter::new(engine, roofline);
    for step in 0..feed.answer {
        meter.probe()?;
        let positions: Vec<usize> = sessions.iter().map(|session| session.tokens().len()).collect();
        let mut entries: Vec<BatchEntry<'_>> = sessions
            .iter_mut()
            .zip(&answers)
            .zip(&mut samplers)
            .map(|((session, answer), sampler)| {
                BatchEntry::new(session, &answer[step..=step]).sampler(sampler)
            })
            .collect();
        let mut within = |share: f64| progress(((n + step) as f64 + share) / steps as f64);
        let mut control = StepControl::default().cancel(cancel).progress(&mut within);
        let since = Instant::now();
        stats = stats.plus(&engine.step(&mut entries, &mut control)?);
        entries.into_iter().filter_map(|entry| entry.chosen).collect::<Result<Vec<_>, _>>()?;
        seconds.push(since.elapsed().as_secs_f64());
        meter.add(&positions);
    }
    let decode = PhaseMeasurement::new(stats, [reads, engine.read_counters()], &seconds);
    let decode = decode.map(|d| meter.complete(PhaseMeasurement { token_seconds: seconds, ..d }));
    Ok(RepeatMeasurement { context: feed.setting.prompt, sessions: Some(n), prefill, decode })
}

struct SessionRun<'a> {
    session: Session,
    engine: &'a Engine,
    sampler: Sampler,
    /// Tokens of prompt and answer.
    total: f64,
}

impl SessionRun<'_> {
    fn phase(
        &mut self,
        steps: &[&[u32]],
        roofline: Option<RooflineModel<'_>>,
        hooks: &mut RepeatHooks<'_>,
    ) -> anyhow::Result<Option<PhaseMeasurement>> {
        let before = (self.session.stats(), self.engine.read_counters());
        let (mut seconds, mut meter) =
            (Vec::with_capacity(steps.len()), RooflineMeter::new(self.engine, roofline));
        for step in steps {
            meter.probe()?;
            let position = self.session.tokens().len();
            let mut within = |share: f64| {
                (hooks.progress)((position as f64 + share * step.len() as f64) / self.total)
            };
            let mut control = StepControl::default().cancel(hooks.cancel).progress(&mut within);
            let since = Instant::now();
            // Sampling is part of the time that a user waits for, though the next token is given.
            self.session.next(step, &mut self.sampler, &mut control)?;
            seconds.push(since.elapsed().as_secs_f64());
            meter.add(&[position]);
        }
        let stats = self.session.stats().since(&before.0);
        let phase = PhaseMeasurement::new(stats, [before.1, self.engine.read_counters()], &seconds);
        let token_seconds = if steps.iter().all(|s| s.len() == 1) { seconds } else { Vec::new() };
        Ok(phase.map(|phase| meter.complete(PhaseMeasurement { token_seconds, ..phase })))
    }
}

impl PhaseMeasurement {
    /// Figures of steps that took `seconds`, from read counters before and after; `None` without
    /// tokens.
    fn new(stats: Stats, [before, after]: [ReadCounters; 2], seconds: &[f64]) -> Option<Self> {
        let seconds: f64 = seconds.iter().sum();
        (stats.tokens > 0).then(|| Self {
            tokens: stats.tokens,
            seconds,
            tokens_per_second: stats.tokens as f64 / seconds,
            bytes_per_token: stats.bytes_read as f64 / stats.tokens as f64,
            hit_rate: stats.hit_rate(),
            stats,
            file_bytes: after.bytes - before.bytes,
            disk_seconds: (after.busy_ns - before.busy_ns) as f64 / 1e9,
            retries: after.retries - before.retries,
            token_seconds: Vec::new(),
            memory_bytes_per_second: None,
            least: None,
        })
    }
}

/// Accumulates the roofline time of steps from the experts that their layers needed and missed.
struct RooflineMeter<'a> {
    engine: &'a Engine,
    model: Option<RooflineModel<'a>>,
    layers: Vec<LayerStats>,
    reads: ReadCounters,
    least: MinimumTime,
    /// Time of the last bandwidth probe.
    probed: Option<Instant>,
    /// Bytes and seconds of all probes.
    bytes: f64,
    seconds: f64,
}

impl<'a> RooflineMeter<'a> {
    fn new(engine: &'a Engine, model: Option<RooflineModel<'a>>) -> Self {
        let (layers, least) = (engine.layer_stats(), MinimumTime::default());
        let reads = engine.read_counters();
        Self { engine, model, layers, reads, least, probed: None, bytes: 0.0, seconds: 0.0 }
    }

    /// Probes memory bandwidth before a step, at most every 250 ms. On a shared machine bandwidth
    /// changes that fast, and a step is judged by the bandwidth it had.
    fn probe(&mut self) -> anyhow::Result<()> {
        const INTERVAL: Duration = Duration::from_millis(250);
        let Some(model) = &mut self.model else { return Ok(()) };
        if self.probed.is_some_and(|probed| probed.elapsed() < INTERVAL) {
            return Ok(());
        }
        if let Some(speed) = self.engine.probe_slots(Some(model.threads))? {
            model.limits.memory = speed.bytes_per_second;
            self.bytes += speed.bytes as f64;
            self.seconds += speed.bytes as f64 / speed.bytes_per_second;
        }
        self.probed = Some(Instant::now());
        Ok(())
    }

    /// Adds the step that just ran, with one token at each position. It is judged by the disk's
    /// peak, or by the bandwidth of the reads in it if that is higher.
    fn add(&mut self, positions: &[usize]) {
        let Some(RooflineModel { costs, mut limits, .. }) = self.model else { return };
        let reads = self.engine.read_counters();
        let earlier = std::mem::replace(&mut self.reads, reads);
        let seconds = (reads.busy_ns - earlier.busy_ns) as f64 / 1e9;
        if seconds > 0.0 {
            limits.disk = limits.disk.max((reads.bytes - earlier.bytes) as f64 / seconds);
        }
        let before = std::mem::replace(&mut self.layers, self.engine.layer_stats());
        self.least.add(costs.step(limits, positions, |i| {
            let needed = self.layers[i].needed - before[i].needed;
            ExpertDemand { needed, missed: needed - (self.layers[i].hit - before[i].hit) }
        }));
    }

    /// Adds roofline time and bandwidth to the measurement of these steps.
    fn complete(&self, phase: PhaseMeasurement) -> PhaseMeasurement {
        let memory = (self.seconds > 0.0).then(|| self.bytes / self.seconds);
        let least = self.model.map(|_| self.least);
        PhaseMeasurement { memory_bytes_per_second: memory, least, ..phase }
    }
}
