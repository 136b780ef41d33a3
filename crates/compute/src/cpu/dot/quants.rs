//! The algorithms for quants and activations rounded to 8 bits, over the vectors of any instruction set, as in
//! [`algorithm`](super::algorithm).
//!
//! Quants are read in blocks. Where several quants share a byte, a block is one vector of packed bytes and becomes as
//! many vectors as a byte has quants: the first vector has the first quant of every byte, and so on. That takes a
//! shift and a mask instead of a permutation; the activations lie in the same order, which costs nothing, as they are
//! rounded once and meet many rows.
#![allow(clippy::needless_range_loop, reason = "arrays of vectors are walked together, and without closures")]

use super::{
    algorithm::{Bf16, F16, F32, GROUP, MAX_UNIT, Simd, Sums, TILE, reduce, rows_ahead, widen},
    blocks::e2m1_scales,
};
use crate::{BlockScale, Scalar};

/// Most vectors that a block is unpacked to.
pub(super) const PARTS: usize = 4;
/// Bytes that the processor fetches at once.
const LINE: usize = 64;

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
    /// From the bits of a quant, that in every byte of a vector.
    unsafe fn quants<S: Simd>(x: S::B) -> S::B;
}

#[derive(Clone, Copy)]
pub(super) struct Bits<const BITS: usize>;
#[derive(Clone, Copy)]
pub(super) struct E2m1;

impl<const BITS: usize> Packing for Bits<BITS> {
    const BITS: usize = BITS;
    #[inline(always)]
    unsafe fn quants<S: Simd>(x: S::B) -> S::B {
        x
    }
}
impl Packing for E2m1 {
    const BITS: usize = 4;
    #[inline(always)]
    unsafe fn quants<S: Simd>(x: S::B) -> S::B {
        const QUANTS: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
        // SAFETY: the caller's; what is unpacked has four bits.
        unsafe { S::lookup(x, &QUANTS) }
    }
}

/// The blocks of a packing on an instruction set.
pub(super) struct Block<S, P>(S, P);

impl<S: Simd, P: Packing> Block<S, P> {
    /// Vectors that a block is unpacked to.
    pub(super) const PARTS: usize = parts::<S>(P::BITS);
    /// Quants of a block.
    const QUANTS: usize = Self::PARTS * S::UNIT;
    /// Bytes of a packed block.
    const BYTES: usize = Self::QUANTS * P::BITS / 8;

    /// Bytes that loading a packed block reads.
    fn reach() -> usize {
        if Self::PARTS > 1 { S::UNIT } else { S::reach(P::BITS) }
    }

    /// A packed block.
    #[inline(always)]
    unsafe fn load(p: *const u8) -> [S::B; PARTS] {
        // SAFETY: the caller's: `reach` bytes can be read.
        unsafe {
            if Self::PARTS == 1 {
                return [P::quants::<S>(packed::<S, P>(p)); PARTS];
            }
            let x = S::load_bytes(p);
            let mut parts = [P::quants::<S>(S::bits(x, 0, P::BITS)); PARTS];
            for i in 1..Self::PARTS {
                parts[i] = P::quants::<S>(S::bits(x, i * P::BITS, P::BITS));
            }
            parts
        }
    }

    /// The vectors of a block of bytes.
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> [S::B; PARTS] {
        // SAFETY: the caller's: `QUANTS` bytes can be read.
        unsafe {
            let mut parts = [S::load_bytes(p); PARTS];
            for i in 1..Self::PARTS {
                parts[i] = S::load_bytes(p.add(i * S::UNIT));
            }
            parts
        }
    }
}

/// Vectors that a block of quants of so many bits is unpacked to.
const fn parts<S: Simd>(bits: usize) -> usize {
    match bits {
        2 | 4 if S::SPLITS => 8 / bits,
        _ => 1,
    }
}

/// A unit of packed quants in order.
#[inline(always)]
unsafe fn packed<S: Simd, P: Packing>(p: *const u8) -> S::B {
    // SAFETY: the caller's.
    unsafe {
        match P::BITS {
            2 => S::unpack::<2>(p),
            3 => S::unpack::<3>(p),
            4 => S::unpack::<4>(p),
            5 => S::unpack::<5>(p),
            6 => S::unpack::<6>(p),
            _ => S::unpack::<8>(p),
        }
    }
}

/// The end of a row, too short to be read as a block: a copy with zeros behind.
///
/// # Safety
/// `len` bytes can be read.
#[inline(always)]
unsafe fn end_of_row(from: *const u8, len: usize) -> [u8; MAX_UNIT] {
    let mut buffer = [0; MAX_UNIT];
    // SAFETY: the caller's; no block reaches over more than MAX_UNIT bytes.
    unsafe { std::ptr::copy_nonoverlapping(from, buffer.as_mut_ptr(), len.min(MAX_UNIT)) };
    buffer
}

