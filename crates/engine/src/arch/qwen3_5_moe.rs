//! `qwen3_5_moe`: Qwen3.5-397B-A17B, Qwen3.6-35B-A3B and their kin; text only.
//!
//! Gated delta-net layers with a gated full-attention layer every few, softmax router, gated shared expert.
//! Sources: Yang et al., "Gated Delta Networks", 2024; the published `config.json`s and model cards.

use moeflux_compute::RopePairs;
use serde::Deserialize;

use super::{Require, config_error, experts, linear, mlp, parse_config, rope_factor, skipped};
use crate::{
    Error,
    blueprint::{
        Blueprint, DeltaNetBlueprint, DeltaNetShape, FeedForwardBlueprint, GqaBlueprint, GqaShape,
        LayerBlueprint, MixerBlueprint, MoeBlueprint, RopeShape, SharedBlueprint,
    },
    checkpoint::{Checkpoint, VectorSource},
};

#[derive(Deserialize)]
struct Config {
    hidden_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    head_dim: Option<usize>,
    linear_num_value_heads: usize,
    linear_num_key_heads: usize,
    linear_key_head_dim: usize,
    linear_value_head_dim: usize,
    #[serde(default = "four")]
    linear_conv_kernel_dim: usize,
    #[serde(default = "four")]
    full_attention_interval: usize,
    layer_types: Option<Vec<String>>,
    #[serde(default)]
    num_experts: usize,
    #[serde(default)]
    num_experts_per_tok: usize,
    #[serde(default)]
    moe_intermediate_size: usize,
    #[serde(default)]
    shared_expert_intermediate_size: usize,
    #[serde(default)]
    intermediate_size: usize,
    #[serde(default)]
    mlp_only_layers: Vec<usize>,
    #[serde(default = "one")]
    decoder_sparse_step: usize,
    #[serde(default = "yes")]
    norm_topk_prob: bool,
    #[serde(default = "yes")]
    attn_output_gate: bool,
    rms_norm_eps: f32,
    vocab_size: usize,
    max_position_embeddings: usize,
    rope_parameters: Option<RopeParameters>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    #[serde(default)]
    tie_word_embeddings: bool,
}

#[derive(Deserialize, Default)]
struct RopeParameters {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    factor: Option<f64>,
}

fn one() -> usize {
    1
}

fn four() -> usize {
    4
}

fn yes() -> bool {
    true
}

/// The tensors' prefixes and conventions, which differ between the Hub's layout and MLX's.
struct Layout<'a> {
    checkpoint: &'a Checkpoint,
    /// Before `embed_tokens`, `layers` and `norm`.
    model: &'static str,
    /// Before `lm_head`.
    head: &'static str,
    /// The Hub stores `w` of the norms' `1 + w`. The sum is taken in f32, as the makers' own code does; mlx-lm takes
    /// it in the checkpoint's type, so its logits of a bf16 Hub checkpoint differ by that rounding.
    norm_plus: f32,
}

impl<'a> Layout<'a> {
    fn of(checkpoint: &'a Checkpoint) -> Result<Self, Error> {
        let prefixes =
            [("language_model.model.", "language_model."), ("model.language_model.", ""), ("model.", "")];
        let Some((model, head)) =
            prefixes.into_iter().find(|(model, _)| checkpoint.has(&format!("{model}embed_tokens.weight")))
        else {
            return Err(checkpoint
                .tensor_error("model.embed_tokens.weight", "no shard has it under any known prefix"));
        };
        let hub = checkpoint.has_shape(|name, shape| {
            name.ends_with(".linear_attn.conv1d.weight") && shape.len() == 3 && shape[2] != 1
        });
        Ok(Self { checkpoint, model, head, norm_plus: if hub { 1.0 } else { 0.0 } })
    }

