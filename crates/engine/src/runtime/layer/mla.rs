//! Multi-head latent attention. The state holds one latent and one rotated key per position for all heads.
//!
//! In the absorbed form queries are taken to the latent, attend to it there, and what they find is taken back to values.
//! In the expanded form latents are taken to the keys and values of the heads.

use moeflux_compute::{Buffer, HeadMatrix, HeadRows, Op, View};

use super::{LANES, Linear, Loader, Step, Widths};
use crate::{
    base::error::Error,
    model::blueprint::{
        IndexerBlueprint, LatentHeads, LatentQuery, MlaBlueprint, MlaShape, RopeShape,
    },
};

/// Epsilon of the norms of latents and of index keys. DeepSeek's own code has it so, whatever `rms_norm_eps` says.
const LATENT_EPS: f32 = 1e-6;

/// Rows of a span from which on the expanded form is faster: docs/measured/latent-attention.md. It makes keys and values
/// of all positions for each span anew, and each row then meets 320 numbers per head and position instead of 1088.
const EXPANDED_ROWS: usize = 256;

#[derive(Debug)]
pub(crate) struct Mla {
    shape: MlaShape,
    rope: RopeShape,
    q: Query,
    kv_a_proj_with_mqa: Linear,
    kv_a_layernorm: Buffer,
    embed_q: HeadMatrix,
    unembed_out: HeadMatrix,
    o_proj: Linear,
    sparse: Option<Sparse>,
    /// Whether a step of many rows takes the expanded form. On the exact path none does: a row's bits would depend on how
    /// many share its step.
    expands: bool,
}

/// Attention to some positions only.
#[derive(Debug)]
struct Sparse {
    top_k: usize,
    /// Without one, the positions are those of the layer before.
    indexer: Option<Indexer>,
}

#[derive(Debug)]
enum Query {
    Direct(Linear),
    LowRank { q_a_proj: Linear, q_a_layernorm: Buffer, q_b_proj: Linear, rank: usize },
}

/// Lanes: the query's latent, queries, their counterparts in the latent's space, keys, what was found in the
/// latent's space, values.
const Q_LATENT: usize = 0;
const Q: usize = 1;
const ABSORBED: usize = 2;
const KEY: usize = 3;
const FOUND: usize = 4;
const Y: usize = 5;
/// Lanes of the indexer: queries, keys, weights.
const INDEX_Q: usize = 6;
const INDEX_K: usize = 7;
const INDEX_WEIGHTS: usize = 8;
/// The chosen positions. Nothing else uses this lane, as layers without an indexer of their own read what the last one
/// chose.
const POSITIONS: usize = LANES - 1;

impl Mla {
    pub(crate) fn widths(blueprint: &MlaBlueprint) -> Widths {
        let s = &blueprint.shape;
        let key = s.kv_lora_rank + s.qk_rope_head_dim;
        let mut widths = [0; LANES];
        if let LatentQuery::LowRank { q_a_proj, .. } = &blueprint.q {
            widths[Q_LATENT] = q_a_proj.weight.shape.rows;
        }
        widths[Q] = s.heads * (s.qk_nope_head_dim + s.qk_rope_head_dim);
        widths[ABSORBED] = s.heads * key;
        widths[KEY] = key;
        widths[FOUND] = s.heads * s.kv_lora_rank;
        widths[Y] = s.heads * s.v_head_dim;
        widths[POSITIONS] = blueprint.sparse.as_ref().map_or(0, |s| s.top_k);
        if let Some(indexer) = blueprint.sparse.as_ref().and_then(|s| s.indexer.as_ref()) {
            widths[INDEX_Q] = indexer.heads * indexer.head_dim;
            widths[INDEX_K] = indexer.head_dim;
            widths[INDEX_WEIGHTS] = indexer.heads;
        }
        widths
    }

    /// Numbers of a latent, its rotated key, and a key and a value of a head where steps may take the expanded form, else
    /// zero.
    pub(crate) fn latent_head(blueprint: &MlaBlueprint) -> usize {
        let s = &blueprint.shape;
        match blueprint.sparse {
            Some(_) => 0,
            None => s.kv_lora_rank + s.qk_nope_head_dim + 2 * s.qk_rope_head_dim + s.v_head_dim,
        }
    }

    pub(crate) fn load(blueprint: &MlaBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        let shape = blueprint.shape;
        let q = match &blueprint.q {
            LatentQuery::Direct(q_proj) => Query::Direct(loader.linear(q_proj)?),
            LatentQuery::LowRank { q_a_proj, q_a_layernorm, q_b_proj } => Query::LowRank {
                rank: q_a_proj.weight.shape.rows,
                q_a_proj: loader.linear(q_a_proj)?,
                q_a_layernorm: loader.vector(q_a_layernorm)?,
                q_b_proj: loader.linear(q_b_proj)?,
            },
        };
        let [embed_q, unembed_out] = match &blueprint.kv_b {
            // kv_b_proj takes the latent to keys and values; queries go the other way.
            LatentHeads::Whole(kv_b_proj) => {
                let weight = loader.matrix(kv_b_proj)?;
                let [key, value] = LatentHeads::whole_rows(&shape);
                [
                    HeadMatrix { weight, head_rows: key, transposed: true },
                    HeadMatrix { weight, head_rows: value, transposed: false },
                ]
            }
            LatentHeads::Split { embed_q, unembed_out } => {
                let all = |count| HeadRows { stride: count, first: 0, count };
                [
                    HeadMatrix {
                        weight: loader.matrix(embed_q)?,
                        head_rows: all(shape.kv_lora_rank),
                        transposed: false,
                    },
                    HeadMatrix {
                        weight: loader.matrix(unembed_out)?,
                        head_rows: all(shape.v_head_dim),
                        transposed: false,
                    },
                ]
            }
        };
        Ok(Self {
            shape,
            rope: blueprint.rope.clone(),
            q,
            kv_a_proj_with_mqa: loader.linear(&blueprint.kv_a_proj_with_mqa)?,
            kv_a_layernorm: loader.vector(&blueprint.kv_a_layernorm)?,
            embed_q,
            unembed_out,
            o_proj: loader.linear(&blueprint.o_proj)?,
            expands: !loader.exact && blueprint.sparse.is_none(),
            sparse: match &blueprint.sparse {
                Some(s) => {
                    let indexer =
                        s.indexer.as_ref().map(|i| Indexer::load(i, loader)).transpose()?;
                    Some(Sparse { top_k: s.top_k, indexer })
                }
                None => None,
            },
        })
    }

