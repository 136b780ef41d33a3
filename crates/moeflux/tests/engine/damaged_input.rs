//! Damaged or malicious files and wrong options give errors that name the file or tensor and say
//! what to do. None panics.

use std::{
    fs,
    path::{Path, PathBuf},
};

use moeflux::{
    ChatOptions, Checkpoint, Engine, EngineOptions, Error, MemoryRequest, Message, StepControl,
    model::blueprint::Blueprint, runtime::Logits,
};
use proptest::prelude::*;
use safetensors::Dtype;
use serde_json::{Map, Value, json};

use crate::common::{copy_golden, read_tensors, write_tensors};

/// A copy of a small checkpoint to damage.
struct CheckpointCopy {
    folder: tempfile::TempDir,
}

impl CheckpointCopy {
    fn golden(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        copy_golden(name, folder.path());
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn json(&self, name: &str, edit: impl FnOnce(&mut Map<String, Value>)) -> &Self {
        let mut value: Value = serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap();
        edit(value.as_object_mut().unwrap());
        fs::write(self.path(name), value.to_string()).unwrap();
        self
    }

    fn config(&self, key: &str, value: Value) -> &Self {
        self.json("config.json", |c| {
            c.insert(key.into(), value);
        })
    }

    /// Edits the header of the safetensors file; the data stay.
    fn header(&self, edit: impl FnOnce(&mut Map<String, Value>)) -> &Self {
        let bytes = fs::read(self.path("model.safetensors")).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let mut header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        edit(header.as_object_mut().unwrap());
        let json = header.to_string();
        let mut out = (json.len() as u64).to_le_bytes().to_vec();
        out.extend(json.as_bytes());
        out.extend(&bytes[8 + n..]);
        fs::write(self.path("model.safetensors"), out).unwrap();
        let _ = fs::remove_file(self.path("model.safetensors.index.json"));
        self
    }

    fn tensor(&self, name: &str, key: &str, value: Value) -> &Self {
        self.header(|h| h[name][key] = value)
    }

    /// Edits the bytes of a tensor.
    fn bytes(&self, name: &str, edit: impl FnOnce(&mut [u8])) -> &Self {
        let path = self.path("model.safetensors");
        let mut bytes = fs::read(&path).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        let end = |i: usize| 8 + n + header[name]["data_offsets"][i].as_u64().unwrap() as usize;
        edit(&mut bytes[end(0)..end(1)]);
        fs::write(path, bytes).unwrap();
        self
    }

    fn open(&self) -> Result<Engine, Error> {
        open(self.folder.path(), MemoryRequest::default())
    }

    /// Opens the copy and checks that the error contains each of `parts`.
    fn fails(&self, parts: &[&str]) {
        says(self.open().err(), parts);
    }
}

fn open(folder: &Path, memory: MemoryRequest) -> Result<Engine, Error> {
    Engine::open(Checkpoint::open(folder)?, EngineOptions::default().memory(memory), &mut |_, _| {})
}

fn says(error: Option<Error>, parts: &[&str]) {
    let message = error.expect("an error").to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not contain {part:?}");
    }
}

const Q_PROJ: &str = "model.layers.1.self_attn.q_proj.weight";
const EXPERTS: &str = "model.layers.1.mlp.switch_mlp.up_proj.weight";

#[test]
fn folders_and_configs() {
    says(
        open(Path::new("/no/such/folder"), MemoryRequest::default()).err(),
        &["/no/such/folder", "--model"],
    );
    let empty = tempfile::tempdir().unwrap();
    says(open(empty.path(), MemoryRequest::default()).err(), &["config.json"]);
    let copy = CheckpointCopy::golden("qwen3_moe");
    fs::write(copy.path("config.json"), "{ not json").unwrap();
    copy.fails(&["config.json", "JSON"]);
    let copy = CheckpointCopy::golden("qwen3_moe");
    copy.config("model_type", json!("llama")).fails(&[
        "config.json",
        "\"llama\"",
        "qwen3_moe",
        "qwen3_5_moe",
    ]);
    copy.json("config.json", |c| {
        c.remove("model_type");
    })
    .fails(&["config.json", "model_type"]);
    let copy = CheckpointCopy::golden("qwen3_moe");
    copy.json("config.json", |c| {
        c.remove("hidden_size");
    })
    .fails(&["config.json", "hidden_size"]);
    CheckpointCopy::golden("qwen3_moe")
        .config("hidden_size", json!("wide"))
        .fails(&["config.json"]);
    CheckpointCopy::golden("qwen3_moe").config("hidden_size", json!(-3)).fails(&["config.json"]);
}

