//! `qwen3_moe`: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder.
//!
//! Grouped attention with a norm per head, softmax router, no shared expert.
//! Source: Qwen3 Technical Report, 2025; the published `config.json`s.

use moeflux_compute::RopePairs;
use serde::Deserialize;

use super::{
    body::{Body, Heads, gqa},
    parse_config,
    rope::RopeKeys,
    sparse::SparseMoe,
};
use crate::{
    base::error::Error,
    checkpoint::Checkpoint,
    model::blueprint::{Blueprint, GqaBlueprint, MixerBlueprint},
};

#[derive(Deserialize)]
struct Config {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    heads: Heads,
    #[serde(flatten)]
    rope: RopeKeys,
    #[serde(flatten)]
    moe: SparseMoe,
    #[serde(default)]
    norm_topk_prob: bool,
}

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    let config: Config = parse_config(checkpoint)?;
    let body = &config.body;
    body.blueprint(checkpoint, 0.0, |i, name| {
        let attention = attention(checkpoint, &config, &format!("{name}.self_attn"))?;
        let of_moe = (&*format!("{name}.mlp"), body.hidden_size);
        let feed_forward = config.moe.feed_forward(checkpoint, i, of_moe, config.norm_topk_prob)?;
        body.layer(checkpoint, (name, 0.0), MixerBlueprint::Gqa(Box::new(attention)), feed_forward)
    })
}

fn attention(checkpoint: &Checkpoint, config: &Config, name: &str) -> Result<GqaBlueprint, Error> {
    let body = &config.body;
    let shape = config.heads.shape(checkpoint, body.hidden_size)?;
    let rope = config.rope.whole(checkpoint, shape.head_dim, RopePairs::Halves)?;
    let norm =
        |which: &str| checkpoint.vector(&format!("{name}.{which}.weight"), shape.head_dim, 0.0);
    Ok(GqaBlueprint {
        q_norm: Some(norm("q_norm")?),
        k_norm: Some(norm("k_norm")?),
        ..gqa(checkpoint, (name, body.hidden_size), (shape, true), rope)?
    })
}
