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

use super::{
    algorithm::{Bf16, F16, F32, GROUP, LINE, MOST_LANES, Simd, TILE, reduce, rows_ahead, widen},
    blocks::e2m1_scales,
    columns::{Groups, QuantRows, RoundedRow, Scales},
    quants::{E2M1_BIAS, PARTS, Packing, end_of_row, parts},
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
    /// One per group, and what is read behind them for a last block that is cut off, which meets zeros.
    scales: *const f32,
    /// One per group.
    biases: *const f32,
    /// Bytes that can be read from `q` on: what is behind the row meets zeros.
    reach: usize,
}

/// What rows meet of `X` rows of activations.
#[derive(Clone, Copy)]
struct Meets<const X: usize> {
    blocks: [*const u8; X],
    sums: [*const f32; X],
}

/// Vectors of partial sums of the products of `R` rows of quants and `X` of activations:
/// `sum_g scale_w scale_x sum(q x) + sum_g bias_w sum(x)`. The rows are asked for `ahead` bytes early.
///
/// # Safety
/// The rows are as their types say, for `groups`.
#[inline(always)]
unsafe fn rows<S: Simd, P: Packing, const R: usize, const X: usize>(
    w: &[Row; R],
    x: &Meets<X>,
    groups: Groups,
    ahead: usize,
) -> [[S::F; X]; R] {
    // SAFETY: the caller's.
    unsafe {
        // What is added up in each is large where quants stand for numbers of both signs, and their sum is not.
        let (mut acc, mut of_biases) = ([[S::zero(); X]; R], [[S::zero(); X]; R]);
        for i in (0..groups.count()).step_by(S::LANES) {
            let n = S::LANES.min(groups.count() - i);
            for r in 0..R {
                let biases = S::load_first(w[r].biases.add(i), n);
                for c in 0..X {
                    of_biases[r][c] = S::fma(biases, S::load_first(x.sums[c].add(i), n), of_biases[r][c]);
                }
            }
        }
        // What blocks of a packing cannot have is not compiled.
        let most = Block::<S, P>::QUANTS / P::LEAST_GROUP;
        match Block::<S, P>::QUANTS / groups.group {
            16.. if most >= 16 => add_blocks::<S, P, 16, R, X>(&mut acc, w, x, groups, ahead),
            8.. if most >= 8 => add_blocks::<S, P, 8, R, X>(&mut acc, w, x, groups, ahead),
            4.. if most >= 4 => add_blocks::<S, P, 4, R, X>(&mut acc, w, x, groups, ahead),
            2.. if most >= 2 => add_blocks::<S, P, 2, R, X>(&mut acc, w, x, groups, ahead),
            _ => add_blocks::<S, P, 1, R, X>(&mut acc, w, x, groups, ahead),
        }
        for r in 0..R {
            for c in 0..X {
                acc[r][c] = S::fma(S::splat(1.0), of_biases[r][c], acc[r][c]);
            }
        }
        acc
    }
}

/// Adds the products of all blocks, which have `SCALES` scales each, or share one.
///
/// # Safety
/// As [`rows`].
#[inline(always)]
unsafe fn add_blocks<S: Simd, P: Packing, const SCALES: usize, const R: usize, const X: usize>(
    acc: &mut [[S::F; X]; R],
    w: &[Row; R],
    x: &Meets<X>,
    groups: Groups,
    ahead: usize,
) {
    let (quants, size) = (Block::<S, P>::QUANTS, Block::<S, P>::BYTES);
    let blocks = groups.cols.div_ceil(quants);
    let shared = (groups.group / quants).max(1).trailing_zeros();
    // Blocks that can be loaded without reading beyond the matrix.
    let inside = (w[R - 1].reach + size).saturating_sub(Block::<S, P>::reach()) / size;
    // SAFETY: the caller's; activations are padded to whole blocks, with zeros, and scales are there for whole blocks.
    unsafe {
        for u in 0..inside.min(blocks) {
            for r in 0..R {
                let q = w[r].q.add(u * size);
                S::prefetch(q.wrapping_add(ahead));
                let scales = if SCALES == 1 { u >> shared } else { u * SCALES };
                add::<S, P, SCALES, X>(&mut acc[r], q, w[r].scales.add(scales), (x, u));
            }
        }
        for u in inside..blocks {
            for r in 0..R {
                let end = end_of_row(w[r].q.add(u * size), w[r].reach - u * size);
                let scales = if SCALES == 1 { u >> shared } else { u * SCALES };
                add::<S, P, SCALES, X>(&mut acc[r], end.as_ptr(), w[r].scales.add(scales), (x, u));
            }
        }
    }
}

