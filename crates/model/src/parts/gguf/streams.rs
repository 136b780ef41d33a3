//! Keys and names of several residual streams, and bounds of gated linear units.

use moeflux_base::Error;

use super::{
    key,
    row::{KeyRow, group, number, size},
    writer::{KeyValue, KeyWriter, Place},
};
use crate::checkpoint::gguf::{
    keys::{Config, Keys},
    names::{NameRow, row},
};

/// Weights of hyper-connections.
pub(crate) const STREAMS: &[NameRow] = &[
    row("hc_attn_fn.weight", "hc_attn_fn"),
    row("hc_attn_base.weight", "hc_attn_base"),
    row("hc_attn_scale.weight", "hc_attn_scale"),
    row("hc_ffn_fn.weight", "hc_ffn_fn"),
    row("hc_ffn_base.weight", "hc_ffn_base"),
    row("hc_ffn_scale.weight", "hc_ffn_scale"),
];

/// Keys of hyper-connections.
pub(crate) const HYPER_CONNECTIONS: &[KeyRow] = &[
    size("hc_mult", "hyper_connection.count"),
    size("hc_sinkhorn_iters", "hyper_connection.sinkhorn_iterations"),
    number("hc_eps", "hyper_connection.epsilon"),
];

/// Bound of gated linear units that all layers have, routed and shared experts alike.
pub(crate) const CLAMP: KeyRow = group(Place::Layers, read_clamp, write_clamp);

fn read_clamp(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let [name, shared] = key::CLAMPS;
    let Some(routed) = keys.floats_per_layer(name)? else { return Ok(()) };
    let shared = keys.floats_per_layer(shared)?.unwrap_or_else(|| routed.clone());
    let first = routed.first().copied();
    if routed.iter().chain(&shared).any(|limit| Some(*limit) != first) {
        return Err(keys.problem(name, "differs between layers or from swiglu_clamp_shexp"));
    }
    if let Some(limit) = first.filter(|limit| *limit > 0.0) {
        config.insert("swiglu_limit".into(), limit.into());
    }
    Ok(())
}

pub(crate) fn write_clamp(keys: &mut KeyWriter<'_>) {
    let Some(limit) = keys.config["swiglu_limit"].as_f64() else { return };
    for name in key::CLAMPS {
        let limits = vec![limit as f32; keys.blueprint.layers.len()];
        keys.push(name, KeyValue::F32s(limits));
    }
}
