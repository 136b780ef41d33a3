//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    experts::{SIGMOID, scores},
    heads::ROTATED_SHARE,
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[
    GgufArchitecture {
        name: "bailingmoe",
        models: "Ling 1.x",
        model_types: &["bailing_moe"],
        fits: |config| !config["score_function"].is_string(),
        keys: &[MODEL, HEADS, GROUPED_SIZES, SOFTMAX_ROUTER],
        names: &[NAMES, SHARED_EXPERTS],
        pairs_adjacent: true,
        ..PLAIN
    },
    GgufArchitecture {
        name: "bailingmoe2",
        models: "Ling 2.0, Sarvam-30B",
        model_types: &["bailing_moe_v2", "bailing_moe", "sarvam_moe"],
        keys: &[MODEL, HEADS, GROUPED_SIZES, SIGMOID_ROUTER, KEYS_OF_2],
        names: &[NAMES, SHARED_EXPERTS],
        ..PLAIN
    },
];

const KEYS_OF_2: &[KeyRow] = &[
    fixed("use_qk_norm", Fixed::Flag(true)),
    reads(|keys, config| {
        let has_bias = keys.has_like(".exp_probs_b.bias");
        let entries = json!({
            "score_function": scores(keys, SIGMOID)?,
            "moe_router_enable_expert_bias": has_bias.then_some(true),
        });
        add(config, entries);
        Ok(())
    }),
    // Of one shared expert.
    uniform("moe_shared_expert_intermediate_size", "expert_shared_feed_forward_length"),
    ROTATED_SHARE,
];

/// Attention and router.
const NAMES: &[NameRow] = &[
    row("attn_q", "attention.q_proj"),
    row("attn_k", "attention.k_proj"),
    row("attn_v", "attention.v_proj"),
    row("attn_output", "attention.dense"),
    row("attn_q_norm", "attention.query_layernorm"),
    row("attn_k_norm", "attention.key_layernorm"),
    row("exp_probs_b.bias", "mlp.gate.expert_bias"),
];
