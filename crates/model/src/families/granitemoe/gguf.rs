//! Keys and names of tensors in GGUF.

use crate::parts::gguf::prelude::*;

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "granitemoe",
    models: "Granite-3.0 and 3.1 MoE; without shared experts",
    model_types: &["granitemoe"],
    keys: &[&[reads(check_shared)], MODEL, HEADS, EXPERT_AS_MLP, LOCAL_EXPERTS, FACTORS],
    names: &[ROUTER, BLOCK_SPARSE],
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

fn check_shared(keys: &Keys<'_>, _: &mut Config) -> Result<(), Error> {
    let shared = key::SHARED_WIDTH;
    match keys.uniform(shared)?.filter(|width| *width > 0) {
        Some(width) => {
            Err(keys.problem(shared, &format!("is {width}: shared experts are not read")))
        }
        None => Ok(()),
    }
}
