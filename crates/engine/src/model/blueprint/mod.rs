//! A model as data: the list of its layers with their shapes, and where each weight lies in the checkpoint.
//!
//! Made by one file of [`arch`](crate::model::arch) per `model_type`; everything after that (the memory plan, loading,
//! the forward pass, `inspect`) reads the blueprint and never asks which model it is.

mod weights;

use moeflux_compute::{
    Activation, ExpertGroups, ExpertShape, HeadRows, KV_BLOCK, RopePairs, Scoring, StateShape,
};

use self::weights::Weights;
use crate::checkpoint::{MatrixSource, Segment, VectorSource, location::ShardLocation};

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
    /// Factor on the embedding.
    pub embed_scale: f32,
    /// Bound of the logits: `cap * tanh(logit / cap)`.
    pub logit_cap: Option<f32>,
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
    /// Norm of what the mixer yields.
    pub mixer_post_norm: Option<VectorSource>,
    /// Norm before the feed-forward part.
    pub feed_forward_norm: VectorSource,
    /// What transforms each position.
    pub feed_forward: FeedForwardBlueprint,
    /// Norm of what the feed-forward part yields.
    pub feed_forward_post_norm: Option<VectorSource>,
    /// One number: a factor on what leaves the layer.
    pub scale: Option<VectorSource>,
}

/// What mixes positions.
#[derive(Debug)]
pub enum MixerBlueprint {
    /// Attention with grouped heads.
    Gqa(Box<GqaBlueprint>),
    /// Multi-head latent attention.
    Mla(Box<MlaBlueprint>),
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

    /// YaRN: frequencies that turn often within the original context stay, those that turn seldom are divided by
    /// the factor, and between `beta_fast` and `beta_slow` turns the two are blended.
    ///
    /// Peng et al., "YaRN: Efficient Context Window Extension of Large Language Models", 2023, section 3.2.
    pub fn yarn(dims: usize, base: f64, yarn: &Yarn, pairs: RopePairs) -> Self {
        // The pair that turns so many times within the original context, as a number that need not be whole.
        let pair = |turns: f64| {
            dims as f64 * (yarn.original_positions / (turns * std::f64::consts::TAU)).ln()
                / (2.0 * base.ln())
        };
        let (mut low, mut high) = (pair(yarn.beta_fast), pair(yarn.beta_slow));
        if yarn.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dims as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let frequency = |i: usize| {
            let own = base.powf(-2.0 * i as f64 / dims as f64);
            let interpolated = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (own / yarn.factor * interpolated + own * (1.0 - interpolated)) as f32
        };
        Self { frequencies: (0..dims / 2).map(frequency).collect(), pairs, scale: yarn.scale }
    }
}

/// What YaRN is made of.
#[derive(Clone, Copy, Debug)]
pub struct Yarn {
    /// How many times longer the context became.
    pub factor: f64,
    /// Positions before that.
    pub original_positions: f64,
    /// Turns from which a frequency stays.
    pub beta_fast: f64,
    /// Turns up to which a frequency is interpolated.
    pub beta_slow: f64,
    /// Whether the range between them is widened to whole pairs.
    pub truncate: bool,
    /// Factor on the rotated numbers.
    pub scale: f32,
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
    /// Positions that a token sees, its own among them; all of them without a window.
    pub window: Option<usize>,
    /// Factor on the scores.
    pub scale: f32,
}

impl GqaShape {
    /// Heads that see all positions, with scores times `1 / sqrt(head_dim)`.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let scale = 1.0 / (head_dim as f32).sqrt();
        Self { heads, kv_heads, head_dim, output_gate: false, window: None, scale }
    }
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
    /// `(kv_heads * head_dim, hidden)`; without it values are what `k_proj` yields.
    pub v_proj: Option<LinearSource>,
    /// `(hidden, heads * head_dim)`.
    pub o_proj: LinearSource,
    /// Norm of the queries: `head_dim` numbers for each head, or one norm over all of them.
    pub q_norm: Option<VectorSource>,
    /// Norm of the keys: `head_dim` numbers for each head, or one norm over all of them.
    pub k_norm: Option<VectorSource>,
    /// Whether each value head is normed, without weights.
    pub v_norm: bool,
    /// One logit per query head that joins the softmax and has no value.
    pub sinks: Option<VectorSource>,
}

