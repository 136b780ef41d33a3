//! Architectures of grouped-query attention with windows in some layers.

use moeflux_base::Error;
use serde_json::{Value, json};

use super::{
    super::{
        config::{Config, FullLayer, Keys, add},
        names::{NameRow, row},
    },
    architecture::{
        EXPERTS, GgufArchitecture, PLAIN, POST_ATTENTION_NORM, SHARED_EXPERT, SHARED_EXPERTS,
    },
    experts::{SIGMOID, grouped, grouped_experts, scoring, softmax_experts},
};

pub(super) const ARCHITECTURES: [GgufArchitecture; 9] = [
    GgufArchitecture {
        name: "afmoe",
        model_types: &["afmoe"],
        rows: &[AFMOE, EXPERTS, SHARED_EXPERTS],
        config: afmoe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "cohere2moe",
        model_types: &["cohere2_moe"],
        rows: &[SHARED_EXPERTS],
        config: cohere2_moe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "exaone-moe",
        model_types: &["exaone_moe"],
        rows: &[EXAONE_MOE, SHARED_EXPERTS],
        config: exaone_moe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "gemma4",
        model_types: &["gemma4"],
        rows: &[GEMMA4],
        config: gemma4,
        ..PLAIN
    },
    GgufArchitecture {
        name: "gpt-oss",
        model_types: &["gpt_oss"],
        rows: &[GPT_OSS, EXPERTS, POST_ATTENTION_NORM],
        config: gpt_oss,
        ..PLAIN
    },
    GgufArchitecture {
        name: "laguna",
        model_types: &["laguna"],
        rows: &[LAGUNA, SHARED_EXPERT],
        config: laguna,
        ..PLAIN
    },
    GgufArchitecture { name: "mellum", model_types: &["mellum"], config: mellum, ..PLAIN },
    GgufArchitecture {
        name: "mimo2",
        model_types: &["mimo_v2_flash", "mimo_v2"],
        rows: &[MIMO_V2],
        config: mimo_v2_flash,
        ..PLAIN
    },
    GgufArchitecture {
        name: "step35",
        model_types: &["step3p5"],
        rows: &[STEP],
        config: step3p5,
        ..PLAIN
    },
];

/// A gate beside the queries, and norms after the parts.
const AFMOE: &[NameRow] = &[
    row("attn_gate", "self_attn.gate_proj"),
    row("post_attention_norm", "post_attention_layernorm"),
    row("ffn_norm", "pre_mlp_layernorm"),
    row("post_ffw_norm", "post_mlp_layernorm"),
    row("ffn_gate_inp", "mlp.router.gate"),
    row("exp_probs_b.bias", "mlp.expert_bias"),
];

const EXAONE_MOE: &[NameRow] = &[row("exp_probs_b.bias", "mlp.e_score_correction_bias")];

