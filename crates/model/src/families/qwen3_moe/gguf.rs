//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{experts::DENSE_LAYERS, prelude::*};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[
    GgufArchitecture {
        name: "qwen3moe",
        models: "Qwen3",
        model_types: &["qwen3_moe"],
        keys: KEYS,
        ..PLAIN
    },
    GgufArchitecture {
        name: "qwen3vlmoe",
        models: "Qwen3-VL and Qwen3-Omni; text only",
        model_types: &["qwen3_vl_moe", "qwen3_omni_moe"],
        keys: KEYS,
        ..PLAIN
    },
];

const KEYS: &[&[KeyRow]] = &[MODEL, HEADS, SOFTMAX_EXPERTS, &[DENSE_LAYERS]];