/// Shapes of multi-head latent attention.
#[derive(Clone, Copy, Debug)]
pub struct MlaShape {
    /// Heads.
    pub heads: usize,
    /// Numbers per query and key head without position.
    pub qk_nope_head_dim: usize,
    /// Numbers per query and key head with position.
    pub qk_rope_head_dim: usize,
    /// Numbers per value head.
    pub v_head_dim: usize,
    /// Numbers of the latent that keys and values are made of.
    pub kv_lora_rank: usize,
    /// Factor on the scores.
    pub scale: f32,
}

/// Multi-head latent attention. DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
#[derive(Debug)]
pub struct MlaBlueprint {
    /// Heads and their widths.
    pub shape: MlaShape,
    /// Positions.
    pub rope: RopeShape,
    /// Where queries come from.
    pub q: LatentQuery,
    /// `(kv_lora_rank + qk_rope_head_dim, hidden)`.
    pub kv_a_proj_with_mqa: LinearSource,
    /// `kv_lora_rank` numbers.
    pub kv_a_layernorm: VectorSource,
    /// From the latent to keys and values.
    pub kv_b: LatentHeads,
    /// `(hidden, heads * v_head_dim)`.
    pub o_proj: LinearSource,
    /// Attention to some positions only.
    pub sparse: Option<SparseBlueprint>,
}

/// Attention to the positions that an indexer chooses.
#[derive(Debug)]
pub struct SparseBlueprint {
    /// Positions that are attended to.
    pub top_k: usize,
    /// What chooses them; without one they are those of the layer before.
    pub indexer: Option<IndexerBlueprint>,
}

impl MlaBlueprint {
    fn indexer(&self) -> Option<&IndexerBlueprint> {
        self.sparse.as_ref()?.indexer.as_ref()
    }
}

/// Where the queries of latent attention come from.
#[derive(Debug)]
pub enum LatentQuery {
    /// `(heads * (nope + rope), hidden)`.
    Direct(LinearSource),
    /// By way of a latent.
    LowRank {
        /// `(q_lora_rank, hidden)`.
        q_a_proj: LinearSource,
        /// `q_lora_rank` numbers.
        q_a_layernorm: VectorSource,
        /// `(heads * (nope + rope), q_lora_rank)`.
        q_b_proj: LinearSource,
    },
}

/// The matrices between the latent and the heads.
#[derive(Debug)]
pub enum LatentHeads {
    /// `kv_b_proj`, `(heads * (nope + v), kv_lora_rank)`: of each head the rows for its key, then those for its value.
    Whole(MatrixSource),
    /// The two apart.
    Split {
        /// `(heads * kv_lora_rank, nope)`: queries to the latent.
        embed_q: MatrixSource,
        /// `(heads * v, kv_lora_rank)`: the latent to values.
        unembed_out: MatrixSource,
    },
}

impl LatentHeads {
    /// The rows of one head that make keys, and those that make values, for a `kv_b_proj` of such a shape.
    pub const fn whole_rows(shape: &MlaShape) -> [HeadRows; 2] {
        let (nope, v) = (shape.qk_nope_head_dim, shape.v_head_dim);
        [
            HeadRows { stride: nope + v, first: 0, count: nope },
            HeadRows { stride: nope + v, first: nope, count: v },
        ]
    }
}

