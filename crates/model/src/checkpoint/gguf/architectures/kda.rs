//! Architectures of Kimi Delta Attention (KDA), with latent attention in some layers.
//!
//! Layers of KDA have no KV heads in the list of the metadata.

use moeflux_base::Error;
use serde_json::json;

use super::{
    super::{
        config::{Config, Keys, add},
        names::{NameRow, row},
    },
    architecture::{GgufArchitecture, PLAIN, SHARED_EXPERTS},
    experts::SIGMOID,
    latent::{PROJECTIONS, latent},
};

pub(super) const ARCHITECTURES: [GgufArchitecture; 2] = [
    GgufArchitecture {
        name: "bailingmoe3",
        model_types: &["bailing_hybrid"],
        rows: &[LING, SHARED_EXPERTS],
        config: bailing_hybrid,
        ..PLAIN
    },
    GgufArchitecture {
        name: "kimi-linear",
        model_types: &["kimi_linear"],
        rows: &[KIMI, KDA, PROJECTIONS, SHARED_EXPERTS],
        config: kimi_linear,
        ..PLAIN
    },
];

/// Projections, convolutions and gates of KDA.
pub(super) const KDA: &[NameRow] = &[
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

/// Both kinds of attention of Ling, and its router.
const LING: &[NameRow] = &[
    row("attn_q", "attention.q_proj"),
    row("attn_k", "attention.k_proj"),
    row("attn_v", "attention.v_proj"),
    row("attn_output", "attention.o_proj"),
    row("ssm_conv1d_q", "attention.q_conv1d"),
    row("ssm_conv1d_k", "attention.k_conv1d"),
    row("ssm_conv1d_v", "attention.v_conv1d"),
    row("ssm_f_a", "attention.f_proj"),
    row("ssm_g_a", "attention.g_proj"),
    row("ssm_beta", "attention.b_proj"),
    row("ssm_a", "attention.A_log"),
    row("ssm_dt.bias", "attention.dt_bias"),
    row("ssm_norm", "attention.o_norm"),
    row("attn_gate", "attention.g_proj"),
    row("attn_q_a", "attention.q_a_proj"),
    row("attn_q_a_norm", "attention.q_a_layernorm"),
    row("attn_q_b", "attention.q_b_proj"),
    row("attn_kv_a_mqa", "attention.kv_a_proj_with_mqa"),
    row("attn_kv_a_norm", "attention.kv_a_layernorm"),
    row("attn_k_b", "attention.embed_q"),
    row("attn_v_b", "attention.unembed_out"),
    row("exp_probs_b.bias", "mlp.gate.expert_bias"),
];

const KIMI: &[NameRow] = &[row("exp_probs_b.bias", "mlp.e_score_correction_bias")];

/// Key of the KV heads by layer.
const KV_HEADS: &str = "attention.head_count_kv";

/// Whether each layer has KDA.
pub(super) fn linear_layers(keys: &Keys<'_>) -> Result<Vec<bool>, Error> {
    let heads = keys.per_layer(KV_HEADS)?.ok_or_else(|| keys.missing(KV_HEADS))?;
    Ok(heads.into_iter().map(|heads| heads == 0).collect())
}

/// Layers of a group, of which the last one has latent attention. In those after the last whole
/// group the tensors decide.
fn group_size(keys: &Keys<'_>, linear: &[bool]) -> Result<usize, Error> {
    let group = linear.iter().position(|linear| !linear).unwrap_or(linear.len()) + 1;
    let mut groups = linear.chunks_exact(group);
    let is_whole = |layers: &[bool]| layers.iter().position(|linear| !linear) == Some(group - 1);
    match groups.all(is_whole) {
        true => Ok(group),
        false => {
            let problem = format!("is 0 in other layers than all but the last of every {group}");
            Err(keys.problem(KV_HEADS, &problem))
        }
    }
}

/// Bound of the logarithm of decays.
pub(super) fn lower_bound(keys: &Keys<'_>) -> Result<f64, Error> {
    let name = "kda.gate_lower_bound";
    keys.number(name)?.ok_or_else(|| keys.missing(name))
}

fn bailing_hybrid(keys: &Keys<'_>) -> Result<Config, Error> {
    let sections = "rope.dimension_sections";
    if keys.has_key(sections) {
        let problem = "is that of a model with vision, whose RoPE is not read";
        return Err(keys.problem(sections, problem));
    }
    let mut config = latent(keys, "bailing_hybrid", SIGMOID)?;
    let entries = json!({
        "linear_head_dim": keys.size("kda.head_dim")?,
        "layer_group_size": group_size(keys, &linear_layers(keys)?)?,
        "short_conv_kernel_size": keys.size("ssm.conv_kernel")?,
        "kda_safe_gate": keys.flag("kda.safe_gate")?.unwrap_or(true),
        "kda_lower_bound": lower_bound(keys)?,
        "no_kda_lora": true,
        "gated_attention_proj_granularity_type": "head_wise",
        // Of one shared expert.
        "moe_shared_expert_intermediate_size": keys.uniform("expert_shared_feed_forward_length")?,
        "expert_swiglu_limit_list": keys.floats_per_layer("swiglu_clamp_exp")?,
        "share_expert_swiglu_limit_list": keys.floats_per_layer("swiglu_clamp_shexp")?,
    });
    add(&mut config, entries);
    Ok(config)
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