    fn norm(&self, name: &str, len: usize) -> Result<VectorSource, Error> {
        self.checkpoint.vector(name, len, self.norm_plus)
    }
}

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    let mut config: Config = parse_config(checkpoint)?;
    // Composite configs may tie the embeddings at their top level.
    config.tie_word_embeddings |= checkpoint.config().get("tie_word_embeddings").is_some_and(|t| t == true);
    let head_dim = config.head_dim.unwrap_or(config.hidden_size / config.num_attention_heads.max(1));
    check(checkpoint, &config, head_dim)?;
    let layout = Layout::of(checkpoint)?;
    let layer = |i: usize| -> Result<LayerBlueprint, Error> {
        let name = format!("{}layers.{i}", layout.model);
        let mixer = if is_linear(&layout, &config, i)? {
            MixerBlueprint::DeltaNet(Box::new(delta_net(&layout, &config, &name)?))
        } else {
            MixerBlueprint::Gqa(Box::new(attention(&layout, &config, head_dim, &name)?))
        };
        Ok(LayerBlueprint {
            mixer_norm: layout.norm(&format!("{name}.input_layernorm.weight"), config.hidden_size)?,
            mixer,
            feed_forward_norm: layout
                .norm(&format!("{name}.post_attention_layernorm.weight"), config.hidden_size)?,
            feed_forward: feed_forward(checkpoint, &config, i, &format!("{name}.mlp"))?,
        })
    };
    let (vocab, hidden) = (config.vocab_size, config.hidden_size);
    Ok(Blueprint {
        model_type: "qwen3_5_moe".into(),
        hidden,
        vocab,
        max_positions: config.max_position_embeddings,
        eps: config.rms_norm_eps,
        embed: checkpoint.matrix(&format!("{}embed_tokens", layout.model), vocab, hidden)?,
        layers: (0..config.num_hidden_layers).map(layer).collect::<Result<_, _>>()?,
        norm: layout.norm(&format!("{}norm.weight", layout.model), hidden)?,
        head: (!config.tie_word_embeddings)
            .then(|| checkpoint.matrix(&format!("{}lm_head", layout.head), vocab, hidden))
            .transpose()?,
        skipped: skipped(
            checkpoint,
            &[
                ("vision", &["vision_tower.", "model.visual.", "visual."]),
                ("multi-token prediction", &["mtp."]),
            ],
        ),
    })
}

fn check(checkpoint: &Checkpoint, config: &Config, head_dim: usize) -> Result<(), Error> {
    let require = Require(checkpoint);
    require.sizes(&[
        ("hidden_size", config.hidden_size),
        ("num_hidden_layers", config.num_hidden_layers),
        ("num_attention_heads", config.num_attention_heads),
        ("num_key_value_heads", config.num_key_value_heads),
        ("head_dim", head_dim),
        ("linear_num_value_heads", config.linear_num_value_heads),
        ("linear_num_key_heads", config.linear_num_key_heads),
        ("linear_key_head_dim", config.linear_key_head_dim),
        ("linear_value_head_dim", config.linear_value_head_dim),
        ("linear_conv_kernel_dim", config.linear_conv_kernel_dim),
        ("full_attention_interval", config.full_attention_interval),
        ("decoder_sparse_step", config.decoder_sparse_step),
        ("vocab_size", config.vocab_size),
        ("max_position_embeddings", config.max_position_embeddings),
    ])?;
    require.that(config.num_attention_heads.is_multiple_of(config.num_key_value_heads), || {
        "\"num_attention_heads\" is not a multiple of \"num_key_value_heads\"".into()
    })?;
    require.that(config.linear_num_value_heads.is_multiple_of(config.linear_num_key_heads), || {
        "\"linear_num_value_heads\" is not a multiple of \"linear_num_key_heads\"".into()
    })?;
    require
        .that(config.linear_conv_kernel_dim > 1, || "\"linear_conv_kernel_dim\" must be at least 2".into())?;
    require.that(config.num_experts_per_tok <= config.num_experts, || {
        format!(
            "\"num_experts_per_tok\" is {}, of {} experts",
            config.num_experts_per_tok, config.num_experts
        )
    })?;
    require.that(config.layer_types.as_ref().is_none_or(|t| t.len() >= config.num_hidden_layers), || {
        "\"layer_types\" names fewer layers than \"num_hidden_layers\" says".into()
    })
}

/// Whether layer `i` is a delta-net: as `layer_types` says, or else every layer but each
/// `full_attention_interval`-th.
fn is_linear(layout: &Layout<'_>, config: &Config, i: usize) -> Result<bool, Error> {
    match config.layer_types.as_ref().map(|t| t[i].as_str()) {
        None => Ok(!(i + 1).is_multiple_of(config.full_attention_interval)),
        Some("linear_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        Some(other) => {
            Err(config_error(layout.checkpoint, format!("the layer type {other:?} is not supported")))
        }
    }
}

