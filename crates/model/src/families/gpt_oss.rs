//! `gpt_oss`: gpt-oss-20b and gpt-oss-120b.
//!
//! Grouped-query attention with sinks, a sliding window in every other layer, YaRN whose range is
//! not rounded to whole pairs; biases everywhere, experts in MXFP4, a clamped SwiGLU. Sources:
//! OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card", 2025, and its `gpt_oss/torch/model.py`; see
//! `docs/references.md`.

mod gguf;

use moeflux_ops::OutputOrder;

use super::prelude::*;
use crate::{
    blueprint::LayerExperts,
    checkpoint::source::{StackLayout, StackRequest},
    parts::{
        expert_sizes::{ExpertKeys, ExpertSizes},
        expert_tensors::{
            ExpertMatrix, InterleavedBiases, InterleavedExperts, expert_bias, experts,
        },
    },
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["gpt_oss"],
        checkpoints: "gpt-oss-20b, 120b",
        special: "experts in MXFP4 or bf16, sinks, sliding window",
        checked: "transformers, mlx-lm corrected",
    }],
    layer_types: SLIDING,
    presets: &[
        // Source: huggingface.co/openai/gpt-oss-20b, config.json.
        Preset {
            name: "gpt-oss-20b",
            description: "gpt-oss-20b: 24 layers, every other one sliding, 32 experts in MXFP4, 4 \
                 per token; 12 GB",
            sizes: PresetSizes { parameters: 20.9, active: 3.6, expert_mb: 13.2 },
            config: published!("gpt_oss/gpt-oss-20b.json"),
        },
        // Source: huggingface.co/openai/gpt-oss-120b, config.json.
        Preset {
            name: "gpt-oss-120b",
            description: "gpt-oss-120b: 36 layers, every other one sliding, 128 experts in MXFP4, \
                 4 per token; 63 GB",
            sizes: PresetSizes { parameters: 116.8, active: 5.13, expert_mb: 13.2 },
            config: published!("gpt_oss/gpt-oss-120b.json"),
        },
    ],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

#[derive(Deserialize)]
struct GptOssConfig {
    #[serde(flatten)]
    body: Body,
    #[serde(flatten)]
    gqa: GqaKeys,
    /// Of one expert.
    intermediate_size: usize,
    num_local_experts: usize,
    num_experts_per_tok: usize,
    /// Factor in the sigmoid of the experts' activation. Published configs do not have it.
    swiglu_alpha: Option<f32>,
    swiglu_limit: Option<f32>,
    #[serde(flatten)]
    windows: LayerWindows,
}

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: GptOssConfig = parse_config(source)?;
    config.windows.sliding_window.get_or_insert(128);
    config.body.blueprint(source, NormWeights::Plain, |i, layer| {
        let window = config.windows.of(source, i)?;
        let attention = attention(&config, window, &layer.child("self_attn"))?;
        let moe = moe(&config, &layer.child("mlp"))?;
        config.body.layer(layer, attention, moe)
    })
}

fn attention(
    config: &GptOssConfig,
    window: Option<usize>,
    attention: &Scope<'_>,
) -> Result<GqaBlueprint, Error> {
    let hidden = config.body.hidden_size;
    let shape = config.gqa.heads.shape(attention.source, hidden)?;
    let style = GqaStyle { window, ..GqaStyle::default() };
    Ok(GqaBlueprint {
        sinks: Some(attention.vector("sinks", shape.heads)?),
        ..config.gqa.attention(attention, hidden, style)?
    })
}

fn moe(config: &GptOssConfig, mlp: &Scope<'_>) -> Result<MoeBlueprint, Error> {
    let require = Require(mlp.source);
    let sizes = ExpertSizes {
        count: config.num_local_experts,
        hidden: config.body.hidden_size,
        intermediate: config.intermediate_size,
    };
    let keys = ExpertKeys {
        count: "num_local_experts",
        top_k: "num_experts_per_tok",
        intermediate: "intermediate_size",
    };
    let top_k = config.num_experts_per_tok;
    let sizes = sizes.of_router(mlp, "router", top_k, &keys)?;
    let stacked = mlp.child("experts");
    let experts = if stacked.has("gate_proj.weight") {
        experts(&ExpertTensors::new(stacked.clone(), stacked), sizes)?
    } else {
        interleaved(&stacked, sizes)?
    };
    let (alpha, limit) = (config.swiglu_alpha.unwrap_or(1.702), config.swiglu_limit.unwrap_or(7.0));
    require.factor("swiglu_alpha", alpha)?;
    require.factor("swiglu_limit", limit)?;
    let router = mlp.linear("router", sizes.count, sizes.hidden)?;
    // Softmax over the chosen experts only equals the normalized softmax over all experts.
    let router = RouterBlueprint { normalize: true, ..RouterBlueprint::softmax(router, top_k) };
    let activation = Activation::ClampedSwiGlu { alpha, limit };
    Ok(MoeBlueprint { activation, ..MoeBlueprint::new(router, experts) })
}

/// Experts in OpenAI's layout, gate and up interleaved: rows of MXFP4 blocks, or columns of
/// unquantized weights.
fn interleaved(experts: &Scope<'_>, sizes: ExpertSizes) -> Result<LayerExperts, Error> {
    let ExpertSizes { count, hidden, intermediate } = sizes;
    let layout = match experts.has("gate_up_proj") {
        true => StackLayout::ByInputs(OutputOrder::Rows),
        false => StackLayout::OpenAiBlocks,
    };
    let stack = |name, rows, cols| {
        let stack = experts.stack(&StackRequest { name, layout, count, rows, cols });
        stack.map(ExpertMatrix::from)
    };
    let gate_up = stack("gate_up_proj", 2 * intermediate, hidden)?;
    let down = stack("down_proj", hidden, intermediate)?;
    let mut bias_type = None;
    let mut bias = |name, len| expert_bias(experts, name, count, len, &mut bias_type);
    let gate_up_bias = bias("gate_up_proj_bias", 2 * intermediate)?;
    let down_bias = bias("down_proj_bias", hidden)?;
    let biases = bias_type.map(|scalar| InterleavedBiases {
        scalar,
        gate_up: gate_up_bias,
        down: down_bias,
    });
    InterleavedExperts { gate_up, down, biases }.into_experts(experts.prefix(), count)
}
