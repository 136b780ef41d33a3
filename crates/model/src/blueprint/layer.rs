//! Decoder layers: lists of sub-blocks, each a mixer or a feed-forward part.

use moeflux_ops::StateShape;

use super::{
    compressed::CompressedBlueprint,
    delta_net::DeltaNetBlueprint,
    mamba2::Mamba2Blueprint,
    ngram_memory::NgramMemoryBlueprint,
    parts::{GqaBlueprint, GqaIndexer, MlaBlueprint, MlaIndexer, MlpBlueprint, MoeBlueprint},
    short_conv::ShortConvBlueprint,
    states::{LayerState, StateEntries, ring_positions},
    streams::StreamInput,
    weight_list::WeightList,
};
use crate::checkpoint::{MatrixSource, VectorSource};

/// A decoder layer: sub-blocks that run in order, each of which adds to the residual stream.
///
/// Usually a mixer, then a feed-forward part. Either may be alone, or both may run in parallel. At
/// most one sub-block is a mixer, and at most one has routed experts: states and slots are counted
/// by layer. So a published layer with two mixers is two of these.
#[derive(Debug)]
pub struct LayerBlueprint {
    /// N-gram memory, before the sub-blocks.
    pub memory: Option<Box<NgramMemoryBlueprint>>,
    /// Sub-blocks, first to last; the first reads the residual stream.
    pub sub_blocks: Vec<SubBlockBlueprint>,
}

/// A sub-block of a layer: `x = scale (x + post_norm(body(input)))`. With several residual streams,
/// the addition is that of the input's [`StreamMix`](super::StreamMix).
#[derive(Debug)]
pub struct SubBlockBlueprint {
    /// Input of the body.
    pub input: SubBlockInput,
    /// Mixer or feed-forward part.
    pub body: BodyBlueprint,
    /// Norm of the body's output.
    pub post_norm: Option<VectorSource>,
    /// Factor on the residual stream after the addition, one element.
    pub scale: Option<VectorSource>,
}

impl LayerBlueprint {
    /// A layer without an n-gram memory.
    pub(crate) fn new(sub_blocks: impl Into<Vec<SubBlockBlueprint>>) -> Self {
        Self { memory: None, sub_blocks: sub_blocks.into() }
    }
}

impl SubBlockBlueprint {
    /// Sub-block `x += body(norm(x))`.
    pub fn new(norm: impl Into<NormSource>, body: impl Into<BodyBlueprint>) -> Self {
        Self::reading(SubBlockInput::Residual { norm: norm.into() }, body)
    }

    /// Sub-block `x += body(input)`.
    pub(crate) fn reading(input: SubBlockInput, body: impl Into<BodyBlueprint>) -> Self {
        Self { input, body: body.into(), post_norm: None, scale: None }
    }
}

/// Norm of the residual stream.
#[derive(Clone, Debug)]
pub struct NormSource {
    /// Factors, one per element.
    pub weight: VectorSource,
    /// RMSNorm or LayerNorm.
    pub kind: NormKind,
}

/// Kind of a norm.
#[derive(Clone, Debug)]
pub enum NormKind {
    /// RMSNorm.
    Rms,
    /// LayerNorm.
    Layer {
        /// Added after the factors.
        bias: Option<VectorSource>,
    },
}

impl From<VectorSource> for NormSource {
    fn from(weight: VectorSource) -> Self {
        Self { weight, kind: NormKind::Rms }
    }
}

impl NormSource {
    /// Its weight and bias.
    pub(crate) fn vectors(&self) -> impl Iterator<Item = &VectorSource> {
        let bias = match &self.kind {
            NormKind::Rms => None,
            NormKind::Layer { bias } => bias.as_ref(),
        };
        std::iter::once(&self.weight).chain(bias)
    }
}

