//! `mistral4`: Mistral-Small-4.
//!
//! The attention of `deepseek_v3` with a factor on the queries that grows with the position; a
//! softmax router without correction. Sources: the published `config.json`; transformers,
//! `modeling_mistral4.py`.

mod gguf;

use super::{
    deepseek_v3::{DeepseekV3Config, build},
    prelude::*,
};

pub(super) const FAMILY: Family = Family {
    models: &[ModelRow {
        names: &["mistral4"],
        checkpoints: "Mistral-Small-4, text",
        special: "latent attention, softmax router, queries scaled by position",
        checked: "transformers",
    }],
    // The text model. Source: transformers, `configuration_mistral4.py`, whose defaults are the
    // published values.
    presets: &[Preset {
        name: "mistral-small-4",
        description: "Mistral-Small-4: 36 layers of latent attention, 128 experts, 4 per token; 67 \
             GB",
        sizes: PresetSizes { parameters: 119.0, active: 6.1, expert_mb: 14.16 },
        config: published!("mistral4/mistral-small-4.json"),
    }],
    gguf: gguf::ARCHITECTURES,
    ..Family::new(blueprint)
};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: DeepseekV3Config = parse_config(source)?;
    config.style = MoeStyle { correction: None, scoring: Scoring::Softmax, ..MoeStyle::default() };
    build(source, &config, &|_, _| Ok(None))
}
