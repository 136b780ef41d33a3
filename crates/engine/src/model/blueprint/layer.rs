//! Decoder layers: lists of sub-blocks, each a mixer or a feed-forward part.

use moeflux_compute::{KV_BLOCK, StateShape};

use super::{
    DeltaNetBlueprint, GqaBlueprint, Mamba2Blueprint, MlaBlueprint, MlpBlueprint, MoeBlueprint,
    ShortConvBlueprint, weight_list::WeightList,
};
use crate::checkpoint::{MatrixSource, VectorSource};

/// A decoder layer: sub-blocks that run in order, each of which adds to the residual stream.
///
/// Usually a mixer, then a feed-forward part. Either may be alone, or both may run in parallel. At
/// most one sub-block is a mixer, and at most one has routed experts: states and slots are counted
/// by layer. So a published layer with two mixers is two of these.
#[derive(Debug)]
pub struct LayerBlueprint {
    /// Sub-blocks, first to last; the first reads the residual stream.
    pub sub_blocks: Vec<SubBlockBlueprint>,
}

/// A sub-block of a layer: `x = scale (x + post_norm(body(input)))`.
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

impl SubBlockBlueprint {
    /// Sub-block `x += body(norm(x))`.
    pub fn new(norm: impl Into<NormSource>, body: BodyBlueprint) -> Self {
        let norm = norm.into();
        Self { input: SubBlockInput::Residual { norm }, body, post_norm: None, scale: None }
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
    /// The input of the sub-block before, its norm included: both run in parallel on it. Not for
    /// MoE with separate norms for the router or the experts, which read the residual stream.
    Previous,
}

/// Computation of a sub-block.
#[derive(Debug)]
pub enum BodyBlueprint {
    /// Attention or a recurrence.
    Mixer(MixerBlueprint),
    /// MLP or MoE.
    FeedForward(FeedForwardBlueprint),
}

/// Token mixer.
#[derive(Debug)]
pub enum MixerBlueprint {
    /// Grouped-query attention.
    Gqa(Box<GqaBlueprint>),
    /// Multi-head latent attention.
    Mla(Box<MlaBlueprint>),
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

    /// States of the mixer for a session of `positions` positions, with up to `chunk` rows per
    /// step; at most two.
    fn states(&self, positions: usize, chunk: usize) -> Vec<StateShape> {
        match self {
            Self::Gqa(g) => {
                // A windowed KV cache is a ring. It keeps `chunk` additional positions, so that a
                // failed step can be rolled back.
                let needed =
                    |window: usize| window.saturating_add(chunk).next_multiple_of(KV_BLOCK);
                let keys_and_values = StateShape::KeyValue {
                    kv_heads: g.shape.kv_heads,
                    key_width: g.shape.head_dim,
                    value_width: g.shape.v_head_dim,
                    positions: g.shape.window.map_or(positions, |w| positions.min(needed(w))),
                };
                let index_keys = g.indexer.as_ref().map(|indexer| StateShape::KeyValue {
                    kv_heads: 1,
                    key_width: indexer.head_dim,
                    value_width: 0,
                    positions,
                });
                std::iter::once(keys_and_values).chain(index_keys).collect()
            }
            Self::Mla(m) => {
                let keys_only = |key_width| StateShape::KeyValue {
                    kv_heads: 1,
                    key_width,
                    value_width: 0,
                    positions,
                };
                let latent = keys_only(m.shape.kv_lora_rank + m.shape.qk_rope_head_dim);
                std::iter::once(latent).chain(m.indexer().map(|i| keys_only(i.head_dim))).collect()
            }
            Self::DeltaNet(d) => {
                let s = &d.shape;
                vec![
                    StateShape::Recurrent { len: (s.conv_width - 1) * s.channels() },
                    StateShape::Recurrent { len: s.value_heads * s.value_width * s.key_width },
                ]
            }
            Self::Mamba2(m) => {
                let s = &m.shape;
                vec![
                    StateShape::Recurrent { len: (s.conv_width - 1) * s.channels() },
                    StateShape::Recurrent { len: s.inner() * s.state_width },
                ]
            }
            Self::ShortConv(c) => {
                vec![StateShape::Recurrent { len: (c.taps - 1) * c.channels() }]
            }
        }
    }
}

impl LayerBlueprint {
    fn weights(&self) -> WeightList<'_> {
        let mut list = WeightList::default();
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

    /// States of this layer for a session of `positions` positions, with up to `chunk` rows per
    /// step. Empty without a mixer.
    pub fn states(&self, positions: usize, chunk: usize) -> Vec<StateShape> {
        self.mixer().map_or_else(Vec::new, |mixer| mixer.states(positions, chunk))
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
    pub(crate) fn is_runnable(&self) -> bool {
        let reads_stream = self.sub_blocks.first().is_some_and(|first| !first.is_parallel());
        // The residual stream, which these norms read, already has the output of the sub-block
        // before.
        let norms = |moe: &MoeBlueprint| moe.router.norm.is_some() || moe.experts_norm.is_some();
        let is_late = |sub_block: &SubBlockBlueprint| {
            sub_block.is_parallel() && sub_block.moe().is_some_and(norms)
        };
        reads_stream
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
