//! Block indexer of sparse grouped-query attention: chooses the blocks of positions that each KV
//! head reads.

use moeflux_base::Error;
use moeflux_compute::{Buffer, Op, View};
use moeflux_model::blueprint::{BlockIndexerBlueprint, RopeShape};

use super::{
    loader::Loader,
    scratch::{ScratchId, ScratchWidths},
    step::{Linear, Step},
};

#[derive(Debug)]
pub(super) struct BlockIndexer {
    heads: usize,
    head_dim: usize,
    rope: RopeShape,
    block: usize,
    top_k: usize,
    local: usize,
    q_proj: Linear,
    k_proj: Linear,
    q_norm: Buffer,
    k_norm: Buffer,
}

/// Scratch buffers beside those of attention: queries, keys, chosen positions.
const INDEX_Q: ScratchId = ScratchId(5);
const INDEX_K: ScratchId = ScratchId(6);
const POSITIONS: ScratchId = ScratchId(7);

impl BlockIndexer {
    /// Adds the buffers of an indexer with `heads` heads.
    pub(super) fn set_widths(
        blueprint: &BlockIndexerBlueprint,
        heads: usize,
        widths: &mut ScratchWidths,
    ) {
        widths.set(INDEX_Q, heads * blueprint.head_dim);
        widths.set(INDEX_K, blueprint.head_dim);
        widths.set(POSITIONS, heads * blueprint.top_k * blueprint.block);
    }

    pub(super) fn load(
        blueprint: &BlockIndexerBlueprint,
        heads: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        Ok(Self {
            heads,
            head_dim: blueprint.head_dim,
            rope: blueprint.rope.clone(),
            block: blueprint.block,
            top_k: blueprint.top_k,
            local: blueprint.local,
            q_proj: loader.linear(&blueprint.q_proj)?,
            k_proj: loader.linear(&blueprint.k_proj)?,
            q_norm: loader.vector(&blueprint.q_norm)?,
            k_norm: loader.vector(&blueprint.k_norm)?,
        })
    }

    /// Positions chosen for each KV head, `(rows, heads, top_k * block)`. Appends to the layer's
    /// index keys.
    pub(super) fn select_positions(&self, step: &mut Step<'_>) -> Result<View, Error> {
        let (x, eps) = (step.normed(), step.eps);
        let q = step.buffer(INDEX_Q, self.heads * self.head_dim);
        let k = step.buffer(INDEX_K, self.head_dim);
        // Exact, as for routers: rounding could change the selection.
        step.exact_mat_mul(x, self.q_proj, q)?;
        step.exact_mat_mul(x, self.k_proj, k)?;
        let q = q.split(self.heads);
        step.norm(q, Some(self.q_norm), eps)?;
        step.norm(k, Some(self.k_norm), eps)?;
        let [_, spans, ..] = step.spans;
        for x in [q, k] {
            step.rope(&self.rope, x, x, spans)?;
        }
        let out = step.buffer(POSITIONS, self.heads * self.top_k * self.block).split(self.heads);
        let scores = step.block_scores(self.block);
        let (block, local) = (self.block, self.local);
        step.run(&Op::TopBlocks { q, k, block, local, spans, scores, out })?;
        Ok(out)
    }
}
