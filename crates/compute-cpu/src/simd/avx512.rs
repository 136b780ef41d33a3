//! Vectors of AVX-512 with VNNI; with `VBMI`, 128-byte table look-ups of AVX-512 VBMI.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are indexed together, without closures"
)]

use std::arch::x86_64::*;

use moeflux_ops::{Element, seam::E4M3 as E4M3_VALUES};

use super::{
    avx2::{Avx2, QuantShuffle},
    gemm_f32::F32TileSums,
    table::{KernelTable, on_avx512},
    unpack_affine::{MAX_UNPACKED, Packing},
    unpack_mx::{self, BlockScaledRow, E4m3},
    vector::{Float, Int8Dot, Load, MAX_LANES, Q8_GROUP, RowPointers, Transpose, VectorTypes},
};

/// AVX-512 F, BW, VL, DQ and VNNI, and VBMI if `VBMI`.
#[derive(Clone, Copy)]
pub(super) struct Avx512<const VBMI: bool>;

/// Tables that convert E4M3 codes without sign to bf16.
struct E4m3Tables {
    /// Low bytes of the bf16.
    low: [[u8; 64]; 2],
    /// High bytes of the bf16.
    high: [[u8; 64]; 2],
    /// Permutation of the codes after which two unpacks, of bytes and of words within 128 bits,
    /// yield the elements in order.
    order: [u8; 64],
}

static E4M3: E4m3Tables = {
    let mut tables = E4m3Tables { low: [[0; 64]; 2], high: [[0; 64]; 2], order: [0; 64] };
    let mut i = 0;
    while i < 128 {
        let bits = E4M3_VALUES[i].to_bits() >> 16;
        (tables.low[i / 64][i % 64], tables.high[i / 64][i % 64]) = (bits as u8, (bits >> 8) as u8);
        i += 1;
    }
    // 128-bit lane `l` of result `v` has elements 16 v + 4 l to 16 v + 4 l + 3.
    let mut i = 0;
    while i < 64 {
        let (lane, vector) = (i / 16, i % 16 / 4);
        tables.order[i] = (16 * vector + 4 * lane + i % 4) as u8;
        i += 1;
    }
    tables
};

/// Permutation of the 16-bit words of `8 * bits` bytes that gives every lane of 128 bits the `bits`
/// words with its sixteen quants.
const fn words(bits: usize) -> [u16; 32] {
    let mut words = [0; 32];
    let mut i = 0;
    while i < 32 {
        let word = i / 8 * bits + i % 8;
        words[i] = if word < 32 { word as u16 } else { 31 };
        i += 1;
    }
    words
}

/// Table of [`words`].
struct WordPermutation<const BITS: usize>;

impl<const BITS: usize> WordPermutation<BITS> {
    const INDEXES: [u16; 32] = words(BITS);
}

