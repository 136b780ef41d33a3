//! SIMD vectors of an instruction set: the operations that the kernels are written with.
//!
//! The operations are split by use: [`Float`] arithmetic, [`Load`] of small float types,
//! [`Transpose`] of packed rows, and [`Int8Dot`] for quantized products. [`Simd`] is all of them.
//! AVX2, AVX-512, NEON and a portable fallback implement them; a kernel is generic over `S: Simd`
//! and is inlined into a function that enables the instruction set (see `kernels!`).
//!
//! No vector is captured by a closure: a closure does not inherit the `target_feature` of the
//! function that it is inlined into, so each intrinsic in it would become a call.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are indexed together, without closures"
)]

use super::{
    float_types::{Bf16Type, FloatType, f16_to_f32},
    unpack_affine::{E2M1_QUANTS, MAX_UNPACKED, Packing},
};

/// Activations that share a scale when they are quantized to 8 bits.
pub(crate) const Q8_GROUP: usize = 16;

/// Bytes of the widest vector, and of the widest unit of unpacked quants.
pub(super) const MAX_VECTOR_BYTES: usize = 64;
/// f32 lanes of the widest vector.
pub(crate) const MAX_LANES: usize = MAX_VECTOR_BYTES / 4;

/// Bytes of a cache line.
pub(super) const CACHE_LINE: usize = 64;
/// Least distance in bytes of a prefetch into L2: covers the latency of memory, and is a small
/// share of L2.
pub(super) const L2_PREFETCH: usize = 16 << 10;
/// Least distance in bytes of a prefetch into L1.
pub(super) const L1_PREFETCH: usize = 8 << 10;

/// Number of rows that are at least `distance` bytes: a multiple of `tile` rows, so that the end of
/// a tile prefetches the end of a later tile.
#[inline(always)]
pub(super) const fn prefetch_rows(distance: usize, row_bytes: usize, tile: usize) -> usize {
    distance.div_ceil(if row_bytes == 0 { tile } else { tile * row_bytes }) * tile
}

/// Pointers to rows, one per lane of a vector.
pub(super) type RowPointers = [*const u8; MAX_LANES];

/// Vector types of an instruction set, and the tile sizes that its registers allow.
pub(super) trait VectorTypes: Copy {
    /// [`LANES`](Self::LANES) f32.
    type F32: Copy;
    /// [`LANES`](Self::LANES) i32.
    type I32: Copy;
    /// Four bytes (one dword) per lane. After a transposition lane `r` belongs to row `r`.
    type Dwords: Copy;
    /// Dwords as [`Int8Dot::dot_broadcast`] takes them: widened to 16 bits where there is no int8
    /// product, else the same as `Dwords`.
    type DotOperand: Copy;
    /// [`UNIT`](Self::UNIT) bytes.
    type UnitBytes: Copy;
    /// f32 lanes of a vector.
    const LANES: usize;
    /// Quants that [`Int8Dot::unpack`] unpacks at once: a multiple of [`Q8_GROUP`].
    const UNIT: usize;
    /// Whether `f32::mul_add` is one instruction.
    const HAS_FMA: bool;
    /// Rows of activations for which a tile's sums fit in registers.
    const TILE_ACTIVATIONS: usize;
    /// Rows of packed weights of a GEMV tile with two and with four rows of activations: as many as
    /// keep the sums in registers.
    const GEMV_WEIGHT_ROWS: [usize; 2];
}

