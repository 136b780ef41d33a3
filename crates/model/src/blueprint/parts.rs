//! Parts of a model: each block with its shapes and its tensors.

use std::sync::Arc;

use moeflux_ops::{
    Activation, ExpertGroups, ExpertShape, FileLayout, GateFunction, HeadRows, Scoring,
};

use super::{compressed::EntryIndexerBlueprint, input_orders::InputOrders, rope::RopeShape};
use crate::checkpoint::{MatrixSource, Segment, VectorSource, location::ShardLocation};

/// A matrix with an optional bias.
#[derive(Debug)]
pub struct LinearSource {
    /// The matrix.
    pub weight: MatrixSource,
    /// One element per row of the matrix.
    pub bias: Option<VectorSource>,
}

/// Shape of grouped-query attention.
#[derive(Clone, Copy, Debug)]
pub struct GqaShape {
    /// Query heads.
    pub heads: usize,
    /// KV heads.
    pub kv_heads: usize,
    /// Elements per query and per key.
    pub head_dim: usize,
    /// Elements per value; `head_dim` in most models.
    pub v_head_dim: usize,
    /// Gate on the output; `None` for none.
    pub gate: Option<OutputGate>,
    /// Sliding window in positions, the token's own included; `None` for full attention.
    pub window: Option<usize>,
    /// Factor on the scores.
    pub scale: f32,
    /// Factor on the values.
    pub value_scale: f32,
}

/// Gate on the output of attention, a function of the input of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputGate {
    /// Function from the projection to the factor.
    pub function: GateFunction,
    /// Gates per head: `v_head_dim`, or 1 for a gate of the whole head.
    pub width: usize,
    /// Projection that yields the gates.
    pub source: GateSource,
}

/// Projection that yields the gates of an [`OutputGate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateSource {
    /// `q_proj`: per head a query, then its gates.
    Queries,
    /// [`GqaBlueprint::gate_proj`].
    Separate,
}

impl GqaShape {
    /// Full attention with values as wide as keys and the score scale `1 / sqrt(head_dim)`.
    pub fn new(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        let scale = 1.0 / (head_dim as f32).sqrt();
        Self {
            heads,
            kv_heads,
            head_dim,
            v_head_dim: head_dim,
            gate: None,
            window: None,
            scale,
            value_scale: 1.0,
        }
    }

    /// Outputs of `q_proj`: the queries and, where it yields them, the gates.
    pub const fn q_outputs(&self) -> usize {
        match self.gate {
            Some(OutputGate { width, source: GateSource::Queries, .. }) => {
                self.heads * (self.head_dim + width)
            }
            _ => self.heads * self.head_dim,
        }
    }

    /// Outputs of `gate_proj`: zero without one.
    pub const fn gate_outputs(&self) -> usize {
        match self.gate {
            Some(OutputGate { width, source: GateSource::Separate, .. }) => self.heads * width,
            _ => 0,
        }
    }
}

/// Grouped-query attention.
#[derive(Debug)]
pub struct GqaBlueprint {
    /// Heads and their sizes.
    pub shape: GqaShape,
    /// RoPE of queries and keys.
    pub rope: RopeShape,
    /// `(q_outputs, hidden)`: see [`GqaShape::q_outputs`].
    pub q_proj: LinearSource,
    /// `(kv_heads * head_dim, hidden)`.
    pub k_proj: LinearSource,
    /// `(kv_heads * v_head_dim, hidden)`; without it, values are the output of `k_proj`.
    pub v_proj: Option<LinearSource>,
    /// `(gate_outputs, hidden)`, of [`GateSource::Separate`]: see [`GqaShape::gate_outputs`].
    pub gate_proj: Option<LinearSource>,
    /// `(hidden, heads * v_head_dim)`.
    pub o_proj: LinearSource,
    /// QK-norm, of the queries: `head_dim` elements for a norm per head, or one over all heads.
    pub q_norm: Option<VectorSource>,
    /// QK-norm, of the keys: `head_dim` elements for a norm per head, or one over all heads.
    pub k_norm: Option<VectorSource>,
    /// Whether these norms follow RoPE instead of preceding it.
    pub norms_rotated: bool,
    /// Whether each value head is normed, without weights.
    pub v_norm: bool,
    /// Attention sinks: one logit per query head that takes part in the softmax, without a value.
    pub sinks: Option<VectorSource>,
    /// Chooses the positions that attention reads; not with a window.
    pub indexer: Option<GqaIndexer>,
}

/// Indexer of sparse grouped-query attention.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one per layer")]
pub enum GqaIndexer {
    /// Blocks of positions for each KV head.
    Blocks(BlockIndexerBlueprint),
    /// Compressed blocks of positions for all heads.
    Entries(EntryIndexerBlueprint),
}

