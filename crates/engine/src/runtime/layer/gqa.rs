//! Grouped-query attention (GQA): head norms, RoPE, sliding windows, attention sinks and an output
//! gate where a model has them.

use moeflux_base::Error;
use moeflux_compute::{Buffer, GateFunction, IndexList, Op, View};
use moeflux_model::{
    blueprint::{GateSource, GqaBlueprint, GqaIndexer, GqaShape, OutputGate, RopeShape},
    checkpoint::VectorSource,
};

use super::{
    block_indexer::BlockIndexer,
    entry_indexer::{EntryIndexer, IndexStates, POSITIONS},
    loader::Loader,
    scratch::{ScratchId, ScratchWidths},
    step::{Linear, Step},
};

#[derive(Debug)]
pub(crate) struct Gqa {
    shape: GqaShape,
    rope: RopeShape,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Option<Linear>,
    gate_proj: Option<Linear>,
    o_proj: Linear,
    q_norm: Option<HeadNorm>,
    k_norm: Option<HeadNorm>,
    norms_rotated: bool,
    v_norm: bool,
    sinks: Option<Buffer>,
    indexer: Option<LoadedIndexer>,
}

/// LoadedIndexer of sparse attention.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one per layer")]
enum LoadedIndexer {
    Blocks(BlockIndexer),
    Entries(EntryIndexer),
}

impl LoadedIndexer {
    fn load(
        blueprint: &GqaIndexer,
        kv_heads: usize,
        loader: &mut Loader<'_>,
    ) -> Result<Self, Error> {
        Ok(match blueprint {
            GqaIndexer::Blocks(blocks) => {
                Self::Blocks(BlockIndexer::load(blocks, kv_heads, loader)?)
            }
            GqaIndexer::Entries(entries) => Self::Entries(EntryIndexer::load(entries, loader)?),
        })
    }

    /// Chosen positions of each row. Appends to the layer's index keys.
    fn select(&self, step: &mut Step<'_>) -> Result<View, Error> {
        match self {
            Self::Blocks(indexer) => indexer.select_positions(step),
            Self::Entries(indexer) => {
                let [_, keys, open_block, ..] = step.spans;
                let end = keys.iter().map(|span| span.position + span.rows).max();
                let width = indexer.list_width(end.unwrap_or(0));
                let (x, out) = (step.normed(), step.buffer(POSITIONS, width));
                let states = IndexStates { keys, open_block };
                indexer.select(step, states, x, IndexList::Positions, out)?;
                Ok(out)
            }
        }
    }
}

/// Norm of each head, or of all heads together.
#[derive(Clone, Copy, Debug)]
struct HeadNorm {
    weight: Buffer,
    width: usize,
}

impl HeadNorm {
    fn load(source: Option<&VectorSource>, loader: &mut Loader<'_>) -> Result<Option<Self>, Error> {
        let norm = source.map(|s| Ok(Self { weight: loader.vector(s)?, width: s.len }));
        norm.transpose()
    }
}

/// Scratch buffers: queries (with gates), keys, values, output, gates of a separate projection.
const Q: ScratchId = ScratchId(0);
const K: ScratchId = ScratchId(1);
const V: ScratchId = ScratchId(2);
const Y: ScratchId = ScratchId(3);
const GATES: ScratchId = ScratchId(4);

impl Gqa {
    pub(crate) fn widths(blueprint: &GqaBlueprint) -> ScratchWidths {
        let GqaShape { heads, kv_heads, head_dim, v_head_dim, .. } = blueprint.shape;
        let mut widths = ScratchWidths::default();
        widths.set(Q, blueprint.shape.q_outputs());
        widths.set(K, kv_heads * head_dim);
        widths.set(V, kv_heads * v_head_dim);
        widths.set(Y, heads * v_head_dim);
        widths.set(GATES, blueprint.shape.gate_outputs());
        match &blueprint.indexer {
            Some(GqaIndexer::Blocks(blocks)) => {
                BlockIndexer::set_widths(blocks, kv_heads, &mut widths);
            }
            Some(GqaIndexer::Entries(entries)) => {
                widths.set(POSITIONS, entries.positions());
                EntryIndexer::set_widths(entries, &mut widths);
            }
            None => {}
        }
        widths
    }

