//! All architectures, by `model_type`.

use std::sync::LazyLock;

use moeflux_base::{Error, ToolError};
use serde_json::Value;

use super::{
    family::{Family, ModelRow, Preset},
    qwen3_5_moe,
    vision::image_inputs,
};
use crate::{
    blueprint::{Blueprint, DrafterBlueprint},
    checkpoint::{
        Checkpoint,
        gguf::keys::{Converted, Keys},
        source::TensorSource,
        text_config::text_config,
    },
    parts::{
        config::{PREDICTION, VISION, check_keys, check_layers, config_error},
        gguf::architecture::GgufArchitecture,
    },
};

/// All families, in the order of the table of models. Each has a `mod` line in `mod.rs`.
const FAMILIES: &[Family] = &[
    super::qwen3_moe::FAMILY,
    super::qwen2_moe::FAMILY,
    super::mellum::FAMILY,
    super::mixtral::FAMILY,
    super::olmoe::FAMILY,
    super::flex_olmo::FAMILY,
    super::granitemoe::FAMILY,
    super::granitemoehybrid::FAMILY,
    super::nemotron_h::FAMILY,
    super::qwen3_next::FAMILY,
    super::qwen3_5_moe::FAMILY,
    super::qwen4_exp::FAMILY,
    super::kimi_linear::FAMILY,
    super::bailing_hybrid::FAMILY,
    super::deepseek_v2::FAMILY,
    super::deepseek_v3::FAMILY,
    super::axk1::FAMILY,
    super::deepseek_v32::FAMILY,
    super::glm_moe_dsa::FAMILY,
    super::glm5_next::FAMILY,
    super::deepseek_v4::FAMILY,
    super::glm4_moe::FAMILY,
    super::hy_v3::FAMILY,
    super::exaone_moe::FAMILY,
    super::ernie4_5_moe::FAMILY,
    super::dots1::FAMILY,
    super::solar_open::FAMILY,
    super::lfm2_moe::FAMILY,
    super::laguna::FAMILY,
    super::step3p5::FAMILY,
    super::mimo_v2_flash::FAMILY,
    super::afmoe::FAMILY,
    super::bailing_moe::FAMILY,
    super::sarvam_moe::FAMILY,
    super::hunyuan_v1_moe::FAMILY,
    super::mistral4::FAMILY,
    super::cohere2_moe::FAMILY,
    super::phimoe::FAMILY,
    super::gpt_oss::FAMILY,
    super::flint::FAMILY,
    super::kolibri1::FAMILY,
    super::minimax_m2::FAMILY,
    super::minimax_m3::FAMILY,
    super::gemma4::FAMILY,
];

/// Rows of the table of models.
pub fn model_rows() -> impl Iterator<Item = &'static ModelRow> {
    FAMILIES.iter().flat_map(|family| family.models)
}

/// Published models whose configs are included, the smallest first.
pub fn presets() -> &'static [Preset] {
    static PRESETS: LazyLock<Vec<Preset>> = LazyLock::new(|| {
        let presets = FAMILIES.iter().flat_map(|family| family.presets);
        let mut presets: Vec<_> = presets.copied().collect();
        presets.sort_by(|a, b| a.sizes.parameters.total_cmp(&b.sizes.parameters));
        presets
    });
    &PRESETS
}

/// Architectures of GGUF that are read.
pub fn gguf_architectures() -> impl Iterator<Item = &'static GgufArchitecture> {
    FAMILIES.iter().flat_map(|family| family.gguf)
}

/// Converts the metadata of a GGUF file by the tables of its architecture.
///
/// # Errors
/// The architecture is not read, a key is missing, or its value is not read.
pub(crate) fn convert_gguf(keys: &Keys<'_>) -> Result<Converted, Error> {
    if let Some(found) = gguf_architectures().find(|known| known.name == keys.prefix) {
        return found.convert(keys);
    }
    let mut read: Vec<_> = gguf_architectures().map(|known| known.name).collect();
    read.sort_unstable();
    let name = keys.prefix;
    Err(keys.error(format!(
        "\"general.architecture\" is {name:?}, which is not read; read are: {}",
        read.join(", ")
    )))
}

impl GgufArchitecture {
    /// The architecture that a model's files are written in, by its `model_type` and the language
    /// model's config.
    pub fn for_config(model_type: &str, config: &Value) -> Option<&'static Self> {
        let plain = model_type.strip_suffix("_text").unwrap_or(model_type);
        gguf_architectures().find(|known| known.is_for(plain, config))
    }
}

impl Preset {
    /// The preset of this name.
    ///
    /// # Errors
    /// No preset has this name; the error lists all names.
    pub fn by_name(name: &str) -> Result<&'static Preset, Error> {
        presets().iter().find(|preset| preset.name == name).ok_or_else(|| {
            let known: Vec<_> = presets().iter().map(|preset| preset.name).collect();
            ToolError::UnknownPreset { name: name.to_owned(), known: known.join(", ") }.into()
        })
    }
}

/// Supported values of `model_type`, in alphabetical order.
pub fn supported() -> impl Iterator<Item = &'static str> {
    let mut names: Vec<_> = model_rows().flat_map(|row| row.names.iter().copied()).collect();
    names.sort_unstable();
    names.into_iter()
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
pub(super) fn architecture(model_type: &str) -> Option<&'static Family> {
    let plain = model_type.strip_suffix("_text").unwrap_or(model_type);
    let has = |row: &ModelRow| row.names.contains(&plain);
    FAMILIES.iter().find(|family| family.models.iter().any(has))
}

/// `model_type` of the config. The `model_type` of its `text_config`
/// takes its place if that alone is known: a model with vision may wrap any language model.
pub(super) fn model_type(source: &dyn TensorSource) -> Result<&str, Error> {
    let config = source.config();
    let inner = text_config(config).get("model_type");
    let names = [config.get("model_type"), inner];
    let mut names = names.into_iter().flatten().filter_map(|name| name.as_str());
    let known = names.clone().find(|name| architecture(name).is_some());
    let found = known.or_else(|| names.next());
    found.ok_or_else(|| config_error(source, "it has no \"model_type\""))
}
