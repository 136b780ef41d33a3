//! Parts of a model: each block with its shapes and its tensors.

use std::sync::Arc;

use moeflux_ops::{
    Activation, ExpertGroups, ExpertShape, FileLayout, GateFunction, HeadRows, Scoring,
};

use super::{
    compressed::EntryIndexerBlueprint,
    input_orders::InputOrders,
    layer::{LayerBlueprint, MixerBlueprint, NormSource, SubBlockInput},
    ngram_memory::NgramMemoryBlueprint,
    rope::RopeShape,
    states::StateEntries,
};
use crate::checkpoint::{MatrixSource, Segment, VectorSource, location::ShardLocation};

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
    fn lists(&self, kv_heads: usize) -> usize {
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
    /// Epsilon of the norms of latents.
    pub latent_eps: f32,
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
