//! Architectures of grouped-query attention that is the same in all layers.

use moeflux_base::Error;
use serde_json::{Value, json};

use super::{
    super::{
        config::{Config, Keys, add},
        names::{NameRow, row},
    },
    architecture::{
        BLOCK_SPARSE, EXPERTS, GgufArchitecture, PLAIN, POST_ATTENTION_NORM, SHARED_EXPERT,
        SHARED_EXPERTS, SHARED_MLP,
    },
    experts::{SIGMOID, SOFTMAX, grouped, grouped_experts, scoring, softmax_experts},
};

pub(super) const ARCHITECTURES: [GgufArchitecture; 14] = [
    GgufArchitecture {
        name: "bailingmoe",
        model_types: &["bailing_moe"],
        rows: &[BAILING, SHARED_EXPERTS],
        pairs_adjacent: true,
        config: bailing_moe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "bailingmoe2",
        model_types: &["bailing_moe_v2", "sarvam_moe"],
        rows: &[BAILING, SHARED_EXPERTS],
        config: bailing_moe_v2,
        ..PLAIN
    },
    GgufArchitecture {
        name: "dots1",
        model_types: &["dots1"],
        rows: &[EXPERTS, SHARED_EXPERTS],
        config: dots1,
        ..PLAIN
    },
    GgufArchitecture {
        name: "ernie4_5-moe",
        model_types: &["ernie4_5_moe"],
        rows: &[ERNIE, SHARED_EXPERTS],
        config: ernie4_5_moe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "glm4moe",
        model_types: &["glm4_moe", "solar_open"],
        rows: &[POST_ATTENTION_NORM, SHARED_EXPERTS],
        config: glm4_moe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "granitemoe",
        model_types: &["granitemoe"],
        rows: &[GRANITE, BLOCK_SPARSE],
        pairs_adjacent: true,
        config: granitemoe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "hunyuan-moe",
        model_types: &["hunyuan_v1_moe"],
        rows: &[HUNYUAN, SHARED_MLP],
        config: hunyuan_v1_moe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "hy_v3",
        model_types: &["hy_v3"],
        rows: &[HY_V3, SHARED_MLP],
        config: hy_v3,
        ..PLAIN
    },
    GgufArchitecture {
        name: "llama",
        model_types: &["mixtral"],
        rows: &[BLOCK_SPARSE],
        pairs_adjacent: true,
        config: mixtral,
        ..PLAIN
    },
    GgufArchitecture {
        name: "minimax-m2",
        model_types: &["minimax_m2"],
        rows: &[MINIMAX_M2, BLOCK_SPARSE],
        config: minimax_m2,
        ..PLAIN
    },
    GgufArchitecture { name: "olmoe", model_types: &["olmoe"], config: olmoe, ..PLAIN },
    GgufArchitecture {
        name: "phimoe",
        model_types: &["phimoe"],
        rows: &[BLOCK_SPARSE],
        config: phimoe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "qwen2moe",
        model_types: &["qwen2_moe"],
        rows: &[SHARED_EXPERT],
        config: qwen2_moe,
        ..PLAIN
    },
    GgufArchitecture { name: "qwen3moe", model_types: &["qwen3_moe"], ..PLAIN },
];

/// Attention and router of Ling.
const BAILING: &[NameRow] = &[
    row("attn_q", "attention.q_proj"),
    row("attn_k", "attention.k_proj"),
    row("attn_v", "attention.v_proj"),
    row("attn_output", "attention.dense"),
    row("attn_q_norm", "attention.query_layernorm"),
    row("attn_k_norm", "attention.key_layernorm"),
    row("exp_probs_b.bias", "mlp.gate.expert_bias"),
];

const ERNIE: &[NameRow] = &[row("exp_probs_b.bias", "mlp.moe_statics.e_score_correction_bias")];

pub(super) const GRANITE: &[NameRow] = &[row("ffn_gate_inp", "block_sparse_moe.router.layer")];

const HUNYUAN: &[NameRow] = &[
    row("attn_q_norm", "self_attn.query_layernorm"),
    row("attn_k_norm", "self_attn.key_layernorm"),
    row("ffn_gate_inp", "mlp.gate.wg"),
];

