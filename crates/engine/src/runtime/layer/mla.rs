//! Multi-head latent attention (MLA). The KV cache holds one latent and one rotated key per
//! position for all heads.
//!
//! The absorbed form projects queries to the latent space, attends there, and projects the result
//! to values. The expanded form projects latents to the heads' keys and values.

use moeflux_base::Error;
use moeflux_compute::{
    Buffer, GateFunction, HeadMatrix, HeadRows, IndexList, IndexQueries, Op, Span, View,
};
use moeflux_model::blueprint::{
    IndexerBlueprint, LatentHeads, LatentQuery, MlaBlueprint, MlaIndexer, MlaShape, RopeShape,
};

use super::{
    entry_indexer::{EntryIndexer, IndexStates, POSITIONS},
    loader::Loader,
    scratch::{ScratchId, ScratchWidths},
    step::{Linear, Step},
};

/// Epsilon of the norms of index keys. Fixed in the reference codes, independent of `rms_norm_eps`.
pub(super) const INDEX_EPS: f32 = 1e-6;

/// Rows of a step from which on the expanded form is faster: docs/measured/latent-attention.md. It
/// recomputes K and V of all positions for each span, and then multiplies 320 instead of 1088
/// values per row, head and position.
pub(crate) const EXPANDED_ROWS: usize = 256;

#[derive(Debug)]
pub(crate) struct Mla {
    shape: MlaShape,
    rope: RopeShape,
    q: QueryProjection,
    kv_a_proj_with_mqa: Linear,
    kv_a_layernorm: Buffer,
    /// Order of the latents in the KV cache: that of the inputs of `kv_b_proj`.
    latent_order: Option<Buffer>,
    embed_q: HeadMatrix,
    unembed_out: HeadMatrix,
    gate: Option<HeadGates>,
    o_proj: Linear,
    sparse: Option<Sparse>,
    /// Whether long prompts use the expanded form. Not on the exact path, where the bits of a row
    /// must not depend on the length of its prompt.
    expands: bool,
}

/// Sigmoid gate on the output of attention.
#[derive(Debug)]
struct HeadGates {
    proj: Linear,
    /// Gates of all heads.
    outputs: usize,
}

impl HeadGates {
    fn load(blueprint: &MlaBlueprint, loader: &mut Loader<'_>) -> Result<Option<Self>, Error> {
        let Some(gate) = &blueprint.gate_proj else { return Ok(None) };
        Ok(Some(Self { proj: loader.linear(gate)?, outputs: gate.weight.shape.rows }))
    }

    fn gates(&self, step: &Step<'_>) -> View {
        step.buffer(GATES, self.outputs)
    }
}

/// Sparse attention: to chosen positions only.
#[derive(Debug)]
struct Sparse {
    /// Most positions of a row.
    positions: usize,
    /// Positions of a pool that is chosen as a whole.
    pool: usize,
    /// Without an indexer, the layer uses the positions of the layer before it.
    indexer: Option<SparseIndexer>,
}

impl Sparse {
    /// Numbers in a list of positions: as few as the last row of any span needs.
    fn list_width(&self, spans: &[Span]) -> usize {
        let end = spans.iter().map(|span| span.position + span.rows).max().unwrap_or(0);
        // Whole pools, and the positions of the open one.
        let pools = (self.positions.saturating_add(1) / self.pool - 1).min(end / self.pool);
        pools * self.pool + self.pool - 1
    }
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "there is one per layer")]
enum SparseIndexer {
    Positions(Indexer),
    Entries(EntryIndexer),
}

impl SparseIndexer {
    fn load(blueprint: &MlaIndexer, loader: &mut Loader<'_>) -> Result<Self, Error> {
        Ok(match blueprint {
            MlaIndexer::Positions(indexer) => Self::Positions(Indexer::load(indexer, loader)?),
            MlaIndexer::Entries(indexer) => Self::Entries(EntryIndexer::load(indexer, loader)?),
        })
    }
}

#[derive(Debug)]
enum QueryProjection {
    Direct(Linear),
    LowRank { q_a_proj: Linear, q_a_layernorm: Buffer, q_b_proj: Linear, rank: usize },
}

