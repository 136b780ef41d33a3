//! `glm4_moe`: GLM-4.5, GLM-4.5-Air, GLM-4.6, GLM-4.7.
//!
//! Grouped attention with biases, rotary positions on a part of each head and norms per head in some sizes; the
//! feed-forward parts of DeepSeek-V3. Sources: Z.ai, "GLM-4.5", 2025; the published `config.json`s.

use serde::Deserialize;

use super::{
    body::{Body, Heads, gqa},
    grouped::GroupedMoe,
    parse_config,
    rope::RopeKeys,
    vector_if_there,
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
    moe: GroupedMoe,
    use_qk_norm: Option<bool>,
}

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    let config: Config = parse_config(checkpoint)?;
    let body = &config.body;
    body.blueprint(checkpoint, 0.0, |i, name| {
        let attention = attention(checkpoint, &config, &format!("{name}.self_attn"))?;
        let of_moe = (&*format!("{name}.mlp"), body.hidden_size);
        let feed_forward = config.moe.feed_forward(checkpoint, i, of_moe)?;
        body.layer(checkpoint, (name, 0.0), MixerBlueprint::Gqa(Box::new(attention)), feed_forward)
    })
}

fn attention(checkpoint: &Checkpoint, config: &Config, name: &str) -> Result<GqaBlueprint, Error> {
    let body = &config.body;
    let shape = config.heads.shape(checkpoint, body.hidden_size)?;
    let rope = config.rope.shape(checkpoint, shape.head_dim, (None, 0.5))?;
    let norm = |which: &str| match config.use_qk_norm {
        Some(false) => Ok(None),
        Some(true) => {
            checkpoint.vector(&format!("{name}.{which}.weight"), shape.head_dim, 0.0).map(Some)
        }
        None => vector_if_there(checkpoint, &format!("{name}.{which}.weight"), shape.head_dim),
    };
    Ok(GqaBlueprint {
        q_norm: norm("q_norm")?,
        k_norm: norm("k_norm")?,
        ..gqa(checkpoint, (name, body.hidden_size), (shape, true), rope)?
    })
}
