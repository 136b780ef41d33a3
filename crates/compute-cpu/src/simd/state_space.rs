//! State-space recurrence of Mamba-2: one step of the state of a head.

use super::{
    gemm_f32::reduce_tile,
    vector::{MAX_LANES, Simd},
};

/// Factors of the recurrence for one row and head.
#[derive(Clone, Copy)]
pub(crate) struct StateSpaceFactors {
    pub(crate) decay: f32,
    /// Time step: factor of the input.
    pub(crate) step: f32,
    /// Factor of the input in the output.
    pub(crate) skip: f32,
}

/// One row of the recurrence on rows of a head's state `S`, one per value of `x` and `y`:
/// `S = decay S + step x b`, `y = S c + skip x`. Reads and writes the state once.
///
/// # Safety
/// The Simd contract; `b` and `c` have one length; `state` has `x.len()` rows of that length, and
/// `y` is as long as `x`.
#[inline(always)]
pub(super) unsafe fn state_space<S: Simd>(
    state: &mut [f32],
    b: &[f32],
    c: &[f32],
    x: &[f32],
    y: &mut [f32],
    f: StateSpaceFactors,
) {
    /// `R` rows of the state.
    #[inline(always)]
    unsafe fn part<S: Simd, const R: usize>(
        state: &mut [f32],
        [b, c]: [&[f32]; 2],
        x: &[f32],
        y: &mut [f32],
        f: StateSpaceFactors,
    ) {
        let width = b.len();
        // SAFETY: as `state_space`: the state has `R` rows as long as `b` and `c`.
        unsafe {
            let decay = S::splat(f.decay);
            let mut sums = [[S::zero(); 1]; R];
            for i in (0..width).step_by(S::LANES) {
                let n = S::LANES.min(width - i);
                let b = S::load_partial(b.as_ptr().add(i), n);
                let c = S::load_partial(c.as_ptr().add(i), n);
                for (r, [sum]) in sums.iter_mut().enumerate() {
                    let dst = state.as_mut_ptr().add(r * width + i);
                    let old = S::mul(S::load_partial(dst, n), decay);
                    let s = S::fma(S::splat(f.step * x[r]), b, old);
                    *sum = S::fma(s, c, *sum);
                    if n == S::LANES {
                        S::store(dst, s);
                    } else {
                        let mut rest = [0.0; MAX_LANES];
                        S::store(rest.as_mut_ptr(), s);
                        std::ptr::copy_nonoverlapping(rest.as_ptr(), dst, n);
                    }
                }
            }
            let sums = reduce_tile::<S, R, 1>(&sums);
            for r in 0..R {
                y[r] = sums[r][0] + f.skip * x[r];
            }
        }
    }
    let (width, fours) = (b.len(), x.len() / 4 * 4);
    // SAFETY: as this function.
    unsafe {
        for i in (0..fours).step_by(4) {
            let state = &mut state[i * width..(i + 4) * width];
            part::<S, 4>(state, [b, c], &x[i..i + 4], &mut y[i..i + 4], f);
        }
        for i in fours..x.len() {
            let state = &mut state[i * width..(i + 1) * width];
            part::<S, 1>(state, [b, c], &x[i..=i], &mut y[i..=i], f);
        }
    }
}
