//! Head for multi-token prediction, on a device; rows that it takes, and its drafts.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Span, Weight};
use moeflux_model::{
    blueprint::{Blueprint, DrafterBlueprint, LayerBlueprint},
    seam::MAX_STATES,
};

use super::{
    layer::{Layer, Loader, StreamNorm},
    plan::MemoryPlan,
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

/// Limits of runs of a drafter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftLimits {
    /// Number of the model's own layers, and index of the drafter's.
    pub(crate) own_layers: usize,
    /// Positions per session.
    pub(crate) context: usize,
    /// Rows of a step.
    pub(crate) rows: usize,
}

impl DraftLimits {
    pub(crate) fn new(blueprint: &Blueprint, plan: &MemoryPlan) -> Self {
        Self { own_layers: blueprint.own_layers(), context: plan.context, rows: plan.chunk }
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
    /// Hidden states of rows that wait: see [`KeptRows`](super::kept_rows::KeptRows).
    pub(super) kept: Buffer,
    /// Drafts of the current step.
    pub(super) drafts: Buffer,
    /// Spans with each state of the layer.
    pub(super) spans: [Vec<Span>; MAX_STATES],
    /// Tokens after the rows of the current run, as far as the host knows them.
    pub(super) tokens: Vec<u32>,
}

impl DraftHead {
    /// Loads the head of a model to the current card.
    pub(super) fn load(
        blueprint: &Blueprint,
        embed: Weight,
        plan: &MemoryPlan,
        loader: &mut Loader<'_>,
    ) -> Result<Option<Self>, Error> {
        let Some((drafter, layer)) = Self::of(blueprint) else { return Ok(None) };
        let [kept, drafts] = Self::buffer_lens(blueprint.hidden, plan.sessions)
            .map(|len| loader.device.buffer(len).map_err(Error::at(|| "rows of the drafter")));
        Ok(Some(Self {
            kept: kept?,
            drafts: drafts?,
            tokens: Vec::new(),
            embed,
            embed_norm: loader.vector(&drafter.embed_norm)?,
            hidden_norm: loader.vector(&drafter.hidden_norm)?,
            fuse: loader.matrix(&drafter.fuse)?,
            layer: Layer::load(layer, 1, loader)?,
            norm: StreamNorm::load(&drafter.norm, loader)?,
            spans: std::array::from_fn(|_| Vec::new()),
        }))
    }

    /// The head of a blueprint to which it is attached.
    fn of(blueprint: &Blueprint) -> Option<(&DrafterBlueprint, &LayerBlueprint)> {
        Some((blueprint.attached_drafter()?, blueprint.layers.last()?))
    }
}
