//! Ops: the operations of a device, their operands and their numerical contracts.
//!
//! Ops are coarse, so that a device may fuse kernels inside one. All activations are f32. The doc
//! of every op gives the formula, the shapes and the tolerance. The conformance tests compare a
//! device with the [reference](crate::reference): `max |a - b| <= tolerance * rms(b)`.
//!
//! Outputs are in other buffers than inputs, and two outputs are in two buffers. Where `out` may
//! alias an input, it is the same view or a view of another buffer. Vectors of a view do not
//! overlap. No state appears in two spans of one op. A device checks all of this before it writes
//! anything.

use crate::{Buffer, Router, Slot, SlotTable, State, Weight, matrix::ExpertShape};

/// Strided view of a buffer, `(rows, heads, width)`. Vectors of `width` elements are contiguous.
///
/// A view of one head is a matrix `(rows, width)`.
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
    /// Elements per vector.
    pub width: usize,
    /// Elements from one row to the next.
    pub row_stride: usize,
    /// Elements from one vector of a row to the next.
    pub head_stride: usize,
}

impl View {
    /// View of the first `rows` rows of a buffer that holds a dense `(_, width)` matrix.
    pub const fn rows(buffer: Buffer, rows: usize, width: usize) -> Self {
        Self { buffer, offset: 0, rows, heads: 1, width, row_stride: width, head_stride: width }
    }

    /// Columns `first .. first + width` of every row. The view must have one head.
    #[must_use]
    pub const fn columns(self, first: usize, width: usize) -> Self {
        Self { offset: self.offset + first, width, head_stride: width, ..self }
    }

    /// Splits every row into `heads` vectors. The view must have one head, and `heads` must divide
    /// its width.
    #[must_use]
    pub const fn split(self, heads: usize) -> Self {
        let width = self.width / heads;
        Self { heads, width, head_stride: width, ..self }
    }

    /// Vector `head` of every row, as a view of one head.
    #[must_use]
    pub const fn head(self, head: usize) -> Self {
        Self { offset: self.offset + head * self.head_stride, heads: 1, ..self }
    }

    /// Rows `first .. first + rows`.
    #[must_use]
    pub const fn slice(self, first: usize, rows: usize) -> Self {
        Self { offset: self.offset + first * self.row_stride, rows, ..self }
    }

    /// Elements `first .. first + width` of every vector.
    #[must_use]
    pub const fn slice_width(self, first: usize, width: usize) -> Self {
        Self { offset: self.offset + first, width, ..self }
    }

    /// Merges the vectors of every row into one. They must be contiguous.
    #[must_use]
    pub const fn merge_heads(self) -> Self {
        let width = self.heads * self.width;
        Self { heads: 1, width, head_stride: width, ..self }
    }

    /// Buffer index of the first element of vector `head` of row `row`.
    #[inline]
    pub const fn index(&self, row: usize, head: usize) -> usize {
        self.offset + row * self.row_stride + head * self.head_stride
    }

    /// Buffer index after the last element; zero for an empty view.
    pub const fn end(&self) -> usize {
        if self.rows == 0 || self.heads == 0 {
            0
        } else {
            self.index(self.rows - 1, self.heads - 1) + self.width
        }
    }
}

/// Consecutive rows of an op that belong to one sequence.
///
/// The spans of an op cover its rows in order, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// State of the sequence for the current layer.
    pub state: State,
    /// Position of the span's first row in its sequence.
    pub position: usize,
    /// Number of rows.
    pub rows: usize,
}

/// Layout of rotary pairs in a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Pair `i` is `(x[i], x[i + n / 2])`: Qwen, GLM, gpt-oss. Also called NeoX style.
    Halves,
    /// Pair `i` is `(x[2 i], x[2 i + 1])`: DeepSeek. Also called GPT-J style.
    Interleaved,
}

