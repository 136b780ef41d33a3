//! The algorithms for small floats with a scale per block, over the vectors of any instruction set, as in
//! [`algorithm`](super::algorithm).
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are walked together, and without closures"
)]

use super::{
    algorithm::{FAR, LINE, MAX_LANES, NEAR, Simd, Sums, TILE, reduce, rows_ahead},
    quants::E2m1,
};
use crate::{BlockScale, Element, Scalar};

/// Scales times a power of two.
///
/// # Safety
/// Needs the instruction set; there are bytes for all scales.
#[inline(always)]
pub(super) unsafe fn scaled<S: Simd>(of: BlockScale, bytes: &[u8], times: f32, scales: &mut [f32]) {
    /// With a type of scales that is known when this is compiled.
    #[inline(always)]
    fn each(
        bytes: &[u8],
        size: usize,
        times: f32,
        scale: impl Fn(&[u8]) -> f32,
        scales: &mut [f32],
    ) {
        for (bytes, to) in bytes.chunks_exact(size).zip(scales) {
            *to = times * scale(bytes);
        }
    }
    match of {
        BlockScale::E8M0 => each(bytes, 1, times, |b| BlockScale::E8M0.get(b, 0), scales),
        BlockScale::E4M3 => {
            let whole = scales.len() / S::LANES * S::LANES;
            for i in (0..whole).step_by(S::LANES) {
                // SAFETY: the caller's.
                unsafe {
                    let scale = S::load_e4m3(bytes.as_ptr().add(i));
                    S::store(scales.as_mut_ptr().add(i), S::mul(S::splat(times), scale));
                }
            }
            each(&bytes[whole..], 1, times, |b| BlockScale::E4M3.get(b, 0), &mut scales[whole..]);
        }
        BlockScale::Plain(Scalar::F32) => each(bytes, 4, times, |b| Scalar::F32.get(b, 0), scales),
        BlockScale::Plain(Scalar::F16) => each(bytes, 2, times, |b| Scalar::F16.get(b, 0), scales),
        BlockScale::Plain(Scalar::BF16) => {
            each(bytes, 2, times, |b| Scalar::BF16.get(b, 0), scales)
        }
    }
}

/// Blocks of a row whose scales are kept as f32 at a time.
const SECTION: usize = 16;

/// How small floats lie in bytes.
pub(super) trait SmallFloat: Copy {
    const ELEMENT: Element;
    unsafe fn load<S: Simd>(p: *const u8) -> S::F;
    /// Whether `load_line` is less work than `load`.
    #[inline(always)]
    fn in_lines<S: Simd>() -> bool {
        false
    }
    /// The elements of a line; only where `in_lines` says so.
    #[inline(always)]
    unsafe fn load_line<S: Simd>(_p: *const u8) -> [S::F; 4] {
        // SAFETY: the caller's.
        unsafe { [S::zero(); 4] }
    }
    /// How many times smaller `load_bits` is.
    #[inline(always)]
    fn factor<S: Simd>() -> f32 {
        1.0
    }
    /// As `load`; where it is smaller, what is no number is larger than all numbers.
    #[inline(always)]
    unsafe fn load_bits<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's.
        unsafe { Self::load::<S>(p) }
    }
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
    #[inline(always)]
    fn in_lines<S: Simd>() -> bool {
        S::E4M3_LINES
    }
    #[inline(always)]
    unsafe fn load_line<S: Simd>(p: *const u8) -> [S::F; 4] {
        // SAFETY: the caller's.
        unsafe { S::load_e4m3_line(p) }
    }
    #[inline(always)]
    fn factor<S: Simd>() -> f32 {
        S::E4M3_FACTOR
    }
    #[inline(always)]
    unsafe fn load_bits<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load_e4m3_bits(p) }
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

impl Blocks<'_> {
    /// Whether it has elements for `cols` columns, and their scales.
    pub(super) fn has(&self, element: Element, cols: usize) -> bool {
        self.block > 0
            && self.elements.len() * 8 >= cols * element.bits()
            && self.scales.len() >= cols.div_ceil(self.block) * self.scale.bytes()
    }
}

