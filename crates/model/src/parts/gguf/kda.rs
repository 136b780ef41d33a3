//! Keys and names of Kimi Delta Attention (KDA), with latent attention in some layers.
//!
//! Layers of KDA have no KV heads in the list of the metadata.

use moeflux_base::Error;
use moeflux_ops::LogDecay;

use super::key;
use super::writer::{KeyValue, KeyWriter};
use crate::{
    blueprint::{DeltaNetBlueprint, MixerBlueprint},
    checkpoint::gguf::{
        keys::Keys,
        names::{NameRow, row},
    },
};

/// Projections, convolutions and gates of KDA.
pub(crate) const KDA: &[NameRow] = &[
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

/// Whether each layer has KDA.
pub(crate) fn linear_layers(keys: &Keys<'_>) -> Result<Vec<bool>, Error> {
    let heads = keys.each_layer(key::KV_HEADS)?;
    Ok(heads.into_iter().map(|heads| heads == 0).collect())
}

/// Sizes of KDA beside latent attention, which counts as one KV head.
pub(crate) fn write_kda(keys: &mut KeyWriter<'_>) {
    let Some(net) = delta_net(keys) else { return };
    let is_latent = |mixer: Option<&_>| !matches!(mixer, Some(MixerBlueprint::DeltaNet(_)));
    let heads = keys.mixers().map(|mixer| i32::from(is_latent(mixer))).collect();
    keys.push(key::KV_HEADS, KeyValue::I32s(heads));
    keys.push_integer(key::KDA_WIDTH, net.shape.key_width);
    keys.push_integer(key::TAPS, net.shape.conv_width);
}

pub(crate) fn write_lower_bound(keys: &mut KeyWriter<'_>) {
    if let Some(LogDecay::Bounded { bound }) = delta_net(keys).map(|net| &net.decay) {
        keys.push(key::LOWER_BOUND, KeyValue::F32(*bound));
    }
}

/// The first layer of KDA.
fn delta_net<'a>(keys: &KeyWriter<'a>) -> Option<&'a DeltaNetBlueprint> {
    keys.mixers().find_map(|mixer| match mixer {
        Some(MixerBlueprint::DeltaNet(net)) => Some(&**net),
        _ => None,
    })
}
