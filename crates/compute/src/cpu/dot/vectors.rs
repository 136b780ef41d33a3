//! The algorithms on vectors of f32: attention, the delta rule, convolution, and functions of single numbers, which
//! the compiler turns into vectors.

use super::algorithm::{Element, MAX_LANES, Simd, add_products, reduce};
use crate::Scalar;

#[inline(always)]
fn fma<S: Simd>(a: f32, b: f32, c: f32) -> f32 {
    if S::FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// `exp(x)` to two units in the last place; below -87 as at -87, above 88 as at 88. NaN stays NaN.
#[inline(always)]
fn exp<S: Simd>(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = fma::<S>(x, std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    // ln 2 in two parts: the first has few enough bits that its product with n is exact.
    let r = fma::<S>(n, -0.693_359_4, x);
    let r = fma::<S>(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_1e-4;
    for c in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = fma::<S>(p, r, c);
    }
    let p = fma::<S>(p * r, r, r) + 1.0;
    p * f32::from_bits((shifted.to_bits() << 23).wrapping_add(0x3f80_0000))
}

#[inline(always)]
fn sigmoid<S: Simd>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<S>(-x))
}

/// `y = silu(y) * x`
#[inline(always)]
pub(super) fn silu_mul<S: Simd>(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = *y * sigmoid::<S>(*y) * x;
    }
}

/// `y = y * silu(x)`
#[inline(always)]
pub(super) fn mul_silu<S: Simd>(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y *= x * sigmoid::<S>(*x);
    }
}

/// `y = silu(y)`
#[inline(always)]
pub(super) fn silu<S: Simd>(y: &mut [f32]) {
    for y in y {
        *y *= sigmoid::<S>(*y);
    }
}

/// `y = y * sigmoid(x)`
#[inline(always)]
pub(super) fn mul_sigmoid<S: Simd>(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y *= sigmoid::<S>(*x);
    }
}

/// `x = exp(x - max)`; returns their sum.
#[inline(always)]
pub(super) fn exp_sum<S: Simd>(x: &mut [f32], max: f32) -> f32 {
    let mut sums = [0.0; 16];
    let (blocks, rest) = x.as_chunks_mut::<16>();
    for block in blocks {
        for (x, sum) in block.iter_mut().zip(&mut sums) {
            *x = exp::<S>(*x - max);
            *sum += *x;
        }
    }
    for (x, sum) in rest.iter_mut().zip(&mut sums) {
        *x = exp::<S>(*x - max);
        *sum += *x;
    }
    sums.iter().sum()
}

/// The largest number; a NaN is passed over.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let mut largest = [f32::NEG_INFINITY; 16];
    let (blocks, rest) = x.as_chunks::<16>();
    for block in blocks {
        for (x, largest) in block.iter().zip(&mut largest) {
            *largest = if *x > *largest { *x } else { *largest };
        }
    }
    for (x, largest) in rest.iter().zip(&mut largest) {
        *largest = if *x > *largest { *x } else { *largest };
    }
    largest.into_iter().fold(f32::NEG_INFINITY, f32::max)
}

/// `y += a * x`
#[inline(always)]
pub(super) fn axpy<S: Simd>(y: &mut [f32], a: f32, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = fma::<S>(a, *x, *y);
    }
}

/// How a part joins what was summed before: factors on the one and the other.
#[derive(Clone, Copy, Default)]
pub(crate) struct SoftmaxPartial {
    pub(crate) keep: f32,
    pub(crate) add: f32,
}

impl SoftmaxPartial {
    /// A plain sum.
    pub(crate) const SUM: Self = Self { keep: 1.0, add: 1.0 };
}

/// `y = y * by.keep + x * by.add`
#[inline(always)]
pub(super) fn join<S: Simd>(y: &mut [f32], by: SoftmaxPartial, x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y = fma::<S>(*y, by.keep, *x * by.add);
    }
}

/// Vectors that lie somewhere: the first numbers of each slice.
#[derive(Clone, Copy)]
pub(crate) struct Places<'a> {
    /// What the numbers are.
    pub(crate) scalar: Scalar,
    pub(crate) at: &'a [&'a [u8]],
}