/// Widens a row of small floats, rounded as the format says.
///
/// # Safety
/// There are elements for all of `out`, and scales.
#[inline(always)]
pub(super) unsafe fn widen_blocks<S: Simd, E: SmallFloat>(row: &Blocks<'_>, out: &mut [f32]) {
    let bits = E::ELEMENT.bits();
    let mut numbers = [0.0; SECTION];
    for (section, out) in out.chunks_mut(row.block * SECTION).enumerate() {
        let first = section * SECTION;
        let numbers = &mut numbers[..out.len().div_ceil(row.block)];
        // SAFETY: the caller's.
        unsafe { scaled::<S>(row.scale, &row.scales[first * row.scale.bytes()..], 1.0, numbers) };
        for (i, (out, scale)) in out.chunks_mut(row.block).zip(numbers).enumerate() {
            let first = (first + i) * row.block;
            let whole = out.len() / S::LANES * S::LANES;
            // SAFETY: the caller's; a vector takes whole bytes.
            unsafe {
                let scale = S::splat(*scale);
                for i in (0..whole).step_by(S::LANES) {
                    let elements = E::load::<S>(row.elements.as_ptr().add((first + i) * bits / 8));
                    S::store(out.as_mut_ptr().add(i), S::mul(elements, scale));
                }
            }
            for (i, out) in out.iter_mut().enumerate().skip(whole) {
                *out = E::ELEMENT.get(row.elements, first + i) * *scale;
            }
        }
    }
}

/// Products of `R` rows of small floats and `X` rows of f32, to the bit those of [`numbers`] with the rows widened.
///
/// # Safety
/// The rows have as many elements as those of `x` have numbers, and their scales; that number and the block are whole vectors.
///
/// [`numbers`]: super::algorithm::numbers
#[inline(always)]
unsafe fn blocks<S: Simd, E: SmallFloat, const R: usize, const X: usize>(
    w: &[Blocks<'_>; R],
    x: &[&[f32]; X],
) -> [[f32; X]; R] {
    // SAFETY: the caller's.
    unsafe {
        let (block, cols) = (w[0].block, x[0].len());
        if E::in_lines::<S>()
            && block >= LINE / 2
            && block.is_power_of_two()
            && cols.is_multiple_of(LINE)
        {
            return lines::<S, E, R, X>(w, x);
        }
        if E::factor::<S>() != 1.0
            && let Some(products) = products::<S, E, R, X, true>(w, x)
        {
            return products;
        }
        products::<S, E, R, X, false>(w, x).unwrap_or([[f32::NAN; X]; R])
    }
}

/// [`blocks`] of whole lines, each of which has one scale or two.
#[inline(always)]
unsafe fn lines<S: Simd, E: SmallFloat, const R: usize, const X: usize>(
    w: &[Blocks<'_>; R],
    x: &[&[f32]; X],
) -> [[f32; X]; R] {
    let (cols, shift) = (x[0].len(), w[0].block.trailing_zeros());
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::zero(); X]; R];
        let mut numbers = [[0.0; SECTION]; R];
        let ahead = rows_ahead(NEAR, cols, TILE) * cols;
        for from in (0..cols).step_by(SECTION << shift) {
            let to = cols.min(from + (SECTION << shift));
            for r in 0..R {
                let bytes = &w[r].scales[(from >> shift) * w[r].scale.bytes()..];
                scaled::<S>(
                    w[r].scale,
                    bytes,
                    1.0,
                    &mut numbers[r][..(to - from).div_ceil(1 << shift)],
                );
            }
            for first in (from..to).step_by(LINE) {
                // The blocks of both halves.
                let halves =
                    [first - from, first - from + LINE / 2].map(|i| (i >> shift) % SECTION);
                for r in 0..R {
                    let at = w[r].elements.as_ptr().add(first);
                    S::prefetch_near(at.wrapping_add(ahead));
                    let elements = E::load_line::<S>(at);
                    let scales = [S::splat(numbers[r][halves[0]]), S::splat(numbers[r][halves[1]])];
                    for v in 0..elements.len() {
                        let i = first + v * S::LANES;
                        let number = S::mul(elements[v], scales[v / 2]);
                        for c in 0..X {
                            acc[r][c] = S::fma(number, S::load(x[c].as_ptr().add(i)), acc[r][c]);
                        }
                    }
                }
            }
        }
        reduce::<S, R, X>(&acc)
    }
}

