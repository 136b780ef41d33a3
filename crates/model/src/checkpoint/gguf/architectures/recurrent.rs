//! Architectures with delta-nets or short convolutions in some layers.

use moeflux_base::Error;
use serde_json::json;

use super::{
    super::{
        config::{Config, Keys, add},
        names::{NameRow, row},
    },
    architecture::{GgufArchitecture, PLAIN, POST_ATTENTION_NORM, SHARED_EXPERT},
    experts::{grouped, softmax_experts},
};

pub(super) const ARCHITECTURES: [GgufArchitecture; 4] = [
    GgufArchitecture {
        name: "qwen4exp",
        model_types: &["qwen4_exp"],
        rows: &[QWEN4_EXP, DELTA_NET, SHARED_EXPERT],
        value_heads_dealt: true,
        config: qwen4_exp,
        ..PLAIN
    },
    GgufArchitecture {
        name: "qwen35moe",
        model_types: &["qwen3_5_moe"],
        rows: &[DELTA_NET, POST_ATTENTION_NORM, SHARED_EXPERT],
        value_heads_dealt: true,
        config: qwen35_moe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "qwen3next",
        model_types: &["qwen3_next"],
        rows: &[DELTA_NET, POST_ATTENTION_NORM, SHARED_EXPERT],
        config: qwen3_next,
        ..PLAIN
    },
    GgufArchitecture {
        name: "lfm2moe",
        model_types: &["lfm2_moe"],
        rows: &[LFM2],
        config: lfm2_moe,
        ..PLAIN
    },
];

/// Delta-nets.
const DELTA_NET: &[NameRow] = &[
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

/// Residual streams, the indexer and the memory of n-grams of Qwen3.8.
const QWEN4_EXP: &[NameRow] = &[
    row("output_hc_norm.weight", "model.hyper_connection_mixer.hc_norm.weight"),
    row("output_hc_down.weight", "model.hyper_connection_mixer.input_mix_weight_down.weight"),
    row("output_hc_up.weight", "model.hyper_connection_mixer.input_mix_weight_up.weight"),
    row("per_layer_token_embd.weight", "model.ngram_embedding.weight"),
    row("hc_attn_norm", "attn_hyper_connection.hc_norm"),
    row("hc_attn_down", "attn_hyper_connection.input_mix_weight_down"),
    row("hc_attn_up", "attn_hyper_connection.input_mix_weight_up"),
    row("hc_attn_inject", "attn_hyper_connection.block_inject_weight"),
    row("hc_ffn_norm", "mlp_hyper_connection.hc_norm"),
    row("hc_ffn_down", "mlp_hyper_connection.input_mix_weight_down"),
    row("hc_ffn_up", "mlp_hyper_connection.input_mix_weight_up"),
    row("hc_ffn_inject", "mlp_hyper_connection.block_inject_weight"),
    row("indexer.q_proj", "self_attn.indexer.index_q_proj"),
    row("indexer.k_proj", "self_attn.indexer.index_k_proj"),
    row("indexer.q_norm", "self_attn.indexer.q_layernorm"),
    row("indexer.k_norm", "self_attn.indexer.k_layernorm"),
    row("ple_key", "ple.key_proj"),
    row("ple_value", "ple.value_proj"),
    row("ple_norm_key", "ple.norm_key"),
    row("ple_norm_query", "ple.norm_query"),
    row("ple_norm_conv", "ple.norm_conv"),
    row("ple_conv1d", "ple.conv1d"),
];

/// Positions in a block of the published model. The converter writes 0 with releases of
/// transformers that rename full attention.
const BLOCK_POSITIONS: u64 = 4;

/// Layers of LFM2.
const LFM2: &[NameRow] = &[
    row("attn_norm", "operator_norm"),
    row("attn_output", "self_attn.out_proj"),
    row("attn_q_norm", "self_attn.q_layernorm"),
    row("attn_k_norm", "self_attn.k_layernorm"),
    row("shortconv.conv", "conv.conv"),
    row("shortconv.in_proj", "conv.in_proj"),
    row("shortconv.out_proj", "conv.out_proj"),
    row("ffn_norm", "ffn_norm"),
    row("ffn_gate", "feed_forward.gate_proj"),
    row("ffn_up", "feed_forward.up_proj"),
    row("ffn_down", "feed_forward.down_proj"),
    row("ffn_gate_inp", "feed_forward.gate"),
    row("exp_probs_b.bias", "feed_forward.expert_bias"),
    row("ffn_gate_exps", "feed_forward.switch_mlp.gate_proj"),
    row("ffn_up_exps", "feed_forward.switch_mlp.up_proj"),
    row("ffn_down_exps", "feed_forward.switch_mlp.down_proj"),
];

/// Layers of convolutions have no KV heads.
fn lfm2_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = grouped(keys, "lfm2_moe")?;
    let name = "attention.head_count_kv";
    let heads = keys.per_layer(name)?.ok_or_else(|| keys.missing(name))?;
    let kind = |heads| if heads == 0 { "conv" } else { "full_attention" };
    let entries = json!({
        "layer_types": heads.into_iter().map(kind).collect::<Vec<_>>(),
        "conv_L_cache": keys.size("shortconv.l_cache")?,
        // Not in the file: llama.cpp always normalizes.
        "norm_topk_prob": true,
    });
    add(&mut config, entries);
    Ok(config)
}

