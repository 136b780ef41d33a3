//! GEMV on transcoded rows: up to [`GEMV_ROWS`](super::gemv_q8::GEMV_ROWS) rows of int8 activations
//! and rows of weights that [`transcode`](super::transcode) has just written to L1.
//!
//! ```text
//! y[c][r] = sum_b scale_w[r][b] * scale_x[c][b] * dot(q[r][b], x[c][b])
//!         + sum_g bias_w[r][g] * sum_x[c][g]
//! ```
//!
//! The products of both scales are computed for as many groups of activations as a vector has
//! lanes, and are spread to the lanes of four vectors of quants. Quants and activations are in the
//! order of the row. The sums of a row do not depend on the other rows.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are indexed together, without closures"
)]

use super::{
    activations::Q8Row,
    gemv_q8::{GemvOut, SECTION},
    quant_rows::GroupShape,
    transcode::TranscodedRows,
    unpack_affine::{MAX_UNPACKED, Packing},
    vector::{Q8_GROUP, Simd},
};

/// Independent sums of a row: more hide the latency of an addition, and need more registers.
const SUMS: usize = 2;

/// Products of transcoded rows and `X` rows of activations. Of `P`, only the range of its quants
/// matters.
///
/// # Safety
/// The Simd contract; rows of weights and of activations are padded to `stride`.
#[inline(always)]
pub(super) unsafe fn gemv_blocks<S: Simd, P: Packing, const X: usize>(
    w: TranscodedRows<'_>,
    x: &[Q8Row<'_>; X],
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
        x: &[Q8Row<'_>; X],
    ) -> [S::F32; X] {
        // SAFETY: as this function; padding is whole vectors of scales.
        unsafe {
            // Biases first: sums of unsigned quants are large where the weights have both signs,
            // and the biases cancel them.
            let mut acc = [[S::zero(); X]; SUMS];
            let groups = self.cols >> self.log_group;
            for i in (0..groups).step_by(S::LANES) {
                let n = S::LANES.min(groups - i);
                let biases = S::load_partial(self.biases.add(i), n);
                for c in 0..X {
                    let sums = x[c].sums.as_ptr().add((self.begin >> self.log_group) + i);
                    acc[0][c] = S::fma(biases, S::load_partial(sums, n), acc[0][c]);
                }
            }
            for i in (0..self.cols).step_by(S::LANES * Q8_GROUP) {
                let scales = if 1 << self.log_group == Q8_GROUP {
                    S::load(self.scales.add(i / Q8_GROUP))
                } else {
                    S::load_repeated(self.scales.add(i / Q8_GROUP / 2), S::LANES / 2)
                };
                let mut factors = [scales; X];
                for c in 0..X {
                    let x_scales = x[c].scales.as_ptr().add((self.begin + i) / Q8_GROUP);
                    factors[c] = S::mul(scales, S::load(x_scales));
                }
                for v in 0..4 {
                    let i = i + v * 4 * S::LANES;
                    let w = S::load_dwords(self.q.add(i));
                    for c in 0..X {
                        let x = S::load_dwords(x[c].q.as_ptr().add(self.begin + i).cast());
                        let dot =
                            S::dot::<P, 1>(S::zero_i32(), [w; MAX_UNPACKED], [x; MAX_UNPACKED]);
                        let factors = S::spread_quarter(factors[c], v);
                        acc[v % SUMS][c] = S::fma(S::from_i32(dot), factors, acc[v % SUMS][c]);
                    }
                }
            }
            let [mut sums, more] = acc;
            for c in 0..X {
                sums[c] = S::fma(S::splat(1.0), sums[c], more[c]);
            }
            sums
        }
    }
}
