//! `deepseek_v2`: DeepSeek-V2, V2.5, V2-Lite, Coder-V2.
//!
//! The attention of `deepseek_v3`; a softmax router without correction, whose groups score their
//! best expert. Sources: DeepSeek-AI, "DeepSeek-V2", 2024; the published `config.json`s and
//! `modeling_deepseek.py`.

use moeflux_base::Error;
use moeflux_ops::{GroupScore, Scoring};

use super::deepseek_v3::{DeepseekV3Config, build};
use crate::parts::{config::parse_config, grouped_moe::MoeStyle};
use crate::{blueprint::Blueprint, checkpoint::source::TensorSource};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let mut config: DeepseekV3Config = parse_config(source)?;
    config.style = MoeStyle {
        correction: None,
        scoring: Scoring::Softmax,
        group_score: GroupScore::Best,
        ..MoeStyle::default()
    };
    // The authors' code scales the weights only where it does not normalize them.
    if *config.moe.norm_topk_prob.get_or_insert(false) {
        config.moe.routed_scaling_factor = None;
    }
    build(source, &config, &|_, _| Ok(None))
}