/// Activation of a gated linear unit: `out = activation(gate) * up`, or a variant; or of an MLP
/// without a gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up`. Shazeer, "GLU Variants Improve Transformer", 2020.
    SwiGlu,
    /// `gelu(gate) * up`, with the tanh approximation of GELU: Gemma.
    GeGlu,
    /// `g sigmoid(alpha g) (u + 1)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`:
    /// gpt-oss.
    ClampedSwiGlu {
        /// Slope of the sigmoid: 1.702 in gpt-oss.
        alpha: f32,
        /// Upper bound of the gate, and bound of `|up|`: 7 in gpt-oss.
        limit: f32,
    },
    /// `silu(min(gate, limit)) * clamp(up, -limit, limit)`: DeepSeek-V4.
    ClippedSwiGlu {
        /// Upper bound of the gate, and bound of `|up|`: 10 in DeepSeek-V4.
        limit: f32,
    },
    /// `min(silu(gate), limit) * clamp(up, -limit, limit)`: Step-3.5.
    LimitedSwiGlu {
        /// Upper bound of the activated gate, and bound of `|up|`: 7 and 16 in Step-3.5.
        limit: f32,
    },
    /// `max(up, 0)^2`, without a gate: Nemotron-3. So et al., "Primer", 2021.
    Relu2,
}

impl Activation {
    /// Whether it reads a gate.
    pub const fn has_gate(self) -> bool {
        !matches!(self, Self::Relu2)
    }
}

/// Function of a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateFunction {
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// `log(1 + exp(x))`.
    Softplus,
    /// `x`: the factor itself.
    Identity,
}

/// Gate of [`Op::GatedRmsNorm`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NormGate {
    /// `rms_norm(x) * weight * silu(gate)`: Gated DeltaNet.
    #[default]
    Silu,
    /// `rms_norm(x) * weight * sigmoid(gate)`: Kimi Delta Attention.
    Sigmoid,
    /// `rms_norm(x * silu(gate)) * weight`, with a weight per element of each head: Mamba-2.
    SiluBeforeNorm,
}

impl NormGate {
    /// Weights of a norm of `heads` vectors of `width` elements.
    pub(crate) const fn weights(self, heads: usize, width: usize) -> Option<usize> {
        match self {
            Self::Silu | Self::Sigmoid => Some(width),
            Self::SiluBeforeNorm => heads.checked_mul(width),
        }
    }
}

/// Bounds of the time steps of [`Op::Mamba2`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepLimits {
    /// Least time step.
    pub min: f32,
    /// Largest time step; may be infinite.
    pub max: f32,
}

impl Default for StepLimits {
    fn default() -> Self {
        Self { min: 0.0, max: f32::INFINITY }
    }
}

/// Logarithm of the decay of a delta rule, as a function of `x = a + dt_bias`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum LogDecay {
    /// `-exp(a_log) * softplus(x)`: Gated DeltaNet, Kimi-Linear.
    #[default]
    Softplus,
    /// `bound * sigmoid(exp(a_log) * x)`: the safe gate of Ling-3.0 and GLM-5.3.
    Bounded {
        /// Least logarithm, below 0: -5 in Ling-3.0.
        bound: f32,
    },
}

/// Rows of a stacked weight that form the matrices of a [`HeadMatrix`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRows {
    /// Stacked rows per head.
    pub stride: usize,
    /// First row used of each head.
    pub first: usize,
    /// Number of rows used of each head.
    pub count: usize,
}

/// One matrix per head, stacked in one weight: `W[h]` is `weight[h * stride + first ..][.. count]`,
/// or its transpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadMatrix {
    /// `(heads * stride, cols)`.
    pub weight: Weight,
    /// Rows of the weight.
    pub head_rows: HeadRows,
    /// Whether the matrices are transposed: they map `count` inputs to `cols` outputs instead of
    /// `cols` to `count`.
    pub transposed: bool,
}

impl HeadMatrix {
    /// The transposed matrices.
    #[must_use]
    pub const fn transpose(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Inputs and outputs of each matrix. `cols` is the columns of the weight.
    pub(crate) const fn inputs_outputs(self, cols: usize) -> (usize, usize) {
        if self.transposed { (self.head_rows.count, cols) } else { (cols, self.head_rows.count) }
    }
}

/// Assignment of one token row to one expert: slot, input row, output row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertUse {
    /// Slot of the expert.
    pub slot: Slot,
    /// Input row of `x`: the token.
    pub row: usize,
    /// Output row of `out`; by convention `row * k + rank`.
    pub out_row: usize,
}

