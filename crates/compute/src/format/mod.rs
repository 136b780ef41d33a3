//! Weight formats: the table, and the bytes of a matrix in each.
//!
//! A format is a row of the table: a [`Codec`] in a file of its family, with sizes, checks and the
//! reference dequantization. Kernels are checked against [`Format::dequantize`]. How to add one:
//! `docs/adding-a-format.md`.

mod affine;
mod block_scaled;
pub(crate) mod blocks;
mod file_layout;
mod input_major;
mod orders;
mod plain;
mod scaled_blocks;
mod transposed;

use std::fmt;

#[cfg(target_arch = "x86_64")]
pub(crate) use self::block_scaled::E4M3;
#[cfg(feature = "gpu")]
pub(crate) use self::blocks::GRIDS;
pub use self::{
    affine::{Affine, quant},
    block_scaled::{BlockScale, BlockScaled, Element},
    blocks::BlockType,
    file_layout::{FileLayout, MatrixFactor},
    input_major::{InputMajor, WordAxis},
    orders::{MAX_ORDERED, MatrixOrders},
    plain::Scalar,
    scaled_blocks::ScaledBlocks,
    transposed::OutputOrder,
};
use crate::Error;

/// A value for each plane of a format, in memory order. No format has more than three planes.
pub type PerPlane<T> = [T; 3];

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

/// Weights that share a scale.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    /// Outputs; at least 1.
    pub rows: usize,
    /// Inputs; at least 1.
    pub cols: usize,
}

/// Layout of one plane of a matrix: its quants, its scales or the like, row by row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneLayout {
    /// Bytes of a row of the plane; 0 for a plane that the format lacks.
    pub row_bytes: usize,
    /// Rows of the matrix that share a row of the plane; at least 1.
    pub block_rows: usize,
    /// Alignment, in bytes, of the plane's start that the fastest GPU kernels need.
    pub align: usize,
}

impl PlaneLayout {
    /// A plane that a format lacks.
    pub(crate) const NONE: Self = Self { row_bytes: 0, block_rows: 1, align: 1 };

    /// Bytes of the plane of a matrix of `rows` rows.
    pub const fn bytes(&self, rows: usize) -> usize {
        rows.div_ceil(self.block_rows) * self.row_bytes
    }

    /// Whether all rows of a matrix share the only row of the plane.
    pub const fn is_per_matrix(&self) -> bool {
        self.block_rows == usize::MAX
    }

    /// Byte offset of the plane's row for row `row` of the matrix.
    pub const fn row_offset(&self, row: usize) -> usize {
        row / self.block_rows * self.row_bytes
    }
}

/// Format of the activations that a product with quantized weights takes on the fast path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ActivationType {
    /// f32, as they are.
    F32,
    /// int8 with a scale per 16 values, where a row of weights is whole groups.
    Int8,
}

/// Row of the table of weight formats: all that code outside the kernels knows of a format.
pub trait Codec {
    /// Short name: `affine4/64`, `mxfp4`, `bf16`.
    fn name(&self) -> String;

    /// Name in messages: `affine 4 bits, groups of 64`.
    fn description(&self) -> String;

    /// Weights that share a scale.
    fn block(&self) -> BlockSize;

    /// Planes of a matrix of `cols` columns, in memory order.
    fn planes(&self, cols: usize) -> PerPlane<PlaneLayout>;

    /// Checks the format's parameters, and that rows of `cols` columns can be stored.
    ///
    /// # Errors
    /// Parameters are not supported, or a row is not a whole number of groups or bytes.
    fn check(&self, cols: usize) -> Result<(), Error>;

    /// Activations of products on the fast path.
    fn activations(&self) -> ActivationType;

    /// Dequantizes one row, given by its bytes of each plane, to f32: the reference of all kernels.
    fn dequantize(&self, row: PerPlane<&[u8]>, out: &mut [f32]);

    /// Fills the planes of a matrix with random weights of magnitude 1, without NaN and subnormal
    /// values, for tests and benchmarks. `next` returns uniform random numbers.
    fn random(&self, planes: PerPlane<&mut [u8]>, next: &mut dyn FnMut() -> u64);
}

/// Sizes in bytes of the planes of a matrix. A plane that the format lacks is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneBytes(pub PerPlane<usize>);

impl PlaneBytes {
    /// Total bytes.
    pub const fn total(self) -> usize {
        let [first, second, third] = self.0;
        first + second + third
    }

    /// Byte offsets of the planes, which follow each other without gaps.
    pub const fn offsets(self) -> PerPlane<usize> {
        let [first, second, _] = self.0;
        [0, first, first + second]
    }

    /// Splits the bytes of a matrix, at least [`PlaneBytes::total`], into its planes.
    pub fn split(self, bytes: &[u8]) -> PerPlane<&[u8]> {
        let mut rest = bytes;
        self.0.map(|len| {
            let (plane, after) = rest.split_at(len);
            rest = after;
            plane
        })
    }

    /// As [`PlaneBytes::split`], for writing.
    pub fn split_mut(self, bytes: &mut [u8]) -> PerPlane<&mut [u8]> {
        let mut rest = bytes;
        self.0.map(|len| {
            let (plane, after) = std::mem::take(&mut rest).split_at_mut(len);
            rest = after;
            plane
        })
    }
}

impl Format {
    /// The table: every format that conformance tests and benchmarks walk, by family. Formats that
    /// differ only in the type of scales follow each other's family, bf16 first.
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
    pub fn name(&self) -> String {
        self.codec().name()
    }

    /// Validates the format and shape of a matrix, and returns the sizes of its planes.
    ///
    /// # Errors
    /// Bits, group or block size are not supported; a row is not a whole number of groups or bytes;
    /// or the size overflows.
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
    pub fn planes(self, cols: usize) -> PerPlane<PlaneLayout> {
        self.codec().planes(cols)
    }

    /// Bytes of the first plane, the weights themselves, per row of `cols` columns.
    pub fn row_bytes(self, cols: usize) -> usize {
        self.planes(cols)[0].row_bytes
    }

    /// Weights that share a scale.
    pub fn block(self) -> BlockSize {
        self.codec().block()
    }

    /// Dequantizes one row, given by its bytes of each plane as [`Matrix::row`](crate::Matrix::row)
    /// returns them, to f32. Every kernel is checked against this function. `out` has one element
    /// per column.
    pub fn dequantize(self, row: PerPlane<&[u8]>, out: &mut [f32]) {
        self.codec().dequantize(row, out);
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.codec().description())
    }
}
