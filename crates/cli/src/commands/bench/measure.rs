//! Running and timing.

use std::time::{Duration, Instant};

use moeflux::{
    BatchEntry, Engine, LayerStats, Logits, ReadCounters, Sampler, Sampling, Session, Stats,
    StepControl,
};
use serde::Serialize;

use crate::{
    interrupt,
    roof::{Costs, Least, Limits},
};

/// One stretch of one repeat.
#[derive(Serialize)]
pub(super) struct Measured {
    pub(super) tokens: u64,
    pub(super) seconds: f64,
    pub(super) tokens_per_second: f64,
    /// Of experts, read from disk.
    pub(super) bytes_per_token: f64,
    pub(super) hit_rate: f64,
    pub(super) stats: Stats,
    /// Bytes that files gave, with what lies around the wanted ones in aligned blocks.
    pub(super) file_bytes: u64,
    /// Seconds in which some read was under way.
    pub(super) disk_seconds: f64,
    /// Reads that were tried again.
    pub(super) retries: u64,
    /// Seconds of each step that decoded a token, in several sessions one of each.
    pub(super) token_seconds: Vec<f64>,
    /// What memory gave between these tokens; `None` where that could not be measured.
    pub(super) memory_bytes_per_second: Option<f64>,
    /// What these tokens take at least, with the misses that they had.
    #[serde(skip)]
    pub(super) least: Option<Least>,
}

/// One prompt and one answer.
#[derive(Serialize)]
pub(super) struct Repeat {
    /// Tokens of the prompt.
    pub(super) context: usize,
    /// How many sessions shared the steps, where that was asked for.
    pub(super) sessions: Option<usize>,
    pub(super) prefill: Option<Measured>,
    pub(super) decode: Option<Measured>,
}

/// What is fed.
#[derive(Clone, Copy)]
pub(super) struct Feed {
    pub(super) prompt: usize,
    /// Sessions that share the steps; `None` is one that has them for itself.
    pub(super) sessions: Option<usize>,
    pub(super) answer: usize,
    /// Chooses the tokens.
    pub(super) seed: u64,
}

/// What a token costs at least.
#[derive(Clone, Copy)]
pub(super) struct Roof<'a> {
    pub(super) costs: &'a Costs,
    pub(super) limits: Limits,
    /// Threads that read memory when it is measured again.
    pub(super) threads: usize,
}

/// Feeds a prompt at once and an answer token by token to a new session, or to several. `progress` gets the share that is done;
/// `prompted` is called between prompts and answers.
pub(super) fn repeat(
    feed: Feed,
    engine: &Engine,
    roof: Option<Roof<'_>>,
    progress: &mut dyn FnMut(f64),
    prompted: &mut dyn FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Repeat> {
    if let Some(sessions) = feed.sessions {
        return together(sessions, feed, engine, roof, progress, prompted);
    }
    let vocab = engine.blueprint().vocab;
    let (prompt, answer) = feed.tokens(vocab);
    let mut run = Run {
        session: engine.session()?,
        engine,
        sampler: Sampler::new(Sampling::greedy(), vocab)?,
        all: (prompt.len() + answer.len()) as f64,
        progress,
    };
    let whole: Vec<&[u32]> = [&prompt[..]].into_iter().filter(|p| !p.is_empty()).collect();
    let single: Vec<&[u32]> = answer.chunks(1).collect();
    let prefill = run.stretch(&whole, None)?;
    prompted()?;
    let decode = run.stretch(&single, roof)?;
    Ok(Repeat { context: prompt.len(), sessions: None, prefill, decode })
}

impl Feed {
    /// Prompt and answer.
    fn tokens(&self, vocab: usize) -> (Vec<u32>, Vec<u32>) {
        let mut random = Random(self.seed);
        let mut tokens = |n| (0..n).map(|_| (random.next() % vocab as u64) as u32).collect();
        (tokens(self.prompt), tokens(self.answer))
    }
}

/// Steps of `n` sessions that have a prompt each: a token of each.
fn together(
    n: usize,
    feed: Feed,
    engine: &Engine,
    roof: Option<Roof<'_>>,
    progress: &mut dyn FnMut(f64),
    prompted: &mut dyn FnMut() -> anyhow::Result<()>,
) -> anyhow::Result<Repeat> {
    let armed = interrupt::arm();
    let vocab = engine.blueprint().vocab;
    let mut sampler = Sampler::new(Sampling::greedy(), vocab)?;
    let steps = n + feed.answer;
    let (mut sessions, mut answers) = (Vec::with_capacity(n), Vec::with_capacity(n));
    for i in 0..n {
        // Of the first session the tokens are those that it has alone.
        let (prompt, answer) = Feed { seed: feed.seed | (i as u64) << 32, ..feed }.tokens(vocab);
        let mut session = engine.session()?;
        if !prompt.is_empty() {
            let mut watch = StepControl { cancel: Some(armed.flag()), ..StepControl::default() };
            session.feed(&prompt, Logits::Last, &mut watch, &mut |_, _| {})?;
        }
        progress((i + 1) as f64 / steps as f64);
        sessions.push(session);
        answers.push(answer);
    }
    prompted()?;
    let reads = engine.read_counters();
    let (mut stats, mut seconds) = (Stats::default(), Vec::with_capacity(feed.answer));
    let mut floor = Floor::new(engine, roof);
    for step in 0..feed.answer {
        floor.probe()?;
        let positions: Vec<usize> = sessions.iter().map(|session| session.tokens().len()).collect();
        let turns = sessions.iter_mut().zip(&answers);
        let mut turns: Vec<BatchEntry<'_>> = turns
            .map(|(session, answer)| BatchEntry {
                session,
                tokens: &answer[step..=step],
                logits: true,
            })
            .collect();
        let mut within = |share: f64| progress(((n + step) as f64 + share) / steps as f64);
        let mut watch = StepControl {
            cancel: Some(armed.flag()),
            progress: Some(&mut within),
            ..StepControl::default()
        };
        let since = Instant::now();
        stats = stats.plus(&engine.step(&mut turns, &mut watch)?);
        for session in &sessions {
            sampler.sample(session.logits())?;
        }
        seconds.push(since.elapsed().as_secs_f64());
        floor.add(&positions);
    }
    let decode = Measured::of(stats, [reads, engine.read_counters()], &seconds);
    let decode = decode.map(|decode| floor.told(Measured { token_seconds: seconds, ..decode }));
    Ok(Repeat { context: feed.prompt, sessions: Some(n), prefill: None, decode })
}

struct Run<'a> {
    session: Session,
    engine: &'a Engine,
    sampler: Sampler,
    all: f64,
    progress: &'a mut dyn FnMut(f64),
}