const HY_V3: &[NameRow] = &[
    row("ffn_gate_inp", "mlp.router.gate"),
    row("exp_probs_b.bias", "mlp.expert_bias"),
    row("exp_probs_b", "mlp.expert_bias"),
];

const MINIMAX_M2: &[NameRow] =
    &[row("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias")];

pub(super) fn qwen3_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    softmax_experts(keys, "qwen3_moe")
}

fn qwen2_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = softmax_experts(keys, "qwen2_moe")?;
    let shared = keys.uniform("expert_shared_feed_forward_length")?.unwrap_or(0);
    let entries = json!({"shared_expert_intermediate_size": shared, "norm_topk_prob": false});
    add(&mut config, entries);
    Ok(config)
}

fn olmoe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("olmoe")?;
    keys.heads(&mut config)?;
    let entries = json!({
        "num_experts": keys.size("expert_count")?,
        "num_experts_per_tok": keys.size("expert_used_count")?,
        // Of one expert.
        "intermediate_size": keys.uniform_size("feed_forward_length")?,
        // Not in the file: llama.cpp never normalizes.
        "norm_topk_prob": false,
    });
    add(&mut config, entries);
    Ok(config)
}

fn dots1(keys: &Keys<'_>) -> Result<Config, Error> {
    grouped(keys, "dots1")
}

/// Ling-lite and Ling-plus.
fn bailing_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("bailing_moe")?;
    keys.heads(&mut config)?;
    grouped_experts(keys, &mut config, SOFTMAX)?;
    Ok(config)
}

/// Ling-mini and Ling-flash 2.0, Sarvam.
fn bailing_moe_v2(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = grouped(keys, "bailing_moe_v2")?;
    let has_bias = keys.tensors.keys().any(|name| name.ends_with(".exp_probs_b.bias"));
    let entries = json!({
        "use_qk_norm": true,
        "score_function": scoring(keys, SIGMOID)?,
        "moe_router_enable_expert_bias": has_bias.then_some(true),
        // Of one shared expert.
        "moe_shared_expert_intermediate_size":
            keys.uniform("expert_shared_feed_forward_length")?,
        "partial_rotary_factor": rotated_share(keys)?,
    });
    add(&mut config, entries);
    Ok(config)
}

fn ernie4_5_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("ernie4_5_moe")?;
    keys.heads(&mut config)?;
    grouped_experts(keys, &mut config, SOFTMAX)?;
    let sparse = keys.sparse_layers()?;
    let entries = json!({
        // Not in the file: llama.cpp always normalizes.
        "norm_topk_prob": true,
        "moe_layer_start_index": keys.integer("leading_dense_block_count")?.unwrap_or(0),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step")?,
        "moe_layer_end_index": sparse.iter().rposition(|sparse| *sparse == 1),
    });
    add(&mut config, entries);
    Ok(config)
}

fn granitemoe(keys: &Keys<'_>) -> Result<Config, Error> {
    let shared = "expert_shared_feed_forward_length";
    if let Some(width) = keys.uniform(shared)?.filter(|width| *width > 0) {
        return Err(keys.problem(shared, &format!("is {width}: shared experts are not read")));
    }
    granite(keys, "granitemoe")
}

/// Constant factors on the embedding, the scores, each sub-block and the logits.
pub(super) fn granite(keys: &Keys<'_>, model_type: &str) -> Result<Config, Error> {
    let mut config = keys.body(model_type)?;
    keys.heads(&mut config)?;
    let factor = |name: &str| keys.number(name)?.ok_or_else(|| keys.missing(name));
    let entries = json!({
        // Of one expert.
        "intermediate_size": keys.uniform_size("feed_forward_length")?,
        "num_local_experts": keys.size("expert_count")?,
        "num_experts_per_tok": keys.size("expert_used_count")?,
        "embedding_multiplier": factor("embedding_scale")?,
        "attention_multiplier": factor("attention.scale")?,
        "residual_multiplier": factor("residual_scale")?,
        // A divisor.
        "logits_scaling": factor("logit_scale")?,
    });
    add(&mut config, entries);
    Ok(config)
}

