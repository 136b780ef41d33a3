//! The algorithms of the kernels, once, over the vectors of any instruction set.
//!
//! Everything here is inlined into functions that enable an instruction set (see `kernels!`). A sum over a row is
//! one vector of partial sums, filled from left to right: how many rows are summed at once changes no bit.
//!
//! No vector passes through a closure: a closure does not take over the instruction set of the function that it is
//! inlined into, so the compiler would call where it should compute.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are walked together, and without closures"
)]

use super::quants::{KV_SPLITS, Packing};
use crate::Scalar;

/// Activations that share a scale on the fast path.
pub(crate) const GROUP: usize = 16;
/// Most rows of weights, and most rows of activations, that meet in one call.
pub(crate) const TILE: usize = 4;
/// Sums of one call: by row of weights, then by row of activations.
pub(crate) type Sums = [[f32; TILE]; TILE];

/// How far ahead of where it is read a matrix is asked for, at least: enough for the memory's latency, and little for
/// a second-level cache.
pub(super) const FAR: usize = 16 << 10;
/// The same, of what the first-level cache is to hold.
pub(super) const NEAR: usize = 8 << 10;

/// Rows that make `ahead` bytes: whole tiles, so that the end of a tile asks for the end of another one.
#[inline(always)]
pub(super) const fn rows_ahead(ahead: usize, row_bytes: usize, tile: usize) -> usize {
    ahead.div_ceil(if row_bytes == 0 { tile } else { tile * row_bytes }) * tile
}

/// Bytes that the processor fetches at once.
pub(super) const LINE: usize = 64;

/// The widest unit of quants and the widest vector of numbers of any instruction set.
pub(super) const MAX_UNIT: usize = 64;
/// Most numbers of a vector of any instruction set.
pub(crate) const MAX_LANES: usize = MAX_UNIT / 4;

/// Pointers to rows, one for each lane of a vector.
pub(super) type Pointers = [*const u8; MAX_LANES];

/// A copy of the ends of rows, from byte `from` on, with zeros behind.
///
/// # Safety
/// `len` bytes can be read there of every row.
#[inline(always)]
pub(super) unsafe fn ends<S: Simd>(
    rows: &Pointers,
    from: usize,
    len: usize,
) -> [[u8; MAX_UNIT]; MAX_LANES] {
    let (mut ends, len) = ([[0; MAX_UNIT]; MAX_LANES], len.min(MAX_UNIT));
    for r in 0..S::LANES {
        // SAFETY: the caller's.
        unsafe {
            let row = rows[r].add(from);
            // Mostly whole words; a call that copies takes longer.
            for at in (0..len / 4 * 4).step_by(4) {
                let word = row.add(at).cast::<u32>().read_unaligned();
                ends[r].as_mut_ptr().add(at).cast::<u32>().write_unaligned(word);
            }
            for at in len / 4 * 4..len {
                ends[r][at] = *row.add(at);
            }
        }
    }
    ends
}

/// The vectors of an instruction set. `F` are `LANES` f32; `I` are `LANES` i32; `D` are four bytes of each of `LANES`
/// rows, and `W` the same as [`Simd::dot_fours`] takes them; `B` are `UNIT` bytes.
///
/// # Safety
/// Every function needs the instruction set, and pointers that are good for what it reads or writes.
pub(super) trait Simd: Copy {
    type F: Copy;
    type I: Copy;
    type D: Copy;
    type W: Copy;
    type B: Copy;
    /// Numbers of a vector.
    const LANES: usize;
    /// Quants of a unit: a multiple of [`GROUP`].
    const UNIT: usize;
    /// Fours of bytes of each row that [`Simd::columns`] transposes: eight at least, [`MAX_LANES`] at most.
    const DWORDS: usize;
    /// Whether `f32::mul_add` is one instruction.
    const FUSED: bool;
    /// Rows of activations that a tile has registers for.
    const WIDTH: usize;
    /// Rows of packed quants that two and that four rows of activations meet at once: as many as leave sums in registers.
    const PACKED: [usize; 2];

