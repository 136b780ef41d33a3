//! A model as data: its embedding, layers and head.

use super::{
    layer::{LayerBlueprint, MixerBlueprint, NormSource, SubBlockInput},
    ngram_memory::NgramMemoryBlueprint,
    parts::MoeBlueprint,
    states::StateEntries,
};
use crate::checkpoint::{MatrixSource, Segment, VectorSource};

/// A model as data.
#[derive(Debug)]
pub struct Blueprint {
    /// `model_type` of config.json.
    pub model_type: String,
    /// Width of a residual stream.
    pub hidden: usize,
    /// Residual streams: 1 in most models.
    pub streams: usize,
    /// Vocabulary size: rows of the embedding and of the head.
    pub vocab: usize,
    /// Maximum context of the model, in positions.
    pub max_positions: usize,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Factor on the embedding.
    pub embed_scale: f32,
    /// Soft cap of the logits: `cap * tanh(logit / cap)`.
    pub logit_cap: Option<f32>,
    /// Embedding, `(vocab, hidden)`.
    pub embed: MatrixSource,
    /// Decoder layers, first to last, then the drafter's if it is attached.
    pub layers: Vec<LayerBlueprint>,
    /// Input of the head: [`SubBlockInput::Residual`] or [`SubBlockInput::Streams`].
    pub output: SubBlockInput,
    /// Head, `(vocab, hidden)`; `None` if the embedding serves as head.
    pub head: Option<MatrixSource>,
    /// Bias of the logits, `vocab` elements.
    pub head_bias: Option<VectorSource>,
    /// Factor on the logits.
    pub logit_scale: f32,
    /// Head that drafts tokens.
    pub drafter: Option<DrafterBlueprint>,
    /// Images among the tokens; `None` for a model of text alone.
    pub images: Option<ImageInputs>,
    /// Parts of the checkpoint that are not executed ("vision", "multi-token prediction"), in
    /// bytes.
    pub skipped: Vec<(String, u64)>,
}

