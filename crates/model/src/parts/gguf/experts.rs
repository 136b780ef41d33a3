//! Keys and names of feed-forward parts.

use moeflux_base::Error;
use moeflux_ops::Scoring;

use super::{
    key,
    row::{Fixed, KeyRow, fixed, flag, group, integer, number, reads, size, uniform, writes},
    writer::{KeyValue, KeyWriter, Place},
};
use crate::checkpoint::gguf::{
    keys::{Config, Keys},
    names::{NameRow, row},
};

/// Shared experts without a gate.
pub(crate) const SHARED_EXPERTS: &[NameRow] = &[
    row("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    row("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

/// A shared expert, mostly with a gate.
pub(crate) const SHARED_EXPERT: &[NameRow] = &[
    row("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    row("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

/// A shared expert as Tencent names it.
pub(crate) const SHARED_MLP: &[NameRow] = &[
    row("ffn_gate_shexp", "mlp.shared_mlp.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_mlp.up_proj"),
    row("ffn_down_shexp", "mlp.shared_mlp.down_proj"),
];

/// Stacked experts under their names on the Hub.
pub(crate) const EXPERTS: &[NameRow] = &[
    row("ffn_gate_exps", "mlp.experts.gate_proj"),
    row("ffn_up_exps", "mlp.experts.up_proj"),
    row("ffn_down_exps", "mlp.experts.down_proj"),
];

/// Experts of Mixtral's block.
pub(crate) const BLOCK_SPARSE: &[NameRow] = &[
    row("ffn_gate_inp", "block_sparse_moe.gate"),
    row("ffn_gate_exps", "block_sparse_moe.switch_mlp.gate_proj"),
    row("ffn_up_exps", "block_sparse_moe.switch_mlp.up_proj"),
    row("ffn_down_exps", "block_sparse_moe.switch_mlp.down_proj"),
];

/// The norm before the feed-forward part, where it is named after attention.
pub(crate) const POST_ATTENTION_NORM: &[NameRow] =
    &[row("post_attention_norm", "post_attention_layernorm")];

pub(crate) const TOP_K: KeyRow = size("num_experts_per_tok", "expert_used_count");

/// Width of a routed expert.
pub(crate) const EXPERT_WIDTH: KeyRow =
    uniform("moe_intermediate_size", "expert_feed_forward_length").needed();

/// Width of an MLP.
pub(crate) const MLP_WIDTH: KeyRow = uniform("intermediate_size", "feed_forward_length");

/// Numbers of experts, of configs with local ones.
pub(crate) const LOCAL_EXPERTS: &[KeyRow] = &[size("num_local_experts", "expert_count"), TOP_K];

/// Width of a routed expert in `intermediate_size`, which files have as the width of an MLP.
pub(crate) const EXPERT_AS_MLP: &[KeyRow] =
    &[MLP_WIDTH.needed(), uniform("intermediate_size", "expert_feed_forward_length").unread()];

/// Width of a routed expert in `intermediate_size`, which files have under its name.
pub(crate) const EXPERT_BY_NAME: &[KeyRow] =
    &[MLP_WIDTH.unread(), uniform("intermediate_size", "expert_feed_forward_length").needed()];

/// Whether the weights of a token's experts are scaled to a sum of one.
pub(crate) const NORMALIZED: KeyRow =
    flag("norm_topk_prob", "expert_weights_norm").or(Fixed::Flag(false));

/// The same in files of configs that leave it out.
pub(crate) const ROUTER_NORMALIZES: KeyRow = writes(Place::Routers, |keys| {
    let name = key::NORMALIZED;
    let moe = keys.blueprint.moe_layers().next();
    if let Some((_, moe)) = moe.filter(|_| !keys.has(name)) {
        keys.push(name, KeyValue::Bool(moe.router.normalize));
    }
});

/// One shared expert, of which configs state the width.
pub(crate) const ONE_SHARED: &[KeyRow] = &[
    uniform("shared_expert_intermediate_size", key::SHARED_WIDTH).needed(),
    writes(Place::Routers, |keys| keys.push_integer("expert_shared_count", 1)),
];

/// Factor on the weights of experts.
pub(crate) const ROUTED_SCALE: KeyRow = number("routed_scaling_factor", "expert_weights_scale")
    .or(Fixed::Number(1.0))
    .at(Place::Routers);

/// Softmax routers over experts.
pub(crate) const SOFTMAX_EXPERTS: &[KeyRow] = &[
    size("num_experts", "expert_count"),
    TOP_K,
    EXPERT_WIDTH,
    MLP_WIDTH.unread(),
    NORMALIZED.unread(),
    // llama.cpp always normalizes.
    fixed("norm_topk_prob", Fixed::Flag(true)),
];

/// Dense layers before layers with a grouped router and shared experts; without the keys of the
/// router's scores.
pub(crate) const GROUPED_SIZES: &[KeyRow] = &[
    MLP_WIDTH,
    size("n_routed_experts", "expert_count"),
    TOP_K,
    EXPERT_WIDTH,
    integer("n_shared_experts", "expert_shared_count").or(Fixed::Integer(0)),
    integer("n_group", "expert_group_count"),
    integer("topk_group", "expert_group_used_count"),
    integer("first_k_dense_replace", "leading_dense_block_count").or(Fixed::Integer(0)),
];

/// Keys of a router with sigmoid scores, where the file has no other.
pub(crate) const SIGMOID_ROUTER: &[KeyRow] = &[SIGMOID_SCORES, NORMALIZED, ROUTED_SCALE];

/// Keys of a router with softmax scores, where the file has no other.
pub(crate) const SOFTMAX_ROUTER: &[KeyRow] = &[
    group(Place::Routers, |keys, config| read_scores(keys, config, SOFTMAX), write_scores),
    NORMALIZED,
    ROUTED_SCALE,
];

/// Scores of a router, which are sigmoids where the file has no key.
pub(crate) const SIGMOID_SCORES: KeyRow =
    group(Place::Routers, |keys, config| read_scores(keys, config, SIGMOID), write_scores);

/// Codes of `expert_gating_func`.
pub(crate) const SOFTMAX: u64 = 1;
pub(crate) const SIGMOID: u64 = 2;
pub(crate) const SQRT_SOFTPLUS: u64 = 4;

/// Scores of a router by their codes, and their names on the Hub.
const SCORES: [(u64, &str); 3] =
    [(SOFTMAX, "softmax"), (SIGMOID, "sigmoid"), (SQRT_SOFTPLUS, "sqrtsoftplus")];

const SCORES_KEY: &str = "expert_gating_func";

/// Name of the router's scores on the Hub. `default` is their code where the key is absent.
pub(crate) fn scores(keys: &Keys<'_>, default: u64) -> Result<&'static str, Error> {
    let code = keys.integer(SCORES_KEY)?.unwrap_or(default);
    let known = SCORES.iter().find(|(known, _)| *known == code);
    let problem = || keys.problem(SCORES_KEY, &format!("is {code}, which is not read"));
    known.map(|(_, name)| *name).ok_or_else(problem)
}

pub(crate) fn read_scores(keys: &Keys<'_>, config: &mut Config, default: u64) -> Result<(), Error> {
    config.insert("scoring_func".into(), scores(keys, default)?.into());
    Ok(())
}

/// Files of softmax routers lack the key.
pub(crate) fn write_scores(keys: &mut KeyWriter<'_>) {
    let code = keys.blueprint.moe_layers().next().and_then(|(_, moe)| match moe.router.scoring {
        Scoring::Sigmoid => Some(SIGMOID),
        Scoring::SqrtSoftplus => Some(SQRT_SOFTPLUS),
        _ => None,
    });
    if let Some(code) = code {
        keys.push_integer(SCORES_KEY, code as usize);
    }
}

/// Dense layers before the first one with experts, of configs that list the kinds of layers.
pub(crate) const DENSE_LAYERS: KeyRow = writes(Place::Routers, |keys| {
    let name = key::DENSE_LAYERS;
    let dense = keys.blueprint.moe_layers().next().map_or(0, |(layer, _)| layer);
    if dense > 0 && !keys.has(name) {
        keys.push_integer(name, dense);
    }
});

/// Whether each layer has experts, by their routers.
pub(crate) const SPARSE_LAYERS: KeyRow = reads(|keys, config| {
    config.insert("moe_layer_freq".into(), keys.sparse_layers()?.into());
    Ok(())
});

/// Width of all shared experts together.
pub(crate) const SHARED_WIDTH: KeyRow = writes(Place::Routers, |keys| {
    let shared = keys.blueprint.moe_layers().next().and_then(|(_, moe)| moe.shared.as_ref());
    if let Some(shared) = shared {
        let width = shared.mlp.up_proj.shape.rows;
        keys.push(key::SHARED_WIDTH, KeyValue::U32(width as u32));
    }
});
