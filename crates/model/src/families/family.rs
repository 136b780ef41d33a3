//! A family of models: its entry in the list of families.

use moeflux_base::Error;
use serde_json::Value;

use crate::{
    blueprint::Blueprint, checkpoint::source::TensorSource,
    parts::gguf::architecture::GgufArchitecture,
};

/// Models of one code: values of `model_type` with their blueprint.
#[derive(Clone, Copy)]
pub(crate) struct Family {
    pub(super) models: &'static [ModelRow],
    /// Values of `layer_types` that it implements.
    pub(super) layer_types: &'static [&'static str],
    /// Keys of `per_layer_config` that it reads.
    pub(super) per_layer_keys: &'static [&'static str],
    /// Keys that have no effect on it, although others would refuse their values.
    pub(super) harmless_keys: &'static [&'static str],
    pub(super) blueprint: fn(&dyn TensorSource) -> Result<Blueprint, Error>,
    pub(super) presets: &'static [Preset],
    /// Architectures of its GGUF files.
    pub(super) gguf: &'static [GgufArchitecture],
}

/// Models of a family that differ in sizes only: a row of the table of models.
#[derive(Clone, Copy, Debug)]
pub struct ModelRow {
    /// Values of `model_type`.
    pub names: &'static [&'static str],
    /// Published checkpoints.
    pub checkpoints: &'static str,
    /// Operations that most models lack.
    pub special: &'static str,
    /// References that the goldens come from.
    pub checked: &'static str,
}

/// A published model whose config is included.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// Name on the command line.
    pub name: &'static str,
    /// One line: layers, experts, size.
    pub description: &'static str,
    /// Sizes that the config must give.
    pub sizes: PresetSizes,
    /// JSON of the config. Empty without the feature `presets`.
    pub(super) config: &'static str,
}

impl Preset {
    /// The published `config.json`, without token ids and quantization, which depend on the written
    /// files.
    pub fn config(&self) -> Value {
        // Tests read all of them.
        serde_json::from_str(self.config).unwrap_or_default()
    }
}

/// Sizes of a published model.
#[derive(Clone, Copy, Debug)]
pub struct PresetSizes {
    /// Parameters, in billions.
    pub parameters: f64,
    /// Parameters that a token uses, in billions. Some vendors count the token's embedding; here it
    /// does not count unless it is the output head.
    pub active: f64,
    /// Size of an expert as `synth` writes it, in megabytes.
    pub expert_mb: f64,
}

/// Layer types of sparse attention. The second name is in older configs.
pub(super) const SPARSE: &[&str] = &["indexed_attention", "deepseek_sparse_attention"];

/// Layer types of a family with sliding windows in some layers.
pub(super) const SLIDING: &[&str] = &["full_attention", "sliding_attention"];

/// Layer types of a family with delta-nets in some layers.
pub(super) const DELTA_NET: &[&str] = &["full_attention", "linear_attention"];

impl Family {
    /// A family whose layers have one kind of attention.
    pub(super) const fn new(blueprint: fn(&dyn TensorSource) -> Result<Blueprint, Error>) -> Self {
        Self {
            models: &[],
            layer_types: &["full_attention"],
            per_layer_keys: &[],
            harmless_keys: &[],
            blueprint,
            presets: &[],
            gguf: &[],
        }
    }
}

/// Text of a published config, beside the family's file.
#[cfg(feature = "presets")]
macro_rules! published {
    ($path:literal) => {
        include_str!($path)
    };
}
#[cfg(not(feature = "presets"))]
macro_rules! published {
    ($path:literal) => {
        ""
    };
}
pub(super) use published;
