//! What kernels are told of a weight format.

use super::{Constants, Params};
use crate::{BlockScale, Element, Format, MatrixShape, Scalar};

/// The number of a scalar type in kernels.
pub(super) const fn scalar(scalar: Scalar) -> u32 {
    match scalar {
        Scalar::F32 => 0,
        Scalar::F16 => 1,
        Scalar::BF16 => 2,
    }
}

impl Constants {
    /// The constants of `formats.wgsl`.
    #[must_use]
    pub(super) fn format(self, format: Format) -> Self {
        let (element, bits, cols, rows, scale) = match format {
            Format::Plain(of) => (scalar(of), 8 * of.bytes() as u32, 1, 1, 0),
            Format::Affine { bits, group, scale } => (3, bits.into(), group.into(), 1, scalar(scale)),
            Format::Scaled { element, block_rows, block_cols, scale: of } => {
                let element = match element {
                    Element::E2M1 => (4, 4),
                    Element::E4M3 => (5, 8),
                };
                let of = match of {
                    BlockScale::Plain(of) => scalar(of),
                    BlockScale::E8M0 => 3,
                    BlockScale::E4M3 => 4,
                };
                (element.0, element.1, block_cols.into(), block_rows.into(), of)
            }
        };
        self.with("ELEMENT", element)
            .with("BITS", bits)
            .with("BLOCK_COLS", cols)
            .with("BLOCK_ROWS", rows)
            .with("SCALE", scale)
    }
}

impl Params {
    /// `Matrix` of `formats.wgsl`: where weights, scales and biases begin, in bytes.
    #[must_use]
    pub(super) fn matrix(self, [weights, scales, biases]: [u32; 3], shape: MatrixShape) -> Self {
        self.u(weights)
            .u(scales)
            .u(biases)
            .n(shape.format.row_bytes(shape.cols))
            .n(shape.format.row_scale_bytes(shape.cols))
    }
}
