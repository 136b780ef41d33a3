//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    heads::{FullLayer, WINDOW, read_kinds},
    prelude::*,
    streams::write_clamp,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "gpt-oss",
    models: "gpt-oss",
    model_types: &["gpt_oss"],
    keys: &[MODEL, HEADS, EXPERT_BY_NAME, LOCAL_EXPERTS, KEYS],
    names: &[NAMES, EXPERTS, POST_ATTENTION_NORM],
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    WINDOW,
    reads(|keys, config| {
        read_kinds(keys, config, 2, FullLayer::Last)?;
        // Not in the file.
        if let Some(scaling) = config.get_mut("rope_scaling").and_then(|s| s.as_object_mut()) {
            add(scaling, json!({"truncate": false}));
        }
        Ok(())
    }),
    writes(Place::Layers, write_clamp),
];

const NAMES: &[NameRow] =
    &[row("attn_sinks.weight", "self_attn.sinks"), row("ffn_gate_inp", "mlp.router")];
