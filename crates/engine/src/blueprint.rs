//! A model as data: the list of its layers with their shapes, and where each weight lies in the checkpoint.
//!
//! Made by one file of [`arch`](crate::arch) per `model_type`; everything after that (the memory plan, loading,
//! the forward pass, `inspect`) reads the blueprint and never asks which model it is.

use moeflux_compute::{ExpertShape, RopePairs, StateShape};

use crate::{
    checkpoint::{MatrixSource, Segment, VectorSource},
    experts::PartSource,
};

/// A model.
#[derive(Debug)]
pub struct Blueprint {
    /// `model_type` of config.json.
    pub model_type: String,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Size of the vocabulary: rows of the embedding and of the head.
    pub vocab: usize,
    /// Positions that the model was made for.
    pub max_positions: usize,
    /// Epsilon of the RMSNorms.
    pub eps: f32,
    /// `(vocab, hidden)`.
    pub embed: MatrixSource,
    /// Decoder layers, first to last.
    pub layers: Vec<LayerBlueprint>,
    /// The norm before the head.
    pub norm: VectorSource,
    /// `(vocab, hidden)`; `None` when the embedding serves as head.
    pub head: Option<MatrixSource>,
    /// What the checkpoint holds that is not run: "vision", "multi-token prediction", with bytes.
    pub skipped: Vec<(String, u64)>,
}

/// A decoder layer: `x += mixer(norm(x))`, then `x += feed_forward(norm(x))`.
#[derive(Debug)]
pub struct LayerBlueprint {
    /// Norm before the mixer.
    pub mixer_norm: VectorSource,
    /// What mixes positions.
    pub mixer: MixerBlueprint,
    /// Norm before the feed-forward part.
    pub feed_forward_norm: VectorSource,
    /// What transforms each position.
    pub feed_forward: FeedForwardBlueprint,
}

/// What mixes positions.
#[derive(Debug)]
pub enum MixerBlueprint {
    /// Attention with grouped heads.
    Gqa(Box<GqaBlueprint>),
    /// Gated delta-net.
    DeltaNet(Box<DeltaNetBlueprint>),
}

/// What transforms each position.
#[derive(Debug)]
pub enum FeedForwardBlueprint {
    /// One MLP for all tokens.
    Dense(Box<MlpBlueprint>),
    /// Routed experts.
    Moe(Box<MoeBlueprint>),
}

/// A matrix with an optional bias per output.
#[derive(Debug)]
pub struct LinearSource {
    /// The matrix.
    pub weight: MatrixSource,
    /// One number per output.
    pub bias: Option<VectorSource>,
}

/// Rotary position embedding.
#[derive(Clone, Debug)]
pub struct RopeShape {
    /// Radians per position, one per pair.
    pub frequencies: Vec<f32>,
    /// Where the pairs lie.
    pub pairs: RopePairs,
    /// Factor on the rotated numbers.
    pub scale: f32,
}

impl RopeShape {
    /// `base^(-2 i / dims)` for each of `dims / 2` pairs, divided by `factor` (linear interpolation).
    pub fn new(dims: usize, base: f64, factor: f64, pairs: RopePairs) -> Self {
        let frequency = |i: usize| (base.powf(-2.0 * i as f64 / dims as f64) / factor) as f32;
        Self { frequencies: (0..dims / 2).map(frequency).collect(), pairs, scale: 1.0 }
    }
}

/// Shapes of attention with grouped heads.
#[derive(Clone, Copy, Debug)]
pub struct GqaShape {
    /// Query heads.
    pub heads: usize,
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Numbers per head.
    pub head_dim: usize,
    /// Whether `q_proj` also yields a gate on the output, interleaved per head.
    pub output_gate: bool,
}

/// Attention with grouped heads.
#[derive(Debug)]
pub struct GqaBlueprint {
    /// Heads and their widths.
    pub shape: GqaShape,
    /// Positions.
    pub rope: RopeShape,
    /// `(heads * head_dim, hidden)`, twice as many rows with an output gate.
    pub q_proj: LinearSource,
    /// `(kv_heads * head_dim, hidden)`.
    pub k_proj: LinearSource,
    /// `(kv_heads * head_dim, hidden)`.
    pub v_proj: LinearSource,
    /// `(hidden, heads * head_dim)`.
    pub o_proj: LinearSource,
    /// Norm of each query head: `head_dim` numbers.
    pub q_norm: Option<VectorSource>,
    /// Norm of each key head: `head_dim` numbers.
    pub k_norm: Option<VectorSource>,
}