#[test]
fn impossible_configs() {
    let broken: [(&str, Value, &str); 9] = [
        ("num_experts_per_tok", json!(17), "num_experts_per_tok"),
        ("num_experts_per_tok", json!(0), "num_experts_per_tok"),
        ("num_hidden_layers", json!(4_000_000_000u64), "num_hidden_layers"),
        ("num_attention_heads", json!(u64::MAX), "num_attention_heads"),
        ("num_attention_heads", json!(3), "num_key_value_heads"),
        ("head_dim", json!(0), "head_dim"),
        ("head_dim", json!(63), "head_dim"),
        ("vocab_size", json!(0), "vocab_size"),
        ("decoder_sparse_step", json!(0), "decoder_sparse_step"),
    ];
    for (key, value, named) in broken {
        CheckpointCopy::golden("qwen3_moe").config(key, value).fails(&["config.json", named]);
    }
    CheckpointCopy::golden("qwen3_moe")
        .config("num_hidden_layers", json!(5))
        .fails(&["model.layers.3", "no shard has it"]);
    CheckpointCopy::golden("qwen3_moe")
        .config("rope_scaling", json!({"rope_type": "longrope", "factor": 4.0}))
        .fails(&["longrope"]);
}

/// Keys that change the computation, with unsupported values.
#[test]
fn unsupported_configs() {
    let yarn = |without: &str| {
        let mut yarn =
            json!({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024});
        yarn.as_object_mut().unwrap().remove(without);
        yarn
    };
    let linear = |changes: Value| {
        let mut linear = json!({
            "num_heads": 4, "head_dim": 16, "kda_layers": [1, 2, 4], "full_attn_layers": [3]
        });
        linear.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        linear
    };
    let asked: [(&str, &str, Value); 80] = [
        ("deepseek_v4_hub", "hc_mult", json!(9)),
        ("deepseek_v4_hub", "hc_sinkhorn_iters", json!(0)),
        ("deepseek_v4_hub", "hc_eps", json!(-1.0)),
        ("deepseek_v4_hub", "compress_ratios", json!([0, 0, 1, 128, 4])),
        ("deepseek_v4_hub", "compress_ratios", json!([0, 0, 4])),
        ("deepseek_v4_hub", "o_groups", json!(3)),
        ("deepseek_v4_hub", "index_topk", json!(0)),
        ("deepseek_v4_hub", "sliding_window", json!(0)),
        ("deepseek_v4_hub", "scoring_func", json!("sigmoid")),
        ("granitemoehybrid_hub", "num_local_experts", json!(0)),
        ("granitemoehybrid_hub", "mamba_proj_bias", json!(true)),
        ("granitemoehybrid_hub", "mamba_n_groups", json!(3)),
        ("granitemoehybrid_hub", "mamba_d_conv", json!(1)),
        ("granitemoehybrid_hub", "mamba_expand", json!(3)),
        ("granitemoehybrid_hub", "position_embedding_type", json!("alibi")),
        ("granitemoehybrid_hub", "time_step_limit", json!([1.0, 0.5])),
        ("nemotron_h_hub", "hybrid_override_pattern", json!("MEM*E-")),
        ("nemotron_h_hub", "hybrid_override_pattern", json!("MEM*E-X")),
        ("nemotron_h_hub", "mlp_hidden_act", json!("silu")),
        ("nemotron_h_hub", "sliding_window", json!(8)),
        ("nemotron_h_hub", "time_step_limit", json!([0.0])),
        ("nemotron_h_latent_hub", "moe_latent_size", json!(0)),
        ("bailing_hybrid_hub", "no_kda_lora", json!(false)),
        ("bailing_hybrid_hub", "kda_lower_bound", json!(0.0)),
        ("bailing_hybrid_hub", "layer_group_size", json!(0)),
        ("bailing_hybrid_hub", "short_conv_kernel_size", json!(1)),
        ("bailing_hybrid_hub", "gated_attention_proj_granularity_type", json!("element_wise")),
        ("bailing_hybrid_hub", "expert_swiglu_limit_list", json!([null, 0.0, 7.0])),
        ("kimi_linear_hub", "mla_use_nope", json!(false)),
        ("kimi_linear_hub", "use_grouped_topk", json!(false)),
        ("kimi_linear_hub", "attn_res_block_size", json!(12)),
        ("kimi_linear_hub", "linear_attn_config", linear(json!({"num_heads": 0}))),
        ("kimi_linear_hub", "linear_attn_config", linear(json!({"full_attn_layers": [2, 3]}))),
        ("kimi_linear_hub", "linear_attn_config", linear(json!({"full_attn_layers": []}))),
        ("bailing_moe_group_32", "norm_head", json!(true)),
        ("bailing_moe_group_32", "use_qkv_bias", json!(true)),
        ("bailing_moe_group_32", "n_group", json!(2)),
        ("cohere2_moe_hub", "expert_selection_fn", json!("tanh")),
        ("deepseek_v2_hub", "topk_method", json!("noaux_tc")),
        ("granitemoe", "attention_bias", json!(true)),
        ("granitemoe", "logits_scaling", json!(0.0)),
        ("granitemoe", "residual_multiplier", json!(-0.22)),
        ("hunyuan_v1_moe_hub", "use_cla", json!(true)),
        ("phimoe_hub", "router_jitter_noise", json!(-0.1)),
        ("sarvam_moe_hub", "attention_bias", json!(true)),
        ("deepseek_v3", "hidden_act", json!("relu2")),
        ("deepseek_v3", "scoring_func", json!("softmax")),
        ("deepseek_v3", "topk_method", json!("greedy")),
        ("deepseek_v3", "partial_rotary_factor", json!(0.5)),
        ("deepseek_v3", "rope_scaling", yarn("factor")),
        ("deepseek_v3", "rope_scaling", json!({"type": "dynamo", "factor": 2.0})),
        ("deepseek_v3", "rope_parameters", json!({"rope_type": "default", "rope_theta": 1e4})),
        ("deepseek_v3", "mlp_layer_types", json!(["dense", "sparse"])),
        ("deepseek_v3", "mlp_layer_types", json!(["dense", "sparse", "wide"])),
        ("deepseek_v32", "indexer_types", json!(["full", "sometimes", "full"])),
        ("deepseek_v32", "index_topk_pattern", json!("FS")),
        ("ernie4_5_moe_hub", "moe_gate", json!("top2")),
        ("ernie4_5_moe_hub", "moe_gate_act", json!("sigmoid")),
        ("ernie4_5_moe_hub", "moe_layer_interval", json!(0)),
        ("exaone_moe_hub", "is_moe_layer", json!([false, true, "yes", true])),
        ("glm_moe_dsa", "index_topk_pattern", json!(["full", "shared", "both"])),
        ("glm_moe_dsa", "indexer_types", json!(["shared", "full", "full"])),
        ("glm4_moe", "mlp_bias", json!(true)),
        ("glm4_moe", "partial_rotary_factor", json!(-0.5)),
        ("gpt_oss", "layer_types", json!(["sliding_attention"])),
        ("gpt_oss", "swiglu_limit", json!(-7.0)),
        ("gpt_oss", "swiglu_alpha", json!(0)),
        ("gpt_oss", "rope_scaling", json!({"rope_type": "llama3", "factor": 4.0})),
        ("hy_v3_hub", "moe_router_use_sigmoid", json!(false)),
        ("hy_v3_hub", "moe_router_enable_expert_bias", json!(false)),
        ("mimo_v2_hub", "num_key_value_heads", json!(2)),
        ("minimax_m2", "attn_type_list", json!([1, 0, 1])),
        ("minimax_m2", "rotary_dim", json!(0)),
        ("mixtral_hub", "sliding_window", json!(0)),
        ("olmoe_hub", "clip_qkv", json!(8.0)),
        ("qwen3_moe", "use_bias", json!(true)),
        ("qwen3_moe", "use_sliding_window", json!(true)),
        ("qwen3_moe", "attn_logit_softcapping", json!(50.0)),
        ("qwen3_moe", "rms_norm_eps", json!(-1e-6)),
        ("qwen3_next", "rope_scaling", json!({"rope_type": "longrope", "factor": 2.0})),
    ];
    for (golden, key, value) in asked {
        let last = match value.get("type").or(value.get("rope_type")).and_then(Value::as_str) {
            Some("default") => "rope_scaling",
            Some(kind) => kind,
            None => key,
        };
        CheckpointCopy::golden(golden).config(key, value.clone()).fails(&["config.json", last]);
    }
    let text = [
        ("glm5_next_hub", "index_kpool", json!(1)),
        ("glm5_next_hub", "index_kpool_always_select_tail", json!(false)),
        ("glm5_next_hub", "indexer_types", json!(["full", "full", "full", "shared"])),
        ("qwen4_exp_hub", "hc_count", json!(0)),
        ("qwen4_exp_hub", "indexer_kv_heads", json!(2)),
        ("qwen4_exp_hub", "indexer_compress_ratio", json!(1)),
        ("qwen4_exp_hub", "indexer_budget", json!(3)),
        ("qwen4_exp_hub", "output_gate_type", json!("tanh")),
    ];
    for (golden, key, value) in text {
        let copy = CheckpointCopy::golden(golden);
        copy.json("config.json", |c| c["text_config"][key] = value).fails(&["config.json", key]);
    }
    let gemma = |key: &str, value: Value| {
        let copy = CheckpointCopy::golden("gemma4");
        copy.json("config.json", |c| c["text_config"][key] = value).fails(&["config.json", key]);
    };
    gemma("use_bidirectional_attention", json!("all"));
    gemma("final_logit_softcapping", json!(0.0));
    gemma("per_layer_config", json!({"2": {"sliding_window": 64}}));
    gemma("hidden_activation", json!("silu"));
    let minimax = |key: &str, value: Value| {
        let copy = CheckpointCopy::golden("minimax_m3_vl_hub");
        let of_indexer = key.starts_with("sparse");
        let changed = copy.json("config.json", |c| {
            let text = &mut c["text_config"];
            let keys = if of_indexer { &mut text["sparse_attention_config"] } else { text };
            keys[key] = value;
        });
        changed.fails(&["config.json", key]);
    };
    minimax("hidden_act", json!("gelu"));
    minimax("qk_norm_type", json!("per_layer"));
    minimax("swiglu_limit", json!(-7.0));
    minimax("sparse_num_index_heads", json!(1));
    minimax("sparse_index_dim", json!(6));
    minimax("sparse_block_size", json!(6));
    minimax("sparse_block_size", json!(512));
    minimax("sparse_local_block", json!(4));
    minimax("sparse_attention_freq", json!([0, 1]));
    minimax("sparse_attention_freq", json!(null));
}