/// Assignments of token rows to experts.
#[derive(Clone, Copy, Debug)]
pub enum ExpertUses<'a> {
    /// Explicit list. Uses of one slot are consecutive.
    Listed(&'a [ExpertUse]),
    /// The router's choices, resolved on the device. Expert `ids[r][rank]`, in the slot that the
    /// table gives, computes row `r`; the output row is `r * k + rank`.
    Routed {
        /// `(rows, k)`: ids from [`Op::TopK`].
        ids: View,
        /// Slots of all experts, all filled.
        table: SlotTable,
    },
}

impl ExpertUses<'_> {
    /// Number of uses.
    pub fn len(&self) -> usize {
        match self {
            ExpertUses::Listed(uses) => uses.len(),
            ExpertUses::Routed { ids, .. } => ids.rows * ids.width,
        }
    }

    /// Whether there are no uses.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Shared expert's contribution to [`Op::Combine`].
#[derive(Clone, Copy, Debug)]
pub struct Shared {
    /// `(rows, hidden)`: output of the shared expert.
    pub out: View,
    /// `(rows, 1)`: logit of its gate; without a gate the output is added with weight 1.
    pub gate: Option<View>,
}

/// Key head that a value head of a delta-net reads, where there are more value heads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum KeySharing {
    /// Adjacent value heads share a key head: `h / (value heads / key heads)`.
    #[default]
    Adjacent,
    /// Adjacent value heads read adjacent key heads: `h % key heads`.
    Strided,
}

impl KeySharing {
    /// Adjacent value heads that share a key head. Head `h` reads key head
    /// `h / this % key heads`.
    pub(crate) const fn run(self, value_heads: usize, key_heads: usize) -> usize {
        match self {
            Self::Adjacent => value_heads / key_heads,
            Self::Strided => 1,
        }
    }
}

