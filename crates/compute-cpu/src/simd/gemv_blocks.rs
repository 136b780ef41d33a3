//! GEMV on transcoded rows: up to [`GEMV_ROWS`](super::gemv_q8::GEMV_ROWS) rows of int8 activations
//! and rows of weights that [`transcode`](super::transcode) has just written to L1.
//!
//! ```text
//! y[c][r] = sum_b scale_w[r][b] * scale_x[c][b] * dot(q[r][b], x[c][b])
//!         + sum_g bias_w[r][g] * sum_x[c][g]
//! ```
//!
//! A block of columns is four vectors of quants. Their dwords are transposed, so that a lane has
//! all four dwords of a group of activations: four dot products add up to one vector with a lane
//! per group, which is multiplied with the scales of as many groups. Activations are packed in that
//! order once. The sums of a row do not depend on the other rows.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are indexed together, without closures"
)]

use super::{
    activations::Q8Row,
    gemv_q8::{GemvActivations, GemvOut, SECTION},
    quant_rows::GroupShape,
    transcode::TranscodedRows,
    unpack_affine::{MAX_UNPACKED, Packing},
    vector::{Q8_GROUP, Simd},
};

/// Columns of a block.
const fn block_cols<S: Simd>() -> usize {
    S::LANES * Q8_GROUP
}

/// Bytes of a block of packed activations: four vectors of int8, and a vector of scales.
const fn block_bytes<S: Simd>() -> usize {
    5 * 4 * S::LANES
}

/// Bytes of a packed row of activations with `padded` columns. Rows that follow each other spread
/// over the sets of L1.
pub(super) const fn packed_bytes(padded: usize) -> usize {
    padded / 4 * 5
}

/// Quants of a block in the order of the products.
///
/// # Safety
/// The Simd contract; four vectors can be read.
#[inline(always)]
unsafe fn load_block<S: Simd>(p: *const u8) -> [S::Dwords; MAX_UNPACKED] {
    let bytes = 4 * S::LANES;
    // SAFETY: as this function.
    unsafe {
        S::transpose_quads([
            S::load_dwords(p),
            S::load_dwords(p.add(bytes)),
            S::load_dwords(p.add(2 * bytes)),
            S::load_dwords(p.add(3 * bytes)),
        ])
    }
}

/// Packs a row of activations into the blocks that [`gemv_blocks`] reads.
///
/// # Safety
/// The Simd contract; the activations are padded to whole blocks, and `dst` has room for
/// [`packed_bytes`] of them.
#[inline(always)]
pub(super) unsafe fn pack_for_blocks<S: Simd>(x: &Q8Row<'_>, cols: usize, dst: &mut [u8]) {
    for i in 0..cols.div_ceil(block_cols::<S>()) {
        // SAFETY: as this function.
        unsafe {
            let dst = dst.as_mut_ptr().add(i * block_bytes::<S>());
            let quants = load_block::<S>(x.q.as_ptr().add(i * block_cols::<S>()).cast());
            for v in 0..MAX_UNPACKED {
                S::store_dwords(dst.add(v * 4 * S::LANES), quants[v]);
            }
            let scales = S::order_quads(S::load(x.scales.as_ptr().add(i * S::LANES)));
            S::store(dst.add(16 * S::LANES).cast(), scales);
        }
    }
}

/// Products of transcoded rows and `X` rows of activations. Of `P`, only the range of its quants
/// matters.
///
/// # Safety
/// The Simd contract; rows of weights are padded to `stride`, and activations were packed by
/// [`pack_for_blocks`].
#[inline(always)]
pub(super) unsafe fn gemv_blocks<S: Simd, P: Packing, const X: usize>(
    w: TranscodedRows<'_>,
    x: &[GemvActivations<'_>; X],
    GroupShape { cols, group }: GroupShape,
    out: GemvOut<'_>,
) {
    let log_group = group.trailing_zeros();
    for r in 0..w.count {
        // SAFETY: as this function.
        unsafe {
            let (q, scales) = (r * w.stride, r * w.stride / Q8_GROUP);
            let mut sums = [S::zero(); X];
            for begin in (0..cols).step_by(SECTION) {
                let section = Section {
                    q: w.q.as_ptr().add(q + begin),
                    scales: w.scales.as_ptr().add(scales + (begin >> log_group)),
                    biases: w.biases.as_ptr().add(scales + (begin >> log_group)),
                    begin,
                    cols: SECTION.min(cols - begin),
                    log_group,
                };
                let acc = section.products::<S, P, X>(x);
                for c in 0..X {
                    sums[c] = S::fma(S::splat(1.0), acc[c], sums[c]);
                }
            }
            for c in 0..X {
                if let Some(dst) = out.values.get_mut(c * out.stride + r) {
                    *dst = S::sum(sums[c]);
                }
            }
        }
    }
}

/// Section of a transcoded row.
struct Section {
    q: *const u8,
    scales: *const f32,
    biases: *const f32,
    /// First column.
    begin: usize,
    cols: usize,
    /// log2 of the columns that share a scale.
    log_group: u32,
}

impl Section {
    /// Vectors of partial sums.
    ///
    /// # Safety
    /// As [`gemv_blocks`].
    #[inline(always)]
    unsafe fn products<S: Simd, P: Packing, const X: usize>(
        &self,
        x: &[GemvActivations<'_>; X],
    ) -> [S::F32; X] {
        // SAFETY: as this function; padding is whole blocks.
        unsafe {
            // Biases first: sums of unsigned quants are large where the weights have both signs,
            // and the biases cancel them.
            let mut acc = [S::zero(); X];
            let groups = self.cols >> self.log_group;
            for i in (0..groups).step_by(S::LANES) {
                let n = S::LANES.min(groups - i);
                let biases = S::load_partial(self.biases.add(i), n);
                for c in 0..X {
                    let sums = x[c].sums.as_ptr().add((self.begin >> self.log_group) + i);
                    acc[c] = S::fma(biases, S::load_partial(sums, n), acc[c]);
                }
            }
            let first = self.begin / block_cols::<S>();
            for i in 0..self.cols.div_ceil(block_cols::<S>()) {
                let scales = S::order_quads(if 1 << self.log_group == Q8_GROUP {
                    S::load(self.scales.add(i * S::LANES))
                } else {
                    S::load_repeated(self.scales.add(i * S::LANES / 2), S::LANES / 2)
                });
                let w = load_block::<S>(self.q.add(i * block_cols::<S>()));
                for c in 0..X {
                    let src = x[c].blocks.as_ptr().add((first + i) * block_bytes::<S>());
                    let mut x = [S::load_dwords(src); MAX_UNPACKED];
                    for v in 1..MAX_UNPACKED {
                        x[v] = S::load_dwords(src.add(v * 4 * S::LANES));
                    }
                    let dot = S::dot::<P, MAX_UNPACKED>(S::zero_i32(), w, x);
                    let scales = S::mul(scales, S::load(src.add(16 * S::LANES).cast()));
                    acc[c] = S::fma(S::from_i32(dot), scales, acc[c]);
                }
            }
            acc
        }
    }
}