/// Equivalent spellings of supported values.
#[test]
fn equivalent_configs() {
    let nulls = ["n_group", "topk_group", "routed_scaling_factor", "rope_scaling"];
    for (golden, key, value) in [
        ("glm4_moe", "mlp_layer_types", json!(["dense", "sparse", "sparse"])),
        ("glm_moe_dsa_shared", "index_topk_pattern", Value::Null),
        ("mellum_hub", "use_sliding_window", json!(true)),
        ("minimax_m2", "attn_type_list", json!([1, 1, 1])),
        ("minimax_m2", "partial_rotary_factor", json!(0.5)),
        ("gpt_oss", "swiglu_alpha", json!(1.702)),
    ] {
        assert!(
            CheckpointCopy::golden(golden).config(key, value).open().is_ok(),
            "{golden} with {key}"
        );
    }
    let copy = CheckpointCopy::golden("glm4_moe");
    for key in nulls {
        copy.config(key, Value::Null);
    }
    assert!(copy.open().is_ok());
}

#[test]
fn shards() {
    let copy = CheckpointCopy::golden("qwen3_moe");
    fs::remove_file(copy.path("model.safetensors")).unwrap();
    copy.fails(&["model.safetensors", "download"]);
    fs::remove_file(copy.path("model.safetensors.index.json")).unwrap();
    copy.fails(&["there is no model.safetensors"]);

    let copy = CheckpointCopy::golden("qwen3_moe");
    let bytes = fs::read(copy.path("model.safetensors")).unwrap();
    for keep in [0, 7, 8, 2000, bytes.len() - 1] {
        fs::write(copy.path("model.safetensors"), &bytes[..keep]).unwrap();
        copy.fails(&["model.safetensors", "download it again"]);
    }
    for claimed in [1u64 << 63, u64::MAX, bytes.len() as u64] {
        let mut bytes = bytes.clone();
        bytes[..8].copy_from_slice(&claimed.to_le_bytes());
        fs::write(copy.path("model.safetensors"), bytes).unwrap();
        copy.fails(&["model.safetensors", "header", "download it again"]);
    }

    let copy = CheckpointCopy::golden("qwen3_moe");
    copy.json("model.safetensors.index.json", |i| {
        i["weight_map"]["lm_head.weight"] = json!("../../etc/passwd")
    })
    .fails(&["model.safetensors.index.json", "plain file name"]);
    copy.json("model.safetensors.index.json", |i| {
        i["weight_map"]["lm_head.weight"] = json!("other.safetensors")
    })
    .fails(&["other.safetensors", "download"]);
    let copy = CheckpointCopy::golden("qwen3_moe");
    copy.json("model.safetensors.index.json", |i| {
        i["weight_map"]["ghost.weight"] = json!("model.safetensors")
    });
    copy.open().unwrap();
}

