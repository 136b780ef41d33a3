//! All architectures of GGUF.

use super::{
    architecture::GgufArchitecture, kda, latent, mamba2, recurrent, sliding, streams, uniform,
};

/// The architectures that are read.
pub(super) fn all() -> impl Iterator<Item = &'static GgufArchitecture> {
    let kinds: [&'static [GgufArchitecture]; 7] = [
        &uniform::ARCHITECTURES,
        &sliding::ARCHITECTURES,
        &recurrent::ARCHITECTURES,
        &latent::ARCHITECTURES,
        &kda::ARCHITECTURES,
        &mamba2::ARCHITECTURES,
        &streams::ARCHITECTURES,
    ];
    kinds.into_iter().flatten()
}
