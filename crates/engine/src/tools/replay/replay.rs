//! Replay of a trace through an eviction policy.

use serde::Serialize;

use super::belady::Optimum;
use crate::experts::{
    policy::{Policy, PolicyKind},
    trace::Trace,
};

/// Cost of some steps of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReplayedSteps {
    /// Tokens fed.
    pub tokens: u64,
    /// Experts needed: the distinct ones of each layer and step.
    pub needed: u64,
    /// Of those, the experts in a slot when their layer started.
    pub hits: u64,
    /// Bytes of the misses.
    pub bytes_missed: u64,
}

impl ReplayedSteps {
    /// Hits per needed expert; 1 if none was needed.
    pub fn hit_rate(&self) -> f64 {
        if self.needed == 0 { 1.0 } else { self.hits as f64 / self.needed as f64 }
    }

    /// Bytes missed per token; 0 without tokens.
    pub fn bytes_per_token(&self) -> f64 {
        if self.tokens == 0 { 0.0 } else { self.bytes_missed as f64 / self.tokens as f64 }
    }
}

/// Cost of a trace with an initially empty cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// Steps of several rows.
    pub prefill: ReplayedSteps,
    /// Steps of one row.
    pub decode: ReplayedSteps,
}

impl Trace {
    /// Simulates a cache of `slots` slots (at least one) under a policy.
    pub fn replay(&self, policy: PolicyKind, slots: usize) -> Replayed {
        self.run(slots.max(1), &mut *policy.create(slots.max(1), self.header().experts()))
    }

    /// Simulates the optimal policy with `slots` slots (at least one): evicts the expert whose next
    /// use is furthest away (Belády's MIN). Experts of the running layer stay, as long as there are
    /// slots for them.
    pub fn replay_optimum(&self, slots: usize) -> Replayed {
        self.run(slots.max(1), &mut Optimum::new(slots.max(1), self))
    }

    /// Hit rate of steps of one row, as counted by [`Trace::replay`].
    pub fn hit_rate(&self, policy: PolicyKind, slots: usize) -> f64 {
        self.replay(policy, slots).decode.hit_rate()
    }

    /// Largest number of experts that a layer needs in a step. With fewer slots, experts of the
    /// same layer evict each other.
    pub fn largest_need(&self) -> usize {
        self.each_step().flat_map(|(_, layers)| layers.map(<[u32]>::len)).max().unwrap_or(0)
    }

    /// Runs the engine's protocol: pins hits, then assigns slots to misses, and unpins when no slot
    /// is left or the layer is done.
    fn run(&self, slots: usize, policy: &mut dyn Policy) -> Replayed {
        const NONE: u32 = u32::MAX;
        let mut replayed = Replayed::default();
        let mut slot_of = vec![NONE; self.header().experts()];
        let mut held = vec![NONE; slots];
        let mut pinned = vec![0u64; slots];
        let mut empty: Vec<usize> = (0..slots).rev().collect();
        let mut missing = Vec::new();
        let mut round = 0;
        for (rows, layers) in self.each_step() {
            let steps = if rows == 1 { &mut replayed.decode } else { &mut replayed.prefill };
            steps.tokens += u64::from(rows);
            for (layer, keys) in self.header().layers.iter().zip(layers) {
                round += 1;
                missing.clear();
                for key in keys {
                    match slot_of[*key as usize] {
                        NONE => missing.push(*key),
                        slot => {
                            policy.hit(slot as usize);
                            pinned[slot as usize] = round;
                        }
                    }
                }
                steps.needed += keys.len() as u64;
                steps.hits += (keys.len() - missing.len()) as u64;
                let bytes = layer.bytes.saturating_mul(missing.len() as u64);
                steps.bytes_missed = steps.bytes_missed.saturating_add(bytes);
                for key in &missing {
                    let slot = empty.pop().or_else(|| policy.victim(&|slot| pinned[slot] != round));
                    let Some(slot) = slot.or_else(|| {
                        round += 1;
                        policy.victim(&|_| true)
                    }) else {
                        continue;
                    };
                    if held[slot] != NONE {
                        policy.remove(slot);
                        slot_of[held[slot] as usize] = NONE;
                    }
                    policy.insert(slot, *key as usize, false);
                    slot_of[*key as usize] = slot as u32;
                    held[slot] = *key;
                    pinned[slot] = round;
                }
            }
        }
        replayed
    }
}
#[cfg(test)]
mod tests;
