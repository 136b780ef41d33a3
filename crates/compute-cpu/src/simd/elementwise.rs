//! Elementwise functions on f32: SiLU and sigmoid gating, softmax exponentials, decays of the delta
//! rule, AXPY, and a short causal convolution.
//!
//! Plain loops, which the compiler vectorizes for the instruction set that they are inlined into.

use moeflux_ops::{Activation, LogDecay};

use super::vector::Simd;

/// `a * b + c`, rounded once where the instruction set has a fused multiply-add.
#[inline(always)]
pub(super) fn fma<S: Simd>(a: f32, b: f32, c: f32) -> f32 {
    if S::HAS_FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `exp(x)` to 2 ulp, with `x` clamped to -87..=88. NaN stays NaN.
#[inline(always)]
pub(super) fn exp<S: Simd>(x: f32) -> f32 {
    // 1.5 * 2^23: its sum with a small value has the nearest integer in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    let x = if x < -87.0 { -87.0 } else { x };
    let x = if x > 88.0 { 88.0 } else { x };
    let shifted = fma::<S>(x, std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    // Cody-Waite reduction: ln 2 in two parts, the first short enough that `n` times it is exact.
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

/// `log(1 + t)` for `t` in 0..=1, by the series of `2 atanh(t / (t + 2))`.
#[inline(always)]
fn ln_1p<S: Simd>(t: f32) -> f32 {
    let s = t / (t + 2.0);
    let z = s * s;
    let mut sum = 1.0 / 13.0;
    for divisor in [11.0, 9.0, 7.0, 5.0, 3.0] {
        sum = fma::<S>(sum, z, 1.0 / divisor);
    }
    2.0 * fma::<S>(sum, z * s, s)
}

/// `out = exp(log_decay(a + bias))`; `rate` is `exp(a_log)`.
#[inline(always)]
pub(super) fn decays<S: Simd>(
    a: &[f32],
    bias: &[f32],
    rate: f32,
    function: LogDecay,
    out: &mut [f32],
) {
    let inputs = out.iter_mut().zip(a.iter().zip(bias).map(|(a, bias)| a + bias));
    match function {
        LogDecay::Softplus => inputs.for_each(|(out, x)| {
            let above = if x > 0.0 { x } else { 0.0 };
            let softplus = above + ln_1p::<S>(exp::<S>(-x.abs()));
            *out = exp::<S>(-rate * softplus);
        }),
        LogDecay::Bounded { bound } => inputs.for_each(|(out, x)| {
            *out = exp::<S>(bound * sigmoid::<S>(rate * x));
        }),
    }
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

/// Slope of erfcx's argument in [`erfcx`].
const ERFCX_SLOPE: f32 = 0.4;

/// `exp(x^2) erfc(x)` for `x >= 0`, to 4e-7 of it: `t P(2 t - 1)` with `t = 1 / (1 + 0.4 x)`, where
/// `P` interpolates at the Chebyshev nodes of degree 8.
#[inline(always)]
fn erfcx<S: Simd>(x: f32) -> f32 {
    let t = 1.0 / fma::<S>(ERFCX_SLOPE, x, 1.0);
    let u = fma::<S>(2.0, t, -1.0);
    let mut sum = 2.005_722e-4;
    for c in [
        1.410_971_5e-4,
        -1.871_655_5e-3,
        -3.334_728e-3,
        1.132_961_9e-2,
        6.849_458e-2,
        1.815_667_6e-1,
        3.218_611_8e-1,
        4.216_127_4e-1,
    ] {
        sum = fma::<S>(sum, u, c);
    }
    sum * t
}

/// `x P(X <= x)` for a standard normal `X`, as `max(x, 0) - |x| P(X <= -|x|)`: far below zero the
/// difference of 1 and erf would lose all digits.
#[inline(always)]
fn gelu<S: Simd>(x: f32) -> f32 {
    // The tail is zero long before the bound, which keeps infinity from a product with zero.
    let (positive, size) = (if x > 0.0 { x } else { 0.0 }, x.abs().min(64.0));
    let tail = exp::<S>(-0.5 * x * x) * erfcx::<S>(size * std::f32::consts::FRAC_1_SQRT_2);
    fma::<S>(-0.5 * size, tail, positive)
}

/// `y = activation(y)`, for an activation without a gate.
#[inline(always)]
pub(super) fn activate_up<S: Simd>(activation: Activation, y: &mut [f32]) {
    // 2 sqrt(2 / pi): (1 + tanh(x)) / 2 is sigmoid(2 x).
    const FACTOR: f32 = 1.595_769;
    match activation {
        // `max` would drop a NaN.
        Activation::Relu2 => y.iter_mut().for_each(|y| {
            let positive = y.clamp(0.0, f32::INFINITY);
            *y = positive * positive;
        }),
        Activation::Gelu => y.iter_mut().for_each(|y| *y = gelu::<S>(*y)),
        Activation::GeluTanh => y.iter_mut().for_each(|y| {
            *y *= sigmoid::<S>(FACTOR * (*y + 0.044_715 * *y * *y * *y));
        }),
        Activation::QuickGelu => y.iter_mut().for_each(|y| *y *= sigmoid::<S>(1.702 * *y)),
        Activation::SwiGlu
        | Activation::GeGlu
        | Activation::ClampedSwiGlu { .. }
        | Activation::ClippedSwiGlu { .. }
        | Activation::LimitedSwiGlu { .. } => {}
    }
}

/// `y = y * sigmoid(x)`
#[inline(always)]
pub(super) fn mul_sigmoid<S: Simd>(y: &mut [f32], x: &[f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y *= sigmoid::<S>(*x);
    }
}

/// `x = exp(x - max)`; returns the sum of `x`.
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

/// Maximum; NaN is ignored.
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

/// Depthwise causal convolution of four taps: `out[c] = sum_j weight[c][j] * inputs[j][c]`.
#[inline(always)]
pub(super) fn conv4<S: Simd>(weight: &[f32], [a, b, c, d]: [&[f32]; 4], out: &mut [f32]) {
    let inputs = a.iter().zip(b).zip(c.iter().zip(d));
    for ((out, w), ((a, b), (c, d))) in out.iter_mut().zip(weight.as_chunks::<4>().0).zip(inputs) {
        *out = fma::<S>(w[3], *d, fma::<S>(w[2], *c, fma::<S>(w[1], *b, w[0] * a)));
    }
}