/// Scratch buffers: latent of the query, queries, absorbed queries, the new key, attention output
/// in the latent space, values.
const Q_LATENT: ScratchId = ScratchId(0);
const Q: ScratchId = ScratchId(1);
const ABSORBED: ScratchId = ScratchId(2);
const KEY: ScratchId = ScratchId(3);
const LATENT_OUT: ScratchId = ScratchId(4);
const Y: ScratchId = ScratchId(5);
/// Scratch buffers of the indexer: queries, keys, weights.
const INDEX_Q: ScratchId = ScratchId(6);
const INDEX_K: ScratchId = ScratchId(7);
const INDEX_WEIGHTS: ScratchId = ScratchId(8);
/// Gates on the output.
const GATES: ScratchId = ScratchId(9);

impl Mla {
    pub(crate) fn widths(blueprint: &MlaBlueprint) -> ScratchWidths {
        let s = &blueprint.shape;
        let key = s.kv_lora_rank + s.qk_rope_head_dim;
        let mut widths = ScratchWidths::default();
        if let LatentQuery::LowRank { q_a_proj, .. } = &blueprint.q {
            widths.set(Q_LATENT, q_a_proj.weight.shape.rows);
        }
        widths.set(Q, s.heads * (s.qk_nope_head_dim + s.qk_rope_head_dim));
        widths.set(ABSORBED, s.heads * key);
        widths.set(KEY, key);
        widths.set(LATENT_OUT, s.heads * s.kv_lora_rank);
        widths.set(Y, s.heads * s.v_head_dim);
        widths.set(GATES, blueprint.gate_proj.as_ref().map_or(0, |g| g.weight.shape.rows));
        widths.set(POSITIONS, blueprint.sparse.as_ref().map_or(0, |s| s.top_k));
        match blueprint.indexer() {
            Some(MlaIndexer::Positions(indexer)) => {
                widths.set(INDEX_Q, indexer.heads * indexer.head_dim);
                widths.set(INDEX_K, indexer.head_dim);
                widths.set(INDEX_WEIGHTS, indexer.heads);
            }
            Some(MlaIndexer::Entries(indexer)) => EntryIndexer::set_widths(indexer, &mut widths),
            None => {}
        }
        widths
    }

    /// Width of a latent, its rotated key, and a head's key and value, in f32 values; zero if steps
    /// never use the expanded form.
    pub(crate) fn latent_head_width(blueprint: &MlaBlueprint) -> usize {
        let s = &blueprint.shape;
        match blueprint.sparse {
            Some(_) => 0,
            None => s.kv_lora_rank + s.qk_nope_head_dim + 2 * s.qk_rope_head_dim + s.v_head_dim,
        }
    }

    pub(crate) fn load(blueprint: &MlaBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        let shape = blueprint.shape;
        let q = match &blueprint.q {
            LatentQuery::Direct(q_proj) => QueryProjection::Direct(loader.linear(q_proj)?),
            LatentQuery::LowRank { q_a_proj, q_a_layernorm, q_b_proj } => {
                QueryProjection::LowRank {
                    rank: q_a_proj.weight.shape.rows,
                    q_a_proj: loader.linear(q_a_proj)?,
                    q_a_layernorm: loader.vector(q_a_layernorm)?,
                    q_b_proj: loader.linear(q_b_proj)?,
                }
            }
        };
        let [embed_q, unembed_out] = match &blueprint.kv_b {
            // kv_b_proj maps latents to K and V; absorbed queries need its key part transposed.
            LatentHeads::Whole(kv_b_proj) => {
                let weight = loader.weight(kv_b_proj)?;
                let [key, value] = LatentHeads::whole_rows(&shape);
                [
                    HeadMatrix { weight, head_rows: key, transposed: true },
                    HeadMatrix { weight, head_rows: value, transposed: false },
                ]
            }
            LatentHeads::Split { embed_q, unembed_out } => {
                let head_rows = |count| HeadRows { stride: count, first: 0, count };
                [
                    HeadMatrix {
                        weight: loader.matrix(embed_q)?,
                        head_rows: head_rows(shape.kv_lora_rank),
                        transposed: false,
                    },
                    HeadMatrix {
                        weight: loader.matrix(unembed_out)?,
                        head_rows: head_rows(shape.v_head_dim),
                        transposed: false,
                    },
                ]
            }
        };
        let kv_b_proj = match &blueprint.kv_b {
            LatentHeads::Whole(kv_b_proj) => Some(kv_b_proj),
            LatentHeads::Split { .. } => None,
        };
        let order = kv_b_proj.and_then(|m| Some((&*m.name, m.order.as_ref()?)));
        let kv_a_layernorm =
            loader.vector_in_order(&blueprint.kv_a_layernorm, order.map(|(_, order)| order))?;
        let latent_order = order.map(|(name, order)| loader.order(name, order)).transpose()?;
        Ok(Self {
            shape,
            rope: blueprint.rope.for_context(loader.context),
            q,
            kv_a_proj_with_mqa: loader.linear(&blueprint.kv_a_proj_with_mqa)?,
            kv_a_layernorm,
            latent_order,
            embed_q,
            unembed_out,
            gate: HeadGates::load(blueprint, loader)?,
            o_proj: loader.linear(&blueprint.o_proj)?,
            expands: !loader.exact && blueprint.sparse.is_none(),
            sparse: match &blueprint.sparse {
                Some(s) => {
                    let indexer = s.indexer.as_ref().map(|i| SparseIndexer::load(i, loader));
                    let (positions, pool) = (s.top_k, s.pool);
                    Some(Sparse { positions, pool, indexer: indexer.transpose()? })
                }
                None => None,
            },
        })
    }

