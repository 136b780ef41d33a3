//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    kda::{KDA, linear_layers, write_kda},
    latent::{LATENT, PROJECTIONS},
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "kimi-linear",
    models: "Kimi-Linear",
    model_types: &["kimi_linear"],
    keys: &[MODEL, GROUPED_SIZES, ROUTER, LATENT, KEYS],
    names: &[NAMES, KDA, PROJECTIONS, SHARED_EXPERTS],
    ..PLAIN
}];

const ROUTER: &[KeyRow] = &[
    SIGMOID_SCORES,
    // llama.cpp always normalizes.
    fixed("norm_topk_prob", Fixed::Flag(true)),
    ROUTED_SCALE,
];

const KEYS: &[KeyRow] =
    &[group(Place::Recurrent, read_kda, write_kda), fixed("mla_use_nope", Fixed::Flag(true))];

const NAMES: &[NameRow] = &[row("exp_probs_b.bias", "mlp.e_score_correction_bias")];

/// The bound of the decay is not in the file: llama.cpp has none.
fn read_kda(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let linear = linear_layers(keys)?;
    // Counted from 1.
    let layers = |is_linear| -> Vec<usize> {
        let layers = linear.iter().zip(1..);
        layers.filter(|(linear, _)| **linear == is_linear).map(|(_, layer)| layer).collect()
    };
    let entries = json!({
        "linear_attn_config": {
            "num_heads": keys.uniform_size(key::HEADS)?,
            "head_dim": keys.size(key::KDA_WIDTH)?,
            "short_conv_kernel_size": keys.size(key::TAPS)?,
            "kda_layers": layers(true),
            "full_attn_layers": layers(false),
        },
    });
    add(config, entries);
    Ok(())
}
