//! Grouped-query attention (GQA): head norms, RoPE, sliding windows, attention sinks and an output
//! gate where a model has them.

use moeflux_compute::{Buffer, Op, View};

use super::{Linear, Loader, ScratchId, ScratchWidths, Step};
use crate::{
    base::error::Error,
    checkpoint::VectorSource,
    model::blueprint::{GqaBlueprint, GqaShape, RopeShape},
};

#[derive(Debug)]
pub(crate) struct Gqa {
    shape: GqaShape,
    rope: RopeShape,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Option<Linear>,
    o_proj: Linear,
    q_norm: Option<HeadNorm>,
    k_norm: Option<HeadNorm>,
    norms_rotated: bool,
    v_norm: bool,
    sinks: Option<Buffer>,
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

/// Scratch buffers: queries (with gates), keys, values, output.
const Q: ScratchId = ScratchId(0);
const K: ScratchId = ScratchId(1);
const V: ScratchId = ScratchId(2);
const Y: ScratchId = ScratchId(3);

impl Gqa {
    pub(crate) fn widths(blueprint: &GqaBlueprint) -> ScratchWidths {
        let GqaShape { heads, kv_heads, head_dim, v_head_dim, .. } = blueprint.shape;
        let mut widths = ScratchWidths::default();
        widths.set(Q, blueprint.shape.q_outputs());
        widths.set(K, kv_heads * head_dim);
        widths.set(V, kv_heads * v_head_dim);
        widths.set(Y, heads * v_head_dim);
        widths
    }

    pub(crate) fn load(blueprint: &GqaBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        Ok(Self {
            shape: blueprint.shape,
            rope: blueprint.rope.for_context(loader.context),
            q_proj: loader.linear(&blueprint.q_proj)?,
            k_proj: loader.linear(&blueprint.k_proj)?,
            v_proj: blueprint.v_proj.as_ref().map(|v| loader.linear(v)).transpose()?,
            o_proj: loader.linear(&blueprint.o_proj)?,
            q_norm: HeadNorm::load(blueprint.q_norm.as_ref(), loader)?,
            k_norm: HeadNorm::load(blueprint.k_norm.as_ref(), loader)?,
            norms_rotated: blueprint.norms_rotated,
            v_norm: blueprint.v_norm,
            sinks: loader.optional_vector(blueprint.sinks.as_ref())?,
        })
    }

    /// Reads `step.normed()`, writes `step.mixed()`, appends to the layer's KV cache.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let GqaShape { heads, kv_heads, head_dim, v_head_dim, output_gate, window, scale } =
            self.shape;
        let x = step.normed();
        let q_all = step.buffer(Q, self.shape.q_outputs());
        let k_all = step.buffer(K, kv_heads * head_dim);
        let v_all = step.buffer(V, kv_heads * v_head_dim);
        let y = step.buffer(Y, heads * v_head_dim);
        // With an output gate, q_proj yields each head's query, then its gate.
        let per_head = q_all.split(heads);
        let q = View { width: head_dim, ..per_head };
        let gate = output_gate.then(|| View {
            offset: per_head.offset + head_dim,
            width: v_head_dim,
            ..per_head
        });
        let (k, v) = (k_all.split(kv_heads), v_all.split(kv_heads));

        step.mat_mul(x, self.q_proj, q_all)?;
        step.mat_mul(x, self.k_proj, k_all)?;
        // Without v_proj, the values are the keys before their norm.
        step.mat_mul(x, self.v_proj.unwrap_or(self.k_proj), v_all)?;
        if !self.norms_rotated {
            self.norm_heads(step, q, k)?;
        }
        if self.v_norm {
            step.norm(v, None, step.eps)?;
        }
        let [spans, _] = step.spans;
        for x in [q, k] {
            step.rope(&self.rope, x, x, spans)?;
        }
        if self.norms_rotated {
            self.norm_heads(step, q, k)?;
        }
        let (v, sinks, out) = (Some(v), self.sinks, y.split(heads));
        step.run(&Op::Attention {
            q,
            k,
            v,
            gate,
            scale,
            window,
            sinks,
            positions: None,
            spans,
            out,
        })?;
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