/// A row of quants as [`quants`] reads it.
#[derive(Clone, Copy)]
pub(super) struct QuantRow<'a> {
    /// Packed, or one byte each in the order of unpacked blocks, padded to whole blocks.
    pub(super) q: &'a [u8],
    /// One per group, as many as whole blocks have.
    pub(super) scales: &'a [f32],
    /// One per group.
    pub(super) biases: &'a [f32],
}

/// A row of activations that was rounded to 8 bits.
#[derive(Clone, Copy)]
pub(super) struct RoundedRow<'a> {
    /// In the order of unpacked blocks, padded with zeros to whole ones.
    pub(super) q: &'a [i8],
    /// One per [`GROUP`], padded with zeros to whole blocks.
    pub(super) scales: &'a [f32],
    /// One per group of the weights.
    pub(super) sums: &'a [f32],
}

impl RoundedRow<'_> {
    /// Whether there are `padded` numbers, their scales, and so many sums.
    pub(super) fn holds(&self, padded: usize, sums: usize) -> bool {
        self.q.len() >= padded && self.scales.len() >= padded / GROUP && self.sums.len() >= sums
    }
}

/// Inputs of a row and inputs that share a scale.
#[derive(Clone, Copy)]
pub(super) struct Groups {
    pub(super) cols: usize,
    pub(super) group: usize,
}

/// Products of `R` rows of quants and `X` rows of rounded activations:
/// `sum_g scale_w scale_x sum(q x) + sum_g bias_w sum(x)`. Packed rows are asked for `ahead` bytes early.
///
/// # Safety
/// The rows are as their types say, for `groups`.
#[inline(always)]
unsafe fn quants<S: Simd, P: Packing, const PACKED: bool, const R: usize, const X: usize>(
    w: &[QuantRow<'_>; R],
    x: &[RoundedRow<'_>; X],
    groups: Groups,
    ahead: usize,
) -> [[f32; X]; R] {
    let Groups { cols, group } = groups;
    let rows = BlockRows {
        q: w.map(|w| w.q.as_ptr()),
        scales: w.map(|w| w.scales.as_ptr()),
        x: x.map(|x| x.q.as_ptr()),
        x_scales: x.map(|x| x.scales.as_ptr()),
        bytes: cols * P::BITS / 8,
        count: cols.div_ceil(Block::<S, P>::QUANTS),
        per_group: (group / Block::<S, P>::QUANTS).max(1).trailing_zeros(),
        ahead,
    };
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::zero(); X]; R];
        let (per_row, whole) = (cols / group, cols / group / S::LANES * S::LANES);
        for i in (0..whole).step_by(S::LANES) {
            add_biases::<S, R, X>(&mut acc, w, x, (i, S::LANES));
        }
        if whole < per_row {
            add_biases::<S, R, X>(&mut acc, w, x, (whole, per_row - whole));
        }
        // Groups have 32 at least: what a block cannot have is not compiled.
        let scales = Block::<S, P>::QUANTS / group;
        if Block::<S, P>::QUANTS >= 8 * GROUP && scales == 8 {
            rows.add_all::<S, P, PACKED, 8>(&mut acc);
        } else if Block::<S, P>::QUANTS >= 4 * GROUP && scales == 4 {
            rows.add_all::<S, P, PACKED, 4>(&mut acc);
        } else if Block::<S, P>::QUANTS >= 2 * GROUP && scales == 2 {
            rows.add_all::<S, P, PACKED, 2>(&mut acc);
        } else {
            rows.add_all::<S, P, PACKED, 1>(&mut acc);
        }
        reduce::<S, R, X>(&acc)
    }
}

