//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{heads::WINDOWS_BEFORE_FULL, prelude::*};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "afmoe",
    models: "Trinity",
    model_types: &["afmoe"],
    keys: &[
        MODEL,
        HEADS,
        GROUPED_SIZES,
        SIGMOID_ROUTER,
        WINDOWS_BEFORE_FULL,
        // llama.cpp always scales the embedding.
        &[fixed("mup_enabled", Fixed::Flag(true))],
    ],
    names: &[NAMES, EXPERTS, SHARED_EXPERTS],
    ..PLAIN
}];

/// A gate beside the queries, and norms after the parts.
const NAMES: &[NameRow] = &[
    row("attn_gate", "self_attn.gate_proj"),
    row("post_attention_norm", "post_attention_layernorm"),
    row("ffn_norm", "pre_mlp_layernorm"),
    row("post_ffw_norm", "post_mlp_layernorm"),
    row("ffn_gate_inp", "mlp.router.gate"),
    row("exp_probs_b.bias", "mlp.expert_bias"),
];
