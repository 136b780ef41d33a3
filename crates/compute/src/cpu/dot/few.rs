//! Products of rows of quants as they are packed and few rows of activations rounded to 8 bits, over the vectors of any
//! instruction set, as in [`algorithm`](super::algorithm).
//!
//! Each row of weights is read from end to end, with partial sums across the lanes of a vector, which end with the row. What
//! its blocks meet of the activations is laid out once for many rows of weights.
#![allow(
    clippy::needless_range_loop,
    clippy::manual_memcpy,
    reason = "arrays of vectors are walked together, without closures, and stay in registers"
)]

use std::ops::Range;

use super::{
    algorithm::{
        Bf16, Element, F16, F32, GROUP, LINE, MAX_LANES, MAX_UNIT, NEAR, Simd, TILE, reduce,
        rows_ahead, widen,
    },
    blocks::scaled,
    columns::{Groups, QuantRows, RoundedRow, Scales},
    quants::{E2M1_BIAS, KV_SPLITS, Packing, parts},
};
use crate::Scalar;

/// Rows of activations that meet packed rows of quants at once, at most. However many there are, each is summed as if it
/// were alone.
pub(crate) const FEW: usize = 4;

/// Inputs that are summed up by themselves: sums of long rows keep their small parts, and with biases, which often make them
/// smaller, are added to others. Whole blocks and groups of any kind.
const SECTION: usize = 4096;

/// Numbers that scales of some rows become at once, if rows have fewer: short rows fill vectors together.
const WIDENED: usize = 512;

/// Scales and biases that rows are read with as they lie in memory.
pub(super) trait Scale: Element {
    /// `n` numbers, a power of two of at most [`Simd::LANES`], each in as many lanes, in order.
    unsafe fn spread<S: Simd>(p: *const u8, n: usize) -> S::F;
    /// The first `n` numbers of a vector, and zeros.
    unsafe fn first<S: Simd>(p: *const u8, n: usize) -> S::F;
}

impl Scale for F32 {
    #[inline(always)]
    unsafe fn spread<S: Simd>(p: *const u8, n: usize) -> S::F {
        // SAFETY: the caller's: so many numbers can be read, here and below.
        unsafe { S::spread(p.cast(), n) }
    }
    #[inline(always)]
    unsafe fn first<S: Simd>(p: *const u8, n: usize) -> S::F {
        // SAFETY: as above.
        unsafe { S::load_first(p.cast(), n) }
    }
}

impl Scale for Bf16 {
    #[inline(always)]
    unsafe fn spread<S: Simd>(p: *const u8, n: usize) -> S::F {
        // SAFETY: as above.
        unsafe { S::spread_bf16(p, n) }
    }
    #[inline(always)]
    unsafe fn first<S: Simd>(p: *const u8, n: usize) -> S::F {
        // SAFETY: as above.
        unsafe { S::load_first_bf16(p, n) }
    }
}

/// Most bytes that a row of activations takes laid out, of so many inputs, padded to whole blocks.
pub(super) const fn laid_out_bytes(padded: usize) -> usize {
    2 * padded
}

/// What rows of quants meet of one row of activations.
#[derive(Clone, Copy)]
pub(super) struct LaidOut<'a> {
    /// As [`lay_out`] writes it.
    pub(super) blocks: &'a [u8],
    /// One per group of the weights.
    pub(super) sums: &'a [f32],
}

/// The blocks that packed rows are read in.
struct Block<S, P>(S, P);

impl<S: Simd, P: Packing> Block<S, P> {
    /// Vectors that a vector of packed bytes becomes.
    const KV_SPLITS: usize = parts(P::BITS);
    /// Vectors that a block is unpacked to: a group at least.
    const VECTORS: usize =
        if Self::KV_SPLITS == 1 { S::UNIT / (4 * S::LANES) } else { Self::KV_SPLITS };
    /// Quants of a block.
    const QUANTS: usize = Self::VECTORS * 4 * S::LANES;
    /// Bytes of a packed block.
    const BYTES: usize = Self::QUANTS * P::BITS / 8;

