//! Quants: how they are packed and widened, how activations that meet them are rounded to 8 bits, and their products with
//! one row of those, over the vectors of any instruction set, as in [`algorithm`](super::algorithm).
//!
//! Where several quants share a byte, a vector of packed bytes becomes as many vectors as a byte has quants: the first
//! has the first quant of every byte, and so on. That takes a shift and a mask instead of a permutation. The activations
//! lie in the same order by fours, which costs nothing, as they are rounded once and meet many rows.
//!
//! Few rows of activations meet rows of weights as they are packed, with partial sums across the lanes of a vector; more
//! rows meet tiles that are unpacked once ([`columns`](super::columns)).
#![allow(clippy::needless_range_loop, reason = "arrays of vectors are walked together, and without closures")]

use super::{
    algorithm::{Bf16, F16, F32, GROUP, LINE, MAX_UNIT, Simd, TILE, reduce, rows_ahead, widen},
    blocks::e2m1_scales,
    columns::{Groups, QuantRows, RoundedRow, Scales},
};
use crate::Scalar;

/// Rows of activations that meet packed rows of quants at once, at most. However many there are, each is summed as if it
/// were alone.
pub(crate) const FEW: usize = 4;

/// Inputs that are summed up by themselves: sums of long rows keep their small parts, and with biases, which often make them
/// smaller, are added to others. Whole blocks and groups of any kind.
const SECTION: usize = 4096;

/// Most vectors that a block is unpacked to.
pub(super) const PARTS: usize = 4;

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
    unsafe fn quants<S: Simd>(x: S::D) -> S::D;
}

/// What the bias of quants that stand for E2M1 is of their scale: they are twelve more than twice their element.
pub(super) const E2M1_BIAS: f32 = -12.0;

#[derive(Clone, Copy)]
pub(super) struct Bits<const BITS: usize>;
#[derive(Clone, Copy)]
pub(super) struct E2m1;

impl<const BITS: usize> Packing for Bits<BITS> {
    const BITS: usize = BITS;
    #[inline(always)]
    unsafe fn quants<S: Simd>(x: S::D) -> S::D {
        x
    }
}
impl Packing for E2m1 {
    const BITS: usize = 4;
    #[inline(always)]
    unsafe fn quants<S: Simd>(x: S::D) -> S::D {
        const QUANTS: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];
        // SAFETY: the caller's; what is unpacked has four bits.
        unsafe { S::lookup(x, &QUANTS) }
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

/// The blocks that rows are read in where one row of activations meets them.
struct Block<S, P>(S, P);

impl<S: Simd, P: Packing> Block<S, P> {
    /// Vectors that a vector of packed bytes becomes.
    const PARTS: usize = parts(P::BITS);
    /// Vectors that a block is unpacked to: a group at least.
    const VECTORS: usize = if Self::PARTS == 1 { S::UNIT / (4 * S::LANES) } else { Self::PARTS };
    /// Quants of a block.
    const QUANTS: usize = Self::VECTORS * 4 * S::LANES;
    /// Bytes of a packed block.
    const BYTES: usize = Self::QUANTS * P::BITS / 8;

    /// Bytes that loading a packed block reads.
    fn reach() -> usize {
        if Self::PARTS > 1 { Self::BYTES } else { S::reach(P::BITS) }
    }

    /// A packed block.
    #[inline(always)]
    unsafe fn load(p: *const u8) -> [S::D; PARTS] {
        // SAFETY: the caller's: `reach` bytes can be read.
        unsafe {
            if Self::PARTS == 1 {
                return S::in_order(match P::BITS {
                    3 => S::unpack::<3>(p),
                    5 => S::unpack::<5>(p),
                    6 => S::unpack::<6>(p),
                    _ => S::unpack::<8>(p),
                });
            }
            let x = S::load_dwords(p);
            let mut parts = [P::quants::<S>(S::bits(x, 0, P::BITS)); PARTS];
            for i in 1..Self::PARTS {
                parts[i] = P::quants::<S>(S::bits(x, i * P::BITS, P::BITS));
            }
            parts
        }
    }

