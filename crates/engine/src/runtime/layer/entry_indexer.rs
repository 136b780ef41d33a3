//! Lightning indexer over compressed entries.

use moeflux_base::Error;
use moeflux_compute::{Buffer, IndexList, IndexQueries, Op, Span, View};
use moeflux_model::blueprint::{EntryIndexerBlueprint, PartialRope};

use super::{
    compressor::{Compressor, CompressorStates, rotate},
    loader::Loader,
    scratch::{SCRATCH_BUFFERS, ScratchId, ScratchWidths},
    step::{Linear, Step},
};

#[derive(Debug)]
pub(super) struct EntryIndexer {
    heads: usize,
    head_dim: usize,
    pub(super) top_k: usize,
    ratio: usize,
    rope: PartialRope,
    q_proj: Linear,
    q_norm: Option<Buffer>,
    weights: HeadWeights,
    compressor: Compressor,
}

/// Weights of the heads' scores.
#[derive(Debug)]
enum HeadWeights {
    Projected(Linear),
    /// Ones, `(rows of a step, heads)`.
    Equal(Buffer),
}

/// Scratch buffers: queries, weights.
const INDEX_Q: ScratchId = ScratchId(6);
const INDEX_WEIGHTS: ScratchId = ScratchId(8);
/// Selected positions. No other part uses this buffer, as layers without an indexer may read the
/// positions of an earlier layer from it.
pub(super) const POSITIONS: ScratchId = ScratchId(SCRATCH_BUFFERS - 1);

/// States of an indexer: its keys, and the open block of their compressor.
#[derive(Clone, Copy)]
pub(super) struct IndexStates<'a> {
    pub(super) keys: &'a [Span],
    pub(super) open_block: &'a [Span],
}

impl EntryIndexer {
    pub(super) fn set_widths(blueprint: &EntryIndexerBlueprint, widths: &mut ScratchWidths) {
        widths.raise(INDEX_Q, blueprint.heads * blueprint.head_dim);
        widths.raise(INDEX_WEIGHTS, blueprint.heads);
        Compressor::set_widths(&blueprint.compressor, widths);
    }

    pub(super) fn load(
        blueprint: &EntryIndexerBlueprint,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        let heads = blueprint.heads;
        let q_proj = loader.linear(&blueprint.q_proj)?;
        let weights = match &blueprint.weights_proj {
            Some(weights) => HeadWeights::Projected(loader.linear(weights)?),
            None => {
                let ones = vec![1.0; loader.chunk * heads];
                HeadWeights::Equal(loader.buffer("weights of an indexer", &ones)?)
            }
        };
        Ok(Self {
            heads,
            head_dim: blueprint.head_dim,
            top_k: blueprint.top_k,
            ratio: blueprint.compressor.ratio,
            rope: blueprint.rope.for_context(loader.context),
            q_proj,
            q_norm: loader.optional_vector(blueprint.q_norm.as_ref())?,
            weights,
            compressor: Compressor::load(&blueprint.compressor, true, loader)?,
        })
    }

    /// Numbers in a list of positions for rows before position `end`.
    pub(super) fn list_width(&self, end: usize) -> usize {
        self.top_k.min(end / self.ratio) * self.ratio + self.ratio - 1
    }

    /// Writes the chosen entries to `out` in the form of `list`, and appends to the index keys.
    ///
    /// Scores are not scaled, as a positive factor on a row's scores does not change its top-k.
    pub(super) fn select(
        &self,
        step: &mut Step<'_>,
        states: IndexStates<'_>,
        q_input: View,
        list: IndexList,
        out: View,
    ) -> Result<(), Error> {
        let IndexStates { keys: spans, open_block } = states;
        let entries = CompressorStates { entries: spans, first_entry: 0, open_block };
        self.compressor.run(step, entries)?;
        let ratio = self.ratio;
        let visible = spans.iter().map(|span| (span.position + span.rows) / ratio).max();
        // All visible entries are chosen.
        if visible.unwrap_or(0) <= self.top_k {
            let queries = None;
            return step.run(&Op::TopPositions { queries, k: None, ratio, list, spans, out });
        }
        let x = step.normed();
        let q = step.buffer(INDEX_Q, self.heads * self.head_dim);
        // Exact, as for routers: rounding could change the selection.
        step.exact_mat_mul(q_input, self.q_proj, q)?;
        let weights = match self.weights {
            HeadWeights::Projected(proj) => {
                let weights = step.buffer(INDEX_WEIGHTS, self.heads);
                step.exact_mat_mul(x, proj, weights)?;
                weights
            }
            HeadWeights::Equal(ones) => View::rows(ones, step.rows, self.heads),
        };
        let q = q.split(self.heads);
        if self.q_norm.is_some() {
            step.norm(q, self.q_norm, step.eps)?;
        }
        rotate(&self.rope, step, q, spans)?;
        let queries = Some(IndexQueries { q, weights, scores: step.scores() });
        step.run(&Op::TopPositions { queries, k: None, ratio, list, spans, out })
    }
}
