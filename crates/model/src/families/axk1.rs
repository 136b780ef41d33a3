//! `axk1`: A.X-K1 of SK Telecom.
//!
//! The architecture of [DeepSeek-V3](super::deepseek_v3), with a norm on the sum of routed and
//! shared experts. Sources: transformers, `modeling_axk1.py`; vLLM's AXK1.

use super::{
    deepseek_v3::{DeepseekV3Config, build},
    prelude::*,
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["axk1"],
        checkpoints: "A.X-K1",
        special: "latent attention, group-limited top-k, a norm after the experts",
        checked: "transformers",
    }],
    // The sizes of the defaults of transformers, configuration_axk1.py; the published config.json
    // was not seen.
    presets: &[Preset {
        name: "a.x-k1",
        description: "A.X-K1: 61 layers of latent attention, 1 dense, 192 experts, 8 per token; \
             292 GB",
        sizes: PresetSizes { parameters: 519.0, active: 31.6, expert_mb: 24.77 },
        config: published!("axk1/a.x-k1.json"),
    }],
    ..Family::new(blueprint)
};

fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: DeepseekV3Config = parse_config(source)?;
    config.experts_norm = Some("post_mlp_layernorm");
    build(source, &config, &|_, _| Ok(None))
}
