//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    experts::{DENSE_LAYERS, ROUTER_NORMALIZES},
    heads::{
        FullLayer, PATTERN_OF_LAYERS, ROPE_BY_TYPE, UNREAD_WINDOW, head_width, layer_types, slides,
        write_heads_by_layer, write_rotated_by_kind,
    },
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "laguna",
    models: "Laguna",
    model_types: &["laguna"],
    keys: &[MODEL, GROUPED_SIZES, ROUTER, ATTENTION],
    names: &[NAMES, SHARED_EXPERT],
    ..PLAIN
}];

const ROUTER: &[KeyRow] =
    &[SIGMOID_SCORES, NORMALIZED, ROUTER_NORMALIZES, ROUTED_SCALE, DENSE_LAYERS];

const ATTENTION: &[KeyRow] = &[
    group(Place::Heads, read_heads, |keys| {
        write_heads_by_layer(keys);
        write_rotated_by_kind(keys);
    }),
    UNREAD_WINDOW,
    PATTERN_OF_LAYERS,
    uniform("shared_expert_intermediate_size", "expert_shared_feed_forward_length").needed(),
    ROPE_BY_TYPE,
];

const NAMES: &[NameRow] = &[
    row("attn_gate", "self_attn.g_proj"),
    row("exp_probs_b.bias", "mlp.experts.e_score_correction_bias"),
];

/// Full layers have other numbers of query heads than layers with windows.
fn read_heads(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let heads = keys.each_layer(key::HEADS)?;
    let (first, width) = (heads.first().copied().unwrap_or(0), head_width(keys)?);
    let window = keys.integer(key::WINDOW)?.filter(|window| *window > 0);
    // The file has no list of kinds.
    let slides = match window {
        None => vec![false; heads.len()],
        Some(_) if heads.iter().any(|n| *n != first) => heads.iter().map(|n| *n != first).collect(),
        Some(_) => slides(keys, 4, FullLayer::First)?,
    };
    let gates = keys.rows("blk.0.attn_gate.weight");
    let by_element = gates.is_some_and(|gates| gates == first.saturating_mul(width));
    let entries = json!({
        "num_attention_heads": first,
        "num_attention_heads_per_layer": heads,
        "num_key_value_heads": keys.uniform_size(key::KV_HEADS)?,
        "head_dim": width,
        "sliding_window": window,
        "layer_types": layer_types(&slides),
        "gating": if by_element { "per-element" } else { "per-head" },
    });
    add(config, entries);
    Ok(())
}
