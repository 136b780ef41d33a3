//! `hy_v3`: Hy3-preview.
//!
//! The architecture of `glm4_moe` with RoPE on whole heads, QK-norm, and other names in its MoE
//! layers. Sources: the published `config.json`; transformers, `modeling_hy_v3.py`.

mod gguf;

use super::{
    glm4_moe::{Glm4Defaults, with_defaults},
    prelude::*,
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["hy_v3"],
        checkpoints: "Hy3-preview",
        special: "QK-norm",
        checked: "transformers",
    }],
    // Source: transformers, configuration_hy_v3.py, but for the context and the keys of the router.
    presets: &[Preset {
        name: "hy3-preview",
        description: "Hy3-preview: 80 layers of attention, 1 dense, 192 experts, 8 per token; 166 \
             GB",
        sizes: PresetSizes { parameters: 295.0, active: 20.1, expert_mb: 10.62 },
        config: published!("hy_v3/hy3-preview.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let moe = MoeStyle {
        router: "router.gate",
        correction: Some("expert_bias"),
        shared: "shared_mlp",
        ..MoeStyle::default()
    };
    with_defaults(source, Glm4Defaults { rotary_share: 1.0, qk_norm: Some(true), moe })
}