    /// Bytes that loading a packed block reads.
    fn reach() -> usize {
        if Self::KV_SPLITS > 1 { Self::BYTES } else { S::reach(P::BITS) }
    }

    /// A packed block.
    #[inline(always)]
    unsafe fn load(p: *const u8) -> [S::D; KV_SPLITS] {
        // SAFETY: the caller's: `reach` bytes can be read.
        unsafe {
            if Self::KV_SPLITS == 1 {
                return S::in_order(match P::BITS {
                    3 => S::unpack::<3>(p),
                    5 => S::unpack::<5>(p),
                    6 => S::unpack::<6>(p),
                    _ => S::unpack::<8>(p),
                });
            }
            let x = S::load_dwords(p);
            let mut parts = [P::quants::<S>(S::bits(x, 0, P::BITS)); KV_SPLITS];
            for i in 1..Self::KV_SPLITS {
                parts[i] = P::quants::<S>(S::bits(x, i * P::BITS, P::BITS));
            }
            parts
        }
    }

    /// The activations that a block meets: fours of bytes by turns where a byte has several quants, else in order.
    #[inline(always)]
    unsafe fn load_activations(p: *const i8) -> [S::D; KV_SPLITS] {
        let p = p.cast::<u8>();
        // SAFETY: the caller's: `QUANTS` bytes can be read.
        unsafe {
            let mut x = [S::load_dwords(p); KV_SPLITS];
            for i in 1..Self::VECTORS {
                x[i] = S::load_dwords(p.add(i * 4 * S::LANES));
            }
            let [a, b, c, d] = x;
            match Self::KV_SPLITS {
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
    const SCALES: usize = if Self::KV_SPLITS == 1 { Self::VECTORS } else { 1 };
    /// Bytes of what a block meets of one row of activations: vectors of numbers, then those of scales.
    const MEETS: usize = (Self::VECTORS + Self::SCALES) * 4 * S::LANES;
}

/// Writes what each block of a packed row meets of a row of activations.
///
/// # Safety
/// The activations are padded to whole blocks, and there is room for [`laid_out_bytes`] of them.
#[inline(always)]
pub(super) unsafe fn lay_out<S: Simd, P: Packing>(x: &RoundedRow<'_>, cols: usize, to: &mut [u8]) {
    let (quants, scales) = (Block::<S, P>::QUANTS, Block::<S, P>::SCALES);
    let per_vector = quants / scales / GROUP;
    // SAFETY: the caller's.
    unsafe {
        for u in 0..cols.div_ceil(quants) {
            let to = to.as_mut_ptr().add(u * Block::<S, P>::MEETS);
            let numbers = Block::<S, P>::load_activations(x.q.as_ptr().add(u * quants));
            for i in 0..Block::<S, P>::VECTORS {
                S::store_dwords(to.add(i * 4 * S::LANES), numbers[i]);
            }
            for v in 0..scales {
                let from = x.scales.as_ptr().add((u * scales + v) * per_vector);
                let to = to.add((Block::<S, P>::VECTORS + v) * 4 * S::LANES);
                S::store(to.cast(), S::spread(from, per_vector));
            }
        }
    }
}

/// A row of packed quants, or a section of one.
#[derive(Clone, Copy)]
struct Row {
    q: *const u8,
    /// What blocks are read from that reach beyond the matrix or are cut off: what is behind the row meets zeros.
    end: *const u8,
    /// One per group.
    scales: *const u8,
}

/// What rows meet of `X` rows of activations.
#[derive(Clone, Copy)]
struct Meets<const X: usize> {
    blocks: [*const u8; X],
    sums: [*const f32; X],
}

/// Inputs of a row, or of a section of one.
#[derive(Clone, Copy)]
struct Section {
    /// Blocks, the last one of which may be cut off, and those that are not.
    blocks: usize,
    whole: usize,
    /// Groups, and the logarithm of how many blocks share one.
    groups: usize,
    shared: u32,
}

impl Section {
    #[inline(always)]
    fn new<S: Simd, P: Packing>(cols: usize, group: usize) -> Self {
        let quants = Block::<S, P>::QUANTS;
        Self {
            blocks: cols.div_ceil(quants),
            whole: cols / quants,
            groups: cols >> group.trailing_zeros(),
            shared: (group / quants).max(1).trailing_zeros(),
        }
    }

    /// Blocks that can be loaded whole where `left` bytes can be read, and whether the others can be as well.
    #[inline(always)]
    fn inside<S: Simd, P: Packing>(self, left: usize) -> (usize, bool) {
        let (size, reach) = (Block::<S, P>::BYTES, Block::<S, P>::reach());
        if self.blocks * size + (reach - size) <= left {
            return (self.whole, true);
        }
        (self.whole.min((left + size).saturating_sub(reach) / size), false)
    }
}

/// Adds the vectors of partial sums of `sum_g scale_w scale_x sum(q x)` for `R` rows of quants, from number `first` of a tile on, and
/// `X` of activations. Blocks have `SCALES` scales each, or share one; `inside` of them can be loaded without reading beyond the matrix
/// or the row's scales. The rows are asked for `ahead` bytes early.
///
/// # Safety
/// The rows are as their types say, for the section.
#[inline(always)]
unsafe fn add_rows<
    S: Simd,
    P: Packing,
    E: Scale,
    const SCALES: usize,
    const R: usize,
    const X: usize,
>(
    all: &mut [[S::F; X]; TILE],
    (w, first): (&[Row; TILE], usize),
    x: &Meets<X>,
    section: Section,
    (inside, ahead): (usize, usize),
) {
    let Section { blocks, groups, shared, .. } = section;
    let size = Block::<S, P>::BYTES;
    // SAFETY: the caller's; activations are padded to whole blocks, with zeros.
    unsafe {
        let mut acc = [[S::zero(); X]; R];
        for u in 0..inside {
            for r in 0..R {
                let w = w[first + r];
                let q = w.q.add(u * size);
                S::prefetch_near(q.wrapping_add(ahead));
                let of = if SCALES == 1 { u >> shared } else { u * SCALES };
                let scale = E::spread::<S>(w.scales.add(of * E::SCALAR.bytes()), SCALES);
                add::<S, P, X>(&mut acc[r], q, scale, (x, u));
            }
        }
        for u in inside..blocks {
            let of = if SCALES == 1 { u >> shared } else { u * SCALES };
            for r in 0..R {
                let w = w[first + r];
                let scale = first_scales::<S, E, SCALES>(w.scales, (of, groups));
                add::<S, P, X>(&mut acc[r], w.end.add((u - inside) * size), scale, (x, u));
            }
        }
        for r in 0..R {
            for c in 0..X {
                all[first + r][c] = S::fma(S::splat(1.0), all[first + r][c], acc[r][c]);
            }
        }
    }
}

/// Adds the products of the biases of `n` groups, from number `i` on.
///
/// # Safety
/// As [`of_biases`]; `n` is not more than the lanes of a vector.
#[inline(always)]
unsafe fn add_biases<S: Simd, E: Scale, const X: usize>(
    acc: &mut [[S::F; X]; TILE],
    biases: &[*const u8; TILE],
    sums: &[*const f32; X],
    (i, n): (usize, usize),
) {
    // SAFETY: the caller's.
    unsafe {
        let mut x = [S::zero(); X];
        for c in 0..X {
            x[c] = S::load_first(sums[c].add(i), n);
        }
        for r in 0..TILE {
            let biases = E::first::<S>(biases[r].add(i * E::SCALAR.bytes()), n);
            for c in 0..X {
                acc[r][c] = S::fma(biases, x[c], acc[r][c]);
            }
        }
    }
}

/// Vectors of partial sums of `sum_g bias_w sum(x)` for a tile of rows, `apart` bytes from each other, and `X` rows of
/// activations.
///
/// # Safety
/// There are so many rows, of so many groups.
#[inline(always)]
unsafe fn of_biases<S: Simd, E: Scale, const X: usize>(
    (biases, apart, n): (*const u8, usize, usize),
    sums: &[*const f32; X],
    groups: usize,
) -> [[S::F; X]; TILE] {
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::zero(); X]; TILE];
        // The last row stands for those that are not there.
        let mut rows = [biases; TILE];
        for r in 1..TILE {
            rows[r] = biases.add(r.min(n - 1) * apart);
        }
        let whole = groups - groups % S::LANES;
        for i in (0..whole).step_by(S::LANES) {
            add_biases::<S, E, X>(&mut acc, &rows, sums, (i, S::LANES));
        }
        if whole < groups {
            add_biases::<S, E, X>(&mut acc, &rows, sums, (whole, groups - whole));
        }
        acc
    }
}

