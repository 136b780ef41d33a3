//! `hy_v3`: Hy3-preview.
//!
//! The architecture of `glm4_moe` with RoPE on whole heads, norms of queries and keys, and other
//! names in its MoE layers. Sources: the published `config.json`; transformers,
//! `modeling_hy_v3.py`.

use moeflux_base::Error;

use super::glm4_moe::{Glm4Defaults, with_defaults};
use crate::parts::grouped_moe::MoeStyle;
use crate::{blueprint::Blueprint, checkpoint::source::TensorSource};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    let moe = MoeStyle {
        router: "router.gate",
        correction: Some("expert_bias"),
        shared: "shared_mlp",
        ..MoeStyle::default()
    };
    with_defaults(source, Glm4Defaults { rotary_share: 1.0, qk_norm: Some(true), moe })
}
