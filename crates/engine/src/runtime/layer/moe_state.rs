//! Routing of a step's MoE layers: chosen and needed experts.

use std::{ops::Range, sync::Arc};

use moeflux_compute::ExpertUse;
use moeflux_model::blueprint::Blueprint;

use crate::experts::{
    cache::Pin,
    counters::ExpertCounters,
    prefetch::{MAX_PREFETCH_ROWS, PrefetchMode, Prefetcher},
    trace::TraceRecorder,
    use_window::UseWindow,
};

/// One choice of the router: expert, row, rank in the row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RouterChoice {
    pub(super) expert: u32,
    pub(super) row: u32,
    pub(super) rank: u32,
}

/// An expert that a step needs, with the choices of it.
pub(super) struct NeededExpert {
    pub(super) expert: usize,
    pub(super) choices: Range<usize>,
    /// Set if the expert was in memory when the layer started.
    pub(super) hit: Option<Pin>,
    /// Whether the expert is in memory or its read is in flight.
    pub(super) taken: bool,
}

/// Routing of the current MoE layer and the state that layers share. Reused, so that steps allocate
/// nothing.
#[derive(Default)]
pub(crate) struct MoeState {
    /// Whether router ids were read back since this was last cleared.
    pub(crate) ids_were_read: bool,
    /// Ids of all layers, read at the end of a step.
    pub(crate) routed_ids: Vec<f32>,
    /// By layer: whether the host sees the ids in this step before the step ends.
    seen: Vec<bool>,
    pub(super) ids_as_f32: Vec<f32>,
    pub(super) ids: Vec<u32>,
    pub(super) choices: Vec<RouterChoice>,
    pub(super) needed: Vec<NeededExpert>,
    pub(super) uses: Vec<ExpertUse>,
    /// Uses of experts that the host computes.
    pub(super) host_uses: Vec<ExpertUse>,
    pub(super) pinned: Vec<Pin>,
    /// Pins of experts that the host computes.
    pub(super) host_pinned: Vec<Pin>,
    pub(super) prefetcher: Prefetcher,
    /// Counters that are read outside steps too.
    pub(crate) counters: Arc<ExpertCounters>,
    /// Records the needed experts, if a trace is recorded.
    pub(crate) recorder: Option<TraceRecorder>,
}

impl MoeState {
    /// State for steps of up to `rows` rows.
    pub(crate) fn new(blueprint: &Blueprint, rows: usize, prefetch: PrefetchMode) -> Self {
        let k = blueprint.max_uses();
        let n = rows.max(MAX_PREFETCH_ROWS) * k;
        Self {
            ids_were_read: false,
            routed_ids: Vec::new(),
            seen: vec![false; blueprint.layers.len()],
            ids_as_f32: Vec::with_capacity(n),
            ids: Vec::with_capacity(n),
            choices: Vec::with_capacity(n),
            needed: Vec::with_capacity(n),
            uses: Vec::with_capacity(n),
            host_uses: Vec::with_capacity(n),
            pinned: Vec::with_capacity(n),
            host_pinned: Vec::with_capacity(n),
            prefetcher: Prefetcher::new(prefetch, blueprint.layers.len(), k),
            counters: Arc::new(ExpertCounters::new(blueprint)),
            recorder: None,
        }
    }

    /// Bytes of the state for `rows` rows.
    pub(crate) fn bytes(blueprint: &Blueprint, rows: usize) -> u64 {
        let k = blueprint.max_uses();
        let bytes = size_of::<f32>()
            + size_of::<u32>()
            + size_of::<RouterChoice>()
            + size_of::<NeededExpert>()
            + 2 * size_of::<ExpertUse>()
            + 2 * size_of::<Pin>();
        (rows.max(MAX_PREFETCH_ROWS) * k * bytes + blueprint.layers.len()) as u64
            + Prefetcher::bytes(blueprint.layers.len(), k)
            + ExpertCounters::bytes(blueprint)
            + UseWindow::bytes(blueprint.experts())
    }

    /// Starts a step.
    pub(crate) fn start_step(&mut self) {
        self.ids_were_read = false;
        self.seen.fill(false);
    }

    /// Notes that the host sees a layer's ids before the step ends.
    pub(crate) fn see_ids(&mut self, layer: usize) {
        self.seen.get_mut(layer).into_iter().for_each(|seen| *seen = true);
    }

    /// Whether the host has seen a layer's ids in this step.
    pub(super) fn has_seen_ids(&self, layer: usize) -> bool {
        self.seen.get(layer) == Some(&true)
    }

    /// Groups the ids by expert.
    pub(super) fn group_by_expert(&mut self, k: usize) {
        self.choices.clear();
        let choice = |(i, id): (usize, &u32)| RouterChoice {
            expert: *id,
            row: (i / k) as u32,
            rank: (i % k) as u32,
        };
        self.choices.extend(self.ids.iter().enumerate().map(choice));
        self.choices.sort_unstable();
        self.needed.clear();
        for (i, choice) in self.choices.iter().enumerate() {
            match self.needed.last_mut() {
                Some(last) if last.expert == choice.expert as usize => last.choices.end = i + 1,
                _ => self.needed.push(NeededExpert {
                    expert: choice.expert as usize,
                    choices: i..i + 1,
                    hit: None,
                    taken: false,
                }),
            }
        }
    }
}
