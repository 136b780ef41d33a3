//! Quants: how they are packed and widened, and how activations that meet them are rounded to 8 bits, over the vectors of any
//! instruction set, as in [`algorithm`](super::algorithm).
//!
//! Where several quants share a byte, a vector of packed bytes becomes as many vectors as a byte has quants: the first
//! has the first quant of every byte, and so on. That takes a shift and a mask instead of a permutation. The activations
//! lie in the same order by fours, which costs nothing, as they are rounded once and meet many rows.
//!
//! Few rows of activations meet rows of weights as they are packed ([`few`](super::few)); more rows meet tiles that are
//! unpacked once ([`columns`](super::columns)).
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are walked together, and without closures"
)]

use super::algorithm::{GROUP, MAX_UNIT, NEAR, Simd, Sums, TILE, reduce, rows_ahead};

/// Most vectors that a block is unpacked to.
pub(super) const KV_SPLITS: usize = 4;

/// The quants of a row, whole numbers without a sign, by how they are packed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Quant {
    /// So many bits each.
    Bits(u8),
    /// E2M1. Twice an element is a whole number of at most twelve; a quant is twelve more.
    E2M1,
}

impl Quant {
    /// Bits of one, packed.
    pub(crate) const fn bits(self) -> usize {
        match self {
            Quant::Bits(bits) => bits as usize,
            Quant::E2M1 => 4,
        }
    }
}

/// How quants are packed.
pub(super) trait Packing: Copy {
    /// Bits of a packed quant. With less than eight, a quant is less than 64, and less than 32 with four or less.
    const BITS: usize;
    /// Fewest inputs that share a scale.
    const MIN_GROUP: usize;
    /// From the bits of a quant, that in every byte of a vector.
    unsafe fn quants<S: Simd>(x: S::D) -> S::D;
}

/// The quants that stand for each number of E2M1.
pub(super) const E2M1_QUANTS: [u8; 16] =
    [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
/// What the bias of quants that stand for E2M1 is of their scale: they are twelve more than twice their element.
pub(super) const E2M1_BIAS: f32 = -12.0;

#[derive(Clone, Copy)]
pub(super) struct Bits<const BITS: usize>;
#[derive(Clone, Copy)]
pub(super) struct E2m1;

impl<const BITS: usize> Packing for Bits<BITS> {
    const BITS: usize = BITS;
    const MIN_GROUP: usize = 32;
    #[inline(always)]
    unsafe fn quants<S: Simd>(x: S::D) -> S::D {
        x
    }
}
impl Packing for E2m1 {
    const BITS: usize = 4;
    const MIN_GROUP: usize = 16;
    #[inline(always)]
    unsafe fn quants<S: Simd>(x: S::D) -> S::D {
        // SAFETY: the caller's; what is unpacked has four bits.
        unsafe { S::e2m1_quants(x) }
    }
}

/// Vectors that a vector of packed quants of so many bits becomes; one if quants do not share bytes evenly.
pub(super) const fn parts(bits: usize) -> usize {
    match bits {
        2 | 4 => 8 / bits,
        _ => 1,
    }
}

/// The end of a row, too short to be read as a unit: a copy with zeros behind.
///
/// # Safety
/// `len` bytes can be read.
#[inline(always)]
unsafe fn end_of_row(from: *const u8, len: usize) -> [u8; MAX_UNIT] {
    let mut buffer = [0; MAX_UNIT];
    // SAFETY: the caller's; no unit reaches over more than MAX_UNIT bytes.
    unsafe { std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), len.min(MAX_UNIT)) };
    buffer
}

/// Unpacks the unit that begins at byte `at` of a row, for [`MAX_UNIT`] bytes.
///
/// # Safety
/// Needs the instruction set; `at` lies in the row.
#[inline(always)]
unsafe fn unpack_unit<S: Simd, const BITS: usize>(row: &[u8], at: usize, to: *mut u8) {
    // SAFETY: the caller's; a unit is read up to the end of the row only.
    unsafe {
        let from = row.as_ptr().add(at);
        let unit = if at + S::reach(BITS) <= row.len() {
            S::unpack::<BITS>(from)
        } else {
            S::unpack::<BITS>(end_of_row(from, row.len() - at).as_ptr())
        };
        S::store_bytes(to, unit);
    }
}

