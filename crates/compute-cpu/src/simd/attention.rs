//! Attention with an online softmax: scores `q k^T` of a block of positions, and the weighted sum
//! of its values, merged with the running sum.

use moeflux_ops::Scalar;

use super::{
    elementwise::fma,
    float_types::FloatType,
    gemm_f32::add_products,
    vector::{CACHE_LINE, Simd},
};

/// Factors that merge a partial sum of an online softmax with the running sum:
/// `keep` on the running sum, `add` on the partial sum.
#[derive(Clone, Copy, Default)]
pub(crate) struct MergeFactors {
    pub(crate) keep: f32,
    pub(crate) add: f32,
}

impl MergeFactors {
    /// A plain sum.
    pub(crate) const SUM: Self = Self { keep: 1.0, add: 1.0 };
}

/// `y = y * factors.keep + x * factors.add`
#[inline(always)]
pub(super) fn merge<S: Simd>(y: &mut [f32], factors: MergeFactors, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = fma::<S>(*y, factors.keep, *x * factors.add);
    }
}

/// Vectors at any place in memory, such as rows of the KV cache: the first values of each slice.
#[derive(Clone, Copy)]
pub(crate) struct FloatRows<'a> {
    /// Type of the values.
    pub(crate) scalar: Scalar,
    pub(crate) rows: &'a [&'a [u8]],
}

impl<'a> FloatRows<'a> {
    /// Vectors of f32.
    pub(crate) const fn f32(rows: &'a [&'a [u8]]) -> Self {
        Self { scalar: Scalar::F32, rows }
    }

    /// Whether all vectors have `width` values.
    pub(super) fn have_width(&self, width: usize) -> bool {
        let bytes = width.checked_mul(self.scalar.bytes());
        bytes.is_some_and(|bytes| self.rows.iter().all(|row| row.len() >= bytes))
    }

    /// Pointer to value `i` of vector `t`.
    ///
    /// # Safety
    /// The vector has such a value, of type `E`.
    #[inline(always)]
    unsafe fn get<E: FloatType>(&self, t: usize, i: usize) -> *const u8 {
        // SAFETY: the caller guarantees that `t` and `i` are in bounds.
        unsafe { self.rows.get_unchecked(t).as_ptr().add(i * E::SCALAR.bytes()) }
    }
}

/// Sets `dst` to the f32 vectors of `src` that are `stride` values apart.
pub(crate) fn split_rows<'a>(src: &'a [f32], stride: usize, dst: &mut [&'a [u8]]) {
    dst.iter_mut()
        .zip(src.chunks(stride))
        .for_each(|(dst, vector)| *dst = bytemuck::cast_slice(vector));
}

/// Vectors to prefetch into L2 while others are read.
#[derive(Clone, Copy)]
pub(crate) struct PrefetchRows<'a> {
    pub(crate) rows: FloatRows<'a>,
    /// Bytes of each vector.
    pub(crate) bytes: usize,
}

/// `out[i][t] = scale * q[i] . keys[t]`, where `out` is `(q.len(), keys.rows.len())`. Prefetches
/// `next` meanwhile, one vector per key.
///
/// # Safety
/// The Simd contract; keys and `next` are of type `E`, and `next` has as many vectors as `keys`;
/// queries have one length, keys at least that; `out` has the size above.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd, E: FloatType>(
    q: &[&[f32]],
    keys: FloatRows<'_>,
    scale: f32,
    out: &mut [f32],
    PrefetchRows { rows: next, bytes: next_bytes }: PrefetchRows<'_>,
) {
    /// Scores of `R` keys from `t` on for all queries.
    #[inline(always)]
    unsafe fn keys_from<S: Simd, E: FloatType, const R: usize>(
        q: &[&[f32]],
        keys: FloatRows<'_>,
        t: usize,
        scale: f32,
        out: &mut [f32],
    ) {
        let mut i = 0;
        // SAFETY: as `scores`.
        unsafe {
            while i < q.len() {
                let dst = &mut out[i * keys.rows.len() + t..];
                i += if let (true, Some(q)) = (S::TILE_ACTIVATIONS >= 4, q[i..].first_chunk::<4>())
                {
                    part::<S, E, R, 4>(q, keys, t, scale, dst)
                } else if let (true, Some(q)) =
                    (S::TILE_ACTIVATIONS >= 2, q[i..].first_chunk::<2>())
                {
                    part::<S, E, R, 2>(q, keys, t, scale, dst)
                } else {
                    part::<S, E, R, 1>(&[q[i]], keys, t, scale, dst)
                };
            }
        }
    }
    /// Scores of `R` keys from `t` on for `X` queries. Returns `X`.
    #[inline(always)]
    unsafe fn part<S: Simd, E: FloatType, const R: usize, const X: usize>(
        q: &[&[f32]; X],
        keys: FloatRows<'_>,
        t: usize,
        scale: f32,
        out: &mut [f32],
    ) -> usize {
        let mut rows = [std::ptr::null(); R];
        // SAFETY: as `scores`.
        unsafe {
            for (r, row) in rows.iter_mut().enumerate() {
                *row = keys.get::<E>(t + r, 0);
            }
            let mut acc = [[S::zero(); X]; R];
            add_products::<S, E, R, X, false>(&mut acc, rows, q.map(<[f32]>::as_ptr), q[0].len());
            for i in 0..X {
                // The scores of a query are consecutive.
                let out = &mut out[i * keys.rows.len()..][..R];
                match (<&mut [f32; 4]>::try_from(&mut *out), acc.first_chunk::<4>()) {
                    (Ok(out), Some([a, b, c, d])) => {
                        *out = S::sum4([a[i], b[i], c[i], d[i]]).map(|sum| sum * scale);
                    }
                    _ => {
                        for r in 0..R {
                            out[r] = S::sum(acc[r][i]) * scale;
                        }
                    }
                }
            }
        }
        X
    }
    let count = keys.rows.len();
    // SAFETY: as this function; a prefetch address may be past the end.
    unsafe {
        for t in (0..count / 4 * 4).step_by(4) {
            for t in t..t + 4 {
                let vector = next.get::<E>(t, 0);
                for line in (0..next_bytes).step_by(CACHE_LINE) {
                    S::prefetch_l2(vector.wrapping_add(line));
                }
            }
            keys_from::<S, E, 4>(q, keys, t, scale, out);
        }
        for t in count / 4 * 4..count {
            keys_from::<S, E, 1>(q, keys, t, scale, out);
        }
    }
}