#[test]
fn offsets() {
    let overflow = json!([0, u64::MAX]);
    CheckpointCopy::golden("qwen3_moe")
        .tensor(Q_PROJ, "data_offsets", overflow)
        .fails(&[Q_PROJ, "model.safetensors"]);
    let backwards = json!([4096, 0]);
    CheckpointCopy::golden("qwen3_moe")
        .tensor(Q_PROJ, "data_offsets", backwards)
        .fails(&[Q_PROJ, "before it begins"]);
    let outside = json!([1u64 << 40, (1u64 << 40) + 16384]);
    CheckpointCopy::golden("qwen3_moe")
        .tensor(Q_PROJ, "data_offsets", outside)
        .fails(&[Q_PROJ, "truncated"]);
    let short = json!([0, 16]);
    CheckpointCopy::golden("qwen3_moe")
        .tensor(Q_PROJ, "data_offsets", short)
        .fails(&[Q_PROJ, "do not hold"]);
    CheckpointCopy::golden("qwen3_moe")
        .tensor(Q_PROJ, "shape", json!([u64::MAX, u64::MAX]))
        .fails(&[Q_PROJ]);
    CheckpointCopy::golden("qwen3_moe")
        .header(|h| {
            let other = h["model.layers.2.self_attn.q_proj.weight"]["data_offsets"].clone();
            h[Q_PROJ]["data_offsets"] = other;
        })
        .fails(&["model.safetensors", "overlap", Q_PROJ]);
}

