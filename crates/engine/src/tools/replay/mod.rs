//! What a cache would have done over a routing trace.

mod optimum;
#[cfg(test)]
mod tests;

use serde::Serialize;

use crate::experts::{
    policy::{Policy, PolicyKind},
    trace::Trace,
};
use optimum::Optimum;

/// What some steps of a trace cost with a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct ReplayedSteps {
    /// Tokens that were fed.
    pub tokens: u64,
    /// Experts that were needed: of each layer and step the distinct ones.
    pub needed: u64,
    /// Of those, the ones that were in a slot when their layer began.
    pub hits: u64,
    /// Bytes of the others.
    pub bytes_missed: u64,
}

impl ReplayedSteps {
    /// The share of needed experts that were in a slot; 1 when none was needed.
    pub fn hit_rate(&self) -> f64 {
        if self.needed == 0 { 1.0 } else { self.hits as f64 / self.needed as f64 }
    }

    /// Bytes that were missed per token; 0 without tokens.
    pub fn bytes_per_token(&self) -> f64 {
        if self.tokens == 0 { 0.0 } else { self.bytes_missed as f64 / self.tokens as f64 }
    }
}

/// What a trace costs with a cache that is empty when it begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Replayed {
    /// Steps of several rows.
    pub prefill: ReplayedSteps,
    /// Steps of one row.
    pub decode: ReplayedSteps,
}

impl Trace {
    /// What the trace costs with so many slots (at least one) under a policy.
    pub fn replay(&self, policy: PolicyKind, slots: usize) -> Replayed {
        self.run(slots.max(1), &mut *policy.create(slots.max(1), self.header().experts()))
    }

    /// What the trace costs at least with so many slots (at least one): whoever is needed again last gives way (Belády's
    /// MIN), but for the experts of the layer that runs, which stay together as long as there are slots for them.
    pub fn replay_optimum(&self, slots: usize) -> Replayed {
        self.run(slots.max(1), &mut Optimum::new(slots.max(1), self))
    }

    /// The hit rate of steps of one row, as [`Trace::replay`] counts it.
    pub fn hit_rate(&self, policy: PolicyKind, slots: usize) -> f64 {
        self.replay(policy, slots).decode.hit_rate()
    }

    /// The most experts that one layer of one step needs: with fewer slots some push out others of the same layer.
    pub fn largest_need(&self) -> usize {
        self.each_step().flat_map(|(_, layers)| layers.map(<[u32]>::len)).max().unwrap_or(0)
    }

    /// Does with slots what the engine does: pins what is there, then gives slots to what is not, and lets go when none is
    /// left or the layer is done.
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