/// First half of a transposition of dwords, on four rows: 128-bit lane `l` of vector `j` has dword
/// `4 * l + j` of the rows.
///
/// # Safety
/// The Simd contract.
#[inline(always)]
unsafe fn transpose_within_lanes([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: Simd contract.
    unsafe {
        let low = (_mm512_unpacklo_epi32(a, b), _mm512_unpacklo_epi32(c, d));
        let high = (_mm512_unpackhi_epi32(a, b), _mm512_unpackhi_epi32(c, d));
        [
            _mm512_unpacklo_epi64(low.0, low.1),
            _mm512_unpackhi_epi64(low.0, low.1),
            _mm512_unpacklo_epi64(high.0, high.1),
            _mm512_unpackhi_epi64(high.0, high.1),
        ]
    }
}

/// Second half: from vectors `j` of [`transpose_within_lanes`] of all rows, dwords `j`, `4 + j`,
/// `8 + j` and `12 + j`.
///
/// # Safety
/// The Simd contract.
#[inline(always)]
unsafe fn transpose_lanes([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: Simd contract.
    unsafe {
        let low = (_mm512_shuffle_i32x4::<0x44>(a, b), _mm512_shuffle_i32x4::<0x44>(c, d));
        let high = (_mm512_shuffle_i32x4::<0xee>(a, b), _mm512_shuffle_i32x4::<0xee>(c, d));
        [
            _mm512_shuffle_i32x4::<0x88>(low.0, low.1),
            _mm512_shuffle_i32x4::<0xdd>(low.0, low.1),
            _mm512_shuffle_i32x4::<0x88>(high.0, high.1),
            _mm512_shuffle_i32x4::<0xdd>(high.0, high.1),
        ]
    }
}

/// Transposes 16 x 16 dwords.
///
/// # Safety
/// The Simd contract.
#[inline(always)]
unsafe fn transpose_16x16(x: [__m512i; MAX_LANES]) -> [__m512i; MAX_LANES] {
    let (mut partial, mut columns) = (x, x);
    // SAFETY: Simd contract.
    unsafe {
        for i in 0..4 {
            [partial[i], partial[4 + i], partial[8 + i], partial[12 + i]] =
                transpose_within_lanes([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]]);
        }
        for j in 0..4 {
            let rows = [partial[4 * j], partial[4 * j + 1], partial[4 * j + 2], partial[4 * j + 3]];
            [columns[j], columns[4 + j], columns[8 + j], columns[12 + j]] = transpose_lanes(rows);
        }
    }
    columns
}

impl<const VBMI: bool> VectorTypes for Avx512<VBMI> {
    type F32 = __m512;
    type I32 = __m512i;
    type Dwords = __m512i;
    type DotOperand = __m512i;
    type UnitBytes = __m512i;
    const LANES: usize = 16;
    const UNIT: usize = 4 * Q8_GROUP;
    const HAS_FMA: bool = true;
    const TILE_ACTIVATIONS: usize = 4;
    const GEMV_WEIGHT_ROWS: [usize; 2] = [4, 2];
}

impl<const VBMI: bool> Float for Avx512<VBMI> {
    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: Simd contract.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: Simd contract.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: Simd contract.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        // SAFETY: Simd contract.
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize) -> __m512 {
        // SAFETY: Simd contract; the mask limits the read to `n` values. Whole vectors go without
        // a mask, as store forwarding is faster then.
        unsafe {
            if n == Self::LANES {
                return Self::load(p);
            }
            _mm512_maskz_loadu_ps(((1u32 << n) - 1) as u16, p)
        }
    }
    #[inline(always)]
    unsafe fn load_repeated(p: *const f32, n: usize) -> __m512 {
        // SAFETY: Simd contract; `n` values can be read.
        unsafe {
            match n {
                1 => _mm512_set1_ps(*p),
                2 => {
                    let pair =
                        _mm512_castsi512_ps(_mm512_set1_epi64(p.cast::<i64>().read_unaligned()));
                    let lanes = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
                    _mm512_permutevar_ps(pair, lanes)
                }
                4 => {
                    let four = _mm512_broadcast_f32x4(_mm_loadu_ps(p));
                    let lanes = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
                    _mm512_permutevar_ps(four, lanes)
                }
                8 => {
                    let eight = _mm512_castps256_ps512(_mm256_loadu_ps(p));
                    let lanes = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
                    _mm512_permutexvar_ps(lanes, eight)
                }
                _ => _mm512_loadu_ps(p),
            }
        }
    }
    #[inline(always)]
    unsafe fn order_quads(x: __m512) -> __m512 {
        // SAFETY: Simd contract.
        unsafe {
            let lanes = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
            _mm512_permutexvar_ps(lanes, x)
        }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: Simd contract.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: Simd contract.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn max_abs(a: __m512, b: __m512) -> __m512 {
        // SAFETY: Simd contract. 0b1011: maximum of magnitudes, sign cleared.
        unsafe { _mm512_range_ps::<0b1011>(a, b) }
    }
    #[inline(always)]
    unsafe fn sum(x: __m512) -> f32 {
        // SAFETY: Simd contract.
        unsafe {
            let (low, high) = (_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            Avx2::<false>::sum(_mm256_add_ps(low, high))
        }
    }
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        // SAFETY: Simd contract.
        unsafe {
            // Adds halves of two vectors at a time, then quarters of the results, then lanes.
            let ab = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0x44>(a, b),
                _mm512_shuffle_f32x4::<0xee>(a, b),
            );
            let cd = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0x44>(c, d),
                _mm512_shuffle_f32x4::<0xee>(c, d),
            );
            let x = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0x88>(ab, cd),
                _mm512_shuffle_f32x4::<0xdd>(ab, cd),
            );
            let x = _mm512_add_ps(x, _mm512_permute_ps::<0x4e>(x));
            let x = _mm512_add_ps(x, _mm512_permute_ps::<0xb1>(x));
            // Every lane of a 128-bit quarter has its sum.
            let firsts = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            let mut sums = [0.0; 4];
            _mm_storeu_ps(
                sums.as_mut_ptr(),
                _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, x)),
            );
            sums
        }
    }
    #[inline(always)]
    unsafe fn from_i32(x: __m512i) -> __m512 {
        // SAFETY: Simd contract.
        unsafe { _mm512_cvtepi32_ps(x) }
    }
}

