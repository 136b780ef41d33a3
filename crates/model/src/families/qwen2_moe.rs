//! `qwen2_moe`: Qwen2-57B-A14B, Qwen1.5-MoE-A2.7B.
//!
//! The architecture of `qwen3_moe` without norms of queries and keys, with their biases and a gated
//! shared expert. Sources: Qwen2 Technical Report, 2024; the published `config.json`s.

use moeflux_base::Error;

use super::qwen3_moe::{HeadNorms, with_norms};
use crate::{blueprint::Blueprint, checkpoint::source::TensorSource};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    with_norms(source, HeadNorms::No)
}
