//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    experts::{DENSE_LAYERS, SHARED_WIDTH},
    prelude::*,
};

/// RoPE is without scaling: the converter puts it into the base.
pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "hunyuan-moe",
    models: "Hunyuan-A13B",
    model_types: &["hunyuan_v1_moe"],
    keys: &[MODEL, HEADS, KEYS],
    names: &[NAMES, SHARED_MLP],
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    MLP_WIDTH.unread(),
    // Of one shared expert; files have the width of all.
    uniform("intermediate_size", "expert_shared_feed_forward_length").needed(),
    EXPERT_WIDTH,
    size("num_experts", "expert_count"),
    size("moe_topk", "expert_used_count"),
    integer("num_shared_expert", "expert_shared_count"),
    fixed("use_qk_norm", Fixed::Flag(true)),
    NORMALIZED.unread(),
    ROUTED_SCALE.unread(),
    DENSE_LAYERS,
    SHARED_WIDTH,
];

const NAMES: &[NameRow] = &[
    row("attn_q_norm", "self_attn.query_layernorm"),
    row("attn_k_norm", "self_attn.key_layernorm"),
    row("ffn_gate_inp", "mlp.gate.wg"),
];
