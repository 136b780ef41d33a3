//! The vision tower of a checkpoint.

use moeflux_base::Error;

use super::qwen3_vl;
use crate::{
    arch::{config::config_error, registry::model_type},
    blueprint::VisionBlueprint,
    checkpoint::{Checkpoint, source::TensorSource},
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
        let Some(config) = source.config().get("vision_config").filter(|c| c.is_object()) else {
            return Ok(None);
        };
        let outer = source.config().get("model_type").and_then(|name| name.as_str());
        match outer {
            Some("qwen3_vl_moe" | "qwen3_5_moe") => qwen3_vl::tower(source, config),
            _ => {
                let name = outer.map_or_else(|| model_type(source), Ok)?;
                let problem = format!(
                    "the vision tower of {name:?} is not supported; supported are: qwen3_vl_moe, \
                     qwen3_5_moe"
                );
                Err(config_error(source, problem))
            }
        }
    }
}
