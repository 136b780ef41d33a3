//! Keys and names of tensors in GGUF.

use crate::parts::gguf::prelude::*;

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "granitemoe",
    models: "Granite-3.0 and 3.1 MoE, with shared experts, too",
    model_types: &["granitemoe", "granitemoeshared"],
    keys: &[MODEL, HEADS, EXPERT_AS_MLP, LOCAL_EXPERTS, FACTORS, SHARED],
    names: &[ROUTER, BLOCK_SPARSE, SHARED_NAMES],
    pairs_adjacent: true,
    ..PLAIN
}];

/// Constant factors on the embedding, the scores, each sub-block and the logits.
pub(in super::super) const FACTORS: &[KeyRow] = &[
    number("embedding_multiplier", "embedding_scale").needed(),
    number("attention_multiplier", "attention.scale").needed(),
    number("residual_multiplier", "residual_scale").needed(),
    // A divisor.
    number("logits_scaling", "logit_scale").needed(),
];

pub(in super::super) const ROUTER: &[NameRow] =
    &[row("ffn_gate_inp", "block_sparse_moe.router.layer")];

const SHARED: &[KeyRow] =
    &[uniform("shared_intermediate_size", "expert_shared_feed_forward_length")];

pub(in super::super) const SHARED_NAMES: &[NameRow] = &[
    row("ffn_gate_shexp", "shared_mlp.gate_proj"),
    row("ffn_up_shexp", "shared_mlp.up_proj"),
    row("ffn_down_shexp", "shared_mlp.down_proj"),
];