    /// The activations that a block meets: fours of bytes by turns where a byte has several quants, else in order.
    #[inline(always)]
    unsafe fn load_activations(p: *const i8) -> [S::D; PARTS] {
        let p = p.cast::<u8>();
        // SAFETY: the caller's: `QUANTS` bytes can be read.
        unsafe {
            let mut x = [S::load_dwords(p); PARTS];
            for i in 1..Self::VECTORS {
                x[i] = S::load_dwords(p.add(i * 4 * S::LANES));
            }
            let [a, b, c, d] = x;
            match Self::PARTS {
                2 => {
                    let [even, odd] = S::unzip(a, b);
                    [even, odd, c, d]
                }
                4 => {
                    let ([even, odd], [more_even, more_odd]) = (S::unzip(a, b), S::unzip(c, d));
                    let ([a, c], [b, d]) = (S::unzip(even, more_even), S::unzip(odd, more_odd));
                    [a, b, c, d]
                }
                _ => x,
            }
        }
    }

    /// Vectors of scales of the activations that a block meets: those of quants in order have groups of their own, those that
    /// share bytes have the same ones.
    const SCALES: usize = if Self::PARTS == 1 { Self::VECTORS } else { 1 };
    /// Bytes of what a block meets of one row of activations: vectors of numbers, then those of scales.
    const MEETS: usize = (Self::VECTORS + Self::SCALES) * 4 * S::LANES;