/// A dense MLP beside experts with fused gate and up.
const GEMMA4: &[NameRow] = &[
    row("post_attention_norm", "post_attention_layernorm"),
    row("ffn_norm", "pre_feedforward_layernorm"),
    row("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    row("post_ffw_norm", "post_feedforward_layernorm"),
    row("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    row("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    row("layer_output_scale.weight", "layer_scalar"),
    row("ffn_gate_inp.scale", "router.scale"),
    row("ffn_gate_inp", "router.proj"),
    row("ffn_down_exps.scale", "router.per_expert_scale"),
    row("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    row("ffn_down_exps.weight", "experts.down_proj"),
];

const GPT_OSS: &[NameRow] =
    &[row("attn_sinks.weight", "self_attn.sinks"), row("ffn_gate_inp", "mlp.router")];

const LAGUNA: &[NameRow] = &[
    row("attn_gate", "self_attn.g_proj"),
    row("exp_probs_b.bias", "mlp.experts.e_score_correction_bias"),
];

const MIMO_V2: &[NameRow] = &[row("attn_sinks.weight", "self_attn.attention_sink_bias")];

/// Gates of heads, and experts beside the MLP.
const STEP: &[NameRow] = &[
    row("attn_gate", "self_attn.g_proj"),
    row("ffn_gate_inp", "moe.gate"),
    row("exp_probs_b.bias", "moe.router_bias"),
    row("ffn_gate_exps", "moe.gate_proj"),
    row("ffn_up_exps", "moe.up_proj"),
    row("ffn_down_exps", "moe.down_proj"),
    row("ffn_gate_shexp", "share_expert.gate_proj"),
    row("ffn_up_shexp", "share_expert.up_proj"),
    row("ffn_down_shexp", "share_expert.down_proj"),
];

/// Names of the kinds of layers.
fn layer_types(slides: &[bool]) -> Vec<&'static str> {
    let name = |slides| if slides { "sliding_attention" } else { "full_attention" };
    slides.iter().map(|slides| name(*slides)).collect()
}

/// Adds the kinds of layers, with `full` of every `n` of full attention where the file has no
/// list.
fn windows(keys: &Keys<'_>, config: &mut Config, n: u64, full: FullLayer) -> Result<(), Error> {
    let entries = json!({
        "sliding_window": keys.size("attention.sliding_window")?,
        "layer_types": layer_types(&keys.slides(n, full)?),
    });
    add(config, entries);
    Ok(())
}

/// Adds RoPE by kind of layer, in place of that of the whole model: full layers have the usual
/// keys, sliding ones another base and no scaling.
fn rope_by_type(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let share = |name: &str| -> Result<Option<f64>, Error> {
        let Some(rotated) = keys.integer(name)? else { return Ok(None) };
        Ok(Some(rotated as f64 / keys.head_width()? as f64))
    };
    let base = config.remove("rope_theta");
    let mut full = match config.remove("rope_scaling") {
        Some(Value::Object(scaling)) => scaling,
        _ => Config::new(),
    };
    let rotated = share("rope.dimension_count")?;
    add(&mut full, json!({"rope_theta": base, "partial_rotary_factor": rotated}));
    let mut sliding = Config::new();
    let entries = json!({
        "rope_type": "default",
        "rope_theta": keys.number("rope.freq_base_swa")?.map(Value::from).or(base),
        "partial_rotary_factor": share("rope.dimension_count_swa")?,
    });
    add(&mut sliding, entries);
    let entries = json!({"full_attention": full, "sliding_attention": sliding});
    add(config, json!({ "rope_parameters": entries }));
    Ok(())
}

fn mellum(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = softmax_experts(keys, "mellum")?;
    windows(keys, &mut config, 4, FullLayer::Last)?;
    rope_by_type(keys, &mut config)?;
    Ok(config)
}

fn exaone_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = grouped(keys, "exaone_moe")?;
    windows(keys, &mut config, 4, FullLayer::Last)?;
    Ok(config)
}

fn afmoe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = grouped(keys, "afmoe")?;
    windows(keys, &mut config, 4, FullLayer::Last)?;
    // Not in the file: llama.cpp always scales the embedding.
    add(&mut config, json!({"mup_enabled": true}));
    Ok(config)
}

fn gpt_oss(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("gpt_oss")?;
    keys.heads(&mut config)?;
    let entries = json!({
        "intermediate_size": keys.uniform_size("expert_feed_forward_length")?,
        "num_local_experts": keys.size("expert_count")?,
        "num_experts_per_tok": keys.size("expert_used_count")?,
        "sliding_window": keys.size("attention.sliding_window")?,
        "layer_types": layer_types(&keys.slides(2, FullLayer::Last)?),
    });
    add(&mut config, entries);
    // Not in the file.
    if let Some(scaling) = config.get_mut("rope_scaling").and_then(|s| s.as_object_mut()) {
        add(scaling, json!({"truncate": false}));
    }
    Ok(config)
}