    unsafe fn zero() -> Self::F;
    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn sum(x: Self::F) -> f32;
    /// Four sums, of the same bits as [`Simd::sum`]'s.
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [Self::F; 4]) -> [f32; 4] {
        // SAFETY: the caller's.
        unsafe { [Self::sum(a), Self::sum(b), Self::sum(c), Self::sum(d)] }
    }
    /// Bytes, as numbers from 0 to 255.
    unsafe fn load_bytes(p: *const u8) -> Self::F;
    unsafe fn load_bf16(p: *const u8) -> Self::F;
    unsafe fn load_f16(p: *const u8) -> Self::F;
    unsafe fn load_e4m3(p: *const u8) -> Self::F;
    /// How many times smaller [`Simd::load_e4m3_bits`] is.
    const E4M3_FACTOR: f32 = 1.0;
    /// As [`Simd::load_e4m3`], but smaller, and what is no number larger than all numbers, where that is less work.
    #[inline(always)]
    unsafe fn load_e4m3_bits(p: *const u8) -> Self::F {
        // SAFETY: the caller's.
        unsafe { Self::load_e4m3(p) }
    }
    /// Whether [`Simd::load_e4m3_line`] is less work than single vectors; these have sixteen numbers then.
    const E4M3_LINES: bool = false;
    /// The elements of a line.
    #[inline(always)]
    unsafe fn load_e4m3_line(p: *const u8) -> [Self::F; 4] {
        // SAFETY: the caller's.
        unsafe {
            let [b, c, d] = [p.add(Self::LANES), p.add(2 * Self::LANES), p.add(3 * Self::LANES)];
            [Self::load_e4m3(p), Self::load_e4m3(b), Self::load_e4m3(c), Self::load_e4m3(d)]
        }
    }
    /// The larger sizes of numbers, where [`Simd::E4M3_FACTOR`] is not 1.
    #[inline(always)]
    unsafe fn larger(a: Self::F, _b: Self::F) -> Self::F {
        a
    }
    unsafe fn load_e2m1(p: *const u8) -> Self::F;

    /// Asks for bytes that will be read soon to come into the second-level cache, which takes more of them at a time than
    /// the first; `p` may point anywhere.
    unsafe fn prefetch(p: *const u8);
    /// As [`Simd::prefetch`], into the first-level cache: for what is read from end to end, once, and no faster than it comes.
    unsafe fn prefetch_near(p: *const u8);

    /// Bytes that [`Simd::unpack`] reads; at least those of a unit.
    fn reach(bits: usize) -> usize;
    /// A unit of packed quants of `BITS` bits, in order.
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> Self::B;
    unsafe fn store_bytes(p: *mut u8, x: Self::B);
    /// The vectors of a unit, and any others.
    unsafe fn in_order(x: Self::B) -> [Self::D; KV_SPLITS];

    /// Transposes `4 * DWORDS` bytes of each of the first `LANES` rows, from byte `at` on: vector `i`, of the first
    /// `DWORDS`, has fours `i`.
    unsafe fn columns(rows: &Pointers, at: usize) -> [Self::D; MAX_LANES];
    /// Steps in which [`Simd::columns_step`] does what [`Simd::columns`] does.
    const STEPS: usize = 1;
    /// Step `i` of [`Simd::columns`], whose vectors are at `to` after the last one; the steps before have left what they made in
    /// `between`. Both have room for [`MAX_LANES`] vectors.
    #[inline(always)]
    unsafe fn columns_step(rows: &Pointers, at: usize, _i: usize, [_between, to]: [*mut u8; 2]) {
        // SAFETY: the caller's.
        unsafe {
            let columns = Self::columns(rows, at);
            for d in 0..Self::DWORDS {
                Self::store_dwords(to.add(d * 4 * Self::LANES), columns[d]);
            }
        }
    }
    /// As [`Simd::columns`] of `len` bytes with zeros behind.
    #[inline(always)]
    unsafe fn first_columns(rows: &Pointers, at: usize, len: usize) -> [Self::D; MAX_LANES] {
        // SAFETY: the caller's: so many bytes can be read.
        unsafe { Self::columns(&ends::<Self>(rows, at, len).each_ref().map(|end| end.as_ptr()), 0) }
    }
    unsafe fn load_dwords(p: *const u8) -> Self::D;
    unsafe fn store_dwords(p: *mut u8, x: Self::D);
    /// `bits` bits of each byte, from bit `from` on; `from` is even.
    unsafe fn bits(x: Self::D, from: usize, bits: usize) -> Self::D;
    /// Of each byte of `x`, bits of E2M1, what [`E2M1_QUANTS`](super::quants::E2M1_QUANTS) has for it.
    unsafe fn e2m1_quants(x: Self::D) -> Self::D;
    unsafe fn f32_column(x: Self::D) -> Self::F;
    unsafe fn bf16_columns(x: Self::D) -> [Self::F; 2];
    unsafe fn f16_columns(x: Self::D) -> [Self::F; 2];
    /// Zeros.
    unsafe fn none() -> Self::I;
    /// Adds to each lane the products of unsigned `w`, of `P::BITS` bits, and signed `x`, of the first `N` vectors of both:
    /// four by four of each vector.
    unsafe fn dot<P: Packing, const N: usize>(
        sum: Self::I,
        w: [Self::D; KV_SPLITS],
        x: [Self::D; KV_SPLITS],
    ) -> Self::I;
    /// As [`Simd::dot`] of four vectors, each of which meets the same four of the sixteen numbers at `x` in all lanes. With
    /// [`Simd::CENTRED`] quants of eight bits are signed.
    unsafe fn dot_fours<P: Packing>(sum: Self::I, w: [Self::W; KV_SPLITS], x: *const i8)
    -> Self::I;
    /// [`Simd::dot_fours`] of several rows of activations, which come to the same sums in any order.
    #[inline(always)]
    unsafe fn dot_rows<P: Packing, const X: usize>(
        w: [Self::W; KV_SPLITS],
        x: [*const i8; X],
    ) -> [Self::I; X] {
        // SAFETY: the caller's.
        unsafe {
            let mut sums = [Self::none(); X];
            for c in 0..X {
                sums[c] = Self::dot_fours::<P>(sums[c], w, x[c]);
            }
            sums
        }
    }
    /// Unpacked quants as [`Simd::dot_fours`] takes them.
    unsafe fn factors(x: Self::D) -> Self::W;
    /// Whether unpacked quants of eight bits are 128 less than packed ones, where products of large ones are more work.
    const CENTRED: bool = false;
    /// Eight bits 128 less, with a sign.
    #[inline(always)]
    unsafe fn centred(x: Self::D) -> Self::D {
        x
    }
    /// Fours of bytes with even numbers, then those with odd ones.
    unsafe fn unzip(a: Self::D, b: Self::D) -> [Self::D; 2];
    /// `n` numbers, a power of two, each in as many lanes, in order.
    unsafe fn spread(p: *const f32, n: usize) -> Self::F;
    /// The first `n` numbers of a vector, and zeros.
    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize) -> Self::F {
        let mut numbers = [0.0; MAX_LANES];
        // SAFETY: the caller's: `n` numbers can be read; no vector has more than the array.
        unsafe {
            if n == Self::LANES {
                return Self::load(p);
            }
            std::ptr::copy_nonoverlapping(p, numbers.as_mut_ptr(), n);
            Self::load(numbers.as_ptr())
        }
    }
    /// As [`Simd::spread`] of bf16.
    #[inline(always)]
    unsafe fn spread_bf16(p: *const u8, n: usize) -> Self::F {
        let mut numbers = [0.0; MAX_LANES];
        // SAFETY: the caller's.
        unsafe {
            for i in 0..n {
                numbers[i] = Bf16::number(p.add(2 * i));
            }
            Self::spread(numbers.as_ptr(), n)
        }
    }
    /// As [`Simd::load_first`] of bf16.
    #[inline(always)]
    unsafe fn load_first_bf16(p: *const u8, n: usize) -> Self::F {
        let mut numbers = [0u16; MAX_LANES];
        // SAFETY: the caller's: `n` numbers can be read; no vector has more than the array.
        unsafe {
            if n == Self::LANES {
                return Self::load_bf16(p);
            }
            for i in 0..n {
                numbers[i] = p.cast::<u16>().add(i).read_unaligned();
            }
            Self::load_bf16(numbers.as_ptr().cast())
        }
    }
    unsafe fn float(x: Self::I) -> Self::F;
    /// The largest size of a number; a NaN is larger than all others.
    #[inline(always)]
    unsafe fn largest_size(x: &[f32; GROUP]) -> f32 {
        let mut max = [0u32; GROUP / 2];
        for x in x.as_chunks::<{ GROUP / 2 }>().0 {
            for (max, x) in max.iter_mut().zip(x) {
                let bits = x.to_bits() & 0x7fff_ffff;
                *max = if bits > *max { bits } else { *max };
            }
        }
        f32::from_bits(max.into_iter().fold(0, u32::max))
    }
    /// Rounds `x * by`, of which none is larger than 127, to whole numbers; returns their sum. A NaN becomes zero.
    #[inline(always)]
    unsafe fn round(x: &[f32; GROUP], by: f32, q: &mut [i8; GROUP]) -> i32 {
        // Adding it to a small number leaves the nearest whole number in the low bits.
        const MAGIC: f32 = 12_582_912.0;
        let mut whole = [0i32; GROUP];
        for (n, x) in whole.iter_mut().zip(x) {
            *n = i32::from((x * by + MAGIC).to_bits() as u8 as i8);
        }
        for (q, n) in q.iter_mut().zip(whole) {
            *q = n as i8;
        }
        whole.iter().sum()
    }
}

