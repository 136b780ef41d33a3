//! `olmoe`: OLMoE-1B-7B.
//!
//! Attention with one norm over all query heads and one over all key heads; a softmax router over
//! experts in every layer, no shared expert. Sources: Muennighoff et al., "OLMoE", 2024; the
//! published `config.json`.

use moeflux_base::Error;
use moeflux_ops::RopePairs;
use serde::Deserialize;

use crate::parts::{
    body::{Body, GqaParams, Heads, gqa},
    config::parse_config,
    rope::RopeKeys,
    scope::{NormWeights, Scope},
    softmax_moe::SoftmaxMoe,
};
use crate::{
    blueprint::{Blueprint, GqaBlueprint},
    checkpoint::source::TensorSource,
};

#[derive(Deserialize)]
struct OlmoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    heads: Heads,
    #[serde(flatten)]
    rope: RopeKeys,
    #[serde(flatten)]
    moe: SoftmaxMoe,
    #[serde(default)]
    norm_topk_prob: bool,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: OlmoeConfig = parse_config(source)?;
    config.moe.size_experts_as_mlp();
    let (body, normalize) = (&config.body, config.norm_topk_prob);
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = attention(&config, &layer.child("self_attn"))?;
        let mlp = layer.child("mlp");
        let feed_forward = config.moe.feed_forward(&mlp, i, body.hidden_size, normalize)?;
        body.layer(layer, attention, feed_forward)
    })
}

fn attention(config: &OlmoeConfig, attention: &Scope<'_>) -> Result<GqaBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let shape = config.heads.shape(attention.source, hidden)?;
    let rope = config.rope.whole(attention.source, shape.head_dim, RopePairs::Halves)?;
    Ok(GqaBlueprint {
        q_norm: Some(attention.norm("q_norm", shape.heads * shape.head_dim)?),
        k_norm: Some(attention.norm("k_norm", shape.kv_heads * shape.head_dim)?),
        ..gqa(attention, GqaParams { hidden, shape, rope, v_proj: true })?
    })
}
