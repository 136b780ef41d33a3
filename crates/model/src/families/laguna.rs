//! `laguna`: Laguna-XS and Laguna-S of Poolside.
//!
//! Sliding-window layers with full ones between, which have fewer query heads and rotate a part of
//! them; a softplus gate per head on the output of attention; the feed-forward parts of
//! DeepSeek-V3. Sources: the published `config.json`s; transformers, `modeling_laguna.py`.

mod gguf;

use moeflux_ops::GateFunction;
use serde_json::Value;

use super::prelude::*;
use crate::{
    blueprint::{GateSource, OutputGate},
    parts::{
        gqa::{gated_gqa, gqa_shape},
        rope::RopeByType,
    },
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["laguna"],
        checkpoints: "Laguna-XS, Laguna-S",
        special: "sliding window, softplus gate and number of heads by layer",
        checked: "transformers, mlx-lm",
    }],
    layer_types: SLIDING,
    // The model of huggingface.co/poolside/Laguna-XS-2.1, not compared with its config.json.
    presets: &[Preset {
        name: "laguna-xs",
        description: "Laguna-XS-2.1: 40 layers, 3 of 4 sliding, 1 dense, 256 experts, 8 per token; \
             19 GB",
        sizes: PresetSizes { parameters: 33.4, active: 2.8, expert_mb: 1.77 },
        config: published!("laguna/laguna-xs.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct LagunaConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    windows: LayerWindows,
    #[serde(flatten)]
    moe: GroupedMoe,
    num_attention_heads: usize,
    num_attention_heads_per_layer: Option<Vec<usize>>,
    num_key_value_heads: usize,
    head_dim: usize,
    #[serde(default)]
    rope_parameters: RopeByType,
    gating: Option<Value>,
    moe_router_logit_softcapping: Option<f64>,
    moe_apply_router_weight_on_input: Option<bool>,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let config: LagunaConfig = parse_config(source)?;
    let (body, require) = (&config.body, Require(source));
    require.that(config.moe_router_logit_softcapping.unwrap_or(0.0) == 0.0, || {
        "\"moe_router_logit_softcapping\" is not zero, which is not supported".into()
    })?;
    let on_input = config.moe_apply_router_weight_on_input.unwrap_or(false);
    require.unset(&[("moe_apply_router_weight_on_input", on_input)])?;
    let heads = config.num_attention_heads_per_layer.as_ref();
    require.layers("num_attention_heads_per_layer", heads, body.num_hidden_layers)?;
    body.blueprint(source, NormWeights::Plain, |i, layer| {
        let attention = attention(&config, i, &layer.child("self_attn"))?;
        let mlp = layer.child("mlp");
        let style = style(&mlp);
        let feed_forward = config.moe.feed_forward_with(&style, &mlp, i, body.hidden_size)?;
        body.layer(layer, attention, feed_forward)
    })
}

/// Names in MLX's export, where the router is a module, or on the Hub.
fn style(mlp: &Scope<'_>) -> MoeStyle {
    let shared = MoeStyle { shared: "shared_expert", ..MoeStyle::default() };
    match mlp.has_matrix("gate.proj") {
        true => MoeStyle { router: "gate.proj", ..shared },
        false => MoeStyle { correction: Some("experts.e_score_correction_bias"), ..shared },
    }
}

fn attention(
    config: &LagunaConfig,
    i: usize,
    attention: &Scope<'_>,
) -> Result<GqaBlueprint, Error> {
    let (source, hidden, head_dim) = (attention.source, config.body.hidden_size, config.head_dim);
    let window = config.windows.of(source, i)?;
    let heads = config.num_attention_heads_per_layer.as_ref().and_then(|heads| heads.get(i));
    let heads = *heads.unwrap_or(&config.num_attention_heads);
    let gate = OutputGate {
        function: GateFunction::Softplus,
        width: gate_width(config, source)?,
        source: GateSource::Separate,
    };
    let shape = gqa_shape(source, heads, config.num_key_value_heads, head_dim)?;
    let shape = GqaShape { window, gate: Some(gate), ..shape };
    let rotated = RotatedPart { dims: None, default_share: 1.0 };
    let rope = config.rope_parameters.of(window).partial(source, head_dim, rotated)?;
    let params = GqaParams { hidden, shape, rope, qk_norm: QkNorm::PER_HEAD };
    gated_gqa(attention, params, "g_proj")
}

/// Gates per head.
fn gate_width(config: &LagunaConfig, source: &dyn TensorSource) -> Result<usize, Error> {
    match &config.gating {
        None | Some(Value::Bool(true)) => Ok(1),
        Some(gating) if gating == "per-head" => Ok(1),
        Some(gating) if gating == "per-element" => Ok(config.head_dim),
        Some(other) => Err(config_error(source, format!("\"gating\" is {other}: not supported"))),
    }
}
