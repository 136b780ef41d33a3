//! `olmoe`: OLMoE-1B-7B.
//!
//! The architecture of `qwen3_moe` with QK-norm over all heads, and experts in every layer.
//! Sources: Muennighoff et al., "OLMoE", 2024; the published `config.json`.

mod gguf;

use super::{
    prelude::*,
    qwen3_moe::{Qwen3MoeConfig, build},
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["olmoe"],
        checkpoints: "OLMoE-1B-7B",
        special: "QK-norm over all heads",
        checked: "transformers, mlx-lm",
    }],
    // Source: huggingface.co/allenai/OLMoE-1B-7B-0924, config.json.
    presets: &[Preset {
        name: "olmoe-1b-7b",
        description: "OLMoE-1B-7B: 16 layers of attention, 64 experts, 8 per token; 4 GB",
        sizes: PresetSizes { parameters: 6.92, active: 1.18, expert_mb: 3.54 },
        config: published!("olmoe/olmoe-1b-7b.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: Qwen3MoeConfig = parse_config(source)?;
    config.moe.size_experts_as_mlp();
    build(source, &config, QkNorm::OVER_ALL_HEADS)
}
