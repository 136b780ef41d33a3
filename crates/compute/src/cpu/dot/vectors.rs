//! The algorithms on vectors of f32: attention, the delta rule, convolution, and functions of single numbers, which
//! the compiler turns into vectors.

use super::algorithm::{F32, Simd, numbers};

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
    for block in blocks.iter().map(<[f32; 16]>::as_slice).chain([rest]) {
        for (x, largest) in block.iter().zip(&mut largest) {
            *largest = if *x > *largest { *x } else { *largest };
        }
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

/// `out[t] = scale * q . keys[t]`, where key `t` begins at `t * stride`.
///
/// # Safety
/// There is a key for every element of `out`.
#[inline(always)]
pub(super) unsafe fn scores<S: Simd>(q: &[f32], keys: &[f32], stride: usize, scale: f32, out: &mut [f32]) {
    let (blocks, rest) = out.as_chunks_mut::<4>();
    let done = blocks.len() * 4;
    // SAFETY: the caller's; a key is as long as q.
    unsafe {
        let key = |t: usize| keys.as_ptr().add(t * stride).cast::<u8>();
        for (t, out) in blocks.iter_mut().enumerate() {
            let keys = std::array::from_fn(|i| key(t * 4 + i));
            let sums = numbers::<S, F32, 4, 1>(keys, [q.as_ptr()], q.len());
            *out = sums.map(|[sum]| sum * scale);
        }
        for (t, out) in rest.iter_mut().enumerate() {
            let [[sum]] = numbers::<S, F32, 1, 1>([key(done + t)], [q.as_ptr()], q.len());
            *out = sum * scale;
        }
    }
}

/// `acc = acc * keep + sum_t p[t] * values[t]`, where value `t` begins at `t * stride`.
///
/// # Safety
/// There is a value as long as `acc` for every element of `p`.
#[inline(always)]
pub(super) unsafe fn mix<S: Simd>(p: &[f32], values: &[f32], stride: usize, keep: f32, acc: &mut [f32]) {
    let mut from = 0;
    // SAFETY: the caller's.
    unsafe {
        let value = |t: usize, i: usize| values.as_ptr().add(t * stride + i);
        while from + 4 * S::LANES <= acc.len() {
            let mut sums = [S::zero(); 4];
            for (t, p) in p.iter().enumerate() {
                let p = S::splat(*p);
                for (i, sum) in sums.iter_mut().enumerate() {
                    *sum = S::fma(p, S::load(value(t, from + i * S::LANES)), *sum);
                }
            }
            for (i, sum) in sums.iter().enumerate() {
                let to = acc.as_mut_ptr().add(from + i * S::LANES);
                S::store(to, S::fma(S::load(to), S::splat(keep), *sum));
            }
            from += 4 * S::LANES;
        }
        for (i, acc) in acc.iter_mut().enumerate().skip(from) {
            let mut sum = 0.0;
            for (t, p) in p.iter().enumerate() {
                sum = fma::<S>(*p, *value(t, i), sum);
            }
            *acc = fma::<S>(*acc, keep, sum);
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

/// One row of the gated delta rule on some rows of a head's state, one per number of `v` and `y`.
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
    let width = k.len();
    for ((state, v), y) in state.chunks_exact_mut(width).zip(v).zip(y) {
        for s in state.iter_mut() {
            *s *= d.decay;
        }
        // SAFETY: state, k and q have `width` numbers.
        unsafe {
            let row = state.as_ptr().cast::<u8>();
            let [[recalled]] = numbers::<S, F32, 1, 1>([row], [k.as_ptr()], width);
            axpy::<S>(state, d.beta * (v - recalled * d.k_scale) * d.k_scale, k);
            let row = state.as_ptr().cast::<u8>();
            let [[out]] = numbers::<S, F32, 1, 1>([row], [q.as_ptr()], width);
            *y = out * d.q_scale;
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
