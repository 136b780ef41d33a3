//! N-gram memory of a layer: rows of a table on disk, chosen by a hash of the last tokens, which a
//! gate adds to the residual.

use crate::{
    checkpoint::{Integers, MatrixSource, RowTable, VectorSource},
    ngram::NgramHash,
};

/// N-gram memory, `x += y + silu(conv(norm_conv(y)))` before the layer's first sub-block, where
/// stream `h` of `y` is `sigmoid(root(s)) value_proj(e)` with the agreement `s = norm_key(key_proj
/// e)[h] . norm_query(x)[h] / sqrt(hidden)`, and `e` are the rows of the token. All norms are by
/// stream. Qwen3.8's per-layer embedding (PLE), `qwen4_exp` of transformers.
#[derive(Debug)]
pub struct NgramMemoryBlueprint {
    /// Rows of a token.
    pub hash: NgramHash,
    /// The rows. They stay in the files, and are neither dense weights nor experts.
    pub table: RowTable,
    /// Multipliers, offsets and sizes of the hash, as the checkpoint has them.
    #[doc(hidden)]
    pub constants: Vec<Integers>,
    /// `(streams * hidden, rows per token * row width)`.
    pub key_proj: MatrixSource,
    /// `(hidden, rows per token * row width)`.
    pub value_proj: MatrixSource,
    /// `streams * hidden` elements.
    pub norm_key: VectorSource,
    /// `streams * hidden` elements.
    pub norm_query: VectorSource,
    /// `streams * hidden` elements.
    pub norm_conv: VectorSource,
    /// `(streams * hidden, taps)`.
    pub conv: VectorSource,
    /// Taps per channel.
    pub taps: usize,
    /// Rows from one tap to the next.
    pub dilation: usize,
}

impl NgramMemoryBlueprint {
    /// All matrices.
    #[doc(hidden)]
    pub fn matrices(&self) -> [&MatrixSource; 2] {
        [&self.key_proj, &self.value_proj]
    }

    /// All vectors.
    pub(crate) fn vectors(&self) -> [&VectorSource; 4] {
        [&self.norm_key, &self.norm_query, &self.norm_conv, &self.conv]
    }

    /// Elements of the rows of a token.
    pub fn embedding(&self) -> usize {
        self.key_proj.shape.cols
    }

    /// Streams of the residual times their width.
    #[doc(hidden)]
    pub fn channels(&self) -> usize {
        self.key_proj.shape.rows
    }

    /// Values of the convolution's state.
    pub(crate) fn state_len(&self) -> usize {
        (self.taps.saturating_sub(1)).saturating_mul(self.dilation).saturating_mul(self.channels())
    }
}
