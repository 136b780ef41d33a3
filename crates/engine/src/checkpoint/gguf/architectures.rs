//! Architectures that llama.cpp names: names of their tensors, and their configs.

use serde_json::{Value, json};

use super::{
    super::data_file::DataFile,
    config::{Config, Keys, add},
    metadata::Metadata,
    names::{self, NameRow, row},
};
use crate::base::error::Error;

/// An architecture as llama.cpp names it.
pub(crate) struct GgufArchitecture {
    /// `general.architecture`, and the prefix of its keys.
    pub(crate) name: &'static str,
    /// `model_type` of the Hub's configs that become it.
    model_types: &'static [&'static str],
    /// Names of tensors besides the common ones.
    pub(super) rows: &'static [NameRow],
    /// Whether value heads of delta-nets are dealt out to the key heads in turn.
    pub(crate) value_heads_dealt: bool,
    /// Config as the Hub has it.
    pub(super) config: fn(&Keys<'_>) -> Result<Config, Error>,
}

/// Entry of an architecture without names besides the common ones.
const PLAIN: GgufArchitecture = GgufArchitecture {
    name: "qwen3moe",
    model_types: &["qwen3_moe"],
    rows: &[],
    value_heads_dealt: false,
    config: qwen3_moe,
};

/// The architectures that are read.
const ARCHITECTURES: [GgufArchitecture; 17] = [
    GgufArchitecture {
        name: "afmoe",
        model_types: &["afmoe"],
        rows: &AFMOE,
        config: afmoe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "deepseek2",
        model_types: &["deepseek_v3", "deepseek_v2", "kimi_k2", "kimi_k25", "glm4_moe_lite"],
        rows: &LATENT,
        config: deepseek2,
        ..PLAIN
    },
    GgufArchitecture {
        name: "deepseek32",
        model_types: &["deepseek_v32"],
        rows: &LATENT,
        config: deepseek32,
        ..PLAIN
    },
    GgufArchitecture {
        name: "dots1",
        model_types: &["dots1"],
        rows: &DOTS1,
        config: dots1,
        ..PLAIN
    },
    GgufArchitecture {
        name: "exaone-moe",
        model_types: &["exaone_moe"],
        rows: &EXAONE_MOE,
        config: exaone_moe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "gemma4",
        model_types: &["gemma4"],
        rows: &GEMMA4,
        config: gemma4,
        ..PLAIN
    },
    GgufArchitecture {
        name: "glm-dsa",
        model_types: &["glm_moe_dsa"],
        rows: &LATENT,
        config: glm_dsa,
        ..PLAIN
    },
    GgufArchitecture {
        name: "glm4moe",
        model_types: &["glm4_moe"],
        rows: &SHARED_EXPERTS,
        config: glm4_moe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "gpt-oss",
        model_types: &["gpt_oss"],
        rows: &GPT_OSS,
        config: gpt_oss,
        ..PLAIN
    },
    GgufArchitecture {
        name: "hy_v3",
        model_types: &["hy_v3"],
        rows: &HY_V3,
        config: hy_v3,
        ..PLAIN
    },
    GgufArchitecture { name: "mellum", model_types: &["mellum"], config: mellum, ..PLAIN },
    GgufArchitecture {
        name: "minimax-m2",
        model_types: &["minimax_m2"],
        rows: &MINIMAX_M2,
        config: minimax_m2,
        ..PLAIN
    },
    GgufArchitecture { name: "olmoe", model_types: &["olmoe"], config: olmoe, ..PLAIN },
    GgufArchitecture {
        name: "qwen2moe",
        model_types: &["qwen2_moe"],
        rows: &GATED_SHARED_EXPERT,
        config: qwen2_moe,
        ..PLAIN
    },
    GgufArchitecture {
        name: "qwen35moe",
        model_types: &["qwen3_5_moe"],
        rows: &DELTA_NET,
        value_heads_dealt: true,
        config: qwen35_moe,
    },
    PLAIN,
    GgufArchitecture {
        name: "qwen3next",
        model_types: &["qwen3_next"],
        rows: &DELTA_NET,
        config: qwen3_next,
        ..PLAIN
    },
];