/// Arithmetic on f32 vectors.
///
/// # Safety
/// The contract of [`Simd`].
pub(super) trait Float: VectorTypes {
    /// All lanes 0.
    unsafe fn zero() -> Self::F32;
    /// All lanes `x`.
    unsafe fn splat(x: f32) -> Self::F32;
    /// Reads `LANES` f32 at any alignment.
    unsafe fn load(p: *const f32) -> Self::F32;
    /// Writes `LANES` f32 at any alignment.
    unsafe fn store(p: *mut f32, x: Self::F32);
    /// Reads `n` f32, at most `LANES`; the remaining lanes are 0.
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize) -> Self::F32 {
        let mut values = [0.0; MAX_LANES];
        // SAFETY: Simd contract: `n` values can be read. The array is as long as any vector.
        unsafe {
            if n == Self::LANES {
                return Self::load(p);
            }
            std::ptr::copy_nonoverlapping(p, values.as_mut_ptr(), n);
            Self::load(values.as_ptr())
        }
    }
    /// Reads `n` f32, a power of two of at most `LANES`, and repeats each in `LANES / n`
    /// consecutive lanes.
    unsafe fn load_repeated(p: *const f32, n: usize) -> Self::F32;
    /// Lanes in the order of the lanes of [`Transpose::transpose_quads`]: lane `i` of the argument
    /// belongs to the `i`-th four dwords of its four vectors.
    unsafe fn order_quads(x: Self::F32) -> Self::F32;
    /// `a * b`
    unsafe fn mul(a: Self::F32, b: Self::F32) -> Self::F32;
    /// `a * b + c`, rounded once if [`VectorTypes::HAS_FMA`].
    unsafe fn fma(a: Self::F32, b: Self::F32, c: Self::F32) -> Self::F32;
    /// Larger magnitude per lane. Only called where [`Load::E4M3_FACTOR`] is not 1; the default
    /// returns `a`.
    #[inline(always)]
    unsafe fn max_abs(a: Self::F32, _b: Self::F32) -> Self::F32 {
        a
    }
    /// Horizontal sum. The order of additions is fixed per instruction set.
    unsafe fn sum(x: Self::F32) -> f32;
    /// Four horizontal sums, bit-identical to four calls of [`Float::sum`].
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [Self::F32; 4]) -> [f32; 4] {
        // SAFETY: Simd contract.
        unsafe { [Self::sum(a), Self::sum(b), Self::sum(c), Self::sum(d)] }
    }
    /// Converts i32 to f32.
    unsafe fn from_i32(x: Self::I32) -> Self::F32;
}

/// Loads of small types as f32, and prefetches.
///
/// # Safety
/// The contract of [`Simd`].
pub(super) trait Load: Float {
    /// Reads `LANES` bytes as values from 0 to 255.
    unsafe fn load_u8(p: *const u8) -> Self::F32;
    /// Reads `LANES` bf16.
    unsafe fn load_bf16(p: *const u8) -> Self::F32;
    /// [`Float::load_partial`] of bf16.
    #[inline(always)]
    unsafe fn load_partial_bf16(p: *const u8, n: usize) -> Self::F32 {
        let mut values = [0u16; MAX_LANES];
        // SAFETY: Simd contract: `n` values can be read. The array is as long as any vector.
        unsafe {
            if n == Self::LANES {
                return Self::load_bf16(p);
            }
            for i in 0..n {
                values[i] = p.cast::<u16>().add(i).read_unaligned();
            }
            Self::load_bf16(values.as_ptr().cast())
        }
    }
    /// [`Float::load_repeated`] of bf16.
    #[inline(always)]
    unsafe fn load_repeated_bf16(p: *const u8, n: usize) -> Self::F32 {
        let mut values = [0.0; MAX_LANES];
        // SAFETY: Simd contract: `n` values can be read.
        unsafe {
            for i in 0..n {
                values[i] = Bf16Type::get(p.add(2 * i));
            }
            Self::load_repeated(values.as_ptr(), n)
        }
    }
    /// Reads `LANES` f16.
    unsafe fn load_f16(p: *const u8) -> Self::F32;
    /// Converts f16.
    #[inline(always)]
    unsafe fn widen_f16(x: [u16; 8]) -> [f32; 8] {
        x.map(f16_to_f32)
    }
    /// Reads `LANES` E4M3 (one byte each).
    unsafe fn load_e4m3(p: *const u8) -> Self::F32;
    /// Factor by which [`Load::load_e4m3_raw`] is too small.
    const E4M3_FACTOR: f32 = 1.0;
    /// [`Load::load_e4m3`] divided by [`Load::E4M3_FACTOR`], where that is cheaper. If the factor
    /// is not 1, a NaN becomes a value above all finite elements.
    #[inline(always)]
    unsafe fn load_e4m3_raw(p: *const u8) -> Self::F32 {
        // SAFETY: Simd contract.
        unsafe { Self::load_e4m3(p) }
    }
    /// Whether [`Load::load_e4m3_line`] is cheaper than four vectors; `LANES` is 16 then.
    const HAS_E4M3_LINE: bool = false;
    /// Reads `4 * LANES` E4M3, in order.
    #[inline(always)]
    unsafe fn load_e4m3_line(p: *const u8) -> [Self::F32; 4] {
        // SAFETY: Simd contract: `4 * LANES` bytes can be read.
        unsafe {
            let [b, c, d] = [p.add(Self::LANES), p.add(2 * Self::LANES), p.add(3 * Self::LANES)];
            [Self::load_e4m3(p), Self::load_e4m3(b), Self::load_e4m3(c), Self::load_e4m3(d)]
        }
    }
    /// Reads `LANES` E2M1 (two per byte, low half first).
    unsafe fn load_e2m1(p: *const u8) -> Self::F32;

