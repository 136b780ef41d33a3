//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    experts::{ONE_SHARED, ROUTER_NORMALIZES},
    heads::WINDOWS_BEFORE_FULL,
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "kolibri1",
    models: "Kolibri-1",
    model_types: &["kolibri1"],
    keys: &[
        MODEL,
        HEADS,
        GROUPED_SIZES,
        SIGMOID_ROUTER,
        &[ROUTER_NORMALIZES],
        ONE_SHARED,
        WINDOWS_BEFORE_FULL,
    ],
    names: &[NAMES, SHARED_EXPERTS],
    ..PLAIN
}];

/// Norms after the parts, and the correction, which the Hub has in another module than the router.
const NAMES: &[NameRow] = &[
    row("post_attention_norm", "post_attn_norm"),
    row("post_ffw_norm", "post_ffn_norm"),
    row("exp_probs_b.bias", "moe.router.expert_bias"),
];