/// Input of a sub-block.
#[derive(Debug)]
pub enum SubBlockInput {
    /// The residual stream, under a norm.
    Residual {
        /// The norm, of `hidden` elements.
        norm: NormSource,
    },
    /// The residual stream as it is.
    Bare {
        /// Its elements.
        hidden: usize,
    },
    /// A weighted sum of several residual streams, to which the output is added in turn. Not for
    /// MoE with separate norms for the router or the experts, and without a factor on the residual.
    Streams(StreamInput),
    /// The input of the sub-block before, its norm included: both run in parallel on it. Not for
    /// MoE with separate norms for the router or the experts, which read the residual stream.
    Previous,
}

impl SubBlockInput {
    /// The norm of the residual stream, or of the sum of the streams.
    #[doc(hidden)]
    pub fn norm(&self) -> Option<&NormSource> {
        match self {
            Self::Residual { norm } => Some(norm),
            Self::Streams(input) => input.norm.as_ref(),
            Self::Bare { .. } | Self::Previous => None,
        }
    }

    /// All matrices.
    pub fn matrices(&self) -> Vec<&MatrixSource> {
        match self {
            Self::Streams(input) => input.mix.matrices(),
            Self::Residual { .. } | Self::Bare { .. } | Self::Previous => Vec::new(),
        }
    }

    /// All vectors.
    #[doc(hidden)]
    pub fn vectors(&self) -> Vec<&VectorSource> {
        let mut vectors = match self {
            Self::Streams(input) => input.mix.vectors(),
            Self::Residual { .. } | Self::Bare { .. } | Self::Previous => Vec::new(),
        };
        vectors.extend(self.norm().into_iter().flat_map(NormSource::vectors));
        vectors
    }
}

/// Computation of a sub-block.
#[derive(Debug)]
pub enum BodyBlueprint {
    /// Attention or a recurrence.
    Mixer(MixerBlueprint),
    /// MLP or MoE.
    FeedForward(FeedForwardBlueprint),
}

impl From<MixerBlueprint> for BodyBlueprint {
    fn from(mixer: MixerBlueprint) -> Self {
        Self::Mixer(mixer)
    }
}

impl From<FeedForwardBlueprint> for BodyBlueprint {
    fn from(feed_forward: FeedForwardBlueprint) -> Self {
        Self::FeedForward(feed_forward)
    }
}

/// Token mixer.
#[derive(Debug)]
pub enum MixerBlueprint {
    /// Grouped-query attention.
    Gqa(Box<GqaBlueprint>),
    /// Multi-head latent attention.
    Mla(Box<MlaBlueprint>),
    /// Attention to a window and to compressed entries.
    Compressed(Box<CompressedBlueprint>),
    /// Gated delta-net.
    DeltaNet(Box<DeltaNetBlueprint>),
    /// Mamba-2.
    Mamba2(Box<Mamba2Blueprint>),
    /// Gated short convolution.
    ShortConv(Box<ShortConvBlueprint>),
}

impl From<GqaBlueprint> for MixerBlueprint {
    fn from(gqa: GqaBlueprint) -> Self {
        Self::Gqa(Box::new(gqa))
    }
}

impl From<MlaBlueprint> for MixerBlueprint {
    fn from(mla: MlaBlueprint) -> Self {
        Self::Mla(Box::new(mla))
    }
}

impl From<CompressedBlueprint> for MixerBlueprint {
    fn from(compressed: CompressedBlueprint) -> Self {
        Self::Compressed(Box::new(compressed))
    }
}

impl From<DeltaNetBlueprint> for MixerBlueprint {
    fn from(delta_net: DeltaNetBlueprint) -> Self {
        Self::DeltaNet(Box::new(delta_net))
    }
}

impl From<Mamba2Blueprint> for MixerBlueprint {
    fn from(mamba2: Mamba2Blueprint) -> Self {
        Self::Mamba2(Box::new(mamba2))
    }
}

impl From<ShortConvBlueprint> for MixerBlueprint {
    fn from(short_conv: ShortConvBlueprint) -> Self {
        Self::ShortConv(Box::new(short_conv))
    }
}

