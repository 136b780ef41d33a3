//! Presets: shapes of published models, from their `config.json`.

mod deepseek;
mod glm;
mod kda;
mod list;
mod mamba;
mod others;
mod preset;
mod qwen;
mod softmax;
mod streams;

pub use list::presets;
pub use preset::{Preset, PresetSizes};
