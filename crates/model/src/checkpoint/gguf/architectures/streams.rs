//! Architectures with several residual streams.

use moeflux_base::Error;
use serde_json::json;

use super::{
    super::{
        config::{Config, Keys, add},
        names::{NameRow, row},
    },
    architecture::{GgufArchitecture, PLAIN, SHARED_EXPERTS},
    experts::{SIGMOID, SQRT_SOFTPLUS, grouped_experts},
    kda::{KDA, linear_layers, lower_bound},
    latent::{PROJECTIONS, latent},
};

pub(super) const ARCHITECTURES: [GgufArchitecture; 2] = [
    GgufArchitecture {
        name: "deepseek4",
        model_types: &["deepseek_v4"],
        rows: &[DEEPSEEK_V4, STREAMS],
        config: deepseek4,
        ..PLAIN
    },
    GgufArchitecture {
        name: "glm5-next",
        model_types: &["glm5_next"],
        rows: &[GLM5_NEXT, STREAMS, KDA, PROJECTIONS, SHARED_EXPERTS],
        config: glm5_next,
        ..PLAIN
    },
];

/// Weights of hyper-connections.
const STREAMS: &[NameRow] = &[
    row("hc_attn_fn.weight", "hc_attn_fn"),
    row("hc_attn_base.weight", "hc_attn_base"),
    row("hc_attn_scale.weight", "hc_attn_scale"),
    row("hc_ffn_fn.weight", "hc_ffn_fn"),
    row("hc_ffn_base.weight", "hc_ffn_base"),
    row("hc_ffn_scale.weight", "hc_ffn_scale"),
];

/// Compressed attention, and experts that token ids may choose.
const DEEPSEEK_V4: &[NameRow] = &[
    row("output_hc_fn.weight", "model.hc_head_fn"),
    row("output_hc_base.weight", "model.hc_head_base"),
    row("output_hc_scale.weight", "model.hc_head_scale"),
    row("attn_norm", "attn_norm"),
    row("attn_sinks.weight", "attn.attn_sink"),
    row("attn_q_a", "attn.wq_a"),
    row("attn_q_a_norm", "attn.q_norm"),
    row("attn_q_b", "attn.wq_b"),
    row("attn_kv", "attn.wkv"),
    row("attn_kv_a_norm", "attn.kv_norm"),
    row("attn_output_a", "attn.wo_a"),
    row("attn_output_b", "attn.wo_b"),
    row("attn_compressor_kv", "attn.compressor.wkv"),
    row("attn_compressor_gate", "attn.compressor.wgate"),
    row("attn_compressor_ape.weight", "attn.compressor.ape"),
    row("attn_compressor_norm", "attn.compressor.norm"),
    row("indexer.attn_q_b", "attn.indexer.wq_b"),
    row("indexer.proj", "attn.indexer.weights_proj"),
    row("indexer_compressor_kv", "attn.indexer.compressor.wkv"),
    row("indexer_compressor_gate", "attn.indexer.compressor.wgate"),
    row("indexer_compressor_ape.weight", "attn.indexer.compressor.ape"),
    row("indexer_compressor_norm", "attn.indexer.compressor.norm"),
    row("ffn_norm", "ffn_norm"),
    row("exp_probs_b.bias", "ffn.gate.bias"),
    row("ffn_gate_tid2eid.weight", "ffn.gate.tid2eid"),
    row("ffn_gate_inp", "ffn.gate"),
    row("ffn_gate_exps", "ffn.switch_mlp.gate_proj"),
    row("ffn_up_exps", "ffn.switch_mlp.up_proj"),
    row("ffn_down_exps", "ffn.switch_mlp.down_proj"),
    row("ffn_gate_shexp", "ffn.shared_experts.w1"),
    row("ffn_up_shexp", "ffn.shared_experts.w3"),
    row("ffn_down_shexp", "ffn.shared_experts.w2"),
];