impl<const VBMI: bool> Load for Avx512<VBMI> {
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m512 {
        // SAFETY: Simd contract.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m512 {
        // SAFETY: Simd contract.
        unsafe {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
                p.cast(),
            ))))
        }
    }
    #[inline(always)]
    unsafe fn load_partial_bf16(p: *const u8, n: usize) -> __m512 {
        // SAFETY: Simd contract; the mask limits the read to `n` values.
        unsafe {
            if n == Self::LANES {
                return Self::load_bf16(p);
            }
            let x = _mm256_maskz_loadu_epi16(((1u32 << n) - 1) as u16, p.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
        }
    }
    #[inline(always)]
    unsafe fn load_repeated_bf16(p: *const u8, n: usize) -> __m512 {
        /// Byte shuffle that moves `n` bf16, which every 128-bit lane has, to the upper halves of
        /// 32-bit lanes, each repeated `16 / n` times.
        const fn halves(n: usize) -> [i8; 64] {
            let mut shuffle = [-1; 64];
            let mut i = 0;
            while i < 16 {
                let byte = (2 * (i * n / 16)) as i8;
                (shuffle[4 * i + 2], shuffle[4 * i + 3]) = (byte, byte + 1);
                i += 1;
            }
            shuffle
        }
        const TWO: [i8; 64] = halves(2);
        const FOUR: [i8; 64] = halves(4);
        const EIGHT: [i8; 64] = halves(8);
        // SAFETY: Simd contract; `n` values can be read.
        unsafe {
            let (x, shuffle) = match n {
                1 => {
                    let x = _mm512_set1_epi16(p.cast::<i16>().read_unaligned());
                    return _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x));
                }
                2 => (_mm512_set1_epi32(p.cast::<i32>().read_unaligned()), &TWO),
                4 => (_mm512_set1_epi64(p.cast::<i64>().read_unaligned()), &FOUR),
                8 => (_mm512_broadcast_i32x4(_mm_loadu_si128(p.cast())), &EIGHT),
                _ => return Self::load_bf16(p),
            };
            _mm512_castsi512_ps(_mm512_shuffle_epi8(x, _mm512_loadu_si512(shuffle.as_ptr().cast())))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m512 {
        // SAFETY: Simd contract.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn widen_f16(x: [u16; 8]) -> [f32; 8] {
        // SAFETY: Simd contract.
        unsafe { Avx2::<false>::widen_f16(x) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m512 {
        // SAFETY: Simd contract. See `Avx2::load_e4m3`.
        unsafe {
            let x = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())));
            let x = _mm256_and_si256(x, _mm256_set1_epi16(!0x407f));
            let next = _mm256_add_epi16(x, _mm256_set1_epi16(0x80));
            let x = _mm256_or_si256(x, _mm256_and_si256(next, _mm256_set1_epi16(0x4000)));
            _mm512_mul_ps(_mm512_cvtph_ps(x), _mm512_set1_ps(256.0))
        }
    }
    const E4M3_FACTOR: f32 = 256.0;
    #[inline(always)]
    unsafe fn load_e4m3_raw(p: *const u8) -> __m512 {
        // SAFETY: Simd contract. See `Avx2::load_e4m3`; NaN is not handled.
        unsafe {
            let x = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())));
            _mm512_cvtph_ps(_mm256_and_si256(x, _mm256_set1_epi16(!0x407f)))
        }
    }
    const HAS_E4M3_LINE: bool = VBMI;
    #[inline(always)]
    unsafe fn load_e4m3_line(p: *const u8) -> [__m512; 4] {
        // SAFETY: Simd contract.
        unsafe {
            let load = |bytes: &[u8; 64]| _mm512_loadu_si512(bytes.as_ptr().cast());
            let codes = _mm512_permutexvar_epi8(load(&E4M3.order), _mm512_loadu_si512(p.cast()));
            let low = _mm512_permutex2var_epi8(load(&E4M3.low[0]), codes, load(&E4M3.low[1]));
            let high = _mm512_permutex2var_epi8(load(&E4M3.high[0]), codes, load(&E4M3.high[1]));
            // high | (codes & sign)
            let high =
                _mm512_ternarylogic_epi64::<0b1111_1000>(high, codes, _mm512_set1_epi8(i8::MIN));
            let (zero, first) = (_mm512_setzero_si512(), _mm512_unpacklo_epi8(low, high));
            let second = _mm512_unpackhi_epi8(low, high);
            [
                _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, first)),
                _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, first)),
                _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, second)),
                _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, second)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_e2m1(p: *const u8) -> __m512 {
        // SAFETY: Simd contract. The permutation looks up the low four bits of a lane.
        unsafe {
            let low = _mm512_set1_epi32(p.cast::<i32>().read_unaligned());
            let high = _mm512_set1_epi32(p.cast::<i32>().add(1).read_unaligned());
            let shifts =
                _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28);
            let x = _mm512_srlv_epi32(_mm512_mask_mov_epi32(low, 0xff00, high), shifts);
            let elements = _mm512_setr_ps(
                0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0,
                -6.0,
            );
            _mm512_permutexvar_ps(x, elements)
        }
    }
    #[inline(always)]
    unsafe fn prefetch_l2(p: *const u8) {
        // SAFETY: Simd contract; a prefetch does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_l1(p: *const u8) {
        // SAFETY: Simd contract; a prefetch does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
}

