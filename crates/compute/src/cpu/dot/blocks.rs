//! The algorithms for small floats with a scale per block, over the vectors of any instruction set, as in
//! [`algorithm`](super::algorithm).
#![allow(clippy::needless_range_loop, reason = "arrays of vectors are walked together, and without closures")]

use super::{
    algorithm::{FAR, Simd, Sums, TILE, reduce, rows_ahead},
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

/// Most rows of f32 that meet small floats where these are widened: for more it pays to write widened rows to memory.
pub(super) const MOST_ROWS: usize = 2;

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

/// Products of `R` rows of small floats and `X` rows of f32, to the bit those of [`numbers`] with the rows widened.
///
/// # Safety
/// The rows have as many elements as those of `x` have numbers; that number and the block are whole vectors.
///
/// [`numbers`]: super::algorithm::numbers
#[inline(always)]
unsafe fn blocks<S: Simd, E: SmallFloat, const R: usize, const X: usize>(
    w: &[Blocks<'_>; R],
    x: &[&[f32]; X],
) -> [[f32; X]; R] {
    let (bits, block, cols) = (E::ELEMENT.bits(), w[0].block, x[0].len());
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::zero(); X]; R];
        let bytes = cols * bits / 8;
        let ahead = rows_ahead(FAR, bytes, TILE) * bytes;
        for (i, first) in (0..cols).step_by(block).enumerate() {
            let mut scales = [S::zero(); R];
            for r in 0..R {
                scales[r] = S::splat(w[r].scale.get(w[r].scales, i));
            }
            for i in (first..cols.min(first + block)).step_by(S::LANES) {
                let xs = x.map(|x| S::load(x.as_ptr().add(i)));
                for r in 0..R {
                    let at = w[r].elements.as_ptr().add(i * bits / 8);
                    S::prefetch(at.wrapping_add(ahead));
                    let number = S::mul(E::load::<S>(at), scales[r]);
                    for c in 0..X {
                        acc[r][c] = S::fma(number, xs[c], acc[r][c]);
                    }
                }
            }
        }
        reduce::<S, R, X>(&acc)
    }
}

/// The products of up to [`TILE`] rows of small floats and of f32 each: `sums[weight row][row of x]`.
///
/// # Safety
/// As [`blocks`].
#[inline(always)]
pub(super) unsafe fn block_tile<S: Simd, E: SmallFloat>(w: &[Blocks<'_>], x: &[&[f32]], sums: &mut Sums) {
    /// With `X` rows of f32, of which the first is number `at`; returns how many that were.
    #[inline(always)]
    unsafe fn part<S: Simd, E: SmallFloat, const X: usize>(
        w: &[Blocks<'_>],
        x: &[&[f32]; X],
        at: usize,
        sums: &mut Sums,
    ) -> usize {
        // SAFETY: the caller's.
        unsafe {
            if let Ok(w) = w.try_into() {
                let tile = blocks::<S, E, TILE, X>(w, x);
                sums.iter_mut().zip(tile).for_each(|(to, from)| to[at..at + X].copy_from_slice(&from));
                return X;
            }
            for (w, to) in w.iter().zip(sums) {
                let [from] = blocks::<S, E, 1, X>(&[*w], x);
                to[at..at + X].copy_from_slice(&from);
            }
        }
        X
    }
    let mut at = 0;
    while at < x.len() {
        let rest = &x[at..];
        // SAFETY: the caller's.
        at += unsafe {
            match rest.first_chunk::<MOST_ROWS>() {
                Some(x) => part::<S, E, MOST_ROWS>(w, x, at, sums),
                None => part::<S, E, 1>(w, &[rest[0]], at, sums),
            }
        };
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{Isa, Kernels},
        *,
    };
    use crate::Scalar;

    #[test]
    fn every_small_float_is_widened_to_itself() {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        for (isa, element) in
            Isa::available().into_iter().flat_map(|isa| [Element::E4M3, Element::E2M1].map(|e| (isa, e)))
        {
            let count = bytes.len() * 8 / element.bits();
            let (mut wide, one) = (vec![0.0; count], 1f32.to_le_bytes());
            let scale = BlockScale::Plain(Scalar::F32);
            let row = Blocks { elements: &bytes, scales: &one, scale, block: count };
            Kernels::new(isa).unwrap().widen_blocks(element, &row, &mut wide);
            for (i, ours) in wide.into_iter().enumerate() {
                let exact = element.get(&bytes, i);
                assert!(ours.to_bits() == exact.to_bits() || ours.is_nan() && exact.is_nan(), "{isa}, {i}");
            }
        }
    }
}