fn qwen3_next(keys: &Keys<'_>) -> Result<Config, Error> {
    delta_nets(keys, "qwen3_next")
}

fn qwen35_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    delta_nets(keys, "qwen3_5_moe")
}

fn qwen4_exp(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = delta_nets(keys, "qwen4_exp")?;
    let name = "attention.compress_ratios";
    let mut ratios = keys.first_layers(name)?;
    ratios.retain(|ratio| *ratio > 0);
    let ratio = ratios.first().copied().unwrap_or(BLOCK_POSITIONS);
    if ratios.iter().any(|other| *other != ratio) {
        return Err(keys.problem(name, "differs between layers, which is not read"));
    }
    let entries = json!({
        "hc_count": keys.size("hyper_connection.count")?,
        "hc_lowrank": keys.size("hyper_connection.low_rank")?,
        "indexer_n_heads": keys.size("attention.indexer.head_count")?,
        "indexer_kv_heads": 1,
        "indexer_head_dim": keys.size("attention.indexer.key_length")?,
        "indexer_budget": keys.size("attention.indexer.top_k")?,
        "indexer_compress_ratio": ratio,
    });
    add(&mut config, entries);
    ngram_memory(keys, &mut config)?;
    Ok(config)
}

/// Adds the keys of the memory of n-grams, which one layer has.
fn ngram_memory(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let name = "ple.layers";
    let layers = keys.integers(name)?.unwrap_or_default();
    let layer = match layers[..] {
        [] => return Ok(()),
        [layer] => layer,
        _ => return Err(keys.problem(name, "names several layers, of which one is read")),
    };
    let (size, heads) = (keys.size("ple.ngram_size")?, keys.size("ple.heads_per_ngram")?);
    let width = keys.size("embedding_length_per_layer_input")?;
    let needed = |name: &str| keys.integers(name)?.ok_or_else(|| keys.missing(name));
    let table = keys.tensors.get("per_layer_token_embd.weight");
    let eos = "ple.eos_token_id";
    let entries = json!({
        // Counted from 1.
        "ple_layer_ids": [layer.saturating_add(1)],
        "ple_embed_dim": width.saturating_mul(heads).saturating_mul(size.saturating_sub(1)),
        "ple_conv_kernel_size": keys.size("ple.conv_kernel")?,
        "ngram_size": size,
        "heads_per_ngram": heads,
        "eos_token_id": keys.integer(eos)?.ok_or_else(|| keys.missing(eos))?,
        "gguf_ngram_constants": {
            "multipliers": needed("ple.layer_multipliers")?,
            "offsets": needed("ple.head_offsets")?,
            "sizes": needed("ple.head_vocab_sizes")?,
            "rows": table.and_then(|table| table.shape.first()).copied().unwrap_or(0),
        },
    });
    add(config, entries);
    Ok(())
}

/// Model with delta-nets in some layers.
fn delta_nets(keys: &Keys<'_>, model_type: &str) -> Result<Config, Error> {
    let mut config = softmax_experts(keys, model_type)?;
    let width = keys.size("attention.key_length")?;
    let rotated = keys.integer("rope.dimension_count")?.unwrap_or(width);
    let value_heads = keys.size("ssm.time_step_rank")?;
    let recurrent = keys.per_layer("attention.recurrent_layers")?.map(|layers| {
        let name = |recurrent| match recurrent {
            0 => "full_attention",
            _ => "linear_attention",
        };
        layers.into_iter().map(name).collect::<Vec<_>>()
    });
    let entries = json!({
        "shared_expert_intermediate_size":
            keys.uniform("expert_shared_feed_forward_length")?.unwrap_or(0),
        "partial_rotary_factor": rotated as f64 / width as f64,
        "layer_types": recurrent,
        "full_attention_interval": keys.integer("full_attention_interval")?.unwrap_or(4),
        "linear_num_key_heads": keys.size("ssm.group_count")?,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": keys.size("ssm.state_size")?,
        "linear_value_head_dim": keys.size("ssm.inner_size")? / value_heads,
        "linear_conv_kernel_dim": keys.size("ssm.conv_kernel")?,
    });
    add(&mut config, entries);
    Ok(config)
}