/// Attention and feed-forward part in parallel, on LayerNorms.
fn cohere2_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("cohere2_moe")?;
    keys.heads(&mut config)?;
    grouped_experts(keys, &mut config, SIGMOID)?;
    windows(keys, &mut config, 4, FullLayer::First)?;
    let scale = "logit_scale";
    let entries = json!({
        // Of one expert.
        "intermediate_size": keys.uniform_size("expert_feed_forward_length")?,
        "prefix_dense_intermediate_size": keys.uniform("feed_forward_length")?,
        "expert_selection_fn": scoring(keys, SIGMOID)?,
        "logit_scale": keys.number(scale)?.ok_or_else(|| keys.missing(scale))?,
    });
    add(&mut config, entries);
    Ok(config)
}

/// Full layers have other numbers of query heads than those with windows.
fn laguna(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("laguna")?;
    grouped_experts(keys, &mut config, SIGMOID)?;
    let name = "attention.head_count";
    let heads = keys.per_layer(name)?.ok_or_else(|| keys.missing(name))?;
    let (first, width) = (heads.first().copied().unwrap_or(0), keys.head_width()?);
    let window = keys.integer("attention.sliding_window")?.filter(|window| *window > 0);
    // The file has no list of kinds.
    let slides = match window {
        None => vec![false; heads.len()],
        Some(_) if heads.iter().any(|n| *n != first) => heads.iter().map(|n| *n != first).collect(),
        Some(_) => keys.slides(4, FullLayer::First)?,
    };
    let gates = keys.tensors.get("blk.0.attn_gate.weight").and_then(|gate| gate.shape.first());
    let by_element = gates.is_some_and(|gates| *gates as u64 == first.saturating_mul(width));
    let entries = json!({
        "num_attention_heads": first,
        "num_attention_heads_per_layer": heads,
        "num_key_value_heads": keys.uniform_size("attention.head_count_kv")?,
        "head_dim": width,
        "sliding_window": window,
        "layer_types": layer_types(&slides),
        "gating": if by_element { "per-element" } else { "per-head" },
        "shared_expert_intermediate_size":
            keys.uniform_size("expert_shared_feed_forward_length")?,
    });
    add(&mut config, entries);
    rope_by_type(keys, &mut config)?;
    Ok(config)
}

fn mimo_v2_flash(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("mimo_v2_flash")?;
    grouped_experts(keys, &mut config, SIGMOID)?;
    let slides = keys.slides(6, FullLayer::Last)?;
    let width = keys.size("attention.key_length")?;
    let value_width = keys.size("attention.value_length")?;
    let heads = keys.uniform_size("attention.head_count")?;
    let kv_heads = |of_windows| keys.of_kind("attention.head_count_kv", &slides, of_windows);
    let (full, sliding) = (kv_heads(false)?, kv_heads(true)?);
    let has_sinks = |of_windows| {
        let layer = slides.iter().position(|slides| *slides == of_windows);
        layer.is_some_and(|layer| keys.has(&format!("blk.{layer}.attn_sinks.weight")))
    };
    let rotated = keys.integer("rope.dimension_count")?.unwrap_or(width);
    let base = keys.number("rope.freq_base_swa")?.map(Value::from);
    let entries = json!({
        "num_attention_heads": heads,
        "num_key_value_heads": full.or(sliding),
        "head_dim": width,
        "v_head_dim": value_width,
        "swa_num_attention_heads": heads,
        "swa_num_key_value_heads": sliding.or(full),
        "swa_head_dim": width,
        "swa_v_head_dim": value_width,
        "swa_rope_theta": base.or_else(|| config.get("rope_theta").cloned()),
        "partial_rotary_factor": rotated as f64 / width as f64,
        "hybrid_layer_pattern": slides.iter().map(|slides| u8::from(*slides)).collect::<Vec<_>>(),
        "sliding_window": keys.size("attention.sliding_window")?,
        "add_full_attention_sink_bias": has_sinks(false),
        "add_swa_attention_sink_bias": has_sinks(true),
        "attention_value_scale": keys.number("attention.value_scale")?,
        "moe_layer_freq": keys.sparse_layers()?,
        // Not in the file: llama.cpp always normalizes.
        "norm_topk_prob": true,
    });
    add(&mut config, entries);
    Ok(config)
}