/// One operation of a device.
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    /// Embedding lookup: `out[r] = table[tokens[r]]`, dequantized to f32. Exact.
    Embed {
        /// `(vocab, hidden)`.
        table: Weight,
        /// One token id per row; an id outside the table is an error.
        tokens: &'a [u32],
        /// `(rows, hidden)`.
        out: View,
    },
    /// RMS norm per vector: `out = x / sqrt(mean(x^2) + eps) * weight`. `out` may be `x`. Tolerance
    /// 1e-5.
    ///
    /// Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
    RmsNorm {
        /// `(rows, heads, width)`.
        x: View,
        /// `width` values at the start of the buffer; `None` for ones.
        weight: Option<Buffer>,
        /// Added to the mean of squares.
        eps: f32,
        /// `(rows, heads, width)`.
        out: View,
    },
    /// Layer norm per vector, with the biased variance: `out = (x - mean) / sqrt(variance + eps) *
    /// weight + bias`. `out` may be `x`. Tolerance 1e-5.
    ///
    /// Ba et al., "Layer Normalization", 2016.
    LayerNorm {
        /// `(rows, heads, width)`.
        x: View,
        /// `width` values at the start of the buffer.
        weight: Buffer,
        /// `width` values at the start of the buffer; `None` for zeros.
        bias: Option<Buffer>,
        /// Added to the variance.
        eps: f32,
        /// `(rows, heads, width)`.
        out: View,
    },
    /// Gated RMS norm per vector, the output norm of recurrent mixers: [`NormGate`] has the
    /// formulas. `out` may be `x`. Tolerance 1e-5.
    GatedRmsNorm {
        /// `(rows, heads, width)`.
        x: View,
        /// `(rows, heads, width)`.
        gate: View,
        /// Function of the gate, and its place.
        function: NormGate,
        /// `width` values at the start of the buffer, or `heads * width`: see [`NormGate`].
        weight: Buffer,
        /// Added to the mean of squares.
        eps: f32,
        /// `(rows, heads, width)`.
        out: View,
    },
    /// Matrix product: `out[r][o] = sum_i x[r][i] * weight[o][i] + bias[o]`. Tolerance 1e-5 on the
    /// exact path.
    ///
    /// For quantized weights the fast path may quantize each block of 32 activations to int8, with
    /// the block's largest magnitude as the scale. The tolerance is 1e-5 where this changes no
    /// activation, else `|a - b| <= 1e-2 |b|` as vectors, for weights of mean zero. Plain weights
    /// are multiplied by f32 activations on both paths.
    ///
    /// For many rows a GPU may round activations and weights of any format to f16. Each row has its
    /// own power-of-two scale so that it does not overflow; weights beyond 65,504 saturate. The
    /// tolerance is then `|a - b| <= 1e-2 |b|` as vectors, row by row.
    MatMul {
        /// `(rows, cols)`.
        x: View,
        /// `(outputs, cols)`.
        weight: Weight,
        /// `outputs` values at the start of the buffer.
        bias: Option<Buffer>,
        /// Whether activations stay f32 on the fast path too, as for routers.
        exact: bool,
        /// `(rows, outputs)`; another buffer than `x`.
        out: View,
    },
    /// Per-head matrix product: `out[r][h] = W[h] x[r][h]`. Activations stay f32 on both paths.
    /// Tolerance 1e-5.
    HeadMatMul {
        /// `(rows, heads, cols)`; transposed, `(rows, heads, count)`.
        x: View,
        /// `W`.
        matrix: HeadMatrix,
        /// `(rows, heads, count)`; transposed, `(rows, heads, cols)`; another buffer than `x`.
        out: View,
    },
    /// Rotary position embedding. Rotates the first `2 * frequencies.len()` elements of each
    /// vector, pair `i` by the angle `position * frequencies[i]`, and multiplies them by `scale`.
    /// The other elements are copied. `out` may be `x`.
    ///
    /// The angle is rounded to f32, as in the models' own code: at position 5,000 this rounding
    /// changes logits more than all other differences between correct implementations. Tolerance
    /// 1e-5 at any position; sine and cosine are those of the rounded angle.
    ///
    /// Su et al., "RoFormer", 2021.
    Rope {
        /// `(rows, heads, width)`.
        x: View,
        /// Radians per position, one per pair; at most `width / 2`.
        frequencies: &'a [f32],
        /// Layout of the pairs.
        pairs: RopePairs,
        /// 1, or the attention factor of YaRN.
        scale: f32,
        /// Positions of the rows.
        spans: &'a [Span],
        /// `(rows, heads, width)`.
        out: View,
    },
    /// Causal grouped-query attention (GQA). First appends the rows of `k` and `v` to the KV caches
    /// of the spans, at the rows' positions. Then, for every row at position `p` and every query
    /// head `h`: `out[h] = sum_t softmax_t(scale * q[h] . K[t][h / g]) V[t][h / g]` over `t <= p`,
    /// where `g = q.heads / k.heads`. With a gate, `out[h]` is multiplied by `sigmoid(gate[h])`.
    /// Tolerance 1e-5.
    ///
    /// On the fast path the KV cache may be f16, which saturates at 65,504: tolerance 2e-3 for
    /// values that f16 does not represent exactly. It may also be 8-bit
    /// ([`KvFormat::Q8`](crate::KvFormat::Q8)): the error is 1e-2 of the norm of a row of `out`,
    /// and 2.5e-2 of the row's rms for an element, measured with uniform values. For many rows a
    /// GPU may also round queries and softmax weights to f16: tolerance 4e-3.
    ///
    /// With `window`, only `t > p - window` is visible (sliding-window attention). With
    /// `positions`, only the listed positions are visible (sparse attention). A sink is an
    /// additional softmax logit without a value: `exp(sink[h])` is added to the denominator (Xiao
    /// et al., "Efficient Streaming Language Models with Attention Sinks", 2023; OpenAI, gpt-oss,
    /// 2025).
    ///
    /// Multi-head latent attention (MLA) in its absorbed form has one key head and no `v`: values
    /// are prefixes of the keys (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1).
    ///
    /// A device may fuse in-place norms and rotations of `q` and `k` that directly precede this op.
    /// The contents of `q` and `k` are undefined afterwards.
    Attention {
        /// `(rows, heads, key width)`.
        q: View,
        /// `(rows, kv heads, key width)`.
        k: View,
        /// `(rows, kv heads, value width)`; without it, values are prefixes of the keys.
        v: Option<View>,
        /// `(rows, heads, value width)`.
        gate: Option<View>,
        /// Usually `1 / sqrt(key width)`.
        scale: f32,
        /// Sliding window: number of visible positions, including the row's own; at least 1.
        window: Option<usize>,
        /// One sink logit per query head.
        sinks: Option<Buffer>,
        /// `(rows, n)`, or `(rows, kv heads, n)` with a list for each KV head: visible positions as
        /// integers, ascending, at most the row's own. Negative entries at the end are padding, as
        /// many in all lists of a row. The output of [`Op::TopPositions`] or [`Op::TopBlocks`].
        positions: Option<View>,
        /// States made as [`StateShape::KeyValue`](crate::StateShape::KeyValue).
        spans: &'a [Span],
        /// `(rows, heads, value width)`; another buffer than the inputs.
        out: View,
    },
    /// Multi-head latent attention (MLA) in its expanded form. It needs fewer multiplications than
    /// the absorbed form ([`Op::Attention`] without `v`) where many rows attend to the same
    /// positions: prefill.
    ///
    /// First appends the rows of `k` to the KV caches of the spans, at the rows' positions. An
    /// entry is a latent `c`, then a rotary key `r` that all heads share. Then, for every row at
    /// position `p` and every head `h`: `out[h] = sum_t softmax_t(scale * q[h] . (keys[h] c[t],
    /// r[t])) values[h] c[t]` over `t <= p`.
    ///
    /// Expanded keys and values are f32 on both paths. The result of a row is bit-identical
    /// whatever other rows the op has. Tolerance 1e-5; on the fast path latents are stored as f16,
    /// with the tolerance of [`Op::Attention`].
    ///
    /// DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1.
    LatentAttention {
        /// `(rows, heads, nope + rope)`.
        q: View,
        /// `(rows, 1, latent + rope)`.
        k: View,
        /// Maps a latent to the first `nope` elements of each head's key.
        keys: HeadMatrix,
        /// Maps a latent to each head's value.
        values: HeadMatrix,
        /// Factor of the scores.
        scale: f32,
        /// States made as [`StateShape::KeyValue`](crate::StateShape::KeyValue) of one head without
        /// values.
        spans: &'a [Span],
        /// `(rows, heads, value width)`; another buffer than the inputs.
        out: View,
    },
    /// Lightning indexer of sparse attention. First appends the rows of `k` to the KV caches of the
    /// spans, at the rows' positions. Then scores, for every row at position `p`, all `t <= p`:
    /// `score[t] = sum_h weights[h] max(q[h] . K[t], 0)`.
    ///
    /// Returns the `n` positions with the highest scores, in ascending order; of equal scores the
    /// later position wins. With at most `n` positions it returns all of them, padded with -1.
    /// Exact where scores differ by more than 1e-5 of their rms. If the keys are stored as f16 or
    /// in 8 bits, the scores are those of the rounded keys.
    ///
    /// DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1.
    TopPositions {
        /// `(rows, heads, width)`.
        q: View,
        /// `(rows, 1, width)`.
        k: View,
        /// `(rows, heads)`.
        weights: View,
        /// States made as [`StateShape::KeyValue`](crate::StateShape::KeyValue) of one head without
        /// values.
        spans: &'a [Span],
        /// Scratch, `(at least 1, maximum positions of a span)`. The contents are undefined
        /// afterwards.
        scores: View,
        /// `(rows, n)`: positions as integers, exact in f32 below 2^24.
        out: View,
    },
    /// Block indexer of sparse attention. First appends the rows of `k` to the KV caches of the
    /// spans, at the rows' positions. Then scores, for every row at position `p` and every head
    /// `h`, the blocks of `block` positions by their best one: `score[h][b] = max_t q[h] . K[t]`
    /// over the positions `t <= p` of block `b`.
    ///
    /// Returns the positions `t <= p` of `n` blocks in ascending order, padded with -1: of the last
    /// `local` blocks up to that of `p`, and of those with the highest scores; of equal scores the
    /// later block wins. With at most `n` blocks it returns all of them. Exact where scores differ
    /// by more than 1e-5 of their rms. If the keys are stored as f16 or in 8 bits, the scores are
    /// those of the rounded keys.
    ///
    /// MiniMax, MiniMax-M3, `topk_sparse`.
    TopBlocks {
        /// `(rows, heads, width)`.
        q: View,
        /// `(rows, 1, width)`.
        k: View,
        /// Positions of a block: a power of two, at most [`KV_BLOCK`](crate::KV_BLOCK).
        block: usize,
        /// Last blocks that are always returned: 1 to `n`.
        local: usize,
        /// States made as [`StateShape::KeyValue`](crate::StateShape::KeyValue) of one head without
        /// values.
        spans: &'a [Span],
        /// Scratch, `(at least heads, maximum blocks of a span)`. The contents are undefined
        /// afterwards.
        scores: View,
        /// `(rows, heads, n * block)`: positions as integers, exact in f32 below 2^24.
        out: View,
    },
    /// Causal depthwise 1-D convolution over time, then SiLU:
    /// `out[r][c] = f(sum_j weight[c][j] * input[r - (width - 1) + j][c] + bias[c])`. Inputs before
    /// the span come from its state, `(width - 1, channels)`: the last `width - 1` rows, oldest
    /// first. Reads the committed state, writes the next. Tolerance 1e-5.
    Conv1d {
        /// `(rows, channels)`.
        x: View,
        /// `(channels, width)` at the start of the buffer.
        weight: Buffer,
        /// `channels` values at the start of the buffer; `None` for zeros.
        bias: Option<Buffer>,
        /// Taps per channel.
        width: usize,
        /// Whether `f` is SiLU instead of the identity.
        silu: bool,
        /// States made as [`StateShape::Recurrent`](crate::StateShape::Recurrent) of `(width - 1) *
        /// channels`.
        spans: &'a [Span],
        /// `(rows, channels)`; another buffer than `x`.
        out: View,
    },
    /// Gated delta rule, row by row. For value head `h`, with key head `h / (value heads / key
    /// heads)`:
    /// ```text
    /// q' = q / sqrt(sum q^2 + 1e-6) / sqrt(key width)     k' = k / sqrt(sum k^2 + 1e-6)
    /// decay = exp(log_decay(a[h] + dt_bias[h], a_log[h]))     beta = sigmoid(b[h])
    /// S = S diag(decay)     d = beta * (v - S k')     S = S + d k'^T     out = S q'
    /// ```
    /// `S` is `(value width, key width)` per value head; the state is `(value heads, value width,
    /// key width)`. The decay is one number per head, or one per element of its key. Reads the
    /// committed state, writes the next. Tolerance 1e-5.
    ///
    /// A device may fuse a directly preceding convolution that produces `q`, `k` and `v`; their
    /// contents are undefined afterwards. It may also fuse a directly following
    /// [`Op::GatedRmsNorm`] into another buffer. `out` and the norm's output are undefined once a
    /// matrix product has read the norm's output.
    ///
    /// Yang et al., "Gated Delta Networks", 2024; with a decay per element of a key: Kimi Team,
    /// "Kimi Linear", 2025, Kimi Delta Attention (KDA).
    DeltaNet {
        /// `(rows, key heads, key width)`.
        q: View,
        /// `(rows, key heads, key width)`.
        k: View,
        /// `(rows, value heads, value width)`.
        v: View,
        /// Input of the decay, `(rows, value heads, 1)` or `(rows, value heads, key width)`.
        a: View,
        /// `(rows, value heads)`.
        b: View,
        /// `value heads` values.
        a_log: Buffer,
        /// As many values as a row of `a`.
        dt_bias: Buffer,
        /// Function of the decay.
        decay: LogDecay,
        /// Key head of each value head.
        sharing: KeySharing,
        /// States made as [`StateShape::Recurrent`](crate::StateShape::Recurrent).
        spans: &'a [Span],
        /// `(rows, value heads, value width)`; another buffer than the inputs.
        out: View,
    },
    /// State-space recurrence of Mamba-2, row by row. For head `h`, with group `h / (heads /
    /// groups)`:
    /// ```text
    /// step = clamp(softplus(dt[h] + dt_bias[h]), limits)     decay = exp(-exp(a_log[h]) * step)
    /// S = decay S + step x b^T     out = S c + d[h] x
    /// ```
    /// `S` is `(width, state width)` per head; the state is `(heads, width, state width)`. Reads
    /// the committed state, writes the next. Tolerance 1e-5.
    ///
    /// Dao and Gu, "Transformers are SSMs", 2024, section 7.
    Mamba2 {
        /// `(rows, heads, width)`.
        x: View,
        /// `(rows, groups, state width)`.
        b: View,
        /// `(rows, groups, state width)`.
        c: View,
        /// `(rows, heads)`.
        dt: View,
        /// `heads` values.
        a_log: Buffer,
        /// `heads` values.
        d: Buffer,
        /// `heads` values.
        dt_bias: Buffer,
        /// Bounds of `step`.
        limits: StepLimits,
        /// States made as [`StateShape::Recurrent`](crate::StateShape::Recurrent).
        spans: &'a [Span],
        /// `(rows, heads, width)`; another buffer than the inputs.
        out: View,
    },
    /// Gated linear unit: `out = activation(gate, up)`. `out` may be `gate` or `up`, which are then
    /// in two buffers. Without a gate, `gate` is `up`. Tolerance 1e-5.
    Glu {
        /// Activation of the unit.
        activation: Activation,
        /// `(rows, width)`.
        gate: View,
        /// `(rows, width)`.
        up: View,
        /// `(rows, width)`.
        out: View,
    },
    /// Gate per head or per element: `x[r][h][i] *= function(gate[r][h][i])`, where a gate of width
    /// 1 is that of the whole head. Tolerance 1e-5.
    HeadGate {
        /// `(rows, heads, width)`.
        x: View,
        /// `(rows, heads, 1)` or `(rows, heads, width)`; another buffer than `x`.
        gate: View,
        /// Function of the gate.
        function: GateFunction,
    },
    /// Residual addition: `x += y`. Exact.
    Add {
        /// `(rows, width)`.
        x: View,
        /// `(rows, width)`; another buffer than `x`.
        y: View,
    },
    /// Scaling: `x *= factor`. Exact.
    Scale {
        /// `(rows, width)`.
        x: View,
        /// The factor.
        factor: f32,
    },
    /// Columns in another order: `out[r][j] = x[r][orders[0][j]]`. With `ids`, in an order per
    /// expert: `out[r * k + rank][j] = x[r][orders[ids[r][rank]][j]]`. Exact.
    ///
    /// Act-order of GPTQ: Frantar et al., "GPTQ", 2023, and the authors' code, `--act-order`.
    GatherColumns {
        /// `(rows, width)`.
        x: View,
        /// `(orders, width)`: columns of `x` as integers, exact in f32 below 2^24. A larger one
        /// stands for the last column.
        orders: View,
        /// `(rows, k)`: ids from [`Op::TopK`]. An id beyond the orders stands for the last one.
        ids: Option<View>,
        /// `(rows, width)`, or `(rows * k, width)` with ids; another buffer than the inputs.
        out: View,
    },
    /// Logit soft capping: `x = cap * tanh(x / cap)`. Tolerance 1e-5.
    SoftCap {
        /// `(rows, width)`.
        x: View,
        /// The bound, greater than 0.
        cap: f32,
    },
    /// Top-k routing: the `k` experts with the largest (corrected) scores of each row, in rank
    /// order; of equal scores the lower id comes first. Softmax scores are compared by their logits
    /// unless there is a correction; so are those of the sparse mixer.
    ///
    /// The weights are the uncorrected scores, divided by their sum if the router normalizes, times
    /// the scales. A shared expert comes last. A NaN logit is an error. Ids are exact; the
    /// tolerance of the weights is 1e-5.
    TopK {
        /// `(rows, n_experts)`.
        logits: View,
        /// Routing parameters.
        router: Router,
        /// `(rows, k)`, or `(rows, k + 1)` with a shared expert: ids as integers, exact in f32
        /// below 2^24.
        ids: View,
        /// Same shape as `ids`.
        weights: View,
    },
    /// Top-n logits for a sampler: the `n` largest logits of each row in descending order; of equal
    /// logits the lower id comes first. `n` is at most [`MAX_TOP_LOGITS`](crate::MAX_TOP_LOGITS). A
    /// NaN is an error. Exact.
    ///
    /// A device may compile a kernel per `n`, so callers use few distinct values.
    TopLogits {
        /// `(rows, vocab)`.
        logits: View,
        /// `(rows, 2 n)`: `n` ids as integers, exact in f32 below 2^24, then their logits. One
        /// view: a single readback returns both.
        best: View,
    },
    /// Routed experts: `out[out_row] = down activation(gate x[row], up x[row])` for every use; the
    /// activation has a gate if the experts have. Each matrix has an output bias if the experts
    /// have biases. Tolerance 1e-5 on the exact path; on
    /// the fast path of [`Op::MatMul`] `|a - b| <= 2e-2 |b|` as vectors.
    Experts {
        /// `(rows, hidden)`.
        x: View,
        /// Shape of one expert of this layer.
        shape: &'a ExpertShape,
        /// Activation of the gated linear unit.
        activation: Activation,
        /// Number of experts of the layer, at least 1. A device may select a kernel by it and by
        /// the rows of `x` and `out`, but not by `uses`: the uses of a step may be split over any
        /// number of ops.
        experts: usize,
        /// Assignments of rows to experts.
        uses: ExpertUses<'a>,
        /// Scratch, `(at least uses.len(), intermediate)`. The contents are undefined afterwards.
        inner: View,
        /// `(output rows, hidden)`. Rows without a use keep their contents.
        out: View,
    },
    /// Weighted sum of expert outputs: `sum_rank weights[r][rank] * parts[r * k + rank]`, in rank
    /// order from zero, plus the shared expert's output times `sigmoid(gate)`. With `add`, the sum
    /// is added to `out[r]` last; otherwise it replaces `out[r]`. Tolerance 1e-6.
    Combine {
        /// `(rows * k, hidden)`: outputs of the routed experts.
        parts: View,
        /// `(rows, k)`.
        weights: View,
        /// Shared expert, if this op adds it.
        shared: Option<Shared>,
        /// Whether `out` is the residual stream and the sum is added to it.
        add: bool,
        /// `(rows, hidden)`.
        out: View,
    },
}

impl Op<'_> {
    /// Name of the op, for errors and profiles.
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
            Op::TopBlocks { .. } => "TopBlocks",
            Op::Conv1d { .. } => "Conv1d",
            Op::DeltaNet { .. } => "DeltaNet",
            Op::Mamba2 { .. } => "Mamba2",
            Op::Glu { .. } => "Glu",
            Op::HeadGate { .. } => "HeadGate",
            Op::Add { .. } => "Add",
            Op::Scale { .. } => "Scale",
            Op::GatherColumns { .. } => "GatherColumns",
            Op::SoftCap { .. } => "SoftCap",
            Op::TopK { .. } => "TopK",
            Op::TopLogits { .. } => "TopLogits",
            Op::Experts { .. } => "Experts",
            Op::Combine { .. } => "Combine",
        }
    }
}
