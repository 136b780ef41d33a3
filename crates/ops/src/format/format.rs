//! Weight formats: their blocks, planes and codecs.

use std::fmt;

use super::{
    affine::{self, Affine},
    block_scaled::{self, BlockScaled},
    blocks::{self, BlockType},
    codec::{BlockSize, Codec, PerPlane, PlaneBytes, PlaneLayout},
    plain::{self, Scalar},
    scaled_blocks::{self, ScaledBlocks},
};
use crate::error::Error;

/// Storage format of a weight matrix. Rows are outputs, columns are inputs. Rows are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// One floating-point value per weight.
    Plain(Scalar),
    /// MLX affine quantization.
    Affine(Affine),
    /// Small floats with block scales.
    BlockScaled(BlockScaled),
    /// Blocks of ggml, in one plane.
    Blocks(BlockType),
    /// Blocks of ggml, and a factor on the whole matrix.
    ScaledBlocks(ScaledBlocks),
}

impl Format {
    /// The table: every format that conformance tests and benchmarks walk, by family. Formats that
    /// differ only in the type of scales follow each other's family, bf16 first.
    #[inline]
    pub fn all() -> Vec<Self> {
        [
            affine::formats(),
            block_scaled::formats(),
            blocks::formats(),
            scaled_blocks::formats(),
            plain::formats(),
        ]
        .concat()
    }

    /// The format's row of the table.
    #[inline]
    pub fn codec(&self) -> &dyn Codec {
        match self {
            Format::Plain(scalar) => scalar,
            Format::Affine(affine) => affine,
            Format::BlockScaled(scaled) => scaled,
            Format::Blocks(kind) => kind,
            Format::ScaledBlocks(scaled) => scaled,
        }
    }

    /// Short name: `affine4/64`, `mxfp4`, `bf16`. Types of scales are not named.
    #[inline]
    pub fn name(&self) -> String {
        self.codec().name()
    }

    /// Validates the format and shape of a matrix, and returns the sizes of its planes.
    ///
    /// # Errors
    /// Bits, group or block size are not supported; a row is not a whole number of groups or bytes;
    /// or the size overflows.
    #[inline]
    pub fn plane_bytes(self, rows: usize, cols: usize) -> Result<PlaneBytes, Error> {
        let fits =
            rows.max(1).checked_mul(cols.max(1)).is_some_and(|n| n <= isize::MAX as usize / 8);
        if !fits {
            return Err(Error::Shape(format!(
                "a matrix of {rows} x {cols} {self} is too large to address"
            )));
        }
        self.codec().check(cols)?;
        Ok(PlaneBytes(self.planes(cols).map(|plane| plane.bytes(rows))))
    }

    /// Planes of a matrix of `cols` columns, in memory order.
    #[inline]
    pub fn planes(self, cols: usize) -> PerPlane<PlaneLayout> {
        self.codec().planes(cols)
    }

    /// Bytes of the first plane, the weights themselves, per row of `cols` columns.
    #[inline]
    pub fn row_bytes(self, cols: usize) -> usize {
        self.planes(cols)[0].row_bytes
    }

    /// Weights that share a scale.
    #[inline]
    pub fn block(self) -> BlockSize {
        self.codec().block()
    }

    /// Dequantizes one row, given by its bytes of each plane as [`Matrix::row`](crate::Matrix::row)
    /// returns them, to f32. Every kernel is checked against this function. `out` has one element
    /// per column.
    #[inline]
    pub fn dequantize(self, row: PerPlane<&[u8]>, out: &mut [f32]) {
        self.codec().dequantize(row, out);
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.codec().description())
    }
}