impl GqaIndexer {
    /// Most positions that are chosen for a head.
    #[doc(hidden)]
    pub fn positions(&self) -> usize {
        match self {
            Self::Blocks(blocks) => blocks.top_k * blocks.block,
            Self::Entries(entries) => entries.positions(),
        }
    }

    /// Lists of positions that are chosen for a token.
    pub(super) fn lists(&self, kv_heads: usize) -> usize {
        match self {
            Self::Blocks(_) => kv_heads,
            Self::Entries(_) => 1,
        }
    }
}

/// Block indexer: a cheap head for each KV head, which chooses the blocks of positions that this
/// KV head reads, by their best score.
#[derive(Debug)]
pub struct BlockIndexerBlueprint {
    /// Elements per head; the first ones are rotated.
    pub head_dim: usize,
    /// RoPE of queries and keys.
    pub rope: RopeShape,
    /// Positions of a block.
    pub block: usize,
    /// Blocks that are chosen, the last ones included.
    pub top_k: usize,
    /// Last blocks that are always chosen.
    pub local: usize,
    /// `(kv_heads * head_dim, hidden)`.
    pub q_proj: LinearSource,
    /// `(head_dim, hidden)`.
    pub k_proj: LinearSource,
    /// `head_dim` elements.
    pub q_norm: VectorSource,
    /// `head_dim` elements.
    pub k_norm: VectorSource,
}

/// Shape of multi-head latent attention.
#[derive(Clone, Copy, Debug)]
pub struct MlaShape {
    /// Heads.
    pub heads: usize,
    /// Elements per query and key head without RoPE.
    pub qk_nope_head_dim: usize,
    /// Elements per query and key head with RoPE.
    pub qk_rope_head_dim: usize,
    /// Elements per value head.
    pub v_head_dim: usize,
    /// Elements of the latent that keys and values are projected from.
    pub kv_lora_rank: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Factor on the queries by position.
    pub temperature: Option<QueryTemperature>,
}

/// Factor on the queries that grows with the position: `1 + beta ln(1 + floor(position / period))`.
/// Meta, Llama 4, 2025: attention temperature tuning.
#[derive(Clone, Copy, Debug)]
pub struct QueryTemperature {
    /// Growth per e-fold of periods.
    pub beta: f64,
    /// Positions of equal factors, at least 1: those of the original context.
    pub period: usize,
}

impl QueryTemperature {
    /// The factor from position `index * period` on.
    #[doc(hidden)]
    pub fn factor(&self, index: usize) -> f32 {
        (1.0 + self.beta * (index as f64).ln_1p()) as f32
    }
}

/// Multi-head latent attention (MLA). DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
#[derive(Debug)]
pub struct MlaBlueprint {
    /// Heads and their sizes.
    pub shape: MlaShape,
    /// RoPE of queries and keys.
    pub rope: RopeShape,
    /// Query projections.
    pub q: LatentQuery,
    /// `(kv_lora_rank + qk_rope_head_dim, hidden)`.
    pub kv_a_proj_with_mqa: LinearSource,
    /// `kv_lora_rank` elements.
    pub kv_a_layernorm: VectorSource,
    /// Projections from the latent to keys and values.
    pub kv_b: LatentHeads,
    /// Sigmoid gate on the output of attention: `(heads, hidden)` for a gate per head, or
    /// `(heads * v_head_dim, hidden)` for one per element.
    pub gate_proj: Option<LinearSource>,
    /// `(hidden, heads * v_head_dim)`.
    pub o_proj: LinearSource,
    /// Sparse attention; `None` for attention to all positions.
    pub sparse: Option<SparseBlueprint>,
}

/// Sparse attention to the positions that an indexer chooses.
#[derive(Debug)]
pub struct SparseBlueprint {
    /// Number of positions that are attended to.
    pub top_k: usize,
    /// Positions of a pool that is chosen as a whole; 1 where single positions are. Those of the
    /// open pool are always attended to.
    pub pool: usize,
    /// Indexer that chooses them; `None` uses the positions of the previous layer.
    pub indexer: Option<MlaIndexer>,
}

/// Indexer of sparse latent attention.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one per layer")]
pub enum MlaIndexer {
    /// Positions by their keys.
    Positions(IndexerBlueprint),
    /// Compressed blocks of positions.
    Entries(EntryIndexerBlueprint),
}

impl MlaBlueprint {
    #[doc(hidden)]
    pub fn indexer(&self) -> Option<&MlaIndexer> {
        self.sparse.as_ref()?.indexer.as_ref()
    }
}

/// Query projections of latent attention.
#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one per layer")]
pub enum LatentQuery {
    /// `(heads * (nope + rope), hidden)`.
    Direct(LinearSource),
    /// Low-rank, through a latent.
    LowRank {
        /// `(q_lora_rank, hidden)`.
        q_a_proj: LinearSource,
        /// `q_lora_rank` elements.
        q_a_layernorm: VectorSource,
        /// `(heads * (nope + rope), q_lora_rank)`.
        q_b_proj: LinearSource,
    },
}

