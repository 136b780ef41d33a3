//! A matrix that a model asks for.

use super::{compressed_tensors::PACKED, input_major::QWEIGHT};

/// Suffixes of the tensor that holds the weights of a matrix.
pub(super) const WEIGHTS: [&str; 3] = ["weight", PACKED, QWEIGHT];

/// A matrix, or a stack of `count` of them, in tensors of any format.
#[derive(Clone, Copy)]
pub(super) struct MatrixRequest<'a> {
    /// Name without `.weight`.
    pub(super) name: &'a str,
    /// Name of the tensor that holds the weights.
    pub(super) weight: &'a str,
    /// Number of stacked matrices; `None` for a plain matrix.
    pub(super) count: Option<usize>,
    /// Whether the rows of stacked matrices follow each other, without a dimension of the stack.
    pub(super) by_rows: bool,
    pub(super) rows: usize,
    pub(super) cols: usize,
}

/// Size of packed quants: bits of each, and inputs that share a scale.
#[derive(Clone, Copy)]
pub(super) struct QuantSize {
    pub(super) bits: u8,
    pub(super) group: u16,
}

impl QuantSize {
    /// Size by the last dimensions of packed weights, in 32-bit words, and of scales: a row of
    /// `cols` inputs takes `cols * bits / 32` words and `cols / group` scales. `None` if they do
    /// not fit, or if bits exceed 8 or groups 1,024.
    pub(super) fn from_shapes(cols: usize, words: usize, groups: usize) -> Option<Self> {
        let row_bits = words.checked_mul(32)?;
        let divides = |by: usize, n: usize| by > 0 && n.is_multiple_of(by);
        if !divides(cols, row_bits) || !divides(groups, cols) {
            return None;
        }
        match (row_bits / cols, cols / groups) {
            (bits @ 1..=8, group @ 1..=1024) => {
                Some(Self { bits: bits as u8, group: group as u16 })
            }
            _ => None,
        }
    }
}

impl MatrixRequest<'_> {
    /// Shape of a tensor that has dimensions `matrix` for each matrix of the stack.
    pub(super) fn tensor_shape(&self, matrix: &[usize]) -> Vec<usize> {
        match (matrix, self.count) {
            ([rows, rest @ ..], Some(count)) if self.by_rows => {
                [&[rows.saturating_mul(count)], rest].concat()
            }
            _ => self.count.iter().chain(matrix).copied().collect(),
        }
    }
}
