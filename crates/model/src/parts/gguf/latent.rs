//! Keys and names of latent attention, and of its indexer.

use moeflux_base::Error;
use serde_json::{Value, json};

use super::{
    key,
    row::{KeyRow, group, integer, size, uniform},
    writer::{KeyValue, KeyWriter, Place},
};
use crate::checkpoint::gguf::{
    keys::{Config, Keys, add},
    names::{NameRow, row},
};

/// Latent attention with its indexer.
pub(crate) const PROJECTIONS: &[NameRow] = &[
    row("attn_q_a", "self_attn.q_a_proj"),
    row("attn_q_a_norm", "self_attn.q_a_layernorm"),
    row("attn_q_b", "self_attn.q_b_proj"),
    row("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    row("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    row("attn_kv_b", "self_attn.kv_b_proj"),
    // `kv_b_proj` in two: by head, transposed, and by head.
    row("attn_k_b", "self_attn.embed_q"),
    row("attn_v_b", "self_attn.unembed_out"),
    row("indexer.attn_q_b", "self_attn.indexer.wq_b"),
    row("indexer.attn_k", "self_attn.indexer.wk"),
    row("indexer.k_norm", "self_attn.indexer.k_norm"),
    row("indexer.proj", "self_attn.indexer.weights_proj"),
];

/// Keys of latent attention.
pub(crate) const LATENT: &[KeyRow] = &[
    uniform("num_attention_heads", "attention.head_count").needed(),
    integer("q_lora_rank", "attention.q_lora_rank"),
    size("kv_lora_rank", "attention.kv_lora_rank"),
    group(Place::Heads, read_widths, write_widths),
    group(Place::Rope, read_multiplier, write_multiplier),
];

fn read_widths(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    // Old files have the widths of heads where newer ones have the widths of the latent.
    let width = |name: &str| -> Result<u64, Error> {
        match keys.integer(&format!("attention.{name}_mla"))? {
            Some(width) => Ok(width),
            None => keys.size(&format!("attention.{name}")),
        }
    };
    let name = key::ROTATED;
    let rotated = keys.integer(name)?.ok_or_else(|| keys.missing(name))?;
    let plain = width("key_length")?.checked_sub(rotated);
    let plain = plain.ok_or_else(|| keys.problem(name, "exceeds the width of keys"))?;
    let entries = json!({
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rotated,
        "v_head_dim": width("value_length")?,
    });
    add(config, entries);
    Ok(())
}

fn write_widths(keys: &mut KeyWriter<'_>) {
    let [latent, rope, nope, value] =
        ["kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"]
            .map(|name| keys.size(name));
    for (name, n) in [
        // The latent counts as one KV head.
        (key::KV_HEADS, 1),
        (key::KEY_WIDTH, latent + rope),
        (key::VALUE_WIDTH, latent),
        ("attention.key_length_mla", nope + rope),
        ("attention.value_length_mla", value),
        (key::ROTATED, rope),
    ] {
        keys.push(name, KeyValue::U32(n));
    }
}

const MULTIPLIER: &str = "rope.scaling.yarn_log_multiplier";

/// Factor of the multiplier, of the logarithm of YaRN's factor.
const LOG_FACTOR: f64 = 0.1;

/// Scaling of RoPE in a config, if it is YaRN.
pub(crate) fn yarn(config: &mut Config) -> Option<&mut Config> {
    let scaling = config.get_mut("rope_scaling")?.as_object_mut()?;
    scaling.get("rope_type").is_some_and(|kind| kind == "yarn").then_some(scaling)
}

fn read_multiplier(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    if let Some(scaling) = yarn(config) {
        // Of all published models, both factors are equal.
        let mscale = keys.factor(MULTIPLIER)? / LOG_FACTOR;
        add(scaling, json!({"mscale": mscale, "mscale_all_dim": mscale}));
    }
    Ok(())
}

fn write_multiplier(keys: &mut KeyWriter<'_>) {
    let scaling = ["rope_scaling", "rope_parameters"].map(|name| &keys.config[name]);
    let scale = scaling.iter().find_map(|scaling| scaling["mscale_all_dim"].as_f64());
    if let Some(scale) = scale {
        keys.push(MULTIPLIER, KeyValue::F32(LOG_FACTOR as f32 * scale as f32));
    }
}

/// Sizes of the indexer.
pub(crate) const INDEXER_SIZES: &[KeyRow] = &[
    size("index_n_heads", "attention.indexer.head_count"),
    size("index_head_dim", "attention.indexer.key_length"),
    size("index_topk", "attention.indexer.top_k"),
];

/// Layers with an indexer, and layers that take the choice of the layer before.
pub(crate) const INDEXER_TYPES: KeyRow = group(
    Place::Layers,
    |keys, config| {
        let types = keys.per_layer(TYPES)?.map(indexer_types);
        add(config, json!({ "indexer_types": types }));
        Ok(())
    },
    write_indexer_types,
);

const TYPES: &str = "attention.indexer.types";

fn indexer_types(types: Vec<u64>) -> Vec<&'static str> {
    types.into_iter().map(|full| if full == 0 { "shared" } else { "full" }).collect()
}

/// Types of the indexers of the first layers, of a list that may go on.
pub(crate) fn first_indexer_types(keys: &Keys<'_>) -> Result<Option<Value>, Error> {
    let types = keys.has_key(TYPES).then(|| keys.first_layers(TYPES)).transpose()?;
    Ok(types.map(|types| indexer_types(types).into()))
}

pub(crate) fn write_indexer_types(keys: &mut KeyWriter<'_>) {
    if let Some(full) = keys.layer_flags("indexer_types", "full") {
        keys.push(TYPES, KeyValue::Bools(full));
    }
}