fn attention(
    layout: &Layout<'_>,
    config: &Config,
    head_dim: usize,
    layer: &str,
) -> Result<GqaBlueprint, Error> {
    let name = format!("{layer}.self_attn");
    let checkpoint = layout.checkpoint;
    let (q, kv) = (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
    let q_rows = if config.attn_output_gate { 2 * q } else { q };
    Ok(GqaBlueprint {
        shape: GqaShape {
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim,
            output_gate: config.attn_output_gate,
        },
        rope: rope(checkpoint, config, head_dim)?,
        q_proj: linear(checkpoint, &format!("{name}.q_proj"), q_rows, config.hidden_size)?,
        k_proj: linear(checkpoint, &format!("{name}.k_proj"), kv, config.hidden_size)?,
        v_proj: linear(checkpoint, &format!("{name}.v_proj"), kv, config.hidden_size)?,
        o_proj: linear(checkpoint, &format!("{name}.o_proj"), config.hidden_size, q)?,
        q_norm: Some(layout.norm(&format!("{name}.q_norm.weight"), head_dim)?),
        k_norm: Some(layout.norm(&format!("{name}.k_norm.weight"), head_dim)?),
    })
}

fn rope(checkpoint: &Checkpoint, config: &Config, head_dim: usize) -> Result<RopeShape, Error> {
    let none = RopeParameters::default();
    let parameters = config.rope_parameters.as_ref().unwrap_or(&none);
    let theta = parameters.rope_theta.or(config.rope_theta).unwrap_or(100_000.0);
    let partial = parameters.partial_rotary_factor.or(config.partial_rotary_factor).unwrap_or(0.25);
    let factor = rope_factor(checkpoint, parameters.rope_type.as_deref(), parameters.factor)?;
    let dims = (head_dim as f64 * partial) as usize;
    Require(checkpoint).that(dims <= head_dim && dims.is_multiple_of(2), || {
        format!("\"partial_rotary_factor\" is {partial}: it leaves {dims} of {head_dim} numbers, not pairs of them")
    })?;
    Ok(RopeShape::new(dims, theta, factor, RopePairs::Halves))
}

fn delta_net(layout: &Layout<'_>, config: &Config, layer: &str) -> Result<DeltaNetBlueprint, Error> {
    let name = format!("{layer}.linear_attn");
    let checkpoint = layout.checkpoint;
    let shape = DeltaNetShape {
        key_heads: config.linear_num_key_heads,
        value_heads: config.linear_num_value_heads,
        key_width: config.linear_key_head_dim,
        value_width: config.linear_value_head_dim,
        conv_width: config.linear_conv_kernel_dim,
    };
    let project =
        |projection: &str, rows| checkpoint.matrix(&format!("{name}.{projection}"), rows, config.hidden_size);
    Ok(DeltaNetBlueprint {
        shape,
        in_proj_qkv: project("in_proj_qkv", shape.channels())?,
        in_proj_z: project("in_proj_z", shape.values())?,
        in_proj_b: project("in_proj_b", shape.value_heads)?,
        in_proj_a: project("in_proj_a", shape.value_heads)?,
        conv1d: checkpoint.vector(
            &format!("{name}.conv1d.weight"),
            shape.channels() * shape.conv_width,
            0.0,
        )?,
        a_log: checkpoint.vector(&format!("{name}.A_log"), shape.value_heads, 0.0)?,
        dt_bias: checkpoint.vector(&format!("{name}.dt_bias"), shape.value_heads, 0.0)?,
        norm: checkpoint.vector(&format!("{name}.norm.weight"), shape.value_width, 0.0)?,
        out_proj: checkpoint.matrix(&format!("{name}.out_proj"), config.hidden_size, shape.values())?,
    })
}

fn feed_forward(
    checkpoint: &Checkpoint,
    config: &Config,
    layer: usize,
    name: &str,
) -> Result<FeedForwardBlueprint, Error> {
    let hidden = config.hidden_size;
    let sparse = config.num_experts > 0
        && !config.mlp_only_layers.contains(&layer)
        && (layer + 1).is_multiple_of(config.decoder_sparse_step);
    if !sparse {
        Require(checkpoint).sizes(&[("intermediate_size", config.intermediate_size)])?;
        return Ok(FeedForwardBlueprint::Dense(Box::new(mlp(
            checkpoint,
            name,
            hidden,
            config.intermediate_size,
        )?)));
    }
    Require(checkpoint).sizes(&[
        ("num_experts", config.num_experts),
        ("num_experts_per_tok", config.num_experts_per_tok),
        ("moe_intermediate_size", config.moe_intermediate_size),
    ])?;
    let shared_size = config.shared_expert_intermediate_size;
    let shared = (shared_size > 0).then(|| -> Result<_, Error> {
        Ok(SharedBlueprint {
            mlp: mlp(checkpoint, &format!("{name}.shared_expert"), hidden, shared_size)?,
            gate: Some(checkpoint.matrix(&format!("{name}.shared_expert_gate"), 1, hidden)?),
        })
    });
    Ok(FeedForwardBlueprint::Moe(Box::new(MoeBlueprint {
        router: checkpoint.matrix(&format!("{name}.gate"), config.num_experts, hidden)?,
        top_k: config.num_experts_per_tok,
        normalize: config.norm_topk_prob,
        experts: experts(checkpoint, name, config.num_experts, hidden, config.moe_intermediate_size)?,
        shared: shared.transpose()?,
    })))
}
