//! `granitemoe`: Granite 3.0 and 3.1 MoE, PowerMoE-3B.
//!
//! Grouped-query attention, a softmax router, no shared expert; constant factors on the embedding,
//! the scores, the output of each sub-block and the logits. Sources: IBM, "Granite 3.0 Language
//! Models", 2024; transformers, `modeling_granitemoe.py`, the authors' release.

use moeflux_compute::RopePairs;
use serde::Deserialize;

use super::{
    Require,
    body::{Body, GqaParams, Heads, gqa},
    expert_tensors::ExpertTensors,
    parse_config,
    rope::RopeKeys,
    scope::{NormWeights, Scope},
    softmax_moe::{SoftmaxMoe, SoftmaxStyle},
};
use crate::{
    base::error::Error,
    checkpoint::source::TensorSource,
    model::blueprint::{Blueprint, FeedForwardBlueprint, GqaBlueprint, GqaShape},
};

#[derive(Deserialize)]
struct GraniteMoeConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    heads: Heads,
    #[serde(flatten)]
    rope: RopeKeys,
    #[serde(flatten)]
    moe: SoftmaxMoe,
    #[serde(default)]
    attention_bias: bool,
    embedding_multiplier: f32,
    /// Replaces `1 / sqrt(head_dim)`.
    attention_multiplier: f32,
    /// Factor on the output of each sub-block.
    residual_multiplier: f32,
    /// Divisor of the logits.
    logits_scaling: f32,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: GraniteMoeConfig = parse_config(source)?;
    config.moe.size_experts_as_mlp();
    for (key, factor) in [
        ("embedding_multiplier", config.embedding_multiplier),
        ("attention_multiplier", config.attention_multiplier),
        ("residual_multiplier", config.residual_multiplier),
        ("logits_scaling", config.logits_scaling),
    ] {
        Require(source).factor(key, factor)?;
    }
    let model = config.body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = attention(&config, &layer.child("self_attn"))?;
        let feed_forward = feed_forward(&config, &layer.child("block_sparse_moe"), i)?;
        config.body.layer(layer, attention, feed_forward)
    })?;
    let logit_scale = 1.0 / config.logits_scaling;
    Ok(Blueprint { embed_scale: config.embedding_multiplier, logit_scale, ..model })
}

fn attention(config: &GraniteMoeConfig, attention: &Scope<'_>) -> Result<GqaBlueprint, Error> {
    let (source, hidden) = (attention.source, config.body.hidden_size);
    let shape = GqaShape {
        scale: config.attention_multiplier,
        // The output of attention is linear in the values.
        value_scale: config.residual_multiplier,
        ..config.heads.shape(source, hidden)?
    };
    let rope = config.rope.whole(source, shape.head_dim, RopePairs::Halves)?;
    let attention = gqa(attention, GqaParams { hidden, shape, rope, v_proj: true })?;
    Require(source).that(!config.attention_bias && attention.o_proj.bias.is_none(), || {
        "\"attention_bias\" is true: the bias of o_proj would lack a factor".to_owned()
    })?;
    Ok(attention)
}

fn feed_forward(
    config: &GraniteMoeConfig,
    moe: &Scope<'_>,
    layer: usize,
) -> Result<FeedForwardBlueprint, Error> {
    let experts = ExpertTensors {
        fused: moe.clone(),
        fused_names: ["input_linear.weight", "output_linear.weight"],
        ..ExpertTensors::in_block(moe)
    };
    let style = SoftmaxStyle { router: "router.layer", experts, normalize: true };
    let mut part = config.moe.feed_forward_with(&style, moe, layer, config.body.hidden_size)?;
    if let FeedForwardBlueprint::Moe(moe) = &mut part {
        moe.router.scale = config.residual_multiplier;
    }
    Ok(part)
}