/// The scales of a block from number `first` on, of which there are not more than `groups` in all: a block that is cut off has
/// fewer than others, and what it has none for meets zeros.
///
/// # Safety
/// Needs the instruction set; there are so many.
#[inline(always)]
unsafe fn first_scales<S: Simd, E: Scale, const SCALES: usize>(
    scales: *const u8,
    (first, groups): (usize, usize),
) -> S::F {
    // SAFETY: the caller's.
    unsafe {
        let scales = scales.add(first * E::SCALAR.bytes());
        match groups - first {
            1 => S::splat(E::number(scales)),
            have if have >= SCALES => E::spread::<S>(scales, SCALES),
            have => {
                let mut all = [0.0; MAX_LANES];
                for i in 0..have {
                    all[i] = E::number(scales.add(i * E::SCALAR.bytes()));
                }
                S::spread(all.as_ptr(), SCALES)
            }
        }
    }
}

/// Adds the products of a block, at `q`, and of block `u` of the activations.
///
/// # Safety
/// As [`add_rows`].
#[inline(always)]
unsafe fn add<S: Simd, P: Packing, const X: usize>(
    acc: &mut [S::F; X],
    q: *const u8,
    scale: S::F,
    (x, u): (&Meets<X>, usize),
) {
    let (vectors, meets) = (Block::<S, P>::VECTORS, Block::<S, P>::MEETS);
    // SAFETY: the caller's.
    unsafe {
        let w = Block::<S, P>::load(q);
        for c in 0..X {
            let at = x.blocks[c].add(u * meets);
            let mut x = [S::load_dwords(at); KV_SPLITS];
            for i in 1..vectors {
                x[i] = S::load_dwords(at.add(i * 4 * S::LANES));
            }
            for v in 0..Block::<S, P>::SCALES {
                let sums = match Block::<S, P>::KV_SPLITS {
                    1 => S::dot::<P, 1>(S::none(), [w[v]; KV_SPLITS], [x[v]; KV_SPLITS]),
                    2 => S::dot::<P, 2>(S::none(), w, x),
                    _ => S::dot::<P, 4>(S::none(), w, x),
                };
                let x_scale = S::load(at.add((vectors + v) * 4 * S::LANES).cast());
                acc[c] = S::fma(S::float(sums), S::mul(scale, x_scale), acc[c]);
            }
        }
    }
}

