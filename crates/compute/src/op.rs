//! The vocabulary: everything a device can be asked to compute.
//!
//! Ops are coarse, so that a device may fuse inside one. All activations are f32. Every op's doc gives the
//! formula, the shapes and the tolerance that the conformance table holds a device to, relative to the
//! [reference](crate::reference): `max |a - b| <= tolerance * rms(b)`.
//!
//! What an op writes lies in another buffer than what it reads, and two outputs lie in two buffers; where an op
//! says that `out` may be an input, it is the same view or another buffer. The vectors of a view do not overlap.
//! No state appears in two spans of one op. A device checks all of it before it writes anything.

use crate::matrix::ExpertShape;

/// A buffer of f32 on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Buffer(pub(crate) u32);

/// A resident matrix of weights on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Weight(pub(crate) u32);

/// The state of one layer of one session on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct State(pub(crate) u32);

/// A place for one expert: a bank and an index in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Slot {
    /// The bank: one allocation of the device.
    pub bank: u16,
    /// Which slot of the bank.
    pub index: u32,
}

/// A window into a buffer: `rows` rows of `heads` vectors of `width` numbers. A vector is contiguous.
///
/// A window of one head is a plain matrix `(rows, width)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// The buffer.
    pub buffer: Buffer,
    /// First element.
    pub offset: usize,
    /// Number of rows (tokens).
    pub rows: usize,
    /// Vectors per row.
    pub heads: usize,
    /// Numbers per vector.
    pub width: usize,
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Elements from one vector of a row to the next.
    pub head_stride: usize,
}

impl View {
    /// The first `rows` rows of a buffer that holds a dense `(_, width)` matrix.
    pub const fn rows(buffer: Buffer, rows: usize, width: usize) -> Self {
        Self { buffer, offset: 0, rows, heads: 1, width, row_stride: width, head_stride: width }
    }

    /// Columns `from .. from + width` of every row; the view must have one head.
    #[must_use]
    pub const fn columns(self, from: usize, width: usize) -> Self {
        Self { offset: self.offset + from, width, head_stride: width, ..self }
    }

    /// The same numbers as `heads` vectors per row; the view must have one head and `heads` must divide its
    /// width.
    #[must_use]
    pub const fn split(self, heads: usize) -> Self {
        let width = self.width / heads;
        Self { heads, width, head_stride: width, ..self }
    }

    /// One vector of every row, as a view of one head.
    #[must_use]
    pub const fn head(self, head: usize) -> Self {
        Self { offset: self.offset + head * self.head_stride, heads: 1, ..self }
    }

    /// Rows `from .. from + rows`.
    #[must_use]
    pub const fn slice(self, from: usize, rows: usize) -> Self {
        Self { offset: self.offset + from * self.row_stride, rows, ..self }
    }

    /// Numbers `from .. from + width` of every vector.
    #[must_use]
    pub const fn part(self, from: usize, width: usize) -> Self {
        Self { offset: self.offset + from, width, ..self }
    }

    /// The vectors of a row as one; they must lie one after another.
    #[must_use]
    pub const fn joined(self) -> Self {
        let width = self.heads * self.width;
        Self { heads: 1, width, head_stride: width, ..self }
    }

    /// First element of vector `head` of row `row`.
    #[inline]
    pub const fn at(&self, row: usize, head: usize) -> usize {
        self.offset + row * self.row_stride + head * self.head_stride
    }

    /// One past the last element; zero for an empty view.
    pub const fn end(&self) -> usize {
        if self.rows == 0 || self.heads == 0 {
            0
        } else {
            self.at(self.rows - 1, self.heads - 1) + self.width
        }
    }
}

/// Some consecutive rows of an op that belong to one session.
///
/// The spans of an op cover its rows in order and without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The session's state for the layer at hand.
    pub state: State,
    /// Position of the span's first row in its session.
    pub position: usize,
    /// Rows of the span.
    pub rows: usize,
}

/// Which of the two numbers of a rotary pair lies where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Pair `i` is `(x[i], x[i + n / 2])`: Qwen, GLM, gpt-oss.
    Halves,
    /// Pair `i` is `(x[2 i], x[2 i + 1])`: DeepSeek.
    Interleaved,
}