#[test]
fn tensors() {
    for name in [
        Q_PROJ,
        EXPERTS,
        "model.norm.weight",
        "lm_head.scales",
        "model.layers.0.self_attn.q_norm.weight",
    ] {
        CheckpointCopy::golden("qwen3_moe")
            .header(|h| {
                h.remove(name);
            })
            .fails(&[name]);
    }
    CheckpointCopy::golden("qwen3_moe").tensor(Q_PROJ, "shape", json!([128, 32])).fails(&[
        Q_PROJ,
        "model.safetensors",
        "[128, 32]",
    ]);
    CheckpointCopy::golden("qwen3_moe")
        .tensor(EXPERTS, "shape", json!([8, 128, 16]))
        .fails(&[EXPERTS]);
    CheckpointCopy::golden("qwen3_moe")
        .tensor(Q_PROJ, "dtype", json!("I32"))
        .fails(&[Q_PROJ, "I32", "BF16"]);
    CheckpointCopy::golden("qwen3_moe")
        .tensor("model.norm.weight", "dtype", json!("I16"))
        .fails(&["model.norm.weight", "I16"]);
    CheckpointCopy::golden("qwen3_moe")
        .tensor("lm_head.scales", "dtype", json!("U16"))
        .fails(&["lm_head.scales", "U16"]);
}