/// The products of rows of packed quants, whose scales are `E`s, and `X` rows of activations: of each a row of `out`, which
/// are `stride` apart, as many as there are. `R` rows of weights, a divisor of [`TILE`], meet them at once.
///
/// # Safety
/// There are so many rows, activations are laid out for the packing and instruction set, and `out` has room.
#[inline(always)]
pub(super) unsafe fn decode<S: Simd, P: Packing, E: Scale, const R: usize, const X: usize>(
    w: &QuantRows<'_>,
    x: &[LaidOut<'_>; X],
    groups: Groups,
    out: (&mut [f32], usize),
) {
    // What blocks of a packing cannot have is not compiled.
    let most = Block::<S, P>::QUANTS / P::MIN_GROUP;
    // SAFETY: the caller's.
    unsafe {
        match Block::<S, P>::QUANTS / groups.group {
            16.. if most >= 16 => decode_rows::<S, P, E, 16, R, X>(w, x, groups, out),
            8.. if most >= 8 => decode_rows::<S, P, E, 8, R, X>(w, x, groups, out),
            4.. if most >= 4 => decode_rows::<S, P, E, 4, R, X>(w, x, groups, out),
            2.. if most >= 2 => decode_rows::<S, P, E, 2, R, X>(w, x, groups, out),
            _ => decode_rows::<S, P, E, 1, R, X>(w, x, groups, out),
        }
    }
}

/// What is left of each row of a tile where its blocks cannot be read in place, and zeros behind it.
type Ends = [[u8; 2 * MAX_UNIT]; TILE];

/// Copies rows from byte `at` of each on: less than two blocks.
#[cold]
#[inline(never)]
fn copy_ends(w: &QuantRows<'_>, rows: Range<usize>, at: usize, ends: &mut Ends) {
    for (row, to) in rows.zip(ends) {
        let left = &w.q.0[row * w.q.1 + at..];
        let n = left.len().min(to.len());
        to[..n].copy_from_slice(&left[..n]);
        to[n..].fill(0);
    }
}

/// [`decode`] of blocks with `SCALES` scales each, or that share one.
///
/// # Safety
/// As [`decode`].
#[inline(always)]
unsafe fn decode_rows<
    S: Simd,
    P: Packing,
    E: Scale,
    const SCALES: usize,
    const R: usize,
    const X: usize,
>(
    w: &QuantRows<'_>,
    x: &[LaidOut<'_>; X],
    Groups { cols, group }: Groups,
    (out, stride): (&mut [f32], usize),
) {
    let rows_ahead = rows_ahead(NEAR, cols * P::BITS / 8, TILE);
    let mut ends: Ends = [[0; 2 * MAX_UNIT]; TILE];
    // Rows of several sections are read from end to end nevertheless.
    let at_once = if cols <= SECTION { w.count } else { TILE };
    for start in (0..w.count).step_by(at_once) {
        for begin in (0..cols).step_by(SECTION) {
            let section = Section::new::<S, P>(SECTION.min(cols - begin), group);
            let first_group = begin >> group.trailing_zeros();
            // SAFETY: the caller's; sections begin with blocks and groups.
            unsafe {
                let mut meets =
                    Meets { blocks: [std::ptr::null(); X], sums: [std::ptr::null(); X] };
                for c in 0..X {
                    let at = begin / Block::<S, P>::QUANTS * Block::<S, P>::MEETS;
                    meets.blocks[c] = x[c].blocks.as_ptr().add(at);
                    meets.sums[c] = x[c].sums.as_ptr().add(first_group);
                }
                let at = (begin * P::BITS / 8, first_group * E::SCALAR.bytes());
                for first in (start..w.count.min(start + at_once)).step_by(TILE) {
                    if begin == 0 {
                        let [scales, biases] = [w.scales, w.biases].map(|(all, apart)| {
                            all.as_ptr().wrapping_add((first + rows_ahead) * apart)
                        });
                        for at in (0..TILE * w.scales.1).step_by(LINE) {
                            S::prefetch_near(scales.wrapping_add(at));
                            S::prefetch_near(biases.wrapping_add(at));
                        }
                    }
                    let n = TILE.min(w.count - first);
                    let rows = (first, n, rows_ahead);
                    let sums =
                        tile::<S, P, E, SCALES, R, X>(w, rows, &meets, section, at, &mut ends);
                    for (c, out) in out.chunks_mut(stride).enumerate() {
                        for (r, to) in out[first..first + n].iter_mut().enumerate() {
                            *to = if begin == 0 { sums[r][c] } else { *to + sums[r][c] };
                        }
                    }
                }
            }
        }
    }
}

/// The products of a section of up to [`TILE`] rows, of `n` from number `first` on, that begins `at` bytes of quants and of scales.
///
/// # Safety
/// As [`decode`].
#[inline(always)]
unsafe fn tile<
    S: Simd,
    P: Packing,
    E: Scale,
    const SCALES: usize,
    const R: usize,
    const X: usize,
>(
    w: &QuantRows<'_>,
    (first, n, rows_ahead): (usize, usize, usize),
    x: &Meets<X>,
    section: Section,
    (at, scales_at): (usize, usize),
    ends: &mut Ends,
) -> [[f32; X]; TILE] {
    // SAFETY: the caller's.
    unsafe {
        let q = w.q.0.as_ptr().add(first * w.q.1 + at);
        let scales = w.scales.0.as_ptr().add(first * w.scales.1 + scales_at);
        let biases = w.biases.0.as_ptr().add(first * w.biases.1 + scales_at);
        // Behind the last row the least can be read.
        let left = w.q.0.len() - (first + n - 1) * w.q.1 - at;
        let (inside, in_place) = section.inside::<S, P>(left);
        let inside_bytes = inside * Block::<S, P>::BYTES;
        let mut end = (q.add(inside_bytes), w.q.1);
        if !in_place {
            copy_ends(w, first..first + n, at + inside_bytes, ends);
            end = (ends.as_ptr().cast(), size_of_val(&ends[0]));
        }
        // What is added up in `acc` is large where quants stand for numbers of both signs, and their sum is not.
        let mut acc = of_biases::<S, E, X>((biases, w.biases.1, n), &x.sums, section.groups);
        let of = (inside, rows_ahead * w.q.1);
        let mut from = [Row { q, end: end.0, scales }; TILE];
        for r in 1..TILE {
            let row = r.min(n - 1);
            from[r].q = q.add(row * w.q.1);
            from[r].end = end.0.add(row * end.1);
            from[r].scales = scales.add(row * w.scales.1);
        }
        // One after the other: a loop would have sums go through memory.
        add_rows::<S, P, E, SCALES, R, X>(&mut acc, (&from, 0), x, section, of);
        if R == 1 {
            add_rows::<S, P, E, SCALES, R, X>(&mut acc, (&from, 1), x, section, of);
        }
        if R <= 2 {
            add_rows::<S, P, E, SCALES, R, X>(&mut acc, (&from, 2), x, section, of);
        }
        if R == 1 {
            add_rows::<S, P, E, SCALES, R, X>(&mut acc, (&from, 3), x, section, of);
        }
        reduce::<S, TILE, X>(&acc)
    }
}

/// Rows whose scales are widened at once.
pub(super) fn widened_at_once(groups: Groups) -> usize {
    (WIDENED / groups.count()).clamp(TILE, MAX_LANES) / TILE * TILE
}

/// Widens scales and biases of rows to those that [`decode`] reads, and asks for those of rows that follow.
///
/// # Safety
/// Needs the instruction set; there is room for all groups of all rows.
#[inline(always)]
pub(super) unsafe fn widen_scales<S: Simd>(
    w: &QuantRows<'_>,
    groups: Groups,
    [scales, biases]: [&mut [f32]; 2],
) {
    let (per_row, rows_ahead) = (groups.count(), rows_ahead(NEAR, w.q.1, TILE));
    let in_one_piece = |(all, apart): (&[u8], usize)| all.is_empty() || apart == w.scale_bytes;
    let at_once = if in_one_piece(w.scales) && in_one_piece(w.biases) { w.count } else { 1 };
    for first in (0..w.count).step_by(at_once) {
        let mut parts: [&[u8]; 2] = [&[]; 2];
        for (part, (all, apart)) in parts.iter_mut().zip([w.scales, w.biases]) {
            if !all.is_empty() {
                *part = &all[first * apart..][..at_once * w.scale_bytes];
                for at in (0..part.len()).step_by(LINE) {
                    // SAFETY: what is asked for may lie anywhere.
                    unsafe {
                        S::prefetch_near(part.as_ptr().wrapping_add(at + rows_ahead * apart))
                    };
                }
            }
        }
        let numbers = first * per_row..(first + at_once) * per_row;
        let ([s, b], scales, biases) = (parts, &mut scales[numbers.clone()], &mut biases[numbers]);
        // SAFETY: the caller's: there are bytes for all numbers.
        unsafe {
            match w.of {
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
                    scaled::<S>(of, s, 0.5, scales);
                    biases
                        .iter_mut()
                        .zip(scales)
                        .for_each(|(bias, half)| *bias = E2M1_BIAS * *half);
                }
            }
        }
    }
}