impl<const VBMI: bool> Transpose for Avx512<VBMI> {
    const TRANSPOSE_DWORDS: usize = 16;
    #[inline(always)]
    unsafe fn load_dwords(p: *const u8) -> __m512i {
        // SAFETY: Simd contract.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_dwords(p: *mut u8, x: __m512i) {
        // SAFETY: Simd contract.
        unsafe { _mm512_storeu_si512(p.cast(), x) }
    }
    #[inline(always)]
    unsafe fn transpose(rows: &RowPointers, offset: usize) -> [__m512i; MAX_LANES] {
        // SAFETY: Simd contract.
        unsafe {
            let mut x = [_mm512_setzero_si512(); MAX_LANES];
            for (x, row) in x.iter_mut().zip(rows) {
                *x = _mm512_loadu_si512(row.add(offset).cast());
            }
            transpose_16x16(x)
        }
    }
    const TRANSPOSE_STEPS: usize = 8;
    #[inline(always)]
    unsafe fn transpose_step(
        rows: &RowPointers,
        offset: usize,
        i: usize,
        [scratch, dst]: [*mut u8; 2],
    ) {
        // SAFETY: Simd contract.
        unsafe {
            let (mut x, j) = ([_mm512_setzero_si512(); 4], i % 4);
            if i < 4 {
                for r in 0..4 {
                    x[r] = _mm512_loadu_si512(rows[4 * j + r].add(offset).cast());
                }
                let x = transpose_within_lanes(x);
                for k in 0..4 {
                    _mm512_storeu_si512(scratch.add((4 * k + j) * 64).cast(), x[k]);
                }
            } else {
                for r in 0..4 {
                    x[r] = _mm512_loadu_si512(scratch.add((4 * j + r) * 64).cast());
                }
                let x = transpose_lanes(x);
                for k in 0..4 {
                    _mm512_storeu_si512(dst.add((4 * k + j) * 64).cast(), x[k]);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn transpose_partial(
        rows: &RowPointers,
        offset: usize,
        len: usize,
    ) -> [__m512i; MAX_LANES] {
        // SAFETY: Simd contract; the mask limits the read to `len` bytes.
        unsafe {
            let mask = if len < 64 { (1u64 << len) - 1 } else { u64::MAX };
            let mut x = [_mm512_setzero_si512(); MAX_LANES];
            for (x, row) in x.iter_mut().zip(rows) {
                *x = _mm512_maskz_loadu_epi8(mask, row.add(offset).cast());
            }
            transpose_16x16(x)
        }
    }
    #[inline(always)]
    unsafe fn transpose_quads(x: [__m512i; 4]) -> [__m512i; 4] {
        // SAFETY: Simd contract.
        unsafe { transpose_within_lanes(x) }
    }
    #[inline(always)]
    unsafe fn deinterleave(a: __m512i, b: __m512i) -> [__m512i; 2] {
        // SAFETY: Simd contract.
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
            [_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b)]
        }
    }
    #[inline(always)]
    unsafe fn dwords_to_f32(x: __m512i) -> __m512 {
        // SAFETY: Simd contract.
        unsafe { _mm512_castsi512_ps(x) }
    }
    #[inline(always)]
    unsafe fn dwords_to_bf16(x: __m512i) -> [__m512; 2] {
        // SAFETY: Simd contract.
        unsafe {
            let second = _mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x)), _mm512_castsi512_ps(second)]
        }
    }
    #[inline(always)]
    unsafe fn dwords_to_f16(x: __m512i) -> [__m512; 2] {
        // SAFETY: Simd contract.
        unsafe {
            let (first, second) =
                (_mm512_cvtepi32_epi16(x), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(x)));
            [_mm512_cvtph_ps(first), _mm512_cvtph_ps(second)]
        }
    }
}

