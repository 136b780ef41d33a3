//! The vision tower of a checkpoint.

use moeflux_base::Error;

use serde_json::Value;

use super::qwen3_vl;
use crate::{
    blueprint::{Blueprint, ImageInputs, VisionBlueprint},
    checkpoint::{Checkpoint, source::TensorSource},
    parts::config::{Require, config_error},
};

impl VisionBlueprint {
    /// The vision tower of a checkpoint. `None` if it has none: a model of text alone, or an export
    /// without the tower's tensors.
    ///
    /// # Errors
    /// The config has a tower of a family that is not supported. Or it is incomplete or invalid, or
    /// a tensor is missing or has another size than it asks for.
    pub fn for_checkpoint(checkpoint: &Checkpoint) -> Result<Option<Self>, Error> {
        let source: &dyn TensorSource = checkpoint;
        let Some(config) = vision_config(source) else { return Ok(None) };
        match is_supported(source) {
            true => qwen3_vl::tower(source, config),
            false => {
                let name = outer_type(source).unwrap_or("none");
                let problem = format!(
                    "the vision tower of {name:?} is not supported; supported are: qwen3_vl_moe, \
                     qwen3_5_moe"
                );
                Err(config_error(source, problem))
            }
        }
    }
}

fn vision_config(source: &dyn TensorSource) -> Option<&Value> {
    source.config().get("vision_config").filter(|config| config.is_object())
}

fn outer_type(source: &dyn TensorSource) -> Option<&str> {
    source.config().get("model_type").and_then(Value::as_str)
}

/// Whether the tower is of a family that is read.
fn is_supported(source: &dyn TensorSource) -> bool {
    matches!(outer_type(source), Some("qwen3_vl_moe" | "qwen3_5_moe"))
}

/// Images of a language model; `None` without a tower that is read, or without a token in the
/// vocabulary that stands for them.
///
/// # Errors
/// The model has fewer layers than DeepStack.
pub(in crate::families) fn image_inputs(
    source: &dyn TensorSource,
    model: &Blueprint,
) -> Result<Option<ImageInputs>, Error> {
    let has_tower = is_supported(source) && qwen3_vl::has_tower(source);
    let Some(config) = vision_config(source).filter(|_| has_tower) else { return Ok(None) };
    let id = source.config().get("image_token_id").and_then(Value::as_u64);
    let id = id.and_then(|id| u32::try_from(id).ok());
    let Some(placeholder) = id.filter(|id| (*id as usize) < model.vocab) else { return Ok(None) };
    let indexes = config.get("deepstack_visual_indexes").and_then(Value::as_array);
    let (deepstack, layers) = (indexes.map_or(0, Vec::len), model.layers.len());
    Require(source).that(deepstack <= layers, || {
        format!("\"deepstack_visual_indexes\": expected at most {layers}, got {deepstack}")
    })?;
    Ok(Some(ImageInputs { placeholder, deepstack }))
}
