//! Configs as transformers 4 and 5 save them again: each golden's config, written by
//! `scripts/saved-configs.py`, describes the same model.

use std::{collections::BTreeMap, fs};

use moeflux::{Checkpoint, model::blueprint::Blueprint};
use serde_json::{Map, Value, json};

use crate::common::{copy_golden, data};

/// Configs by golden.
type Configs = BTreeMap<String, Map<String, Value>>;

/// Configs for each version of transformers.
fn saved() -> Vec<(String, Configs)> {
    let files = fs::read_dir(data().join("saved_configs")).unwrap().map(|e| e.unwrap().path());
    let configs = |path: &std::path::PathBuf| {
        let version = path.file_stem().unwrap().to_str().unwrap().to_owned();
        (version, serde_json::from_slice(&fs::read(path).unwrap()).unwrap())
    };
    files.map(|path| configs(&path)).collect()
}

/// The blueprint of a golden with another config. Text-only exports have another `model_type` when
/// they are saved again.
fn blueprint(golden: &str, config: &Value) -> Result<String, moeflux::Error> {
    let folder = tempfile::tempdir().unwrap();
    copy_golden(golden, folder.path());
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    let blueprint = Blueprint::for_checkpoint(&Checkpoint::open(folder.path())?)?;
    Ok(format!("{blueprint:?}").replace("_moe_text\"", "_moe\""))
}

#[test]
fn a_config_that_transformers_saved_again_describes_the_same_model() {
    let versions = saved();
    assert!(versions.len() >= 2);
    for (version, configs) in versions {
        assert!(configs.len() >= 30, "{version}");
        for (golden, config) in configs {
            let folder = moeflux_goldens::golden(&golden);
            let own: Value =
                serde_json::from_slice(&fs::read(folder.join("config.json")).unwrap()).unwrap();
            let mut saved = Value::Object(config);
            for key in ["quantization", "quantization_config"] {
                if let Some(quantization) = own.get(key) {
                    saved[key] = quantization.clone();
                }
            }
            let found =
                blueprint(&golden, &saved).unwrap_or_else(|e| panic!("{golden} by {version}: {e}"));
            assert_eq!(found, blueprint(&golden, &own).unwrap(), "{golden} by {version}");
        }
    }
}

/// Config of a golden, with changes merged into the language model's part.
fn changed(golden: &str, changes: Value) -> Value {
    let path = moeflux_goldens::golden(golden).join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let text = match config.get_mut("text_config") {
        Some(text) => text,
        None => &mut config,
    };
    let Value::Object(changes) = changes else { panic!("changes are a map") };
    text.as_object_mut().unwrap().extend(changes);
    config
}

#[test]
fn every_key_that_transformers_maps_is_read_under_either_name() {
    for (golden, key, other) in [
        ("qwen3_moe", "num_experts", "num_local_experts"),
        ("qwen3_next", "num_experts", "num_local_experts"),
        ("gpt_oss", "num_local_experts", "num_experts"),
        ("minimax_m2", "num_local_experts", "num_experts"),
        ("deepseek_v3", "n_routed_experts", "num_local_experts"),
        ("glm4_moe", "n_routed_experts", "num_local_experts"),
        ("gpt_oss", "num_experts_per_tok", "experts_per_token"),
        ("glm4_moe_lite_hub", "qk_rope_head_dim", "head_dim"),
        ("bailing_hybrid_hub", "max_position_embeddings", "model_max_length"),
        ("bailing_hybrid_hub", "n_group", "num_expert_group"),
        ("bailing_hybrid_hub", "norm_topk_prob", "moe_renormalize"),
        ("bailing_hybrid_hub", "num_experts_per_tok", "num_experts_per_token"),
    ] {
        let own = changed(golden, json!({}));
        let renamed = changed(golden, json!({key: null, other: own[key]}));
        let found = blueprint(golden, &renamed).unwrap_or_else(|e| panic!("{golden}: {e}"));
        assert_eq!(found, blueprint(golden, &own).unwrap(), "{golden}: {other}");
    }
}

#[test]
fn equal_settings_of_rope_by_layer_type_are_those_of_all_layers() {
    let own = changed("gpt_oss", json!({}));
    let rope = own["rope_scaling"].clone();
    let by_type = json!({"full_attention": rope, "sliding_attention": rope, "other": null});
    let nested = changed("gpt_oss", json!({"rope_scaling": null, "rope_parameters": by_type}));
    assert_eq!(blueprint("gpt_oss", &nested).unwrap(), blueprint("gpt_oss", &own).unwrap());
    let mut differ = nested;
    differ["rope_parameters"]["full_attention"]["factor"] = json!(2);
    let error = blueprint("gpt_oss", &differ).unwrap_err().to_string();
    assert!(error.contains("\"rope_parameters\"") && error.contains("layer types"), "{error}");
}