/// Shapes of a gated delta-net.
#[derive(Clone, Copy, Debug)]
pub struct DeltaNetShape {
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values: a multiple of `key_heads`.
    pub value_heads: usize,
    /// Numbers per query and key head.
    pub key_width: usize,
    /// Numbers per value head.
    pub value_width: usize,
    /// Taps of the convolution.
    pub conv_width: usize,
}

impl DeltaNetShape {
    /// Channels of the convolution: queries, keys and values.
    pub const fn channels(&self) -> usize {
        2 * self.key_heads * self.key_width + self.value_heads * self.value_width
    }

    /// Numbers of all value heads.
    pub const fn values(&self) -> usize {
        self.value_heads * self.value_width
    }
}

/// Gated delta-net.
#[derive(Debug)]
pub struct DeltaNetBlueprint {
    /// Heads and their widths.
    pub shape: DeltaNetShape,
    /// `(channels, hidden)`: queries, keys, values.
    pub in_proj_qkv: MatrixSource,
    /// `(values, hidden)`: the gate of the output norm.
    pub in_proj_z: MatrixSource,
    /// `(value_heads, hidden)`: write strength.
    pub in_proj_b: MatrixSource,
    /// `(value_heads, hidden)`: decay.
    pub in_proj_a: MatrixSource,
    /// `(channels, conv_width)`.
    pub conv1d: VectorSource,
    /// `value_heads` numbers.
    pub a_log: VectorSource,
    /// `value_heads` numbers.
    pub dt_bias: VectorSource,
    /// `value_width` numbers.
    pub norm: VectorSource,
    /// `(hidden, values)`.
    pub out_proj: MatrixSource,
}

/// `down (silu(gate x) * (up x))`.
#[derive(Debug)]
pub struct MlpBlueprint {
    /// `(intermediate, hidden)`.
    pub gate_proj: MatrixSource,
    /// `(intermediate, hidden)`.
    pub up_proj: MatrixSource,
    /// `(hidden, intermediate)`.
    pub down_proj: MatrixSource,
}

/// Routed experts, and perhaps a shared one.
#[derive(Debug)]
pub struct MoeBlueprint {
    /// `(n_experts, hidden)`.
    pub router: MatrixSource,
    /// Experts per token.
    pub top_k: usize,
    /// Whether the weights of the chosen experts are made to sum to one.
    pub normalize: bool,
    /// Where the experts lie.
    pub experts: LayerExperts,
    /// The expert that every token meets.
    pub shared: Option<SharedBlueprint>,
}

/// The expert that every token meets.
#[derive(Debug)]
pub struct SharedBlueprint {
    /// Its matrices.
    pub mlp: MlpBlueprint,
    /// `(1, hidden)`: a gate on its output.
    pub gate: Option<MatrixSource>,
}

/// Where the experts of one layer lie.
#[derive(Clone, Debug)]
pub struct LayerExperts {
    /// How many there are.
    pub count: usize,
    /// The matrices of one.
    pub shape: ExpertShape,
    /// The pieces of a slot, in order.
    pub(crate) parts: Vec<PartSource>,
    /// Bytes of one.
    pub bytes: usize,
}

impl LayerExperts {
    /// The segments that make up expert `expert`, in the order of the slot.
    pub fn segments(&self, expert: usize) -> impl Iterator<Item = Segment> + '_ {
        self.parts.iter().map(move |p| p.segment(expert))
    }
}

impl LayerBlueprint {
    /// All dense matrices of the layer.
    pub fn matrices(&self) -> Vec<&MatrixSource> {
        let mut all = match &self.mixer {
            MixerBlueprint::Gqa(g) => {
                vec![&g.q_proj.weight, &g.k_proj.weight, &g.v_proj.weight, &g.o_proj.weight]
            }
            MixerBlueprint::DeltaNet(d) => {
                vec![&d.in_proj_qkv, &d.in_proj_z, &d.in_proj_b, &d.in_proj_a, &d.out_proj]
            }
        };
        match &self.feed_forward {
            FeedForwardBlueprint::Dense(mlp) => all.extend(mlp.matrices()),
            FeedForwardBlueprint::Moe(moe) => {
                all.push(&moe.router);
                if let Some(shared) = &moe.shared {
                    all.extend(shared.mlp.matrices());
                    all.extend(&shared.gate);
                }
            }
        }
        all
    }