    /// Writes what each block meets of a row of activations.
    ///
    /// # Safety
    /// There are activations for `count` blocks, and room for [`Self::MEETS`] bytes of each.
    #[inline(always)]
    unsafe fn lay_out(x: &RoundedRow<'_>, count: usize, to: *mut u8) {
        let per_vector = Self::QUANTS / Self::SCALES / GROUP;
        // SAFETY: the caller's.
        unsafe {
            for u in 0..count {
                let to = to.add(u * Self::MEETS);
                let numbers = Self::load_activations(x.q.as_ptr().add(u * Self::QUANTS));
                for i in 0..Self::VECTORS {
                    S::store_dwords(to.add(i * 4 * S::LANES), numbers[i]);
                }
                for v in 0..Self::SCALES {
                    let scales = x.scales.as_ptr().add((u * Self::SCALES + v) * per_vector);
                    let to = to.add((Self::VECTORS + v) * 4 * S::LANES);
                    S::store(to.cast(), S::spread(scales, per_vector));
                }
            }
        }
    }
}

/// A section of a row of packed quants.
#[derive(Clone, Copy)]
struct QuantRow {
    q: *const u8,
    /// One per group, as many as whole blocks have.
    scales: *const f32,
    /// One per group.
    biases: *const f32,
}

/// What sections of rows of quants meet of `X` rows of activations.
struct Meets<const X: usize> {
    /// As [`Block::lay_out`] wrote it, and by how many bytes the next row is further.
    laid_out: (*const u8, usize),
    /// One per group of the weights.
    sums: [*const f32; X],
}

/// Products of a section of [`TILE`] rows of quants and of `X` rows of rounded activations:
/// `sum_g scale_w scale_x sum(q x) + sum_g bias_w sum(x)`. Rows are asked for `ahead` bytes early; `behind` bytes can be read
/// behind the last one.
///
/// # Safety
/// The rows are as their types say, for `groups`.
#[inline(always)]
unsafe fn products<S: Simd, P: Packing, const X: usize>(
    w: &[QuantRow; TILE],
    x: &Meets<X>,
    groups: Groups,
    (ahead, behind): (usize, usize),
) -> [[f32; X]; TILE] {
    let Groups { cols, group } = groups;
    let rows = BlockRows {
        w: *w,
        x: x.laid_out,
        bytes: cols * P::BITS / 8,
        count: cols.div_ceil(Block::<S, P>::QUANTS),
        per_group: (group / Block::<S, P>::QUANTS).max(1).trailing_zeros(),
        ahead,
        behind,
    };
    // SAFETY: the caller's.
    unsafe {
        // What is added up in each is large where quants stand for numbers of both signs, and their sum is not.
        let (mut acc, mut of_biases) = ([[S::zero(); X]; TILE], [[S::zero(); X]; TILE]);
        let (per_row, whole) = (groups.count(), groups.count() / S::LANES * S::LANES);
        for i in (0..whole).step_by(S::LANES) {
            add_biases::<S, X>(&mut of_biases, w, x, (i, S::LANES));
        }
        if whole < per_row {
            add_biases::<S, X>(&mut of_biases, w, x, (whole, per_row - whole));
        }
        // Groups have sixteen at least: what a block cannot have is not compiled.
        let scales = Block::<S, P>::QUANTS / group;
        let most = Block::<S, P>::QUANTS / GROUP;
        if most >= 16 && scales == 16 {
            rows.add_all::<S, P, 16, X>(&mut acc);
        } else if most >= 8 && scales == 8 {
            rows.add_all::<S, P, 8, X>(&mut acc);
        } else if most >= 4 && scales == 4 {
            rows.add_all::<S, P, 4, X>(&mut acc);
        } else if most >= 2 && scales == 2 {
            rows.add_all::<S, P, 2, X>(&mut acc);
        } else {
            rows.add_all::<S, P, 1, X>(&mut acc);
        }
        for r in 0..TILE {
            for c in 0..X {
                acc[r][c] = S::fma(S::splat(1.0), of_biases[r][c], acc[r][c]);
            }
        }
        reduce::<S, TILE, X>(&acc)
    }
}

/// Adds the products of the `n` biases from number `i` on, a vector at most.
///
/// # Safety
/// There are so many.
#[inline(always)]
unsafe fn add_biases<S: Simd, const X: usize>(
    acc: &mut [[S::F; X]; TILE],
    w: &[QuantRow; TILE],
    x: &Meets<X>,
    (i, n): (usize, usize),
) {
    // SAFETY: the caller's.
    unsafe {
        let mut sums = [S::zero(); X];
        for c in 0..X {
            sums[c] = S::load_first(x.sums[c].add(i), n);
        }
        for r in 0..TILE {
            let biases = S::load_first(w[r].biases.add(i), n);
            for c in 0..X {
                acc[r][c] = S::fma(biases, sums[c], acc[r][c]);
            }
        }
    }
}

/// Where the blocks of some rows lie.
struct BlockRows {
    w: [QuantRow; TILE],
    /// What blocks meet, and by how many bytes the next row of activations is further.
    x: (*const u8, usize),
    /// Bytes of a packed row.
    bytes: usize,
    /// Blocks of a row, the last one perhaps cut off.
    count: usize,
    /// Logarithm of the blocks that share a scale of the weights.
    per_group: u32,
    ahead: usize,
    /// Bytes that can be read behind the last row: what meets them is zero.
    behind: usize,
}

impl BlockRows {
    /// Adds the products of all blocks, which have `SCALES` scales of the weights each, or share one.
    ///
    /// # Safety
    /// As [`products`].
    #[inline(always)]
    unsafe fn add_all<S: Simd, P: Packing, const SCALES: usize, const X: usize>(
        &self,
        acc: &mut [[S::F; X]; TILE],
    ) {
        let size = Block::<S, P>::BYTES;
        // Blocks that can be loaded without reading beyond the matrix.
        let most = self.bytes + self.behind + size;
        let inside = (most.saturating_sub(Block::<S, P>::reach()) / size).min(self.count);
        // So many sums have room in registers, beside the activations that all rows meet.
        let at_once = if X <= 2 { TILE } else { TILE / 2 };
        // SAFETY: block u begins before the row's end, and is read up to the matrix's end only; activations and scales are
        // padded to whole blocks.
        unsafe {
            for first in (0..TILE).step_by(at_once) {
                for u in 0..inside {
                    for r in first..first + at_once {
                        self.add::<S, P, SCALES, X>(&mut acc[r], (r, u), self.w[r].q.add(u * size));
                    }
                }
                for u in inside..self.count {
                    for r in first..first + at_once {
                        let end = end_of_row(self.w[r].q.add(u * size), self.bytes - u * size);
                        self.add::<S, P, SCALES, X>(&mut acc[r], (r, u), end.as_ptr());
                    }
                }
            }
        }
    }

