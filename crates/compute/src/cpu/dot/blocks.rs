//! The algorithms for small floats with a scale per block, over the vectors of any instruction set, as in
//! [`algorithm`](super::algorithm).
#![allow(clippy::needless_range_loop, reason = "arrays of vectors are walked together, and without closures")]

use super::{
    algorithm::{FAR, Simd, TILE, reduce, rows_ahead},
    quants::E2m1,
};
use crate::{BlockScale, Element};

/// The scales of quants that stand for E2M1: `element * s = quant * s / 2 - 6 s`.
///
/// # Safety
/// Needs the instruction set; there are bytes for all scales.
#[inline(always)]
pub(super) unsafe fn e2m1_scales<S: Simd>(of: BlockScale, bytes: &[u8], scales: &mut [f32]) {
    /// With a type of scales that is known when this is compiled.
    #[inline(always)]
    fn each(bytes: &[u8], size: usize, scale: impl Fn(&[u8]) -> f32, scales: &mut [f32]) {
        for (bytes, half) in bytes.chunks_exact(size).zip(scales) {
            *half = 0.5 * scale(bytes);
        }
    }
    match of {
        BlockScale::E8M0 => each(bytes, 1, |b| BlockScale::E8M0.get(b, 0), scales),
        BlockScale::E4M3 => {
            let whole = scales.len() / S::LANES * S::LANES;
            for i in (0..whole).step_by(S::LANES) {
                // SAFETY: the caller's.
                unsafe {
                    let scale = S::load_e4m3(bytes.as_ptr().add(i));
                    S::store(scales.as_mut_ptr().add(i), S::mul(S::splat(0.5), scale));
                }
            }
            each(&bytes[whole..], 1, |b| BlockScale::E4M3.get(b, 0), &mut scales[whole..]);
        }
        of @ BlockScale::Plain(_) => each(bytes, of.bytes(), |b| of.get(b, 0), scales),
    }
}

/// How small floats lie in bytes.
pub(super) trait SmallFloat: Copy {
    const ELEMENT: Element;
    unsafe fn load<S: Simd>(p: *const u8) -> S::F;
}

#[derive(Clone, Copy)]
pub(super) struct E4m3;

impl SmallFloat for E4m3 {
    const ELEMENT: Element = Element::E4M3;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load_e4m3(p) }
    }
}
impl SmallFloat for E2m1 {
    const ELEMENT: Element = Element::E2M1;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load_e2m1(p) }
    }
}

/// A row of small floats with a scale per `block`.
#[derive(Clone, Copy)]
pub(crate) struct Blocks<'a> {
    pub(crate) elements: &'a [u8],
    pub(crate) scales: &'a [u8],
    pub(crate) scale: BlockScale,
    /// A whole number of bytes.
    pub(crate) block: usize,
}

/// Widens a row of small floats, rounded as the format says.
///
/// # Safety
/// There are elements for all of `out`.
#[inline(always)]
pub(super) unsafe fn widen_blocks<S: Simd, E: SmallFloat>(row: &Blocks<'_>, out: &mut [f32]) {
    let bits = E::ELEMENT.bits();
    for (i, out) in out.chunks_mut(row.block).enumerate() {
        let (first, scale) = (i * row.block, row.scale.get(row.scales, i));
        let whole = out.len() / S::LANES * S::LANES;
        // SAFETY: the caller's; a vector takes whole bytes.
        unsafe {
            let scale = S::splat(scale);
            for i in (0..whole).step_by(S::LANES) {
                let elements = E::load::<S>(row.elements.as_ptr().add((first + i) * bits / 8));
                S::store(out.as_mut_ptr().add(i), S::mul(elements, scale));
            }
        }
        for (i, out) in out.iter_mut().enumerate().skip(whole) {
            *out = E::ELEMENT.get(row.elements, first + i) * scale;
        }
    }
}

/// Products of `R` rows of small floats and a row of f32, to the bit those of [`numbers`] with the rows widened.
///
/// # Safety
/// The rows have as many elements as `x` has numbers; that number and the block are whole vectors.
#[inline(always)]
unsafe fn blocks<S: Simd, E: SmallFloat, const R: usize>(w: &[Blocks<'_>; R], x: &[f32]) -> [f32; R] {
    let bits = E::ELEMENT.bits();
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::zero()]; R];
        let bytes = x.len() * bits / 8;
        let ahead = rows_ahead(FAR, bytes, TILE) * bytes;
        for (i, x) in x.chunks(w[0].block).enumerate() {
            let first = i * w[0].block * bits / 8;
            let mut scales = [S::zero(); R];
            for r in 0..R {
                scales[r] = S::splat(w[r].scale.get(w[r].scales, i));
            }
            for i in (0..x.len()).step_by(S::LANES) {
                let x = S::load(x.as_ptr().add(i));
                for r in 0..R {
                    let at = w[r].elements.as_ptr().add(first + i * bits / 8);
                    S::prefetch(at.wrapping_add(ahead));
                    let elements = E::load::<S>(at);
                    acc[r][0] = S::fma(S::mul(elements, scales[r]), x, acc[r][0]);
                }
            }
        }
        reduce::<S, R, 1>(&acc).map(|[sum]| sum)
    }
}

/// The products of up to [`TILE`] rows of small floats and one of f32.
///
/// # Safety
/// As [`blocks`].
#[inline(always)]
pub(super) unsafe fn block_tile<S: Simd, E: SmallFloat>(w: &[Blocks<'_>], x: &[f32], sums: &mut [f32; TILE]) {
    // SAFETY: the caller's.
    unsafe {
        if let Ok(w) = w.try_into() {
            *sums = blocks::<S, E, TILE>(w, x);
            return;
        }
        for (w, sum) in w.iter().zip(sums) {
            [*sum] = blocks::<S, E, 1>(&[*w], x);
        }
    }
}
