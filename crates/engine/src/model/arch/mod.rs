//! Architectures: one file per `model_type`, which turns a config and tensor names into a
//! [`Blueprint`].
//!
//! Entry point is [`Blueprint::for_checkpoint`], which looks the `model_type` up in
//! [`ARCHITECTURES`]. Shared parts are in `body.rs` (embedding, head, layers, attention),
//! `rope.rs`, `windows.rs`, `kda.rs`, `mamba2.rs`, `softmax_moe.rs`, `grouped_moe.rs` and
//! `expert_tensors.rs`; `config.rs` reads configs and checks their values, `scope.rs` looks tensors
//! up by name.

mod afmoe;
mod bailing_hybrid;
mod bailing_moe;
mod body;
mod cohere2_moe;
mod config;
mod deepseek_v2;
mod deepseek_v3;
mod deepseek_v32;
mod deepseek_v4;
mod dots1;
mod ernie4_5_moe;
mod exaone_moe;
mod expert_tensors;
mod gemma4;
mod glm4_moe;
mod glm5_next;
mod glm_moe_dsa;
mod gpt_oss;
mod granitemoe;
mod granitemoehybrid;
mod grouped_moe;
mod hunyuan_v1_moe;
mod hy_v3;
mod hyper_connections;
mod kda;
mod kimi_linear;
mod laguna;
mod lfm2_moe;
mod mamba2;
mod mellum;
mod mimo_v2_flash;
mod minimax_m2;
mod minimax_m3;
mod mistral4;
mod mixtral;
mod nemotron_h;
pub(crate) mod ngram_memory;
mod olmoe;
mod phimoe;
mod qwen2_moe;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod qwen4_exp;
mod rope;
mod sarvam_moe;
mod scope;
mod softmax_moe;
mod solar_open;
mod step3p5;
mod windows;

use config::{PerLayer, Require, check_keys, check_layers, config_error, parse_config};

use crate::{
    base::error::Error,
    checkpoint::{Checkpoint, source::TensorSource},
    model::blueprint::Blueprint,
};

/// Registry entry of an architecture.
struct ArchitectureEntry {
    model_type: &'static str,
    /// Values of `layer_types` that it implements.
    layer_types: &'static [&'static str],
    /// Keys of `per_layer_config` that it reads.
    per_layer_keys: &'static [&'static str],
    /// Keys that have no effect on it, although others would refuse their values.
    harmless_keys: &'static [&'static str],
    blueprint: fn(&dyn TensorSource) -> Result<Blueprint, Error>,
}

/// Entry of an architecture whose layers have one kind of attention.
const UNIFORM: ArchitectureEntry = ArchitectureEntry {
    model_type: "",
    layer_types: &["full_attention"],
    per_layer_keys: &[],
    harmless_keys: &[],
    blueprint: qwen3_moe::blueprint,
};

/// Entry of an architecture with sparse attention. The second name is that of older configs.
const SPARSE: ArchitectureEntry = ArchitectureEntry {
    layer_types: &["indexed_attention", "deepseek_sparse_attention"],
    blueprint: deepseek_v32::blueprint,
    ..UNIFORM
};

/// Entry of an architecture with sliding windows in some layers.
const SLIDING: ArchitectureEntry = ArchitectureEntry {
    layer_types: &["full_attention", "sliding_attention"],
    blueprint: gpt_oss::blueprint,
    ..UNIFORM
};

/// Entry of an architecture with block indexers in some layers.
const BLOCKS: ArchitectureEntry = ArchitectureEntry {
    layer_types: &["full_attention", "minimax_m3_sparse"],
    harmless_keys: &["hidden_act"],
    blueprint: minimax_m3::blueprint,
    ..UNIFORM
};

/// Entry of Step. transformers repeats the query heads of sliding layers by layer.
const STEP: ArchitectureEntry =
    ArchitectureEntry { per_layer_keys: &["num_attention_heads"], ..SLIDING };

/// Entry of an architecture with delta-nets in some layers.
const DELTA_NET: ArchitectureEntry = ArchitectureEntry {
    layer_types: &["full_attention", "linear_attention"],
    blueprint: qwen3_5_moe::blueprint,
    ..UNIFORM
};

