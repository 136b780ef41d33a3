//! All architectures, by `model_type`.

use moeflux_base::Error;
use serde_json::Value;

use super::{
    afmoe, bailing_hybrid, bailing_moe, cohere2_moe, deepseek_v2, deepseek_v3, deepseek_v4,
    deepseek_v32, dots1, ernie4_5_moe, exaone_moe, gemma4, glm_moe_dsa, glm4_moe, glm5_next,
    gpt_oss, granitemoe, granitemoehybrid, hunyuan_v1_moe, hy_v3, kimi_linear, laguna, lfm2_moe,
    mellum, mimo_v2_flash, minimax_m2, minimax_m3, mistral4, mixtral, nemotron_h, olmoe, phimoe,
    qwen2_moe, qwen3_5_moe, qwen3_moe, qwen3_next, qwen4_exp, sarvam_moe, solar_open, step3p5,
    vision::image_inputs,
};
use crate::parts::config::{PREDICTION, VISION, check_keys, check_layers, config_error};
use crate::{
    blueprint::{Blueprint, DrafterBlueprint},
    checkpoint::{Checkpoint, source::TensorSource},
};

/// Registry entry of an architecture.
pub(super) struct ArchitectureEntry {
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
        if let Some(folder) = checkpoint.drafter() {
            blueprint.drafter = Some(split_drafter(folder, &blueprint)?);
        }
        Ok(blueprint)
    }

    /// As [`Blueprint::for_checkpoint`], with the experts where the source has them.
    #[doc(hidden)]
    pub fn for_source(source: &dyn TensorSource) -> Result<Self, Error> {
        let model_type = model_type(source)?;
        let Some(architecture) = architecture(model_type) else {
            let supported = supported().collect::<Vec<_>>().join(", ");
            let (path, found) = (source.config_path(), model_type.to_owned());
            return Err(Error::Architecture { path, found, supported });
        };
        check_keys(source, architecture.harmless_keys)?;
        check_layers(source, architecture.layer_types, architecture.per_layer_keys)?;
        let mut blueprint = (architecture.blueprint)(source)?;
        model_type.clone_into(&mut blueprint.model_type);
        blueprint.images = image_inputs(source, &blueprint)?;
        if blueprint.images.is_some() {
            blueprint.skipped.retain(|(part, _)| part != VISION);
        }
        if blueprint.drafter.is_some() {
            blueprint.skipped.retain(|(part, _)| part != PREDICTION);
        }
        Ok(blueprint)
    }
}

/// The head for multi-token prediction in a separate folder, for a model.
fn split_drafter(folder: &Checkpoint, model: &Blueprint) -> Result<DrafterBlueprint, Error> {
    const MODEL_TYPE: &str = "qwen3_5_mtp";
    let found = folder.config().get("model_type").and_then(Value::as_str).unwrap_or("none");
    if found != MODEL_TYPE {
        let problem = format!("expected a drafter of model_type {MODEL_TYPE:?}, got {found:?}");
        return Err(config_error(folder, problem));
    }
    let drafter = qwen3_5_moe::split_drafter(folder)?;
    let width = drafter.fuse.shape.rows;
    if width != model.hidden {
        let hidden = model.hidden;
        let problem = format!("expected \"hidden_size\" {hidden}, as the model has, got {width}");
        return Err(config_error(folder, problem));
    }
    if !drafter.is_runnable() || model.streams != 1 {
        return Err(config_error(folder, "its layer cannot be run on this model"));
    }
    Ok(drafter)
}

/// The architecture of a `model_type`.
pub(super) fn architecture(model_type: &str) -> Option<&'static ArchitectureEntry> {
    let plain = model_type.strip_suffix("_text").unwrap_or(model_type);
    ARCHITECTURES.iter().find(|a| a.model_type == plain)
}

/// `model_type` of the config, or that of its `text_config` if only this one is known: a model
/// with vision may wrap any language model.
pub(super) fn model_type(source: &dyn TensorSource) -> Result<&str, Error> {
    let config = source.config();
    let inner = config.get("text_config").and_then(|t| t.get("model_type"));
    let names = [config.get("model_type"), inner];
    let mut names = names.into_iter().flatten().filter_map(|name| name.as_str());
    let known = names.clone().find(|name| architecture(name).is_some());
    let found = known.or_else(|| names.next());
    found.ok_or_else(|| config_error(source, "it has no \"model_type\""))
}