/// Projections between the KV latent and the heads.
#[derive(Debug)]
pub enum LatentHeads {
    /// `kv_b_proj`, `(heads * (nope + v), kv_lora_rank)`: per head its key rows, then its value
    /// rows.
    Whole(MatrixSource),
    /// Separate matrices for keys and values.
    Split {
        /// `(heads * kv_lora_rank, nope)`: queries to the latent.
        embed_q: MatrixSource,
        /// `(heads * v, kv_lora_rank)`: the latent to values.
        unembed_out: MatrixSource,
    },
}

impl LatentHeads {
    /// Key rows and value rows of the heads in a `kv_b_proj`.
    pub const fn whole_rows(shape: &MlaShape) -> [HeadRows; 2] {
        let (nope, v) = (shape.qk_nope_head_dim, shape.v_head_dim);
        [
            HeadRows { stride: nope + v, first: 0, count: nope },
            HeadRows { stride: nope + v, first: nope, count: v },
        ]
    }
}

/// Lightning indexer: cheap heads that choose the positions that attention reads.
///
/// DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1.
#[derive(Debug)]
pub struct IndexerBlueprint {
    /// Heads.
    pub heads: usize,
    /// Elements per head; the first ones are rotated.
    pub head_dim: usize,
    /// RoPE of queries and keys.
    pub rope: RopeShape,
    /// `(heads * head_dim, q_lora_rank)`.
    pub wq_b: LinearSource,
    /// `(head_dim, hidden)`.
    pub wk: LinearSource,
    /// LayerNorm of the keys: weight and bias of `head_dim` elements.
    pub k_norm: [VectorSource; 2],
    /// `(heads, hidden)`: weight of each head's score.
    pub weights_proj: LinearSource,
}

/// MLP, mostly gated: `down activation(gate x, up x)`.
#[derive(Debug)]
pub struct MlpBlueprint {
    /// `(intermediate, hidden)`; `None` if the activation has no gate.
    pub gate_proj: Option<MatrixSource>,
    /// `(intermediate, hidden)`.
    pub up_proj: MatrixSource,
    /// `(hidden, intermediate)`.
    pub down_proj: MatrixSource,
    /// Activation of gate and up, or of up alone.
    pub activation: Activation,
}

/// Mixture of experts: routed experts, optionally with a shared one.
#[derive(Debug)]
pub struct MoeBlueprint {
    /// Router: choice and weights of the experts.
    pub router: RouterBlueprint,
    /// Locations of the routed experts.
    pub experts: LayerExperts,
    /// Activation of an expert's gate and up, or of up alone.
    pub activation: Activation,
    /// Norm of the residual stream for the routed experts only.
    pub experts_norm: Option<VectorSource>,
    /// Projections around the routed experts, which then have their latent width as `hidden`.
    pub latent: Option<LatentExperts>,
    /// Norm of the routed experts' weighted sum.
    pub experts_post_norm: Option<VectorSource>,
    /// Shared expert, computed for every token.
    pub shared: Option<SharedBlueprint>,
}

/// Projections to and from the latent of routed experts. NVIDIA, Nemotron-3: LatentMoE.
#[derive(Debug)]
pub struct LatentExperts {
    /// `(latent, hidden)`: input of the routed experts.
    pub down_proj: MatrixSource,
    /// `(hidden, latent)`: output of their weighted sum.
    pub up_proj: MatrixSource,
}

impl MoeBlueprint {
    /// Routed experts with SwiGLU alone.
    pub(crate) fn new(router: RouterBlueprint, experts: LayerExperts) -> Self {
        Self {
            router,
            experts,
            activation: Activation::SwiGlu,
            experts_norm: None,
            latent: None,
            experts_post_norm: None,
            shared: None,
        }
    }

    /// Matrices of the shared expert if it is fused into the routed ones: computed in the same op
    /// as an additional expert in a separate slot. Requires the same shape and activation, no
    /// factor, no norms that differ, and inputs in the file's order.
    #[doc(hidden)]
    pub fn fused_shared(&self) -> Option<[&MatrixSource; 3]> {
        let SharedBlueprint { mlp, post_norm, scale, .. } = self.shared.as_ref()?;
        let matrices = [mlp.gate_proj.as_ref()?, &mlp.up_proj, &mlp.down_proj];
        let [gate, up, down] = matrices.map(|m| m.shape);
        let norms = [&self.experts_norm, &self.experts_post_norm, post_norm];
        let in_order = self.experts.orders.is_none() && matrices.iter().all(|m| m.order.is_none());
        let is_fused = in_order
            && self.latent.is_none()
            && self.experts.shape == ExpertShape::new(gate, up, down)
            && mlp.activation == self.activation
            && *scale == 1.0
            && norms.iter().all(|norm| norm.is_none());
        is_fused.then_some(matrices)
    }