/// The lightning indexer: cheap heads that choose which positions attention looks at.
///
/// DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1.
#[derive(Debug)]
pub struct IndexerBlueprint {
    /// Heads.
    pub heads: usize,
    /// Numbers per head; the first ones are rotated.
    pub head_dim: usize,
    /// Positions.
    pub rope: RopeShape,
    /// `(heads * head_dim, q_lora_rank)`.
    pub wq_b: LinearSource,
    /// `(head_dim, hidden)`.
    pub wk: LinearSource,
    /// LayerNorm of the keys: weight and bias of `head_dim` numbers.
    pub k_norm: [VectorSource; 2],
    /// `(heads, hidden)`: what each head counts.
    pub weights_proj: LinearSource,
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

/// `down activation(gate x, up x)`.
#[derive(Debug)]
pub struct MlpBlueprint {
    /// `(intermediate, hidden)`.
    pub gate_proj: MatrixSource,
    /// `(intermediate, hidden)`.
    pub up_proj: MatrixSource,
    /// `(hidden, intermediate)`.
    pub down_proj: MatrixSource,
    /// What joins gate and up.
    pub activation: Activation,
}

/// Routed experts, and perhaps a shared one.
#[derive(Debug)]
pub struct MoeBlueprint {
    /// How experts are chosen and weighed.
    pub router: RouterBlueprint,
    /// Where the experts lie.
    pub experts: LayerExperts,
    /// What joins an expert's gate and up.
    pub activation: Activation,
    /// A norm of the residual stream for the routed experts alone.
    pub experts_norm: Option<VectorSource>,
    /// Norm of the routed experts' sum.
    pub experts_post_norm: Option<VectorSource>,
    /// The expert that every token meets.
    pub shared: Option<SharedBlueprint>,
}

impl MoeBlueprint {
    /// The matrices of the shared expert where it is computed as one more of the routed ones, in a slot of its own: it has their
    /// form, and reads and yields what they do.
    pub(crate) fn joined(&self) -> Option<[&MatrixSource; 3]> {
        let SharedBlueprint { mlp, post_norm, .. } = self.shared.as_ref()?;
        let all = mlp.matrices();
        let [gate, up, down] = all.map(|m| m.shape);
        let norms = [&self.experts_norm, &self.experts_post_norm, post_norm];
        let joins = self.experts.shape == ExpertShape::new(gate, up, down)
            && mlp.activation == self.activation
            && norms.iter().all(|norm| norm.is_none());
        joins.then_some(all)
    }

    /// Experts that a token meets in one op: those that are chosen, and the shared one if it is one more of them.
    pub(crate) fn uses(&self) -> usize {
        self.router.top_k + usize::from(self.joined().is_some())
    }
}

/// How experts are chosen and weighed.
#[derive(Debug)]
pub struct RouterBlueprint {
    /// `(n_experts, hidden)`.
    pub weight: LinearSource,
    /// A norm of the residual stream for the router alone, with a factor on its weights.
    pub norm: Option<(VectorSource, f32)>,
    /// Experts per token.
    pub top_k: usize,
    /// From logits to scores.
    pub scoring: Scoring,
    /// `n_experts` numbers, added to the scores for choosing.
    pub correction: Option<VectorSource>,
    /// Groups of which only some are chosen from.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of the chosen experts are made to sum to one.
    pub normalize: bool,
    /// Factor on all weights.
    pub scale: f32,
    /// `n_experts` factors on the weights.
    pub expert_scale: Option<VectorSource>,
}

impl RouterBlueprint {
    /// A softmax over all experts.
    pub fn softmax(weight: LinearSource, top_k: usize, normalize: bool) -> Self {
        Self {
            weight,
            norm: None,
            top_k,
            scoring: Scoring::Softmax,
            correction: None,
            groups: None,
            normalize,
            scale: 1.0,
            expert_scale: None,
        }
    }
}

/// The expert that every token meets.
#[derive(Debug)]
pub struct SharedBlueprint {
    /// Its matrices.
    pub mlp: MlpBlueprint,
    /// `(1, hidden)`: a gate on its output.
    pub gate: Option<MatrixSource>,
    /// Norm of its output.
    pub post_norm: Option<VectorSource>,
}

/// Where the experts of one layer lie.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerExperts {
    /// How many there are.
    pub count: usize,
    /// The matrices of one.
    pub shape: ExpertShape,
    /// The pieces of a slot, in order.
    pub(crate) parts: Vec<ShardLocation>,
    /// Bytes of one.
    pub bytes: usize,
}

impl LayerExperts {
    /// The segments that make up expert `expert`, in the order of the slot.
    pub fn segments(&self, expert: usize) -> impl Iterator<Item = Segment> + '_ {
        self.parts.iter().map(move |p| p.segment(expert))
    }

    /// Where expert `expert` begins: a file, and an offset there.
    pub(crate) fn place(&self, expert: usize) -> Option<(u32, u64)> {
        self.segments(expert).next().map(|s| (s.file, s.offset))
    }
}