    /// Prefetches a line into L2, which accepts more outstanding lines than L1. `p` may be any
    /// address.
    unsafe fn prefetch_l2(p: *const u8);
    /// Prefetches a line into L1: for data that is streamed once at the speed of memory. `p` may be
    /// any address.
    unsafe fn prefetch_l1(p: *const u8);
}

/// Vectors of dwords, and the transposition of rows to them.
///
/// # Safety
/// The contract of [`Simd`].
pub(super) trait Transpose: VectorTypes {
    /// Dwords per row that [`Transpose::transpose`] reads: from 8 to [`MAX_LANES`].
    const TRANSPOSE_DWORDS: usize;
    /// Reads `4 * LANES` bytes.
    unsafe fn load_dwords(p: *const u8) -> Self::Dwords;
    /// Writes `4 * LANES` bytes.
    unsafe fn store_dwords(p: *mut u8, x: Self::Dwords);
    /// Transposes `4 * TRANSPOSE_DWORDS` bytes of each of `LANES` rows, from byte `offset` on.
    /// Vector `i < TRANSPOSE_DWORDS` of the result has dword `i` of every row.
    unsafe fn transpose(rows: &RowPointers, offset: usize) -> [Self::Dwords; MAX_LANES];
    /// Number of [`Transpose::transpose_step`] calls that make up one transposition.
    const TRANSPOSE_STEPS: usize = 1;
    /// Step `i` of [`Transpose::transpose`]. After the last step the vectors are at `dst`;
    /// `scratch` carries data from step to step. Both have room for [`MAX_LANES`] vectors.
    #[inline(always)]
    unsafe fn transpose_step(
        rows: &RowPointers,
        offset: usize,
        _i: usize,
        [_scratch, dst]: [*mut u8; 2],
    ) {
        // SAFETY: Simd contract; `dst` has room for all vectors.
        unsafe {
            let columns = Self::transpose(rows, offset);
            for d in 0..Self::TRANSPOSE_DWORDS {
                Self::store_dwords(dst.add(d * 4 * Self::LANES), columns[d]);
            }
        }
    }
    /// [`Transpose::transpose`] of the first `len` bytes, zero-padded.
    #[inline(always)]
    unsafe fn transpose_partial(
        rows: &RowPointers,
        offset: usize,
        len: usize,
    ) -> [Self::Dwords; MAX_LANES] {
        // SAFETY: Simd contract: `len` bytes can be read; the copies are as long as any vector.
        unsafe {
            let ends = copy_row_ends::<Self>(rows, offset, len);
            Self::transpose(&ends.each_ref().map(|end| end.as_ptr()), 0)
        }
    }
    /// Transposes four dwords at a time: vector `i` of the result has dword `i` of each of the
    /// `LANES` times four dwords, in the order of [`Float::order_quads`].
    unsafe fn transpose_quads(x: [Self::Dwords; 4]) -> [Self::Dwords; 4];
    /// Even dwords of `a` and `b` in one vector, odd dwords in the other.
    unsafe fn deinterleave(a: Self::Dwords, b: Self::Dwords) -> [Self::Dwords; 2];
    /// Dwords as f32.
    unsafe fn dwords_to_f32(x: Self::Dwords) -> Self::F32;
    /// Dwords as two bf16 each: first and second of every row.
    unsafe fn dwords_to_bf16(x: Self::Dwords) -> [Self::F32; 2];
    /// Dwords as two f16 each: first and second of every row.
    unsafe fn dwords_to_f16(x: Self::Dwords) -> [Self::F32; 2];
}