impl Run<'_> {
    fn stretch(
        &mut self,
        steps: &[&[u32]],
        roof: Option<Roof<'_>>,
    ) -> anyhow::Result<Option<Measured>> {
        let armed = interrupt::arm();
        let before = (self.session.stats(), self.engine.read_counters());
        let (mut seconds, mut floor) =
            (Vec::with_capacity(steps.len()), Floor::new(self.engine, roof));
        for step in steps {
            floor.probe()?;
            let position = self.session.tokens().len();
            let mut within = |share: f64| {
                (self.progress)((position as f64 + share * step.len() as f64) / self.all)
            };
            let mut watch = StepControl {
                cancel: Some(armed.flag()),
                progress: Some(&mut within),
                ..StepControl::default()
            };
            let since = Instant::now();
            // What users wait for: the choice of the next token is part of it, whichever is fed next.
            self.session.next(step, &mut self.sampler, &mut watch)?;
            seconds.push(since.elapsed().as_secs_f64());
            floor.add(&[position]);
        }
        let stats = self.session.stats().since(&before.0);
        let measured = Measured::of(stats, [before.1, self.engine.read_counters()], &seconds);
        let token_seconds = if steps.iter().all(|s| s.len() == 1) { seconds } else { Vec::new() };
        Ok(measured.map(|measured| floor.told(Measured { token_seconds, ..measured })))
    }
}

impl Measured {
    /// Of steps that took `seconds`, with what the reader had done before and after; `None` of no tokens.
    fn of(stats: Stats, [before, after]: [ReadCounters; 2], seconds: &[f64]) -> Option<Self> {
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

/// Adds up what steps take at least, from what their layers needed and had.
struct Floor<'a> {
    engine: &'a Engine,
    roof: Option<Roof<'a>>,
    layers: Vec<LayerStats>,
    least: Least,
    /// When memory was last measured, and all bytes and seconds of that.
    probed: Option<Instant>,
    bytes: f64,
    seconds: f64,
}

impl<'a> Floor<'a> {
    fn new(engine: &'a Engine, roof: Option<Roof<'a>>) -> Self {
        let (layers, least) = (engine.layer_stats(), Least::default());
        Self { engine, roof, layers, least, probed: None, bytes: 0.0, seconds: 0.0 }
    }

    /// Before a step: measures memory anew every quarter of a second. On a machine that is shared with others what it gives changes
    /// as often as that, and a step can be held only against what there was.
    fn probe(&mut self) -> anyhow::Result<()> {
        const EVERY: Duration = Duration::from_millis(250);
        let Some(roof) = &mut self.roof else { return Ok(()) };
        if self.probed.is_some_and(|at| at.elapsed() < EVERY) {
            return Ok(());
        }
        if let Some(speed) = self.engine.probe_slots(Some(roof.threads))? {
            roof.limits.memory = speed.bytes_per_second;
            self.bytes += speed.bytes as f64;
            self.seconds += speed.bytes as f64 / speed.bytes_per_second;
        }
        self.probed = Some(Instant::now());
        Ok(())
    }

    /// A step that has just been made, with a token at each of these positions.
    fn add(&mut self, positions: &[usize]) {
        let Some(Roof { costs, limits, .. }) = self.roof else { return };
        let before = std::mem::replace(&mut self.layers, self.engine.layer_stats());
        self.least.add(costs.step(limits, positions, |i| {
            let needed = self.layers[i].needed - before[i].needed;
            [needed, needed - (self.layers[i].hit - before[i].hit)]
        }));
    }

    /// The steps, with what they take at least, where it is known what they cost.
    fn told(&self, steps: Measured) -> Measured {
        let memory = (self.seconds > 0.0).then(|| self.bytes / self.seconds);
        Measured { memory_bytes_per_second: memory, least: self.roof.map(|_| self.least), ..steps }
    }
}

/// SplitMix64: the same numbers everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}
