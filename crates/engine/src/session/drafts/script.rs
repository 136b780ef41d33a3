//! Drafts of a known answer, for tests and benchmarks without trained weights.

use std::sync::Arc;

use moeflux_base::SplitMix64;

use super::drafter::{Drafter, DrafterSource};

/// Drafts the tokens of a known answer, some of them wrong.
#[derive(Clone, Debug)]
pub struct DraftScript {
    answer: Arc<[u32]>,
    /// Position of the answer's first token.
    start: usize,
    acceptance: f64,
    counts: DraftCounts,
    seed: u64,
}

/// Numbers of drafts of a [`DraftScript`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DraftCounts {
    /// As many as may be checked.
    All,
    /// The same, the last one wrong.
    LastWrong,
    /// From none to all, another number in each step.
    Random,
}

impl DraftScript {
    /// Drafts of an answer whose first token is at position `start`. Each is right with the
    /// probability `acceptance`.
    pub fn new(start: usize, answer: impl Into<Arc<[u32]>>, acceptance: f64, seed: u64) -> Self {
        Self { answer: answer.into(), start, acceptance, counts: DraftCounts::All, seed }
    }

    /// Sets the numbers of drafts.
    #[must_use]
    pub fn counts(mut self, counts: DraftCounts) -> Self {
        self.counts = counts;
        self
    }
}

impl DrafterSource for DraftScript {
    fn start(&self) -> Box<dyn Drafter> {
        Box::new(ScriptedDrafter { script: self.clone(), random: SplitMix64::new(self.seed) })
    }
}

/// A script in use.
struct ScriptedDrafter {
    script: DraftScript,
    random: SplitMix64,
}

impl Drafter for ScriptedDrafter {
    fn draft(&mut self, session: &[u32], next: &[u32], max: usize, drafts: &mut Vec<u32>) {
        let Self { script: DraftScript { answer, start, acceptance, counts, .. }, random } = self;
        let done = (session.len() + next.len()).saturating_sub(*start);
        let rest = answer.get(done..).unwrap_or_default();
        let count = match counts {
            DraftCounts::Random => (random.next_u64() % (max as u64 + 1)) as usize,
            DraftCounts::All | DraftCounts::LastWrong => max,
        };
        let count = count.min(rest.len());
        for (i, token) in rest[..count].iter().enumerate() {
            let uniform = (random.next_u64() >> 11) as f64 / (1u64 << 53) as f64;
            let is_last = *counts == DraftCounts::LastWrong && i + 1 == count;
            let is_right = uniform < *acceptance && !is_last;
            // Another token of the vocabulary.
            drafts.push(if is_right { *token } else { token ^ 1 });
        }
    }
}