/// Unpacking of quants, and dot products of int8.
///
/// # Safety
/// The contract of [`Simd`].
pub(super) trait Int8Dot: VectorTypes {
    /// Bytes that [`Int8Dot::unpack`] reads: at least those of a unit.
    fn unpack_read_bytes(bits: usize) -> usize;
    /// Unpacks [`VectorTypes::UNIT`] quants of `BITS` bits, in order, one per byte.
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> Self::UnitBytes;
    /// Writes `UNIT` bytes.
    unsafe fn store_bytes(p: *mut u8, x: Self::UnitBytes);
    /// The bytes of a unit as vectors of dwords, in order; vectors past the unit are arbitrary.
    unsafe fn bytes_to_dwords(x: Self::UnitBytes) -> [Self::Dwords; MAX_UNPACKED];
    /// `(byte >> shift) & ((1 << bits) - 1)` of each byte; `shift` is even.
    unsafe fn extract_bits(x: Self::Dwords, shift: usize, bits: usize) -> Self::Dwords;
    /// The table's value of each byte, a code below 16.
    unsafe fn look_up(table: &[u8; 16], x: Self::Dwords) -> Self::Dwords;
    /// [`E2M1_QUANTS`] of each byte, a code below 16.
    #[inline(always)]
    unsafe fn decode_e2m1(x: Self::Dwords) -> Self::Dwords {
        // SAFETY: Simd contract.
        unsafe { Self::look_up(&E2M1_QUANTS, x) }
    }

    /// All lanes 0.
    unsafe fn zero_i32() -> Self::I32;
    /// `sum[lane] + sum_i dot4(w[i][lane], x[i][lane])` over the first `N` vectors: `w` is unsigned
    /// of `P::BITS` bits, `x` is signed.
    unsafe fn dot<P: Packing, const N: usize>(
        sum: Self::I32,
        w: [Self::Dwords; MAX_UNPACKED],
        x: [Self::Dwords; MAX_UNPACKED],
    ) -> Self::I32;
    /// [`Int8Dot::dot`] of four vectors of weights and 16 activations at `x`: dword `i` of `x`,
    /// broadcast to all lanes, is multiplied with `w[i]`. With [`Int8Dot::CENTERED`], 8-bit weights
    /// are signed.
    unsafe fn dot_broadcast<P: Packing>(
        sum: Self::I32,
        w: [Self::DotOperand; MAX_UNPACKED],
        x: *const i8,
    ) -> Self::I32;
    /// [`Int8Dot::dot_broadcast`] of several rows of activations. Integer sums are exact, so
    /// implementations may add in any order.
    #[inline(always)]
    unsafe fn dot_broadcast_rows<P: Packing, const X: usize>(
        w: [Self::DotOperand; MAX_UNPACKED],
        x: [*const i8; X],
    ) -> [Self::I32; X] {
        // SAFETY: Simd contract: 16 activations can be read at every pointer.
        unsafe {
            let mut sums = [Self::zero_i32(); X];
            for c in 0..X {
                sums[c] = Self::dot_broadcast::<P>(sums[c], w, x[c]);
            }
            sums
        }
    }
    /// Unpacked quants as [`Int8Dot::dot_broadcast`] takes them.
    unsafe fn to_operand(x: Self::Dwords) -> Self::DotOperand;
    /// Whether 8-bit weights are unpacked to `q - 128` as i8. Set where operands above 127 cost
    /// extra instructions, because sums of two products would overflow 16 bits.
    const CENTERED: bool = false;
    /// `q - 128` as i8 of each byte, if [`Int8Dot::CENTERED`].
    #[inline(always)]
    unsafe fn center(x: Self::Dwords) -> Self::Dwords {
        x
    }

