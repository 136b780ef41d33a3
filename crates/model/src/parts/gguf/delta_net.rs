//! Keys and names of delta-nets in some layers.

use moeflux_base::Error;
use serde_json::json;

use super::{
    heads::rotated_share,
    key,
    row::{Fixed, KeyRow, group, integer, reads, size, uniform},
    writer::{KeyValue, KeyWriter, Place},
};
use crate::checkpoint::gguf::{
    keys::{Config, Keys, add},
    names::{NameRow, row},
};

/// Projections, convolutions and gates of delta-nets.
pub(crate) const DELTA_NET: &[NameRow] = &[
    row("attn_qkv", "linear_attn.in_proj_qkv"),
    row("attn_gate", "linear_attn.in_proj_z"),
    row("ssm_ba", "linear_attn.in_proj_ba"),
    row("ssm_alpha", "linear_attn.in_proj_a"),
    row("ssm_beta", "linear_attn.in_proj_b"),
    row("ssm_a", "linear_attn.A_log"),
    row("ssm_dt.bias", "linear_attn.dt_bias"),
    row("ssm_dt", "linear_attn.dt_bias"),
    row("ssm_conv1d", "linear_attn.conv1d"),
    row("ssm_norm", "linear_attn.norm"),
    row("ssm_out", "linear_attn.out_proj"),
];

/// Sizes of delta-nets, and of the shared expert that every model with them has.
pub(crate) const DELTA_NETS: &[KeyRow] = &[
    uniform("shared_expert_intermediate_size", "expert_shared_feed_forward_length")
        .or(Fixed::Integer(0)),
    reads(|keys, config| {
        let share = rotated_share(keys, keys.size(key::KEY_WIDTH)?)?;
        config.insert("partial_rotary_factor".into(), share.into());
        Ok(())
    }),
    group(Place::Layers, read_layers, write_layers),
    integer("full_attention_interval", "full_attention_interval").or(Fixed::Integer(4)),
    size("linear_num_key_heads", "ssm.group_count"),
    size("linear_num_value_heads", "ssm.time_step_rank"),
    size("linear_key_head_dim", "ssm.state_size"),
    group(Place::Heads, read_values, write_values),
    size("linear_conv_kernel_dim", "ssm.conv_kernel"),
];

const RECURRENT: &str = "attention.recurrent_layers";

fn read_layers(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let recurrent = keys.per_layer(RECURRENT)?.map(|layers| {
        let name = |recurrent| match recurrent {
            0 => "full_attention",
            _ => "linear_attention",
        };
        layers.into_iter().map(name).collect::<Vec<_>>()
    });
    add(config, json!({ "layer_types": recurrent }));
    Ok(())
}

fn write_layers(keys: &mut KeyWriter<'_>) {
    if let Some(recurrent) = keys.layer_flags("layer_types", "linear_attention") {
        keys.push(RECURRENT, KeyValue::Bools(recurrent));
    }
}

fn read_values(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let width = keys.size(key::STATE_INNER)? / keys.size(key::STATE_HEADS)?;
    config.insert("linear_value_head_dim".into(), width.into());
    Ok(())
}

fn write_values(keys: &mut KeyWriter<'_>) {
    if let Some(heads) = keys.integer("linear_num_value_heads") {
        keys.push(key::STATE_INNER, KeyValue::U32(heads * keys.size("linear_value_head_dim")));
    }
}
