//! Counters of expert uses and cache hits. Steps write them, and anyone reads them without waiting
//! for a step.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::{
    base::stats::{LayerStats, Stats},
    model::blueprint::Blueprint,
};

/// Use of a layer's experts since the model was loaded. Steps that a device computed without
/// reporting its routing, with all experts resident, have no uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExpertCounts {
    /// Requests and hits. The difference is the misses.
    pub stats: LayerStats,
    /// Uses by expert: tokens for which the router chose it. Empty in a layer without routed
    /// experts.
    pub uses: Vec<u64>,
}

/// Counters of all layers.
#[derive(Debug, Default)]
pub(crate) struct ExpertCounters {
    layers: Vec<LayerCounters>,
}

#[derive(Debug, Default)]
struct LayerCounters {
    needed: AtomicU64,
    hit: AtomicU64,
    uses: Vec<AtomicU64>,
}

impl ExpertCounters {
    /// Counters at zero.
    pub(crate) fn new(blueprint: &Blueprint) -> Self {
        let mut layers = Vec::new();
        layers.resize_with(blueprint.layers.len(), LayerCounters::default);
        for (layer, moe) in blueprint.moe_layers() {
            layers[layer].uses.resize_with(moe.experts.count, AtomicU64::default);
        }
        Self { layers }
    }

    /// Bytes of the counters.
    pub(crate) fn bytes(blueprint: &Blueprint) -> u64 {
        let (layers, experts) = (blueprint.layers.len(), blueprint.experts());
        (layers * size_of::<LayerCounters>() + experts * size_of::<AtomicU64>()) as u64
    }

    /// Adds the tokens of a step that use an expert.
    pub(crate) fn add_uses(&self, layer: usize, expert: usize, tokens: usize) {
        if let Some(uses) = self.layers.get(layer).and_then(|layer| layer.uses.get(expert)) {
            add(uses, tokens as u64);
        }
    }

    /// Adds a step's counts of a layer.
    pub(crate) fn add_stats(&self, layer: usize, of_layer: &Stats) {
        if let Some(layer) = self.layers.get(layer) {
            add(&layer.needed, of_layer.experts_needed);
            add(&layer.hit, of_layer.experts_hit);
        }
    }

    /// Requests and hits by layer.
    pub(crate) fn stats(&self) -> Vec<LayerStats> {
        self.layers.iter().map(LayerCounters::stats).collect()
    }

    /// A copy of all counters by layer.
    pub(crate) fn copy(&self) -> Vec<ExpertCounts> {
        let copy = |layer: &LayerCounters| ExpertCounts {
            stats: layer.stats(),
            uses: layer.uses.iter().map(|uses| uses.load(Ordering::Relaxed)).collect(),
        };
        self.layers.iter().map(copy).collect()
    }
}

impl LayerCounters {
    fn stats(&self) -> LayerStats {
        let [needed, hit] = [&self.needed, &self.hit].map(|n| n.load(Ordering::Relaxed));
        // Between two additions of a step, hits may be ahead.
        LayerStats { needed, hit: hit.min(needed) }
    }
}

/// Adds to a counter. Without a locked instruction, as steps hold the engine's lock: there is one
/// writer at a time.
fn add(counter: &AtomicU64, n: u64) {
    counter.store(counter.load(Ordering::Relaxed) + n, Ordering::Relaxed);
}
