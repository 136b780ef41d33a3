//! Keys and names of tensors in GGUF.

use crate::parts::gguf::prelude::*;

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "olmoe",
    models: "OLMoE",
    model_types: &["olmoe"],
    keys: &[MODEL, HEADS, &[size("num_experts", "expert_count"), TOP_K], EXPERT_AS_MLP, ROUTER],
    ..PLAIN
}];

const ROUTER: &[KeyRow] = &[
    NORMALIZED.unread(),
    // llama.cpp never normalizes.
    fixed("norm_topk_prob", Fixed::Flag(false)),
];