#[test]
fn quantization() {
    let copy = CheckpointCopy::golden("qwen3_moe");
    copy.json("config.json", |c| c["quantization"]["mode"] = json!("mxfp3"))
        .fails(&["mxfp3", "affine", "mxfp4"]);
    let copy = CheckpointCopy::golden("qwen3_moe");
    let wrong = json!({"bits": 4, "group_size": 64});
    copy.json("config.json", |c| c["quantization"]["model.layers.0.mlp.gate"] = wrong).fails(&[
        "model.layers.0.mlp.gate",
        "4 bits",
        "8",
    ]);
    let copy = CheckpointCopy::golden("qwen3_moe");
    copy.json("config.json", |c| c["quantization"]["bits"] = json!("four"))
        .fails(&["config.json", "bits"]);
    // With 96 inputs, 4 bits would read as 2 and groups of 64 as groups of 128, in some tensors
    // only.
    CheckpointCopy::golden("qwen3_moe")
        .config("hidden_size", json!(96))
        .fails(&["model.safetensors"]);
    CheckpointCopy::golden("qwen3_moe")
        .header(|h| {
            h.remove("lm_head.biases");
        })
        .fails(&["lm_head.weight", "biases"]);
}

#[test]
fn small_floats() {
    let other = json!({"mode": "nvfp4", "bits": 4, "group_size": 16});
    CheckpointCopy::golden("qwen3_moe_mxfp4")
        .json("config.json", |c| c["quantization"]["lm_head"] = other)
        .fails(&["lm_head.weight", "nvfp4", "mxfp4"]);
    CheckpointCopy::golden("qwen3_moe_mxfp4")
        .json("config.json", |c| c["quantization"]["mode"] = json!("nf4"))
        .fails(&["nf4"]);
    CheckpointCopy::golden("qwen3_moe_mxfp4")
        .header(|h| {
            h.remove("lm_head.scales");
        })
        .fails(&["lm_head.scales"]);
    CheckpointCopy::golden("qwen3_moe_mxfp4")
        .config("hidden_size", json!(96))
        .fails(&["model.safetensors"]);
    let block = |size: Value| {
        let copy = CheckpointCopy::golden("qwen3_moe_hub_fp8");
        copy.json("config.json", |c| c["quantization_config"]["weight_block_size"] = size);
        copy
    };
    block(json!([128, 64])).fails(&["weight_scale_inv", "128 x 64", "weight_block_size"]);
    block(json!([0, 128])).fails(&["config.json", "weight_block_size"]);
    block(json!(128)).fails(&["config.json", "weight_block_size"]);
}

#[test]
fn orders_of_inputs() {
    let golden = || CheckpointCopy::golden("glm4_moe_gptq_act_order");
    let of_expert = |expert| format!("model.layers.1.mlp.experts.{expert}.up_proj.g_idx");
    // Gate and up of both experts have two orders then.
    golden()
        .header(|h| {
            let first = h[&of_expert(0)]["data_offsets"].take();
            let second = std::mem::replace(&mut h[&of_expert(1)]["data_offsets"], first);
            h[&of_expert(0)]["data_offsets"] = second;
        })
        .fails(&["experts.0.up_proj", "gate_proj", "desc_act"]);
    let q_proj = "model.layers.0.self_attn.q_proj.g_idx";
    golden().tensor(q_proj, "dtype", json!("F32")).fails(&[q_proj, "F32", "I32"]);
    golden().tensor(q_proj, "shape", json!([32, 2])).fails(&[q_proj, "[32, 2]"]);
    for (group, part) in [(7, "of group 7, of 2 groups"), (-1, "of group -1")] {
        let copy = golden();
        copy.bytes(q_proj, |bytes| bytes[..4].copy_from_slice(&i32::to_le_bytes(group)));
        copy.fails(&[q_proj, part]);
    }
}

/// Module with a table of rows.
const TABLE: &str = "model.language_model.layers.1.ple.ple_embedding";

fn with_table() -> CheckpointCopy {
    CheckpointCopy::golden("qwen4_exp_hub")
}

#[test]
fn constants_of_hashes() {
    for name in ["layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes"] {
        let tensor = &*format!("{TABLE}.{name}");
        let differs = ["model.safetensors", tensor, "number 1 is", "by config.json it is"];
        with_table().bytes(tensor, |bytes| bytes[8] ^= 1).fails(&differs);
        with_table().bytes(tensor, |bytes| bytes[15] ^= 0x80).fails(&differs);
        let of_type = ["model.safetensors", tensor, "U64", "I64"];
        with_table().tensor(tensor, "dtype", json!("U64")).fails(&of_type);
        let count = if name == "layer_multipliers" { 3 } else { 16 };
        let of_shape = ["model.safetensors", tensor, &format!("[1, {count}]")];
        with_table().tensor(tensor, "shape", json!([1, count])).fails(&of_shape);
        let missing = with_table();
        missing.header(|header| drop(header.remove(tensor))).fails(&[tensor, "no shard has it"]);
    }
}