/// Shared experts without a gate.
const SHARED_EXPERTS: [NameRow; 4] = [
    row("post_attention_norm", "post_attention_layernorm"),
    row("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    row("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

/// A shared expert with a gate.
const GATED_SHARED_EXPERT: [NameRow; 3] = [
    row("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    row("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

/// A gate beside the queries, norms after the parts, and experts under their names on the Hub.
const AFMOE: [NameRow; 12] = [
    row("attn_gate", "self_attn.gate_proj"),
    row("post_attention_norm", "post_attention_layernorm"),
    row("ffn_norm", "pre_mlp_layernorm"),
    row("post_ffw_norm", "post_mlp_layernorm"),
    row("ffn_gate_inp", "mlp.router.gate"),
    row("exp_probs_b.bias", "mlp.expert_bias"),
    row("ffn_gate_exps", "mlp.experts.gate_proj"),
    row("ffn_up_exps", "mlp.experts.up_proj"),
    row("ffn_down_exps", "mlp.experts.down_proj"),
    row("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    row("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

/// Shared experts, and experts under their names on the Hub.
const DOTS1: [NameRow; 6] = [
    row("ffn_gate_exps", "mlp.experts.gate_proj"),
    row("ffn_up_exps", "mlp.experts.up_proj"),
    row("ffn_down_exps", "mlp.experts.down_proj"),
    row("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    row("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

const EXAONE_MOE: [NameRow; 4] = [
    row("exp_probs_b.bias", "mlp.e_score_correction_bias"),
    row("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    row("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

const HY_V3: [NameRow; 6] = [
    row("ffn_gate_inp", "mlp.router.gate"),
    row("exp_probs_b.bias", "mlp.expert_bias"),
    row("exp_probs_b", "mlp.expert_bias"),
    row("ffn_gate_shexp", "mlp.shared_mlp.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_mlp.up_proj"),
    row("ffn_down_shexp", "mlp.shared_mlp.down_proj"),
];

/// Delta-nets, and a shared expert with a gate.
const DELTA_NET: [NameRow; 15] = [
    row("post_attention_norm", "post_attention_layernorm"),
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
    row("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    row("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];

/// Latent attention with its indexer, and shared experts.
const LATENT: [NameRow; 15] = [
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
    row("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    row("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    row("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

/// A dense MLP beside experts with fused gate and up.
const GEMMA4: [NameRow; 12] = [
    row("post_attention_norm", "post_attention_layernorm"),
    row("ffn_norm", "pre_feedforward_layernorm"),
    row("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    row("post_ffw_norm", "post_feedforward_layernorm"),
    row("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    row("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    row("layer_output_scale.weight", "layer_scalar"),
    row("ffn_gate_inp.scale", "router.scale"),
    row("ffn_gate_inp", "router.proj"),
    row("ffn_down_exps.scale", "router.per_expert_scale"),
    row("ffn_gate_up_exps.weight", "experts.gate_up_proj"),
    row("ffn_down_exps.weight", "experts.down_proj"),
];

const GPT_OSS: [NameRow; 6] = [
    row("post_attention_norm", "post_attention_layernorm"),
    row("attn_sinks.weight", "self_attn.sinks"),
    row("ffn_gate_inp", "mlp.router"),
    row("ffn_gate_exps", "mlp.experts.gate_proj"),
    row("ffn_up_exps", "mlp.experts.up_proj"),
    row("ffn_down_exps", "mlp.experts.down_proj"),
];

const MINIMAX_M2: [NameRow; 5] = [
    row("ffn_gate_inp", "block_sparse_moe.gate"),
    row("exp_probs_b.bias", "block_sparse_moe.e_score_correction_bias"),
    row("ffn_gate_exps", "block_sparse_moe.switch_mlp.gate_proj"),
    row("ffn_up_exps", "block_sparse_moe.switch_mlp.up_proj"),
    row("ffn_down_exps", "block_sparse_moe.switch_mlp.down_proj"),
];

impl GgufArchitecture {
    /// The architecture of a `model_type`, if GGUF files of it are read.
    pub(crate) fn for_model_type(model_type: &str) -> Option<&'static Self> {
        let plain = model_type.strip_suffix("_text").unwrap_or(model_type);
        ARCHITECTURES.iter().find(|known| known.model_types.contains(&plain))
    }

    /// Name in GGUF of a tensor that has this name on the Hub.
    pub(crate) fn tensor_name(&self, hub: &str) -> Option<String> {
        names::gguf_name(hub, self.rows)
    }

    /// The architecture of a file.
    ///
    /// # Errors
    /// It is missing or not read.
    pub(super) fn find(metadata: &Metadata, files: &[DataFile]) -> Result<&'static Self, Error> {
        let key = "general.architecture";
        let name = metadata.text(files, key)?.ok_or_else(|| metadata.missing(key))?;
        if let Some(found) = ARCHITECTURES.iter().find(|known| known.name == name) {
            return Ok(found);
        }
        let read: Vec<_> = ARCHITECTURES.iter().map(|known| known.name).collect();
        let problem = format!("is {name:?}, which is not read; read are: {}", read.join(", "));
        Err(metadata.problem(key, &problem))
    }
}

/// Codes of `expert_gating_func`.
const SOFTMAX: u64 = 1;
const SIGMOID: u64 = 2;

/// Name of the router's function on the Hub. `default` is its code where the key is absent.
fn scoring(keys: &Keys<'_>, default: u64) -> Result<&'static str, Error> {
    let name = "expert_gating_func";
    match keys.integer(name)?.unwrap_or(default) {
        SOFTMAX => Ok("softmax"),
        SIGMOID => Ok("sigmoid"),
        other => Err(keys.problem(name, &format!("is {other}, which is not read"))),
    }
}

fn qwen3_moe(keys: &Keys<'_>) -> Result<Config, Error> {
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

/// RoPE of full layers has the usual keys; sliding ones have another base and no scaling.
fn mellum(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = softmax_experts(keys, "mellum")?;
    windows(keys, &mut config, 4)?;
    let base = config.remove("rope_theta");
    let mut full = match config.remove("rope_scaling") {
        Some(Value::Object(scaling)) => scaling,
        _ => Config::new(),
    };
    add(&mut full, json!({"rope_theta": base}));
    let sliding = keys.number("rope.freq_base_swa")?.map(Value::from).or(base);
    let entries = json!({
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": sliding},
        },
    });
    add(&mut config, entries);
    Ok(config)
}

/// Model of grouped-query attention with softmax routers.
fn softmax_experts(keys: &Keys<'_>, model_type: &str) -> Result<Config, Error> {
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

fn qwen3_next(keys: &Keys<'_>) -> Result<Config, Error> {
    delta_nets(keys, "qwen3_next")
}

fn qwen35_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    delta_nets(keys, "qwen3_5_moe")
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

/// Keys of dense layers before layers with a grouped router and shared experts.
fn grouped_experts(keys: &Keys<'_>, config: &mut Config, default: u64) -> Result<(), Error> {
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
fn grouped(keys: &Keys<'_>, model_type: &str) -> Result<Config, Error> {
    let mut config = keys.body(model_type)?;
    keys.heads(&mut config)?;
    grouped_experts(keys, &mut config, SIGMOID)?;
    Ok(config)
}

/// Adds the kinds of layers, with every `n`th one of full attention where the file has no list.
fn windows(keys: &Keys<'_>, config: &mut Config, every: u64) -> Result<(), Error> {
    let entries = json!({
        "sliding_window": keys.size("attention.sliding_window")?,
        "layer_types": layer_types(keys, every)?,
    });
    add(config, entries);
    Ok(())
}

fn dots1(keys: &Keys<'_>) -> Result<Config, Error> {
    grouped(keys, "dots1")
}

fn exaone_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = grouped(keys, "exaone_moe")?;
    windows(keys, &mut config, 4)?;
    Ok(config)
}

fn afmoe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = grouped(keys, "afmoe")?;
    windows(keys, &mut config, 4)?;
    // Not in the file: llama.cpp always scales the embedding.
    add(&mut config, json!({"mup_enabled": true}));
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

/// Model of latent attention.
fn latent(keys: &Keys<'_>, model_type: &str, default: u64) -> Result<Config, Error> {
    let mut config = keys.body(model_type)?;
    grouped_experts(keys, &mut config, default)?;
    // Old files have the widths of heads where newer ones have those of the latent.
    let width = |name: &str| -> Result<u64, Error> {
        match keys.integer(&format!("attention.{name}_mla"))? {
            Some(width) => Ok(width),
            None => keys.size(&format!("attention.{name}")),
        }
    };
    let (key_width, rotated) = (width("key_length")?, keys.size("rope.dimension_count")?);
    let plain = key_width.checked_sub(rotated);
    let plain =
        plain.ok_or_else(|| keys.problem("rope.dimension_count", "exceeds the width of keys"))?;
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

fn deepseek2(keys: &Keys<'_>) -> Result<Config, Error> {
    // Files of GLM-4.7-Flash lack the key, as those of DeepSeek-V2 do.
    let is_flash = matches!(keys.size("block_count")?, 47 | 48)
        && keys.integer("vocab_size")? == Some(154_880);
    let mut config = latent(keys, "deepseek_v3", if is_flash { SIGMOID } else { SOFTMAX })?;
    if config.get("scoring_func").is_some_and(|name| name == "softmax") {
        let grouped = keys.integer("expert_group_count")?.unwrap_or(1) > 1;
        let method = if grouped { "group_limited_greedy" } else { "greedy" };
        add(&mut config, json!({"model_type": "deepseek_v2", "topk_method": method}));
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

fn glm4_moe(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("glm4_moe")?;
    keys.heads(&mut config)?;
    grouped_experts(keys, &mut config, SIGMOID)?;
    let width = keys.size("attention.key_length")?;
    let rotated = keys.integer("rope.dimension_count")?.unwrap_or(width);
    add(&mut config, json!({"partial_rotary_factor": rotated as f64 / width as f64}));
    Ok(config)
}

/// Names of the kinds of layers.
fn layer_types(keys: &Keys<'_>, every: u64) -> Result<Vec<&'static str>, Error> {
    let name = |slides| if slides { "sliding_attention" } else { "full_attention" };
    Ok(keys.slides(every)?.into_iter().map(name).collect())
}

fn gpt_oss(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("gpt_oss")?;
    keys.heads(&mut config)?;
    let entries = json!({
        "intermediate_size": keys.uniform_size("expert_feed_forward_length")?,
        "num_local_experts": keys.size("expert_count")?,
        "num_experts_per_tok": keys.size("expert_used_count")?,
        "sliding_window": keys.size("attention.sliding_window")?,
        "layer_types": layer_types(keys, 2)?,
    });
    add(&mut config, entries);
    // Not in the file.
    if let Some(scaling) = config.get_mut("rope_scaling").and_then(|s| s.as_object_mut()) {
        add(scaling, json!({"truncate": false}));
    }
    Ok(config)
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

/// Keys of full layers have no suffix, those of sliding ones `_swa`.
fn gemma4(keys: &Keys<'_>) -> Result<Config, Error> {
    let mut config = keys.body("gemma4")?;
    let types = layer_types(keys, 6)?;
    let kv_name = "attention.head_count_kv";
    let kv_heads = keys.per_layer(kv_name)?.ok_or_else(|| keys.missing(kv_name))?;
    let of_kind = |kind: &str| {
        let mut all = types.iter().zip(&kv_heads).filter(|(name, _)| **name == kind);
        let first = all.next().map(|(_, heads)| *heads);
        match all.all(|(_, heads)| Some(*heads) == first) {
            true => Ok(first),
            false => Err(keys.problem(kv_name, "differs between layers of one kind")),
        }
    };
    let full_width = keys.size("attention.key_length")?;
    let full = types.iter().position(|name| *name == "full_attention");
    let has_values = full.is_some_and(|layer| keys.has(&format!("blk.{layer}.attn_v.weight")));
    let theta = |name: &str| keys.number(name);
    let entries = json!({
        "intermediate_size": keys.uniform_size("feed_forward_length")?,
        "num_attention_heads": keys.uniform_size("attention.head_count")?,
        "num_key_value_heads": of_kind("sliding_attention")?,
        "num_global_key_value_heads": of_kind("full_attention")?,
        "head_dim": keys.size("attention.key_length_swa")?,
        "global_head_dim": full_width,
        "attention_k_eq_v": !has_values,
        "sliding_window": keys.size("attention.sliding_window")?,
        "layer_types": types,
        "enable_moe_block": true,
        "num_experts": keys.size("expert_count")?,
        "top_k_experts": keys.size("expert_used_count")?,
        "moe_intermediate_size": keys.uniform_size("expert_feed_forward_length")?,
        "hidden_size_per_layer_input": keys.integer("embedding_length_per_layer_input")?,
        "num_kv_shared_layers": keys.integer("attention.shared_kv_layers")?,
        "final_logit_softcapping": keys.number("final_logit_softcapping")?,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": theta("rope.freq_base")?,
                "partial_rotary_factor": rotated_share(keys, full_width)?,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": theta("rope.freq_base_swa")?,
            },
        },
    });
    add(&mut config, entries);
    Ok(config)
}

/// Share of pairs of full layers that are rotated: the divisor of the others is next to infinite.
fn rotated_share(keys: &Keys<'_>, width: u64) -> Result<f64, Error> {
    let Some(divisors) = keys.floats("rope_freqs.weight")? else { return Ok(1.0) };
    let rotated = divisors.iter().filter(|divisor| **divisor < 1e29).count();
    Ok(2.0 * rotated as f64 / width as f64)
}
