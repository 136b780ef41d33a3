//! Running and timing.

use std::time::Instant;

use moeflux::{Engine, LayerStats, Sampler, Sampling, Session, Stats, Watch};
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
    /// Seconds of each token that was decoded.
    pub(super) token_seconds: Vec<f64>,
    /// What these tokens take at least, with the misses that they had.
    #[serde(skip)]
    pub(super) least: Option<Least>,
}

/// One prompt and one answer.
#[derive(Serialize)]
pub(super) struct Repeat {
    /// Tokens of the prompt.
    pub(super) context: usize,
    pub(super) prefill: Option<Measured>,
    pub(super) decode: Option<Measured>,
}

/// What is fed.
#[derive(Clone, Copy)]
pub(super) struct Feed {
    pub(super) prompt: usize,
    pub(super) answer: usize,
    /// Chooses the tokens.
    pub(super) seed: u64,
}

/// What a token costs at least, where it is known.
pub(super) type Roof<'a> = Option<(&'a Costs, Limits)>;

/// Feeds a prompt at once and an answer token by token to a new session. `progress` gets the share that is done.
pub(super) fn repeat(
    feed: Feed,
    engine: &Engine,
    roof: Roof<'_>,
    progress: &mut dyn FnMut(f64),
) -> anyhow::Result<Repeat> {
    let mut random = Random(feed.seed);
    let vocab = engine.blueprint().vocab;
    let mut tokens =
        |n: usize| -> Vec<u32> { (0..n).map(|_| (random.next() % vocab as u64) as u32).collect() };
    let (prompt, answer) = (tokens(feed.prompt), tokens(feed.answer));
    let mut run = Run {
        session: engine.session()?,
        engine,
        sampler: Sampler::new(Sampling::greedy(), vocab)?,
        all: (prompt.len() + answer.len()) as f64,
        progress,
    };
    let whole: Vec<&[u32]> = [&prompt[..]].into_iter().filter(|p| !p.is_empty()).collect();
    let single: Vec<&[u32]> = answer.chunks(1).collect();
    Ok(Repeat {
        context: prompt.len(),
        prefill: run.stretch(&whole, None)?,
        decode: run.stretch(&single, roof)?,
    })
}

struct Run<'a> {
    session: Session,
    engine: &'a Engine,
    sampler: Sampler,
    all: f64,
    progress: &'a mut dyn FnMut(f64),
}

impl Run<'_> {
    fn stretch(&mut self, steps: &[&[u32]], roof: Roof<'_>) -> anyhow::Result<Option<Measured>> {
        let armed = interrupt::arm();
        let before = (self.session.stats(), self.engine.read_counters());
        let mut layers = self.engine.layer_stats();
        let (mut seconds, mut least) = (Vec::with_capacity(steps.len()), Least::default());
        for step in steps {
            let position = self.session.tokens().len();
            let mut within =
                |share: f64| (self.progress)((position as f64 + share * step.len() as f64) / self.all);
            let mut watch =
                Watch { cancel: Some(armed.flag()), progress: Some(&mut within), ..Watch::default() };
            let since = Instant::now();
            // What users wait for: the choice of the next token is part of it, whichever is fed next.
            self.session.next(step, &mut self.sampler, &mut watch)?;
            seconds.push(since.elapsed().as_secs_f64());
            if let Some((costs, limits)) = roof {
                let after = self.engine.layer_stats();
                least.add(costs.token(limits, position, |i| missed(layers[i], after[i])));
                layers = after;
            }
        }
        let (stats, reads) = (self.session.stats().since(&before.0), self.engine.read_counters());
        let all: f64 = seconds.iter().sum();
        Ok((stats.tokens > 0).then(|| Measured {
            tokens: stats.tokens,
            seconds: all,
            tokens_per_second: stats.tokens as f64 / all,
            bytes_per_token: stats.bytes_read as f64 / stats.tokens as f64,
            hit_rate: stats.hit_rate(),
            stats,
            file_bytes: reads.bytes - before.1.bytes,
            disk_seconds: (reads.busy_ns - before.1.busy_ns) as f64 / 1e9,
            retries: reads.retries - before.1.retries,
            token_seconds: if steps.iter().all(|s| s.len() == 1) { seconds } else { Vec::new() },
            least: roof.map(|_| least),
        }))
    }
}

fn missed(before: LayerStats, after: LayerStats) -> u64 {
    (after.needed - before.needed) - (after.hit - before.hit)
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
