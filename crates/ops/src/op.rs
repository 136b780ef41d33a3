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

use crate::{
    handle::{Buffer, Weight},
    matrix::ExpertShape,
    operands::{
        Activation, ExpertUses, GateFunction, HeadMatrix, IndexList, IndexQueries, KeySharing,
        LogDecay, NormGate, RopePairs, RopePositions, Shared, Span, StepLimits, View,
    },
    router::Router,
};

/// One operation of a device.
#[derive(Clone, Copy, Debug)]
pub enum Op<'a> {
    /// Embedding lookup: `out[r] = table[tokens[r]]`, dequantized to f32. Exact.
    Embed {
        /// `(vocab, hidden)`.
        table: Weight,
        /// One token id per row; an id outside the table is an error.
        tokens: &'a [u32],
        /// `(rows, hidden)`, or `(rows, heads, hidden)`: every head receives the row.
        out: View,
    },
    /// [`Op::Embed`] of tokens that an earlier op has chosen.
    EmbedChosen {
        /// `(vocab, hidden)`; `vocab` is at most 2^24.
        table: Weight,
        /// `(rows, 1)`: token ids as integers, such as the first column of [`Op::TopLogits`]. An id
        /// outside the table counts as the nearest one.
        ids: View,
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
        /// Whether each head has its weights: `heads * width` values.
        per_head: bool,
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
    /// A CPU adds the terms of a row in one of two orders. Rows of answers have the bits that each
    /// has alone, and other rows the bits that they have among any number of others.
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
        /// Number of leading rows that belong to answers.
        answers: usize,
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
    /// The other elements are copied. `out` may be `x`. A row has one position, or several, of
    /// which each pair takes one.
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
        positions: RopePositions<'a>,
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
    /// `positions`, only the listed entries are visible (sparse attention). A sink is an
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
        /// `(rows, n)`, or `(rows, kv heads, n)` with a list for each KV head: visible entries of
        /// the state as integers, in the order of the sums, at least one, each of which this or an
        /// earlier op has appended. They need not be ascending, nor at most the row's own position:
        /// the spans' positions only say where `k` and `v` are appended. Negative entries at the
        /// end are padding, as many in all lists of a row. The output of [`Op::TopPositions`] or
        /// [`Op::TopBlocks`].
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
    /// Bidirectional attention within segments of rows, without a state. For every row of a segment
    /// and every query head `h`: `out[h] = sum_t softmax_t(scale * q[h] . k[t][h / g]) v[t][h / g]`
    /// over all rows `t` of the segment, where `g = q.heads / k.heads`.
    ///
    /// Scores are f32 on both paths, and computed block by block: no device holds all of a segment.
    /// The result of a row is bit-identical whatever other segments the op has. Tolerance 1e-5.
    ///
    /// A segment is an image, or a window of one. Dosovitskiy et al., "An Image is Worth 16x16
    /// Words", 2020; in blocks: Dao et al., "FlashAttention", 2022.
    SegmentAttention {
        /// `(rows, heads, key width)`; widths are at most
        /// [`MAX_SEGMENT_WIDTH`](crate::MAX_SEGMENT_WIDTH).
        q: View,
        /// `(rows, kv heads, key width)`.
        k: View,
        /// `(rows, kv heads, value width)`.
        v: View,
        /// Usually `1 / sqrt(key width)`; 1 in Gemma 4's tower.
        scale: f32,
        /// Rows of each segment, at least 1. The segments cover the rows in order.
        segments: &'a [usize],
        /// `(rows, heads, value width)`; another buffer than the inputs.
        out: View,
    },
    /// Appends the rows of `k` and `v` to the KV caches of the spans, at the rows' positions, as
    /// [`Op::Attention`] does before it attends. A span without rows leaves its cache as it is; its
    /// position must not be beyond the capacity either.
    Append {
        /// `(rows, kv heads, key width)`.
        k: View,
        /// `(rows, kv heads, value width)`; `None` for states without values.
        v: Option<View>,
        /// States made as [`StateShape::KeyValue`](crate::StateShape::KeyValue).
        spans: &'a [Span],
    },
    /// Lightning indexer of sparse attention. First appends the rows of `k` to the KV caches of the
    /// spans, at the rows' positions. Then scores, for every row, the entries of the cache that it
    /// sees: `score[t] = sum_h weights[h] max(q[h] . K[t], 0)`. An entry stands for `ratio`
    /// positions; a row at position `p` sees entry `t` if `(t + 1) * ratio <= p + 1`.
    ///
    /// Chooses the `n` entries with the highest scores; of equal scores the later entry wins. Of at
    /// most `n` entries it chooses all; so it does without queries. Returns the chosen entries in
    /// ascending order, in the form of `list`. Exact where scores differ by more than 1e-5 of their
    /// rms. If the keys are stored as f16 or in 8 bits, the scores are those of the rounded keys.
    ///
    /// DeepSeek-AI, "DeepSeek-V3.2", 2025, section 2.1; with entries of several positions:
    /// DeepSeek-V4, compressed sparse attention.
    TopPositions {
        /// Queries of the scores. `None` where a list has room for all entries that its row sees.
        queries: Option<IndexQueries>,
        /// `(rows, 1, width)`, with queries and a ratio of 1. `None` if all entries are in the
        /// cache: see [`Op::Append`].
        k: Option<View>,
        /// Positions of an entry, at least 1.
        ratio: usize,
        /// Form of the lists.
        list: IndexList,
        /// Positions of the rows. With queries, states made as
        /// [`StateShape::KeyValue`](crate::StateShape::KeyValue) of one head without values, of an
        /// entry for every `ratio` positions; else the states are not used.
        spans: &'a [Span],
        /// Lists, padded with -1, as integers, exact in f32 below 2^24. The width is that of `list`
        /// with `n` entries.
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
    /// `out[r][c] = f(sum_j weight[c][j] * input[r - (width - 1 - j) dilation][c] + bias[c])`.
    /// Inputs before the span come from its state, `((width - 1) dilation, channels)`: the rows
    /// before the span, oldest first. Reads the committed state, writes the next. Tolerance 1e-5.
    Conv1d {
        /// `(rows, channels)`.
        x: View,
        /// `(channels, width)` at the start of the buffer.
        weight: Buffer,
        /// `channels` values at the start of the buffer; `None` for zeros.
        bias: Option<Buffer>,
        /// Taps per channel.
        width: usize,
        /// Rows from one tap to the next, at least 1.
        dilation: usize,
        /// Whether `f` is SiLU instead of the identity.
        silu: bool,
        /// States made as [`StateShape::Recurrent`](crate::StateShape::Recurrent) of `(width - 1) *
        /// dilation * channels`.
        spans: &'a [Span],
        /// `(rows, channels)`; another buffer than `x`.
        out: View,
    },
    /// Weighted mean of each block of `ratio` consecutive positions of a sequence:
    /// ```text
    /// out[i][c] = sum_p w[p][c] x[p][c]     w[.][c] = softmax_p(gate[p][c] + ape[p % ratio][c])
    /// ```
    /// over the positions `p` of block `i`: an entry for each block that the rows of a span
    /// complete. Without a gate the weights are equal.
    ///
    /// With `overlap`, `x`, `gate` and `ape` have two parts of `width` columns, a then b. Entry `i`
    /// is over part a of the positions of block `i - 1` and part b of those of block `i`, with one
    /// softmax; block 0 has none before it.
    ///
    /// The state has the last `slots = ratio` positions, or `2 * ratio` with `overlap`: position
    /// `p` in slot `p % slots`, as its row of `x`, then its row of `gate`. Reads the committed
    /// state, writes the next. The bits of an entry do not depend on how positions are divided into
    /// steps. Tolerance 1e-5.
    ///
    /// DeepSeek-AI, DeepSeek-V4: compressed sparse attention (CSA) has an overlap, heavily
    /// compressed attention (HCA) has none.
    Compress {
        /// `(rows, width)`, or `(rows, 2 * width)` with `overlap`.
        x: View,
        /// Logits, the shape of `x`.
        gate: Option<View>,
        /// `(ratio, columns of x)` at the start of the buffer, added to the gate; `None` for zeros.
        ape: Option<Buffer>,
        /// Positions of a block, at least 2.
        ratio: usize,
        /// Whether a block is also in the entry of the next one.
        overlap: bool,
        /// States made as [`StateShape::Recurrent`](crate::StateShape::Recurrent) of `slots` times
        /// the columns of `x` and of `gate`.
        spans: &'a [Span],
        /// `(entries, width)`, those of each span in turn; another buffer than the inputs. A span
        /// has `(position + rows) / ratio - position / ratio` entries. With no entry at all the op
        /// only writes states.
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
    /// Value gated by the agreement of a query and a key, head by head: `out[h] = sigmoid(sign(s)
    /// sqrt(max(|s|, 1e-6))) v` with `s = scale * q[h] . k[h]`. Tolerance 1e-5 where `|s|` exceeds
    /// 1e-3; below, the root magnifies rounding errors of `s`.
    ///
    /// Gate of n-gram embeddings: `qwen4_exp` of transformers, and Engram of DeepSeek-V4.1.
    KeyedGate {
        /// `(rows, heads, width)`.
        q: View,
        /// `(rows, heads, width)`.
        k: View,
        /// `(rows, width)`.
        v: View,
        /// Usually `1 / sqrt(width)`.
        scale: f32,
        /// `(rows, heads, width)`; another buffer than the inputs.
        out: View,
    },
    /// Residual addition: `x += y`. Exact.
    Add {
        /// `(rows, width)`.
        x: View,
        /// `(rows, width)`; another buffer than `x`.
        y: View,
    },
    /// Rows copied into given rows of another buffer, or added to them: `out[rows[i]] = x[i]` or
    /// `out[rows[i]] += x[i]`. Other rows of `out` keep their contents. Exact.
    ///
    /// Embeddings of images in the residual stream, and the features that DeepStack adds to it:
    /// Meng et al., "DeepStack", 2024.
    ScatterRows {
        /// `(n, width)`.
        x: View,
        /// Rows of `out`, ascending, each at most once.
        rows: &'a [u32],
        /// Whether rows are added.
        add: bool,
        /// `(rows, width)`; another buffer than `x`.
        out: View,
    },
    /// Scaling: `x *= factor`. Exact.
    Scale {
        /// `(rows, width)`.
        x: View,
        /// The factor.
        factor: f32,
    },
    /// `x = x * sigmoid(x)`. Tolerance 1e-5.
    Silu {
        /// `(rows, width)`.
        x: View,
    },
    /// Mixing weights of a residual of `n` streams from their logits `l`, in place:
    /// manifold-constrained hyper-connections (mHC). Tolerance 1e-5.
    /// ```text
    /// pre[h] = sigmoid(scale[0] l[h] + base[h]) + eps
    /// post[h] = 2 sigmoid(scale[1] l[n + h] + base[n + h])
    /// mixing[i][j] = sinkhorn(softmax_j(scale[2] l[2 n + n i + j] + base[2 n + n i + j]) + eps)
    /// ```
    /// Sinkhorn's iteration divides each column by its sum plus `eps`; all but the first divide
    /// each row by its sum plus `eps` before that.
    ///
    /// Xie et al., "mHC: Manifold-Constrained Hyper-Connections", 2025.
    StreamWeights {
        /// `(rows, n (n + 2))`: `pre`, `post`, `mixing`; or `(rows, n)`: `pre` only.
        logits: View,
        /// Number of streams `n`, at most [`MAX_STREAMS`](crate::MAX_STREAMS).
        streams: usize,
        /// 3 values; 1 for `pre` only.
        scale: Buffer,
        /// As many values as a row of `logits`.
        base: Buffer,
        /// Added to weights and sums.
        eps: f32,
        /// Sinkhorn iterations, at least 1.
        iterations: usize,
    },
    /// Weighted sum of the streams of a residual: `out[r] = sum_h function(weights[r][h]) x[r][h]`,
    /// in the order of the streams. Without weights, their mean. Tolerance 1e-5.
    Collapse {
        /// `(rows, n, width)`.
        x: View,
        /// `(rows, n, 1)`, or `(rows, n, width)` with a weight for each element.
        weights: Option<View>,
        /// Function of a weight.
        function: GateFunction,
        /// `(rows, width)`; another buffer than the inputs.
        out: View,
    },
    /// Addition of a sub-block's output to the streams of a residual:
    /// `x[r][j] = function(gate[r][j]) y[r] + sum_i mixing[r][i][j] x[r][i]`. Tolerance 1e-5.
    Expand {
        /// `(rows, n, width)`; the streams of a row are contiguous.
        x: View,
        /// `(rows, width)`; another buffer than `x`.
        y: View,
        /// `(rows, n)`; another buffer than `x`.
        gate: View,
        /// Function of a gate.
        function: GateFunction,
        /// `(rows, n, n)`: new stream `j` receives `mixing[i][j]` of stream `i`. `None`: the
        /// streams are not mixed. Another buffer than `x`.
        mixing: Option<View>,
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
    /// If the router's choice is given, only the weights are computed.
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
        /// Number of leading rows of `x` that belong to answers: see [`Op::MatMul`].
        answers: usize,
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
            Op::EmbedChosen { .. } => "EmbedChosen",
            Op::RmsNorm { .. } => "RmsNorm",
            Op::LayerNorm { .. } => "LayerNorm",
            Op::GatedRmsNorm { .. } => "GatedRmsNorm",
            Op::MatMul { .. } => "MatMul",
            Op::HeadMatMul { .. } => "HeadMatMul",
            Op::Rope { .. } => "Rope",
            Op::Attention { .. } => "Attention",
            Op::LatentAttention { .. } => "LatentAttention",
            Op::SegmentAttention { .. } => "SegmentAttention",
            Op::Append { .. } => "Append",
            Op::TopPositions { .. } => "TopPositions",
            Op::TopBlocks { .. } => "TopBlocks",
            Op::Conv1d { .. } => "Conv1d",
            Op::Compress { .. } => "Compress",
            Op::DeltaNet { .. } => "DeltaNet",
            Op::Mamba2 { .. } => "Mamba2",
            Op::Glu { .. } => "Glu",
            Op::HeadGate { .. } => "HeadGate",
            Op::KeyedGate { .. } => "KeyedGate",
            Op::Add { .. } => "Add",
            Op::ScatterRows { .. } => "ScatterRows",
            Op::Scale { .. } => "Scale",
            Op::Silu { .. } => "Silu",
            Op::StreamWeights { .. } => "StreamWeights",
            Op::Collapse { .. } => "Collapse",
            Op::Expand { .. } => "Expand",
            Op::GatherColumns { .. } => "GatherColumns",
            Op::SoftCap { .. } => "SoftCap",
            Op::TopK { .. } => "TopK",
            Op::TopLogits { .. } => "TopLogits",
            Op::Experts { .. } => "Experts",
            Op::Combine { .. } => "Combine",
        }
    }
}
