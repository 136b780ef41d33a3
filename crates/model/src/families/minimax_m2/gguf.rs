//! Keys and names of tensors in GGUF.

use crate::parts::gguf::prelude::*;

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "minimax-m2",
    models: "MiniMax-M2",
    model_types: &["minimax_m2"],
    keys: &[MODEL, HEADS, EXPERT_BY_NAME, LOCAL_EXPERTS, KEYS],
    names: &[NAMES, BLOCK_SPARSE],
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    SIGMOID_SCORES,
    integer("rotary_dim", "rope.dimension_count").at(Place::Heads),
    integer("shared_intermediate_size", "expert_shared_feed_forward_length").unread(),
];

const NAMES: &[NameRow] = &[row("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias")];