/// Images among the tokens of a language model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageInputs {
    /// Token in the place of each row of an image.
    pub placeholder: u32,
    /// Number of the first layers after which further rows are added (DeepStack).
    pub deepstack: usize,
}

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
    fn vectors(&self) -> impl Iterator<Item = &VectorSource> {
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

impl Blueprint {
    /// Whether positions have time, row and column (M-RoPE).
    #[doc(hidden)]
    pub fn has_position_axes(&self) -> bool {
        let mixers = self.layers.iter().filter_map(|layer| layer.mixer());
        mixers.into_iter().any(|mixer| match mixer {
            MixerBlueprint::Gqa(gqa) => !gqa.rope.axes.is_empty(),
            _ => false,
        })
    }

    /// Elements of a row of the residual: all streams.
    pub fn residual(&self) -> usize {
        self.hidden * self.streams
    }

    /// Makes the drafter's layer the last one of the model, which then loads and plans for it as
    /// for the others. Does nothing without a drafter.
    pub fn attach_drafter(&mut self) {
        let layer = self.drafter.as_mut().and_then(|drafter| drafter.layer.take());
        self.layers.extend(layer);
    }

    /// Reverts [`Blueprint::attach_drafter`].
    pub fn detach_drafter(&mut self) {
        if let Some(drafter) = self.drafter.as_mut().filter(|drafter| drafter.layer.is_none()) {
            drafter.layer = self.layers.pop();
        }
    }

    /// The drafter, if it is attached.
    pub fn attached_drafter(&self) -> Option<&DrafterBlueprint> {
        self.drafter.as_ref().filter(|drafter| drafter.layer.is_none())
    }

    /// Whether the embedding is read after the last layer too: as the head, or by a drafter.
    pub fn reads_embed_at_end(&self) -> bool {
        self.head.is_none() || self.attached_drafter().is_some()
    }

    /// Number of layers without the drafter's.
    pub fn own_layers(&self) -> usize {
        self.layers.len() - usize::from(self.attached_drafter().is_some())
    }

    /// All dense matrices of the model: embedding, layers, head.
    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSource> {
        std::iter::once(&self.embed)
            .chain(self.layers.iter().flat_map(LayerBlueprint::matrices))
            .chain(self.output.matrices())
            .chain(&self.head)
            .chain(self.attached_drafter().map(|drafter| &drafter.fuse))
    }

    /// All vectors of the model: norms, biases and the like.
    pub fn vectors(&self) -> impl Iterator<Item = &VectorSource> {
        let layers = self.layers.iter().flat_map(LayerBlueprint::vectors);
        let drafter = self.attached_drafter().into_iter().flat_map(DrafterBlueprint::vectors);
        layers.chain(self.output.vectors()).chain(&self.head_bias).chain(drafter)
    }

    /// All tensors of integers: the experts of hash routers and the constants of n-gram hashes.
    pub fn integers(&self) -> impl Iterator<Item = &Segment> {
        let routers = self.moe_layers().filter_map(|(_, moe)| moe.router.fixed.as_ref());
        let hashes = self.memories().flat_map(|(_, memory)| &memory.constants);
        routers.map(|routes| &routes.segment).chain(hashes.map(|constants| &constants.segment))
    }

    /// Positions of the context that needs no other RoPE; [`Blueprint::max_positions`] in most
    /// models.
    pub fn original_positions(&self) -> usize {
        let mixers = self.layers.iter().filter_map(LayerBlueprint::mixer);
        let long = mixers.filter_map(|mixer| match mixer {
            MixerBlueprint::Gqa(gqa) => gqa.rope.long.as_ref(),
            MixerBlueprint::Mla(mla) => mla.rope.long.as_ref(),
            MixerBlueprint::Compressed(compressed) => compressed.rope.shape.long.as_ref(),
            MixerBlueprint::DeltaNet(_)
            | MixerBlueprint::Mamba2(_)
            | MixerBlueprint::ShortConv(_) => None,
        });
        let positions = long.map(|long| long.original_positions);
        positions.fold(self.max_positions, usize::min)
    }

    /// N-gram memories, with the index of their layer.
    pub fn memories(&self) -> impl Iterator<Item = (usize, &NgramMemoryBlueprint)> {
        self.layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.memory.as_deref()?)))
    }

    /// Bytes in the files of all tables of rows, which are never held in memory.
    pub fn row_tables_bytes(&self) -> u64 {
        self.memories().map(|(_, memory)| memory.table.file_bytes()).sum()
    }

    /// Layers with routed experts, with their index among all layers.
    pub fn moe_layers(&self) -> impl Iterator<Item = (usize, &MoeBlueprint)> {
        self.layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.moe()?)))
    }

    /// Bytes in the files of one token's experts: the sum of top-k experts over all layers.
    pub fn experts_per_token_bytes(&self) -> u64 {
        self.moe_layers().map(|(_, m)| m.router.top_k as u64 * m.experts.file_bytes as u64).sum()
    }

    /// Experts of one token: the sum of top-k over all layers.
    pub fn experts_per_token(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.router.top_k).sum()
    }

    /// Number of experts of all layers.
    pub fn experts(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.experts.count).sum()
    }

    /// Bytes in the files of all experts of all layers.
    pub fn experts_bytes(&self) -> u64 {
        self.moe_layers().map(|(_, m)| m.experts.count as u64 * m.experts.file_bytes as u64).sum()
    }

    /// Most lists of positions that an indexer chooses for a token; `None` without indexers.
    pub fn index_lists(&self) -> Option<usize> {
        let mixers = self.layers.iter().filter_map(LayerBlueprint::mixer);
        let lists = mixers.filter_map(|mixer| match mixer {
            MixerBlueprint::Mla(m) => m.indexer().map(|_| 1),
            MixerBlueprint::Gqa(g) => Some(g.indexer.as_ref()?.lists(g.shape.kv_heads)),
            MixerBlueprint::Compressed(c) => c.indexer.as_ref().map(|_| 1),
            MixerBlueprint::DeltaNet(_)
            | MixerBlueprint::Mamba2(_)
            | MixerBlueprint::ShortConv(_) => None,
        });
        lists.max()
    }

    /// Maximum top-k of any layer.
    pub fn max_top_k(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.router.top_k).max().unwrap_or(0)
    }

    /// Maximum of [`MoeBlueprint::uses`] over all layers.
    #[doc(hidden)]
    pub fn max_uses(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.uses()).max().unwrap_or(0)
    }

    /// Maximum number of columns of any matrix, experts included.
    pub fn max_inputs(&self) -> usize {
        let dense = self.matrices().map(|m| m.shape.cols);
        let experts = self
            .moe_layers()
            .flat_map(|(_, m)| [m.experts.shape.up.cols, m.experts.shape.down.cols]);
        dense.chain(experts).max().unwrap_or(0)
    }

    /// Bytes of a slot: the largest expert of any layer.
    pub fn slot_bytes(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.experts.slot_bytes).max().unwrap_or(0)
    }
}
