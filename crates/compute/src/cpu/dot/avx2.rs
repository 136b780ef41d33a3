//! AVX2 with FMA and F16C.

use std::arch::x86_64::*;

use super::{
    algorithm::{GROUP, Simd},
    quants::{Block, PARTS, Packing},
};

#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// Where sixteen quants of `bits` bits lie in `2 * bits` bytes, seen from 16-bit lanes: for each quant the two
/// bytes that it is in, and by how much to shift them left for it to end in bit 16.
///
/// Lanes 0..8 of the first table are quants 0..8, those of the second quants 8..16.
const fn lanes(bits: usize) -> ([[u8; 16]; 2], [[u16; 8]; 2]) {
    let (mut bytes, mut shifts) = ([[0; 16]; 2], [[0; 8]; 2]);
    let mut i = 0;
    while i < 16 {
        let at = i * bits;
        let (byte, shift) = (at / 8, at % 8);
        bytes[i / 8][i % 8 * 2] = byte as u8;
        // A quant that ends in its first byte takes nothing of the next, which may be another row's.
        bytes[i / 8][i % 8 * 2 + 1] = if shift + bits > 8 { byte as u8 + 1 } else { 0x80 };
        shifts[i / 8][i % 8] = 1 << (8 - shift);
        i += 1;
    }
    (bytes, shifts)
}

pub(super) struct Lanes<const BITS: usize>;

impl<const BITS: usize> Lanes<BITS> {
    pub(super) const BYTES: [[u8; 16]; 2] = lanes(BITS).0;
    pub(super) const FACTORS: [[u16; 8]; 2] = lanes(BITS).1;
}

