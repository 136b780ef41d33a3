//! Architectures of Kimi Delta Attention (KDA), with latent attention in some layers.
//!
//! Layers of KDA have no KV heads in the list of the metadata.

use serde_json::json;

use super::{
    super::{
        config::{Config, Keys, add},
        names::{NameRow, row},
    },
    GgufArchitecture, PLAIN, SHARED_EXPERTS,
    experts::SIGMOID,
    latent::{PROJECTIONS, latent},
};
use crate::base::error::Error;

pub(super) const ARCHITECTURES: [GgufArchitecture; 1] = [GgufArchitecture {
    name: "kimi-linear",
    model_types: &["kimi_linear"],
    rows: &[KIMI, KDA, PROJECTIONS, SHARED_EXPERTS],
    config: kimi_linear,
    ..PLAIN
}];

/// Projections, convolutions and gates of KDA.
const KDA: &[NameRow] = &[
    row("ssm_conv1d_q", "self_attn.q_conv1d"),
    row("ssm_conv1d_k", "self_attn.k_conv1d"),
    row("ssm_conv1d_v", "self_attn.v_conv1d"),
    row("ssm_f_a", "self_attn.f_a_proj"),
    row("ssm_f_b", "self_attn.f_b_proj"),
    row("ssm_g_a", "self_attn.g_a_proj"),
    row("ssm_g_b", "self_attn.g_b_proj"),
    row("ssm_beta", "self_attn.b_proj"),
    row("ssm_a", "self_attn.A_log"),
    row("ssm_dt.bias", "self_attn.dt_bias"),
    row("ssm_norm", "self_attn.o_norm"),
];

const KIMI: &[NameRow] = &[row("exp_probs_b.bias", "mlp.e_score_correction_bias")];

/// Key of the KV heads by layer.
const KV_HEADS: &str = "attention.head_count_kv";

/// Whether each layer has KDA.
fn linear_layers(keys: &Keys<'_>) -> Result<Vec<bool>, Error> {
    let heads = keys.per_layer(KV_HEADS)?.ok_or_else(|| keys.missing(KV_HEADS))?;
    Ok(heads.into_iter().map(|heads| heads == 0).collect())
}

/// The bound of the decay is not in the file: llama.cpp has none.
fn kimi_linear(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = latent(keys, "kimi_linear", SIGMOID)?;
    let linear = linear_layers(keys)?;
    // Counted from 1.
    let layers = |is_linear| -> Vec<usize> {
        let layers = linear.iter().zip(1..);
        layers.filter(|(linear, _)| **linear == is_linear).map(|(_, layer)| layer).collect()
    };
    let entries = json!({
        "linear_attn_config": {
            "num_heads": keys.uniform_size("attention.head_count")?,
            "head_dim": keys.size("kda.head_dim")?,
            "short_conv_kernel_size": keys.size("ssm.conv_kernel")?,
            "kda_layers": layers(true),
            "full_attn_layers": layers(false),
        },
        "mla_use_nope": true,
        // Not in the file: llama.cpp always normalizes.
        "norm_topk_prob": true,
    });
    add(&mut config, entries);
    Ok(config)
}