    pub(crate) fn load(blueprint: &GqaBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        Ok(Self {
            shape: blueprint.shape,
            rope: blueprint.rope.for_context(loader.context),
            q_proj: loader.linear(&blueprint.q_proj)?,
            k_proj: loader.linear(&blueprint.k_proj)?,
            v_proj: blueprint.v_proj.as_ref().map(|v| loader.linear(v)).transpose()?,
            gate_proj: blueprint.gate_proj.as_ref().map(|g| loader.linear(g)).transpose()?,
            o_proj: loader.linear(&blueprint.o_proj)?,
            q_norm: HeadNorm::load(blueprint.q_norm.as_ref(), loader)?,
            k_norm: HeadNorm::load(blueprint.k_norm.as_ref(), loader)?,
            norms_rotated: blueprint.norms_rotated,
            v_norm: blueprint.v_norm,
            sinks: loader.optional_vector(blueprint.sinks.as_ref())?,
            indexer: blueprint
                .indexer
                .as_ref()
                .map(|indexer| LoadedIndexer::load(indexer, blueprint.shape.kv_heads, loader))
                .transpose()?,
        })
    }

    /// Reads `step.normed()`, writes `step.mixed()`, appends to the layer's KV cache.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let GqaShape { heads, kv_heads, head_dim, v_head_dim, window, scale, value_scale, .. } =
            self.shape;
        let positions = self.indexer.as_ref().map(|indexer| indexer.select(step));
        let positions = positions.transpose()?;
        let x = step.normed();
        let q_all = step.buffer(Q, self.shape.q_outputs());
        let k_all = step.buffer(K, kv_heads * head_dim);
        let v_all = step.buffer(V, kv_heads * v_head_dim);
        let y = step.buffer(Y, heads * v_head_dim);
        let per_head = q_all.split(heads);
        let q = View { width: head_dim, ..per_head };
        let gates = self.shape.gate.map(|OutputGate { width, source, .. }| match source {
            GateSource::Queries => per_head.slice_width(head_dim, width),
            GateSource::Separate => step.buffer(GATES, heads * width).split(heads),
        });
        let (k, v) = (k_all.split(kv_heads), v_all.split(kv_heads));

        step.mat_mul(x, self.q_proj, q_all)?;
        step.mat_mul(x, self.k_proj, k_all)?;
        // Without v_proj, the values are the keys before their norm.
        step.mat_mul(x, self.v_proj.unwrap_or(self.k_proj), v_all)?;
        if let (Some(gate_proj), Some(gates)) = (self.gate_proj, gates) {
            step.mat_mul(x, gate_proj, gates.merge_heads())?;
        }
        if value_scale != 1.0 {
            step.run(&Op::Scale { x: v_all, factor: value_scale })?;
        }
        if !self.norms_rotated {
            self.norm_heads(step, q, k)?;
        }
        if self.v_norm {
            step.norm(v, None, step.eps)?;
        }
        let [spans, ..] = step.spans;
        for x in [q, k] {
            step.rope(&self.rope, x, x, spans)?;
        }
        if self.norms_rotated {
            self.norm_heads(step, q, k)?;
        }
        let (v, sinks, out) = (Some(v), self.sinks, y.split(heads));
        // Attention itself applies a sigmoid per element.
        let is_fused =
            |gate: &OutputGate| gate.function == GateFunction::Sigmoid && gate.width == v_head_dim;
        let gate = gates.filter(|_| self.shape.gate.as_ref().is_some_and(is_fused));
        step.run(&Op::Attention { q, k, v, gate, scale, window, sinks, positions, spans, out })?;
        if let (None, Some(OutputGate { function, .. }), Some(gate)) =
            (gate, self.shape.gate, gates)
        {
            step.run(&Op::HeadGate { x: out, gate, function })?;
        }
        let mixed = step.mixed();
        step.mat_mul(y, self.o_proj, mixed)
    }

    /// Norms of queries and keys, in place.
    fn norm_heads(&self, step: &mut Step<'_>, q: View, k: View) -> Result<(), Error> {
        for (heads, norm) in [(q, self.q_norm), (k, self.k_norm)] {
            if let Some(HeadNorm { weight, width }) = norm {
                let total = heads.heads * heads.width;
                let x = if width == heads.width {
                    heads
                } else {
                    heads.merge_heads().split(total / width)
                };
                step.norm(x, Some(weight), step.eps)?;
            }
        }
        Ok(())
    }
}
