//! `solar_open`: Solar-Open-100B.
//!
//! The architecture of `glm4_moe` with RoPE on whole heads and without norms of queries and keys.
//! Sources: Upstage, "Solar Open Technical Report", 2025; the published `config.json`.

use moeflux_base::Error;

use super::glm4_moe::{Glm4Defaults, with_defaults};
use crate::parts::grouped_moe::MoeStyle;
use crate::{blueprint::Blueprint, checkpoint::source::TensorSource};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let moe = MoeStyle::default();
    with_defaults(source, Glm4Defaults { rotary_share: 1.0, qk_norm: Some(false), moe })
}