    /// Experts per token in one op: the chosen ones, and the shared one if it is fused.
    #[doc(hidden)]
    pub fn uses(&self) -> usize {
        self.router.top_k + usize::from(self.fused_shared().is_some())
    }
}

/// Router: choice and weights of the experts of each token.
#[derive(Debug)]
pub struct RouterBlueprint {
    /// `(n_experts, hidden)`.
    pub weight: LinearSource,
    /// Norm of the residual stream for the router only.
    pub norm: Option<RouterNorm>,
    /// Experts per token.
    pub top_k: usize,
    /// Function from logits to scores.
    pub scoring: Scoring,
    /// `n_experts` elements, added to the scores for the choice but not for the weights.
    pub correction: Option<VectorSource>,
    /// Whether the choice is by the (corrected) logits instead of the scores.
    pub by_logit: bool,
    /// Expert groups, of which only the best are chosen from: group-limited top-k.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of the chosen experts are scaled to a sum of one.
    pub normalize: bool,
    /// Factor on all weights.
    pub scale: f32,
    /// `n_experts` factors on the weights.
    pub expert_scale: Option<VectorSource>,
    /// Experts of each token of the vocabulary, where they do not depend on the scores.
    pub fixed: Option<FixedRoutes>,
}

/// Hash routing: a table of the experts of each token. Roller et al., "Hash Layers", 2021.
#[derive(Debug)]
pub struct FixedRoutes {
    /// Bytes of the table in the file.
    pub segment: Segment,
    /// `(vocab, top_k)`: ids of experts.
    pub ids: Arc<[u16]>,
}

impl RouterBlueprint {
    /// Softmax over all experts; the weights of the chosen ones are not normalized.
    pub fn softmax(weight: LinearSource, top_k: usize) -> Self {
        Self {
            weight,
            norm: None,
            top_k,
            scoring: Scoring::Softmax,
            correction: None,
            by_logit: false,
            groups: None,
            normalize: false,
            scale: 1.0,
            expert_scale: None,
            fixed: None,
        }
    }
}

/// Norm before a router.
#[derive(Debug)]
pub struct RouterNorm {
    /// `hidden` elements.
    pub weight: VectorSource,
    /// Factor on the weight.
    pub scale: f32,
}

/// Shared expert, computed for every token.
#[derive(Debug)]
pub struct SharedBlueprint {
    /// Its matrices.
    pub mlp: MlpBlueprint,
    /// `(1, hidden)`: gate on its output.
    pub gate: Option<MatrixSource>,
    /// Norm of its output.
    pub post_norm: Option<VectorSource>,
    /// Factor on its output.
    pub scale: f32,
}

impl SharedBlueprint {
    /// A shared expert whose output is added as it is.
    pub(crate) fn new(mlp: MlpBlueprint) -> Self {
        Self { mlp, gate: None, post_norm: None, scale: 1.0 }
    }
}

/// Locations of the routed experts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerExperts {
    /// Number of experts.
    pub count: usize,
    /// Matrices of one expert.
    pub shape: ExpertShape,
    /// Layouts of gate, up and down in the file.
    #[doc(hidden)]
    pub layouts: [FileLayout; 3],
    /// Orders of the inputs in memory, where some are not the file's.
    #[doc(hidden)]
    pub orders: Option<Arc<InputOrders>>,
    /// Shards of an expert, in slot order.
    #[doc(hidden)]
    pub shards: Vec<ShardLocation>,
    /// Bytes of one expert in the file.
    pub file_bytes: usize,
    /// Bytes of one expert in a slot.
    pub slot_bytes: usize,
}

impl LayerExperts {
    /// Orders of all experts' inputs of gate and up, `(experts, hidden)`, if the activations are
    /// gathered.
    #[doc(hidden)]
    pub fn hidden_orders(&self) -> Option<&[u16]> {
        self.orders.as_ref().map(|orders| orders.hidden()).filter(|orders| !orders.is_empty())
    }

    /// Segments of expert `expert`, in slot order.
    pub fn segments(&self, expert: usize) -> impl Iterator<Item = Segment> + Clone + '_ {
        self.shards.iter().map(move |shard| shard.segment(expert))
    }

    /// File index and offset of the first byte of expert `expert`, for sorting by disk order.
    #[doc(hidden)]
    pub fn disk_position(&self, expert: usize) -> Option<(u32, u64)> {
        self.segments(expert).next().map(|s| (s.file, s.offset))
    }
}

impl MlpBlueprint {
    /// All matrices.
    pub fn matrices(&self) -> impl Iterator<Item = &MatrixSource> {
        self.gate_proj.iter().chain([&self.up_proj, &self.down_proj])
    }
}
