//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    experts::{SHARED_WIDTH, SIGMOID, scores},
    heads::WINDOWS_AFTER_FULL,
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "cohere2moe",
    models: "Command-A+",
    model_types: &["cohere2_moe"],
    keys: &[MODEL, HEADS, GROUPED_SIZES, SIGMOID_ROUTER, WINDOWS_AFTER_FULL, KEYS],
    names: &[SHARED_EXPERTS],
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    // Of one expert.
    uniform("intermediate_size", "expert_feed_forward_length").needed(),
    uniform("prefix_dense_intermediate_size", "feed_forward_length"),
    reads(|keys, config| {
        config.insert("expert_selection_fn".into(), scores(keys, SIGMOID)?.into());
        Ok(())
    }),
    number("logit_scale", "logit_scale").needed(),
    SHARED_WIDTH,
];