/// Registry of the supported architectures.
const ARCHITECTURES: &[ArchitectureEntry] = &[
    ArchitectureEntry { model_type: "afmoe", blueprint: afmoe::blueprint, ..SLIDING },
    ArchitectureEntry {
        model_type: "bailing_hybrid",
        blueprint: bailing_hybrid::blueprint,
        ..DELTA_NET
    },
    ArchitectureEntry { model_type: "bailing_moe", blueprint: bailing_moe::blueprint, ..UNIFORM },
    ArchitectureEntry {
        model_type: "bailing_moe_v2",
        blueprint: bailing_moe::blueprint,
        ..UNIFORM
    },
    ArchitectureEntry { model_type: "cohere2_moe", blueprint: cohere2_moe::blueprint, ..SLIDING },
    ArchitectureEntry { model_type: "deepseek_v2", blueprint: deepseek_v2::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "deepseek_v3", blueprint: deepseek_v3::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "deepseek_v32", blueprint: deepseek_v32::blueprint, ..SPARSE },
    ArchitectureEntry {
        model_type: "deepseek_v4",
        layer_types: &[
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        harmless_keys: &["sliding_window"],
        blueprint: deepseek_v4::blueprint,
        ..UNIFORM
    },
    ArchitectureEntry { model_type: "dots1", blueprint: dots1::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "ernie4_5_moe", blueprint: ernie4_5_moe::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "exaone_moe", blueprint: exaone_moe::blueprint, ..SLIDING },
    ArchitectureEntry {
        model_type: "gemma4",
        per_layer_keys: &["head_dim", "num_key_value_heads"],
        blueprint: gemma4::blueprint,
        ..SLIDING
    },
    ArchitectureEntry { model_type: "glm4_moe", blueprint: glm4_moe::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "glm4_moe_lite", blueprint: deepseek_v3::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "glm4v_moe", blueprint: glm4_moe::blueprint, ..UNIFORM },
    ArchitectureEntry {
        model_type: "glm5_next",
        layer_types: &["deepseek_sparse_attention", "indexed_attention", "linear_attention"],
        blueprint: glm5_next::blueprint,
        ..UNIFORM
    },
    ArchitectureEntry { model_type: "glm_moe_dsa", blueprint: glm_moe_dsa::blueprint, ..SPARSE },
    ArchitectureEntry { model_type: "gpt_oss", blueprint: gpt_oss::blueprint, ..SLIDING },
    ArchitectureEntry { model_type: "granitemoe", blueprint: granitemoe::blueprint, ..UNIFORM },
    ArchitectureEntry {
        model_type: "granitemoehybrid",
        layer_types: &["mamba", "attention", "linear_attention", "full_attention"],
        blueprint: granitemoehybrid::blueprint,
        ..UNIFORM
    },
    ArchitectureEntry {
        model_type: "hunyuan_v1_moe",
        blueprint: hunyuan_v1_moe::blueprint,
        ..UNIFORM
    },
    ArchitectureEntry { model_type: "hy_v3", blueprint: hy_v3::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "kimi_k2", blueprint: deepseek_v3::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "kimi_k25", blueprint: deepseek_v3::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "kimi_linear", blueprint: kimi_linear::blueprint, ..DELTA_NET },
    ArchitectureEntry { model_type: "laguna", blueprint: laguna::blueprint, ..SLIDING },
    ArchitectureEntry {
        model_type: "lfm2_moe",
        layer_types: &["conv", "full_attention"],
        blueprint: lfm2_moe::blueprint,
        ..UNIFORM
    },
    ArchitectureEntry {
        model_type: "mellum",
        harmless_keys: &["use_sliding_window"],
        blueprint: mellum::blueprint,
        ..SLIDING
    },
    ArchitectureEntry {
        model_type: "mimo_v2",
        harmless_keys: &["attention_chunk_size"],
        blueprint: mimo_v2_flash::blueprint,
        ..SLIDING
    },
    ArchitectureEntry {
        model_type: "mimo_v2_flash",
        harmless_keys: &["attention_chunk_size"],
        blueprint: mimo_v2_flash::blueprint,
        ..SLIDING
    },
    ArchitectureEntry { model_type: "minimax_m2", blueprint: minimax_m2::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "minimax_m3", blueprint: minimax_m3::blueprint, ..BLOCKS },
    ArchitectureEntry { model_type: "minimax_m3_vl", blueprint: minimax_m3::blueprint, ..BLOCKS },
    ArchitectureEntry { model_type: "mistral4", blueprint: mistral4::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "mixtral", blueprint: mixtral::blueprint, ..UNIFORM },
    ArchitectureEntry {
        model_type: "nemotron_h",
        layer_types: &["linear_attention", "full_attention", "moe", "mlp"],
        blueprint: nemotron_h::blueprint,
        ..UNIFORM
    },
    ArchitectureEntry { model_type: "olmoe", blueprint: olmoe::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "phimoe", blueprint: phimoe::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "qwen2_moe", blueprint: qwen2_moe::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "qwen3_5_moe", blueprint: qwen3_5_moe::blueprint, ..DELTA_NET },
    ArchitectureEntry { model_type: "qwen3_moe", blueprint: qwen3_moe::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "qwen3_next", blueprint: qwen3_next::blueprint, ..DELTA_NET },
    ArchitectureEntry {
        model_type: "qwen4_exp",
        // transformers saves full attention as indexed attention.
        layer_types: &["full_attention", "indexed_attention", "linear_attention"],
        blueprint: qwen4_exp::blueprint,
        ..UNIFORM
    },
    ArchitectureEntry { model_type: "qwen3_vl_moe", blueprint: qwen3_moe::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "sarvam_moe", blueprint: sarvam_moe::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "solar_open", blueprint: solar_open::blueprint, ..UNIFORM },
    ArchitectureEntry { model_type: "step3p5", blueprint: step3p5::blueprint, ..STEP },
    ArchitectureEntry { model_type: "step3p7", blueprint: step3p5::blueprint, ..STEP },
];

/// Supported values of `model_type`.
pub fn supported() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|a| a.model_type)
}