impl Simd for Avx2 {
    type F = __m256;
    type I = __m256i;
    type B = __m256i;
    const LANES: usize = 8;
    const UNIT: usize = GROUP;
    const SPLITS: bool = true;
    const FUSED: bool = true;
    const WIDTH: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: the caller's, here and below.
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: see `zero`.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: see `zero`.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m256) {
        // SAFETY: see `zero`.
        unsafe { _mm256_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: see `zero`.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: see `zero`.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sum(x: __m256) -> f32 {
        // SAFETY: see `zero`.
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }
    }
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        // SAFETY: see `zero`.
        unsafe {
            // Halves of two vectors side by side, then halves of those.
            let ab =
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(a, b), _mm256_permute2f128_ps::<0x31>(a, b));
            let cd =
                _mm256_add_ps(_mm256_permute2f128_ps::<0x20>(c, d), _mm256_permute2f128_ps::<0x31>(c, d));
            let x = _mm256_add_ps(_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xee>(ab, cd));
            let x = _mm256_add_ps(x, _mm256_movehdup_ps(x));
            let (ac, bd) = (_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let mut sums = [0.0; 4];
            // The sums of a and c are in lanes 0 and 2, those of b and d too.
            let x = _mm_shuffle_ps::<0x88>(ac, bd);
            _mm_storeu_ps(sums.as_mut_ptr(), _mm_shuffle_ps::<0xd8>(x, x));
            sums
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m256 {
        // SAFETY: see `zero`.
        unsafe {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m256 {
        // SAFETY: see `zero`.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m256 {
        // SAFETY: see `zero`. Moved to where f16 has exponent and mantissa, an element is 2^8 times too small, because
        // the biases of the exponents differ by 8; what would be 480 is NaN.
        unsafe {
            let x = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast())));
            let size = _mm_and_si128(x, _mm_set1_epi16(0x3f80));
            let nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(0x3f80));
            let sign = _mm_and_si128(x, _mm_set1_epi16(i16::MIN));
            let nan = _mm_and_si128(nan, _mm_set1_epi16(0x7c00));
            let x = _mm_or_si128(_mm_or_si128(size, sign), nan);
            _mm256_mul_ps(_mm256_cvtph_ps(x), _mm256_set1_ps(256.0))
        }
    }
    #[inline(always)]
    unsafe fn load_e2m1(p: *const u8) -> __m256 {
        // SAFETY: see `zero`. The lowest three bits of a lane choose, the fourth is the sign.
        unsafe {
            let x = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            let x = _mm256_srlv_epi32(x, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            let size = _mm256_permutevar8x32_ps(_mm256_setr_ps(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), x);
            let sign = _mm256_slli_epi32::<28>(_mm256_and_si256(x, _mm256_set1_epi32(8)));
            _mm256_or_ps(size, _mm256_castsi256_ps(sign))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch does not fault.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    fn reach(bits: usize) -> usize {
        match bits {
            4 | 8 => GROUP * bits / 8,
            _ => 2 * bits + 16,
        }
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> __m256i {
        // SAFETY: see `zero`; `reach` bytes can be read.
        unsafe {
            match BITS {
                8 => _mm256_loadu_si256(p.cast()),
                4 => {
                    // A byte in a lane of 16 bits: its low half stays, its high half moves to the upper byte.
                    let x = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
                    let x = _mm256_or_si256(x, _mm256_slli_epi16::<4>(x));
                    _mm256_and_si256(x, _mm256_set1_epi8(15))
                }
                _ => {
                    let (low, high) = (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(2 * BITS).cast()));
                    let x = _mm256_set_m128i(high, low);
                    let mut halves = [x; 2];
                    for (i, half) in halves.iter_mut().enumerate() {
                        let bytes = _mm_loadu_si128(Lanes::<BITS>::BYTES[i].as_ptr().cast());
                        let factors = _mm_loadu_si128(Lanes::<BITS>::FACTORS[i].as_ptr().cast());
                        let x = _mm256_shuffle_epi8(x, _mm256_broadcastsi128_si256(bytes));
                        let x = _mm256_mullo_epi16(x, _mm256_broadcastsi128_si256(factors));
                        *half = _mm256_srli_epi16::<8>(x);
                    }
                    let mask = _mm256_set1_epi8(((1u32 << BITS) - 1) as u8 as i8);
                    _mm256_and_si256(_mm256_packus_epi16(halves[0], halves[1]), mask)
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn bits(x: __m256i, from: usize, bits: usize) -> __m256i {
        // SAFETY: see `zero`. What a shift of words brings from the other byte is masked.
        unsafe {
            let x = match from {
                0 => x,
                2 => _mm256_srli_epi16::<2>(x),
                4 => _mm256_srli_epi16::<4>(x),
                _ => _mm256_srli_epi16::<6>(x),
            };
            _mm256_and_si256(x, _mm256_set1_epi8(((1u32 << bits) - 1) as u8 as i8))
        }
    }
    #[inline(always)]
    unsafe fn lookup(x: __m256i, table: &[u8; 16]) -> __m256i {
        // SAFETY: see `zero`.
        unsafe { _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())), x) }
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> __m256i {
        // SAFETY: see `zero`.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, x: __m256i) {
        // SAFETY: see `zero`.
        unsafe { _mm256_storeu_si256(p.cast(), x) }
    }
    #[inline(always)]
    unsafe fn dot<P: Packing>(w: [__m256i; PARTS], x: [__m256i; PARTS]) -> __m256i {
        // SAFETY: see `zero`.
        unsafe {
            if P::BITS < 8 {
                // Two products of at most 63 * 127 fit into 16 bits, and so do those of blocks of several vectors: four of
                // at most 31 * 127, eight of at most 3 * 127.
                let mut sum = _mm256_maddubs_epi16(w[0], x[0]);
                for i in 1..Block::<Self, P>::PARTS {
                    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[i], x[i]));
                }
                return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
            }
            let (w, x) = (w[0], x[0]);
            let w = [_mm256_castsi256_si128(w), _mm256_extracti128_si256::<1>(w)];
            let x = [_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x)];
            let low = _mm256_madd_epi16(_mm256_cvtepu8_epi16(w[0]), _mm256_cvtepi8_epi16(x[0]));
            let high = _mm256_madd_epi16(_mm256_cvtepu8_epi16(w[1]), _mm256_cvtepi8_epi16(x[1]));
            _mm256_add_epi32(low, high)
        }
    }
    #[inline(always)]
    unsafe fn float(x: __m256i) -> __m256 {
        // SAFETY: see `zero`.
        unsafe { _mm256_cvtepi32_ps(x) }
    }
    #[inline(always)]
    unsafe fn spread(p: *const f32, n: usize) -> __m256 {
        // SAFETY: see `zero`; `n` numbers can be read.
        unsafe {
            match n {
                1 => _mm256_set1_ps(*p),
                2 => {
                    let pair = _mm256_castsi256_ps(_mm256_set1_epi64x(p.cast::<i64>().read_unaligned()));
                    _mm256_permutevar_ps(pair, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1))
                }
                4 => {
                    let four = _mm256_broadcast_ps(&p.cast::<__m128>().read_unaligned());
                    _mm256_permutevar_ps(four, _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3))
                }
                _ => _mm256_loadu_ps(p),
            }
        }
    }
    #[inline(always)]
    unsafe fn load_first(p: *const f32, n: usize) -> __m256 {
        // SAFETY: see `zero`; the mask lets only `n` numbers be read. What was just written is read faster without one.
        unsafe {
            if n == Self::LANES {
                return Self::load(p);
            }
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lanes))
        }
    }
}
