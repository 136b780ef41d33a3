//! Keys and names of tensors in GGUF.

use crate::parts::gguf::{
    latent::{INDEXER_SIZES, INDEXER_TYPES, LATENT, PROJECTIONS},
    prelude::*,
};

pub(in super::super) const ARCHITECTURES: &[GgufArchitecture] = &[GgufArchitecture {
    name: "deepseek32",
    models: "DeepSeek-V3.2",
    model_types: &["deepseek_v32"],
    ..SPARSE
}];

/// Latent attention with an indexer, beside grouped experts.
pub(in super::super) const SPARSE: GgufArchitecture = GgufArchitecture {
    keys: &[MODEL, GROUPED_SIZES, SIGMOID_ROUTER, LATENT, INDEXER_SIZES, &[INDEXER_TYPES]],
    names: &[PROJECTIONS, SHARED_EXPERTS],
    ..PLAIN
};
