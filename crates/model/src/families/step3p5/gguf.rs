//! Keys and names of tensors in GGUF.

use serde_json::Value;

use crate::{
    blueprint::{Blueprint, MixerBlueprint},
    parts::gguf::{
        architecture::GgufVector,
        experts::{DENSE_LAYERS, SHARED_WIDTH, SPARSE_LAYERS},
        heads::{
            FullLayer, PATTERN_OF_LAYERS, UNREAD_WINDOW, head_width, layer_types, slides,
            write_heads_by_layer,
        },
        model::divided_rope,
        prelude::*,
    },
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "step35",
    models: "Step-3.5 and 3.7",
    model_types: &["step3p5"],
    keys: &[MODEL, GROUPED_SIZES, SIGMOID_ROUTER, KEYS],
    names: &[NAMES],
    vectors: |config, blueprint| divisors(config, blueprint).into_iter().collect(),
    has_tensor,
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    DENSE_LAYERS,
    // llama.cpp halves the rotated part of full layers itself.
    group(Place::Heads, read_attention, write_heads_by_layer),
    UNREAD_WINDOW,
    PATTERN_OF_LAYERS,
    uniform("shared_expert_intermediate_size", "expert_shared_feed_forward_length")
        .or(Fixed::Integer(0)),
    SHARED_WIDTH,
    SPARSE_LAYERS,
    group(Place::Layers, read_limits, write_limits),
];

/// Gates of heads, and experts beside the MLP.
const NAMES: &[NameRow] = &[
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

fn read_attention(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let slides = slides(keys, 4, FullLayer::First)?;
    let width = head_width(keys)?;
    let heads = |of_windows| -> Result<[Option<u64>; 2], Error> {
        let of_kind = |name| keys.of_kind(name, &slides, of_windows);
        Ok([of_kind(key::HEADS)?, of_kind(key::KV_HEADS)?])
    };
    let ([full, full_kv], [sliding, sliding_kv]) = (heads(false)?, heads(true)?);
    let base = config.remove("rope_theta");
    let sliding_base = keys.number(key::SLIDING_ROPE_BASE)?.map(Value::from).or(base.clone());
    // Not in the file: llama.cpp rotates half of the heads of full layers.
    let mut rope = Config::new();
    add(&mut rope, json!({"rope_theta": base, "partial_rotary_factor": 0.5}));
    add(&mut rope, divided_rope(keys, width / 4)?);
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
        "sliding_window": keys.size(key::WINDOW)?,
        "layer_types": layer_types(&slides),
        "rope_parameters": {
            "sliding_attention": {"rope_theta": sliding_base},
            "full_attention": rope,
        },
    });
    add(config, entries);
    Ok(())
}

/// Bounds of routed and of shared experts in the config, as [`key::CLAMPS`] in files.
const LIMITS: [&str; 2] = ["swiglu_limits", "swiglu_limits_shared"];

fn read_limits(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    for (list, name) in LIMITS.into_iter().zip(key::CLAMPS) {
        add(config, json!({ list: keys.floats_per_layer(name)? }));
    }
    Ok(())
}

fn write_limits(keys: &mut KeyWriter<'_>) {
    for (list, name) in LIMITS.into_iter().zip(key::CLAMPS) {
        let Some(limits) = keys.config[list].as_array() else { continue };
        let limits = limits.iter().map(|limit| limit.as_f64().unwrap_or(0.0) as f32).collect();
        keys.push(name, KeyValue::F32s(limits));
    }
}

/// The scaling of Llama 3 in full layers, then ones for pairs that only layers with windows rotate.
fn divisors(config: &Value, blueprint: &Blueprint) -> Option<GgufVector> {
    let (layer, full) = blueprint.layers.iter().enumerate().find_map(|(i, layer)| {
        let Some(MixerBlueprint::Gqa(gqa)) = layer.mixer() else { return None };
        gqa.shape.window.is_none().then_some((i, gqa))
    })?;
    let (theta, scaled) = (config["rope_theta"].get(layer)?.as_f64()?, &full.rope.frequencies);
    let divisor = |pair: usize| match scaled.get(pair) {
        Some(frequency) => {
            let plain = theta.powf(-(pair as f64) / scaled.len() as f64);
            (plain / f64::from(*frequency)) as f32
        }
        None => 1.0,
    };
    let numbers = (0..full.shape.head_dim / 2).map(divisor).collect();
    Some(GgufVector { name: "rope_freqs.weight", numbers })
}

/// The router says that a layer has experts.
fn has_tensor(config: &Value, tensor: &str) -> Option<bool> {
    tensor.contains(".moe.").then(|| {
        let mut listed = config["moe_layers_enum"].as_str().unwrap_or("").split(',');
        let layer = tensor.split('.').nth(2);
        tensor.ends_with(".moe.gate.weight") && listed.any(|l| Some(l) == layer)
    })
}
