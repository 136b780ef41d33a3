//! `mistral4`: Mistral-Small-4.
//!
//! The attention of `deepseek_v3` with a factor on the queries that grows with the position; a
//! softmax router without correction. Sources: the published `config.json`; transformers,
//! `modeling_mistral4.py`.

use moeflux_base::Error;
use moeflux_ops::Scoring;

use super::deepseek_v3::{DeepseekV3Config, build};
use crate::parts::{config::parse_config, grouped_moe::MoeStyle};
use crate::{blueprint::Blueprint, checkpoint::source::TensorSource};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: DeepseekV3Config = parse_config(source)?;
    config.style = MoeStyle { correction: None, scoring: Scoring::Softmax, ..MoeStyle::default() };
    build(source, &config, &|_, _| Ok(None))
}
