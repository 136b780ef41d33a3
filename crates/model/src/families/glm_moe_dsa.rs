//! `glm_moe_dsa`: GLM-5.
//!
//! The model of `deepseek_v32`, except that its indexer rotates neighbouring elements where
//! DeepSeek's rotates halves. Sources: Z.ai, GLM-5, the published `config.json`s; proof in
//! `docs/references.md`.

use moeflux_base::Error;
use moeflux_ops::RopePairs;

use super::deepseek_v32::sparse_blueprint;
use crate::{blueprint::Blueprint, checkpoint::source::TensorSource};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    sparse_blueprint(source, RopePairs::Interleaved)
}
