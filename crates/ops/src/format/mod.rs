//! Weight formats: the table, and the bytes of a matrix in each.
//!
//! A format is a row of the table: a [`Codec`] in a file of its family, with sizes, checks and the
//! reference dequantization. Kernels are checked against [`Format::dequantize`]. How to add one:
//! `docs/adding-a-format.md`.

mod affine;
mod block_scaled;
pub(crate) mod blocks;
mod codec;
mod file_layout;
mod format;
mod input_major;
mod orders;
mod plain;
mod scaled_blocks;
mod transposed;

pub use self::block_scaled::E4M3;
pub use self::blocks::GRIDS;
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
pub use codec::{ActivationType, BlockSize, Codec, PerPlane, PlaneBytes, PlaneLayout};
pub use format::Format;