impl Blueprint {
    /// Builds the blueprint of a checkpoint from its config and tensor index.
    ///
    /// # Errors
    /// The `model_type` is not supported, the config is incomplete or invalid, or a tensor is
    /// missing or has another shape than the config asks for.
    pub fn for_checkpoint(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let mut blueprint = Self::for_source(checkpoint)?;
        checkpoint.place_packed(&mut blueprint)?;
        Ok(blueprint)
    }

    /// As [`Blueprint::for_checkpoint`], with the experts where the source has them.
    pub(crate) fn for_source(source: &dyn TensorSource) -> Result<Self, Error> {
        let model_type = model_type(source)?;
        let Some(architecture) = architecture(model_type) else {
            let supported = supported().collect::<Vec<_>>().join(", ");
            return Err(config_error(
                source,
                format!(
                    "the model_type {model_type:?} is not supported; supported are: {supported}"
                ),
            ));
        };
        check_keys(source, architecture.harmless_keys)?;
        check_layers(source, architecture.layer_types, architecture.per_layer_keys)?;
        (architecture.blueprint)(source)
    }
}

/// The architecture of a `model_type`.
fn architecture(model_type: &str) -> Option<&'static ArchitectureEntry> {
    let plain = model_type.strip_suffix("_text").unwrap_or(model_type);
    ARCHITECTURES.iter().find(|a| a.model_type == plain)
}

/// `model_type` of the config, or that of its `text_config` if only this one is known: a model
/// with vision may wrap any language model.
fn model_type(source: &dyn TensorSource) -> Result<&str, Error> {
    let config = source.config();
    let inner = config.get("text_config").and_then(|t| t.get("model_type"));
    let names = [config.get("model_type"), inner];
    let mut names = names.into_iter().flatten().filter_map(|name| name.as_str());
    let known = names.clone().find(|name| architecture(name).is_some());
    let found = known.or_else(|| names.next());
    found.ok_or_else(|| config_error(source, "it has no \"model_type\""))
}

/// Whether a tensor belongs to a layer after the last one: multi-token prediction (MTP).
fn is_beyond(tensor: &str, layers: usize) -> bool {
    let number = tensor.split_once("layers.").and_then(|(_, rest)| rest.split('.').next());
    number.and_then(|n| n.parse::<usize>().ok()).is_some_and(|n| n >= layers)
}

/// Parts of a checkpoint that are not executed, with their bytes.
fn skipped(source: &dyn TensorSource, layers: usize) -> Vec<(String, u64)> {
    let vision = [
        "vision",
        "visual.",
        "multi_modal_projector.",
        "mm_projector.",
        "audio_tower.",
        "audio_encoder.",
        "speech_embeddings.",
        "vit_large_projector.",
        "patch_merge_mlp.",
        "embed_audio.",
    ];
    let is_vision = |name: &str| vision.iter().any(|p| name.contains(p));
    let is_prediction =
        |name: &str| name.contains("mtp.") || (!is_vision(name) && is_beyond(name, layers));
    let bytes = |is: &dyn Fn(&str) -> bool| -> u64 {
        source.tensor_bytes().filter(|(name, _)| is(name)).map(|(_, bytes)| bytes).sum()
    };
    let all = [("vision", bytes(&is_vision)), ("multi-token prediction", bytes(&is_prediction))];
    all.into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(part, bytes)| (part.to_owned(), bytes))
        .collect()
}