impl<const VBMI: bool> Int8Dot for Avx512<VBMI> {
    fn unpack_read_bytes(bits: usize) -> usize {
        4 * Q8_GROUP * bits / 8
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> __m512i {
        // SAFETY: Simd contract; the mask limits the read to `unpack_read_bytes`.
        unsafe {
            match BITS {
                8 => _mm512_loadu_si512(p.cast()),
                4 => {
                    // In 16-bit lanes: the low half of a byte stays, the high half moves to the
                    // upper byte.
                    let x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(p.cast()));
                    let x = _mm512_or_si512(x, _mm512_slli_epi16::<4>(x));
                    _mm512_and_si512(x, _mm512_set1_epi8(15))
                }
                _ => {
                    let x = _mm512_maskz_loadu_epi8((1u64 << (8 * BITS)) - 1, p.cast());
                    let x = _mm512_permutexvar_epi16(
                        _mm512_loadu_si512(WordPermutation::<BITS>::INDEXES.as_ptr().cast()),
                        x,
                    );
                    let mut halves = [x; 2];
                    for (i, half) in halves.iter_mut().enumerate() {
                        let bytes = _mm_loadu_si128(QuantShuffle::<BITS>::BYTES[i].as_ptr().cast());
                        let factors =
                            _mm_loadu_si128(QuantShuffle::<BITS>::FACTORS[i].as_ptr().cast());
                        let x = _mm512_shuffle_epi8(x, _mm512_broadcast_i32x4(bytes));
                        let x = _mm512_mullo_epi16(x, _mm512_broadcast_i32x4(factors));
                        *half = _mm512_srli_epi16::<8>(x);
                    }
                    let mask = _mm512_set1_epi8(((1u32 << BITS) - 1) as u8 as i8);
                    _mm512_and_si512(_mm512_packus_epi16(halves[0], halves[1]), mask)
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, x: __m512i) {
        // SAFETY: Simd contract.
        unsafe { _mm512_storeu_si512(p.cast(), x) }
    }
    #[inline(always)]
    unsafe fn bytes_to_dwords(x: __m512i) -> [__m512i; MAX_UNPACKED] {
        [x; MAX_UNPACKED]
    }
    #[inline(always)]
    unsafe fn extract_bits(x: __m512i, shift: usize, bits: usize) -> __m512i {
        // SAFETY: Simd contract. The mask removes bits that the 16-bit shift carries across bytes.
        unsafe {
            let x = match shift {
                0 => x,
                2 => _mm512_srli_epi16::<2>(x),
                4 => _mm512_srli_epi16::<4>(x),
                _ => _mm512_srli_epi16::<6>(x),
            };
            _mm512_and_si512(x, _mm512_set1_epi8(((1u32 << bits) - 1) as u8 as i8))
        }
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], x: __m512i) -> __m512i {
        // SAFETY: Simd contract.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), x)
        }
    }
    #[inline(always)]
    unsafe fn zero_i32() -> __m512i {
        // SAFETY: Simd contract.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn dot<P: Packing, const N: usize>(
        mut sum: __m512i,
        w: [__m512i; MAX_UNPACKED],
        x: [__m512i; MAX_UNPACKED],
    ) -> __m512i {
        // SAFETY: Simd contract.
        unsafe {
            for i in 0..N {
                sum = _mm512_dpbusd_epi32(sum, w[i], x[i]);
            }
            sum
        }
    }
    #[inline(always)]
    unsafe fn dot_broadcast<P: Packing>(
        mut sum: __m512i,
        w: [__m512i; MAX_UNPACKED],
        x: *const i8,
    ) -> __m512i {
        // SAFETY: Simd contract; 16 activations can be read.
        unsafe {
            for i in 0..MAX_UNPACKED {
                let x = _mm512_set1_epi32(x.add(4 * i).cast::<i32>().read_unaligned());
                sum = _mm512_dpbusd_epi32(sum, w[i], x);
            }
            sum
        }
    }
    #[inline(always)]
    unsafe fn to_operand(x: __m512i) -> __m512i {
        x
    }
    #[inline(always)]
    unsafe fn group_max_abs(x: &[f32; Q8_GROUP]) -> f32 {
        // SAFETY: Simd contract. Magnitudes order as their bits.
        unsafe {
            let x = _mm512_and_si512(
                _mm512_loadu_si512(x.as_ptr().cast()),
                _mm512_set1_epi32(i32::MAX),
            );
            f32::from_bits(_mm512_reduce_max_epu32(x))
        }
    }
    #[inline(always)]
    unsafe fn quantize_group(
        x: &[f32; Q8_GROUP],
        inverse_scale: f32,
        q: &mut [i8; Q8_GROUP],
    ) -> i32 {
        // SAFETY: Simd contract. NaN converts to i32::MIN, whose low byte is 0.
        unsafe {
            let whole = _mm512_cvtps_epi32(_mm512_mul_ps(
                _mm512_loadu_ps(x.as_ptr()),
                _mm512_set1_ps(inverse_scale),
            ));
            let bytes = _mm512_cvtepi32_epi8(whole);
            _mm_storeu_si128(q.as_mut_ptr().cast(), bytes);
            // Sums of eight bytes, each 128 too large.
            let sums =
                _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(i8::MIN)), _mm_setzero_si128());
            _mm_cvtsi128_si32(sums) + _mm_extract_epi32::<2>(sums) - 128 * Q8_GROUP as i32
        }
    }
}