/// A row of packed quants and what they are scaled by, one of each per group.
#[derive(Clone, Copy)]
pub(super) struct AffineRow<'a> {
    pub(super) q: &'a [u8],
    pub(super) scales: &'a [f32],
    pub(super) biases: &'a [f32],
}

/// The products of [`TILE`] rows of quants of `bits` bits in groups of `group` and up to as many rows of f32, to the bit those of
/// [`number_tile`](super::algorithm::number_tile) with the rows of quants widened.
///
/// # Safety
/// Needs the instruction set; the rows have as many quants as those of `x` numbers, whole groups, which are whole vectors.
#[inline(always)]
pub(super) unsafe fn affine_tile<S: Simd>(
    w: &[AffineRow<'_>; TILE],
    (bits, group): (usize, usize),
    x: &[&[f32]],
    sums: &mut Sums,
) {
    /// With `X` rows of f32; returns how many that were.
    #[inline(always)]
    unsafe fn part<S: Simd, const X: usize>(
        w: &[AffineRow<'_>; TILE],
        (bits, group): (usize, usize),
        x: &[&[f32]; X],
        mut write: impl FnMut(usize, [f32; X]),
    ) -> usize {
        let (cols, shift) = (x[0].len(), group.trailing_zeros());
        let mut unit = [0u8; MAX_UNIT];
        // SAFETY: the caller's; an array holds a unit.
        unsafe {
            let mut acc = [[S::zero(); X]; TILE];
            let bytes = cols * bits / 8;
            let ahead = rows_ahead(NEAR, bytes, TILE) * bytes;
            for first in (0..cols).step_by(S::UNIT) {
                for r in 0..TILE {
                    let (at, to) = (first * bits / 8, unit.as_mut_ptr());
                    S::prefetch_near(w[r].q.as_ptr().wrapping_add(at + ahead));
                    match bits {
                        2 => unpack_unit::<S, 2>(w[r].q, at, to),
                        3 => unpack_unit::<S, 3>(w[r].q, at, to),
                        4 => unpack_unit::<S, 4>(w[r].q, at, to),
                        5 => unpack_unit::<S, 5>(w[r].q, at, to),
                        6 => unpack_unit::<S, 6>(w[r].q, at, to),
                        _ => unpack_unit::<S, 8>(w[r].q, at, to),
                    }
                    for i in (0..S::UNIT.min(cols - first)).step_by(S::LANES) {
                        let g = (first + i) >> shift;
                        let scale = S::splat(*w[r].scales.as_ptr().add(g));
                        let bias = S::splat(*w[r].biases.as_ptr().add(g));
                        let scaled = S::mul(scale, S::load_bytes(unit.as_ptr().add(i)));
                        let weight = S::fma(S::splat(1.0), scaled, bias);
                        for c in 0..X {
                            acc[r][c] =
                                S::fma(weight, S::load(x[c].as_ptr().add(first + i)), acc[r][c]);
                        }
                    }
                }
            }
            reduce::<S, TILE, X>(&acc).into_iter().enumerate().for_each(|(r, sums)| write(r, sums));
        }
        X
    }
    let mut at = 0;
    while at < x.len() {
        // SAFETY: the caller's.
        at += unsafe {
            match (x[at..].first_chunk::<4>(), x[at..].first_chunk::<2>()) {
                (Some(x), _) => part::<S, 4>(w, (bits, group), x, |r, of| {
                    sums[r][at..at + 4].copy_from_slice(&of)
                }),
                (_, Some(x)) => part::<S, 2>(w, (bits, group), x, |r, of| {
                    sums[r][at..at + 2].copy_from_slice(&of)
                }),
                _ => part::<S, 1>(w, (bits, group), &[x[at]], |r, [of]| sums[r][at] = of),
            }
        };
    }
}

/// Widens a row of packed quants: `out = scale * q + bias`, rounded twice as the format says.
///
/// # Safety
/// The row has a quant for every number of `out`, whole units of [`GROUP`]; scales and biases are one per `group`, a
/// power of two.
#[inline(always)]
pub(super) unsafe fn widen_quants<S: Simd, const BITS: usize>(
    row: &[u8],
    (scales, biases): (&[f32], &[f32]),
    group: usize,
    out: &mut [f32],
) {
    let (unit_bytes, per_group) = (S::UNIT * BITS / 8, (group / GROUP).trailing_zeros());
    let mut quants = [0u8; MAX_UNIT];
    for (u, out) in out.chunks_mut(S::UNIT).enumerate() {
        // SAFETY: the caller's; an array holds a unit.
        unsafe { unpack_unit::<S, BITS>(row, u * unit_bytes, quants.as_mut_ptr()) };
        let groups = out.as_chunks_mut::<GROUP>().0.iter_mut().zip(quants.as_chunks::<GROUP>().0);
        for (i, (out, quants)) in groups.enumerate() {
            let at = (u * S::UNIT / GROUP + i) >> per_group;
            let (scale, bias) = (scales[at], biases[at]);
            for (out, q) in out.iter_mut().zip(quants) {
                *out = scale * f32::from(*q) + bias;
            }
        }
    }
}

/// Rounds a row to 8 bits, for weights of `bits` bits in groups of `group`: `q` by fours in the order in which
/// they meet unpacked quants, a scale per [`GROUP`], and per `group` the sum of what the rounded numbers stand for. A NaN
/// or an infinity makes its scale one. What is behind the row in `q` is zero, and whole blocks of any instruction set
/// are there.
///
/// # Safety
/// Needs the instruction set.
#[inline(always)]
pub(super) unsafe fn quantize<S: Simd>(
    x: &[f32],
    (bits, group): (usize, usize),
    q: &mut [i8],
    scales: &mut [f32],
    sums: &mut [f32],
) {
    sums.fill(0.0);
    let of_groups =
        x.chunks(group).zip(q.chunks_mut(group)).zip(scales.chunks_mut(group / GROUP)).zip(sums);
    for (((x, q), scales), sum) in of_groups {
        let parts = x.as_chunks::<GROUP>().0.iter().zip(q.as_chunks_mut::<GROUP>().0).zip(scales);
        for ((x, q), scale) in parts {
            // SAFETY: the caller's.
            let max = unsafe { S::largest_size(x) };
            let inverse = if max > 1e-30 { 127.0 / max } else { 0.0 };
            *scale = max / 127.0;
            // SAFETY: the caller's.
            *sum += *scale * unsafe { S::round(x, inverse, q) } as f32;
        }
    }
    match parts(bits) {
        2 => q.as_chunks_mut().0.iter_mut().for_each(split2),
        4 => q.as_chunks_mut().0.iter_mut().for_each(split4),
        _ => {}
    }
}

/// Brings each eight numbers, fours for each of two vectors, into the order in which they meet those.
#[inline(always)]
fn split2(q: &mut [i8; 8]) {
    // Two numbers beside each other move together, then four: whole words, which vectors hold many of.
    let gather = |x: u64| {
        let x = x & 0x00ff_00ff_00ff_00ff;
        let x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
        (x | x >> 16) & 0xffff_ffff
    };
    let x = u64::from_le_bytes(q.map(|q| q as u8));
    *q = (gather(x) | gather(x >> 8) << 32).to_le_bytes().map(|q| q as i8);
}

/// As [`split2`], sixteen for four vectors.
#[inline(always)]
fn split4(q: &mut [i8; 16]) {
    let from = *q;
    *q = std::array::from_fn(|i| from[i % 4 * 4 + i / 4]);
}