/// `acc[i] = acc[i] * factors[i].keep + factors[i].add * sum_t p[i][t] * values[t]`, summed in
/// order of `t`. Prefetches `next` meanwhile.
///
/// # Safety
/// The Simd contract; values are of type `E`; accumulators have one length, values at least that;
/// `p` and `factors` have an entry per accumulator, and `p[i]` one weight per value vector.
#[inline(always)]
pub(super) unsafe fn weighted_sum<S: Simd, E: FloatType>(
    p: &[&[f32]],
    values: FloatRows<'_>,
    factors: &[MergeFactors],
    acc: &mut [&mut [f32]],
    mut next: &[u8],
) {
    /// Reads one value.
    #[inline(always)]
    unsafe fn read<E: FloatType>(p: *const u8) -> f32 {
        // SAFETY: the caller guarantees that there is a value.
        E::SCALAR.get(unsafe { std::slice::from_raw_parts(p, E::SCALAR.bytes()) }, 0)
    }
    /// `V` vectors of `X` accumulators, from value `first` on. Returns the number of values.
    #[inline(always)]
    unsafe fn part<S: Simd, E: FloatType, const X: usize, const V: usize>(
        p: &[&[f32]; X],
        values: FloatRows<'_>,
        factors: &[MergeFactors],
        acc: &mut [&mut [f32]],
        first: usize,
        next: &mut &[u8],
    ) -> usize {
        // SAFETY: as `weighted_sum`.
        unsafe {
            let mut sums = [[S::zero(); V]; X];
            for t in 0..values.rows.len() {
                // One line per step: all at once is more than the memory system accepts.
                if let Some((line, rest)) = next.split_first_chunk::<CACHE_LINE>() {
                    S::prefetch_l2(line.as_ptr());
                    *next = rest;
                }
                let mut vectors = [S::zero(); V];
                for (j, vector) in vectors.iter_mut().enumerate() {
                    *vector = E::load::<S>(values.get::<E>(t, first + j * S::LANES));
                }
                for (p, sums) in p.iter().zip(&mut sums) {
                    let p = S::splat(*p.get_unchecked(t));
                    for (vector, sum) in vectors.iter().zip(sums) {
                        *sum = S::fma(p, *vector, *sum);
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                let (keep, add) = (S::splat(factors[i].keep), S::splat(factors[i].add));
                for (j, sum) in sums.iter().enumerate() {
                    let dst = acc[i].as_mut_ptr().add(first + j * S::LANES);
                    S::store(dst, S::fma(S::load(dst), keep, S::mul(*sum, add)));
                }
            }
        }
        V * S::LANES
    }
    /// All values of `X` accumulators. Returns `X`.
    #[inline(always)]
    unsafe fn whole<S: Simd, E: FloatType, const X: usize>(
        p: &[&[f32]; X],
        values: FloatRows<'_>,
        factors: &[MergeFactors],
        acc: &mut [&mut [f32]],
        next: &mut &[u8],
    ) -> usize {
        let (width, mut done) = (acc[0].len(), 0);
        // SAFETY: as `weighted_sum`.
        unsafe {
            while done + 4 * S::LANES <= width {
                done += part::<S, E, X, 4>(p, values, factors, acc, done, next);
            }
            while done + S::LANES <= width {
                done += part::<S, E, X, 1>(p, values, factors, acc, done, next);
            }
            for ((acc, factors), p) in acc.iter_mut().zip(factors).zip(p) {
                for (j, acc) in acc.iter_mut().enumerate().skip(done) {
                    let mut sum = 0.0;
                    for (t, p) in p.iter().enumerate() {
                        sum = fma::<S>(*p, read::<E>(values.get::<E>(t, j)), sum);
                    }
                    *acc = fma::<S>(*acc, factors.keep, sum * factors.add);
                }
            }
        }
        X
    }
    let mut i = 0;
    // SAFETY: as this function.
    unsafe {
        while i < acc.len() {
            let (factors, acc) = (&factors[i..], &mut acc[i..]);
            i += if let (true, Some(p)) = (S::TILE_ACTIVATIONS >= 4, p[i..].first_chunk::<4>()) {
                whole::<S, E, 4>(p, values, factors, acc, &mut next)
            } else if let (true, Some(p)) = (S::TILE_ACTIVATIONS >= 2, p[i..].first_chunk::<2>()) {
                whole::<S, E, 2>(p, values, factors, acc, &mut next)
            } else {
                whole::<S, E, 1>(&[p[i]], values, factors, acc, &mut next)
            };
        }
    }
}
