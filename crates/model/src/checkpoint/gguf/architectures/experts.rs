//! Metadata to the config that the Hub has: keys of feed-forward parts.

use moeflux_base::Error;
use serde_json::json;

use super::super::config::{Config, Keys, add};

/// Codes of `expert_gating_func`.
pub(super) const SOFTMAX: u64 = 1;
pub(super) const SIGMOID: u64 = 2;
pub(super) const SQRT_SOFTPLUS: u64 = 4;

/// Name of the router's function on the Hub. `default` is its code where the key is absent.
pub(super) fn scoring(keys: &Keys<'_>, default: u64) -> Result<&'static str, Error> {
    let name = "expert_gating_func";
    match keys.integer(name)?.unwrap_or(default) {
        SOFTMAX => Ok("softmax"),
        SIGMOID => Ok("sigmoid"),
        SQRT_SOFTPLUS => Ok("sqrtsoftplus"),
        other => Err(keys.problem(name, &format!("is {other}, which is not read"))),
    }
}

/// Model of grouped-query attention with softmax routers.
pub(super) fn softmax_experts(keys: &Keys<'_>, model_type: &str) -> Result<Config, Error> {
    let mut config = keys.body(model_type)?;
    keys.heads(&mut config)?;
    let entries = json!({
        "num_experts": keys.size("expert_count")?,
        "num_experts_per_tok": keys.size("expert_used_count")?,
        "moe_intermediate_size": keys.uniform_size("expert_feed_forward_length")?,
        // Not in the file: llama.cpp always normalizes.
        "norm_topk_prob": true,
    });
    add(&mut config, entries);
    Ok(config)
}

/// Keys of dense layers before layers with a grouped router and shared experts.
pub(super) fn grouped_experts(
    keys: &Keys<'_>,
    config: &mut Config,
    default: u64,
) -> Result<(), Error> {
    let entries = json!({
        "intermediate_size": keys.uniform("feed_forward_length")?,
        "n_routed_experts": keys.size("expert_count")?,
        "num_experts_per_tok": keys.size("expert_used_count")?,
        "moe_intermediate_size": keys.uniform_size("expert_feed_forward_length")?,
        "n_shared_experts": keys.integer("expert_shared_count")?.unwrap_or(0),
        "n_group": keys.integer("expert_group_count")?,
        "topk_group": keys.integer("expert_group_used_count")?,
        "first_k_dense_replace": keys.integer("leading_dense_block_count")?.unwrap_or(0),
        "scoring_func": scoring(keys, default)?,
        "norm_topk_prob": keys.flag("expert_weights_norm")?.unwrap_or(false),
        "routed_scaling_factor": keys.number("expert_weights_scale")?.unwrap_or(1.0),
    });
    add(config, entries);
    Ok(())
}

/// Config of layers with experts under a grouped router, in a model of grouped-query attention.
pub(super) fn grouped(keys: &Keys<'_>, model_type: &str) -> Result<Config, Error> {
    let mut config = keys.body(model_type)?;
    keys.heads(&mut config)?;
    grouped_experts(keys, &mut config, SIGMOID)?;
    Ok(config)
}
