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
    ..Family::new(blueprint)
};

fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: DeepseekV3Config = parse_config(source)?;
    config.experts_norm = Some("post_mlp_layernorm");
    build(source, &config, &|_, _| Ok(None))
}
