//! `qwen3_moe`: Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder.
//!
//! Grouped attention with a norm per head, softmax router, no shared expert.
//! Source: Qwen3 Technical Report, 2025; the published `config.json`s.

use moeflux_compute::RopePairs;
use serde::Deserialize;

use super::{Require, config_error, experts, linear, mlp, parse_config, rope_factor, skipped};
use crate::{
    Error,
    blueprint::{
        Blueprint, FeedForwardBlueprint, GqaBlueprint, GqaShape, LayerBlueprint, MixerBlueprint,
        MoeBlueprint, RopeShape,
    },
    checkpoint::Checkpoint,
};

#[derive(Deserialize)]
struct Config {
    hidden_size: usize,
    num_hidden_layers: usize,
    #[serde(default)]
    intermediate_size: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: Option<usize>,
    num_experts: usize,
    num_experts_per_tok: usize,
    moe_intermediate_size: usize,
    #[serde(default = "one")]
    decoder_sparse_step: usize,
    #[serde(default)]
    mlp_only_layers: Vec<usize>,
    #[serde(default)]
    norm_topk_prob: bool,
    rms_norm_eps: f32,
    vocab_size: usize,
    max_position_embeddings: usize,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeScaling>,
    rope_parameters: Option<RopeScaling>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    use_sliding_window: bool,
}

#[derive(Deserialize)]
struct RopeScaling {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    factor: Option<f64>,
    rope_theta: Option<f64>,
}

fn one() -> usize {
    1
}

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    let config: Config = parse_config(checkpoint)?;
    let require = Require(checkpoint);
    let head_dim = config.head_dim.unwrap_or(config.hidden_size / config.num_attention_heads.max(1));
    require.sizes(&[
        ("hidden_size", config.hidden_size),
        ("num_hidden_layers", config.num_hidden_layers),
        ("num_attention_heads", config.num_attention_heads),
        ("num_key_value_heads", config.num_key_value_heads),
        ("head_dim", head_dim),
        ("moe_intermediate_size", config.moe_intermediate_size),
        ("num_experts", config.num_experts),
        ("num_experts_per_tok", config.num_experts_per_tok),
        ("decoder_sparse_step", config.decoder_sparse_step),
        ("vocab_size", config.vocab_size),
        ("max_position_embeddings", config.max_position_embeddings),
    ])?;
    require.that(config.num_attention_heads.is_multiple_of(config.num_key_value_heads), || {
        "\"num_attention_heads\" is not a multiple of \"num_key_value_heads\"".into()
    })?;
    require.that(config.num_experts_per_tok <= config.num_experts, || {
        format!(
            "\"num_experts_per_tok\" is {}, of {} experts",
            config.num_experts_per_tok, config.num_experts
        )
    })?;
    require.that(head_dim.is_multiple_of(2), || {
        format!("\"head_dim\" is {head_dim}: rotary embedding needs pairs")
    })?;
    require.that(!config.use_sliding_window, || "\"use_sliding_window\" is not supported".into())?;

    let model = "model";
    let layer = |i: usize| -> Result<LayerBlueprint, Error> {
        let name = format!("{model}.layers.{i}");
        Ok(LayerBlueprint {
            mixer_norm: checkpoint.vector(
                &format!("{name}.input_layernorm.weight"),
                config.hidden_size,
                0.0,
            )?,
            mixer: MixerBlueprint::Gqa(Box::new(attention(checkpoint, &config, head_dim, &name)?)),
            feed_forward_norm: checkpoint.vector(
                &format!("{name}.post_attention_layernorm.weight"),
                config.hidden_size,
                0.0,
            )?,
            feed_forward: feed_forward(checkpoint, &config, i, &format!("{name}.mlp"))?,
        })
    };
    Ok(Blueprint {
        model_type: "qwen3_moe".into(),
        hidden: config.hidden_size,
        vocab: config.vocab_size,
        max_positions: config.max_position_embeddings,
        eps: config.rms_norm_eps,
        embed: checkpoint.matrix(&format!("{model}.embed_tokens"), config.vocab_size, config.hidden_size)?,
        layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_, _>>()?,
        norm: checkpoint.vector(&format!("{model}.norm.weight"), config.hidden_size, 0.0)?,
        head: (!config.tie_word_embeddings)
            .then(|| checkpoint.matrix("lm_head", config.vocab_size, config.hidden_size))
            .transpose()?,
        skipped: skipped(checkpoint, &[("multi-token prediction", &["mtp."])]),
    })
}

fn attention(
    checkpoint: &Checkpoint,
    config: &Config,
    head_dim: usize,
    layer: &str,
) -> Result<GqaBlueprint, Error> {
    let name = format!("{layer}.self_attn");
    let (q, kv) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
    Ok(GqaBlueprint {
        shape: GqaShape {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim,
            output_gate: false,
        },
        rope: rope(checkpoint, config, head_dim)?,
        q_proj: linear(checkpoint, &format!("{name}.q_proj"), q, config.hidden_size)?,
        k_proj: linear(checkpoint, &format!("{name}.k_proj"), kv, config.hidden_size)?,
        v_proj: linear(checkpoint, &format!("{name}.v_proj"), kv, config.hidden_size)?,
        o_proj: linear(checkpoint, &format!("{name}.o_proj"), config.hidden_size, q)?,
        q_norm: Some(checkpoint.vector(&format!("{name}.q_norm.weight"), head_dim, 0.0)?),
        k_norm: Some(checkpoint.vector(&format!("{name}.k_norm.weight"), head_dim, 0.0)?),
    })
}

fn rope(checkpoint: &Checkpoint, config: &Config, head_dim: usize) -> Result<RopeShape, Error> {
    let scaling = config.rope_parameters.as_ref().or(config.rope_scaling.as_ref());
    let theta = config.rope_theta.or(scaling.and_then(|s| s.rope_theta));
    let theta = theta.ok_or_else(|| config_error(checkpoint, "it has no \"rope_theta\""))?;
    let factor = rope_factor(
        checkpoint,
        scaling.and_then(|s| s.rope_type.as_deref()),
        scaling.and_then(|s| s.factor),
    )?;
    Ok(RopeShape::new(head_dim, theta, factor, RopePairs::Halves))
}

fn feed_forward(
    checkpoint: &Checkpoint,
    config: &Config,
    layer: usize,
    name: &str,
) -> Result<FeedForwardBlueprint, Error> {
    let sparse =
        !config.mlp_only_layers.contains(&layer) && (layer + 1).is_multiple_of(config.decoder_sparse_step);
    if !sparse {
        Require(checkpoint).sizes(&[("intermediate_size", config.intermediate_size)])?;
        return Ok(FeedForwardBlueprint::Dense(Box::new(mlp(
            checkpoint,
            name,
            config.hidden_size,
            config.intermediate_size,
        )?)));
    }
    Ok(FeedForwardBlueprint::Moe(Box::new(MoeBlueprint {
        router: checkpoint.matrix(&format!("{name}.gate"), config.num_experts, config.hidden_size)?,
        top_k: config.num_experts_per_tok,
        normalize: config.norm_topk_prob,
        experts: experts(
            checkpoint,
            name,
            config.num_experts,
            config.hidden_size,
            config.moe_intermediate_size,
        )?,
        shared: None,
    })))
}