    /// Reads `step.normed()`, writes `step.mixed()`, appends to the layer's latent KV cache.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let MlaShape {
            heads, qk_nope_head_dim: nope, qk_rope_head_dim: rotated, kv_lora_rank, ..
        } = self.shape;
        let key = kv_lora_rank + rotated;
        let x = step.normed();
        let q = step.buffer(Q, heads * (nope + rotated)).split(heads);
        let absorbed = step.buffer(ABSORBED, heads * key).split(heads);
        let k = step.buffer(KEY, key);
        let latent_out = step.buffer(LATENT_OUT, heads * kv_lora_rank).split(heads);
        let y = step.buffer(Y, heads * self.shape.v_head_dim);
        let [spans, ..] = step.spans;

        let q_latent = match &self.q {
            QueryProjection::Direct(q_proj) => {
                step.mat_mul(x, *q_proj, q.merge_heads())?;
                None
            }
            QueryProjection::LowRank { q_a_proj, q_a_layernorm, q_b_proj, rank } => {
                let latent = step.buffer(Q_LATENT, *rank);
                step.mat_mul(x, *q_a_proj, latent)?;
                step.norm(latent, Some(*q_a_layernorm), step.eps)?;
                step.mat_mul(latent, *q_b_proj, q.merge_heads())?;
                Some(latent)
            }
        };
        self.scale_queries(step, q.merge_heads())?;
        // A key is the normed latent followed by the rotated part; likewise each head's query.
        step.mat_mul(x, self.kv_a_proj_with_mqa, k)?;
        if let Some(gate) = &self.gate {
            step.mat_mul(x, gate.proj, gate.gates(step))?;
        }
        let latent = k.columns(0, kv_lora_rank);
        let (weight, eps) = (Some(self.kv_a_layernorm), step.eps);
        let ordered = step.in_order(latent, self.latent_order)?;
        step.run(&Op::RmsNorm { x: ordered, weight, per_head: false, eps, out: latent })?;
        let rotated_key = k.columns(kv_lora_rank, rotated);
        step.rope(&self.rope, rotated_key, rotated_key, spans)?;
        let q_rotated = q.slice_width(nope, rotated);
        // Spans of long prompts come last.
        let first = step.rows - if self.expands { step.kinds.long } else { 0 };
        let mut rows = 0;
        let few = spans.iter().take_while(|span| {
            rows += span.rows;
            rows <= first
        });
        let (spans, long_spans) = spans.split_at(few.count());
        let heads_y = y.split(heads);
        if !long_spans.is_empty() {
            let [q, q_rotated, k, out] =
                [q, q_rotated, k, heads_y].map(|view| view.slice(first, step.kinds.long));
            step.rope(&self.rope, q_rotated, q_rotated, long_spans)?;
            let (keys, values) = (self.embed_q.transpose(), self.unembed_out);
            let (scale, spans) = (self.shape.scale, long_spans);
            step.run(&Op::LatentAttention { q, k, keys, values, scale, spans, out })?;
        }
        if spans.is_empty() {
            return self.project(step, y);
        }
        let [q, q_rotated, k, absorbed, latent_out, heads_y] =
            [q, q_rotated, k, absorbed, latent_out, heads_y].map(|view| view.slice(0, first));
        step.run(&Op::HeadMatMul {
            x: q.slice_width(0, nope),
            matrix: self.embed_q,
            out: absorbed.slice_width(0, kv_lora_rank),
        })?;
        if rotated > 0 {
            let out = absorbed.slice_width(kv_lora_rank, rotated);
            step.rope(&self.rope, q_rotated, out, spans)?;
        }

        let positions =
            self.sparse.as_ref().map(|s| (step.buffer(POSITIONS, s.list_width(spans)), s));
        if let Some((positions, Sparse { indexer: Some(indexer), .. })) = positions {
            let q_input = q_latent.unwrap_or(x);
            match indexer {
                SparseIndexer::Positions(indexer) => {
                    indexer.select_positions(step, q_input, positions)?;
                }
                SparseIndexer::Entries(indexer) => {
                    let [_, keys, open_block, ..] = step.spans;
                    let states = IndexStates { keys, open_block };
                    indexer.select(step, states, q_input, IndexList::Positions, positions)?;
                }
            }
        }
        step.run(&Op::Attention {
            q: absorbed,
            k,
            v: None,
            gate: None,
            scale: self.shape.scale,
            window: None,
            sinks: None,
            positions: positions.map(|(positions, _)| positions),
            spans,
            out: latent_out,
        })?;
        step.run(&Op::HeadMatMul { x: latent_out, matrix: self.unembed_out, out: heads_y })?;
        self.project(step, y)
    }

    /// Gates the heads' values and writes their projection to `step.mixed()`.
    fn project(&self, step: &mut Step<'_>, y: View) -> Result<(), Error> {
        let heads = self.shape.heads;
        if let Some(gate) = &self.gate {
            let gate = gate.gates(step).split(heads);
            let function = GateFunction::Sigmoid;
            step.run(&Op::HeadGate { x: y.split(heads), gate, function })?;
        }
        let mixed = step.mixed();
        step.mat_mul(y, self.o_proj, mixed)
    }

    /// Multiplies queries by the temperature of their positions, rows of equal factors at once.
    fn scale_queries(&self, step: &mut Step<'_>, q: View) -> Result<(), Error> {
        let Some(temperature) = self.shape.temperature else { return Ok(()) };
        let ([spans, ..], mut row) = (step.spans, 0);
        for span in spans {
            let end = span.position + span.rows;
            let mut position = span.position;
            while position < end {
                let index = position / temperature.period;
                let rows = end.min((index + 1).saturating_mul(temperature.period)) - position;
                if index > 0 {
                    let x = q.slice(row, rows);
                    step.run(&Op::Scale { x, factor: temperature.factor(index) })?;
                }
                (row, position) = (row + rows, position + rows);
            }
        }
        Ok(())
    }
}

