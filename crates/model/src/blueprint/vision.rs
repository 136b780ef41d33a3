//! Vision tower: from the patches of an image to the rows that replace its placeholders.

use super::parts::LinearSource;
use crate::checkpoint::{MatrixSource, VectorSource};

/// A vision tower as data: a transformer over the patches of an image, bidirectional, without a KV
/// cache. Patches are in blocks that are merged into one row each.
#[derive(Debug)]
pub struct VisionBlueprint {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Attention heads.
    pub heads: usize,
    /// Side of a patch in pixels.
    pub patch: usize,
    /// Side of a block in patches.
    pub merge: usize,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Width of the MLPs.
    pub inner: usize,
    /// Width of the result, and of the language model's residual stream.
    pub out: usize,
    /// Embedding of patches.
    pub embedding: PatchEmbedding,
    /// Embeddings of positions.
    pub positions: PositionTable,
    /// Blocks of the transformer, first to last.
    pub blocks: Vec<VisionBlock>,
    /// Merger after the last block.
    pub merger: VisionMerger,
    /// Mergers whose results are added to the language model's first layers, in their order.
    pub deepstack: Vec<DeepstackMerger>,
}

impl VisionBlueprint {
    /// All matrices, in the order of [`VisionBlueprint`]'s fields.
    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSource> {
        let of_blocks = self.blocks.iter().flat_map(VisionBlock::matrices);
        let mergers = self.deepstack.iter().map(|deepstack| &deepstack.merger);
        let mergers = std::iter::once(&self.merger).chain(mergers);
        of_blocks.chain(mergers.flat_map(VisionMerger::matrices))
    }
}

/// Linear embedding of a patch's pixels: a convolution whose stride is its size.
#[derive(Debug)]
pub struct PatchEmbedding {
    /// Weight, of dimensions that `layout` says. The slices of all frames are added: an image is
    /// the same in each.
    pub weight: VectorSource,
    /// Order of the weight's dimensions.
    pub layout: PatchLayout,
    /// Frames that a patch spans.
    pub frames: usize,
    /// Bias, `hidden` elements.
    pub bias: Option<VectorSource>,
}

/// Order of the dimensions of a patch embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PatchLayout {
    /// `(hidden, channel, frame, y, x)`: the Hub.
    ChannelsFirst,
    /// `(hidden, frame, y, x, channel)`: MLX.
    ChannelsLast,
}

/// Learned embeddings of a square of positions, which is scaled to the image's patches.
#[derive(Debug)]
pub struct PositionTable {
    /// `(side * side, hidden)`, row by row.
    pub table: VectorSource,
    /// Side of the square.
    pub side: usize,
}

/// LayerNorm: weight and bias.
#[derive(Debug)]
pub struct LayerNormSource {
    /// Weight.
    pub weight: VectorSource,
    /// Bias.
    pub bias: VectorSource,
}

/// Block of a vision transformer: attention, then an MLP, each under a norm.
#[derive(Debug)]
pub struct VisionBlock {
    /// Norm before attention.
    pub attention_norm: LayerNormSource,
    /// Projections to queries, keys and values, one after another.
    pub qkv: LinearSource,
    /// Projection of the attention's output.
    pub proj: LinearSource,
    /// Norm before the MLP.
    pub mlp_norm: LayerNormSource,
    /// First matrix of the MLP.
    pub up: LinearSource,
    /// Second matrix of the MLP.
    pub down: LinearSource,
}

impl VisionBlock {
    fn matrices(&self) -> [&MatrixSource; 4] {
        let Self { qkv, proj, up, down, .. } = self;
        [qkv, proj, up, down].map(|linear| &linear.weight)
    }
}

/// Merger: the patches of a block joined to one row, and an MLP.
#[derive(Debug)]
pub struct VisionMerger {
    /// Norm of a patch, or of the joined row if it is as wide.
    pub norm: LayerNormSource,
    /// First matrix.
    pub up: LinearSource,
    /// Second matrix.
    pub down: LinearSource,
}

impl VisionMerger {
    fn matrices(&self) -> [&MatrixSource; 2] {
        [&self.up.weight, &self.down.weight]
    }
}

/// Merger of an intermediate block's output. Meng et al., "DeepStack", 2024.
#[derive(Debug)]
pub struct DeepstackMerger {
    /// Index of the block.
    pub after: usize,
    /// The merger.
    pub merger: VisionMerger,
}
