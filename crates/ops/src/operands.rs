//! Operands of ops: views, spans, activations and the parameters of routing and attention.

use std::ops::Range;

use crate::handle::{Buffer, Slot, SlotTable, State, Weight};

/// Number of rows of a step, or of sequences with a row each, up to which every row has the bits
/// on the fast path of a card that it has alone. A step that checks a few drafted tokens relies on
/// it. A CPU multiplies as many rows of answers in one pass over the weights.
pub const BATCH_INVARIANT_ROWS: usize = 4;

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
    #[inline]
    pub const fn rows(buffer: Buffer, rows: usize, width: usize) -> Self {
        Self { buffer, offset: 0, rows, heads: 1, width, row_stride: width, head_stride: width }
    }

    /// Columns `first .. first + width` of every row. The view must have one head.
    #[must_use]
    #[inline]
    pub const fn columns(self, first: usize, width: usize) -> Self {
        Self { offset: self.offset + first, width, head_stride: width, ..self }
    }

    /// Splits every row into `heads` vectors. The view must have one head, and `heads` must divide
    /// its width.
    #[must_use]
    #[inline]
    pub const fn split(self, heads: usize) -> Self {
        let width = self.width / heads;
        Self { heads, width, head_stride: width, ..self }
    }

    /// Vector `head` of every row, as a view of one head.
    #[must_use]
    #[inline]
    pub const fn head(self, head: usize) -> Self {
        Self { offset: self.offset + head * self.head_stride, heads: 1, ..self }
    }

    /// Rows `first .. first + rows`.
    #[must_use]
    #[inline]
    pub const fn slice(self, first: usize, rows: usize) -> Self {
        Self { offset: self.offset + first * self.row_stride, rows, ..self }
    }

    /// Elements `first .. first + width` of every vector.
    #[must_use]
    #[inline]
    pub const fn slice_width(self, first: usize, width: usize) -> Self {
        Self { offset: self.offset + first, width, ..self }
    }

    /// Merges the vectors of every row into one. They must be contiguous.
    #[must_use]
    #[inline]
    pub const fn merge_heads(self) -> Self {
        let width = self.heads * self.width;
        Self { heads: 1, width, head_stride: width, ..self }
    }

    /// Rows to be taken for rows of answers where that is not known: all if they are few.
    #[inline]
    pub const fn few(&self) -> usize {
        if self.rows <= BATCH_INVARIANT_ROWS { self.rows } else { 0 }
    }

    /// Buffer index of the first element of vector `head` of row `row`.
    #[inline]
    pub const fn index(&self, row: usize, head: usize) -> usize {
        self.offset + row * self.row_stride + head * self.head_stride
    }

    /// Buffer index after the last element; zero for an empty view.
    #[inline]
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
    /// Number of the last rows that are drafted: their commit may reject some of them. Recurrent
    /// states keep their values before each of them.
    pub drafts: usize,
}

/// Rows of a span after which a recurrent state keeps its values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[doc(hidden)]
pub struct SpanPart {
    /// The rows, none of them drafted.
    pub span: Span,
    /// Index among the parts of the span.
    pub index: usize,
}

impl Span {
    /// A span without drafted rows.
    #[inline]
    pub const fn new(state: State, position: usize, rows: usize) -> Self {
        Self { state, position, rows, drafts: 0 }
    }

    /// The rows that are not drafted, then each drafted row alone. A span without rows is one part.
    #[doc(hidden)]
    #[inline]
    pub fn parts(self) -> impl Iterator<Item = SpanPart> {
        let drafts = self.drafts.min(self.rows);
        let certain = self.rows - drafts;
        let first =
            (certain > 0 || drafts == 0).then_some(Self { rows: certain, drafts: 0, ..self });
        let drafted =
            (certain..self.rows).map(move |row| Self::new(self.state, self.position + row, 1));
        first.into_iter().chain(drafted).enumerate().map(|(index, span)| SpanPart { span, index })
    }

    /// Number of parts that the first `rows` rows consist of; `None` if they end in a part.
    #[doc(hidden)]
    #[inline]
    pub fn parts_of(self, rows: usize) -> Option<usize> {
        let end = |part: &SpanPart| part.span.position + part.span.rows - self.position;
        match rows {
            0 => Some(0),
            rows => self.parts().find(|part| end(part) == rows).map(|part| part.index + 1),
        }
    }

    /// Blocks of `ratio` positions that the rows complete, by index. Empty without rows.
    #[doc(hidden)]
    #[inline]
    pub const fn completed_blocks(&self, ratio: usize) -> Range<usize> {
        self.position / ratio..(self.position + self.rows) / ratio
    }
}

/// Layout of rotary pairs in a vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// Pair `i` is `(x[i], x[i + n / 2])`: Qwen, GLM, gpt-oss. Also called NeoX style.
    Halves,
    /// Pair `i` is `(x[2 i], x[2 i + 1])`: DeepSeek. Also called GPT-J style.
    Interleaved,
    /// [`RopePairs::Halves`] in each half of the rotated elements: the first `n / 4` pairs are in
    /// the first half. The number of pairs is even. Gemma 4's vision tower.
    SplitHalves,
}

/// Position ids of a row of [`RopePositions::Axes`].
pub const ROPE_AXES: usize = 3;

