//! `glm_moe_dsa`: GLM-5.
//!
//! The model of `deepseek_v32`, except that its indexer rotates neighbouring elements where
//! DeepSeek's rotates halves. Sources: Z.ai, GLM-5, the published `config.json`s; proof in
//! `docs/references.md`.

mod gguf;

use super::{deepseek_v32::sparse_blueprint, family::SPARSE, prelude::*};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["glm_moe_dsa"],
        checkpoints: "GLM-5, 5.1, 5.2, 5.3",
        special: "the same; layers share indexers",
        checked: "mlx-lm corrected, transformers",
    }],
    layer_types: SPARSE,
    // Source: huggingface.co/zai-org/GLM-5, config.json.
    presets: &[Preset {
        name: "glm-5",
        description: "GLM-5: 78 layers of sparse latent attention, 3 dense, 256 experts, 8 per \
             token; 419 GB",
        sizes: PresetSizes { parameters: 744.0, active: 41.0, expert_mb: 21.23 },
        config: published!("glm_moe_dsa/glm-5.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    sparse_blueprint(source, RopePairs::Interleaved)
}
