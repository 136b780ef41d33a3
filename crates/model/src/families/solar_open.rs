//! `solar_open`: Solar-Open-100B.
//!
//! The architecture of `glm4_moe` with RoPE on whole heads and without QK-norm. Sources: Upstage,
//! "Solar Open Technical Report", 2025; the published `config.json`.

use super::{
    glm4_moe::{Glm4Defaults, with_defaults},
    prelude::*,
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["solar_open"],
        checkpoints: "Solar-Open-100B",
        special: "YaRN",
        checked: "transformers, mlx-lm",
    }],
    // Source: huggingface.co/upstage/Solar-Open-100B, config.json.
    presets: &[Preset {
        name: "solar-open-100b",
        description: "Solar-Open-100B: 48 layers of attention, 128 experts, 8 per token; 58 GB",
        sizes: PresetSizes { parameters: 102.6, active: 11.2, expert_mb: 8.85 },
        config: published!("solar_open/solar-open-100b.json"),
    }],
    ..Family::new(blueprint)
};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let moe = MoeStyle::default();
    with_defaults(source, Glm4Defaults { rotary_share: 1.0, qk_norm: Some(false), moe })
}
