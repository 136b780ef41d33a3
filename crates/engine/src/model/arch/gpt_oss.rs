//! `gpt_oss`: gpt-oss-20b and gpt-oss-120b.
//!
//! Grouped attention with sinks, a sliding window in every other layer, YaRN whose range is not widened to whole pairs;
//! biases everywhere, experts in MXFP4, a clamped SwiGLU. Sources: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025,
//! and its `gpt_oss/torch/model.py`; see `docs/references.md`.

use moeflux_compute::{Activation, ExpertShape, MatrixShape, RopePairs};
use serde::Deserialize;

use super::{
    Require,
    body::{Body, Heads, gqa},
    config_error,
    experts::{ExpertMatrix, ExpertNames, ExpertSizes, bias_part, experts, layer_experts},
    linear, parse_config,
    rope::RopeKeys,
};
use crate::{
    base::error::Error,
    checkpoint::Checkpoint,
    model::blueprint::{
        Blueprint, FeedForwardBlueprint, GqaBlueprint, GqaShape, LayerExperts, MixerBlueprint,
        MoeBlueprint, RouterBlueprint,
    },
};

#[derive(Deserialize)]
struct Config {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    heads: Heads,
    #[serde(flatten)]
    rope: RopeKeys,
    /// Of one expert.
    intermediate_size: usize,
    num_local_experts: usize,
    num_experts_per_tok: Option<usize>,
    /// Another name of `num_experts_per_tok`; published configs have both.
    experts_per_token: Option<usize>,
    /// Steepness of the sigmoid in the experts' activation. The published configs do not have it.
    swiglu_alpha: Option<f32>,
    swiglu_limit: Option<f32>,
    sliding_window: Option<usize>,
    layer_types: Option<Vec<String>>,
}

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    let config: Config = parse_config(checkpoint)?;
    let body = &config.body;
    body.blueprint(checkpoint, 0.0, |i, name| {
        let window = window(checkpoint, &config, i)?;
        let attention = attention(checkpoint, &config, window, &format!("{name}.self_attn"))?;
        let moe = moe(checkpoint, &config, &format!("{name}.mlp"))?;
        let (mixer, feed_forward) =
            (MixerBlueprint::Gqa(Box::new(attention)), FeedForwardBlueprint::Moe(Box::new(moe)));
        body.layer(checkpoint, (name, 0.0), mixer, feed_forward)
    })
}

/// The window of layer `layer`: by default in every other one, from the first on.
fn window(checkpoint: &Checkpoint, config: &Config, layer: usize) -> Result<Option<usize>, Error> {
    Require(checkpoint).layers("layer_types", config.layer_types.as_ref(), layer + 1)?;
    let default = if layer.is_multiple_of(2) { "sliding_attention" } else { "full_attention" };
    let named = config.layer_types.as_ref().and_then(|types| types.get(layer));
    match named.map_or(default, String::as_str) {
        "full_attention" => Ok(None),
        "sliding_attention" => {
            let window = config.sliding_window.unwrap_or(128);
            Require(checkpoint).sizes(&[("sliding_window", window)])?;
            Ok(Some(window))
        }
        other => {
            Err(config_error(checkpoint, format!("the layer type {other:?} is not supported")))
        }
    }
}

fn attention(
    checkpoint: &Checkpoint,
    config: &Config,
    window: Option<usize>,
    name: &str,
) -> Result<GqaBlueprint, Error> {
    let body = &config.body;
    let shape = GqaShape { window, ..config.heads.shape(checkpoint, body.hidden_size)? };
    let rope = config.rope.whole(checkpoint, shape.head_dim, RopePairs::Halves)?;
    Ok(GqaBlueprint {
        sinks: Some(checkpoint.vector(&format!("{name}.sinks"), shape.heads, 0.0)?),
        ..gqa(checkpoint, (name, body.hidden_size), (shape, true), rope)?
    })
}

fn moe(checkpoint: &Checkpoint, config: &Config, name: &str) -> Result<MoeBlueprint, Error> {
    let sizes = ExpertSizes {
        count: config.num_local_experts,
        hidden: config.body.hidden_size,
        intermediate: config.intermediate_size,
    };
    let top_k = config.num_experts_per_tok.or(config.experts_per_token).unwrap_or(0);
    let keys = ["num_local_experts", "num_experts_per_tok", "intermediate_size"];
    sizes.check(checkpoint, top_k, keys)?;
    let stacked = format!("{name}.experts");
    let experts = if checkpoint.has(&format!("{stacked}.gate_proj.weight")) {
        experts(checkpoint, &ExpertNames::new(stacked.clone(), stacked), sizes)?
    } else {
        interleaved(checkpoint, &stacked, sizes)?
    };
    let (alpha, limit) = (config.swiglu_alpha.unwrap_or(1.702), config.swiglu_limit.unwrap_or(7.0));
    Require(checkpoint).factor("swiglu_alpha", alpha)?;
    Require(checkpoint).factor("swiglu_limit", limit)?;
    let router = linear(checkpoint, &format!("{name}.router"), sizes.count, sizes.hidden)?;
    Ok(MoeBlueprint {
        // The softmax runs over the chosen experts only, which is the one over all, made to sum to one.
        router: RouterBlueprint::softmax(router, top_k, true),
        experts,
        activation: Activation::ClampedSwiGlu { alpha, limit },
        experts_norm: None,
        experts_post_norm: None,
        shared: None,
    })
}

/// The experts as OpenAI publishes them: MXFP4 blocks, gate and up interleaved row by row.
fn interleaved(
    checkpoint: &Checkpoint,
    name: &str,
    sizes: ExpertSizes,
) -> Result<LayerExperts, Error> {
    let ExpertSizes { count, hidden, intermediate } = sizes;
    let blocks = |which: &str, rows, cols| {
        checkpoint
            .stacked_blocks(&format!("{name}.{which}"), count, rows, cols)
            .map(ExpertMatrix::of)
    };
    let both = blocks("gate_up_proj", 2 * intermediate, hidden)?;
    let down = blocks("down_proj", hidden, intermediate)?;
    let mut bias_type = None;
    let mut bias = |which: &str, len| {
        bias_part(checkpoint, &format!("{name}.{which}_bias"), count, len, &mut bias_type)
    };
    let (both_bias, down_bias) =
        (bias("gate_up_proj", 2 * intermediate)?, bias("down_proj", hidden)?);
    let half = MatrixShape { rows: intermediate, ..both.shape };
    let shape = ExpertShape {
        interleaved: true,
        output_bias: bias_type,
        ..ExpertShape::new(half, half, down.shape)
    };
    let parts = [both.parts, vec![both_bias], down.parts, vec![down_bias]].concat();
    layer_experts(name, count, shape, parts)
}
