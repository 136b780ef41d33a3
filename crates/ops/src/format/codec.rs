//! The trait of weight formats: blocks, planes and their bytes.

use crate::error::Error;

/// A value for each plane of a format, in memory order. No format has more than three planes.
pub type PerPlane<T> = [T; 3];

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
    #[inline]
    pub const fn bytes(&self, rows: usize) -> usize {
        rows.div_ceil(self.block_rows) * self.row_bytes
    }

    /// Whether all rows of a matrix share the only row of the plane.
    #[inline]
    pub const fn is_per_matrix(&self) -> bool {
        self.block_rows == usize::MAX
    }

    /// Byte offset of the plane's row for row `row` of the matrix.
    #[inline]
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
    #[inline]
    pub const fn total(self) -> usize {
        let [first, second, third] = self.0;
        first + second + third
    }

    /// Byte offsets of the planes, which follow each other without gaps.
    #[inline]
    pub const fn offsets(self) -> PerPlane<usize> {
        let [first, second, _] = self.0;
        [0, first, first + second]
    }

    /// Splits the bytes of a matrix, at least [`PlaneBytes::total`], into its planes.
    #[inline]
    pub fn split(self, bytes: &[u8]) -> PerPlane<&[u8]> {
        let mut rest = bytes;
        self.0.map(|len| {
            let (plane, after) = rest.split_at(len);
            rest = after;
            plane
        })
    }

    /// As [`PlaneBytes::split`], for writing.
    #[inline]
    pub fn split_mut(self, bytes: &mut [u8]) -> PerPlane<&mut [u8]> {
        let mut rest = bytes;
        self.0.map(|len| {
            let (plane, after) = std::mem::take(&mut rest).split_at_mut(len);
            rest = after;
            plane
        })
    }
}
