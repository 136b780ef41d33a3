//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{experts::SHARED_WIDTH, prelude::*};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "hy_v3",
    models: "Hy3",
    model_types: &["hy_v3"],
    keys: &[MODEL, HEADS, GROUPED_SIZES, SIGMOID_ROUTER, &[reads(experts), SHARED_WIDTH]],
    names: &[NAMES, SHARED_MLP],
    ..PLAIN
}];

const NAMES: &[NameRow] = &[
    row("ffn_gate_inp", "mlp.router.gate"),
    row("exp_probs_b.bias", "mlp.expert_bias"),
    row("exp_probs_b", "mlp.expert_bias"),
];

fn experts(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let expert = keys.uniform_size(key::EXPERT_WIDTH)?;
    let shared = keys.uniform(key::SHARED_WIDTH)?.unwrap_or(0);
    let sparse = keys.sparse_layers()?;
    let entries = json!({
        "n_shared_experts": shared / expert,
        "first_k_dense_replace":
            sparse.iter().position(|sparse| *sparse == 1).unwrap_or(sparse.len()),
    });
    add(config, entries);
    Ok(())
}
