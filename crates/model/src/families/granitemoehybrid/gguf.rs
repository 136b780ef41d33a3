//! Keys and names of tensors in GGUF.

use super::super::granitemoe::gguf::{FACTORS, ROUTER, SHARED_NAMES};
use crate::parts::gguf::{
    mamba2::{HAS_ROPE, MixerSizes, write_mamba2},
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "granitehybrid",
    models: "Granite 4.0 H Small and Tiny, with experts",
    model_types: &["granitemoehybrid"],
    keys: &[&[reads(check_experts)], MODEL, HEADS, EXPERT_AS_MLP, LOCAL_EXPERTS, FACTORS, KEYS],
    names: &[NAMES, ROUTER, BLOCK_SPARSE, SHARED_NAMES],
    pairs_adjacent: true,
    ..PLAIN
}];

const KEYS: &[KeyRow] = &[
    group(Place::Recurrent, read_layers, write_mamba2),
    uniform("shared_intermediate_size", "expert_shared_feed_forward_length").needed(),
    reads(read_mixers),
];

/// Mixers.
const NAMES: &[NameRow] = &[
    row("ssm_in", "mamba.in_proj"),
    row("ssm_conv1d", "mamba.conv1d"),
    row("ssm_a", "mamba.A_log"),
    row("ssm_d", "mamba.D"),
    row("ssm_dt.bias", "mamba.dt_bias"),
    row("ssm_norm", "mamba.norm"),
    row("ssm_out", "mamba.out_proj"),
];

fn check_experts(keys: &Keys<'_>, _: &mut Config) -> Result<(), Error> {
    match keys.integer(key::EXPERTS)?.unwrap_or(0) {
        0 => Err(keys.problem(key::EXPERTS, "is 0: Granite 4 without experts is not read")),
        _ => Ok(()),
    }
}

/// Layers of Mamba-2 have no KV heads.
fn read_layers(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let heads = keys.each_layer(key::KV_HEADS)?;
    let kind = |heads| if heads == 0 { "mamba" } else { "attention" };
    let has_rope = keys.flag(HAS_ROPE)?.unwrap_or(true);
    let entries = json!({
        "layer_types": heads.into_iter().map(kind).collect::<Vec<_>>(),
        "position_embedding_type": if has_rope { "rope" } else { "nope" },
    });
    add(config, entries);
    Ok(())
}

fn read_mixers(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let sizes = MixerSizes::read(keys)?;
    let entries = json!({
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_width,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state_width,
        "mamba_d_conv": sizes.conv_width,
        "mamba_expand": keys.size(key::STATE_INNER)? / keys.size(key::HIDDEN)?,
        "mamba_conv_bias": sizes.conv_bias,
    });
    add(config, entries);
    Ok(())
}
