//! Prefill cost: predicted time to compute a prompt's tokens, from figures that a plan knows.

use moeflux_model::blueprint::{Blueprint, GqaIndexer, LayerBlueprint, MixerBlueprint};

use super::{plan::MemoryPlan, pools::LineName};

/// Multiply-adds per second of a processor, and of a card. Only their ratio to reads matters.
const PROCESSOR_SPEED: f64 = 150e9;
const CARD_SPEED: f64 = 20e12;

/// Bytes per second of reads from a disk, and from host memory over a card's bus.
pub(super) const DISK_SPEED: f64 = 2e9;
pub(super) const BUS_SPEED: f64 = 12e9;

/// Attention of layers that read at most as many positions.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct AttentionCost {
    /// Seconds per pair of a token and a position that it reads.
    pub(crate) seconds: f64,
    /// Most positions that a token reads; `usize::MAX` for all.
    pub(crate) window: usize,
}

/// Predicted time to compute tokens of a prompt: the same for each token, and attention, which
/// grows with the positions before it.
#[derive(Clone, Debug, Default)]
pub(crate) struct PrefillCost {
    /// Seconds of a token without attention: matrix products, and its share of a chunk's reads.
    pub(crate) token: f64,
    pub(crate) attention: Vec<AttentionCost>,
}

impl PrefillCost {
    /// Cost on a card or on the processor. Reads of experts are not counted.
    pub(super) fn new(blueprint: &Blueprint, is_card: bool) -> Self {
        let seconds = 1.0 / if is_card { CARD_SPEED } else { PROCESSOR_SPEED };
        let dense = blueprint.layers.iter().flat_map(LayerBlueprint::matrices);
        let dense: f64 = dense.map(|m| product(m.shape.rows, m.shape.cols)).sum();
        let experts = blueprint.moe_layers().map(|(_, moe)| {
            let matrices = moe.experts.shape.matrices();
            let expert: f64 = matrices.map(|shape| product(shape.rows, shape.cols)).sum();
            // Shared experts are dense weights.
            expert * moe.router.top_k as f64
        });
        let token = (dense + experts.sum::<f64>()) * seconds;
        let mut attention: Vec<AttentionCost> = Vec::new();
        for (pair, window) in blueprint.layers.iter().filter_map(|l| l.mixer()).map(pair_cost) {
            match attention.iter_mut().find(|cost| cost.window == window) {
                Some(cost) => cost.seconds += pair * seconds,
                None => attention.push(AttentionCost { seconds: pair * seconds, window }),
            }
        }
        attention.retain(|cost| cost.seconds > 0.0);
        Self { token, attention }
    }

    /// Cost of a plan, with the reads of experts that have no slot.
    pub(crate) fn of_plan(blueprint: &Blueprint, plan: &MemoryPlan) -> Self {
        let slots = plan.pools().iter().map(|pool| pool.bytes(LineName::Slots)).sum();
        let missing = match plan.holds_all {
            true => 0,
            false => blueprint.experts_bytes().saturating_sub(slots),
        };
        Self::new(blueprint, plan.card().is_some()).with_reads(missing, plan.chunk, DISK_SPEED)
    }

    /// Adds reads of `bytes` per chunk of `rows` tokens, at `speed` bytes per second.
    pub(super) fn with_reads(mut self, bytes: u64, rows: usize, speed: f64) -> Self {
        self.token += bytes as f64 / (speed * rows.max(1) as f64);
        self
    }

    /// Seconds to compute the tokens from position `from` up to `end`.
    pub(crate) fn seconds(&self, from: usize, end: usize) -> f64 {
        let pairs = |window: usize, len: usize| {
            let within = len.min(window) as f64;
            within * within / 2.0 + len.saturating_sub(window) as f64 * window as f64
        };
        let tokens = end.saturating_sub(from) as f64 * self.token;
        let attention = self.attention.iter().map(|AttentionCost { seconds, window }| {
            seconds * (pairs(*window, end) - pairs(*window, from.min(end)))
        });
        tokens + attention.sum::<f64>()
    }
}

/// Multiply-adds of a matrix per token.
fn product(rows: usize, cols: usize) -> f64 {
    rows as f64 * cols as f64
}

/// Multiply-adds of a mixer per pair of a token and a position, and the positions that it reads.
fn pair_cost(mixer: &MixerBlueprint) -> (f64, usize) {
    match mixer {
        MixerBlueprint::Gqa(gqa) => {
            let shape = &gqa.shape;
            let chosen = gqa.indexer.as_ref().map(GqaIndexer::positions);
            let window = shape.window.or(chosen).unwrap_or(usize::MAX);
            (product(shape.heads, shape.head_dim + shape.v_head_dim), window)
        }
        MixerBlueprint::Mla(mla) => {
            let shape = &mla.shape;
            let key = shape.qk_nope_head_dim + shape.qk_rope_head_dim;
            let window = mla.sparse.as_ref().map_or(usize::MAX, |sparse| sparse.top_k);
            (product(shape.heads, key + shape.v_head_dim), window)
        }
        MixerBlueprint::Compressed(compressed) => {
            let shape = &compressed.shape;
            (product(shape.heads, 2 * shape.head_dim), shape.window)
        }
        MixerBlueprint::DeltaNet(_) | MixerBlueprint::Mamba2(_) | MixerBlueprint::ShortConv(_) => {
            (0.0, usize::MAX)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attention_makes_later_tokens_dearer_up_to_its_window() {
        let attention = |window| vec![AttentionCost { seconds: 2.0, window }];
        let cost = |window| PrefillCost { token: 1.0, attention: attention(window) };
        assert_eq!(cost(usize::MAX).seconds(0, 10), 10.0 + 100.0);
        assert_eq!(cost(usize::MAX).seconds(4, 10), 6.0 + 100.0 - 16.0);
        // Behind the window each token reads four positions.
        assert_eq!(cost(4).seconds(0, 10), 10.0 + 2.0 * (8.0 + 24.0));
        assert_eq!(cost(4).seconds(6, 10), 4.0 + 2.0 * 16.0);
        assert_eq!(cost(4).seconds(10, 6), 0.0);
        assert_eq!(cost(4).with_reads(600, 100, 3.0).seconds(0, 1), 1.0 + 1.0 + 2.0);
    }

    #[test]
    fn a_models_cost_follows_from_its_layers() {
        let folder = moeflux_goldens::golden("qwen3_moe");
        let checkpoint = moeflux_model::checkpoint::Checkpoint::open(&folder).unwrap();
        let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
        let [host, card] = [false, true].map(|is_card| PrefillCost::new(&blueprint, is_card));
        assert!(host.token > 100.0 * card.token && card.token > 0.0);
        let [attention] = host.attention[..] else { unreachable!("one kind of attention") };
        assert_eq!(attention.window, usize::MAX);
        assert!(host.seconds(0, 2000) > 2.0 * host.seconds(0, 1000));
    }
}