#[test]
fn what_decides_the_kind_of_a_layer_is_never_assumed() {
    for (golden, changes, parts) in [
        ("qwen3_moe", json!({"num_experts": null}), ["num_experts", "whether layers have experts"]),
        ("deepseek_v3", json!({"n_routed_experts": null}), ["n_routed_experts", "how many"]),
        ("deepseek_v3", json!({"first_k_dense_replace": null}), ["first_k_dense_replace", "which"]),
        ("deepseek_v3", json!({"n_shared_experts": null}), ["n_shared_experts", "shared experts"]),
        (
            "qwen2_moe_hub",
            json!({"shared_expert_intermediate_size": null}),
            ["shared_expert_intermediate_size", "shared expert"],
        ),
        (
            "ernie4_5_moe_hub",
            json!({"moe_layer_start_index": null}),
            ["moe_layer_start_index", "which layers"],
        ),
        (
            "bailing_hybrid_hub",
            json!({"layer_group_size": null}),
            ["layer_group_size", "latent attention"],
        ),
        ("bailing_hybrid_hub", json!({"kda_safe_gate": null}), ["kda_safe_gate", "the decay"]),
        ("bailing_hybrid_hub", json!({"kda_lower_bound": null}), ["kda_lower_bound", "the decay"]),
        (
            "nemotron_h_hub",
            json!({"hybrid_override_pattern": null}),
            ["hybrid_override_pattern", "the part of each layer"],
        ),
        ("kimi_linear_hub", json!({"linear_attn_config": null}), ["linear_attn_config", "missing"]),
        ("exaone_moe_hub", json!({"layer_types": null}), ["layer_types", "missing"]),
        ("exaone_moe_hub", json!({"sliding_window": null}), ["sliding_window", "positions"]),
        ("gpt_oss", json!({"layer_types": null}), ["layer_types", "missing"]),
        ("gemma4", json!({"enable_moe_block": null}), ["enable_moe_block", "missing"]),
        ("gemma4", json!({"global_head_dim": null}), ["global_head_dim", "full attention"]),
        (
            "gemma4",
            json!({"per_layer_config": {"0": {"intermediate_size": 7}}}),
            ["per_layer_config", "layer 0 the \"intermediate_size\" 7"],
        ),
        (
            "qwen3_5_moe",
            json!({"layer_types": null, "full_attention_interval": null}),
            ["full_attention_interval", "full attention"],
        ),
        (
            "glm4_moe",
            json!({"layer_types": ["full_attention", "sliding_attention"]}),
            ["layer_types", "sliding_attention"],
        ),
        (
            "qwen3_moe",
            json!({"per_layer_config": {"1": {"num_experts": 3}}}),
            ["per_layer_config", "num_experts"],
        ),
        ("qwen3_moe", json!({"mlp_layer_types": ["sparse"]}), ["mlp_layer_types", "layer 1"]),
    ] {
        let error = blueprint(golden, &changed(golden, changes.clone())).unwrap_err().to_string();
        for part in parts {
            assert!(error.contains(part), "{golden} with {changes}: {error:?} lacks {part:?}");
        }
        assert!(!error.contains("download"), "{error}");
    }
    // Without experts by intention, and with settings of a layer that repeat the model's.
    let none = blueprint("qwen3_moe", &changed("qwen3_moe", json!({"num_experts": 0})));
    assert!(none.unwrap_err().to_string().contains("gate_proj"));
    let same = json!({"per_layer_config": {"1": {"num_experts": 16}}, "layer_types": null});
    blueprint("qwen3_moe", &changed("qwen3_moe", same)).unwrap();
}

#[test]
fn scaled_rope_is_the_edited_config() {
    let yarn = |factor: f64, original: u64| {
        let positions = "original_max_position_embeddings";
        json!({"rope_type": "yarn", "factor": factor, positions: original})
    };
    let scaled = |golden: &str, config: &Value, scaling: &str| {
        let folder = tempfile::tempdir().unwrap();
        copy_golden(golden, folder.path());
        fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
        let mut checkpoint = Checkpoint::open(folder.path()).unwrap();
        let before = checkpoint.identity().unwrap();
        checkpoint.scale_rope(scaling.parse().unwrap())?;
        assert_ne!(checkpoint.identity().unwrap(), before);
        Ok::<_, moeflux::Error>(format!("{:?}", Blueprint::for_checkpoint(&checkpoint)?))
    };
    let own = changed("qwen3_moe", json!({"max_position_embeddings": 4096}));
    let edit = json!({"rope_scaling": yarn(4.0, 4096), "max_position_embeddings": 16384});
    let edited = blueprint("qwen3_moe", &changed("qwen3_moe", edit)).unwrap();
    assert_eq!(scaled("qwen3_moe", &own, "yarn:4").unwrap(), edited);
    let edit = json!({"rope_scaling": yarn(2.5, 1024), "max_position_embeddings": 2560});
    let edited = blueprint("qwen3_moe", &changed("qwen3_moe", edit)).unwrap();
    assert_eq!(scaled("qwen3_moe", &own, "yarn:2.5:1024").unwrap(), edited);
    let key_beside = json!({"original_max_position_embeddings": 512});
    let own = changed("qwen3_moe", key_beside);
    assert_eq!(scaled("qwen3_moe", &own, "yarn:2.5:1024").unwrap(), edited);
    // A nested config that has rope_parameters keeps what they say of the rotated share.
    let own = changed("qwen3_5_moe", json!({}));
    let text = scaled("qwen3_5_moe", &own, "yarn:2").unwrap();
    assert_ne!(text, blueprint("qwen3_5_moe", &own).unwrap());
    for golden in ["deepseek_v3", "gpt_oss", "gemma4"] {
        let error = scaled(golden, &changed(golden, json!({})), "yarn:2").unwrap_err().to_string();
        assert!(error.contains("--rope-scaling"), "{golden}: {error}");
    }
    for wrong in ["yarn", "yarn:1", "yarn:nan", "yarn:4:0", "yarn:4:5:6", "linear:4", "yarn:1e9"] {
        assert!(wrong.parse::<moeflux::checkpoint::RopeScaling>().is_err(), "{wrong}");
    }
}