impl MixerBlueprint {
    /// All its matrices.
    pub fn matrices(&self) -> Vec<&MatrixSource> {
        let mut all = Weights::default();
        all.mixer(self);
        all.matrices
    }
}

impl LayerBlueprint {
    fn weights(&self) -> Weights<'_> {
        let mut all = Weights::default();
        all.vectors.extend([&self.mixer_norm, &self.feed_forward_norm]);
        all.vectors.extend(
            self.mixer_post_norm.iter().chain(&self.feed_forward_post_norm).chain(&self.scale),
        );
        all.mixer(&self.mixer);
        all.feed_forward(&self.feed_forward);
        all
    }

    /// All dense matrices of the layer.
    pub fn matrices(&self) -> Vec<&MatrixSource> {
        self.weights().matrices
    }

    /// All vectors of the layer.
    pub fn vectors(&self) -> Vec<&VectorSource> {
        self.weights().vectors
    }

    /// The states that one session of `positions` positions needs for this layer, when a step has up to `chunk` rows
    /// of it.
    pub fn states(&self, positions: usize, chunk: usize) -> Vec<StateShape> {
        match &self.mixer {
            MixerBlueprint::Gqa(g) => {
                // With a window, older positions are written over once neither the window nor a step that fails can
                // need them.
                let needed =
                    |window: usize| window.saturating_add(chunk).next_multiple_of(KV_BLOCK);
                vec![StateShape::KeyValue {
                    kv_heads: g.shape.kv_heads,
                    key_width: g.shape.head_dim,
                    value_width: g.shape.head_dim,
                    positions: g.shape.window.map_or(positions, |w| positions.min(needed(w))),
                }]
            }
            MixerBlueprint::Mla(m) => {
                let keys = |key_width| StateShape::KeyValue {
                    kv_heads: 1,
                    key_width,
                    value_width: 0,
                    positions,
                };
                let latent = keys(m.shape.kv_lora_rank + m.shape.qk_rope_head_dim);
                std::iter::once(latent).chain(m.indexer().map(|i| keys(i.head_dim))).collect()
            }
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

    pub(crate) fn moe_mut(&mut self) -> Option<&mut MoeBlueprint> {
        match &mut self.feed_forward {
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
        self.moe_layers().map(|(_, m)| m.router.top_k as u64 * m.experts.bytes as u64).sum()
    }

    /// Experts of one token: layers times k.
    pub fn experts_per_token(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.router.top_k).sum()
    }

    /// All experts of all layers.
    pub fn experts(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.experts.count).sum()
    }

    /// Bytes of all experts of all layers.
    pub fn experts_bytes(&self) -> u64 {
        self.moe_layers().map(|(_, m)| m.experts.count as u64 * m.experts.bytes as u64).sum()
    }

    /// Whether some layer chooses the positions that it attends to.
    pub fn has_indexer(&self) -> bool {
        self.layers
            .iter()
            .any(|l| matches!(&l.mixer, MixerBlueprint::Mla(m) if m.indexer().is_some()))
    }

    /// The largest k of any layer.
    pub fn max_top_k(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.router.top_k).max().unwrap_or(0)
    }

    /// The most experts that a token meets in one op of any layer.
    pub(crate) fn max_uses(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.uses()).max().unwrap_or(0)
    }

    /// Layers whose shared expert is one more of the routed ones.
    pub(crate) fn joined_layers(&self) -> usize {
        self.moe_layers().filter(|(_, m)| m.joined().is_some()).count()
    }

    /// The most inputs that any matrix has, experts included.
    pub fn max_inputs(&self) -> usize {
        let dense = self.matrices().map(|m| m.shape.cols);
        let experts = self
            .moe_layers()
            .flat_map(|(_, m)| [m.experts.shape.up.cols, m.experts.shape.down.cols]);
        dense.chain(experts).max().unwrap_or(0)
    }

    /// Bytes of a slot that holds any expert.
    pub fn slot_bytes(&self) -> usize {
        self.moe_layers().map(|(_, m)| m.experts.bytes).max().unwrap_or(0)
    }
}
