//! Attention to a window and to compressed entries of what precedes it.

use super::{
    parts::LinearSource,
    rope::RopeShape,
    states::{LayerState, StateEntries, ring_positions},
};
use crate::checkpoint::{MatrixSource, VectorSource};

/// Attention with one KV head whose values are its keys, to a sliding window and to entries that a
/// compressor makes of blocks of positions. The rotation of the values is undone after attention.
///
/// DeepSeek-AI, "DeepSeek-V4", 2026, section 2.3.
#[derive(Debug)]
pub struct CompressedBlueprint {
    /// Heads and their sizes.
    pub shape: CompressedShape,
    /// RoPE of queries and keys.
    pub rope: PartialRope,
    /// `(rank, hidden)`.
    pub q_a_proj: LinearSource,
    /// `rank` elements.
    pub q_a_norm: VectorSource,
    /// `(heads * head_dim, rank)`.
    pub q_b_proj: LinearSource,
    /// `(head_dim, hidden)`.
    pub kv_proj: LinearSource,
    /// `head_dim` elements.
    pub kv_norm: VectorSource,
    /// Attention sinks: one logit per head.
    pub sinks: VectorSource,
    /// `(groups * output rank, heads / groups * head_dim)`: a matrix for each group of heads.
    pub o_a_proj: MatrixSource,
    /// `(hidden, groups * output rank)`.
    pub o_b_proj: LinearSource,
    /// Compressor of the entries; `None` for the window alone.
    pub compressor: Option<CompressorBlueprint>,
    /// Chooses the entries that attention reads; `None` for all.
    pub indexer: Option<EntryIndexerBlueprint>,
}

/// RoPE of a part of a vector.
#[derive(Clone, Debug)]
pub struct PartialRope {
    /// Rotation of the elements.
    pub shape: RopeShape,
    /// Whether the last elements are rotated instead of the first ones.
    pub of_last: bool,
}

impl PartialRope {
    /// The same for sessions of `context` positions.
    #[doc(hidden)]
    pub fn for_context(&self, context: usize) -> Self {
        Self { shape: self.shape.for_context(context), of_last: self.of_last }
    }

    /// The same with other frequencies: each times `factor`.
    #[doc(hidden)]
    pub fn scaled(&self, factor: f32) -> Self {
        let frequencies = self.shape.frequencies.iter().map(|f| f * factor).collect();
        Self { shape: RopeShape { frequencies, ..self.shape.clone() }, of_last: self.of_last }
    }
}

/// Shape of [`CompressedBlueprint`].
#[derive(Clone, Copy, Debug)]
pub struct CompressedShape {
    /// Query heads.
    pub heads: usize,
    /// Elements per query, key and value.
    pub head_dim: usize,
    /// Groups of heads with an output matrix each.
    pub output_groups: usize,
    /// Outputs of each of these matrices.
    pub output_rank: usize,
    /// Sliding window in positions, the token's own included.
    pub window: usize,
    /// Factor on the scores.
    pub scale: f32,
}

/// Compressor: makes one entry of each complete block of positions, a mean or a gated sum of their
/// values.
#[derive(Debug)]
pub struct CompressorBlueprint {
    /// Positions of a block.
    pub ratio: usize,
    /// Whether an entry also covers the block before: values and gates then have two parts, the
    /// first for the entry of the next block.
    pub overlap: bool,
    /// Elements of an entry.
    pub width: usize,
    /// `(parts * width, hidden)`.
    pub kv_proj: LinearSource,
    /// LayerNorm of the values: weight and bias of `width` elements; not with overlap.
    pub kv_norm: Option<[VectorSource; 2]>,
    /// `(parts * width, hidden)`: logits of the softmax over the positions, per element; `None` for
    /// the mean.
    pub gate_proj: Option<LinearSource>,
    /// `(ratio, parts * width)`, added to the logits by the place in the block.
    pub gate_bias: Option<VectorSource>,
    /// RMSNorm of the entries, `width` elements.
    pub norm: Option<VectorSource>,
    /// RoPE of an entry, at the position of its block's first token.
    pub rope: PartialRope,
}

