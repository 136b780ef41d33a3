//! Keys and names of tensors in GGUF.

use crate::parts::gguf::prelude::*;

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "ernie4_5-moe",
    models: "ERNIE 4.5",
    model_types: &["ernie4_5_moe"],
    keys: &[MODEL, HEADS, GROUPED_SIZES, SOFTMAX_ROUTER, KEYS],
    names: &[NAMES, SHARED_EXPERTS],
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    // llama.cpp always normalizes.
    fixed("norm_topk_prob", Fixed::Flag(true)),
    integer("moe_layer_start_index", "leading_dense_block_count").or(Fixed::Integer(0)),
    integer("moe_layer_interval", "interleave_moe_layer_step"),
    reads(|keys, config| {
        let last = keys.sparse_layers()?.iter().rposition(|sparse| *sparse == 1);
        add(config, json!({ "moe_layer_end_index": last }));
        Ok(())
    }),
];

const NAMES: &[NameRow] = &[row("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias")];
