//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    kda::{KDA, linear_layers, write_kda, write_lower_bound},
    latent::{INDEXER_SIZES, LATENT, PROJECTIONS, first_indexer_types, write_indexer_types},
    prelude::*,
    streams::{CLAMP, HYPER_CONNECTIONS, STREAMS},
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "glm5-next",
    models: "GLM-5.3-Flash",
    model_types: &["glm5_next"],
    keys: &[
        MODEL,
        GROUPED_SIZES,
        SIGMOID_ROUTER,
        LATENT,
        HYPER_CONNECTIONS,
        &[group(Place::Recurrent, read_kda, |keys| {
            write_kda(keys);
            write_lower_bound(keys);
        })],
        INDEXER_SIZES,
        &[
            size("index_kpool", "attention.indexer.kpool"),
            group(Place::Layers, read_indexers, write_indexers),
            CLAMP,
        ],
    ],
    names: &[NAMES, STREAMS, KDA, PROJECTIONS, SHARED_EXPERTS],
    ..PLAIN
}];

/// Pools of positions that an indexer chooses from.
const NAMES: &[NameRow] = &[
    row("indexer_compressor_gate.weight", "self_attn.indexer.index_kpool_compress_gate"),
    row("indexer_compressor_ape.weight", "self_attn.indexer.index_kpool_compress_ape"),
];

fn read_kda(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let kind = |linear| if linear { "linear_attention" } else { "deepseek_sparse_attention" };
    let entries = json!({
        "layer_types": linear_layers(keys)?.into_iter().map(kind).collect::<Vec<_>>(),
        "linear_attn_config": {
            "num_heads": keys.uniform_size(key::HEADS)?,
            "head_dim": keys.size(key::KDA_WIDTH)?,
            "short_conv_kernel_size": keys.size(key::TAPS)?,
            "gate_lower_bound": keys.factor(key::LOWER_BOUND)?,
        },
    });
    add(config, entries);
    Ok(())
}

/// Whether the pool of the last positions is always chosen: in the config and in the file.
const SELECTS_TAIL: [&str; 2] =
    ["index_kpool_always_select_tail", "attention.indexer.kpool_select_tail"];

fn read_indexers(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let [tail, key] = SELECTS_TAIL;
    let entries = json!({ tail: keys.flag(key)?, "indexer_types": first_indexer_types(keys)? });
    add(config, entries);
    Ok(())
}

fn write_indexers(keys: &mut KeyWriter<'_>) {
    write_indexer_types(keys);
    let [tail, key] = SELECTS_TAIL;
    if let Some(selects) = keys.config[tail].as_bool() {
        keys.push(key, KeyValue::Bool(selects));
    }
}