/// Lightning indexer over compressed entries.
#[derive(Debug)]
pub struct EntryIndexerBlueprint {
    /// Heads.
    pub heads: usize,
    /// Elements per head.
    pub head_dim: usize,
    /// Entries that are chosen.
    pub top_k: usize,
    /// RoPE of the queries.
    pub rope: PartialRope,
    /// `(heads * head_dim, inputs)`, of the latent of attention's queries or, without one, of the
    /// hidden state.
    pub q_proj: LinearSource,
    /// Norm of each query, `head_dim` elements.
    pub q_norm: Option<VectorSource>,
    /// `(heads, hidden)`: weight of each head's score; `None` for equal weights.
    pub weights_proj: Option<LinearSource>,
    /// Compressor of the keys.
    pub compressor: CompressorBlueprint,
}

impl CompressedBlueprint {
    /// Positions of the ring of the window, in sessions of `positions` positions with steps of up
    /// to `chunk` rows.
    #[doc(hidden)]
    pub fn ring(&self, positions: usize, chunk: usize) -> usize {
        ring_positions(self.shape.window, chunk).min(positions)
    }

    /// States for such sessions: keys of the window, then the entries; the open block; keys of the
    /// indexer; its open block.
    pub(super) fn states(&self, positions: usize, chunk: usize) -> Vec<LayerState> {
        let (width, ring) = (self.shape.head_dim, self.ring(positions, chunk));
        let Some(compressor) = &self.compressor else {
            let entries =
                if ring < positions { StateEntries::Ring } else { StateEntries::Positions };
            return vec![LayerState::keys(width, ring, entries)];
        };
        let ratio = compressor.ratio;
        let entries = StateEntries::RingAndBlocks { ring, ratio };
        let mut states = vec![
            LayerState::keys(width, ring.saturating_add(positions / ratio), entries),
            LayerState::recurrent(compressor.state_len()),
        ];
        states.extend(self.indexer.iter().flat_map(|indexer| indexer.states(positions)));
        states
    }
}

/// Most positions of `entries` entries of `ratio` positions each, and of the open block.
pub(crate) fn entry_positions(entries: usize, ratio: usize) -> usize {
    entries.saturating_mul(ratio).saturating_add(ratio - 1)
}

impl EntryIndexerBlueprint {
    /// Most positions that are chosen: those of the entries, and of the open block.
    #[doc(hidden)]
    pub fn positions(&self) -> usize {
        entry_positions(self.top_k, self.compressor.ratio)
    }

    pub(super) fn linears(&self) -> impl Iterator<Item = &LinearSource> {
        let own = std::iter::once(&self.q_proj).chain(&self.weights_proj);
        own.chain(self.compressor.linears())
    }

    pub(super) fn vectors(&self) -> impl Iterator<Item = &VectorSource> {
        self.q_norm.iter().chain(self.compressor.vectors())
    }

    /// States for sessions of `positions` positions: keys, and the open block.
    pub(super) fn states(&self, positions: usize) -> [LayerState; 2] {
        let ratio = self.compressor.ratio;
        let keys = (positions / ratio).max(1);
        [
            LayerState::keys(self.head_dim, keys, StateEntries::Blocks { ratio }),
            LayerState::recurrent(self.compressor.state_len()),
        ]
    }
}

impl CompressorBlueprint {
    /// Parts of values and gates.
    #[doc(hidden)]
    pub fn parts(&self) -> usize {
        1 + usize::from(self.overlap)
    }

    /// f32 values of the state: the rows of the open block and, with overlap, of the one before.
    pub(crate) fn state_len(&self) -> usize {
        let gates = usize::from(self.gate_proj.is_some());
        self.ratio * self.parts() * self.parts() * self.width * (1 + gates)
    }

    /// All matrices with their biases.
    #[doc(hidden)]
    pub fn linears(&self) -> impl Iterator<Item = &LinearSource> {
        std::iter::once(&self.kv_proj).chain(&self.gate_proj)
    }

    /// All other vectors.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = &VectorSource> {
        self.kv_norm.iter().flatten().chain(&self.gate_bias).chain(&self.norm)
    }
}
