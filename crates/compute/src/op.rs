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

    /// Rows `from .. from + rows`.
    #[must_use]
    pub const fn slice(self, from: usize, rows: usize) -> Self {
        Self { offset: self.offset + from * self.row_stride, rows, ..self }
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
        /// `width` numbers at the start of the buffer.
        weight: Buffer,
        /// Added to the mean.
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
    /// zero. Plain weights meet f32 activations on both paths.
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
    /// Rotates the first `2 * frequencies` numbers of each vector in place: pair `i` by the angle
    /// `position * frequency[i]`, then times `scale`. Tolerance 1e-5 at any position: angles are reduced from
    /// f64 or better.
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
    },
    /// Causal attention with grouped heads. First writes the rows of `k` and `v` into the spans' states at
    /// their positions; then, for every row at position `p` and every query head `h`:
    /// `out[h] = sum_t softmax_t(scale * q[h] . K[t][h / g]) V[t][h / g]` over `t <= p`, where
    /// `g = q.heads / k.heads`; then times `sigmoid(gate[h])` where there is a gate. Tolerance 1e-5.
    Attention {
        /// `(rows, heads, key width)`.
        q: View,
        /// `(rows, kv heads, key width)`.
        k: View,
        /// `(rows, kv heads, value width)`.
        v: View,
        /// `(rows, heads, value width)`.
        gate: Option<View>,
        /// Usually `1 / sqrt(key width)`.
        scale: f32,
        /// States made as [`StateShape::KeyValue`](crate::StateShape::KeyValue).
        spans: &'a [Span],
        /// `(rows, heads, value width)`; another buffer than the inputs.
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
    /// `out = silu(gate) * up`. `out` may be `gate` or `up`, which then lie in two buffers. Tolerance 1e-5.
    SwiGlu {
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
    /// Softmax router: of each row the `k` experts with the largest logits, in rank order; of equal logits the
    /// lower id comes first. The weights are their softmax over all experts, divided by their sum if
    /// `normalize`. A NaN among the logits is an error. Ids exact, weights 1e-5.
    TopK {
        /// `(rows, n_experts)`.
        logits: View,
        /// Whether the weights of a row are made to sum to one.
        normalize: bool,
        /// `(rows, k)`: ids as whole numbers, exact in f32 below 2^24.
        ids: View,
        /// `(rows, k)`.
        weights: View,
    },
    /// `out[part] = down (silu(gate x[row]) * (up x[row]))` for every use. Uses of one slot are consecutive.
    /// Tolerance 1e-5 on the exact path; on the fast path of [`Op::MatMul`] `|a - b| <= 2e-2 |b|` as vectors.
    Experts {
        /// `(rows, hidden)`.
        x: View,
        /// The matrices of one expert of this layer.
        shape: &'a ExpertShape,
        /// Which expert meets which row.
        uses: &'a [ExpertUse],
        /// `(uses.len() or more, intermediate)`: scratch; its contents are undefined afterwards.
        inner: View,
        /// `(parts, hidden)`; rows that no use names keep their contents.
        out: View,
    },
    /// `x[r] += sum_rank weights[r][rank] * parts[r * k + rank]`, summed in rank order from zero, then plus the
    /// shared expert times `sigmoid(gate)`; the sum is added to `x` last. Tolerance 1e-6.
    Combine {
        /// `(rows, hidden)`: the residual stream.
        x: View,
        /// `(rows * k, hidden)`.
        parts: View,
        /// `(rows, k)`.
        weights: View,
        /// The shared expert, if the layer has one.
        shared: Option<Shared>,
    },
}

impl Op<'_> {
    /// The op's name, for errors and profiles.
    pub const fn name(&self) -> &'static str {
        match self {
            Op::Embed { .. } => "Embed",
            Op::RmsNorm { .. } => "RmsNorm",
            Op::GatedRmsNorm { .. } => "GatedRmsNorm",
            Op::MatMul { .. } => "MatMul",
            Op::Rope { .. } => "Rope",
            Op::Attention { .. } => "Attention",
            Op::Conv1d { .. } => "Conv1d",
            Op::DeltaNet { .. } => "DeltaNet",
            Op::SwiGlu { .. } => "SwiGlu",
            Op::Add { .. } => "Add",
            Op::TopK { .. } => "TopK",
            Op::Experts { .. } => "Experts",
            Op::Combine { .. } => "Combine",
        }
    }
}
