//! Modules of each architecture, from its `config.json`.
//!
//! To add an architecture: a function for its layers, and an entry in [`ARCHITECTURES`].

use moeflux_compute::Scalar;
use serde_json::{Map, Value};

use super::{
    module::{Module, WeightQuant},
    module_builder::{AttentionSpec, ExpertSpec, Growth, ModuleBuilder},
    values::Lead,
};
use crate::base::error::Error;

/// Parameters of the routers.
#[derive(Clone, Copy, Debug)]
pub(super) struct RouterParams {
    pub(super) seed: u64,
    pub(super) skew: f64,
}

/// Properties of an architecture.
pub(super) struct SynthArchitecture {
    model_type: &'static str,
    /// Prefix of `model.` and `lm_head`.
    pub(super) prefix: &'static str,
    pub(super) names: ExpertKeyNames,
    pub(super) growth: Growth,
    /// Quantization of routed experts.
    pub(super) experts: WeightQuant,
    /// Quantization of all other matrices except routers.
    pub(super) others: WeightQuant,
    /// Whether embeddings are multiplied by the square root of the hidden size.
    pub(super) scaled_embedding: bool,
    /// Default of `tie_word_embeddings`.
    pub(super) tied: bool,
    /// Adds the modules of a layer, whose names start with the given prefix.
    pub(super) layer: fn(&mut ModuleBuilder<'_>, u64, &str) -> Result<(), Error>,
}

/// Config keys of the number of experts, the experts per token, and their hidden size.
#[derive(Clone, Copy)]
pub(super) struct ExpertKeyNames {
    pub(super) experts: &'static str,
    pub(super) top_k: &'static str,
    pub(super) intermediate: &'static str,
}

const QWEN: SynthArchitecture = SynthArchitecture {
    model_type: "qwen3_moe",
    prefix: "",
    names: ExpertKeyNames {
        experts: "num_experts",
        top_k: "num_experts_per_tok",
        intermediate: "moe_intermediate_size",
    },
    growth: Growth { mixer: 0.39, experts: 0.07 },
    experts: WeightQuant::Affine(4),
    others: WeightQuant::Affine(4),
    scaled_embedding: false,
    tied: false,
    layer: qwen3_moe,
};

const DEEPSEEK: SynthArchitecture = SynthArchitecture {
    model_type: "deepseek_v3",
    names: ExpertKeyNames { experts: "n_routed_experts", ..QWEN.names },
    // The shared expert is not gated, and the scaling factor enters squared.
    growth: Growth { mixer: 0.4, experts: 0.65 },
    layer: deepseek_v3,
    ..QWEN
};

const ARCHITECTURES: &[SynthArchitecture] = &[
    QWEN,
    SynthArchitecture {
        model_type: "qwen3_5_moe",
        prefix: "language_model.",
        growth: Growth { mixer: 0.24, experts: 0.15 },
        layer: qwen3_5_moe,
        ..QWEN
    },
    SynthArchitecture {
        model_type: "qwen3_next",
        growth: Growth { mixer: 0.24, experts: 0.15 },
        layer: qwen3_next,
        ..QWEN
    },
    DEEPSEEK,
    SynthArchitecture { model_type: "kimi_k2", ..DEEPSEEK },
    SynthArchitecture { model_type: "deepseek_v32", layer: deepseek_v32, ..DEEPSEEK },
    SynthArchitecture { model_type: "glm_moe_dsa", layer: deepseek_v32, ..DEEPSEEK },
    SynthArchitecture {
        model_type: "glm4_moe",
        growth: Growth { mixer: 0.39, experts: 0.4 },
        layer: glm4_moe,
        ..DEEPSEEK
    },
    SynthArchitecture {
        model_type: "minimax_m2",
        names: ExpertKeyNames {
            experts: "num_local_experts",
            top_k: "num_experts_per_tok",
            intermediate: "intermediate_size",
        },
        layer: minimax_m2,
        ..QWEN
    },
    SynthArchitecture {
        model_type: "gpt_oss",
        names: ExpertKeyNames {
            experts: "num_local_experts",
            top_k: "num_experts_per_tok",
            intermediate: "intermediate_size",
        },
        growth: Growth { mixer: 0.39, experts: 0.5 },
        experts: WeightQuant::Mxfp4,
        others: WeightQuant::Affine(8),
        layer: gpt_oss,
        ..QWEN
    },
    SynthArchitecture {
        model_type: "gemma4",
        prefix: "language_model.",
        names: ExpertKeyNames { top_k: "top_k_experts", ..QWEN.names },
        growth: Growth { mixer: 0.3, experts: 0.3 },
        scaled_embedding: true,
        tied: true,
        layer: gemma4,
        ..QWEN
    },
];

/// Modules of a model, and the quantization of the experts, which is the most frequent one.
pub(super) struct Modules {
    pub(super) list: Vec<Module>,
    pub(super) expert_quant: WeightQuant,
}

/// The modules of the model that a config describes.
///
/// # Errors
/// The architecture is not supported, or a value is missing, out of range, or inconsistent.
pub(super) fn modules(
    config: &Map<String, Value>,
    routing: RouterParams,
) -> Result<Modules, Error> {
    let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or("");
    let Some(architecture) = ARCHITECTURES.iter().find(|a| a.model_type == model_type) else {
        let names: Vec<_> = ARCHITECTURES.iter().map(|a| a.model_type).collect();
        return Err(Error::Input(format!(
            "the config's model_type {model_type:?} cannot be made; supported are {}",
            names.join(", ")
        )));
    };
    let list = ModuleBuilder::new(architecture, text_config(config), routing)?.model()?;
    Ok(Modules { list, expert_quant: architecture.experts })
}

/// The language model's part of a config: `text_config`, or the whole config.
pub(super) fn text_config(config: &Map<String, Value>) -> &Map<String, Value> {
    config.get("text_config").and_then(Value::as_object).unwrap_or(config)
}

/// Source: mlx-lm, models/qwen3_moe.py.
fn qwen3_moe(b: &mut ModuleBuilder<'_>, layer: u64, prefix: &str) -> Result<(), Error> {
    b.norms(prefix);
    qwen_attention(b, layer, prefix, false)?;
    qwen_feed_forward(b, layer, prefix).map(|_| ())
}

/// Source: mlx-lm, models/qwen3_5.py and qwen3_next.py.
fn qwen3_5_moe(b: &mut ModuleBuilder<'_>, layer: u64, prefix: &str) -> Result<(), Error> {
    qwen_hybrid(b, layer, prefix, false)
}

/// Source: mlx-lm, models/qwen3_next.py.
fn qwen3_next(b: &mut ModuleBuilder<'_>, layer: u64, prefix: &str) -> Result<(), Error> {
    qwen_hybrid(b, layer, prefix, true)
}

/// A layer of attention or gated delta-net; `fused` as in [`ModuleBuilder::delta_net`].
fn qwen_hybrid(
    b: &mut ModuleBuilder<'_>,
    layer: u64,
    prefix: &str,
    fused: bool,
) -> Result<(), Error> {
    let shared = b.c.number("shared_expert_intermediate_size")?;
    b.norms(prefix);
    if is_full_attention(b, layer)? {
        qwen_attention(b, layer, prefix, true)?;
    } else {
        b.delta_net(layer, &format!("{prefix}linear_attn."), fused)?;
    }
    if qwen_feed_forward(b, layer, prefix)? {
        b.mlp(layer, &format!("{prefix}mlp.shared_expert."), shared);
        b.router(format!("{prefix}mlp.shared_expert_gate"), 1, WeightQuant::Affine(8), Lead::Zero);
    }
    Ok(())
}

/// Whether a layer's mixer is attention: every `full_attention_interval`-th, as in mlx-lm.
/// `layer_types`, if present, must agree.
fn is_full_attention(b: &ModuleBuilder<'_>, layer: u64) -> Result<bool, Error> {
    let interval = b.c.number_or("full_attention_interval", 4)?;
    let full = (layer + 1).is_multiple_of(interval);
    let name = if full { "full_attention" } else { "linear_attention" };
    match b.c.layer_entry("layer_types", layer)? {
        Some(other) if other != name => Err(b.c.wrong(format!(
            "layer_types must name each {interval}th layer full_attention (full_attention_interval) and the others \
             linear_attention"
        ))),
        _ => Ok(full),
    }
}

fn qwen_attention(
    b: &mut ModuleBuilder<'_>,
    layer: u64,
    prefix: &str,
    output_gate: bool,
) -> Result<(), Error> {
    if b.c.flag_or("attention_bias", false)? {
        return Err(b.c.wrong("attention_bias true is not supported: published models have false"));
    }
    let attention = AttentionSpec { output_gate, ..b.heads()?.head_norms() };
    b.attention(layer, &format!("{prefix}self_attn."), attention)
}

/// Experts, or a dense MLP where the config requests it. Returns whether it added experts.
fn qwen_feed_forward(b: &mut ModuleBuilder<'_>, layer: u64, prefix: &str) -> Result<bool, Error> {
    let sparse_step = b.c.number_or("decoder_sparse_step", 1)?;
    let sparse =
        !b.c.list("mlp_only_layers")?.contains(&layer) && (layer + 1).is_multiple_of(sparse_step);
    let prefix = format!("{prefix}mlp.");
    if sparse {
        b.experts(layer, &switch_mlp(&prefix, WeightQuant::Affine(8)));
    } else {
        let intermediate = b.c.number("intermediate_size")?;
        b.mlp(layer, &prefix, intermediate);
    }
    Ok(sparse)
}

/// Experts with the most common names.
fn switch_mlp(prefix: &str, router_quant: WeightQuant) -> ExpertSpec {
    ExpertSpec {
        router: format!("{prefix}gate"),
        router_quant,
        correction: None,
        stacked: format!("{prefix}switch_mlp"),
        biases: false,
    }
}

/// Source: mlx-lm, models/deepseek_v3.py.
fn deepseek_v3(b: &mut ModuleBuilder<'_>, layer: u64, prefix: &str) -> Result<(), Error> {
    b.norms(prefix);
    // Exports by mlx-lm before 0.30.5 have `kv_b_proj`; no published config tells which layout it
    // belongs to.
    let whole = b.c.flag_or(super::KV_B_PROJ, false)?;
    b.latent_attention(layer, &format!("{prefix}self_attn."), whole)?;
    deepseek_feed_forward(b, layer, &format!("{prefix}mlp."))
}

/// Source: mlx-lm, models/deepseek_v32.py and glm_moe_dsa.py.
fn deepseek_v32(b: &mut ModuleBuilder<'_>, layer: u64, prefix: &str) -> Result<(), Error> {
    deepseek_v3(b, layer, prefix)?;
    match b.c.layer_entry("indexer_types", layer)? {
        Some("shared") => Ok(()),
        _ => b.indexer(&format!("{prefix}self_attn.indexer.")),
    }
}

/// A dense MLP in the first layers, then routed and shared experts.
fn deepseek_feed_forward(b: &mut ModuleBuilder<'_>, layer: u64, prefix: &str) -> Result<(), Error> {
    let sparse = layer >= b.c.count("first_k_dense_replace")?
        && layer.is_multiple_of(b.c.number_or("moe_layer_freq", 1)?);
    if !sparse {
        let intermediate = b.c.number("intermediate_size")?;
        b.mlp(layer, prefix, intermediate);
        return Ok(());
    }
    // mlx-lm has it as a plain matrix, not a linear layer, and does not quantize it.
    let experts = switch_mlp(prefix, WeightQuant::No);
    let correction = Some(format!("{}.e_score_correction_bias", experts.router));
    b.experts(layer, &ExpertSpec { correction, ..experts });
    let shared = b.c.count("n_shared_experts")?;
    if shared > 0 {
        b.mlp(layer, &format!("{prefix}shared_experts."), shared * b.sizes.intermediate);
    }
    Ok(())
}

/// Source: mlx-lm, models/glm4_moe.py.
fn glm4_moe(b: &mut ModuleBuilder<'_>, layer: u64, prefix: &str) -> Result<(), Error> {
    b.norms(prefix);
    let biased = b.c.flag_or("attention_bias", false)?;
    let heads = b.heads()?;
    let heads = if b.c.flag_or("use_qk_norm", false)? { heads.head_norms() } else { heads };
    let biases: &[_] = if biased { &["q_proj", "k_proj", "v_proj"] } else { &[] };
    b.attention(layer, &format!("{prefix}self_attn."), AttentionSpec { biases, ..heads })?;
    deepseek_feed_forward(b, layer, &format!("{prefix}mlp."))
}

/// Source: mlx-lm, models/minimax.py.
fn minimax_m2(b: &mut ModuleBuilder<'_>, layer: u64, prefix: &str) -> Result<(), Error> {
    b.norms(prefix);
    let heads = b.heads()?;
    let AttentionSpec { heads: q, kv_heads: k, head_dim, .. } = heads;
    let norms = b.c.flag_or("use_qk_norm", true)?.then_some([q * head_dim, k * head_dim]);
    b.attention(layer, &format!("{prefix}self_attn."), AttentionSpec { norms, ..heads })?;
    let prefix = format!("{prefix}block_sparse_moe.");
    let correction = Some(format!("{prefix}e_score_correction_bias"));
    b.experts(layer, &ExpertSpec { correction, ..switch_mlp(&prefix, WeightQuant::Affine(8)) });
    Ok(())
}

/// Source: mlx-lm, models/gpt_oss.py.
fn gpt_oss(b: &mut ModuleBuilder<'_>, layer: u64, prefix: &str) -> Result<(), Error> {
    b.norms(prefix);
    let heads = b.heads()?;
    let sinks = vec![heads.heads];
    let biases = &["q_proj", "k_proj", "v_proj", "o_proj"];
    b.attention(layer, &format!("{prefix}self_attn."), AttentionSpec { biases, ..heads })?;
    b.plain(format!("{prefix}self_attn.sinks"), sinks, Scalar::BF16, -1.0..1.0);
    let experts = ExpertSpec {
        router: format!("{prefix}mlp.router"),
        stacked: format!("{prefix}mlp.experts"),
        biases: true,
        ..switch_mlp(prefix, WeightQuant::Affine(8))
    };
    b.experts(layer, &experts);
    Ok(())
}

/// Source: mlx-lm, models/gemma4_text.py.
fn gemma4(b: &mut ModuleBuilder<'_>, layer: u64, prefix: &str) -> Result<(), Error> {
    let hidden = b.sizes.hidden;
    b.mixer_norm(prefix);
    let heads = b.heads()?;
    let full = b.c.layer_entry("layer_types", layer)? == Some("full_attention");
    let heads = if full {
        let shared = b.c.flag_or("attention_k_eq_v", false)?;
        let kv_heads = b.c.number_or("num_global_key_value_heads", heads.kv_heads)?;
        AttentionSpec {
            head_dim: b.c.number_or("global_head_dim", heads.head_dim)?,
            kv_heads: if shared { kv_heads } else { heads.kv_heads },
            values: !shared,
            ..heads
        }
    } else {
        heads
    };
    let attention = AttentionSpec { scaled: false, ..heads.head_norms() };
    b.attention(layer, &format!("{prefix}self_attn."), attention)?;
    b.post_norms(layer, prefix);
    b.plain(format!("{prefix}layer_scalar"), vec![1], Scalar::BF16, 0.98..1.02);
    b.norm(format!("{prefix}pre_feedforward_layernorm"), hidden);
    let intermediate = b.c.number("intermediate_size")?;
    b.mlp(layer, &format!("{prefix}mlp."), intermediate);
    if !b.c.flag_or("enable_moe_block", false)? {
        return Ok(());
    }
    for norm in [
        "pre_feedforward_layernorm_2",
        "post_feedforward_layernorm_1",
        "post_feedforward_layernorm_2",
    ] {
        b.norm(format!("{prefix}{norm}"), hidden);
    }
    // The router's norm divides by the square root of the hidden size.
    let root = (hidden as f32).sqrt();
    b.plain(format!("{prefix}router.scale"), vec![hidden], Scalar::BF16, 0.9 * root..1.1 * root);
    b.plain(
        format!("{prefix}router.per_expert_scale"),
        vec![b.sizes.experts],
        Scalar::BF16,
        0.9..1.1,
    );
    let experts = ExpertSpec {
        router: format!("{prefix}router.proj"),
        stacked: format!("{prefix}experts.switch_glu"),
        ..switch_mlp(prefix, WeightQuant::Affine(8))
    };
    b.experts(layer, &experts);
    Ok(())
}