/// [`blocks`]; `BITS`: by `load_bits`, whose factor the scales take in. `None` if that is not exact: where elements are no
/// numbers, and where scales are so large that they end with it.
#[inline(always)]
unsafe fn products<S: Simd, E: SmallFloat, const R: usize, const X: usize, const BITS: bool>(
    w: &[Blocks<'_>; R],
    x: &[&[f32]; X],
) -> Option<[[f32; X]; R]> {
    let (bits, block, cols) = (E::ELEMENT.bits(), w[0].block, x[0].len());
    let mut held = true;
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::zero(); X]; R];
        let mut most = [S::zero(); R];
        let mut numbers = [[0.0; SECTION]; R];
        let bytes = cols * bits / 8;
        let ahead = rows_ahead(FAR, bytes, TILE) * bytes;
        for (section, from) in (0..cols).step_by(block * SECTION).enumerate() {
            let to = cols.min(from + block * SECTION);
            for r in 0..R {
                let numbers = &mut numbers[r][..(to - from).div_ceil(block)];
                let bytes = &w[r].scales[section * SECTION * w[r].scale.bytes()..];
                scaled::<S>(w[r].scale, bytes, if BITS { E::factor::<S>() } else { 1.0 }, numbers);
                let most = numbers.iter().fold(0, |most, scale| scale.abs().to_bits().max(most));
                held &= !BITS || most < f32::INFINITY.to_bits();
            }
            for (block_of, first) in (from..to).step_by(block).enumerate() {
                let mut scales = [S::zero(); R];
                for r in 0..R {
                    scales[r] = S::splat(numbers[r][block_of]);
                }
                for i in (first..to.min(first + block)).step_by(S::LANES) {
                    let xs = x.map(|x| S::load(x.as_ptr().add(i)));
                    for r in 0..R {
                        let at = w[r].elements.as_ptr().add(i * bits / 8);
                        S::prefetch(at.wrapping_add(ahead));
                        let element = if BITS { E::load_bits::<S>(at) } else { E::load::<S>(at) };
                        if BITS {
                            most[r] = S::larger(most[r], element);
                        }
                        let number = S::mul(element, scales[r]);
                        for c in 0..X {
                            acc[r][c] = S::fma(number, xs[c], acc[r][c]);
                        }
                    }
                }
            }
        }
        if BITS {
            for r in 1..R {
                most[0] = S::larger(most[0], most[r]);
            }
            let mut sizes = [0.0; MAX_LANES];
            S::store(sizes.as_mut_ptr(), most[0]);
            let largest = sizes.into_iter().fold(0.0, f32::max);
            held &= largest * E::factor::<S>() <= 448.0;
        }
        held.then(|| reduce::<S, R, X>(&acc))
    }
}