/// Adds the products of the `n` biases from number `i` on, a vector at most.
///
/// # Safety
/// There are so many.
#[inline(always)]
unsafe fn add_biases<S: Simd, const R: usize, const X: usize>(
    acc: &mut [[S::F; X]; R],
    w: &[QuantRow<'_>; R],
    x: &[RoundedRow<'_>; X],
    (i, n): (usize, usize),
) {
    // SAFETY: the caller's.
    unsafe {
        for c in 0..X {
            let sums = S::load_first(x[c].sums.as_ptr().add(i), n);
            for r in 0..R {
                acc[r][c] = S::fma(S::load_first(w[r].biases.as_ptr().add(i), n), sums, acc[r][c]);
            }
        }
    }
}

/// Where the blocks of some rows lie.
struct BlockRows<const R: usize, const X: usize> {
    q: [*const u8; R],
    scales: [*const f32; R],
    x: [*const i8; X],
    x_scales: [*const f32; X],
    /// Bytes of a packed row.
    bytes: usize,
    /// Blocks of a row, the last one perhaps cut off.
    count: usize,
    /// Logarithm of the blocks that share a scale of the weights.
    per_group: u32,
    ahead: usize,
}

impl<const R: usize, const X: usize> BlockRows<R, X> {
    /// Adds the products of all blocks, which have `SCALES` scales of the weights each, or share one.
    ///
    /// # Safety
    /// As [`quants`].
    #[inline(always)]
    unsafe fn add_all<S: Simd, P: Packing, const PACKED: bool, const SCALES: usize>(
        &self,
        acc: &mut [[S::F; X]; R],
    ) {
        let size = if PACKED { Block::<S, P>::BYTES } else { Block::<S, P>::QUANTS };
        // Blocks that can be loaded without reading beyond their row.
        let inside = if PACKED {
            ((self.bytes + size).saturating_sub(Block::<S, P>::reach()) / size).min(self.count)
        } else {
            self.count
        };
        // SAFETY: block u begins before the row's end; a packed one is read only up to it; rows of bytes, activations
        // and their scales are padded to whole blocks.
        unsafe {
            for u in 0..inside {
                self.add::<S, P, PACKED, SCALES>(acc, u, self.q.map(|q| q.add(u * size)));
            }
            for u in inside..self.count {
                let ends = self.q.map(|q| end_of_row(q.add(u * size), self.bytes - u * size));
                let ends = std::array::from_fn(|r| ends[r].as_ptr());
                self.add::<S, P, PACKED, SCALES>(acc, u, ends);
            }
        }
    }

    /// Adds the products of block `u`, whose bytes are at `q`.
    ///
    /// # Safety
    /// As [`quants`].
    #[inline(always)]
    unsafe fn add<S: Simd, P: Packing, const PACKED: bool, const SCALES: usize>(
        &self,
        acc: &mut [[S::F; X]; R],
        u: usize,
        q: [*const u8; R],
    ) {
        let (x_at, x_scales) = (u * Block::<S, P>::QUANTS, Block::<S, P>::QUANTS / GROUP);
        // SAFETY: the caller's.
        unsafe {
            let mut x = [Block::<S, P>::load_bytes(self.x[0].add(x_at).cast()); X];
            let mut scales = [S::spread(self.x_scales[0].add(u * x_scales), x_scales); X];
            for c in 1..X {
                x[c] = Block::<S, P>::load_bytes(self.x[c].add(x_at).cast());
                scales[c] = S::spread(self.x_scales[c].add(u * x_scales), x_scales);
            }
            for r in 0..R {
                let w = if PACKED {
                    S::prefetch(q[r].wrapping_add(self.ahead));
                    Block::<S, P>::load(q[r])
                } else {
                    Block::<S, P>::load_bytes(q[r])
                };
                let scale = if SCALES > 1 {
                    S::spread(self.scales[r].add(u * SCALES), SCALES)
                } else {
                    S::splat(*self.scales[r].add(u >> self.per_group))
                };
                for c in 0..X {
                    let products = S::float(S::dot::<P>(w, x[c]));
                    acc[r][c] = S::fma(products, S::mul(scale, scales[c]), acc[r][c]);
                }
            }
        }
    }
}

/// The products of up to [`TILE`] rows of quants, unpacked to bytes, and of rounded activations each, a part of the
/// tile at a time.
///
/// # Safety
/// As [`quants`].
#[inline(always)]
pub(super) unsafe fn quant_tile<S: Simd, P: Packing>(
    w: &[QuantRow<'_>],
    x: &[RoundedRow<'_>],
    groups: Groups,
    sums: &mut Sums,
) {
    /// Rows of weights with `X` rows of activations.
    #[inline(always)]
    unsafe fn part<S: Simd, P: Packing, const X: usize>(
        w: &[QuantRow<'_>],
        x: &[RoundedRow<'_>; X],
        groups: Groups,
        (at, sums): (usize, &mut Sums),
    ) {
        // SAFETY: the caller's.
        unsafe {
            // At the end of a matrix its last row stands for those that are not there.
            let rows: [_; TILE] = std::array::from_fn(|i| w[i.min(w.len() - 1)]);
            let tile = quants::<S, P, false, TILE, X>(&rows, x, groups, 0);
            for (to, from) in sums.iter_mut().zip(&tile[..w.len()]) {
                to[at..at + X].copy_from_slice(from);
            }
        }
    }
    let mut at = 0;
    // SAFETY: the caller's.
    unsafe {
        while at < x.len() {
            let rest = &x[at..];
            at += if let (true, Some(x)) = (S::WIDTH >= 4, rest.first_chunk::<4>()) {
                part::<S, P, 4>(w, x, groups, (at, sums));
                4
            } else if let (true, Some(x)) = (S::WIDTH >= 2, rest.first_chunk::<2>()) {
                part::<S, P, 2>(w, x, groups, (at, sums));
                2
            } else {
                part::<S, P, 1>(w, &[rest[0]], groups, (at, sums));
                1
            };
        }
    }
}

/// What scales and biases of quants are made of.
#[derive(Clone, Copy)]
pub(super) enum Scales {
    /// Numbers, both.
    Affine(Scalar),
    /// Scales of E2M1.
    E2M1(BlockScale),
}

/// Rows of packed quants one behind the other, from the first one on: bytes, and by how many the next row is further.
#[derive(Clone, Copy)]
pub(super) struct QuantRows<'a> {
    pub(super) q: (&'a [u8], usize),
    /// Bytes of a row's scales, and of its biases if there are any.
    pub(super) scale_bytes: usize,
    pub(super) scales: (&'a [u8], usize),
    pub(super) biases: (&'a [u8], usize),
    pub(super) of: Scales,
}

/// Numbers of scratch that [`decode`] needs.
pub(super) const fn decode_scratch(padded: usize, group: usize) -> usize {
    2 * TILE * (padded / group)
}

/// The products of rows of packed quants and one of rounded activations, one for each number of `out`.
///
/// # Safety
/// There are so many rows, the activations are as their type says, and the scratch is as large as [`decode_scratch`]
/// says for inputs padded to whole blocks.
#[inline(always)]
pub(super) unsafe fn decode<S: Simd, P: Packing>(
    w: &QuantRows<'_>,
    x: &RoundedRow<'_>,
    groups: Groups,
    scratch: &mut [f32],
    out: &mut [f32],
) {
    let Groups { cols, group } = groups;
    let (bytes, per_row) = (cols * P::BITS / 8, cols / group);
    // Scales of a row: those of its last block are all there, and zero if there is nothing to scale.
    let stride = (cols.next_multiple_of(Block::<S, P>::QUANTS) / group).max(per_row);
    let (scales, biases) = scratch.split_at_mut(TILE * stride);
    let in_one_piece = |(all, stride): (&[u8], usize)| all.is_empty() || stride == w.scale_bytes;
    let one_piece = stride == per_row && in_one_piece(w.scales) && in_one_piece(w.biases);
    let rows_ahead = rows_ahead(bytes);
    for (step, out) in out.chunks_mut(TILE).enumerate() {
        let (first, count) = (step * TILE, out.len());
        // SAFETY: the caller's.
        unsafe {
            let at_once = if one_piece { count } else { 1 };
            for i in (0..count).step_by(at_once) {
                let mut parts: [&[u8]; 2] = [&[]; 2];
                for (part, (all, apart)) in parts.iter_mut().zip([w.scales, w.biases]) {
                    let (from, len) = ((first + i) * apart, at_once * w.scale_bytes);
                    if !all.is_empty() {
                        *part = all.get_unchecked(from..from + len);
                        for at in (0..len).step_by(LINE) {
                            S::prefetch(part.as_ptr().wrapping_add(at + rows_ahead * apart));
                        }
                    }
                }
                let numbers = at_once * per_row;
                let (scales, behind) = scales[i * stride..].split_at_mut(numbers);
                widen_scales::<S>(w.of, parts, [scales, &mut biases[i * per_row..][..numbers]]);
                if !one_piece {
                    behind[..stride - per_row].fill(0.0);
                }
            }
            let row = |i: usize| QuantRow {
                q: w.q.0.get_unchecked((first + i) * w.q.1..(first + i) * w.q.1 + bytes),
                scales: &scales[i * stride..(i + 1) * stride],
                biases: &biases[i * per_row..(i + 1) * per_row],
            };
            // At the end of a matrix its last row stands for those that are not there.
            let rows: [_; TILE] = std::array::from_fn(|i| row(i.min(count - 1)));
            let sums = quants::<S, P, true, TILE, 1>(&rows, &[*x], groups, rows_ahead * w.q.1);
            out.copy_from_slice(&sums.as_flattened()[..count]);
        }
    }
}

/// Widens scales and biases.
#[inline(always)]
unsafe fn widen_scales<S: Simd>(of: Scales, [s, b]: [&[u8]; 2], [scales, biases]: [&mut [f32]; 2]) {
    // SAFETY: the caller's: there are bytes for all numbers.
    unsafe {
        match of {
            Scales::Affine(Scalar::F32) => {
                widen::<S, F32>(s, scales);
                widen::<S, F32>(b, biases);
            }
            Scales::Affine(Scalar::F16) => {
                widen::<S, F16>(s, scales);
                widen::<S, F16>(b, biases);
            }
            Scales::Affine(Scalar::BF16) => {
                widen::<S, Bf16>(s, scales);
                widen::<S, Bf16>(b, biases);
            }
            Scales::E2M1(of) => e2m1_scales(of, s, scales, biases),
        }
    }
}

/// Unpacks a row of quants to bytes, in the order of unpacked blocks. `out` holds whole blocks.
///
/// # Safety
/// The row has `bytes` bytes, and `out` room for the quants in them, rounded up to whole blocks.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd, P: Packing>(row: *const u8, bytes: usize, out: *mut u8) {
    let size = Block::<S, P>::BYTES;
    for u in 0..bytes.div_ceil(size) {
        let at = u * size;
        // SAFETY: a block is read up to `bytes` only.
        unsafe {
            let parts = if at + Block::<S, P>::reach() <= bytes {
                Block::<S, P>::load(row.add(at))
            } else {
                Block::<S, P>::load(end_of_row(row.add(at), bytes - at).as_ptr())
            };
            for i in 0..Block::<S, P>::PARTS {
                S::store_bytes(out.add(u * Block::<S, P>::QUANTS + i * S::UNIT), parts[i]);
            }
        }
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
        let at = u * unit_bytes;
        // SAFETY: a unit is read up to the end of the row only, and an array holds one.
        unsafe {
            let from = row.as_ptr().add(at);
            let unit = if at + S::reach(BITS) <= row.len() {
                S::unpack::<BITS>(from)
            } else {
                S::unpack::<BITS>(end_of_row(from, row.len() - at).as_ptr())
            };
            S::store_bytes(quants.as_mut_ptr(), unit);
        }
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

/// Rounds a row to 8 bits, for weights of `bits` bits in groups of `group`: `q` in the order of unpacked blocks, a
/// scale per [`GROUP`], and per `group` the sum of what the rounded numbers stand for. A NaN or an infinity makes its
/// scale one. What is behind the row in `q` is zero, and whole blocks of any instruction set are there.
#[inline(always)]
pub(super) fn quantize<S: Simd>(
    x: &[f32],
    (bits, group): (usize, usize),
    q: &mut [i8],
    scales: &mut [f32],
    sums: &mut [f32],
) {
    // Adding it to a small number leaves the nearest whole number in the low bits.
    const MAGIC: f32 = 12_582_912.0;
    let per_group = group / GROUP;
    sums.fill(0.0);
    for (i, (x, q)) in x.as_chunks::<GROUP>().0.iter().zip(q.as_chunks_mut::<GROUP>().0).enumerate() {
        let mut max = [0u32; 8];
        for x in x.as_chunks::<8>().0 {
            for (max, x) in max.iter_mut().zip(x) {
                let bits = x.to_bits() & 0x7fff_ffff;
                *max = if bits > *max { bits } else { *max };
            }
        }
        let max = f32::from_bits(max.into_iter().fold(0, u32::max));
        let inverse = if max > 1e-30 { 127.0 / max } else { 0.0 };
        let mut sum = 0i32;
        for (q, x) in q.iter_mut().zip(x) {
            let n = ((x * inverse + MAGIC).to_bits() & 0xff) as u8 as i8;
            *q = n;
            sum += i32::from(n);
        }
        let scale = max / 127.0;
        scales[i] = scale;
        sums[i / per_group] += scale * sum as f32;
    }
    match (parts::<S>(bits), S::UNIT) {
        (1, _) => {}
        (2, 64) => split::<2, 64, 128>(q),
        (2, _) => split::<2, 32, 64>(q),
        (_, 64) => split::<4, 64, 256>(q),
        _ => split::<4, 32, 128>(q),
    }
}

/// Brings each block of `PARTS` vectors of `UNIT` numbers into the order of unpacked blocks.
#[inline(always)]
fn split<const PARTS: usize, const UNIT: usize, const ALL: usize>(q: &mut [i8]) {
    for block in q.as_chunks_mut::<ALL>().0 {
        let from = *block;
        for (i, part) in block.as_chunks_mut::<UNIT>().0.iter_mut().enumerate() {
            for (j, q) in part.iter_mut().enumerate() {
                *q = from[j * PARTS + i];
            }
        }
    }
}
