//! Keys and names of tensors in GGUF.

use serde_json::Value;

use crate::parts::gguf::{
    experts::{DENSE_LAYERS, SPARSE_LAYERS},
    heads::{
        FullLayer, PATTERN_OF_LAYERS, WINDOW, rotated_share, slides, write_heads_by_layer,
        write_rotated_by_kind,
    },
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "mimo2",
    models: "MiMo-V2-Flash",
    model_types: &["mimo_v2_flash", "mimo_v2"],
    keys: &[MODEL, GROUPED_SIZES, SIGMOID_ROUTER, KEYS],
    names: &[NAMES],
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    DENSE_LAYERS,
    group(Place::Heads, read_heads, |keys| {
        write_heads_by_layer(keys);
        write_rotated_by_kind(keys);
    }),
    PATTERN_OF_LAYERS,
    WINDOW,
    reads(read_sinks),
    number("attention_value_scale", "attention.value_scale"),
    SPARSE_LAYERS,
    // llama.cpp always normalizes.
    fixed("norm_topk_prob", Fixed::Flag(true)),
];

const NAMES: &[NameRow] = &[row("attn_sinks.weight", "self_attn.attention_sink_bias")];

fn kinds(keys: &Keys<'_>) -> Result<Vec<bool>, Error> {
    slides(keys, 6, FullLayer::Last)
}

fn read_heads(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let slides = kinds(keys)?;
    let width = keys.size(key::KEY_WIDTH)?;
    let value_width = keys.size(key::VALUE_WIDTH)?;
    let heads = keys.uniform_size(key::HEADS)?;
    let kv_heads = |of_windows| keys.of_kind(key::KV_HEADS, &slides, of_windows);
    let (full, sliding) = (kv_heads(false)?, kv_heads(true)?);
    let base = keys.number(key::SLIDING_ROPE_BASE)?.map(Value::from);
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
        "partial_rotary_factor": rotated_share(keys, width)?,
        "hybrid_layer_pattern": slides.iter().map(|slides| u8::from(*slides)).collect::<Vec<_>>(),
    });
    add(config, entries);
    Ok(())
}

fn read_sinks(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let slides = kinds(keys)?;
    let has_sinks = |of_windows| {
        let layer = slides.iter().position(|slides| *slides == of_windows);
        layer.is_some_and(|layer| keys.has(&format!("blk.{layer}.attn_sinks.weight")))
    };
    let entries = json!({
        "add_full_attention_sink_bias": has_sinks(false),
        "add_swa_attention_sink_bias": has_sinks(true),
    });
    add(config, entries);
    Ok(())
}