/// What joins the two halves of a gated linear unit: `out = activation(gate) * up`, or a variant of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`. Shazeer, "GLU Variants Improve Transformer", 2020.
    SwiGlu,
    /// `gelu(gate) * up` with the tanh approximation of GELU: Gemma.
    GeGlu,
    /// `g sigmoid(alpha g) (u + 1)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`: gpt-oss.
    ClampedSwiGlu {
        /// Steepness of the sigmoid: 1.702 in gpt-oss.
        alpha: f32,
        /// Where the gate ends above and `up` on both sides: 7 in gpt-oss.
        limit: f32,
    },
}

/// What a router makes of its logits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scoring {
    /// The softmax over all experts.
    Softmax,
    /// The sigmoid of each.
    Sigmoid,
}

/// Experts in groups of equal size, of which some are chosen first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// How many there are: expert `i` of `n` is in group `i / (n / count)`.
    pub count: usize,
    /// How many are chosen.
    pub chosen: usize,
}

/// How a router chooses experts and weighs them.
///
/// DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 2.1.2, for correction and groups (`noaux_tc`).
#[derive(Clone, Copy, Debug)]
pub struct Router {
    /// From logits to scores.
    pub scoring: Scoring,
    /// One number per expert, added to its score for choosing, not for weighing.
    pub correction: Option<Buffer>,
    /// Only experts of the best groups are chosen. A group counts as much as its two best (corrected) scores together;
    /// of equal groups the lower one comes first.
    pub groups: Option<ExpertGroups>,
    /// Whether the weights of a row are made to sum to one (unless that sum is below 1e-20), before the scales below.
    pub normalize: bool,
    /// Factor on all weights.
    pub scale: f32,
    /// One factor per expert on its weight.
    pub expert_scale: Option<Buffer>,
    /// The expert that every row meets besides.
    pub shared: Option<SharedChoice>,
}

/// The shared expert as one more of a layer of `n`: its id is `n`, and it comes last in rank, behind those that are chosen.
///
/// Dai et al., "DeepSeekMoE", 2024, section 3.2.
#[derive(Clone, Copy, Debug)]
pub struct SharedChoice {
    /// `(rows, 1)`: its weight is `sigmoid(gate)`; without a gate it is 1.
    pub gate: Option<View>,
}

impl Router {
    /// Softmax over all experts; the weights of those chosen sum to one if `normalize`.
    pub const fn softmax(normalize: bool) -> Self {
        Self {
            scoring: Scoring::Softmax,
            correction: None,
            groups: None,
            normalize,
            scale: 1.0,
            expert_scale: None,
            shared: None,
        }
    }

    /// How many experts a row is given besides those that are chosen: 1 where there is a shared one.
    pub(crate) fn besides(&self) -> usize {
        usize::from(self.shared.is_some())
    }
}

/// The rows of a stack of matrices, one per head, that a [`HeadMatrix`] is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRows {
    /// Rows of the stack per head.
    pub stride: usize,
    /// The first row of each head that is used.
    pub first: usize,
    /// How many are.
    pub count: usize,
}

/// One matrix per head, stacked in one weight: `W[h]` is `weight[h * stride + first ..][.. count]`, or, transposed, that
/// matrix's transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadMatrix {
    /// `(heads * stride, cols)`.
    pub weight: Weight,
    /// Which of its rows.
    pub head_rows: HeadRows,
    /// Whether the matrices take `count` numbers to `cols` instead of `cols` to `count`.
    pub transposed: bool,
}

impl HeadMatrix {
    /// The matrices that go the other way.
    #[must_use]
    pub const fn transpose(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Numbers that each matrix takes and yields; `cols` are those of the weight.
    pub(crate) const fn inputs_outputs(self, cols: usize) -> (usize, usize) {
        if self.transposed { (self.head_rows.count, cols) } else { (cols, self.head_rows.count) }
    }
}

/// One expert's work on one row: slot, row of the input, row of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertUse {
    /// Where the expert lies.
    pub slot: Slot,
    /// The token: a row of `x`.
    pub row: usize,
    /// Where its result goes: a row of `out`. By convention `row * k + rank`.
    pub part: usize,
}

/// The slots of all experts of a layer, by id, on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SlotTable(pub(crate) u32);