fn step3p5(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("step3p5")?;
    grouped_experts(keys, &mut config, SIGMOID)?;
    let slides = keys.slides(4, FullLayer::First)?;
    let width = keys.head_width()?;
    let heads = |of_windows| -> Result<[Option<u64>; 2], Error> {
        let of_kind = |name| keys.of_kind(name, &slides, of_windows);
        Ok([of_kind("attention.head_count")?, of_kind("attention.head_count_kv")?])
    };
    let ([full, full_kv], [sliding, sliding_kv]) = (heads(false)?, heads(true)?);
    let base = config.remove("rope_theta");
    let sliding_base = keys.number("rope.freq_base_swa")?.map(Value::from).or(base.clone());
    // Not in the file: llama.cpp rotates half of the heads of full layers.
    let mut rope = Config::new();
    add(&mut rope, json!({"rope_theta": base, "partial_rotary_factor": 0.5}));
    add(&mut rope, keys.divided_rope(width / 4)?);
    let entries = json!({
        "num_attention_heads": full.or(sliding),
        "num_attention_groups": full_kv.or(sliding_kv),
        "num_key_value_heads": full_kv.or(sliding_kv),
        "head_dim": width,
        "attention_other_setting": {
            "num_attention_heads": sliding.or(full),
            "num_attention_groups": sliding_kv.or(full_kv),
            "head_dim": width,
        },
        "use_head_wise_attn_gate": keys.has("blk.0.attn_gate.weight"),
        "sliding_window": keys.size("attention.sliding_window")?,
        "layer_types": layer_types(&slides),
        "rope_parameters": {
            "sliding_attention": {"rope_theta": sliding_base},
            "full_attention": rope,
        },
        "shared_expert_intermediate_size":
            keys.uniform("expert_shared_feed_forward_length")?.unwrap_or(0),
        "moe_layer_freq": keys.sparse_layers()?,
        "swiglu_limits": keys.floats_per_layer("swiglu_clamp_exp")?,
        "swiglu_limits_shared": keys.floats_per_layer("swiglu_clamp_shexp")?,
    });
    add(&mut config, entries);
    Ok(config)
}

/// Keys of full layers have no suffix, those of sliding ones `_swa`.
fn gemma4(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("gemma4")?;
    let slides = keys.slides(6, FullLayer::Last)?;
    let kv_heads = |of_windows| keys.of_kind("attention.head_count_kv", &slides, of_windows);
    let full_width = keys.size("attention.key_length")?;
    let full = slides.iter().position(|slides| !slides);
    let has_values = full.is_some_and(|layer| keys.has(&format!("blk.{layer}.attn_v.weight")));
    let theta = |name: &str| keys.number(name);
    let entries = json!({
        "intermediate_size": keys.uniform_size("feed_forward_length")?,
        "num_attention_heads": keys.uniform_size("attention.head_count")?,
        "num_key_value_heads": kv_heads(true)?,
        "num_global_key_value_heads": kv_heads(false)?,
        "head_dim": keys.size("attention.key_length_swa")?,
        "global_head_dim": full_width,
        "attention_k_eq_v": !has_values,
        "sliding_window": keys.size("attention.sliding_window")?,
        "layer_types": layer_types(&slides),
        "enable_moe_block": true,
        "num_experts": keys.size("expert_count")?,
        "top_k_experts": keys.size("expert_used_count")?,
        "moe_intermediate_size": keys.uniform_size("expert_feed_forward_length")?,
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input")?,
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers")?,
        "final_logit_softcapping": keys.number("final_logit_softcapping")?,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": theta("rope.freq_base")?,
                "partial_rotary_factor": rotated_share(keys, full_width)?,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": theta("rope.freq_base_swa")?,
            },
        },
    });
    add(&mut config, entries);
    Ok(config)
}

/// Share of pairs of full layers that are rotated: the divisor of the others is next to infinite.
fn rotated_share(keys: &Keys<'_>, width: u64) -> Result<f64, Error> {
    let Some(divisors) = keys.floats("rope_freqs.weight")? else { return Ok(1.0) };
    let rotated = divisors.iter().filter(|divisor| **divisor < 1e29).count();
    Ok(2.0 * rotated as f64 / width as f64)
}
