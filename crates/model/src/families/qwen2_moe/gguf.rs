//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{heads::UNREAD_WINDOW, prelude::*};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "qwen2moe",
    models: "Qwen2-MoE",
    model_types: &["qwen2_moe"],
    keys: &[MODEL, HEADS, SOFTMAX_EXPERTS, KEYS],
    names: &[SHARED_EXPERT],
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    uniform("shared_expert_intermediate_size", "expert_shared_feed_forward_length")
        .or(Fixed::Integer(0)),
    // llama.cpp never normalizes.
    fixed("norm_topk_prob", Fixed::Flag(false)),
    UNREAD_WINDOW,
];