#[test]
fn shards_of_tables() {
    for i in 0..4 {
        let shard = &*format!("{TABLE}.ngram_embedding.shard_{i}.weight");
        let missing = with_table();
        missing.header(|header| drop(header.remove(shard))).fails(&[shard, "no shard has it"]);
        for shape in [[288, 8], [1152, 2]] {
            let [rows, width] = shape;
            let (is, asked) = (format!("[{rows}, {width}]"), "[576, 4]");
            let of_shape = ["model.safetensors", shard, &is, asked];
            with_table().tensor(shard, "shape", json!(shape)).fails(&of_shape);
        }
        let of_type = ["model.safetensors", shard, "I16", "BF16"];
        with_table().tensor(shard, "dtype", json!("I16")).fails(&of_type);
        let beyond = json!([1u64 << 40, (1u64 << 40) + 4608]);
        let truncated = ["model.safetensors", shard, "truncated"];
        with_table().tensor(shard, "data_offsets", beyond).fails(&truncated);
        let short = ["model.safetensors", shard, "do not hold"];
        with_table().tensor(shard, "data_offsets", json!([0, 4607])).fails(&short);
    }
    // Rows of another type than those of the first shard, and FP8 without scales.
    let shard = &*format!("{TABLE}.ngram_embedding.shard_2.weight");
    let copy = with_table();
    let path = copy.path("model.safetensors");
    let mut tensors = read_tensors(&path);
    let tensor = tensors.get_mut(shard).unwrap();
    (tensor.dtype, tensor.bytes) = (Dtype::F32, vec![0; 576 * 4 * 4]);
    write_tensors(&path, &tensors);
    copy.fails(&["model.safetensors", shard, "another type", "shard_0.weight"]);
    let tensor = tensors.get_mut(shard).unwrap();
    (tensor.dtype, tensor.bytes) = (Dtype::F8_E4M3, vec![0; 576 * 4]);
    write_tensors(&path, &tensors);
    copy.fails(&["model.safetensors", shard, "FP8", "weight_scale"]);
}

/// Sizes of tables that no memory or file could hold, and those of other tables.
#[test]
fn settings_of_tables() {
    let fails = |key: &str, value: Value, parts: &[&str]| {
        let copy = with_table();
        copy.json("config.json", |c| c["text_config"][key] = value).fails(parts);
    };
    let impossible: [(&str, &[u64]); 7] = [
        ("ngram_vocab_size_base", &[1 << 62, u64::MAX]),
        ("split_ngram_parts", &[0, 1_000_000_000, u64::MAX]),
        ("heads_per_ngram", &[0, 1 << 40, u64::MAX]),
        ("ngram_size", &[0, 1, 17, 1 << 62]),
        ("make_ngram_vocab_size_divisible_by", &[0, 1 << 62, u64::MAX]),
        ("ple_embed_dim", &[0, 63]),
        ("ple_conv_kernel_size", &[0, 1, 1 << 62]),
    ];
    for (key, values) in impossible {
        values.iter().for_each(|value| fails(key, json!(value), &["config.json", key]));
    }
    fails("eos_token_id", json!(null), &["config.json", "eos_token_id"]);
    let other: [(&str, &[u64]); 7] = [
        ("ngram_vocab_size_base", &[0, 90, 120, 1 << 30]),
        ("split_ngram_parts", &[1, 2, 5, 2304]),
        ("heads_per_ngram", &[4, 16]),
        ("ngram_size", &[2, 5]),
        ("make_ngram_vocab_size_divisible_by", &[1024, 1 << 36]),
        ("ple_embed_dim", &[128, 1 << 62]),
        ("seed", &[0, 1235, u64::MAX]),
    ];
    for (key, values) in other {
        values.iter().for_each(|value| fails(key, json!(value), &["model.safetensors", TABLE]));
    }
}