/// [`block_tile`] of `X` rows of f32, of which the first is number `at`; returns how many that were.
///
/// # Safety
/// As [`blocks`].
#[inline(always)]
pub(super) unsafe fn part<S: Simd, E: SmallFloat, const X: usize>(
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

/// The products of up to [`TILE`] rows of small floats and of f32 each: `sums[weight row][row of x]`.
///
/// # Safety
/// As [`blocks`].
#[inline(always)]
pub(super) unsafe fn block_tile<S: Simd, E: SmallFloat>(
    w: &[Blocks<'_>],
    x: &[&[f32]],
    sums: &mut Sums,
) {
    let mut at = 0;
    while at < x.len() {
        let rest = &x[at..];
        // SAFETY: the caller's.
        at += unsafe {
            if let Ok(x) = rest.try_into() {
                part::<S, E, TILE>(w, x, at, sums)
            } else if let Some(x) = rest.first_chunk() {
                part::<S, E, 2>(w, x, at, sums)
            } else {
                part::<S, E, 1>(w, &[rest[0]], at, sums)
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

    #[test]
    fn every_small_float_is_widened_to_itself() {
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        for (isa, element) in Isa::available()
            .into_iter()
            .flat_map(|isa| [Element::E4M3, Element::E2M1].map(|e| (isa, e)))
        {
            let count = bytes.len() * 8 / element.bits();
            let (mut wide, one) = (vec![0.0; count], 1f32.to_le_bytes());
            let scale = BlockScale::Plain(Scalar::F32);
            let row = Blocks { elements: &bytes, scales: &one, scale, block: count };
            Kernels::new(isa).unwrap().widen_blocks(element, &row, &mut wide);
            for (i, ours) in wide.into_iter().enumerate() {
                let exact = element.get(&bytes, i);
                assert!(
                    ours.to_bits() == exact.to_bits() || ours.is_nan() && exact.is_nan(),
                    "{isa}, {i}"
                );
            }
        }
    }

    /// Also where elements are no numbers, and scales so large or small that no factor can be joined with them.
    #[test]
    fn products_are_those_of_widened_rows() {
        let (cols, block) = (192, 32);
        let x: Vec<Vec<f32>> = (0..TILE)
            .map(|r| (0..cols).map(|i| ((7 * i + 3 * r) % 23) as f32 / 8.0 - 1.3).collect())
            .collect();
        let x: Vec<&[f32]> = x.iter().map(Vec::as_slice).collect();
        let usual: Vec<u8> = (0..TILE * cols).map(|i| (i * 37 % 251) as u8 & 0xf7).collect();
        let mut no_number = usual.clone();
        no_number[2 * cols + 50] = 0xff;
        // The smallest elements, which a scale of 2^126 leaves finite.
        let small: Vec<u8> = usual.iter().map(|code| code & 0x83).collect();
        for (isa, (elements, scale)) in Isa::available().into_iter().flat_map(|isa| {
            [(&usual, 0.37), (&usual, -1e-39), (&no_number, 0.37), (&small, 2f32.powi(126))]
                .map(|of| (isa, of))
        }) {
            let kernels = Kernels::new(isa).unwrap();
            let scales: Vec<u8> =
                (1..=6u8).flat_map(|i| (scale / f32::from(i)).to_le_bytes()).collect();
            let scale_of = BlockScale::Plain(Scalar::F32);
            let rows: Vec<Blocks<'_>> = elements
                .chunks(cols)
                .map(|elements| Blocks { elements, scales: &scales, scale: scale_of, block })
                .collect();
            let wide: Vec<Vec<u8>> = rows
                .iter()
                .map(|row| {
                    let mut wide = vec![0.0; cols];
                    kernels.widen_blocks(Element::E4M3, row, &mut wide);
                    wide.iter().flat_map(|number: &f32| number.to_le_bytes()).collect()
                })
                .collect();
            let wide: Vec<&[u8]> = wide.iter().map(Vec::as_slice).collect();
            for (n, count) in [(1, 1), (4, 1), (3, 2), (4, 3), (4, 4)] {
                let (mut ours, mut expected) = (Sums::default(), Sums::default());
                kernels.blocks(Element::E4M3, &rows[..n], &x[..count], &mut ours);
                kernels.numbers(Scalar::F32, (&wide[..n], false), &x[..count], &mut expected);
                for (r, c) in (0..n).flat_map(|r| (0..count).map(move |c| (r, c))) {
                    let (ours, exact) = (ours[r][c], expected[r][c]);
                    let same = ours.to_bits() == exact.to_bits() || ours.is_nan() && exact.is_nan();
                    assert!(
                        same,
                        "{isa}, scale {scale:e}, row {r} of {n}, {c} of {count}: {ours} and {exact}"
                    );
                }
            }
        }
    }
}