/// Positions of the rows of [`Op::Rope`](crate::Op::Rope).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePositions<'a> {
    /// One for each row: its position in its sequence. The states are not used.
    Spans(&'a [Span]),
    /// Three for each row; a pair turns by one of them. With equal ids in a row it has the bits of
    /// the other form.
    ///
    /// Patches of an image have two, row and column. Multimodal RoPE (M-RoPE) also has the time;
    /// whether its sections are consecutive or interleaved is in `axes`. Bai et al., "Qwen2.5-VL",
    /// 2025.
    Axes {
        /// Index of the position id for each pair, below [`ROPE_AXES`].
        axes: &'a [u8],
        /// Position ids of each row.
        ids: &'a [[u32; ROPE_AXES]],
    },
}

impl RopePositions<'_> {
    /// Index of the position id that a pair turns by.
    #[doc(hidden)]
    #[inline]
    pub fn axis(&self, pair: usize) -> usize {
        match self {
            Self::Spans(_) => 0,
            Self::Axes { axes, .. } => usize::from(axes[pair]),
        }
    }

    /// Position ids of a row of the op.
    #[doc(hidden)]
    #[inline]
    pub fn ids(&self, row: usize) -> [f32; ROPE_AXES] {
        match self {
            Self::Spans(spans) => [position_of(spans, row) as f32; ROPE_AXES],
            Self::Axes { ids, .. } => ids[row].map(|id| id as f32),
        }
    }
}

/// Position of a row of an op.
fn position_of(spans: &[Span], row: usize) -> usize {
    let mut first = 0;
    for span in spans {
        if row < first + span.rows {
            return span.position + row - first;
        }
        first += span.rows;
    }
    0
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
    /// `up (1 + erf(up / sqrt(2))) / 2`, without a gate. Hendrycks and Gimpel, "Gaussian Error
    /// Linear Units", 2016.
    Gelu,
    /// `up (1 + tanh(sqrt(2 / pi) (up + 0.044715 up^3))) / 2`, without a gate: the approximation of
    /// the same paper.
    GeluTanh,
    /// `up sigmoid(1.702 up)`, without a gate: CLIP.
    QuickGelu,
}

impl Activation {
    /// Whether it reads a gate.
    #[inline]
    pub const fn has_gate(self) -> bool {
        !matches!(self, Self::Relu2 | Self::Gelu | Self::GeluTanh | Self::QuickGelu)
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
    /// `2 / (1 + exp(-x))`.
    DoubleSigmoid,
}

/// Gate of [`Op::GatedRmsNorm`](crate::Op::GatedRmsNorm).
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
    #[inline]
    pub(crate) const fn weights(self, heads: usize, width: usize) -> Option<usize> {
        match self {
            Self::Silu | Self::Sigmoid => Some(width),
            Self::SiluBeforeNorm => heads.checked_mul(width),
        }
    }
}

/// Bounds of the time steps of [`Op::Mamba2`](crate::Op::Mamba2).
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
    #[inline]
    pub const fn transpose(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    /// Inputs and outputs of each matrix. `cols` is the columns of the weight.
    #[doc(hidden)]
    #[inline]
    pub const fn inputs_outputs(self, cols: usize) -> (usize, usize) {
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
        /// `(rows, k)`: ids from [`Op::TopK`](crate::Op::TopK).
        ids: View,
        /// Slots of the experts, all filled. The output rows of experts without a slot keep their
        /// values.
        table: SlotTable,
    },
}

impl ExpertUses<'_> {
    /// Number of uses.
    #[inline]
    pub fn len(&self) -> usize {
        match self {
            ExpertUses::Listed(uses) => uses.len(),
            ExpertUses::Routed { ids, .. } => ids.rows * ids.width,
        }
    }

    /// Whether there are no uses.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Shared expert's contribution to [`Op::Combine`](crate::Op::Combine).
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
    #[doc(hidden)]
    #[inline]
    pub const fn run(self, value_heads: usize, key_heads: usize) -> usize {
        match self {
            Self::Adjacent => value_heads / key_heads,
            Self::Strided => 1,
        }
    }
}

/// Queries of [`Op::TopPositions`](crate::Op::TopPositions).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexQueries {
    /// `(rows, heads, width)`.
    pub q: View,
    /// `(rows, heads)`.
    pub weights: View,
    /// Scratch, `(at least 1, maximum entries that a row sees)`. The contents are undefined
    /// afterwards.
    pub scores: View,
}

/// Form of a list of chosen entries of `ratio` positions each, for a row at position `p`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndexList {
    /// `n * ratio + ratio - 1` numbers, ascending: the positions of the chosen entries, then those
    /// of the open block, `(p + 1) / ratio * ratio ..= p`.
    Positions,
    /// `window + n` numbers, entries of a KV cache that has a ring of the last positions and then
    /// the entries: position `t % ring` for the last `window` positions `t <= p`, oldest first,
    /// then `ring + t` for each chosen entry `t`.
    Window {
        /// Last positions: 1 to `ring`.
        window: usize,
        /// Length of the ring.
        ring: usize,
    },
}

impl IndexList {
    /// Number of entries in a list of `width` numbers; `None` if there is no such list.
    #[doc(hidden)]
    #[inline]
    pub fn entries(self, width: usize, ratio: usize) -> Option<usize> {
        match self {
            Self::Positions if (width + 1).is_multiple_of(ratio) => Some((width + 1) / ratio - 1),
            Self::Positions => None,
            Self::Window { window, .. } => width.checked_sub(window),
        }
    }
}
