//! `solar_open`: Solar-Open-100B.
//!
//! Grouped-query attention; the feed-forward parts of DeepSeek-V3, in every layer. Sources:
//! Upstage, "Solar Open Technical Report", 2025; the published `config.json`.

use serde::Deserialize;

use super::{
    body::{Body, GqaParams, Heads, gqa},
    grouped_moe::GroupedMoe,
    parse_config,
    rope::{RopeKeys, RotatedPart},
    scope::{NormWeights, Scope},
};
use crate::{
    base::error::Error,
    checkpoint::source::TensorSource,
    model::blueprint::{Blueprint, GqaBlueprint},
};

#[derive(Deserialize)]
struct SolarOpenConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    heads: Heads,
    #[serde(flatten)]
    rope: RopeKeys,
    #[serde(flatten)]
    moe: GroupedMoe,
    /// The published config omits it, and the model has no norms of queries and keys.
    #[serde(default)]
    use_qk_norm: bool,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: SolarOpenConfig = parse_config(source)?;
    let body = &config.body;
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = attention(&config, &layer.child("self_attn"))?;
        let feed_forward = config.moe.feed_forward(&layer.child("mlp"), i, body.hidden_size)?;
        body.layer(layer, attention, feed_forward)
    })
}

fn attention(config: &SolarOpenConfig, attention: &Scope<'_>) -> Result<GqaBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let shape = config.heads.shape(attention.source, hidden)?;
    let rotated = RotatedPart { dims: None, default_share: 1.0 };
    let rope = config.rope.partial(attention.source, shape.head_dim, rotated)?;
    let norm = |name| attention.norm_if(Some(config.use_qk_norm), name, shape.head_dim);
    Ok(GqaBlueprint {
        q_norm: norm("q_norm")?,
        k_norm: norm("k_norm")?,
        ..gqa(attention, GqaParams { hidden, shape, rope, v_proj: true })?
    })
}
