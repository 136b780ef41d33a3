//! Scratch memory of a worker thread.

use moeflux_ops::Error;

use super::{
    activations::padded,
    gemm_f32::TILE_ROWS,
    gemm_q8::{tile_bytes, tile_scale_len},
    gemv_q8::{GEMV_ROWS, MAX_GEMV_OUTPUTS, packed_activation_bytes},
};
use crate::aligned_vec::AlignedVec;

/// Least number of f32 in the room for dequantized rows.
const DEQUANTIZED: usize = 1 << 14;
/// Most rows that are dequantized at once.
pub(crate) const MAX_DEQUANTIZED_ROWS: usize = 32;

/// Scratch memory of one worker: for one tile of a matrix product, and for dequantized rows.
#[derive(Default)]
pub(crate) struct WorkerScratch {
    /// Unpacked quants of a tile.
    pub(super) tile: AlignedVec<u8>,
    /// Scales and biases of a tile; or [`TILE_ROWS`] dequantized rows and the scales and biases of
    /// one more.
    pub(super) tile_f32: AlignedVec<f32>,
    /// Rows of activations packed for the GEMV.
    pub(super) packed: AlignedVec<u8>,
    /// The rows that are packed there.
    pub(super) packed_rows: Option<PackedKey>,
    /// Products of the GEMV.
    pub(super) products: AlignedVec<f32>,
    /// Room for [`WorkerScratch::dequantized_rows`] rows.
    pub(crate) dequantized: AlignedVec<f32>,
    /// Keys and values that latent attention expands from a block of latents.
    pub(crate) latent_head: AlignedVec<f32>,
    /// Keys and values of a block as f32.
    pub(crate) kv: AlignedVec<f32>,
    /// Packed keys and values, scores and results of attention in segments.
    pub(crate) segment: AlignedVec<f32>,
}

/// Rows of activations that are packed for the GEMV.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct PackedKey {
    /// [`Q8Rows::id`](super::activations::Q8Rows::id).
    pub(super) id: u64,
    /// Row indexes; `usize::MAX` for none.
    pub(super) rows: [usize; GEMV_ROWS],
}

impl WorkerScratch {
    /// Bytes of `tile` and elements of `tile_f32` for rows of `cols` columns.
    const fn tile_len(cols: usize) -> (usize, usize) {
        let (rows, scales) = ((TILE_ROWS + 1) * cols, tile_scale_len(padded(cols)));
        (tile_bytes(padded(cols)), if rows > scales { rows } else { scales })
    }

    /// Number of rows of `cols` columns that are dequantized at once.
    pub(crate) fn dequantized_rows(cols: usize) -> usize {
        (DEQUANTIZED / cols.max(1)).clamp(1, MAX_DEQUANTIZED_ROWS)
    }

    /// Bytes of memory that the scratch takes for rows of `cols` columns.
    pub(crate) fn memory(cols: usize) -> usize {
        let (tile, tile_f32) = Self::tile_len(cols);
        let packed = GEMV_ROWS * packed_activation_bytes(padded(cols));
        let floats = [tile_f32, GEMV_ROWS * MAX_GEMV_OUTPUTS, cols.max(DEQUANTIZED)]
            .map(AlignedVec::<f32>::memory);
        [tile, packed].map(AlignedVec::<u8>::memory).into_iter().chain(floats).sum()
    }

    /// Grows the scratch for rows of `cols` columns.
    pub(crate) fn reserve(&mut self, cols: usize) -> Result<(), Error> {
        let (tile, tile_f32) = Self::tile_len(cols);
        self.tile.grow(tile)?;
        self.tile_f32.grow(tile_f32)?;
        self.packed.grow(GEMV_ROWS * packed_activation_bytes(padded(cols)))?;
        self.products.grow(GEMV_ROWS * MAX_GEMV_OUTPUTS)?;
        self.dequantized.grow(cols.max(DEQUANTIZED))
    }
}
