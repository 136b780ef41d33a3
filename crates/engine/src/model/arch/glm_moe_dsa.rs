//! `glm_moe_dsa`: GLM-5.
//!
//! The model of `deepseek_v32`; its indexer pairs neighbours where DeepSeek's pairs halves. Sources: Z.ai, GLM-5, the
//! published `config.json`s; see `docs/references.md` for the proof.

use moeflux_compute::RopePairs;

use super::deepseek_v32::sparse;
use crate::{base::error::Error, checkpoint::Checkpoint, model::blueprint::Blueprint};

pub(super) fn blueprint(checkpoint: &Checkpoint) -> Result<Blueprint, Error> {
    sparse(checkpoint, RopePairs::Interleaved)
}