/// Feed-forward part.
#[derive(Debug)]
pub enum FeedForwardBlueprint {
    /// One MLP for all tokens.
    Dense(Box<MlpBlueprint>),
    /// Routed experts.
    Moe(Box<MoeBlueprint>),
}

impl From<MlpBlueprint> for FeedForwardBlueprint {
    fn from(mlp: MlpBlueprint) -> Self {
        Self::Dense(Box::new(mlp))
    }
}

impl From<MoeBlueprint> for FeedForwardBlueprint {
    fn from(moe: MoeBlueprint) -> Self {
        Self::Moe(Box::new(moe))
    }
}

impl MixerBlueprint {
    /// All matrices of the mixer.
    pub fn matrices(&self) -> Vec<&MatrixSource> {
        let mut list = WeightList::default();
        list.mixer(self);
        list.matrices
    }

    /// Sliding window of attention, in positions.
    pub fn window(&self) -> Option<usize> {
        match self {
            Self::Gqa(g) => g.shape.window,
            Self::Compressed(c) => Some(c.shape.window),
            Self::Mla(_) | Self::DeltaNet(_) | Self::Mamba2(_) | Self::ShortConv(_) => None,
        }
    }

    /// Positions of the KV cache of a window, which is a ring.
    fn ring(&self, chunk: usize) -> Option<usize> {
        Some(ring_positions(self.window()?, chunk))
    }

    /// States of the mixer for a session of `positions` positions, with up to `chunk` rows per
    /// step; at most [`MAX_STATES`](super::MAX_STATES).
    fn states(&self, positions: usize, chunk: usize) -> Vec<LayerState> {
        let index_keys = |width| LayerState::keys(width, positions, StateEntries::Positions);
        match self {
            Self::Gqa(g) => {
                let ring = self.ring(chunk).filter(|ring| *ring < positions);
                let shape = StateShape::KeyValue {
                    kv_heads: g.shape.kv_heads,
                    key_width: g.shape.head_dim,
                    value_width: g.shape.v_head_dim,
                    positions: ring.unwrap_or(positions),
                };
                let entries = match ring {
                    Some(_) => StateEntries::Ring,
                    None => StateEntries::Positions,
                };
                let mut states = vec![LayerState { shape, entries }];
                match &g.indexer {
                    Some(GqaIndexer::Blocks(indexer)) => states.push(index_keys(indexer.head_dim)),
                    Some(GqaIndexer::Entries(indexer)) => states.extend(indexer.states(positions)),
                    None => {}
                }
                states
            }
            Self::Mla(m) => {
                let width = m.shape.kv_lora_rank + m.shape.qk_rope_head_dim;
                let latent = LayerState::keys(width, positions, StateEntries::Positions);
                let mut states = vec![latent];
                match m.indexer() {
                    Some(MlaIndexer::Positions(indexer)) => {
                        states.push(index_keys(indexer.head_dim));
                    }
                    Some(MlaIndexer::Entries(indexer)) => states.extend(indexer.states(positions)),
                    None => {}
                }
                states
            }
            Self::Compressed(c) => c.states(positions, chunk),
            Self::DeltaNet(d) => {
                let s = &d.shape;
                vec![
                    LayerState::recurrent((s.conv_width - 1) * s.channels()),
                    LayerState::recurrent(s.value_heads * s.value_width * s.key_width),
                ]
            }
            Self::Mamba2(m) => {
                let s = &m.shape;
                vec![
                    LayerState::recurrent((s.conv_width - 1) * s.channels()),
                    LayerState::recurrent(s.inner() * s.state_width),
                ]
            }
            Self::ShortConv(c) => vec![LayerState::recurrent((c.taps - 1) * c.channels())],
        }
    }
}

