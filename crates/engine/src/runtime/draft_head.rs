//! Head for multi-token prediction, on a device; rows that it takes, and its drafts.

use std::ops::Range;

use moeflux_base::Error;
use moeflux_compute::{Buffer, Span, View, Weight};
use moeflux_model::{
    blueprint::{Blueprint, DrafterBlueprint, LayerBlueprint},
    seam::MAX_STATES,
};

pub use super::kept_rows::MAX_DRAFTS;
use super::{
    kept_rows::{DRAFT_VALUES, SEQUENCE_DRAFTS, drafter_values},
    layer::{Layer, Loader, StreamNorm},
    plan::MemoryPlan,
};

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
        let [kept, drafts] = drafter_values(blueprint.hidden, plan.sessions)
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

    /// Rows that wait, `(rows, hidden)`.
    pub(super) fn kept_view(&self, rows: Range<usize>, hidden: usize) -> View {
        View::rows(self.kept, rows.end, hidden).slice(rows.start, rows.len())
    }

    /// Tokens of drafts of a sequence, given by its index among the drafting ones: `(drafts, 1)`.
    pub(super) fn drafts_view(&self, sequence: usize, drafts: Range<usize>) -> View {
        let all = View::rows(self.drafts, (sequence + 1) * MAX_DRAFTS, DRAFT_VALUES);
        all.slice(sequence * MAX_DRAFTS + drafts.start, drafts.len()).columns(0, 1)
    }

    /// Values of all drafts of some sequences.
    pub(super) fn all_drafts(&self, sequences: usize) -> View {
        View::rows(self.drafts, 1, sequences * SEQUENCE_DRAFTS)
    }
}

/// Tokens of the drafts of a sequence among the values of [`DraftHead::all_drafts`].
pub(super) fn drafts_of(values: &[f32], sequence: usize, drafts: usize) -> [u32; MAX_DRAFTS] {
    let of_sequence = &values[sequence * SEQUENCE_DRAFTS..][..SEQUENCE_DRAFTS];
    let mut tokens = [0; MAX_DRAFTS];
    let pairs = of_sequence.chunks_exact(DRAFT_VALUES).take(drafts);
    tokens.iter_mut().zip(pairs).for_each(|(token, pair)| *token = pair[0] as u32);
    tokens
}