/// Adds the products of a block, at `q`, and of block `u` of the activations.
///
/// # Safety
/// As [`rows`].
#[inline(always)]
unsafe fn add<S: Simd, P: Packing, const SCALES: usize, const X: usize>(
    acc: &mut [S::F; X],
    q: *const u8,
    scales: *const f32,
    (x, u): (&Meets<X>, usize),
) {
    let (vectors, meets) = (Block::<S, P>::VECTORS, Block::<S, P>::MEETS);
    // SAFETY: the caller's.
    unsafe {
        let w = Block::<S, P>::load(q);
        let scale = S::spread(scales, SCALES);
        for c in 0..X {
            let at = x.blocks[c].add(u * meets);
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

/// The products of rows of packed quants and `X` of activations, as many of which as `out`, `(rows of activations, rows of
/// quants)`, has room for. `R` rows of weights, a divisor of [`TILE`], meet them at once.
///
/// # Safety
/// There are so many rows, activations are laid out for the packing and instruction set, and numbers of scratch are as many
/// as [`tile_numbers`](super::columns::tile_numbers) says.
#[inline(always)]
pub(super) unsafe fn decode<S: Simd, P: Packing, const R: usize, const X: usize>(
    w: &QuantRows<'_>,
    x: [LaidOut<'_>; X],
    groups: Groups,
    scratch: &mut [f32],
    out: &mut [f32],
) {
    let Groups { cols, group } = groups;
    let (bytes, per_row) = (cols * P::BITS / 8, groups.count());
    let (mut blocks, mut sums_of) = ([std::ptr::null(); X], [std::ptr::null(); X]);
    for c in 0..X {
        (blocks[c], sums_of[c]) = (x[c].blocks.as_ptr(), x[c].sums.as_ptr());
    }
    let rows_ahead = rows_ahead(bytes, TILE);
    let ahead = rows_ahead * w.q.1;
    let at_once = (WIDENED / per_row).clamp(TILE, MOST_LANES) / TILE * TILE;
    // The last row's are followed by zeros.
    let (scales, biases) = scratch.split_at_mut(at_once * per_row + MOST_LANES);
    for first in (0..w.count).step_by(at_once) {
        let count = at_once.min(w.count - first);
        // SAFETY: the caller's.
        unsafe { widen_scales::<S>(w, (first, count, per_row), rows_ahead, [scales, biases]) };
        scales[count * per_row..][..MOST_LANES].fill(0.0);
        for four in (0..count).step_by(TILE) {
            let n = TILE.min(count - four);
            let mut sums = [[0.0; X]; TILE];
            for begin in (0..cols).step_by(SECTION) {
                let groups = Groups { cols: SECTION.min(cols - begin), group };
                // SAFETY: the caller's; sections begin with blocks and groups.
                unsafe {
                    let mut meets = Meets { blocks, sums: sums_of };
                    for c in 0..X {
                        let at = begin / Block::<S, P>::QUANTS * Block::<S, P>::MEETS;
                        meets.blocks[c] = blocks[c].add(at);
                        meets.sums[c] = sums_of[c].add(begin / group);
                    }
                    let mut acc = [[S::zero(); X]; TILE];
                    for r in (0..n).step_by(R) {
                        let mut from = [Row {
                            q: w.q.0.as_ptr(),
                            scales: scales.as_ptr(),
                            biases: biases.as_ptr(),
                            reach: 0,
                        }; R];
                        for i in 0..R {
                            // The last row stands for those that are not there.
                            let row = four + (r + i).min(n - 1);
                            let at = (first + row) * w.q.1 + begin * P::BITS / 8;
                            let group = row * per_row + begin / group;
                            from[i].q = from[i].q.add(at);
                            from[i].scales = from[i].scales.add(group);
                            from[i].biases = from[i].biases.add(group);
                            from[i].reach = w.q.0.len() - at;
                        }
                        let some = rows::<S, P, R, X>(&from, &meets, groups, ahead);
                        for i in 0..R {
                            acc[r + i] = some[i];
                        }
                    }
                    let parts = reduce::<S, TILE, X>(&acc);
                    for r in 0..TILE {
                        for c in 0..X {
                            sums[r][c] += parts[r][c];
                        }
                    }
                }
            }
            for (c, out) in out.chunks_exact_mut(w.count).enumerate() {
                for r in 0..n {
                    out[first + four + r] = sums[r][c];
                }
            }
        }
    }
}

/// Widens scales and biases of `count` rows, of so many numbers each, from row `first` on, and asks for those of rows that
/// are further by `rows_ahead`.
///
/// # Safety
/// There are so many rows, and there is room for their numbers.
#[inline(always)]
unsafe fn widen_scales<S: Simd>(
    w: &QuantRows<'_>,
    (first, count, per_row): (usize, usize, usize),
    rows_ahead: usize,
    [scales, biases]: [&mut [f32]; 2],
) {
    let in_one_piece = |(all, apart): (&[u8], usize)| all.is_empty() || apart == w.scale_bytes;
    let at_once = if in_one_piece(w.scales) && in_one_piece(w.biases) { count } else { 1 };
    for i in (0..count).step_by(at_once) {
        let mut parts: [&[u8]; 2] = [&[]; 2];
        for (part, (all, apart)) in parts.iter_mut().zip([w.scales, w.biases]) {
            let (from, len) = ((first + i) * apart, at_once * w.scale_bytes);
            if !all.is_empty() {
                // SAFETY: the caller's.
                unsafe {
                    *part = all.get_unchecked(from..from + len);
                    for at in (0..len).step_by(LINE) {
                        S::prefetch(part.as_ptr().wrapping_add(at + rows_ahead * apart));
                    }
                }
            }
        }
        let numbers = i * per_row..(i + at_once) * per_row;
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
                    e2m1_scales(of, s, scales);
                    biases.iter_mut().zip(scales).for_each(|(bias, half)| *bias = E2M1_BIAS * *half);
                }
            }
        }
    }
}
