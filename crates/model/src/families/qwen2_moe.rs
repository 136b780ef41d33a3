//! `qwen2_moe`: Qwen2-57B-A14B, Qwen1.5-MoE-A2.7B.
//!
//! The architecture of `qwen3_moe` without QK-norm, with biases of queries and keys and a gated
//! shared expert. Sources: Qwen2 Technical Report, 2024; the published `config.json`s.

mod gguf;

use super::{prelude::*, qwen3_moe::build};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["qwen2_moe"],
        checkpoints: "Qwen2-57B-A14B, Qwen1.5-MoE-A2.7B",
        special: "gated shared expert",
        checked: "transformers, mlx-lm",
    }],
    // Source: huggingface.co/Qwen/Qwen2-57B-A14B, config.json.
    presets: &[Preset {
        name: "qwen2-57b-a14b",
        description: "Qwen2-57B-A14B: 28 layers of attention, 64 experts, 8 per token; 32 GB",
        sizes: PresetSizes { parameters: 57.4, active: 13.7, expert_mb: 15.48 },
        config: published!("qwen2_moe/qwen2-57b-a14b.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    build(source, &parse_config(source)?, QkNorm::NONE)
}
