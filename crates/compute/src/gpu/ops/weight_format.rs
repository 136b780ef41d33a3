//! What kernels are told of a weight format.

use crate::gpu::{Constants, Params};
use crate::{BlockScale, Element, Format, MatrixShape, Scalar};

/// The number of a scalar type in kernels.
pub(in crate::gpu) const fn scalar(scalar: Scalar) -> u32 {
    match scalar {
        Scalar::F32 => 0,
        Scalar::F16 => 1,
        Scalar::BF16 => 2,
    }
}

impl Constants {
    /// The constants of `chunk.wgsl`.
    #[must_use]
    pub(in crate::gpu) fn chunks(self, shape: MatrixShape) -> Self {
        let new = self.with("COLS", shape.cols as u32);
        match shape.format {
            // No scale is read; its blocks are to be whole chunks all the same.
            Format::Plain(of) => new
                .with("ELEMENT", scalar(of))
                .with("BITS", 8 * of.bytes() as u32)
                .with("BLOCK_COLS", 32)
                .with("BLOCK_ROWS", 1)
                .with("SCALE", 0),
            format => new.format(format),
        }
    }

    /// The constants of `formats.wgsl`.
    #[must_use]
    pub(in crate::gpu) fn format(self, format: Format) -> Self {
        let (element, bits, cols, rows, scale) = match format {
            Format::Plain(of) => (scalar(of), 8 * of.bytes() as u32, 1, 1, 0),
            Format::Affine { bits, group, scale } => {
                (3, bits.into(), group.into(), 1, scalar(scale))
            }
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

/// How kernels for few rows read a format: in chunks of 32 inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::gpu) enum Chunk {
    /// Quants of 4 bits.
    Q4,
    /// Quants of 8 bits.
    Q8,
    /// Other quants.
    Q,
    /// Plain numbers.
    Plain,
    /// Small floating-point numbers of 4 bits.
    E2m1,
    /// Small floating-point numbers of 8 bits.
    E4m3,
}

impl Chunk {
    /// Where its kernel lies among those that there are one of for each, in this order.
    pub(in crate::gpu) const fn kernel(self) -> usize {
        self as usize
    }

    /// How matrices of a shape are read; `None` if they are not whole chunks.
    pub(in crate::gpu) fn of(shape: MatrixShape) -> Option<Self> {
        let kind = match shape.format {
            Format::Plain(_) => Chunk::Plain,
            Format::Affine { bits: 4, .. } => Chunk::Q4,
            Format::Affine { bits: 8, .. } => Chunk::Q8,
            Format::Affine { .. } => Chunk::Q,
            Format::Scaled { element, block_cols, scale, .. } => {
                let whole = block_cols.is_multiple_of(32);
                match element {
                    // Halves of a chunk may have scales of their own.
                    Element::E2M1 if whole || (block_cols == 16 && scale.bytes() == 1) => {
                        Chunk::E2m1
                    }
                    Element::E4M3 if whole => Chunk::E4m3,
                    _ => return None,
                }
            }
        };
        shape.cols.is_multiple_of(32).then_some(kind)
    }

    /// How a matrix is read whose weights, scales and biases begin at these bytes, as far as it is read in chunks there.
    pub(in crate::gpu) fn at(
        shape: MatrixShape,
        [weights, scales, biases]: [usize; 3],
    ) -> Option<Self> {
        let fits = |chunk: &Self| weights.is_multiple_of(chunk.unit());
        Self::of(shape)
            .filter(fits)
            .filter(|_| scales.is_multiple_of(4) && biases.is_multiple_of(4))
    }

    /// Bytes of what weights are read by: they begin at a multiple of it.
    pub(in crate::gpu) const fn unit(self) -> usize {
        match self {
            Chunk::Q => 4,
            _ => 16,
        }
    }

    /// Whether rounded activations meet it: weights are whole numbers times their scale.
    pub(in crate::gpu) const fn is_whole(self) -> bool {
        matches!(self, Chunk::Q4 | Chunk::Q8 | Chunk::Q | Chunk::E2m1)
    }
}

impl Params {
    /// `Matrix` of `formats.wgsl`: where weights, scales and biases begin, in bytes.
    #[must_use]
    pub(in crate::gpu) fn matrix(
        self,
        [weights, scales, biases]: [u32; 3],
        shape: MatrixShape,
    ) -> Self {
        self.u(weights)
            .u(scales)
            .u(biases)
            .n(shape.format.row_bytes(shape.cols))
            .n(shape.format.row_scale_bytes(shape.cols))
    }
}
