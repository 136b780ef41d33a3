//! Counters of expert uses, cache hits and misses. Steps write them, and anyone reads them without
//! waiting for a step.

use std::sync::atomic::{AtomicU64, Ordering};

use moeflux_model::blueprint::{Blueprint, LayerBlueprint};

use crate::experts::stats::{LayerStats, Stats};

/// Counts of one expert since the model was loaded. Steps that a device computed without reporting
/// its routing, with all experts in its own memory or of many rows, are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ExpertCount {
    /// Tokens for which the router chose it.
    pub uses: u64,
    /// Steps that found it in a slot, without a prefetch.
    pub hits: u64,
    /// Steps that needed it after a prefetch, loaded or still in flight.
    pub prefetched: u64,
    /// Steps that had to read it.
    pub misses: u64,
}

/// Where a step finds an expert that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FoundExpert {
    InSlot,
    Prefetched,
    OnDisk,
}

/// Counters of all experts. Readable while a step runs.
#[derive(Debug, Default)]
pub struct ExpertCounters {
    layers: Vec<LayerCounters>,
}

#[derive(Debug, Default)]
struct LayerCounters {
    needed: AtomicU64,
    hit: AtomicU64,
    experts: Vec<ExpertCells>,
}

/// Counters of one expert: the fields of [`ExpertCount`].
#[derive(Debug, Default)]
struct ExpertCells {
    uses: AtomicU64,
    hits: AtomicU64,
    prefetched: AtomicU64,
    misses: AtomicU64,
}

impl ExpertCounters {
    /// Counters at zero.
    pub(crate) fn new(blueprint: &Blueprint) -> Self {
        let experts = |layer: &LayerBlueprint| layer.moe().map_or(0, |moe| moe.experts.count);
        Self::of_experts(&blueprint.layers.iter().map(experts).collect::<Vec<_>>())
    }

    /// Counters at zero for layers with as many experts.
    pub(crate) fn of_experts(experts: &[usize]) -> Self {
        let of_layer = |count: &usize| {
            let mut layer = LayerCounters::default();
            layer.experts.resize_with(*count, ExpertCells::default);
            layer
        };
        Self { layers: experts.iter().map(of_layer).collect() }
    }

    /// Bytes of the counters.
    pub(crate) fn bytes(blueprint: &Blueprint) -> u64 {
        let (layers, experts) = (blueprint.layers.len(), blueprint.experts());
        (layers * size_of::<LayerCounters>() + experts * size_of::<ExpertCells>()) as u64
    }

    /// Adds the tokens of a step that use an expert.
    pub(crate) fn add_uses(&self, layer: usize, expert: usize, tokens: usize) {
        if let Some(cells) = self.cells(layer, expert) {
            add(&cells.uses, tokens as u64);
        }
    }

    /// Counts an expert that a step needs, by where it was found.
    pub(crate) fn add_found(&self, layer: usize, expert: usize, found: FoundExpert) {
        let Some(cells) = self.cells(layer, expert) else { return };
        let counter = match found {
            FoundExpert::InSlot => &cells.hits,
            FoundExpert::Prefetched => &cells.prefetched,
            FoundExpert::OnDisk => &cells.misses,
        };
        add(counter, 1);
    }

    fn cells(&self, layer: usize, expert: usize) -> Option<&ExpertCells> {
        self.layers.get(layer)?.experts.get(expert)
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

    /// Number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Counts of a layer's experts, in their order; none in a layer without routed experts.
    /// Allocates nothing.
    pub fn experts(&self, layer: usize) -> impl ExactSizeIterator<Item = ExpertCount> {
        let experts = self.layers.get(layer).map_or(&[][..], |layer| &layer.experts);
        experts.iter().map(ExpertCells::counts)
    }
}

impl ExpertCells {
    fn counts(&self) -> ExpertCount {
        let Self { uses, hits, prefetched, misses } = self;
        let [uses, hits, prefetched, misses] =
            [uses, hits, prefetched, misses].map(|n| n.load(Ordering::Relaxed));
        ExpertCount { uses, hits, prefetched, misses }
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