    /// Reads `step.normed()`, writes `step.mixed()`, appends to the layer's latents.
    pub(crate) fn run(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let MlaShape {
            heads, qk_nope_head_dim: nope, qk_rope_head_dim: rotated, kv_lora_rank, ..
        } = self.shape;
        let key = kv_lora_rank + rotated;
        let x = step.normed();
        let q = step.lane(Q, heads * (nope + rotated)).split(heads);
        let absorbed = step.lane(ABSORBED, heads * key).split(heads);
        let k = step.lane(KEY, key);
        let found = step.lane(FOUND, heads * kv_lora_rank).split(heads);
        let y = step.lane(Y, heads * self.shape.v_head_dim);
        let [spans, _] = step.spans;

        let q_latent = match &self.q {
            Query::Direct(q_proj) => {
                step.mat_mul(x, *q_proj, q.merge_heads())?;
                None
            }
            Query::LowRank { q_a_proj, q_a_layernorm, q_b_proj, rank } => {
                let latent = step.lane(Q_LATENT, *rank);
                step.mat_mul(x, *q_a_proj, latent)?;
                step.norm(latent, Some(*q_a_layernorm), LATENT_EPS)?;
                step.mat_mul(latent, *q_b_proj, q.merge_heads())?;
                Some(latent)
            }
        };
        // A key is the normed latent, then what is rotated; a query likewise, of each head.
        step.mat_mul(x, self.kv_a_proj_with_mqa, k)?;
        step.norm(k.columns(0, kv_lora_rank), Some(self.kv_a_layernorm), LATENT_EPS)?;
        let turned = k.columns(kv_lora_rank, rotated);
        step.rope(&self.rope, turned, turned, spans)?;
        let q_rotated = q.slice_width(nope, rotated);
        if self.expands && spans.iter().all(|span| span.rows >= EXPANDED_ROWS) {
            step.rope(&self.rope, q_rotated, q_rotated, spans)?;
            let (keys, values) = (self.embed_q.transpose(), self.unembed_out);
            let (scale, out) = (self.shape.scale, y.split(heads));
            step.run(&Op::LatentAttention { q, k, keys, values, scale, spans, out })?;
            let mixed = step.mixed();
            return step.mat_mul(y, self.o_proj, mixed);
        }
        step.run(&Op::HeadMatMul {
            x: q.slice_width(0, nope),
            matrix: self.embed_q,
            out: absorbed.slice_width(0, kv_lora_rank),
        })?;
        step.rope(&self.rope, q_rotated, absorbed.slice_width(kv_lora_rank, rotated), spans)?;

        let positions =
            self.sparse.as_ref().map(|sparse| (step.lane(POSITIONS, sparse.top_k), sparse));
        if let Some((positions, Sparse { indexer: Some(indexer), .. })) = positions {
            indexer.choose(step, q_latent.unwrap_or(x), positions)?;
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
            out: found,
        })?;
        step.run(&Op::HeadMatMul { x: found, matrix: self.unembed_out, out: y.split(heads) })?;
        let mixed = step.mixed();
        step.mat_mul(y, self.o_proj, mixed)
    }
}

/// Chooses the positions that attention looks at.
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
            rope: blueprint.rope.clone(),
            wq_b: loader.linear(&blueprint.wq_b)?,
            wk: loader.linear(&blueprint.wk)?,
            k_norm: [loader.vector(weight)?, loader.vector(bias)?],
            weights_proj: loader.linear(&blueprint.weights_proj)?,
        })
    }

    /// Writes the positions to look at, `(rows, top_k)`. Appends to the layer's index keys.
    ///
    /// A positive factor on all scores of a row changes no choice, so the scores are not scaled.
    fn choose(&self, step: &mut Step<'_>, q_latent: View, positions: View) -> Result<(), Error> {
        let x = step.normed();
        let q = step.lane(INDEX_Q, self.heads * self.head_dim);
        let k = step.lane(INDEX_K, self.head_dim);
        let weights = step.lane(INDEX_WEIGHTS, self.heads);
        let [_, spans] = step.spans;
        // As with routers, a little rounding may choose something else.
        step.exact_mat_mul(q_latent, self.wq_b, q)?;
        step.exact_mat_mul(x, self.wk, k)?;
        step.exact_mat_mul(x, self.weights_proj, weights)?;
        let [weight, bias] = self.k_norm;
        step.run(&Op::LayerNorm { x: k, weight, bias, eps: LATENT_EPS, out: k })?;
        let q = q.split(self.heads);
        for x in [q, k] {
            step.rope(&self.rope, x, x, spans)?;
        }
        let scores = step.scores();
        step.run(&Op::TopPositions { q, k, weights, spans, scores, out: positions })
    }
}