    /// All vectors of the layer.
    pub fn vectors(&self) -> Vec<&VectorSource> {
        let mut all = vec![&self.mixer_norm, &self.feed_forward_norm];
        match &self.mixer {
            MixerBlueprint::Gqa(g) => {
                all.extend(g.q_norm.iter().chain(&g.k_norm));
                all.extend(
                    [&g.q_proj, &g.k_proj, &g.v_proj, &g.o_proj].iter().filter_map(|l| l.bias.as_ref()),
                );
            }
            MixerBlueprint::DeltaNet(d) => all.extend([&d.conv1d, &d.a_log, &d.dt_bias, &d.norm]),
        }
        all
    }

    /// The states that one session of `positions` positions needs for this layer.
    pub fn states(&self, positions: usize) -> Vec<StateShape> {
        match &self.mixer {
            MixerBlueprint::Gqa(g) => vec![StateShape::KeyValue {
                kv_heads: g.shape.kv_heads,
                key_width: g.shape.head_dim,
                value_width: g.shape.head_dim,
                positions,
            }],
            MixerBlueprint::DeltaNet(d) => {
                let s = &d.shape;
                vec![
                    StateShape::Recurrent { len: (s.conv_width - 1) * s.channels() },
                    StateShape::Recurrent { len: s.value_heads * s.value_width * s.key_width },
                ]
            }
        }
    }

    /// The routed experts, if the layer has them.
    pub fn moe(&self) -> Option<&MoeBlueprint> {
        match &self.feed_forward {
            FeedForwardBlueprint::Dense(_) => None,
            FeedForwardBlueprint::Moe(moe) => Some(moe),
        }
    }
}

impl MlpBlueprint {
    fn matrices(&self) -> [&MatrixSource; 3] {
        [&self.gate_proj, &self.up_proj, &self.down_proj]
    }
}

impl Blueprint {
    /// All dense matrices: embedding, layers, head.
    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSource> {
        std::iter::once(&self.embed)
            .chain(self.layers.iter().flat_map(LayerBlueprint::matrices))
            .chain(&self.head)
    }

    /// All vectors: norms, biases and the like.
    pub fn vectors(&self) -> impl Iterator<Item = &VectorSource> {
        self.layers.iter().flat_map(LayerBlueprint::vectors).chain([&self.norm])
    }

    /// The layers with routed experts, by their place among all layers.
    pub fn moe_layers(&self) -> impl Iterator<Item = (usize, &MoeBlueprint)> {
        self.layers.iter().enumerate().filter_map(|(i, l)| Some((i, l.moe()?)))
    }

    /// Bytes of one token's experts: layers times k.
    pub fn experts_per_token_bytes(&self) -> u64 {
        self.moe_layers().map(|(_, m)| m.top_k as u64 * m.experts.bytes as u64).sum()
    }

    /// Experts of one token: layers times k.
    pub fn experts_per_token(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.top_k).sum()
    }

    /// All experts of all layers.
    pub fn experts(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.experts.count).sum()
    }

    /// Bytes of all experts of all layers.
    pub fn experts_bytes(&self) -> u64 {
        self.moe_layers().map(|(_, m)| m.experts.count as u64 * m.experts.bytes as u64).sum()
    }

    /// The largest k of any layer.
    pub fn max_top_k(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.top_k).max().unwrap_or(0)
    }

    /// The most inputs that any matrix has, experts included.
    pub fn max_inputs(&self) -> usize {
        let dense = self.matrices().map(|m| m.shape.cols);
        let experts =
            self.moe_layers().flat_map(|(_, m)| [m.experts.shape.up.cols, m.experts.shape.down.cols]);
        dense.chain(experts).max().unwrap_or(0)
    }

    /// Bytes of a slot that holds any expert.
    pub fn slot_bytes(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.experts.bytes).max().unwrap_or(0)
    }
}