impl LayerBlueprint {
    fn weights(&self) -> WeightList<'_> {
        let mut list = WeightList::default();
        if let Some(memory) = &self.memory {
            list.matrices.extend(memory.matrices());
            list.vectors.extend(memory.vectors());
        }
        self.sub_blocks.iter().for_each(|sub_block| list.sub_block(sub_block));
        list
    }

    /// All dense matrices of the layer.
    pub fn matrices(&self) -> Vec<&MatrixSource> {
        self.weights().matrices
    }

    /// All vectors of the layer.
    pub fn vectors(&self) -> Vec<&VectorSource> {
        self.weights().vectors
    }

    /// Shapes of the states of this layer for a session of `positions` positions, with up to
    /// `chunk` rows per step. Empty without a mixer.
    pub fn states(&self, positions: usize, chunk: usize) -> Vec<StateShape> {
        self.layer_states(positions, chunk).into_iter().map(|state| state.shape).collect()
    }

    /// The same states, with the entries that a sequence fills.
    #[doc(hidden)]
    pub fn layer_states(&self, positions: usize, chunk: usize) -> Vec<LayerState> {
        let mut states = self.mixer_states(positions, chunk);
        states.extend(self.memory.iter().map(|m| LayerState::recurrent(m.state_len())));
        states
    }

    fn mixer_states(&self, positions: usize, chunk: usize) -> Vec<LayerState> {
        self.mixer().map_or_else(Vec::new, |mixer| mixer.states(positions, chunk))
    }

    /// Index of the state of the n-gram memory: that after the mixer's.
    #[doc(hidden)]
    pub fn memory_state(&self) -> usize {
        self.mixer_states(1, 1).len()
    }

    fn mixers(&self) -> impl Iterator<Item = &MixerBlueprint> {
        self.sub_blocks.iter().filter_map(|sub_block| match &sub_block.body {
            BodyBlueprint::Mixer(mixer) => Some(mixer),
            BodyBlueprint::FeedForward(_) => None,
        })
    }

    fn moes(&self) -> impl Iterator<Item = &MoeBlueprint> {
        self.sub_blocks.iter().filter_map(SubBlockBlueprint::moe)
    }

    /// The mixer, if the layer has one.
    pub fn mixer(&self) -> Option<&MixerBlueprint> {
        self.mixers().next()
    }

    /// The MoE part, if the layer has one.
    pub fn moe(&self) -> Option<&MoeBlueprint> {
        self.moes().next()
    }

    pub(crate) fn moe_mut(&mut self) -> Option<&mut MoeBlueprint> {
        self.sub_blocks.iter_mut().find_map(|sub_block| match &mut sub_block.body {
            BodyBlueprint::FeedForward(FeedForwardBlueprint::Moe(moe)) => Some(&mut **moe),
            _ => None,
        })
    }

    /// Whether the runtime can run the list of sub-blocks.
    #[doc(hidden)]
    pub fn is_runnable(&self) -> bool {
        let reads_stream = self.sub_blocks.first().is_some_and(|first| !first.is_parallel());
        // The residual stream, which these norms read, already has the output of the sub-block
        // before.
        let norms = |moe: &MoeBlueprint| moe.router.norm.is_some() || moe.experts_norm.is_some();
        let is_late = |sub_block: &SubBlockBlueprint| {
            !matches!(sub_block.input, SubBlockInput::Residual { .. } | SubBlockInput::Bare { .. })
                && sub_block.moe().is_some_and(norms)
        };
        let writes = |sub_block: &SubBlockBlueprint| match &sub_block.input {
            SubBlockInput::Streams(input) => input.mix.writes() && sub_block.scale.is_none(),
            SubBlockInput::Residual { .. }
            | SubBlockInput::Bare { .. }
            | SubBlockInput::Previous => true,
        };
        reads_stream
            && self.sub_blocks.iter().all(writes)
            && self.mixers().count() <= 1
            && self.moes().count() <= 1
            && !self.sub_blocks.iter().any(is_late)
    }
}

impl SubBlockBlueprint {
    fn is_parallel(&self) -> bool {
        matches!(self.input, SubBlockInput::Previous)
    }

    fn moe(&self) -> Option<&MoeBlueprint> {
        match &self.body {
            BodyBlueprint::FeedForward(FeedForwardBlueprint::Moe(moe)) => Some(moe),
            _ => None,
        }
    }
}