impl<'a> Places<'a> {
    /// Vectors of f32.
    pub(crate) const fn of(at: &'a [&'a [u8]]) -> Self {
        Self { scalar: Scalar::F32, at }
    }

    /// Whether all vectors have `width` numbers.
    pub(super) fn hold(&self, width: usize) -> bool {
        let bytes = width.checked_mul(self.scalar.bytes());
        bytes.is_some_and(|bytes| self.at.iter().all(|at| at.len() >= bytes))
    }

    /// Number `i` of vector `t`.
    ///
    /// # Safety
    /// There is such a number, and the numbers are `E`.
    #[inline(always)]
    unsafe fn get<E: Element>(&self, t: usize, i: usize) -> *const u8 {
        // SAFETY: the caller's.
        unsafe { self.at.get_unchecked(t).as_ptr().add(i * E::SCALAR.bytes()) }
    }
}

/// Points `to` to vectors of f32 that lie `stride` numbers apart.
pub(crate) fn each<'a>(all: &'a [f32], stride: usize, to: &mut [&'a [u8]]) {
    to.iter_mut()
        .zip(all.chunks(stride))
        .for_each(|(to, vector)| *to = bytemuck::cast_slice(vector));
}

/// `out[i][t] = scale * q[i] . keys[t]`; `out` is `(q.len(), keys.at.len())`. Meanwhile what is read next comes from memory:
/// so many bytes of as many vectors.
///
/// # Safety
/// The keys and what is read next are there and `E`; keys are as long as the queries, which are of one length; `out` is as
/// large as that.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd, E: Element>(
    q: &[&[f32]],
    keys: Places<'_>,
    scale: f32,
    out: &mut [f32],
    (next, bytes): (Places<'_>, usize),
) {
    /// The scores of `R` keys from `t` on for all queries.
    #[inline(always)]
    unsafe fn keys_at<S: Simd, E: Element, const R: usize>(
        q: &[&[f32]],
        (keys, t): (Places<'_>, usize),
        scale: f32,
        out: &mut [f32],
    ) {
        let mut i = 0;
        // SAFETY: the caller's.
        unsafe {
            while i < q.len() {
                let to = &mut out[i * keys.at.len() + t..];
                i += if let (true, Some(q)) = (S::WIDTH >= 4, q[i..].first_chunk::<4>()) {
                    part::<S, E, R, 4>(q, (keys, t), scale, to)
                } else if let (true, Some(q)) = (S::WIDTH >= 2, q[i..].first_chunk::<2>()) {
                    part::<S, E, R, 2>(q, (keys, t), scale, to)
                } else {
                    part::<S, E, R, 1>(&[q[i]], (keys, t), scale, to)
                };
            }
        }
    }
    /// The scores of `R` keys from `t` on for `X` queries.
    #[inline(always)]
    unsafe fn part<S: Simd, E: Element, const R: usize, const X: usize>(
        q: &[&[f32]; X],
        (keys, t): (Places<'_>, usize),
        scale: f32,
        out: &mut [f32],
    ) -> usize {
        let mut from = [std::ptr::null(); R];
        // SAFETY: the caller's.
        unsafe {
            for (r, from) in from.iter_mut().enumerate() {
                *from = keys.get::<E>(t + r, 0);
            }
            let mut acc = [[S::zero(); X]; R];
            add_products::<S, E, R, X, false>(&mut acc, from, q.map(<[f32]>::as_ptr), q[0].len());
            for i in 0..X {
                // Scores of a query lie one behind the other.
                let out = &mut out[i * keys.at.len()..][..R];
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
    let count = keys.at.len();
    // SAFETY: the caller's.
    unsafe {
        for t in (0..count / 4 * 4).step_by(4) {
            for t in t..t + 4 {
                let at = next.get::<E>(t, 0);
                for line in (0..bytes).step_by(64) {
                    S::prefetch(at.wrapping_add(line));
                }
            }
            keys_at::<S, E, 4>(q, (keys, t), scale, out);
        }
        for t in count / 4 * 4..count {
            keys_at::<S, E, 1>(q, (keys, t), scale, out);
        }
    }
}

/// `acc[i] = acc[i] * by[i].keep + by[i].add * sum_t p[i][t] * values[t]`, summed in order. Meanwhile what is read next comes from
/// memory.
///
/// # Safety
/// The values are there and `E`, as long as the accumulators, which are of one length; `p` and `by` have what belongs to
/// every accumulator.
#[inline(always)]
pub(super) unsafe fn mix<S: Simd, E: Element>(
    p: &[&[f32]],
    values: Places<'_>,
    by: &[SoftmaxPartial],
    acc: &mut [&mut [f32]],
    mut next: &[u8],
) {
    /// A number.
    #[inline(always)]
    unsafe fn one<E: Element>(p: *const u8) -> f32 {
        // SAFETY: the caller's: there is a number.
        E::SCALAR.get(unsafe { std::slice::from_raw_parts(p, E::SCALAR.bytes()) }, 0)
    }
    /// Numbers `from ..` of `X` accumulators, `V` vectors of them; returns how many numbers that were.
    #[inline(always)]
    unsafe fn part<S: Simd, E: Element, const X: usize, const V: usize>(
        p: &[&[f32]; X],
        values: Places<'_>,
        by: &[SoftmaxPartial],
        (acc, from): (&mut [&mut [f32]], usize),
        next: &mut &[u8],
    ) -> usize {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [[S::zero(); V]; X];
            for t in 0..values.at.len() {
                // A line at a time, as all at once would be more than memory takes.
                if let Some((line, rest)) = next.split_first_chunk::<64>() {
                    S::prefetch(line.as_ptr());
                    *next = rest;
                }
                let mut numbers = [S::zero(); V];
                for (j, numbers) in numbers.iter_mut().enumerate() {
                    *numbers = E::load::<S>(values.get::<E>(t, from + j * S::LANES));
                }
                for (p, sums) in p.iter().zip(&mut sums) {
                    let p = S::splat(*p.get_unchecked(t));
                    for (number, sum) in numbers.iter().zip(sums) {
                        *sum = S::fma(p, *number, *sum);
                    }
                }
            }
            for (i, sums) in sums.iter().enumerate() {
                let (keep, add) = (S::splat(by[i].keep), S::splat(by[i].add));
                for (j, sum) in sums.iter().enumerate() {
                    let to = acc[i].as_mut_ptr().add(from + j * S::LANES);
                    S::store(to, S::fma(S::load(to), keep, S::mul(*sum, add)));
                }
            }
        }
        V * S::LANES
    }
    /// All numbers of `X` accumulators.
    #[inline(always)]
    unsafe fn whole<S: Simd, E: Element, const X: usize>(
        p: &[&[f32]; X],
        values: Places<'_>,
        by: &[SoftmaxPartial],
        acc: &mut [&mut [f32]],
        next: &mut &[u8],
    ) -> usize {
        let (width, mut from) = (acc[0].len(), 0);
        // SAFETY: the caller's.
        unsafe {
            while from + 4 * S::LANES <= width {
                from += part::<S, E, X, 4>(p, values, by, (acc, from), next);
            }
            while from + S::LANES <= width {
                from += part::<S, E, X, 1>(p, values, by, (acc, from), next);
            }
            for ((acc, by), p) in acc.iter_mut().zip(by).zip(p) {
                for (j, acc) in acc.iter_mut().enumerate().skip(from) {
                    let mut sum = 0.0;
                    for (t, p) in p.iter().enumerate() {
                        sum = fma::<S>(*p, one::<E>(values.get::<E>(t, j)), sum);
                    }
                    *acc = fma::<S>(*acc, by.keep, sum * by.add);
                }
            }
        }
        X
    }
    let mut i = 0;
    // SAFETY: the caller's.
    unsafe {
        while i < acc.len() {
            let (by, acc) = (&by[i..], &mut acc[i..]);
            i += if let (true, Some(p)) = (S::WIDTH >= 4, p[i..].first_chunk::<4>()) {
                whole::<S, E, 4>(p, values, by, acc, &mut next)
            } else if let (true, Some(p)) = (S::WIDTH >= 2, p[i..].first_chunk::<2>()) {
                whole::<S, E, 2>(p, values, by, acc, &mut next)
            } else {
                whole::<S, E, 1>(&[p[i]], values, by, acc, &mut next)
            };
        }
    }
}

/// The numbers of one row and head that the gated delta rule needs beside vectors.
#[derive(Clone, Copy)]
pub(crate) struct Delta {
    /// `1 / |q| / sqrt(key width)`
    pub(crate) q_scale: f32,
    /// `1 / |k|`
    pub(crate) k_scale: f32,
    pub(crate) decay: f32,
    pub(crate) beta: f32,
}

/// One row of the gated delta rule on some rows of a head's state, one per number of `v` and `y`:
/// `d = beta (v - (decay S) k)`, `S = decay S + d k`, `y = S q`. The state is read twice and written once.
///
/// # Safety
/// `state` has `v.len()` rows as long as `k` and `q`, `y` is as long as `v`.
#[inline(always)]
pub(super) unsafe fn delta<S: Simd>(
    state: &mut [f32],
    k: &[f32],
    q: &[f32],
    v: &[f32],
    y: &mut [f32],
    d: Delta,
) {
    /// Of `R` rows.
    #[inline(always)]
    unsafe fn part<S: Simd, const R: usize>(
        state: &mut [f32],
        [k, q]: [&[f32]; 2],
        (v, y): (&[f32], &mut [f32]),
        d: Delta,
    ) {
        let width = k.len();
        let vectors = || (0..width).step_by(S::LANES).map(|i| (i, S::LANES.min(width - i)));
        // SAFETY: the caller's: the state has `R` rows of `width` numbers, as many as `k` and `q` have.
        unsafe {
            let decay = S::splat(d.decay);
            let (mut recalled, mut asked) = ([[S::zero(); 1]; R], [[S::zero(); 1]; R]);
            for (i, n) in vectors() {
                let k = S::load_first(k.as_ptr().add(i), n);
                for (r, [recalled]) in recalled.iter_mut().enumerate() {
                    let s = S::mul(S::load_first(state.as_ptr().add(r * width + i), n), decay);
                    *recalled = S::fma(s, k, *recalled);
                }
            }
            let recalled = reduce::<S, R, 1>(&recalled);
            let mut add = [S::zero(); R];
            for r in 0..R {
                add[r] = S::splat(d.beta * (v[r] - recalled[r][0] * d.k_scale) * d.k_scale);
            }
            for (i, n) in vectors() {
                let k = S::load_first(k.as_ptr().add(i), n);
                let q = S::load_first(q.as_ptr().add(i), n);
                for r in 0..R {
                    let at = state.as_mut_ptr().add(r * width + i);
                    let s = S::fma(add[r], k, S::mul(S::load_first(at, n), decay));
                    asked[r][0] = S::fma(s, q, asked[r][0]);
                    if n == S::LANES {
                        S::store(at, s);
                    } else {
                        let mut rest = [0.0; MAX_LANES];
                        S::store(rest.as_mut_ptr(), s);
                        std::ptr::copy_nonoverlapping(rest.as_ptr(), at, n);
                    }
                }
            }
            let asked = reduce::<S, R, 1>(&asked);
            for r in 0..R {
                y[r] = asked[r][0] * d.q_scale;
            }
        }
    }
    let (width, fours) = (k.len(), v.len() / 4 * 4);
    // SAFETY: the caller's.
    unsafe {
        for i in (0..fours).step_by(4) {
            let state = &mut state[i * width..(i + 4) * width];
            part::<S, 4>(state, [k, q], (&v[i..i + 4], &mut y[i..i + 4]), d);
        }
        for i in fours..v.len() {
            let state = &mut state[i * width..(i + 1) * width];
            part::<S, 1>(state, [k, q], (&v[i..=i], &mut y[i..=i]), d);
        }
    }
}

/// A causal convolution of four taps: `out[c] = sum_j weight[c][j] * inputs[j][c]`.
#[inline(always)]
pub(super) fn taps4<S: Simd>(weight: &[f32], [a, b, c, d]: [&[f32]; 4], out: &mut [f32]) {
    let inputs = a.iter().zip(b).zip(c.iter().zip(d));
    for ((out, w), ((a, b), (c, d))) in out.iter_mut().zip(weight.as_chunks::<4>().0).zip(inputs) {
        *out = fma::<S>(w[3], *d, fma::<S>(w[2], *c, fma::<S>(w[1], *b, w[0] * a)));
    }
}
