//! `sarvam_moe`: Sarvam-30B.
//!
//! The second generation of `bailing_moe` with RoPE on whole heads. transformers saves its config
//! without the keys that tell the generations apart. Sources: the published `config.json`;
//! transformers, `modular_sarvam_moe.py`.

use moeflux_base::Error;

use super::bailing_moe::{Generation, with_generation};
use crate::{blueprint::Blueprint, checkpoint::source::TensorSource};

pub(super) fn blueprint(source: &dyn TensorSource) -> Result<Blueprint, Error> {
    with_generation(source, Generation::Second)
}