/// Which experts meet which rows.
#[derive(Clone, Copy, Debug)]
pub enum ExpertUses<'a> {
    /// Those of a list. Uses of one slot are consecutive.
    Listed(&'a [ExpertUse]),
    /// Those that a router chose: the caller need not know them. Expert `ids[r][rank]` meets row `r` in the slot that
    /// the table names, and its part is `r * k + rank`.
    Routed {
        /// `(rows, k)`, as [`Op::TopK`] makes them.
        ids: View,
        /// The slots of all experts, all of them filled.
        table: SlotTable,
    },
}

impl ExpertUses<'_> {
    /// How many there are.
    pub fn len(&self) -> usize {
        match self {
            ExpertUses::Listed(uses) => uses.len(),
            ExpertUses::Routed { ids, .. } => ids.rows * ids.width,
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The shared expert's share of [`Op::Combine`].
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// `(rows, hidden)`: output of the shared expert.
    pub out: View,
    /// `(rows, 1)`: logit of its gate; without one the output is added as it is.
    pub gate: Option<View>,
}

/// One unit of work for a device.
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    /// `out[r] = table[tokens[r]]`, widened. Exact.
    Embed {
        /// `(vocab, hidden)`.
        table: Weight,
        /// One id per row; an id outside the table is an error.
        tokens: &'a [u32],
        /// `(rows, hidden)`.
        out: View,
    },
    /// `out = x / sqrt(mean(x^2) + eps) * weight`, per vector. `out` may be `x`. Tolerance 1e-5.
    ///
    /// Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    RmsNorm {
        /// `(rows, heads, width)`.
        x: View,
        /// `width` numbers at the start of the buffer; without them, ones.
        weight: Option<Buffer>,
        /// Added to the mean.
        eps: f32,
        /// `(rows, heads, width)`.
        out: View,
    },
    /// `out = (x - mean) / sqrt(variance + eps) * weight + bias`, per vector, with the biased variance. `out` may be
    /// `x`. Tolerance 1e-5.
    ///
    /// Ba et al., "Layer Normalization", 2016.
    LayerNorm {
        /// `(rows, heads, width)`.
        x: View,
        /// `width` numbers at the start of the buffer.
        weight: Buffer,
        /// `width` numbers at the start of the buffer.
        bias: Buffer,
        /// Added to the variance.
        eps: f32,
        /// `(rows, heads, width)`.
        out: View,
    },
    /// `out = rms_norm(x) * weight * silu(gate)`, per vector: the delta-net's output norm. `out` may be `x`.
    /// Tolerance 1e-5.
    GatedRmsNorm {
        /// `(rows, heads, width)`.
        x: View,
        /// `(rows, heads, width)`.
        gate: View,
        /// `width` numbers at the start of the buffer.
        weight: Buffer,
        /// Added to the mean.
        eps: f32,
        /// `(rows, heads, width)`.
        out: View,
    },
    /// `out[r][o] = sum_i x[r][i] * weight[o][i] + bias[o]`. Tolerance 1e-5 on the exact path.
    ///
    /// The fast path may round each 32 activations that meet quantised weights to 8 bits of their largest:
    /// tolerance 1e-5 where that changes no activation, else `|a - b| <= 1e-2 |b|` as vectors for weights of mean
    /// zero. Plain weights meet f32 activations on both paths. A GPU may round the activations and the weights of many
    /// rows to f16 in any format, each row times a power of two of its own, so that nothing overflows (weights beyond
    /// 65,504 are taken for that): `|a - b| <= 1e-2 |b|` as vectors, row by row.
    MatMul {
        /// `(rows, cols)`.
        x: View,
        /// `(outputs, cols)`.
        weight: Weight,
        /// `outputs` numbers at the start of the buffer.
        bias: Option<Buffer>,
        /// Whether activations stay f32 even where the device rounds them for speed (routers do).
        exact: bool,
        /// `(rows, outputs)`; another buffer than `x`.
        out: View,
    },
    /// `out[r][h] = W[h] x[r][h]`. Activations stay f32 on both paths. Tolerance 1e-5.
    HeadMatMul {
        /// `(rows, heads, cols)`; transposed, `(rows, heads, count)`.
        x: View,
        /// `W`.
        matrix: HeadMatrix,
        /// `(rows, heads, count)`; transposed, `(rows, heads, cols)`; another buffer than `x`.
        out: View,
    },
    /// Rotates the first `2 * frequencies` numbers of each vector, pair `i` by the angle
    /// `position * frequency[i]`, then times `scale`; the others stay. `out` may be `x`. The angle is the product
    /// rounded to f32, as the models' own code has it: at position 5,000 that rounding moves logits by more than all
    /// other differences between right implementations. Tolerance 1e-5 at any position: sine and cosine are those of
    /// that angle.
    ///
    /// Su et al., "RoFormer", 2021.
    Rope {
        /// `(rows, heads, width)`.
        x: View,
        /// Radians per position, one per pair; at most `width / 2`.
        frequencies: &'a [f32],
        /// Where the pairs lie.
        pairs: RopePairs,
        /// 1, or YaRN's attention factor.
        scale: f32,
        /// Positions of the rows.
        spans: &'a [Span],
        /// `(rows, heads, width)`.
        out: View,
    },
    /// Causal attention with grouped heads. First writes the rows of `k` and `v` into the spans' states at
    /// their positions; then, for every row at position `p` and every query head `h`:
    /// `out[h] = sum_t softmax_t(scale * q[h] . K[t][h / g]) V[t][h / g]` over `t <= p`, where
    /// `g = q.heads / k.heads`; then times `sigmoid(gate[h])` where there is a gate. Tolerance 1e-5.
    ///
    /// On the fast path keys and values may be kept as f16, which ends at 65,504 for what is larger: tolerance 2e-3 where f16
    /// does not hold them; or as 8 bits ([`KvFormat::Q8`](crate::KvFormat::Q8)): a row of `out` is off by 1e-2 of its length,
    /// a number by 2.5e-2 of its row's rms, measured with uniform numbers. Where an op has many rows a GPU may round queries and weights to f16 too: tolerance 4e-3.
    ///
    /// With a window only `t > p - window` count. With positions only those count that they name. A sink is one more
    /// logit in the softmax that has no value: `exp(sink[h])` joins the sum
    /// (Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023; OpenAI, gpt-oss, 2025).
    ///
    /// In latent attention (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1, in its absorbed form) there is one head of keys
    /// and no `v`: values are the first numbers of the keys.
    ///
    /// A device may take norms and rotations in place of `q` and `k` that come right before into this op: what `q` and `k`
    /// hold afterwards is undefined.
    Attention {
        /// `(rows, heads, key width)`.
        q: View,
        /// `(rows, kv heads, key width)`.
        k: View,
        /// `(rows, kv heads, value width)`; without it values are the first numbers of the keys.
        v: Option<View>,
        /// `(rows, heads, value width)`.
        gate: Option<View>,
        /// Usually `1 / sqrt(key width)`.
        scale: f32,
        /// Positions that a row sees, its own among them; at least one.
        window: Option<usize>,
        /// One logit per query head.
        sinks: Option<Buffer>,
        /// `(rows, n)`: positions as whole numbers, ascending, none beyond the row's own; negative ones at the end
        /// stand for none. As [`Op::TopPositions`] makes them.
        positions: Option<View>,
        /// States made as [`StateShape::KeyValue`](crate::StateShape::KeyValue).
        spans: &'a [Span],
        /// `(rows, heads, value width)`; another buffer than the inputs.
        out: View,
    },
    /// Latent attention in its expanded form, which takes fewer products than the absorbed one ([`Op::Attention`]
    /// without `v`) where many rows see the same positions. First writes the rows of `k` into the spans' states at their
    /// positions. There a position is a latent `c`, then a rotated key `r` that the heads share. For every row at position
    /// `p` and every head `h`: `out[h] = sum_t softmax_t(scale * q[h] . (keys[h] c[t], r[t])) values[h] c[t]` over
    /// `t <= p`. Keys and values of heads stay f32 on both paths. A row's bits do not depend on the other rows of the op.
    /// Tolerance 1e-5; on the fast path latents are kept as f16, as [`Op::Attention`] has it.
    ///
    /// DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
    LatentAttention {
        /// `(rows, heads, nope + rope)`.
        q: View,
        /// `(rows, 1, latent + rope)`.
        k: View,
        /// From a latent to the first `nope` numbers of the heads' keys.
        keys: HeadMatrix,
        /// From a latent to the heads' values.
        values: HeadMatrix,
        /// Factor on the scores.
        scale: f32,
        /// States made as [`StateShape::KeyValue`](crate::StateShape::KeyValue) of one head without values.
        spans: &'a [Span],
        /// `(rows, heads, value width)`; another buffer than the inputs.
        out: View,
    },
    /// The lightning indexer of sparse attention. First writes the rows of `k` into the spans' states at their
    /// positions; then scores for every row at position `p` all `t <= p`,
    /// `score[t] = sum_h weights[h] max(q[h] . K[t], 0)`, and names the `n` positions with the highest scores, in
    /// ascending order; of equal scores the later position is taken first. Where there are no more than `n`, it names all
    /// of them, then -1. Exact where scores are apart by more than 1e-5 of their rms; where keys are kept as f16 or 8
    /// bits these are the scores of such keys.
    ///
    /// DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1.
    TopPositions {
        /// `(rows, heads, width)`.
        q: View,
        /// `(rows, 1, width)`.
        k: View,
        /// `(rows, heads)`.
        weights: View,
        /// States made as [`StateShape::KeyValue`](crate::StateShape::KeyValue) of one head without values.
        spans: &'a [Span],
        /// `(one or more, the most positions of a span)`: scratch; its contents are undefined afterwards.
        scores: View,
        /// `(rows, n)`: positions as whole numbers, exact in f32 below 2^24.
        out: View,
    },
    /// Causal depthwise convolution over time, then SiLU:
    /// `out[r][c] = silu(sum_j weight[c][j] * input[r - (width - 1) + j][c])`, where inputs before the span come
    /// from its state, which holds the last `width - 1` rows, oldest first: `(width - 1, channels)`. Reads the
    /// committed state, writes the next. Tolerance 1e-5.
    Conv1d {
        /// `(rows, channels)`.
        x: View,
        /// `(channels, width)` at the start of the buffer.
        weight: Buffer,
        /// Taps per channel.
        width: usize,
        /// States made as [`StateShape::Recurrent`](crate::StateShape::Recurrent) of `(width - 1) * channels`.
        spans: &'a [Span],
        /// `(rows, channels)`; another buffer than `x`.
        out: View,
    },
    /// The gated delta rule, row by row. For value head `h`, with key head `h / (value heads / key heads)`:
    /// ```text
    /// q' = q / sqrt(sum q^2 + 1e-6) / sqrt(key width)     k' = k / sqrt(sum k^2 + 1e-6)
    /// decay = exp(-exp(a_log[h]) * softplus(a[h] + dt_bias[h]))     beta = sigmoid(b[h])
    /// S = decay * S     d = beta * (v - S k')     S = S + d k'^T     out = S q'
    /// ```
    /// `S` is `(value width, key width)` per value head; the state is `(value heads, value width, key width)`.
    /// Reads the committed state, writes the next. Tolerance 1e-5.
    ///
    /// A device may take a convolution that comes right before, and yields `q`, `k` and `v`, into this op: what they hold
    /// afterwards is undefined. So are `out` and what a [`Op::GatedRmsNorm`] right behind makes of it in another buffer, once a
    /// product has met that.
    ///
    /// Yang et al., "Gated Delta Networks", 2024.
    DeltaNet {
        /// `(rows, key heads, key width)`.
        q: View,
        /// `(rows, key heads, key width)`.
        k: View,
        /// `(rows, value heads, value width)`.
        v: View,
        /// `(rows, value heads)`.
        a: View,
        /// `(rows, value heads)`.
        b: View,
        /// `value heads` numbers.
        a_log: Buffer,
        /// `value heads` numbers.
        dt_bias: Buffer,
        /// States made as [`StateShape::Recurrent`](crate::StateShape::Recurrent).
        spans: &'a [Span],
        /// `(rows, value heads, value width)`; another buffer than the inputs.
        out: View,
    },
    /// `out = activation(gate, up)`. `out` may be `gate` or `up`, which then lie in two buffers. Tolerance 1e-5.
    Glu {
        /// What joins the two.
        activation: Activation,
        /// `(rows, width)`.
        gate: View,
        /// `(rows, width)`.
        up: View,
        /// `(rows, width)`.
        out: View,
    },
    /// `x += y`. Exact.
    Add {
        /// `(rows, width)`.
        x: View,
        /// `(rows, width)`; another buffer than `x`.
        y: View,
    },
    /// `x *= factor`. Exact.
    Scale {
        /// `(rows, width)`.
        x: View,
        /// The factor.
        factor: f32,
    },
    /// `x = cap * tanh(x / cap)`. Tolerance 1e-5.
    SoftCap {
        /// `(rows, width)`.
        x: View,
        /// The bound; above zero.
        cap: f32,
    },
    /// The router: of each row the `k` experts with the largest (corrected) scores, in rank order; of equal scores the
    /// lower id comes first. Softmax is compared by its logits unless there is a correction. The weights are the
    /// uncorrected scores, divided by their sum if the router normalises, times its scales. A shared expert comes behind them. A
    /// NaN among the logits is an error. Ids exact, weights 1e-5.
    TopK {
        /// `(rows, n_experts)`.
        logits: View,
        /// How to choose and to weigh.
        router: Router,
        /// `(rows, k)`, with a shared expert `(rows, k + 1)`: ids as whole numbers, exact in f32 below 2^24.
        ids: View,
        /// As `ids`.
        weights: View,
    },
    /// What a sampler chooses from: the `n` largest numbers of each row in descending order, of equal ones the lower id
    /// first. At most [`MAX_TOP_LOGITS`](crate::MAX_TOP_LOGITS). A NaN is an error. A device may compile a kernel for each
    /// `n`, so few different ones are asked for. Exact.
    TopLogits {
        /// `(rows, vocab)`.
        logits: View,
        /// `(rows, 2 n)`: `n` ids as whole numbers, exact in f32 below 2^24, then their logits. One view, as both are read
        /// back at once.
        best: View,
    },
    /// `out[part] = down activation(gate x[row], up x[row])` for every use, each matrix with its bias where the experts
    /// have biases. Tolerance 1e-5 on the exact path; on the fast path of [`Op::MatMul`] `|a - b| <= 2e-2 |b|` as vectors.
    Experts {
        /// `(rows, hidden)`.
        x: View,
        /// The matrices of one expert of this layer.
        shape: &'a ExpertShape,
        /// What joins gate and up.
        activation: Activation,
        /// How many experts the layer has, 1 or more. With the rows of `x` and `out` a device may choose by it how it
        /// computes; not by `uses`, as those of a step may come in any number of ops.
        experts: usize,
        /// Which expert meets which row.
        uses: ExpertUses<'a>,
        /// `(uses.len() or more, intermediate)`: scratch; its contents are undefined afterwards.
        inner: View,
        /// `(parts, hidden)`; rows that no use names keep their contents.
        out: View,
    },
    /// `sum_rank weights[r][rank] * parts[r * k + rank]`, summed in rank order from zero, then plus the shared expert
    /// times `sigmoid(gate)`; the sum is added to `out[r]` last if `add`, else it replaces it. Tolerance 1e-6.
    Combine {
        /// `(rows * k, hidden)`.
        parts: View,
        /// `(rows, k)`.
        weights: View,
        /// The shared expert, if the layer has one that is added here.
        shared: Option<Shared>,
        /// Whether `out` is the residual stream, to be added to.
        add: bool,
        /// `(rows, hidden)`.
        out: View,
    },
}

impl Op<'_> {
    /// The op's name, for errors and profiles.
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "Embed",
            Op::RmsNorm { .. } => "RmsNorm",
            Op::LayerNorm { .. } => "LayerNorm",
            Op::GatedRmsNorm { .. } => "GatedRmsNorm",
            Op::MatMul { .. } => "MatMul",
            Op::HeadMatMul { .. } => "HeadMatMul",
            Op::Rope { .. } => "Rope",
            Op::Attention { .. } => "Attention",
            Op::LatentAttention { .. } => "LatentAttention",
            Op::TopPositions { .. } => "TopPositions",
            Op::Conv1d { .. } => "Conv1d",
            Op::DeltaNet { .. } => "DeltaNet",
            Op::Glu { .. } => "Glu",
            Op::Add { .. } => "Add",
            Op::Scale { .. } => "Scale",
            Op::SoftCap { .. } => "SoftCap",
            Op::TopK { .. } => "TopK",
            Op::TopLogits { .. } => "TopLogits",
            Op::Experts { .. } => "Experts",
            Op::Combine { .. } => "Combine",
        }
    }
}
