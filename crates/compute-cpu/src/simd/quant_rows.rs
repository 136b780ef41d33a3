//! Rows of a matrix of packed quants, with their planes of scales and biases.

use std::ops::Range;

use moeflux_ops::{BlockScale, Scalar};

/// Columns of a row, and columns that share a scale.
#[derive(Clone, Copy)]
pub(super) struct GroupShape {
    pub(super) cols: usize,
    /// A power of two, at least 16.
    pub(super) group: usize,
}

impl GroupShape {
    /// Groups of a row.
    pub(super) const fn count(self) -> usize {
        self.cols / self.group
    }
}

/// Types of the scales and biases of quants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleType {
    /// Plain floats, both.
    Affine(Scalar),
    /// Block scales of E2M1; there are no biases.
    E2M1(BlockScale),
}

/// Rows of one plane of a matrix, from the first row on.
#[derive(Clone, Copy)]
pub(super) struct PlaneRows<'a> {
    pub(super) bytes: &'a [u8],
    /// Bytes from row to row.
    pub(super) stride: usize,
}

impl<'a> PlaneRows<'a> {
    /// The rows from `row` on; empty if the plane is.
    pub(super) fn skip(self, row: usize) -> Self {
        Self { bytes: &self.bytes[(row * self.stride).min(self.bytes.len())..], ..self }
    }
}

/// Rows of packed quants.
#[derive(Clone, Copy)]
pub(super) struct QuantRows<'a> {
    pub(super) count: usize,
    pub(super) quants: PlaneRows<'a>,
    /// Bytes of the scales of a row, and of its biases if there are any.
    pub(super) scale_bytes: usize,
    pub(super) scales: PlaneRows<'a>,
    /// Empty with [`ScaleType::E2M1`].
    pub(super) biases: PlaneRows<'a>,
    pub(super) scale_type: ScaleType,
}

impl QuantRows<'_> {
    /// A range of the rows.
    pub(super) fn slice(&self, rows: Range<usize>) -> Self {
        let mut slice = *self;
        slice.count = rows.len();
        slice.quants = self.quants.skip(rows.start);
        slice.scales = self.scales.skip(rows.start);
        slice.biases = self.biases.skip(rows.start);
        slice
    }
}
