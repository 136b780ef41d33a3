//! Gated delta rule: one step of the recurrent state of a linear-attention head.

use super::{
    gemm_f32::reduce_tile,
    vector::{MAX_LANES, Simd},
};

/// Factors of the gated delta rule for one row and head.
#[derive(Clone, Copy)]
pub(crate) struct DeltaRuleFactors<'a> {
    /// `1 / |q| / sqrt(key width)`
    pub(crate) q_scale: f32,
    /// `1 / |k|`
    pub(crate) k_scale: f32,
    /// Decay of all elements of the key, or of each.
    pub(crate) decay: &'a [f32],
    pub(crate) beta: f32,
}

/// One row of the gated delta rule on rows of a head's state `S`, one per value of `v` and `y`:
/// `d = beta (v - (decay S) k)`, `S = decay S + d k`, `y = S q`. Reads the state twice, writes it
/// once.
///
/// # Safety
/// The Simd contract; `k` and `q` have one length, and so has `d.decay` unless it has one element;
/// `state` has `v.len()` rows of that length, and `y` is as long as `v`.
#[inline(always)]
pub(super) unsafe fn delta_rule<S: Simd>(
    state: &mut [f32],
    k: &[f32],
    q: &[f32],
    v: &[f32],
    y: &mut [f32],
    d: DeltaRuleFactors<'_>,
) {
    /// `R` rows of the state, with a decay for each element of the key or for all.
    #[inline(always)]
    unsafe fn part<S: Simd, const R: usize, const EACH: bool>(
        state: &mut [f32],
        [k, q]: [&[f32]; 2],
        v: &[f32],
        y: &mut [f32],
        d: DeltaRuleFactors<'_>,
    ) {
        let width = k.len();
        let vectors = || (0..width).step_by(S::LANES).map(|i| (i, S::LANES.min(width - i)));
        // SAFETY: as `delta_rule`: the state has `R` rows as long as `k` and `q`, and so is the
        // decay if each element has one.
        unsafe {
            let shared = S::splat(d.decay[0]);
            let decay_at = |i: usize, n: usize| match EACH {
                true => S::load_partial(d.decay.as_ptr().add(i), n),
                false => shared,
            };
            let (mut recalled, mut read) = ([[S::zero(); 1]; R], [[S::zero(); 1]; R]);
            for (i, n) in vectors() {
                let k = S::load_partial(k.as_ptr().add(i), n);
                let decay = decay_at(i, n);
                for (r, [recalled]) in recalled.iter_mut().enumerate() {
                    let s = S::mul(S::load_partial(state.as_ptr().add(r * width + i), n), decay);
                    *recalled = S::fma(s, k, *recalled);
                }
            }
            let recalled = reduce_tile::<S, R, 1>(&recalled);
            let mut add = [S::zero(); R];
            for r in 0..R {
                add[r] = S::splat(d.beta * (v[r] - recalled[r][0] * d.k_scale) * d.k_scale);
            }
            for (i, n) in vectors() {
                let k = S::load_partial(k.as_ptr().add(i), n);
                let q = S::load_partial(q.as_ptr().add(i), n);
                let decay = decay_at(i, n);
                for r in 0..R {
                    let dst = state.as_mut_ptr().add(r * width + i);
                    let s = S::fma(add[r], k, S::mul(S::load_partial(dst, n), decay));
                    read[r][0] = S::fma(s, q, read[r][0]);
                    if n == S::LANES {
                        S::store(dst, s);
                    } else {
                        let mut rest = [0.0; MAX_LANES];
                        S::store(rest.as_mut_ptr(), s);
                        std::ptr::copy_nonoverlapping(rest.as_ptr(), dst, n);
                    }
                }
            }
            let read = reduce_tile::<S, R, 1>(&read);
            for r in 0..R {
                y[r] = read[r][0] * d.q_scale;
            }
        }
    }
    /// All rows.
    #[inline(always)]
    unsafe fn all<S: Simd, const EACH: bool>(
        state: &mut [f32],
        kq: [&[f32]; 2],
        v: &[f32],
        y: &mut [f32],
        d: DeltaRuleFactors<'_>,
    ) {
        let (width, fours) = (kq[0].len(), v.len() / 4 * 4);
        // SAFETY: as `delta_rule`.
        unsafe {
            for i in (0..fours).step_by(4) {
                let state = &mut state[i * width..(i + 4) * width];
                part::<S, 4, EACH>(state, kq, &v[i..i + 4], &mut y[i..i + 4], d);
            }
            for i in fours..v.len() {
                let state = &mut state[i * width..(i + 1) * width];
                part::<S, 1, EACH>(state, kq, &v[i..=i], &mut y[i..=i], d);
            }
        }
    }
    // SAFETY: as this function.
    unsafe {
        match d.decay.len() {
            1 => all::<S, false>(state, [k, q], v, y, d),
            _ => all::<S, true>(state, [k, q], v, y, d),
        }
    }
}