#[test]
fn text_files() {
    let copy = CheckpointCopy::golden("qwen3_moe");
    copy.json("tokenizer.json", |t| {
        t["model"]["vocab"]["far"] = json!(512);
    })
    .fails(&["tokenizer.json", "512"]);
    let copy = CheckpointCopy::golden("qwen3_moe");
    fs::write(copy.path("tokenizer.json"), "{}").unwrap();
    copy.fails(&["tokenizer.json"]);
    let copy = CheckpointCopy::golden("qwen3_moe");
    fs::remove_file(copy.path("tokenizer.json")).unwrap();
    says(copy.open().unwrap().text().err(), &["tokenizer.json"]);

    let messages = [Message::user("Hello")];
    let copy = CheckpointCopy::golden("qwen3_moe");
    let chat = |copy: &CheckpointCopy| {
        copy.open().unwrap().text().unwrap().chat(&messages, &ChatOptions::default())
    };
    says(chat(&copy).err(), &["--raw"]);
    fs::write(copy.path("chat_template.jinja"), "{{ raise_exception('no ' + messages[0].role) }}")
        .unwrap();
    says(chat(&copy).err(), &["chat_template.jinja", "no user", "--raw"]);
    fs::write(copy.path("chat_template.jinja"), "{% if %}").unwrap();
    says(chat(&copy).err(), &["chat_template.jinja", "--raw"]);
    assert!(copy.open().unwrap().text().unwrap().encode("raw still works").is_ok());
}

/// Parsed JSON takes up to 30 times its bytes, so that sizes are checked before.
#[test]
fn sizes_are_checked_before_parsing() {
    let copy = CheckpointCopy::golden("qwen3_moe");
    let zeros = |count: usize| format!("{{\"x\":[0{}]}}", ",0".repeat(count));
    for name in ["config.json", "generation_config.json", "tokenizer_config.json"] {
        let before = fs::read(copy.path(name)).ok();
        fs::write(copy.path(name), zeros(5 << 20)).unwrap();
        says(copy.open().err(), &[name, "at most"]);
        let _ = match before {
            Some(bytes) => fs::write(copy.path(name), bytes),
            None => fs::remove_file(copy.path(name)),
        };
    }
    let header = (100u64 << 20).to_le_bytes();
    fs::write(copy.path("model.safetensors"), header).unwrap();
    let file = fs::OpenOptions::new().write(true).open(copy.path("model.safetensors")).unwrap();
    file.set_len(1 << 30).unwrap();
    says(copy.open().err(), &["model.safetensors", "104857600"]);
}

#[test]
fn prompts_and_ids() {
    let folder = moeflux_goldens::golden("qwen3_moe");
    let engine = open(&folder, MemoryRequest::default().context(10)).unwrap();
    let mut session = engine.session().unwrap();
    let mut feed = |tokens: &[u32]| {
        session.feed(tokens, Logits::Last, &mut StepControl::default(), &mut |_, _| {})
    };
    says(feed(&[]).err(), &["empty"]);
    says(feed(&[1; 11]).err(), &["context of 10", "--ctx 11"]);
    says(feed(&[1, 512]).err(), &["512", "vocabulary"]);
    feed(&[1; 10]).unwrap();
    says(feed(&[1]).err(), &["context of 10"]);
    let asked = MemoryRequest::default().context(4097);
    says(open(&folder, asked).err(), &["4097", "4096"]);
    for none in [MemoryRequest::default().context(0), MemoryRequest::default().chunk(0)] {
        says(open(&folder, none).err(), &["at least one"]);
    }
}

#[test]
fn budgets() {
    let folder = moeflux_goldens::golden("qwen3_moe");
    for budget in [0, 1, 1 << 20] {
        let request = MemoryRequest::default().budget(budget);
        says(open(&folder, request).err(), &["floor", "--memory", "dense"]);
    }
    let many = MemoryRequest::default().slots(1_000_000);
    assert!(open(&folder, many).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// With any bytes of the header changed, opening returns a result, and reads stay inside the
    /// file.
    #[test]
    fn a_corrupt_header_never_panics(edits in prop::collection::vec((0usize..9600, any::<u8>()), 1..6)) {
        let copy = CheckpointCopy::golden("qwen3_moe");
        let _ = fs::remove_file(copy.path("model.safetensors.index.json"));
        let mut bytes = fs::read(copy.path("model.safetensors")).unwrap();
        for (at, byte) in edits {
            bytes[at] = byte;
        }
        fs::write(copy.path("model.safetensors"), bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(copy.folder.path()) {
            let _ = Blueprint::for_checkpoint(&checkpoint);
        }
    }
}
