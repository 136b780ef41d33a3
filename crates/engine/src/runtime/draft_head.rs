//! Head for multi-token prediction, on a device; rows that it takes, and its drafts.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Span, StateShape, Weight};
use moeflux_model::{
    blueprint::{Blueprint, DrafterBlueprint, LayerBlueprint},
    seam::MAX_STATES,
};

use super::{
    layer::{Layer, Loader, StreamNorm},
    plan::MemoryPlan,
    spans::{LayerStates, SpanKind},
};

/// Maximum number of drafts of a session in one step.
pub const MAX_DRAFTS: usize = 3;

/// Drafted tokens, first to last.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftList {
    tokens: [u32; MAX_DRAFTS],
    len: usize,
}

impl DraftList {
    /// Appends a token, unless there are [`MAX_DRAFTS`].
    pub(crate) fn push(&mut self, token: u32) {
        if let Some(place) = self.tokens.get_mut(self.len) {
            (*place, self.len) = (token, self.len + 1);
        }
    }

    /// The tokens.
    pub fn as_slice(&self) -> &[u32] {
        &self.tokens[..self.len]
    }
}

/// Rows of a step that the head takes, of one sequence, and its drafts.
pub(crate) struct DraftSpan<'a> {
    /// States of the head's layer.
    pub(crate) states: &'a LayerStates,
    /// Rows that the states hold. They need not be all of the sequence.
    pub(crate) position: usize,
    /// Hidden states of rows of earlier steps, before the rows of this one.
    pub(crate) held: &'a [f32],
    /// First row of the step.
    pub(crate) row: usize,
    /// Token after each row, held ones first.
    pub(crate) next: Vec<u32>,
    pub(crate) kind: SpanKind,
    /// Number of drafts to make after the last row.
    pub(crate) wanted: usize,
    pub(crate) drafts: DraftList,
}

impl DraftSpan<'_> {
    /// Rows that the head appends to a state.
    pub(crate) fn appended(&self) -> impl Iterator<Item = Span> {
        let (position, rows) = (self.position, self.next.len());
        self.states.iter().flatten().map(move |state| Span::new(*state, position, rows))
    }
}

/// Limits of runs of a drafter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftLimits {
    /// Number of the model's own layers, and index of the drafter's.
    pub(crate) own_layers: usize,
    /// Positions per session.
    pub(crate) context: usize,
    pub(crate) hidden: usize,
    /// Rows of a run.
    pub(crate) rows: usize,
}

impl DraftLimits {
    pub(crate) fn new(blueprint: &Blueprint, plan: &MemoryPlan) -> Self {
        let (own_layers, hidden) = (blueprint.own_layers(), blueprint.hidden);
        Self { own_layers, context: plan.context, hidden, rows: plan.chunk }
    }
}

/// A loaded [`DrafterBlueprint`].
pub(super) struct DraftHead {
    /// Embedding of the model, on the card of the head.
    pub(super) embed: Weight,
    pub(super) embed_norm: Buffer,
    pub(super) hidden_norm: Buffer,
    pub(super) fuse: Weight,
    pub(super) layer: Layer,
    pub(super) norm: StreamNorm,
    /// Positions per session.
    pub(super) context: usize,
    /// Whether it may run in a step before the step's outcome is known: rows can be cut from its
    /// states, and no run has failed.
    pub(super) runs_in_step: bool,
    /// Spans with each state of the layer.
    pub(super) spans: [Vec<Span>; MAX_STATES],
}

impl DraftHead {
    /// Loads the head of a model to the current card.
    pub(super) fn load(
        drafter: &DrafterBlueprint,
        layer: &LayerBlueprint,
        embed: Weight,
        plan: &MemoryPlan,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        let states = layer.states(plan.context, plan.chunk);
        let can_cut = |shape: &StateShape| matches!(shape, StateShape::KeyValue { .. });
        Ok(Self {
            context: plan.context,
            runs_in_step: states.iter().all(can_cut),
            embed,
            embed_norm: loader.vector(&drafter.embed_norm)?,
            hidden_norm: loader.vector(&drafter.hidden_norm)?,
            fuse: loader.matrix(&drafter.fuse)?,
            layer: Layer::load(layer, 1, loader)?,
            norm: StreamNorm::load(&drafter.norm, loader)?,
            spans: std::array::from_fn(|_| Vec::new()),
        })
    }

    /// The head of a blueprint to which it is attached.
    pub(super) fn of(blueprint: &Blueprint) -> Option<(&DrafterBlueprint, &LayerBlueprint)> {
        Some((blueprint.attached_drafter()?, blueprint.layers.last()?))
    }
}
