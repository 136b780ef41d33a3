//! `qwen2_moe`: Qwen2-57B-A14B, Qwen1.5-MoE-A2.7B.
//!
//! Grouped-query attention with biases of queries, keys and values; softmax router, gated shared
//! expert. Sources: Qwen2 Technical Report, 2024; the published `config.json`s.

use moeflux_compute::RopePairs;
use serde::Deserialize;

use super::{
    body::{Body, GqaParams, Heads, gqa},
    parse_config,
    rope::RopeKeys,
    scope::{NormWeights, Scope},
    softmax_moe::SoftmaxMoe,
};
use crate::{
    base::error::Error,
    checkpoint::source::TensorSource,
    model::blueprint::{Blueprint, GqaBlueprint},
};

#[derive(Deserialize)]
struct Qwen2MoeConfig {
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
    let config: Qwen2MoeConfig = parse_config(source)?;
    let (body, normalize) = (&config.body, config.norm_topk_prob);
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = attention(&config, &layer.child("self_attn"))?;
        let mlp = layer.child("mlp");
        let feed_forward = config.moe.feed_forward(&mlp, i, body.hidden_size, normalize)?;
        body.layer(layer, attention, feed_forward)
    })
}

fn attention(config: &Qwen2MoeConfig, attention: &Scope<'_>) -> Result<GqaBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let shape = config.heads.shape(attention.source, hidden)?;
    let rope = config.rope.whole(attention.source, shape.head_dim, RopePairs::Halves)?;
    gqa(attention, GqaParams { hidden, shape, rope, v_proj: true })
}