/// Lightning indexer: selects the positions that attention reads.
#[derive(Debug)]
struct Indexer {
    heads: usize,
    head_dim: usize,
    rope: RopeShape,
    wq_b: Linear,
    wk: Linear,
    k_norm: [Buffer; 2],
    weights_proj: Linear,
}

impl Indexer {
    fn load(blueprint: &IndexerBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        let [weight, bias] = &blueprint.k_norm;
        Ok(Self {
            heads: blueprint.heads,
            head_dim: blueprint.head_dim,
            rope: blueprint.rope.for_context(loader.context),
            wq_b: loader.linear(&blueprint.wq_b)?,
            wk: loader.linear(&blueprint.wk)?,
            k_norm: [loader.vector(weight)?, loader.vector(bias)?],
            weights_proj: loader.linear(&blueprint.weights_proj)?,
        })
    }

    /// Writes the selected positions, `(rows, top_k)`, and appends to the layer's index keys.
    ///
    /// Scores are not scaled, as a positive factor on a row's scores does not change its top-k.
    fn select_positions(
        &self,
        step: &mut Step<'_>,
        q_latent: View,
        positions: View,
    ) -> Result<(), Error> {
        let x = step.normed();
        let q = step.buffer(INDEX_Q, self.heads * self.head_dim);
        let k = step.buffer(INDEX_K, self.head_dim);
        let weights = step.buffer(INDEX_WEIGHTS, self.heads);
        let [_, spans, ..] = step.spans;
        // Exact, as for routers: rounding could change the selection.
        step.exact_mat_mul(q_latent, self.wq_b, q)?;
        step.exact_mat_mul(x, self.wk, k)?;
        step.exact_mat_mul(x, self.weights_proj, weights)?;
        let [weight, bias] = self.k_norm;
        let bias = Some(bias);
        step.run(&Op::LayerNorm { x: k, weight, bias, eps: INDEX_EPS, out: k })?;
        let q = q.split(self.heads);
        for x in [q, k] {
            step.rope(&self.rope, x, x, spans)?;
        }
        let scores = step.scores();
        let (queries, k) = (Some(IndexQueries { q, weights, scores }), Some(k));
        let (ratio, list, out) = (1, IndexList::Positions, positions);
        step.run(&Op::TopPositions { queries, k, ratio, list, spans, out })
    }
}