/// How numbers lie in bytes.
pub(super) trait Element: Copy {
    const SCALAR: Scalar;
    unsafe fn load<S: Simd>(p: *const u8) -> S::F;
    /// One number, of as many bytes as it has.
    unsafe fn number(p: *const u8) -> f32;
}

/// Numbers that columns of fours of bytes are made of.
pub(super) trait Column: Element {
    /// The numbers of a row that lie in its four bytes; with one, both are the same.
    unsafe fn column<S: Simd>(x: S::D) -> [S::F; 2];
}

#[derive(Clone, Copy)]
pub(super) struct F32;
#[derive(Clone, Copy)]
pub(super) struct F16;
#[derive(Clone, Copy)]
pub(super) struct Bf16;

/// The number of bf16's bits.
#[inline(always)]
pub(super) fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// The number of f16's bits. Without branches, for vectors: moved to where f32 has exponent and mantissa, a number is 2^112
/// times too small.
#[inline(always)]
pub(super) fn widen_f16(bits: u16) -> f32 {
    let size = u32::from(bits & 0x7fff);
    let number = f32::from_bits(size << 13) * f32::from_bits((127 + 112) << 23);
    // What has the largest exponent is infinite, or NaN.
    let infinite = if size >= 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(number.to_bits() | infinite | u32::from(bits & 0x8000) << 16)
}

