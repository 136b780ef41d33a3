//! `glm_moe_dsa`: GLM-5.
//!
//! The model of `deepseek_v32`, except that its indexer rotates neighbouring elements where
//! DeepSeek's rotates halves. Sources: Z.ai, GLM-5, the published `config.json`s; proof in
//! `docs/references.md`.

use moeflux_compute::RopePairs;

use super::deepseek_v32::sparse_blueprint;
use crate::{base::error::Error, checkpoint::source::TensorSource, model::blueprint::Blueprint};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    sparse_blueprint(source, RopePairs::Interleaved)
}
