//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    delta_net::{DELTA_NET, DELTA_NETS},
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "qwen35moe",
    models: "Qwen3.5 and 3.6",
    model_types: &["qwen3_5_moe"],
    keys: &[MODEL, HEADS, SOFTMAX_EXPERTS, DELTA_NETS],
    names: &[DELTA_NET, POST_ATTENTION_NORM, SHARED_EXPERT],
    value_heads_dealt: true,
    ..PLAIN
}];