/// [`block_tile`](unpack_mx::block_tile) of E4M3 with VBMI. One function per number of rows of
/// activations: inlined into one function, they spill registers.
macro_rules! block_tiles_vbmi {
    ($($name:ident $rows:literal),*) => {
        $(
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl")]
            #[target_feature(enable = "avx512dq,avx512vnni,avx512vbmi")]
            unsafe fn $name(
                w: &[BlockScaledRow<'_>],
                x: &[&[f32]; $rows],
                offset: usize,
                sums: &mut F32TileSums,
            ) {
                // SAFETY: Simd contract.
                unsafe {
                    unpack_mx::block_tile_part::<Avx512<true>, E4m3, $rows>(w, x, offset, sums)
                 };
            }
        )*
    };
}

block_tiles_vbmi!(one_row 1, two_rows 2, four_rows 4);

unsafe fn gemm_block_scaled_vbmi(
    element: Element,
    w: &[BlockScaledRow<'_>],
    x: &[&[f32]],
    sums: &mut F32TileSums,
) {
    // SAFETY: Simd contract.
    unsafe {
        match *x {
            _ if element != Element::E4M3 => {
                (on_avx512::KERNELS.gemm_block_scaled)(element, w, x, sums)
            }
            [a] => one_row(w, &[a], 0, sums),
            [a, b] => two_rows(w, &[a, b], 0, sums),
            [a, b, c] => {
                two_rows(w, &[a, b], 0, sums);
                one_row(w, &[c], 2, sums);
            }
            [a, b, c, d] => four_rows(w, &[a, b, c, d], 0, sums),
            _ => {}
        }
    }
}

/// Kernels of AVX-512 with VBMI: those of AVX-512, except for block-scaled E4M3.
pub(super) static WITH_VBMI: KernelTable =
    KernelTable { gemm_block_scaled: gemm_block_scaled_vbmi, ..on_avx512::KERNELS };
