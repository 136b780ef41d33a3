//! Keys and names of tensors in GGUF.

use serde_json::Value;

use crate::parts::gguf::{
    architecture::GgufVector,
    heads::{ConfigHeads, FullLayer, WINDOW, read_kinds, slides},
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "gemma4",
    models: "Gemma 4",
    model_types: &["gemma4"],
    keys: &[MODEL, KEYS],
    names: &[NAMES],
    vectors: |config, _| vec![divisors(config)],
    has_tensor: |_, tensor| tensor.ends_with(".gate_up_proj").then_some(true),
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    MLP_WIDTH.needed(),
    uniform("num_attention_heads", "attention.head_count").needed(),
    group(Place::Heads, read_heads, write_heads),
    WINDOW,
    reads(|keys, config| read_kinds(keys, config, 6, FullLayer::Last)),
    fixed("enable_moe_block", Fixed::Flag(true)),
    size("num_experts", "expert_count"),
    size("top_k_experts", "expert_used_count"),
    EXPERT_WIDTH,
    reads(|keys, config| {
        let entries = json!({
            "hidden_size_per_layer_input": keys.integer(key::PER_LAYER_INPUT)?,
            "num_kv_shared_layers": keys.integer(SHARED_KV)?,
        });
        add(config, entries);
        Ok(())
    }),
    number("final_logit_softcapping", "final_logit_softcapping"),
    reads(read_rope),
];

/// A dense MLP beside experts with fused gate and up.
const NAMES: &[NameRow] = &[
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

const SLIDING_WIDTH: &str = "attention.key_length_swa";
const SHARED_KV: &str = "attention.shared_kv_layers";
const DIVISORS: &str = "rope_freqs.weight";

/// Keys of full layers have no suffix, keys of layers with windows have `_swa`.
fn read_heads(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let slides = slides(keys, 6, FullLayer::Last)?;
    let kv_heads = |of_windows| keys.of_kind(key::KV_HEADS, &slides, of_windows);
    let full = slides.iter().position(|slides| !slides);
    let has_values = full.is_some_and(|layer| keys.has(&format!("blk.{layer}.attn_v.weight")));
    let entries = json!({
        "num_key_value_heads": kv_heads(true)?,
        "num_global_key_value_heads": kv_heads(false)?,
        "head_dim": keys.size(SLIDING_WIDTH)?,
        "global_head_dim": keys.size(key::KEY_WIDTH)?,
        "attention_k_eq_v": !has_values,
    });
    add(config, entries);
    Ok(())
}

fn write_heads(keys: &mut KeyWriter<'_>) {
    let ConfigHeads { width, kv_heads: kv } = ConfigHeads::of(keys);
    let full = keys.integer("global_head_dim").unwrap_or(width);
    let full_kv = keys.integer("num_global_key_value_heads").unwrap_or(kv);
    let slides = keys.layer_flags("layer_types", "sliding_attention").unwrap_or_default();
    let heads = slides.iter().map(|slides| if *slides { kv } else { full_kv } as i32).collect();
    keys.push(key::KV_HEADS, KeyValue::I32s(heads));
    for (name, n) in [
        (key::KEY_WIDTH, full),
        (key::VALUE_WIDTH, full),
        (SLIDING_WIDTH, width),
        ("attention.value_length_swa", width),
        (key::ROTATED, full),
        (key::SLIDING_ROTATED, width),
        (SHARED_KV, 0),
        (key::PER_LAYER_INPUT, 0),
    ] {
        keys.push(name, KeyValue::U32(n));
    }
    keys.push(key::WINDOW_PATTERN, KeyValue::Bools(slides));
}

fn read_rope(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let entries = json!({
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": keys.number(key::ROPE_BASE)?,
                "partial_rotary_factor": rotated_share(keys)?,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number(key::SLIDING_ROPE_BASE)?,
            },
        },
    });
    add(config, entries);
    Ok(())
}

/// Share of pairs of full layers that are rotated: the divisor of the others is next to infinite.
fn rotated_share(keys: &Keys<'_>) -> Result<f64, Error> {
    let Some(divisors) = keys.floats(DIVISORS)? else { return Ok(1.0) };
    let rotated = divisors.iter().filter(|divisor| **divisor < 1e29).count();
    Ok(2.0 * rotated as f64 / keys.size(key::KEY_WIDTH)? as f64)
}

/// Next to infinite for pairs of full layers that are not rotated.
fn divisors(config: &Value) -> GgufVector {
    let width = config["global_head_dim"].as_u64().or(config["head_dim"].as_u64()).unwrap_or(0);
    let full = &config["rope_parameters"]["full_attention"];
    let share = full["partial_rotary_factor"].as_f64().unwrap_or(1.0);
    let (pairs, ones) = (width / 2, (width as f64 / 2.0 * share) as u64);
    let numbers = (0..pairs).map(|pair| if pair < ones { 1.0 } else { 1e30 }).collect();
    GgufVector { name: DIVISORS, numbers }
}