/// RoPE is without scaling: the converter puts it into the base.
fn hunyuan_v1_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("hunyuan_v1_moe")?;
    keys.heads(&mut config)?;
    let entries = json!({
        // Of one shared expert.
        "intermediate_size": keys.uniform_size("expert_shared_feed_forward_length")?,
        "moe_intermediate_size": keys.uniform_size("expert_feed_forward_length")?,
        "num_experts": keys.size("expert_count")?,
        "moe_topk": keys.size("expert_used_count")?,
        "num_shared_expert": keys.integer("expert_shared_count")?,
        "use_qk_norm": true,
    });
    add(&mut config, entries);
    Ok(config)
}

/// Models with few experts under the name of the dense ones.
fn mixtral(keys: &Keys<'_>) -> Result<Config, Error> {
    if keys.integer("expert_count")?.unwrap_or(0) == 0 {
        let problem = "is missing: it is a dense model, which is not read under this architecture";
        return Err(keys.problem("expert_count", problem));
    }
    if keys.has("blk.0.ffn_gate.0.weight") {
        let problem = "experts have a tensor each, as in files before April 2024: take a newer one";
        return Err(keys.metadata.error(problem));
    }
    let mut config = keys.body("mixtral")?;
    keys.heads(&mut config)?;
    let pairs = keys.head_width()? / 2;
    let entries = json!({
        "intermediate_size": keys.uniform_size("feed_forward_length")?,
        "num_local_experts": keys.size("expert_count")?,
        "num_experts_per_tok": keys.size("expert_used_count")?,
        "rope_scaling": keys.divided_rope(pairs)?,
    });
    add(&mut config, entries);
    Ok(config)
}

fn phimoe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("phimoe")?;
    keys.heads(&mut config)?;
    // In the published configs, at any length. The file has 1.19, by another formula.
    let scale = 1.243_163_121_016_122;
    let factors = |name: &str| keys.floats(&format!("rope_factors_{name}.weight"));
    let scaling = match (factors("short")?, factors("long")?) {
        (Some(short), Some(long)) => json!({
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "short_mscale": scale,
            "long_mscale": scale,
            "original_max_position_embeddings":
                keys.integer("rope.scaling.original_context_length")?,
        }),
        _ => Value::Null,
    };
    let entries = json!({
        "intermediate_size": keys.uniform_size("feed_forward_length")?,
        "num_local_experts": keys.size("expert_count")?,
        "num_experts_per_tok": keys.size("expert_used_count")?,
        // Not in the file: the same in all published models.
        "router_jitter_noise": 0.01,
        "lm_head_bias": keys.has("output.bias"),
        "sliding_window": keys.integer("attention.sliding_window")?,
        "rope_scaling": scaling,
    });
    add(&mut config, entries);
    Ok(config)
}

fn hy_v3(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = grouped(keys, "hy_v3")?;
    let expert = keys.uniform_size("expert_feed_forward_length")?;
    let shared = keys.uniform("expert_shared_feed_forward_length")?.unwrap_or(0);
    let has_router = |layer: &usize| keys.has(&format!("blk.{layer}.ffn_gate_inp.weight"));
    let layers = keys.layers()?;
    let entries = json!({
        "n_shared_experts": shared / expert,
        "first_k_dense_replace": (0..layers).find(has_router).unwrap_or(layers),
    });
    add(&mut config, entries);
    Ok(config)
}

fn glm4_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("glm4_moe")?;
    keys.heads(&mut config)?;
    grouped_experts(keys, &mut config, SIGMOID)?;
    add(&mut config, json!({"partial_rotary_factor": rotated_share(keys)?}));
    Ok(config)
}

/// Share of a head that RoPE rotates.
fn rotated_share(keys: &Keys<'_>) -> Result<f64, Error> {
    let width = keys.head_width()?;
    let rotated = keys.integer("rope.dimension_count")?.unwrap_or(width);
    Ok(rotated as f64 / width as f64)
}

fn minimax_m2(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("minimax_m2")?;
    keys.heads(&mut config)?;
    let entries = json!({
        "intermediate_size": keys.uniform_size("expert_feed_forward_length")?,
        "num_local_experts": keys.size("expert_count")?,
        "num_experts_per_tok": keys.size("expert_used_count")?,
        "scoring_func": scoring(keys, SIGMOID)?,
        "rotary_dim": keys.integer("rope.dimension_count")?,
    });
    add(&mut config, entries);
    Ok(config)
}
