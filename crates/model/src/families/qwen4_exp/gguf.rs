//! Keys and names of tensors in GGUF.

use crate::{
    blueprint::MixerBlueprint,
    parts::gguf::{
        delta_net::{DELTA_NET, DELTA_NETS},
        prelude::*,
    },
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "qwen4exp",
    models: "Qwen3.8-Flash-Next; rows of its n-gram table stay in the file, in any type",
    model_types: &["qwen4_exp"],
    keys: &[MODEL, HEADS, SOFTMAX_EXPERTS, DELTA_NETS, KEYS],
    names: &[NAMES, DELTA_NET, SHARED_EXPERT],
    value_heads_dealt: true,
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    size("hc_count", "hyper_connection.count"),
    size("hc_lowrank", "hyper_connection.low_rank"),
    size("indexer_n_heads", "attention.indexer.head_count"),
    fixed("indexer_kv_heads", Fixed::Integer(1)),
    size("indexer_head_dim", "attention.indexer.key_length"),
    size("indexer_budget", "attention.indexer.top_k"),
    group(Place::Memory, read_ratio, write_ratios),
    group(Place::Memory, read_memory, write_memory),
];

/// Residual streams, the indexer and the memory of n-grams.
const NAMES: &[NameRow] = &[
    row("output_hc_norm.weight", "model.hyper_connection_mixer.hc_norm.weight"),
    row("output_hc_down.weight", "model.hyper_connection_mixer.input_mix_weight_down.weight"),
    row("output_hc_up.weight", "model.hyper_connection_mixer.input_mix_weight_up.weight"),
    row("per_layer_token_embd.weight", "model.ngram_embedding.weight"),
    row("hc_attn_norm", "attn_hyper_connection.hc_norm"),
    row("hc_attn_down", "attn_hyper_connection.input_mix_weight_down"),
    row("hc_attn_up", "attn_hyper_connection.input_mix_weight_up"),
    row("hc_attn_inject", "attn_hyper_connection.block_inject_weight"),
    row("hc_ffn_norm", "mlp_hyper_connection.hc_norm"),
    row("hc_ffn_down", "mlp_hyper_connection.input_mix_weight_down"),
    row("hc_ffn_up", "mlp_hyper_connection.input_mix_weight_up"),
    row("hc_ffn_inject", "mlp_hyper_connection.block_inject_weight"),
    row("indexer.q_proj", "self_attn.indexer.index_q_proj"),
    row("indexer.k_proj", "self_attn.indexer.index_k_proj"),
    row("indexer.q_norm", "self_attn.indexer.q_layernorm"),
    row("indexer.k_norm", "self_attn.indexer.k_layernorm"),
    row("ple_key", "ple.key_proj"),
    row("ple_value", "ple.value_proj"),
    row("ple_norm_key", "ple.norm_key"),
    row("ple_norm_query", "ple.norm_query"),
    row("ple_norm_conv", "ple.norm_conv"),
    row("ple_conv1d", "ple.conv1d"),
];

/// Positions in a block of the published model. The converter writes 0 with releases of
/// transformers that rename full attention.
const BLOCK_POSITIONS: u64 = 4;

fn read_ratio(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let mut ratios = keys.first_layers(key::COMPRESS_RATIOS)?;
    ratios.retain(|ratio| *ratio > 0);
    let ratio = ratios.first().copied().unwrap_or(BLOCK_POSITIONS);
    if ratios.iter().any(|other| *other != ratio) {
        return Err(keys.problem(key::COMPRESS_RATIOS, "differs between layers, which is not read"));
    }
    config.insert("indexer_compress_ratio".into(), ratio.into());
    Ok(())
}

fn write_ratios(keys: &mut KeyWriter<'_>) {
    if keys.blueprint.memories().next().is_none() {
        return;
    }
    let ratio = keys.config["indexer_compress_ratio"].as_u64().unwrap_or(0) as i32;
    let of_layer = |mixer| if matches!(mixer, Some(&MixerBlueprint::Gqa(_))) { ratio } else { 0 };
    let ratios = keys.mixers().map(of_layer).collect();
    keys.push(key::COMPRESS_RATIOS, KeyValue::I32s(ratios));
}

const LAYERS: &str = "ple.layers";
const SIZE: &str = "ple.ngram_size";
const HEADS_PER_NGRAM: &str = "ple.heads_per_ngram";
const CONV: &str = "ple.conv_kernel";
const END: &str = "ple.eos_token_id";
const MULTIPLIERS: &str = "ple.layer_multipliers";
const OFFSETS: &str = "ple.head_offsets";
const SIZES: &str = "ple.head_vocab_sizes";

/// The memory of n-grams, which one layer has.
fn read_memory(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let layers = keys.integers(LAYERS)?.unwrap_or_default();
    let layer = match layers[..] {
        [] => return Ok(()),
        [layer] => layer,
        _ => return Err(keys.problem(LAYERS, "names several layers, of which one is read")),
    };
    let (size, heads) = (keys.size(SIZE)?, keys.size(HEADS_PER_NGRAM)?);
    let width = keys.size(key::PER_LAYER_INPUT)?;
    let needed = |name: &str| keys.integers(name)?.ok_or_else(|| keys.missing(name));
    let entries = json!({
        // Counted from 1.
        "ple_layer_ids": [layer.saturating_add(1)],
        "ple_embed_dim": width.saturating_mul(heads).saturating_mul(size.saturating_sub(1)),
        "ple_conv_kernel_size": keys.size(CONV)?,
        "ngram_size": size,
        "heads_per_ngram": heads,
        "eos_token_id": keys.integer(END)?.ok_or_else(|| keys.missing(END))?,
        "gguf_ngram_constants": {
            "multipliers": needed(MULTIPLIERS)?,
            "offsets": needed(OFFSETS)?,
            "sizes": needed(SIZES)?,
            "rows": keys.rows("per_layer_token_embd.weight").unwrap_or(0),
        },
    });
    add(config, entries);
    Ok(())
}

fn write_memory(keys: &mut KeyWriter<'_>) {
    let Some((layer, memory)) = keys.blueprint.memories().next() else { return };
    keys.push(LAYERS, KeyValue::I32s(vec![layer as i32]));
    for (config, name) in [
        ("ngram_size", SIZE),
        ("heads_per_ngram", HEADS_PER_NGRAM),
        ("ple_conv_kernel_size", CONV),
        ("eos_token_id", END),
    ] {
        let n = keys.config[config].as_u64().unwrap_or(0) as u32;
        keys.push(name, KeyValue::U32(n));
    }
    keys.push_integer(key::PER_LAYER_INPUT, memory.table.width);
    for (name, numbers) in [
        (MULTIPLIERS, memory.hash.multipliers()),
        (OFFSETS, memory.hash.offsets()),
        (SIZES, memory.hash.sizes()),
    ] {
        let numbers = numbers.into_iter().map(i64::cast_unsigned).collect();
        keys.push(name, KeyValue::U64s(numbers));
    }
}
