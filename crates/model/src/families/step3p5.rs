//! `step3p5`: Step-3.5-Flash, and the text part of Step-3.7-Flash (`step3p7`).
//!
//! Sliding-window layers with full ones between, which have fewer query heads, rotate a part of
//! them and scale RoPE as Llama 3; a sigmoid gate per head on the output of attention; bounds on
//! the activations of some layers. Sources: the published `config.json`s; transformers,
//! `modeling_step3p7.py`.

mod gguf;

use moeflux_ops::GateFunction;

use super::prelude::*;
use crate::{
    blueprint::{GateSource, OutputGate},
    parts::{
        gqa::{gated_gqa, gqa_shape},
        rope::RopeLists,
    },
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["step3p5", "step3p7"],
        checkpoints: "Step-3.5-Flash, Step-3.7-Flash (text)",
        special: "sliding window, gate per head, bounded SwiGLU, RoPE of Llama 3",
        checked: "transformers, mlx-lm",
    }],
    layer_types: SLIDING,
    per_layer_keys: &["num_attention_heads"],
    // The model of huggingface.co/stepfun-ai/Step-3.5-Flash, not compared with its config.json.
    presets: &[Preset {
        name: "step-3.5-flash",
        description: "Step-3.5-Flash: 45 layers, 3 of 4 sliding, 3 dense, 288 experts, 8 per \
             token; 111 GB",
        sizes: PresetSizes { parameters: 197.0, active: 11.4, expert_mb: 8.85 },
        config: published!("step3p5/step-3.5-flash.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct Step3p5Config {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    windows: LayerWindows,
    #[serde(flatten)]
    rope: RopeLists,
    #[serde(flatten)]
    moe: GroupedMoe,
    num_attention_heads: usize,
    num_attention_groups: usize,
    head_dim: usize,
    /// Heads of sliding-window layers.
    attention_other_setting: Option<LayerHeads>,
    /// The same, where only the number of query heads differs.
    num_sliding_attention_heads: Option<usize>,
    use_head_wise_attn_gate: Option<bool>,
    /// Bounds on the activations of routed experts by layer; zero for none.
    swiglu_limits: Option<Vec<Option<f32>>>,
    /// Bounds on the activations of shared experts and dense MLPs by layer; zero for none.
    swiglu_limits_shared: Option<Vec<Option<f32>>>,
}

/// Heads of a layer.
#[derive(Clone, Copy, Deserialize)]
struct LayerHeads {
    num_attention_heads: usize,
    num_attention_groups: usize,
    head_dim: usize,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: Step3p5Config = parse_config(source)?;
    config.body.blueprint(source, NormWeights::OnePlus, |i, layer| {
        let attention = attention(&config, i, &layer.child("self_attn"))?;
        config.body.layer(layer, attention, feed_forward(&config, i, layer)?)
    })
}

fn attention(
    config: &Step3p5Config,
    i: usize,
    attention: &Scope<'_>,
) -> Result<GqaBlueprint, Error> {
    let (source, hidden) = (attention.source, config.body.hidden_size);
    let window = config.windows.of(source, i)?;
    let full = LayerHeads {
        num_attention_heads: config.num_attention_heads,
        num_attention_groups: config.num_attention_groups,
        head_dim: config.head_dim,
    };
    let sliding = config.attention_other_setting.unwrap_or(LayerHeads {
        num_attention_heads: config.num_sliding_attention_heads.unwrap_or(full.num_attention_heads),
        ..full
    });
    let LayerHeads { num_attention_heads, num_attention_groups, head_dim } =
        if window.is_some() { sliding } else { full };
    let gate =
        OutputGate { function: GateFunction::Sigmoid, width: 1, source: GateSource::Separate };
    let is_gated = config.use_head_wise_attn_gate.unwrap_or(true);
    let shape = gqa_shape(source, num_attention_heads, num_attention_groups, head_dim)?;
    let shape = GqaShape { window, gate: is_gated.then_some(gate), ..shape };
    let rope = config.rope.of(source, i, &shape)?;
    let params = GqaParams { hidden, shape, rope, qk_norm: QkNorm::PER_HEAD };
    gated_gqa(attention, params, "g_proj")
}

fn feed_forward(
    config: &Step3p5Config,
    i: usize,
    layer: &Scope<'_>,
) -> Result<FeedForwardBlueprint, Error> {
    // The Hub has the experts beside `mlp`, MLX's export in it.
    let hub = MoeStyle {
        router: "moe.gate",
        correction: Some("moe.router_bias"),
        shared: "share_expert",
        stacked: "moe",
        experts: "moe",
        ..MoeStyle::default()
    };
    let mlx = MoeStyle {
        router: "gate.gate",
        correction: Some("gate.router_bias"),
        shared: "share_expert",
        ..MoeStyle::default()
    };
    let hidden = config.body.hidden_size;
    let mut part = match layer.has_matrix("moe.gate") {
        true => config.moe.feed_forward_with(&hub, layer, i, hidden)?,
        false => config.moe.feed_forward_with(&mlx, &layer.child("mlp"), i, hidden)?,
    };
    let limited = |key, limits: &Option<Vec<Option<f32>>>| {
        let limit = limits.as_ref().and_then(|limits| *limits.get(i)?).unwrap_or(0.0);
        Require(layer.source).that(limit >= 0.0, || format!("\"{key}\" has {limit}"))?;
        Ok::<_, Error>(match limit > 0.0 {
            true => Activation::LimitedSwiGlu { limit },
            false => Activation::SwiGlu,
        })
    };
    let shared_activation = limited("swiglu_limits_shared", &config.swiglu_limits_shared)?;
    match &mut part {
        FeedForwardBlueprint::Dense(mlp) => mlp.activation = shared_activation,
        FeedForwardBlueprint::Moe(moe) => {
            moe.activation = limited("swiglu_limits", &config.swiglu_limits)?;
            moe.shared.iter_mut().for_each(|shared| shared.mlp.activation = shared_activation);
        }
    }
    Ok(part)
}
