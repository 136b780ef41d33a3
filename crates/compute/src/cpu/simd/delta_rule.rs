//! Gated delta rule: one step of the recurrent state of a linear-attention head.

use super::{
    gemm_f32::reduce_tile,
    vector::{MAX_LANES, Simd},
};

/// Scalars of the gated delta rule for one row and head.
#[derive(Clone, Copy)]
pub(crate) struct DeltaRuleScalars {
    /// `1 / |q| / sqrt(key width)`
    pub(crate) q_scale: f32,
    /// `1 / |k|`
    pub(crate) k_scale: f32,
    pub(crate) decay: f32,
    pub(crate) beta: f32,
}

/// One row of the gated delta rule on rows of a head's state `S`, one per value of `v` and `y`:
/// `d = beta (v - (decay S) k)`, `S = decay S + d k`, `y = S q`. Reads the state twice, writes it
/// once.
///
/// # Safety
/// The Simd contract; `k` and `q` have one length, `state` has `v.len()` rows of that length, and
/// `y` is as long as `v`.
#[inline(always)]
pub(super) unsafe fn delta_rule<S: Simd>(
    state: &mut [f32],
    k: &[f32],
    q: &[f32],
    v: &[f32],
    y: &mut [f32],
    d: DeltaRuleScalars,
) {
    /// `R` rows of the state.
    #[inline(always)]
    unsafe fn part<S: Simd, const R: usize>(
        state: &mut [f32],
        [k, q]: [&[f32]; 2],
        v: &[f32],
        y: &mut [f32],
        d: DeltaRuleScalars,
    ) {
        let width = k.len();
        let vectors = || (0..width).step_by(S::LANES).map(|i| (i, S::LANES.min(width - i)));
        // SAFETY: as `delta_rule`: the state has `R` rows as long as `k` and `q`.
        unsafe {
            let decay = S::splat(d.decay);
            let (mut recalled, mut read) = ([[S::zero(); 1]; R], [[S::zero(); 1]; R]);
            for (i, n) in vectors() {
                let k = S::load_partial(k.as_ptr().add(i), n);
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
    let (width, fours) = (k.len(), v.len() / 4 * 4);
    // SAFETY: as this function.
    unsafe {
        for i in (0..fours).step_by(4) {
            let state = &mut state[i * width..(i + 4) * width];
            part::<S, 4>(state, [k, q], &v[i..i + 4], &mut y[i..i + 4], d);
        }
        for i in fours..v.len() {
            let state = &mut state[i * width..(i + 1) * width];
            part::<S, 1>(state, [k, q], &v[i..=i], &mut y[i..=i], d);
        }
    }
}
