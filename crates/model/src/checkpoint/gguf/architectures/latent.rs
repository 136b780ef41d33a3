//! Architectures of latent attention.

use moeflux_base::Error;
use serde_json::json;

use super::{
    super::{
        config::{Config, Keys, add},
        names::{NameRow, row},
    },
    architecture::{GgufArchitecture, PLAIN, SHARED_EXPERTS},
    experts::{SIGMOID, SOFTMAX, grouped_experts},
};

/// Entry of an architecture with common names.
const LATENT: GgufArchitecture = GgufArchitecture { rows: &[PROJECTIONS, SHARED_EXPERTS], ..PLAIN };

pub(super) const ARCHITECTURES: [GgufArchitecture; 4] = [
    GgufArchitecture {
        name: "deepseek2",
        model_types: &["deepseek_v3", "deepseek_v2", "kimi_k2", "kimi_k25", "glm4_moe_lite"],
        config: deepseek2,
        ..LATENT
    },
    GgufArchitecture {
        name: "deepseek32",
        model_types: &["deepseek_v32"],
        config: deepseek32,
        ..LATENT
    },
    GgufArchitecture { name: "glm-dsa", model_types: &["glm_moe_dsa"], config: glm_dsa, ..LATENT },
    GgufArchitecture { name: "mistral4", model_types: &["mistral4"], config: mistral4, ..LATENT },
];

/// Latent attention with its indexer.
pub(super) const PROJECTIONS: &[NameRow] = &[
    row("attn_q_a", "self_attn.q_a_proj"),
    row("attn_q_a_norm", "self_attn.q_a_layernorm"),
    row("attn_q_b", "self_attn.q_b_proj"),
    row("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    row("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    row("attn_kv_b", "self_attn.kv_b_proj"),
    // `kv_b_proj` in two: by head, transposed, and by head.
    row("attn_k_b", "self_attn.embed_q"),
    row("attn_v_b", "self_attn.unembed_out"),
    row("indexer.attn_q_b", "self_attn.indexer.wq_b"),
    row("indexer.attn_k", "self_attn.indexer.wk"),
    row("indexer.k_norm", "self_attn.indexer.k_norm"),
    row("indexer.proj", "self_attn.indexer.weights_proj"),
];

/// Model of latent attention.
pub(super) fn latent(keys: &Keys<'_>, model_type: &str, default: u64) -> Result<Config, Error> {
    let mut config = keys.body(model_type)?;
    grouped_experts(keys, &mut config, default)?;
    // Old files have the widths of heads where newer ones have those of the latent.
    let width = |name: &str| -> Result<u64, Error> {
        match keys.integer(&format!("attention.{name}_mla"))? {
            Some(width) => Ok(width),
            None => keys.size(&format!("attention.{name}")),
        }
    };
    let name = "rope.dimension_count";
    let rotated = keys.integer(name)?.ok_or_else(|| keys.missing(name))?;
    let key_width = width("key_length")?;
    let plain = key_width.checked_sub(rotated);
    let plain = plain.ok_or_else(|| keys.problem(name, "exceeds the width of keys"))?;
    let entries = json!({
        "num_attention_heads": keys.uniform_size("attention.head_count")?,
        "q_lora_rank": keys.integer("attention.q_lora_rank")?,
        "kv_lora_rank": keys.size("attention.kv_lora_rank")?,
        "qk_nope_head_dim": plain,
        "qk_rope_head_dim": rotated,
        "v_head_dim": width("value_length")?,
    });
    add(&mut config, entries);
    if let Some(scaling) = config.get_mut("rope_scaling").and_then(|s| s.as_object_mut())
        && scaling.get("rope_type").is_some_and(|kind| kind == "yarn")
    {
        let name = "rope.scaling.yarn_log_multiplier";
        let multiplier = keys.number(name)?.ok_or_else(|| keys.missing(name))?;
        // Of all published models, both factors are equal.
        let mscale = multiplier / 0.1;
        add(scaling, json!({"mscale": mscale, "mscale_all_dim": mscale}));
    }
    Ok(config)
}

/// Whether the choice of experts has a correction, which came with the sigmoid.
fn is_corrected(keys: &Keys<'_>) -> bool {
    keys.tensors.keys().any(|name| name.contains(".exp_probs_b"))
}

fn deepseek2(keys: &Keys<'_>) -> Result<Config, Error> {
    // Files of GLM-4.7-Flash lack the key, as those of DeepSeek-V2 do.
    let default = if is_corrected(keys) { SIGMOID } else { SOFTMAX };
    let mut config = latent(keys, "deepseek_v3", default)?;
    if config.get("scoring_func").is_some_and(|name| name == "softmax") {
        let grouped = keys.integer("expert_group_count")?.unwrap_or(1) > 1;
        let method = if grouped { "group_limited_greedy" } else { "greedy" };
        add(&mut config, json!({"model_type": "deepseek_v2", "topk_method": method}));
    }
    Ok(config)
}

fn mistral4(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = latent(keys, "mistral4", SOFTMAX)?;
    if let Some(scaling) = config.get_mut("rope_scaling").and_then(|s| s.as_object_mut()) {
        // The converter leaves it out; the published model has 0.1.
        let beta = keys.number("attention.temperature_scale")?.unwrap_or(0.1);
        add(scaling, json!({"llama_4_scaling_beta": beta}));
    }
    Ok(config)
}

/// Adds keys of the indexer.
fn indexer(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let types = keys.per_layer("attention.indexer.types")?.map(|types| {
        let name = |full| if full == 0 { "shared" } else { "full" };
        types.into_iter().map(name).collect::<Vec<_>>()
    });
    let entries = json!({
        "index_n_heads": keys.size("attention.indexer.head_count")?,
        "index_head_dim": keys.size("attention.indexer.key_length")?,
        "index_topk": keys.size("attention.indexer.top_k")?,
        "indexer_types": types,
    });
    add(config, entries);
    Ok(())
}

fn deepseek32(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = latent(keys, "deepseek_v32", SIGMOID)?;
    indexer(keys, &mut config)?;
    Ok(config)
}

fn glm_dsa(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = latent(keys, "glm_moe_dsa", SIGMOID)?;
    indexer(keys, &mut config)?;
    Ok(config)
}