impl Element for F32 {
    const SCALAR: Scalar = Scalar::F32;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn number(p: *const u8) -> f32 {
        // SAFETY: the caller's.
        f32::from_bits(u32::from_le(unsafe { p.cast::<u32>().read_unaligned() }))
    }
}
impl Element for F16 {
    const SCALAR: Scalar = Scalar::F16;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn number(p: *const u8) -> f32 {
        // SAFETY: the caller's.
        widen_f16(u16::from_le(unsafe { p.cast::<u16>().read_unaligned() }))
    }
}
impl Element for Bf16 {
    const SCALAR: Scalar = Scalar::BF16;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F {
        // SAFETY: the caller's.
        unsafe { S::load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn number(p: *const u8) -> f32 {
        // SAFETY: the caller's.
        widen_bf16(u16::from_le(unsafe { p.cast::<u16>().read_unaligned() }))
    }
}

impl Column for F32 {
    #[inline(always)]
    unsafe fn column<S: Simd>(x: S::D) -> [S::F; 2] {
        // SAFETY: the caller's.
        unsafe { [S::f32_column(x); 2] }
    }
}
impl Column for F16 {
    #[inline(always)]
    unsafe fn column<S: Simd>(x: S::D) -> [S::F; 2] {
        // SAFETY: the caller's.
        unsafe { S::f16_columns(x) }
    }
}
impl Column for Bf16 {
    #[inline(always)]
    unsafe fn column<S: Simd>(x: S::D) -> [S::F; 2] {
        // SAFETY: the caller's.
        unsafe { S::bf16_columns(x) }
    }
}

/// Adds the products of `R` rows of numbers and `X` rows of f32 to vectors of partial sums. With `AHEAD` the rows, which
/// others follow, are asked for early.
///
/// # Safety
/// The rows have `cols` numbers.
#[inline(always)]
pub(super) unsafe fn add_products<
    S: Simd,
    E: Element,
    const R: usize,
    const X: usize,
    const AHEAD: bool,
>(
    acc: &mut [[S::F; X]; R],
    w: [*const u8; R],
    x: [*const f32; X],
    cols: usize,
) {
    let size = E::SCALAR.bytes();
    let whole = cols / S::LANES * S::LANES;
    let ahead = if AHEAD { rows_ahead(NEAR, cols * size, TILE) * cols * size } else { 0 };
    let mut i = 0;
    while i < whole {
        // SAFETY: i + LANES <= cols.
        unsafe {
            if AHEAD {
                for r in 0..R {
                    S::prefetch_near(w[r].wrapping_add(i * size + ahead));
                }
            }
            step::<S, E, R, X>(acc, w.map(|w| w.add(i * size)), x.map(|x| x.add(i)));
        }
        i += S::LANES;
    }
    let rest = cols - whole;
    if rest > 0 {
        let mut ws = [[0u8; MAX_UNIT]; R];
        let mut xs = [[0f32; MAX_UNIT / 4]; X];
        // SAFETY: the rest of the rows is shorter than a vector, and so than the arrays, which hold one.
        unsafe {
            for (r, buffer) in ws.iter_mut().enumerate() {
                std::ptr::copy_nonoverlapping(
                    w[r].add(whole * size),
                    buffer.as_mut_ptr(),
                    rest * size,
                );
            }
            for (c, buffer) in xs.iter_mut().enumerate() {
                std::ptr::copy_nonoverlapping(x[c].add(whole), buffer.as_mut_ptr(), rest);
            }
            let (ws, xs) =
                (std::array::from_fn(|r| ws[r].as_ptr()), std::array::from_fn(|c| xs[c].as_ptr()));
            step::<S, E, R, X>(acc, ws, xs);
        }
    }
}

#[inline(always)]
unsafe fn step<S: Simd, E: Element, const R: usize, const X: usize>(
    acc: &mut [[S::F; X]; R],
    w: [*const u8; R],
    x: [*const f32; X],
) {
    // SAFETY: the caller's: a vector can be read at every pointer.
    unsafe {
        let mut xs = [S::zero(); X];
        for c in 0..X {
            xs[c] = S::load(x[c]);
        }
        for r in 0..R {
            let w = E::load::<S>(w[r]);
            for c in 0..X {
                acc[r][c] = S::fma(w, xs[c], acc[r][c]);
            }
        }
    }
}

/// Products of `R` rows of numbers and `X` rows of f32.
///
/// # Safety
/// As [`add_products`].
#[inline(always)]
pub(super) unsafe fn numbers<
    S: Simd,
    E: Element,
    const R: usize,
    const X: usize,
    const AHEAD: bool,
>(
    w: [*const u8; R],
    x: [*const f32; X],
    cols: usize,
) -> [[f32; X]; R] {
    // SAFETY: the caller's.
    unsafe {
        let mut acc = [[S::zero(); X]; R];
        add_products::<S, E, R, X, AHEAD>(&mut acc, w, x, cols);
        reduce::<S, R, X>(&acc)
    }
}

/// Sums vectors of partial sums.
///
/// # Safety
/// Needs the instruction set.
#[inline(always)]
pub(super) unsafe fn reduce<S: Simd, const R: usize, const X: usize>(
    acc: &[[S::F; X]; R],
) -> [[f32; X]; R] {
    let mut sums = [[0.0; X]; R];
    let (fours, rest) = acc.as_flattened().as_chunks::<4>();
    let (to_fours, to_rest) = sums.as_flattened_mut().as_chunks_mut::<4>();
    for (to, four) in to_fours.iter_mut().zip(fours) {
        // SAFETY: the caller's.
        *to = unsafe { S::sum4(*four) };
    }
    for (to, one) in to_rest.iter_mut().zip(rest) {
        // SAFETY: the caller's.
        *to = unsafe { S::sum(*one) };
    }
    sums
}

/// The products of up to [`TILE`] rows of numbers and of f32 each, a part of the tile at a time. The `first` rows of f32 bring the others
/// from memory.
///
/// # Safety
/// The rows of `w` have as many numbers as those of `x`.
#[inline(always)]
pub(super) unsafe fn number_tile<S: Simd, E: Element>(
    (w, first): (&[&[u8]], bool),
    x: &[&[f32]],
    sums: &mut Sums,
) {
    /// Rows of weights with `X` rows of f32.
    #[inline(always)]
    unsafe fn part<S: Simd, E: Element, const X: usize, const AHEAD: bool>(
        w: &[&[u8]],
        x: &[&[f32]; X],
        at: usize,
        sums: &mut Sums,
    ) {
        let (rows, cols) = (x.map(<[f32]>::as_ptr), x[0].len());
        let mut write = |first: usize, tile: &[[f32; X]]| {
            for (to, from) in sums[first..].iter_mut().zip(tile) {
                to[at..at + X].copy_from_slice(from);
            }
        };
        // What one row meets comes faster from memory as two rows at a time.
        let (pairs, rest) = if X == 1 { w.as_chunks::<2>() } else { (&[][..], w) };
        // SAFETY: the caller's.
        unsafe {
            for (i, pair) in pairs.iter().enumerate() {
                let pair = pair.map(<[u8]>::as_ptr);
                write(2 * i, &numbers::<S, E, 2, X, AHEAD>(pair, rows, cols));
            }
            if let Ok(w) = <&[&[u8]; TILE]>::try_from(rest) {
                return write(
                    0,
                    &numbers::<S, E, TILE, X, AHEAD>(w.map(<[u8]>::as_ptr), rows, cols),
                );
            }
            for (i, w) in rest.iter().enumerate() {
                write(2 * pairs.len() + i, &numbers::<S, E, 1, X, AHEAD>([w.as_ptr()], rows, cols));
            }
        }
    }
    /// The first ones ask for the rows that follow. Returns how many they were.
    #[inline(always)]
    unsafe fn each<S: Simd, E: Element, const X: usize>(
        (w, first): (&[&[u8]], bool),
        x: &[&[f32]; X],
        at: usize,
        sums: &mut Sums,
    ) -> usize {
        // SAFETY: the caller's.
        unsafe {
            if first && at == 0 {
                part::<S, E, X, true>(w, x, at, sums);
            } else {
                part::<S, E, X, false>(w, x, at, sums);
            }
        }
        X
    }
    let mut at = 0;
    // SAFETY: the caller's.
    unsafe {
        while at < x.len() {
            let rest = &x[at..];
            at += if let (true, Some(x)) = (S::WIDTH >= 4, rest.first_chunk::<4>()) {
                each::<S, E, 4>((w, first), x, at, sums)
            } else if let (true, Some(x)) = (S::WIDTH >= 2, rest.first_chunk::<2>()) {
                each::<S, E, 2>((w, first), x, at, sums)
            } else {
                each::<S, E, 1>((w, first), &[rest[0]], at, sums)
            };
        }
    }
}

/// Widens numbers to f32, exactly.
#[inline(always)]
pub(super) unsafe fn widen<S: Simd, E: Element>(bytes: &[u8], out: &mut [f32]) {
    let whole = out.len() / S::LANES * S::LANES;
    // SAFETY: the wrapper has checked that there are bytes for all of `out`.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            S::store(
                out.as_mut_ptr().add(i),
                E::load::<S>(bytes.as_ptr().add(i * E::SCALAR.bytes())),
            );
        }
    }
    // One by one: they are few, and a copy of them that a vector is read from takes two calls.
    for (i, out) in out.iter_mut().enumerate().skip(whole) {
        // SAFETY: as above.
        *out = unsafe { E::number(bytes.as_ptr().add(i * E::SCALAR.bytes())) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_are_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (widen_f16(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{bits:#x}"
            );
        }
    }
}
