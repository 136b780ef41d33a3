//! AVX-512 with VNNI; with `VBMI`, also the tables of 128 bytes of AVX-512 VBMI.
#![allow(
    clippy::needless_range_loop,
    reason = "arrays of vectors are walked together, and without closures"
)]

use std::arch::x86_64::*;

use super::{
    Sums, Table,
    algorithm::{GROUP, MAX_LANES, Pointers, Simd},
    avx2::{Avx2, Lanes},
    blocks::{self, Blocks, E4m3},
    on_avx512,
    quants::{E2M1_QUANTS, KV_SPLITS, Packing},
};
use crate::{Element, format::E4M3 as NUMBERS};

#[derive(Clone, Copy)]
pub(super) struct Avx512<const VBMI: bool>;

/// E4M3 by tables: the bytes of what an element without its sign is as bf16, and the order in which elements come out of unpacking
/// bytes, then words, within lanes of 128 bits.
struct Tables {
    low: [[u8; 64]; 2],
    high: [[u8; 64]; 2],
    order: [u8; 64],
}

static E4M3: Tables = {
    let mut all = Tables { low: [[0; 64]; 2], high: [[0; 64]; 2], order: [0; 64] };
    let mut i = 0;
    while i < 128 {
        let bits = NUMBERS[i].to_bits() >> 16;
        (all.low[i / 64][i % 64], all.high[i / 64][i % 64]) = (bits as u8, (bits >> 8) as u8);
        i += 1;
    }
    // Lane `l` of vector `v` has elements 16 v + 4 l and the three that follow.
    let mut i = 0;
    while i < 64 {
        let (lane, vector) = (i / 16, i % 16 / 4);
        all.order[i] = (16 * vector + 4 * lane + i % 4) as u8;
        i += 1;
    }
    all
};

/// Which 16-bit words of `8 * bits` bytes belong into each lane of 128 bits: `bits` of them hold sixteen quants.
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

struct Words<const BITS: usize>;

impl<const BITS: usize> Words<BITS> {
    const INDEXES: [u16; 32] = words(BITS);
}

