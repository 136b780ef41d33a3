//! Grouped-query attention: config keys, shape, projections, QK-norm.

use moeflux_base::Error;
use moeflux_ops::RopePairs;
use serde::Deserialize;

use super::{
    config::Require,
    rope::{RopeKeys, RopeStyle},
    scope::Scope,
};
use crate::{
    blueprint::{GqaBlueprint, GqaShape, LinearSource, RopeShape},
    checkpoint::source::TensorSource,
};

/// Config keys of attention whose heads and RoPE are the same in all layers.
#[derive(Deserialize)]
pub(crate) struct GqaKeys {
    #[serde(flatten)]
    pub(crate) heads: Heads,
    #[serde(flatten)]
    pub(crate) rope: RopeKeys,
}

/// How a layer attends. The default is Llama's: to all positions, whole heads rotated by halves,
/// no QK-norm.
#[derive(Clone, Copy)]
pub(crate) struct GqaStyle {
    /// Sliding window in positions; `None` for full attention.
    pub(crate) window: Option<usize>,
    pub(crate) rope: RopeStyle,
    pub(crate) qk_norm: QkNorm,
}

impl Default for GqaStyle {
    fn default() -> Self {
        let rope = RopeStyle::Whole(RopePairs::Halves);
        Self { window: None, rope, qk_norm: QkNorm::NONE }
    }
}

impl GqaKeys {
    /// Attention of the module `attention`.
    pub(crate) fn attention(
        &self,
        attention: &Scope<'_>,
        hidden: usize,
        style: GqaStyle,
    ) -> Result<GqaBlueprint, Error> {
        let GqaStyle { window, rope, qk_norm } = style;
        let shape = GqaShape { window, ..self.heads.shape(attention.source, hidden)? };
        let rope = self.rope.of(attention.source, shape.head_dim, rope)?;
        gqa(attention, GqaParams { hidden, shape, rope, qk_norm })
    }
}

/// Config keys of the heads.
#[derive(Deserialize)]
pub(crate) struct Heads {
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: Option<usize>,
}

impl Heads {
    /// Checked shape of full (not windowed) attention.
    pub(crate) fn shape(
        &self,
        source: &dyn TensorSource,
        hidden: usize,
    ) -> Result<GqaShape, Error> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        let head_dim = self.head_dim.unwrap_or(hidden / heads.max(1));
        gqa_shape(source, heads, kv_heads, head_dim)
    }
}

/// Checked shape of full (not windowed) attention, with values as wide as keys.
pub(crate) fn gqa_shape(
    source: &dyn TensorSource,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
) -> Result<GqaShape, Error> {
    let require = Require(source);
    require.sizes(&[
        ("num_attention_heads", heads),
        ("num_key_value_heads", kv_heads),
        ("head_dim", head_dim),
    ])?;
    require.that(heads.is_multiple_of(kv_heads), || {
        format!(
            "\"num_attention_heads\" is {heads}, not a multiple of \"num_key_value_heads\", \
             {kv_heads}"
        )
    })?;
    Ok(GqaShape::new(heads, kv_heads, head_dim))
}

/// QK-norm: norms of queries and keys.
#[derive(Clone, Copy)]
pub(crate) struct QkNorm {
    /// Whether there are norms; `None`: if their tensors exist.
    pub(crate) enabled: Option<bool>,
    /// Whether one norm goes over all heads, instead of over each.
    pub(crate) over_all_heads: bool,
    /// Names of the norms of queries and of keys.
    pub(crate) names: [&'static str; 2],
}

impl QkNorm {
    pub(crate) const PER_HEAD: Self =
        Self { enabled: Some(true), over_all_heads: false, names: ["q_norm", "k_norm"] };
    pub(crate) const OVER_ALL_HEADS: Self = Self { over_all_heads: true, ..Self::PER_HEAD };
    pub(crate) const NONE: Self = Self { enabled: Some(false), ..Self::PER_HEAD };
}

/// Projections of the input of attention.
pub(crate) struct GqaProjections {
    pub(crate) q: LinearSource,
    pub(crate) k: LinearSource,
    /// Without it, values are the output of `k` and as wide.
    pub(crate) v: Option<LinearSource>,
    /// Gate on the output.
    pub(crate) gate: Option<LinearSource>,
}

impl GqaProjections {
    /// `q_proj`, `k_proj` and `v_proj`, with biases where they exist.
    pub(crate) fn new(
        attention: &Scope<'_>,
        hidden: usize,
        shape: &GqaShape,
    ) -> Result<Self, Error> {
        let keys = Self::without_values(attention, hidden, shape)?;
        let v = attention.linear("v_proj", shape.kv_heads * shape.v_head_dim, hidden)?;
        Ok(Self { v: Some(v), ..keys })
    }

    /// `q_proj` and `k_proj`.
    pub(crate) fn without_values(
        attention: &Scope<'_>,
        hidden: usize,
        shape: &GqaShape,
    ) -> Result<Self, Error> {
        Ok(Self {
            q: attention.linear("q_proj", shape.q_outputs(), hidden)?,
            k: attention.linear("k_proj", shape.kv_heads * shape.head_dim, hidden)?,
            v: None,
            gate: None,
        })
    }
}

/// Arguments of [`gqa`].
pub(crate) struct GqaParams {
    pub(crate) hidden: usize,
    pub(crate) shape: GqaShape,
    pub(crate) rope: RopeShape,
    pub(crate) qk_norm: QkNorm,
}

/// Grouped-query attention without sinks and without a projection of a gate.
pub(crate) fn gqa(attention: &Scope<'_>, params: GqaParams) -> Result<GqaBlueprint, Error> {
    let (hidden, shape) = (params.hidden, params.shape);
    gqa_of(attention, params, "o_proj", || GqaProjections::new(attention, hidden, &shape))
}

/// The same with the projection `gate_proj` of a gate, if the shape has one.
pub(crate) fn gated_gqa(
    attention: &Scope<'_>,
    params: GqaParams,
    gate_proj: &str,
) -> Result<GqaBlueprint, Error> {
    let (hidden, shape) = (params.hidden, params.shape);
    gqa_of(attention, params, "o_proj", || {
        let gates = shape.gate_outputs();
        let gate = (gates > 0).then(|| attention.linear(gate_proj, gates, hidden)).transpose()?;
        Ok(GqaProjections { gate, ..GqaProjections::new(attention, hidden, &shape)? })
    })
}

/// The same with other projections. They are looked up after the norms, so that a config with
/// another width of heads is said to differ from the norms.
pub(crate) fn gqa_of(
    attention: &Scope<'_>,
    params: GqaParams,
    o_proj: &str,
    projections: impl FnOnce() -> Result<GqaProjections, Error>,
) -> Result<GqaBlueprint, Error> {
    let GqaParams { hidden, shape, rope, qk_norm } = params;
    let QkNorm { enabled, over_all_heads, names } = qk_norm;
    let norm = |name, heads| {
        let heads = if over_all_heads { heads } else { 1 };
        attention.norm_if(enabled, name, heads * shape.head_dim)
    };
    let (q_norm, k_norm) = (norm(names[0], shape.heads)?, norm(names[1], shape.kv_heads)?);
    let GqaProjections { q, k, v, gate } = projections()?;
    Ok(GqaBlueprint {
        shape,
        rope,
        q_proj: q,
        k_proj: k,
        v_proj: v,
        gate_proj: gate,
        o_proj: attention.linear(o_proj, hidden, shape.heads * shape.v_head_dim)?,
        q_norm,
        k_norm,
        norms_rotated: false,
        v_norm: false,
        sinks: None,
        indexer: None,
    })
}
