//! Attention with grouped heads, norms per head, partial rotary embedding and an optional output gate.

use moeflux_compute::{Buffer, Op, View};

use super::{LANES, Linear, Loader, Step, Widths};
use crate::{
    Error,
    blueprint::{GqaBlueprint, GqaShape, RopeShape},
};

#[derive(Debug)]
pub(crate) struct Gqa {
    shape: GqaShape,
    rope: RopeShape,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    q_norm: Option<Buffer>,
    k_norm: Option<Buffer>,
}

/// Lanes: queries (with gates), keys, values, output.
const Q: usize = 0;
const K: usize = 1;
const V: usize = 2;
const Y: usize = 3;

impl Gqa {
    pub(crate) fn widths(blueprint: &GqaBlueprint) -> Widths {
        let GqaShape { heads, kv_heads, head_dim, output_gate } = blueprint.shape;
        let mut widths = [0; LANES];
        widths[Q] = heads * head_dim * if output_gate { 2 } else { 1 };
        widths[K] = kv_heads * head_dim;
        widths[V] = kv_heads * head_dim;
        widths[Y] = heads * head_dim;
        widths
    }

    pub(crate) fn load(blueprint: &GqaBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        Ok(Self {
            shape: blueprint.shape,
            rope: blueprint.rope.clone(),
            q_proj: loader.linear(&blueprint.q_proj)?,
            k_proj: loader.linear(&blueprint.k_proj)?,
            v_proj: loader.linear(&blueprint.v_proj)?,
            o_proj: loader.linear(&blueprint.o_proj)?,
            q_norm: blueprint.q_norm.as_ref().map(|n| loader.vector(n)).transpose()?,
            k_norm: blueprint.k_norm.as_ref().map(|n| loader.vector(n)).transpose()?,
        })
    }

    /// Reads `step.normed()`, writes `step.mixed()`, appends to the layer's keys and values.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let GqaShape { heads, kv_heads, head_dim, output_gate } = self.shape;
        let x = step.normed();
        let q_all = step.lane(Q, heads * head_dim * if output_gate { 2 } else { 1 });
        let k_all = step.lane(K, kv_heads * head_dim);
        let v_all = step.lane(V, kv_heads * head_dim);
        let y = step.lane(Y, heads * head_dim);
        // With a gate, each head's row of q_proj is its query, then its gate.
        let per_head = q_all.split(heads);
        let q = View { width: head_dim, ..per_head };
        let gate =
            output_gate.then(|| View { offset: per_head.offset + head_dim, width: head_dim, ..per_head });
        let (k, v) = (k_all.split(kv_heads), v_all.split(kv_heads));

        step.mat_mul(x, self.q_proj, q_all)?;
        step.mat_mul(x, self.k_proj, k_all)?;
        step.mat_mul(x, self.v_proj, v_all)?;
        let eps = step.eps;
        for (heads, norm) in [(q, self.q_norm), (k, self.k_norm)] {
            if let Some(weight) = norm {
                step.run(&Op::RmsNorm { x: heads, weight, eps, out: heads })?;
            }
        }
        let [spans, _] = step.spans;
        let RopeShape { frequencies, pairs, scale } = &self.rope;
        for x in [q, k] {
            step.run(&Op::Rope { x, frequencies, pairs: *pairs, scale: *scale, spans })?;
        }
        let scale = 1.0 / (head_dim as f32).sqrt();
        step.run(&Op::Attention { q, k, v, gate, scale, spans, out: y.split(heads) })?;
        let mixed = step.mixed();
        step.mat_mul(y, self.o_proj, mixed)
    }
}