/// Transposes fours of bytes of four rows: lane `l` of 128 bits of vector `j` has column `4 * l + j` of them.
#[inline(always)]
unsafe fn fours([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: the caller's: the instruction set is there.
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

/// Of vectors `j` of [`fours`] of all rows, columns `j`, `4 + j`, `8 + j` and `12 + j`.
#[inline(always)]
unsafe fn sixteens([a, b, c, d]: [__m512i; 4]) -> [__m512i; 4] {
    // SAFETY: the caller's: the instruction set is there.
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

/// Transposes fours of bytes.
#[inline(always)]
unsafe fn transposed(x: [__m512i; MAX_LANES]) -> [__m512i; MAX_LANES] {
    let (mut between, mut all) = (x, x);
    // SAFETY: the caller's: the instruction set is there.
    unsafe {
        for i in 0..4 {
            [between[i], between[4 + i], between[8 + i], between[12 + i]] =
                fours([x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]]);
        }
        for j in 0..4 {
            let of_all =
                [between[4 * j], between[4 * j + 1], between[4 * j + 2], between[4 * j + 3]];
            [all[j], all[4 + j], all[8 + j], all[12 + j]] = sixteens(of_all);
        }
    }
    all
}

impl<const VBMI: bool> Simd for Avx512<VBMI> {
    type F = __m512;
    type I = __m512i;
    type D = __m512i;
    type W = __m512i;
    type B = __m512i;
    const LANES: usize = 16;
    const UNIT: usize = 4 * GROUP;
    const DWORDS: usize = 16;
    const STEPS: usize = 8;
    const FUSED: bool = true;
    const WIDTH: usize = 4;
    const PACKED: [usize; 2] = [4, 2];

    #[inline(always)]
    unsafe fn zero() -> __m512 {
        // SAFETY: the caller's, here and below.
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m512 {
        // SAFETY: see `zero`.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: see `zero`.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m512) {
        // SAFETY: see `zero`.
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see `zero`.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: see `zero`.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sum(x: __m512) -> f32 {
        // SAFETY: see `zero`.
        unsafe {
            let (low, high) = (_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x));
            Avx2::<false>::sum(_mm256_add_ps(low, high))
        }
    }
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        // SAFETY: see `zero`.
        unsafe {
            // Halves of two vectors side by side, then halves of those, then of the four lanes that are left.
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
            // Every lane of a quarter is its sum.
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
    unsafe fn load_bytes(p: *const u8) -> __m512 {
        // SAFETY: see `zero`.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m512 {
        // SAFETY: see `zero`.
        unsafe {
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
                p.cast(),
            ))))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m512 {
        // SAFETY: see `zero`.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m512 {
        // SAFETY: see `zero`. As for AVX2.
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
    unsafe fn load_e4m3_bits(p: *const u8) -> __m512 {
        // SAFETY: see `zero`. As for AVX2, but for NaN.
        unsafe {
            let x = _mm256_slli_epi16::<7>(_mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())));
            _mm512_cvtph_ps(_mm256_and_si256(x, _mm256_set1_epi16(!0x407f)))
        }
    }
    const E4M3_LINES: bool = VBMI;
    #[inline(always)]
    unsafe fn load_e4m3_line(p: *const u8) -> [__m512; 4] {
        // SAFETY: see `zero`.
        unsafe {
            let of = |bytes: &[u8; 64]| _mm512_loadu_si512(bytes.as_ptr().cast());
            let codes = _mm512_permutexvar_epi8(of(&E4M3.order), _mm512_loadu_si512(p.cast()));
            let low = _mm512_permutex2var_epi8(of(&E4M3.low[0]), codes, of(&E4M3.low[1]));
            let high = _mm512_permutex2var_epi8(of(&E4M3.high[0]), codes, of(&E4M3.high[1]));
            // Of either, or the sign of the code.
            let high =
                _mm512_ternarylogic_epi64::<0b1111_1000>(high, codes, _mm512_set1_epi8(i8::MIN));
            let (zero, one) = (_mm512_setzero_si512(), _mm512_unpacklo_epi8(low, high));
            let other = _mm512_unpackhi_epi8(low, high);
            [
                _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, one)),
                _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, one)),
                _mm512_castsi512_ps(_mm512_unpacklo_epi16(zero, other)),
                _mm512_castsi512_ps(_mm512_unpackhi_epi16(zero, other)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn larger(a: __m512, b: __m512) -> __m512 {
        // SAFETY: see `zero`. The third of four choices compares sizes, and takes the larger one without its sign.
        unsafe { _mm512_range_ps::<0b1011>(a, b) }
    }
    #[inline(always)]
    unsafe fn load_e2m1(p: *const u8) -> __m512 {
        // SAFETY: see `zero`. The lowest four bits of a lane choose.
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
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_near(p: *const u8) {
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    fn reach(bits: usize) -> usize {
        4 * GROUP * bits / 8
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> __m512i {
        // SAFETY: see `zero`; the mask lets only `reach` bytes be read.
        unsafe {
            match BITS {
                8 => _mm512_loadu_si512(p.cast()),
                4 => {
                    // A byte in a lane of 16 bits: its low half stays, its high half moves to the upper byte.
                    let x = _mm512_cvtepu8_epi16(_mm256_loadu_si256(p.cast()));
                    let x = _mm512_or_si512(x, _mm512_slli_epi16::<4>(x));
                    _mm512_and_si512(x, _mm512_set1_epi8(15))
                }
                _ => {
                    let x = _mm512_maskz_loadu_epi8((1u64 << (8 * BITS)) - 1, p.cast());
                    let x = _mm512_permutexvar_epi16(
                        _mm512_loadu_si512(Words::<BITS>::INDEXES.as_ptr().cast()),
                        x,
                    );
                    let mut halves = [x; 2];
                    for (i, half) in halves.iter_mut().enumerate() {
                        let bytes = _mm_loadu_si128(Lanes::<BITS>::BYTES[i].as_ptr().cast());
                        let factors = _mm_loadu_si128(Lanes::<BITS>::FACTORS[i].as_ptr().cast());
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
        // SAFETY: see `zero`.
        unsafe { _mm512_storeu_si512(p.cast(), x) }
    }
    #[inline(always)]
    unsafe fn in_order(x: __m512i) -> [__m512i; KV_SPLITS] {
        [x; KV_SPLITS]
    }
    #[inline(always)]
    unsafe fn columns(rows: &Pointers, at: usize) -> [__m512i; MAX_LANES] {
        // SAFETY: see `zero`.
        unsafe {
            let mut x = [_mm512_setzero_si512(); MAX_LANES];
            for (x, row) in x.iter_mut().zip(rows) {
                *x = _mm512_loadu_si512(row.add(at).cast());
            }
            transposed(x)
        }
    }
    #[inline(always)]
    unsafe fn columns_step(rows: &Pointers, at: usize, i: usize, [between, to]: [*mut u8; 2]) {
        // SAFETY: see `zero`.
        unsafe {
            let (mut x, j) = ([_mm512_setzero_si512(); 4], i % 4);
            if i < 4 {
                for r in 0..4 {
                    x[r] = _mm512_loadu_si512(rows[4 * j + r].add(at).cast());
                }
                let x = fours(x);
                for k in 0..4 {
                    _mm512_storeu_si512(between.add((4 * k + j) * 64).cast(), x[k]);
                }
            } else {
                for r in 0..4 {
                    x[r] = _mm512_loadu_si512(between.add((4 * j + r) * 64).cast());
                }
                let x = sixteens(x);
                for k in 0..4 {
                    _mm512_storeu_si512(to.add((4 * k + j) * 64).cast(), x[k]);
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn first_columns(rows: &Pointers, at: usize, len: usize) -> [__m512i; MAX_LANES] {
        // SAFETY: see `zero`; the mask lets only `len` bytes be read.
        unsafe {
            let mask = if len < 64 { (1u64 << len) - 1 } else { u64::MAX };
            let mut x = [_mm512_setzero_si512(); MAX_LANES];
            for (x, row) in x.iter_mut().zip(rows) {
                *x = _mm512_maskz_loadu_epi8(mask, row.add(at).cast());
            }
            transposed(x)
        }
    }
    #[inline(always)]
    unsafe fn load_dwords(p: *const u8) -> __m512i {
        // SAFETY: see `zero`.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_dwords(p: *mut u8, x: __m512i) {
        // SAFETY: see `zero`.
        unsafe { _mm512_storeu_si512(p.cast(), x) }
    }
    #[inline(always)]
    unsafe fn bits(x: __m512i, from: usize, bits: usize) -> __m512i {
        // SAFETY: see `zero`. What a shift of words brings from the other byte is masked.
        unsafe {
            let x = match from {
                0 => x,
                2 => _mm512_srli_epi16::<2>(x),
                4 => _mm512_srli_epi16::<4>(x),
                _ => _mm512_srli_epi16::<6>(x),
            };
            _mm512_and_si512(x, _mm512_set1_epi8(((1u32 << bits) - 1) as u8 as i8))
        }
    }
    #[inline(always)]
    unsafe fn e2m1_quants(x: __m512i) -> __m512i {
        // SAFETY: see `zero`.
        unsafe {
            _mm512_shuffle_epi8(
                _mm512_broadcast_i32x4(_mm_loadu_si128(E2M1_QUANTS.as_ptr().cast())),
                x,
            )
        }
    }
    #[inline(always)]
    unsafe fn f32_column(x: __m512i) -> __m512 {
        // SAFETY: see `zero`.
        unsafe { _mm512_castsi512_ps(x) }
    }
    #[inline(always)]
    unsafe fn bf16_columns(x: __m512i) -> [__m512; 2] {
        // SAFETY: see `zero`.
        unsafe {
            let second = _mm512_and_si512(x, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [_mm512_castsi512_ps(_mm512_slli_epi32::<16>(x)), _mm512_castsi512_ps(second)]
        }
    }
    #[inline(always)]
    unsafe fn f16_columns(x: __m512i) -> [__m512; 2] {
        // SAFETY: see `zero`.
        unsafe {
            let (first, second) =
                (_mm512_cvtepi32_epi16(x), _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(x)));
            [_mm512_cvtph_ps(first), _mm512_cvtph_ps(second)]
        }
    }
    #[inline(always)]
    unsafe fn none() -> __m512i {
        // SAFETY: see `zero`.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    unsafe fn dot<P: Packing, const N: usize>(
        mut sum: __m512i,
        w: [__m512i; KV_SPLITS],
        x: [__m512i; KV_SPLITS],
    ) -> __m512i {
        // SAFETY: see `zero`.
        unsafe {
            for i in 0..N {
                sum = _mm512_dpbusd_epi32(sum, w[i], x[i]);
            }
            sum
        }
    }
    #[inline(always)]
    unsafe fn dot_fours<P: Packing>(
        mut sum: __m512i,
        w: [__m512i; KV_SPLITS],
        x: *const i8,
    ) -> __m512i {
        // SAFETY: see `zero`; sixteen numbers can be read.
        unsafe {
            for i in 0..KV_SPLITS {
                let x = _mm512_set1_epi32(x.add(4 * i).cast::<i32>().read_unaligned());
                sum = _mm512_dpbusd_epi32(sum, w[i], x);
            }
            sum
        }
    }
    #[inline(always)]
    unsafe fn factors(x: __m512i) -> __m512i {
        x
    }
    #[inline(always)]
    unsafe fn unzip(a: __m512i, b: __m512i) -> [__m512i; 2] {
        // SAFETY: see `zero`.
        unsafe {
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_or_si512(even, _mm512_set1_epi32(1));
            [_mm512_permutex2var_epi32(a, even, b), _mm512_permutex2var_epi32(a, odd, b)]
        }
    }
    #[inline(always)]
    unsafe fn spread(p: *const f32, n: usize) -> __m512 {
        // SAFETY: see `zero`; `n` numbers can be read.
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
    unsafe fn load_first(p: *const f32, n: usize) -> __m512 {
        // SAFETY: see `zero`; the mask lets only `n` numbers be read. What was just written is read faster without one.
        unsafe {
            if n == Self::LANES {
                return Self::load(p);
            }
            _mm512_maskz_loadu_ps(((1u32 << n) - 1) as u16, p)
        }
    }
    #[inline(always)]
    unsafe fn spread_bf16(p: *const u8, n: usize) -> __m512 {
        /// The upper halves of lanes from two bytes of as many as `n` numbers have, of those in each lane of 128 bits.
        const fn halves(n: usize) -> [i8; 64] {
            let mut from = [-1; 64];
            let mut i = 0;
            while i < 16 {
                let at = (2 * (i * n / 16)) as i8;
                (from[4 * i + 2], from[4 * i + 3]) = (at, at + 1);
                i += 1;
            }
            from
        }
        const TWO: [i8; 64] = halves(2);
        const FOUR: [i8; 64] = halves(4);
        const EIGHT: [i8; 64] = halves(8);
        // SAFETY: see `zero`; `n` numbers can be read.
        unsafe {
            let (x, from) = match n {
                1 => {
                    let x = _mm512_set1_epi16(p.cast::<i16>().read_unaligned());
                    return _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x));
                }
                2 => (_mm512_set1_epi32(p.cast::<i32>().read_unaligned()), &TWO),
                4 => (_mm512_set1_epi64(p.cast::<i64>().read_unaligned()), &FOUR),
                8 => (_mm512_broadcast_i32x4(_mm_loadu_si128(p.cast())), &EIGHT),
                _ => return Self::load_bf16(p),
            };
            _mm512_castsi512_ps(_mm512_shuffle_epi8(x, _mm512_loadu_si512(from.as_ptr().cast())))
        }
    }
    #[inline(always)]
    unsafe fn load_first_bf16(p: *const u8, n: usize) -> __m512 {
        // SAFETY: see `zero`; the mask lets only `n` numbers be read.
        unsafe {
            if n == Self::LANES {
                return Self::load_bf16(p);
            }
            let x = _mm256_maskz_loadu_epi16(((1u32 << n) - 1) as u16, p.cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(x)))
        }
    }
    #[inline(always)]
    unsafe fn float(x: __m512i) -> __m512 {
        // SAFETY: see `zero`.
        unsafe { _mm512_cvtepi32_ps(x) }
    }
    #[inline(always)]
    unsafe fn largest_size(x: &[f32; GROUP]) -> f32 {
        // SAFETY: see `zero`. Sizes are in the order of their bits.
        unsafe {
            let x = _mm512_and_si512(
                _mm512_loadu_si512(x.as_ptr().cast()),
                _mm512_set1_epi32(i32::MAX),
            );
            f32::from_bits(_mm512_reduce_max_epu32(x))
        }
    }
    #[inline(always)]
    unsafe fn round(x: &[f32; GROUP], by: f32, q: &mut [i8; GROUP]) -> i32 {
        // SAFETY: see `zero`. What is no number becomes the least one, whose lowest byte is zero.
        unsafe {
            let whole =
                _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x.as_ptr()), _mm512_set1_ps(by)));
            let bytes = _mm512_cvtepi32_epi8(whole);
            _mm_storeu_si128(q.as_mut_ptr().cast(), bytes);
            // Sums of eight bytes that are 128 larger.
            let sums =
                _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(i8::MIN)), _mm_setzero_si128());
            _mm_cvtsi128_si32(sums) + _mm_extract_epi32::<2>(sums) - 128 * GROUP as i32
        }
    }
}

/// [`blocks::block_tile`] of E4M3, each number of rows in a function of its own: together they have too much in registers.
macro_rules! blocks_by_tables {
    ($($name:ident $rows:literal),*) => {
        $(
            #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512vbmi")]
            unsafe fn $name(w: &[Blocks<'_>], x: &[&[f32]; $rows], at: usize, sums: &mut Sums) {
                // SAFETY: the caller's.
                unsafe { blocks::part::<Avx512<true>, E4m3, $rows>(w, x, at, sums) };
            }
        )*
    };
}

blocks_by_tables!(one_row 1, two_rows 2, four_rows 4);

unsafe fn products_by_tables(element: Element, w: &[Blocks<'_>], x: &[&[f32]], sums: &mut Sums) {
    // SAFETY: the caller's.
    unsafe {
        match *x {
            _ if element != Element::E4M3 => (on_avx512::KERNELS.blocks)(element, w, x, sums),
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

/// The kernels of AVX-512, but those that VBMI makes faster.
pub(super) static WITH_VBMI: Table = Table { blocks: products_by_tables, ..on_avx512::KERNELS };
