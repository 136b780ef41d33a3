//! Heads for multi-token prediction: after the last layer, or in a module or folder of their own.

use moeflux_base::Error;

use super::scope::Scope;
use crate::blueprint::{DrafterBlueprint, LayerBlueprint};

/// Names of a head's tensors beside its decoder layer.
pub(crate) struct HeadNames {
    embed_norm: &'static str,
    hidden_norm: &'static str,
    fuse: &'static str,
    norm: &'static str,
}

impl HeadNames {
    /// DeepSeek-V3 and its relatives, and GGUF files of any family: the head is the layer after the
    /// last one.
    pub(crate) const DEEPSEEK: Self = Self {
        embed_norm: "enorm",
        hidden_norm: "hnorm",
        fuse: "eh_proj",
        norm: "shared_head.norm",
    };

    /// Qwen3-Next, Qwen3.5, Qwen3.6: the head is the module `mtp`.
    pub(crate) const QWEN: Self = Self {
        embed_norm: "pre_fc_norm_embedding",
        hidden_norm: "pre_fc_norm_hidden",
        fuse: "fc",
        norm: "norm",
    };
}

/// The head of a module with the decoder layer `layer`.
///
/// # Errors
/// A tensor is missing or has another shape.
pub(crate) fn drafter(
    module: &Scope<'_>,
    names: &HeadNames,
    hidden: usize,
    layer: LayerBlueprint,
) -> Result<DrafterBlueprint, Error> {
    Ok(DrafterBlueprint {
        embed_norm: module.norm(names.embed_norm, hidden)?,
        hidden_norm: module.norm(names.hidden_norm, hidden)?,
        fuse: module.matrix(names.fuse, hidden, 2 * hidden)?,
        layer: Some(layer),
        norm: module.stream_norm(names.norm, hidden)?,
    })
}

/// The head of a module, if it has one that can be run. A model runs without it, so a head with
/// other tensors is none.
pub(crate) fn optional(
    module: &Scope<'_>,
    names: &HeadNames,
    hidden: usize,
    layer: impl FnOnce() -> Result<LayerBlueprint, Error>,
) -> Option<DrafterBlueprint> {
    if !module.has_matrix(names.fuse) {
        return None;
    }
    let found = layer().and_then(|layer| drafter(module, names, hidden, layer));
    found.ok().filter(DrafterBlueprint::is_runnable)
}
