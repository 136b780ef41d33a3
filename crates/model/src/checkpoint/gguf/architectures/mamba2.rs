//! Architectures with Mamba-2 in some layers.

use moeflux_base::Error;
use serde_json::json;

use super::{
    super::{
        config::{Config, Keys, add},
        names::{NameRow, row},
    },
    architecture::{BLOCK_SPARSE, GgufArchitecture, PLAIN},
    experts::grouped,
    uniform::{GRANITE, granite},
};

pub(super) const ARCHITECTURES: [GgufArchitecture; 2] = [
    GgufArchitecture {
        name: "granitehybrid",
        model_types: &["granitemoehybrid"],
        rows: &[GRANITE_HYBRID, GRANITE, BLOCK_SPARSE],
        pairs_adjacent: true,
        config: granite_hybrid,
        ..PLAIN
    },
    GgufArchitecture {
        name: "nemotron_h_moe",
        model_types: &["nemotron_h"],
        rows: &[NEMOTRON],
        config: nemotron_h,
        ..PLAIN
    },
];

/// Mixers and shared experts of Granite.
const GRANITE_HYBRID: &[NameRow] = &[
    row("ssm_in", "mamba.in_proj"),
    row("ssm_conv1d", "mamba.conv1d"),
    row("ssm_a", "mamba.A_log"),
    row("ssm_d", "mamba.D"),
    row("ssm_dt.bias", "mamba.dt_bias"),
    row("ssm_norm", "mamba.norm"),
    row("ssm_out", "mamba.out_proj"),
    row("ffn_gate_shexp", "shared_mlp.gate_proj"),
    row("ffn_up_shexp", "shared_mlp.up_proj"),
    row("ffn_down_shexp", "shared_mlp.down_proj"),
];

/// Layers of one part each.
const NEMOTRON: &[NameRow] = &[
    row("output_norm.weight", "model.norm_f.weight"),
    row("attn_norm", "norm"),
    row("attn_q", "mixer.q_proj"),
    row("attn_k", "mixer.k_proj"),
    row("attn_v", "mixer.v_proj"),
    row("attn_output", "mixer.o_proj"),
    row("ssm_in", "mixer.in_proj"),
    row("ssm_conv1d", "mixer.conv1d"),
    row("ssm_a", "mixer.A_log"),
    row("ssm_d", "mixer.D"),
    row("ssm_dt.bias", "mixer.dt_bias"),
    row("ssm_norm", "mixer.norm"),
    row("ssm_out", "mixer.out_proj"),
    row("ffn_gate_inp", "mixer.gate"),
    row("exp_probs_b.bias", "mixer.gate.e_score_correction_bias"),
    row("ffn_latent_down", "mixer.fc1_latent_proj"),
    row("ffn_latent_up", "mixer.fc2_latent_proj"),
    row("ffn_up_exps", "mixer.switch_mlp.fc1"),
    row("ffn_down_exps", "mixer.switch_mlp.fc2"),
    row("ffn_up_shexp", "mixer.shared_experts.up_proj"),
    row("ffn_down_shexp", "mixer.shared_experts.down_proj"),
    row("ffn_up", "mixer.up_proj"),
    row("ffn_down", "mixer.down_proj"),
];

/// Sizes of Mamba-2 mixers.
struct MixerSizes {
    heads: u64,
    head_width: u64,
    groups: u64,
    state_width: u64,
    conv_width: u64,
    /// Whether the convolution has a bias.
    conv_bias: bool,
}

impl MixerSizes {
    fn read(keys: &Keys<'_>) -> Result<Self, Error> {
        let heads = keys.size("ssm.time_step_rank")?;
        Ok(Self {
            heads,
            head_width: keys.size("ssm.inner_size")? / heads,
            groups: keys.size("ssm.group_count")?,
            state_width: keys.size("ssm.state_size")?,
            conv_width: keys.size("ssm.conv_kernel")?,
            conv_bias: keys.tensors.keys().any(|name| name.ends_with(".ssm_conv1d.bias")),
        })
    }
}

/// Layers of Mamba-2 have no KV heads.
fn granite_hybrid(keys: &Keys<'_>) -> Result<Config, Error> {
    if keys.integer("expert_count")?.unwrap_or(0) == 0 {
        return Err(keys.problem("expert_count", "is 0: Granite 4 without experts is not read"));
    }
    let mut config = granite(keys, "granitemoehybrid")?;
    let sizes = MixerSizes::read(keys)?;
    let (inner, hidden) = (keys.size("ssm.inner_size")?, keys.size("embedding_length")?);
    let name = "attention.head_count_kv";
    let heads = keys.per_layer(name)?.ok_or_else(|| keys.missing(name))?;
    let kind = |heads| if heads == 0 { "mamba" } else { "attention" };
    let has_rope = keys.flag("rope.scaling.finetuned")?.unwrap_or(true);
    let entries = json!({
        "layer_types": heads.into_iter().map(kind).collect::<Vec<_>>(),
        "position_embedding_type": if has_rope { "rope" } else { "nope" },
        "shared_intermediate_size": keys.uniform_size("expert_shared_feed_forward_length")?,
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_width,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state_width,
        "mamba_d_conv": sizes.conv_width,
        "mamba_expand": inner / hidden,
        "mamba_conv_bias": sizes.conv_bias,
    });
    add(&mut config, entries);
    Ok(config)
}

/// A letter for each layer, by the tensors that it has.
fn pattern(keys: &Keys<'_>) -> Result<String, Error> {
    let parts = [('M', "ssm_in"), ('*', "attn_output"), ('E', "ffn_gate_inp"), ('-', "ffn_up")];
    let letter = |layer: usize| {
        let has = |tensor: &str| keys.has(&format!("blk.{layer}.{tensor}.weight"));
        let part = parts.iter().find(|(_, tensor)| has(tensor));
        part.map(|(letter, _)| *letter).ok_or_else(|| {
            let tensors = parts.map(|(_, tensor)| tensor).join(", ");
            keys.metadata.error(format!("layer {layer} has none of the tensors {tensors}"))
        })
    };
    (0..keys.layers()?).map(letter).collect()
}

/// Experts without a gate, and MLPs in some models, of whose size the metadata have nothing.
fn nemotron_h(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = grouped(keys, "nemotron_h")?;
    let (sizes, pattern) = (MixerSizes::read(keys)?, pattern(keys)?);
    let mlp = pattern.find('-').and_then(|layer| {
        let up = keys.tensors.get(&format!("blk.{layer}.ffn_up.weight"));
        up.and_then(|up| up.shape.first())
    });
    let entries = json!({
        "hybrid_override_pattern": pattern,
        "intermediate_size": mlp.copied().unwrap_or(0),
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.head_width,
        "n_groups": sizes.groups,
        "ssm_state_size": sizes.state_width,
        "conv_kernel": sizes.conv_width,
        "use_conv_bias": sizes.conv_bias,
        // Not in the file: llama.cpp has none, as the published configs.
        "time_step_limit": [0.0, "Infinity"],
        "moe_shared_expert_intermediate_size": keys.uniform("expert_shared_feed_forward_length")?,
        "moe_latent_size": keys.integer("moe_latent_size")?.filter(|size| *size > 0),
    });
    add(&mut config, entries);
    Ok(config)
}