/// Pools of positions that an indexer chooses from.
const GLM5_NEXT: &[NameRow] = &[
    row("indexer_compressor_gate.weight", "self_attn.indexer.index_kpool_compress_gate"),
    row("indexer_compressor_ape.weight", "self_attn.indexer.index_kpool_compress_ape"),
];

/// Adds the keys of hyper-connections.
fn hyper_connections(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let entries = json!({
        "hc_mult": keys.size("hyper_connection.count")?,
        "hc_sinkhorn_iters": keys.size("hyper_connection.sinkhorn_iterations")?,
        "hc_eps": keys.number("hyper_connection.epsilon")?,
    });
    add(config, entries);
    Ok(())
}

/// Bound of gated linear units that all layers have, routed and shared experts alike.
fn clamp(keys: &Keys<'_>) -> Result<Option<f32>, Error> {
    let name = "swiglu_clamp_exp";
    let Some(routed) = keys.floats_per_layer(name)? else { return Ok(None) };
    let shared = keys.floats_per_layer("swiglu_clamp_shexp")?.unwrap_or_else(|| routed.clone());
    let first = routed.first().copied();
    match routed.iter().chain(&shared).all(|limit| Some(*limit) == first) {
        true => Ok(first.filter(|limit| *limit > 0.0)),
        false => Err(keys.problem(name, "differs between layers or from swiglu_clamp_shexp")),
    }
}

fn deepseek4(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("deepseek_v4")?;
    grouped_experts(keys, &mut config, SQRT_SOFTPLUS)?;
    hyper_connections(keys, &mut config)?;
    let theta = "attention.compress_rope_freq_base";
    let entries = json!({
        "num_attention_heads": keys.uniform_size("attention.head_count")?,
        "head_dim": keys.size("attention.key_length")?,
        "qk_rope_head_dim": keys.size("rope.dimension_count")?,
        "q_lora_rank": keys.size("attention.q_lora_rank")?,
        "o_groups": keys.size("attention.output_group_count")?,
        "o_lora_rank": keys.size("attention.output_lora_rank")?,
        "sliding_window": keys.size("attention.sliding_window")?,
        "compress_ratios": keys.first_layers("attention.compress_ratios")?,
        "compress_rope_theta": keys.number(theta)?.ok_or_else(|| keys.missing(theta))?,
        "index_n_heads": keys.size("attention.indexer.head_count")?,
        "index_head_dim": keys.size("attention.indexer.key_length")?,
        "index_topk": keys.size("attention.indexer.top_k")?,
        "num_hash_layers": keys.integer("hash_layer_count")?.unwrap_or(0),
        "swiglu_limit": clamp(keys)?,
    });
    add(&mut config, entries);
    Ok(config)
}

fn glm5_next(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = latent(keys, "glm5_next", SIGMOID)?;
    hyper_connections(keys, &mut config)?;
    let kind = |linear| if linear { "linear_attention" } else { "deepseek_sparse_attention" };
    let types = "attention.indexer.types";
    let types = keys.has_key(types).then(|| keys.first_layers(types)).transpose()?.map(|types| {
        let name = |full| if full == 0 { "shared" } else { "full" };
        types.into_iter().map(name).collect::<Vec<_>>()
    });
    let entries = json!({
        "layer_types": linear_layers(keys)?.into_iter().map(kind).collect::<Vec<_>>(),
        "linear_attn_config": {
            "num_heads": keys.uniform_size("attention.head_count")?,
            "head_dim": keys.size("kda.head_dim")?,
            "short_conv_kernel_size": keys.size("ssm.conv_kernel")?,
            "gate_lower_bound": lower_bound(keys)?,
        },
        "index_n_heads": keys.size("attention.indexer.head_count")?,
        "index_head_dim": keys.size("attention.indexer.key_length")?,
        "index_topk": keys.size("attention.indexer.top_k")?,
        "index_kpool": keys.size("attention.indexer.kpool")?,
        "index_kpool_always_select_tail": keys.flag("attention.indexer.kpool_select_tail")?,
        "indexer_types": types,
        "swiglu_limit": clamp(keys)?,
    });
    add(&mut config, entries);
    Ok(config)
}