    /// Largest magnitude of a group. NaN orders above all values.
    #[inline(always)]
    unsafe fn group_max_abs(x: &[f32; Q8_GROUP]) -> f32 {
        let mut max = [0u32; Q8_GROUP / 2];
        for x in x.as_chunks::<{ Q8_GROUP / 2 }>().0 {
            for (max, x) in max.iter_mut().zip(x) {
                let bits = x.to_bits() & 0x7fff_ffff;
                *max = if bits > *max { bits } else { *max };
            }
        }
        f32::from_bits(max.into_iter().fold(0, u32::max))
    }
    /// Rounds `x * inverse_scale`, of magnitude at most 127, to integers in `q`; returns their sum.
    /// NaN becomes 0.
    #[inline(always)]
    unsafe fn quantize_group(
        x: &[f32; Q8_GROUP],
        inverse_scale: f32,
        q: &mut [i8; Q8_GROUP],
    ) -> i32 {
        // 1.5 * 2^23: its sum with a small value has the nearest integer in the low bits.
        const MAGIC: f32 = 12_582_912.0;
        let mut whole = [0i32; Q8_GROUP];
        for (n, x) in whole.iter_mut().zip(x) {
            *n = i32::from((x * inverse_scale + MAGIC).to_bits() as u8 as i8);
        }
        for (q, n) in q.iter_mut().zip(whole) {
            *q = n as i8;
        }
        whole.iter().sum()
    }
}

/// All vector operations of an instruction set.
///
/// # Safety
/// The *Simd contract*, which the unsafe functions of this trait's supertraits require, and which
/// the kernels built on them pass on to their callers:
/// - The processor has the instruction set. [`Kernels`](super::Kernels), the only safe way to call
///   a kernel, exists only for instruction sets that were detected.
/// - Every pointer is valid for the bytes that the function documents to read or write: a whole
///   vector, unless a count is given. Alignment is not required.
///
/// `SAFETY` comments cite it as "Simd contract"; further requirements of a kernel are in its
/// `# Safety` section.
pub(super) trait Simd: Float + Load + Transpose + Int8Dot {}

impl<S: Float + Load + Transpose + Int8Dot> Simd for S {}

/// Zero-padded copies of the ends of rows: `len` bytes from `offset` on.
///
/// # Safety
/// `len` bytes can be read at `offset` of every row.
#[inline(always)]
pub(super) unsafe fn copy_row_ends<S: VectorTypes>(
    rows: &RowPointers,
    offset: usize,
    len: usize,
) -> [[u8; MAX_VECTOR_BYTES]; MAX_LANES] {
    let (mut ends, len) = ([[0; MAX_VECTOR_BYTES]; MAX_LANES], len.min(MAX_VECTOR_BYTES));
    for r in 0..S::LANES {
        // SAFETY: the caller guarantees `len` readable bytes; `ends[r]` has room for them.
        unsafe {
            let row = rows[r].add(offset);
            // Whole words first: a call to memcpy takes longer.
            for i in (0..len / 4 * 4).step_by(4) {
                let word = row.add(i).cast::<u32>().read_unaligned();
                ends[r].as_mut_ptr().add(i).cast::<u32>().write_unaligned(word);
            }
            for i in len / 4 * 4..len {
                ends[r][i] = *row.add(i);
            }
        }
    }
    ends
}
