//! `sarvam_moe`: Sarvam-30B.
//!
//! The second generation of `bailing_moe` with RoPE on whole heads. transformers saves its config
//! without the keys that tell the generations apart. Sources: the published `config.json`;
//! transformers, `modular_sarvam_moe.py`.

use super::{
    bailing_moe::{Generation, with_generation},
    prelude::*,
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["sarvam_moe"],
        checkpoints: "Sarvam-30B",
        special: "the same as Ling 2.0, RoPE on whole heads",
        checked: "transformers",
    }],
    // Source: transformers, configuration_sarvam_moe.py, which has the sizes of
    // huggingface.co/sarvamai/sarvam-30b.
    presets: &[Preset {
        name: "sarvam-30b",
        description: "Sarvam-30B: 19 layers of attention, 1 dense, 128 experts, 6 per token; 18 GB",
        sizes: PresetSizes { parameters: 32.15, active: 3.43, expert_mb: 7.08 },
        config: published!("sarvam_moe/sarvam-30b.json"),
    }],
    ..Family::new(blueprint)
};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    with_generation(source, Generation::Second)
}
