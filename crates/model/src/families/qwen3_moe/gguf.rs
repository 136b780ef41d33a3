//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{experts::DENSE_LAYERS, prelude::*};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "qwen3moe",
    models: "Qwen3",
    model_types: &["qwen3_moe"],
    keys: &[MODEL, HEADS, SOFTMAX_EXPERTS, &[DENSE_LAYERS]],
    ..PLAIN
}];
