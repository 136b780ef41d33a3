//! A preset: a published config with its sizes.

use moeflux_base::{Error, ToolError};
use serde_json::Value;

use super::list::PRESETS;

/// A published model whose config is included.
#[derive(Clone, Copy, Debug)]
pub struct Preset {
    /// Name on the command line.
    pub name: &'static str,
    /// One line: layers, experts, size.
    pub description: &'static str,
    /// Sizes that the config must give.
    pub sizes: PresetSizes,
    pub(super) make: fn() -> Value,
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

impl Preset {
    /// The preset of this name.
    ///
    /// # Errors
    /// No preset has this name; the error lists all names.
    pub fn by_name(name: &str) -> Result<&'static Preset, Error> {
        PRESETS.iter().find(|p| p.name == name).ok_or_else(|| {
            let names: Vec<_> = PRESETS.iter().map(|p| p.name).collect();
            ToolError::UnknownPreset { name: name.to_owned(), known: names.join(", ") }.into()
        })
    }

    /// The published `config.json`, without token ids and quantization, which depend on the written
    /// files.
    pub fn config(&self) -> Value {
        (self.make)()
    }
}

/// Layer types: `each` for every `every`-th layer, `most` for the others.
pub(super) fn pattern(layers: u64, every: u64, [most, each]: [&str; 2]) -> Value {
    (1..=layers).map(|layer| if layer % every == 0 { each } else { most }).collect()
}

/// Layer types: `each` for the first of `every` layers, `most` for the others.
pub(super) fn first_of(layers: u64, every: u64, [each, most]: [&str; 2]) -> Value {
    (0..layers).map(|layer| if layer % every == 0 { each } else { most }).collect()
}

/// Overrides fields of a config.
pub(super) fn with(mut config: Value, other: Value) -> Value {
    if let (Value::Object(config), Value::Object(other)) = (&mut config, other) {
        config.extend(other);
    }
    config
}