    /// Adds the products of block `u` of row `r`, whose bytes are at `q`.
    ///
    /// # Safety
    /// As [`products`].
    #[inline(always)]
    unsafe fn add<S: Simd, P: Packing, const SCALES: usize, const X: usize>(
        &self,
        acc: &mut [S::F; X],
        (r, u): (usize, usize),
        q: *const u8,
    ) {
        let (vectors, meets) = (Block::<S, P>::VECTORS, Block::<S, P>::MEETS);
        // SAFETY: the caller's.
        unsafe {
            S::prefetch(q.wrapping_add(self.ahead));
            let w = Block::<S, P>::load(q);
            let scale = if SCALES > 1 {
                S::spread(self.w[r].scales.add(u * SCALES), SCALES)
            } else {
                S::splat(*self.w[r].scales.add(u >> self.per_group))
            };
            for c in 0..X {
                let at = self.x.0.add(c * self.x.1 + u * meets);
                let mut x = [S::load_dwords(at); PARTS];
                for i in 1..vectors {
                    x[i] = S::load_dwords(at.add(i * 4 * S::LANES));
                }
                for v in 0..Block::<S, P>::SCALES {
                    let sums = match Block::<S, P>::PARTS {
                        1 => S::dot::<P, 1>(S::none(), [w[v]; PARTS], [x[v]; PARTS]),
                        2 => S::dot::<P, 2>(S::none(), w, x),
                        _ => S::dot::<P, 4>(S::none(), w, x),
                    };
                    let x_scale = S::load(at.add((vectors + v) * 4 * S::LANES).cast());
                    acc[c] = S::fma(S::float(sums), S::mul(scale, x_scale), acc[c]);
                }
            }
        }
    }
}

/// The products of rows of packed quants and up to [`FEW`] of rounded activations: `out` is `(rows of activations, rows of
/// quants)`.
///
/// # Safety
/// There are so many rows, the activations are as their type says, and bytes and scratch are as many as
/// [`tile_bytes`](super::columns::tile_bytes) and [`tile_numbers`](super::columns::tile_numbers) say.
#[inline(always)]
pub(super) unsafe fn decode<S: Simd, P: Packing>(
    w: &QuantRows<'_>,
    x: &[RoundedRow<'_>],
    groups: Groups,
    scratch: (&mut [u8], &mut [f32]),
    out: &mut [f32],
) {
    // SAFETY: the caller's.
    unsafe {
        match *x {
            [a] => few::<S, P, 1>(w, &[a], groups, scratch, out),
            [a, b] => few::<S, P, 2>(w, &[a, b], groups, scratch, out),
            [a, b, c] => few::<S, P, 3>(w, &[a, b, c], groups, scratch, out),
            [a, b, c, d] => few::<S, P, 4>(w, &[a, b, c, d], groups, scratch, out),
            _ => {}
        }
    }
}

/// [`decode`] of `X` rows of activations.
///
/// # Safety
/// As [`decode`].
#[inline(always)]
unsafe fn few<S: Simd, P: Packing, const X: usize>(
    w: &QuantRows<'_>,
    x: &[RoundedRow<'_>; X],
    groups: Groups,
    (meets, scratch): (&mut [u8], &mut [f32]),
    out: &mut [f32],
) {
    let Groups { cols, group } = groups;
    let (bytes, per_row) = (cols * P::BITS / 8, groups.count());
    let blocks = cols.div_ceil(Block::<S, P>::QUANTS);
    let stride_of_meets = blocks * Block::<S, P>::MEETS;
    let (laid_out, mut x_sums) = (meets.as_mut_ptr(), [std::ptr::null(); X]);
    for c in 0..X {
        x_sums[c] = x[c].sums.as_ptr();
        // SAFETY: the caller's: activations are padded to whole blocks, and scales take no more room than numbers.
        unsafe { Block::<S, P>::lay_out(&x[c], blocks, laid_out.add(c * stride_of_meets)) };
    }
    // Scales of a row: those of its last block are all there, and zero if there is nothing to scale.
    let stride = (cols.next_multiple_of(Block::<S, P>::QUANTS) / group).max(per_row);
    let (scales, biases) = scratch.split_at_mut(TILE * stride);
    let in_one_piece = |(all, stride): (&[u8], usize)| all.is_empty() || stride == w.scale_bytes;
    let one_piece = stride == per_row && in_one_piece(w.scales) && in_one_piece(w.biases);
    let rows_ahead = rows_ahead(bytes, TILE);
    for first in (0..w.count).step_by(TILE) {
        let count = TILE.min(w.count - first);
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
            let around = (rows_ahead * w.q.1, w.q.0.len() - ((first + count - 1) * w.q.1 + bytes));
            let from = QuantRow { q: w.q.0.as_ptr(), scales: scales.as_ptr(), biases: biases.as_ptr() };
            let mut tile = [from; TILE];
            for i in 0..TILE {
                // At the end of a matrix its last row stands for those that are not there.
                let i_of = i.min(count - 1);
                tile[i].q = from.q.add((first + i_of) * w.q.1);
                tile[i].scales = from.scales.add(i_of * stride);
                tile[i].biases = from.biases.add(i_of * per_row);
            }
            let mut meets = Meets { laid_out: (laid_out, stride_of_meets), sums: x_sums };
            let (mut sums, mut left) = ([[0.0; X]; TILE], cols);
            while left > 0 {
                let some = left.min(SECTION);
                let products = products::<S, P, X>(&tile, &meets, Groups { cols: some, group }, around);
                for r in 0..TILE {
                    for c in 0..X {
                        sums[r][c] += products[r][c];
                    }
                }
                left -= some;
                if left > 0 {
                    for row in &mut tile {
                        row.q = row.q.add(SECTION * P::BITS / 8);
                        row.scales = row.scales.add(SECTION / group);
                        row.biases = row.biases.add(SECTION / group);
                    }
                    let blocks = SECTION / Block::<S, P>::QUANTS;
                    meets.laid_out.0 = meets.laid_out.0.add(blocks * Block::<S, P>::MEETS);
                    for sums in &mut meets.sums {
                        *sums = sums.add(SECTION / group);
                    }
                }
            }
            for r in 0..count {
                for c in 0..X {
                    out[c * w.count + first + r] = sums[r][c];
                }
            }
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
            Scales::E2M1(of) => {
                e2m1_scales(of, s, scales);
                biases.iter_mut().zip(scales).for_each(|(bias, half)| *bias = E2M1_BIAS * *half);
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

/// Rounds a row to 8 bits, for weights of `bits` bits in groups of `group`: `q` by fours in the order in which
/// they meet unpacked quants, a scale per [`GROUP`], and per `group` the sum of what the rounded numbers stand for. A NaN
/// or an infinity makes its scale one. What is behind the row in `q` is zero, and whole blocks of any instruction set
/// are there.
#[inline(always)]
pub(super) fn quantize(
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
        let mut whole = [0i32; GROUP];
        for (n, x) in whole.iter_mut().zip(x) {
            *n = i32::from((x * inverse + MAGIC).to_bits() as u8 as i8);
        }
        for (q, n) in q.iter_mut().zip(whole) {
            *q = n as i8;
        }
        let scale = max / 127.0;
        scales[i] = scale;
        sums[i / per_group] += scale * whole.iter().sum::<i32>() as f32;
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
