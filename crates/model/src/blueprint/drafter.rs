//! Head for multi-token prediction (MTP), which drafts tokens.

use super::{
    layer::{LayerBlueprint, NormSource, SubBlockInput},
    states::StateEntries,
};
use crate::checkpoint::{MatrixSource, VectorSource};

/// Head that predicts the token after next, from a token and the model's hidden state before it:
///
/// ```text
/// u = fuse [norm(embedding of the token); norm(hidden state after the final norm)]
/// y = norm(layer(u)),  logits = (the model's head) y
/// ```
///
/// Another draft follows from the drafted token and `y`. DeepSeek-AI, "DeepSeek-V3 Technical
/// Report", 2024, section 2.2; Qwen3.5 has the same under other names. Copies of the model's
/// embedding and head that some checkpoints have are not read.
#[derive(Debug)]
pub struct DrafterBlueprint {
    /// Norm of the embedding.
    pub embed_norm: VectorSource,
    /// Norm of the hidden state.
    pub hidden_norm: VectorSource,
    /// `(hidden, 2 * hidden)`: first the columns of the embedding.
    pub fuse: MatrixSource,
    /// Decoder layer; `None` once it is the last one of the model.
    pub layer: Option<LayerBlueprint>,
    /// Norm of the layer's output.
    pub norm: NormSource,
}

impl DrafterBlueprint {
    /// Bytes in the files of the head's matrices and experts.
    pub fn file_bytes(&self) -> u64 {
        let layer = self.layer.as_ref();
        let matrices = layer.into_iter().flat_map(LayerBlueprint::matrices).chain([&self.fuse]);
        let dense: u64 = matrices.map(|matrix| matrix.file_bytes() as u64).sum();
        let experts = layer.and_then(LayerBlueprint::moe).map(|moe| &moe.experts);
        dense + experts.map_or(0, |experts| experts.count as u64 * experts.file_bytes as u64)
    }

    /// All vectors but the vectors of the layer.
    pub(super) fn vectors(&self) -> impl Iterator<Item = &VectorSource> {
        [&self.embed_norm, &self.hidden_norm].into_iter().chain(self.norm.vectors())
    }

    /// Whether the runtime can run the head: on one residual stream, with states that can be cut at
    /// any length.
    pub(crate) fn is_runnable(&self) -> bool {
        let is_runnable = |layer: &LayerBlueprint| {
            let mut inputs = layer.sub_blocks.iter().map(|sub_block| &sub_block.input);
            layer.is_runnable()
                && !inputs.any(|input| matches!(input, SubBlockInput::Streams(_)))
                && layer.memory.is_none()
                && layer.layer_states(1, 1).iter().all(|s| s.entries == StateEntries::Positions)
        };
        self.layer.as_ref().is_none_or(is_runnable)
    }
}
