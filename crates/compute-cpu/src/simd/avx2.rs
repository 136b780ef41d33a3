//! Vectors of AVX2 with FMA and F16C; with `VNNI`, int8 dot products of AVX-VNNI.

use std::{arch::x86_64::*, mem::transmute};

use super::{
    unpack_affine::{MAX_UNPACKED, Packing},
    vector::{Float, Int8Dot, Load, MAX_LANES, Q8_GROUP, RowPointers, Transpose, VectorTypes},
};

/// AVX2 with FMA and F16C, and AVX-VNNI if `VNNI`.
#[derive(Clone, Copy)]
pub(super) struct Avx2<const VNNI: bool>;

/// Shuffle that brings sixteen quants of `bits` bits, from `2 * bits` bytes, into 16-bit lanes: per
/// quant the two bytes that it is in, and the factor that shifts it left to end at bit 16.
///
/// Lanes 0..8 of the first table are quants 0..8, lanes of the second are quants 8..16.
const fn shuffle(bits: usize) -> ([[u8; 16]; 2], [[u16; 8]; 2]) {
    let (mut bytes, mut shifts) = ([[0; 16]; 2], [[0; 8]; 2]);
    let mut i = 0;
    while i < 16 {
        let bit = i * bits;
        let (byte, shift) = (bit / 8, bit % 8);
        bytes[i / 8][i % 8 * 2] = byte as u8;
        // A quant that ends in its first byte takes 0 for the second, which may be in another row.
        bytes[i / 8][i % 8 * 2 + 1] = if shift + bits > 8 { byte as u8 + 1 } else { 0x80 };
        shifts[i / 8][i % 8] = 1 << (8 - shift);
        i += 1;
    }
    (bytes, shifts)
}

/// Table of [`shuffle`].
pub(super) struct QuantShuffle<const BITS: usize>;

impl<const BITS: usize> QuantShuffle<BITS> {
    pub(super) const BYTES: [[u8; 16]; 2] = shuffle(BITS).0;
    pub(super) const FACTORS: [[u16; 8]; 2] = shuffle(BITS).1;
}

impl<const VNNI: bool> VectorTypes for Avx2<VNNI> {
    type F32 = __m256;
    type I32 = __m256i;
    type Dwords = __m256i;
    type DotOperand = __m256i;
    type UnitBytes = __m256i;
    const LANES: usize = 8;
    const UNIT: usize = 2 * Q8_GROUP;
    const HAS_FMA: bool = true;
    const TILE_ACTIVATIONS: usize = 2;
    const GEMV_WEIGHT_ROWS: [usize; 2] = [2, 1];
}

impl<const VNNI: bool> Float for Avx2<VNNI> {
    #[inline(always)]
    unsafe fn zero() -> __m256 {
        // SAFETY: Simd contract.
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> __m256 {
        // SAFETY: Simd contract.
        unsafe { _mm256_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m256 {
        // SAFETY: Simd contract.
        unsafe { _mm256_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: __m256) {
        // SAFETY: Simd contract.
        unsafe { _mm256_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn load_partial(p: *const f32, n: usize) -> __m256 {
        // SAFETY: Simd contract; the mask limits the read to `n` values. Whole vectors go without
        // a mask, as store forwarding is faster then.
        unsafe {
            if n == Self::LANES {
                return Self::load(p);
            }
            let lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            _mm256_maskload_ps(p, _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), lanes))
        }
    }
    #[inline(always)]
    unsafe fn load_repeated(p: *const f32, n: usize) -> __m256 {
        // SAFETY: Simd contract; `n` values can be read.
        unsafe {
            match n {
                1 => _mm256_set1_ps(*p),
                2 => {
                    let pair =
                        _mm256_castsi256_ps(_mm256_set1_epi64x(p.cast::<i64>().read_unaligned()));
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
    unsafe fn order_quads(x: __m256) -> __m256 {
        // SAFETY: Simd contract.
        unsafe { _mm256_permutevar8x32_ps(x, _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7)) }
    }
    #[inline(always)]
    unsafe fn mul(a: __m256, b: __m256) -> __m256 {
        // SAFETY: Simd contract.
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: __m256, b: __m256, c: __m256) -> __m256 {
        // SAFETY: Simd contract.
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn sum(x: __m256) -> f32 {
        // SAFETY: Simd contract.
        unsafe {
            let x = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let x = _mm_add_ps(x, _mm_movehl_ps(x, x));
            _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)))
        }
    }
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        // SAFETY: Simd contract.
        unsafe {
            // Adds halves of two vectors at a time, then halves of the results.
            let ab = _mm256_add_ps(
                _mm256_permute2f128_ps::<0x20>(a, b),
                _mm256_permute2f128_ps::<0x31>(a, b),
            );
            let cd = _mm256_add_ps(
                _mm256_permute2f128_ps::<0x20>(c, d),
                _mm256_permute2f128_ps::<0x31>(c, d),
            );
            let x =
                _mm256_add_ps(_mm256_shuffle_ps::<0x44>(ab, cd), _mm256_shuffle_ps::<0xee>(ab, cd));
            let x = _mm256_add_ps(x, _mm256_movehdup_ps(x));
            let (ac, bd) = (_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
            let mut sums = [0.0; 4];
            // Lanes 0 and 2 have the sums of a and c, and of b and d.
            let x = _mm_shuffle_ps::<0x88>(ac, bd);
            _mm_storeu_ps(sums.as_mut_ptr(), _mm_shuffle_ps::<0xd8>(x, x));
            sums
        }
    }
    #[inline(always)]
    unsafe fn from_i32(x: __m256i) -> __m256 {
        // SAFETY: Simd contract.
        unsafe { _mm256_cvtepi32_ps(x) }
    }
}

impl<const VNNI: bool> Load for Avx2<VNNI> {
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> __m256 {
        // SAFETY: Simd contract.
        unsafe { _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m256 {
        // SAFETY: Simd contract.
        unsafe {
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(
                p.cast(),
            ))))
        }
    }
    #[inline(always)]
    unsafe fn load_repeated_bf16(p: *const u8, n: usize) -> __m256 {
        // SAFETY: Simd contract; `n` values can be read.
        unsafe {
            let x = match n {
                1 => {
                    let x = _mm256_set1_epi16(p.cast::<i16>().read_unaligned());
                    return _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x));
                }
                2 => _mm256_set1_epi32(p.cast::<i32>().read_unaligned()),
                4 => _mm256_set1_epi64x(p.cast::<i64>().read_unaligned()),
                _ => return Self::load_bf16(p),
            };
            // Moves bf16 to the upper halves of 32-bit lanes, repeated; the upper 128 bits take the
            // second half of the values.
            let shuffle = if n == 2 {
                _mm256_setr_epi16(
                    -1, 0x100, -1, 0x100, -1, 0x100, -1, 0x100, -1, 0x302, -1, 0x302, -1, 0x302,
                    -1, 0x302,
                )
            } else {
                _mm256_setr_epi16(
                    -1, 0x100, -1, 0x100, -1, 0x302, -1, 0x302, -1, 0x504, -1, 0x504, -1, 0x706,
                    -1, 0x706,
                )
            };
            _mm256_castsi256_ps(_mm256_shuffle_epi8(x, shuffle))
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m256 {
        // SAFETY: Simd contract.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
    #[inline(always)]
    unsafe fn widen_f16(x: [u16; 8]) -> [f32; 8] {
        // SAFETY: Simd contract; arrays and vectors have the same bytes.
        unsafe { transmute(_mm256_cvtph_ps(transmute::<[u16; 8], __m128i>(x))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> __m256 {
        // SAFETY: Simd contract. With exponent and mantissa moved to their place in f16, an element
        // is 2^8 times too small, because the exponent biases differ by 8. The code of 480 is NaN:
        // adding 1 to only that code carries into the top exponent bit.
        unsafe {
            let x = _mm_slli_epi16::<7>(_mm_cvtepi8_epi16(_mm_loadl_epi64(p.cast())));
            let x = _mm_and_si128(x, _mm_set1_epi16(!0x407f));
            let next = _mm_add_epi16(x, _mm_set1_epi16(0x80));
            let x = _mm_or_si128(x, _mm_and_si128(next, _mm_set1_epi16(0x4000)));
            _mm256_mul_ps(_mm256_cvtph_ps(x), _mm256_set1_ps(256.0))
        }
    }
    #[inline(always)]
    unsafe fn load_e2m1(p: *const u8) -> __m256 {
        // SAFETY: Simd contract. The permutation looks up the low three bits of a lane; the fourth
        // is the sign.
        unsafe {
            let x = _mm256_set1_epi32(p.cast::<i32>().read_unaligned());
            let x = _mm256_srlv_epi32(x, _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
            let size =
                _mm256_permutevar8x32_ps(_mm256_setr_ps(0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), x);
            let sign = _mm256_slli_epi32::<28>(_mm256_and_si256(x, _mm256_set1_epi32(8)));
            _mm256_or_ps(size, _mm256_castsi256_ps(sign))
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

impl<const VNNI: bool> Transpose for Avx2<VNNI> {
    const TRANSPOSE_DWORDS: usize = 8;
    #[inline(always)]
    unsafe fn load_dwords(p: *const u8) -> __m256i {
        // SAFETY: Simd contract.
        unsafe { _mm256_loadu_si256(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store_dwords(p: *mut u8, x: __m256i) {
        // SAFETY: Simd contract.
        unsafe { _mm256_storeu_si256(p.cast(), x) }
    }
    #[inline(always)]
    unsafe fn transpose(rows: &RowPointers, offset: usize) -> [__m256i; MAX_LANES] {
        // SAFETY: Simd contract.
        unsafe {
            let mut x = [_mm256_setzero_si256(); 8];
            for (x, row) in x.iter_mut().zip(rows) {
                *x = _mm256_loadu_si256(row.add(offset).cast());
            }
            let (mut pairs, mut quads) = (x, x);
            for i in 0..4 {
                pairs[2 * i] = _mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
                pairs[2 * i + 1] = _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
            }
            // Half `l` of vector `4 * i + j` has dword `4 * l + j` of rows `4 * i..4 * i + 4`.
            for i in 0..2 {
                for j in 0..2 {
                    let (a, b) = (pairs[4 * i + j], pairs[4 * i + j + 2]);
                    quads[4 * i + 2 * j] = _mm256_unpacklo_epi64(a, b);
                    quads[4 * i + 2 * j + 1] = _mm256_unpackhi_epi64(a, b);
                }
            }
            let mut columns = [_mm256_setzero_si256(); MAX_LANES];
            for j in 0..4 {
                columns[j] = _mm256_permute2x128_si256::<0x20>(quads[j], quads[4 + j]);
                columns[4 + j] = _mm256_permute2x128_si256::<0x31>(quads[j], quads[4 + j]);
            }
            columns
        }
    }
    #[inline(always)]
    unsafe fn transpose_quads([a, b, c, d]: [__m256i; 4]) -> [__m256i; 4] {
        // SAFETY: Simd contract.
        unsafe {
            let low = (_mm256_unpacklo_epi32(a, b), _mm256_unpacklo_epi32(c, d));
            let high = (_mm256_unpackhi_epi32(a, b), _mm256_unpackhi_epi32(c, d));
            [
                _mm256_unpacklo_epi64(low.0, low.1),
                _mm256_unpackhi_epi64(low.0, low.1),
                _mm256_unpacklo_epi64(high.0, high.1),
                _mm256_unpackhi_epi64(high.0, high.1),
            ]
        }
    }
    #[inline(always)]
    unsafe fn deinterleave(a: __m256i, b: __m256i) -> [__m256i; 2] {
        // SAFETY: Simd contract.
        unsafe {
            let (a, b) = (_mm256_castsi256_ps(a), _mm256_castsi256_ps(b));
            // Within each half: two dwords of `a`, then two of `b`.
            let even = _mm256_castps_si256(_mm256_shuffle_ps::<0x88>(a, b));
            let odd = _mm256_castps_si256(_mm256_shuffle_ps::<0xdd>(a, b));
            [_mm256_permute4x64_epi64::<0xd8>(even), _mm256_permute4x64_epi64::<0xd8>(odd)]
        }
    }
    #[inline(always)]
    unsafe fn dwords_to_f32(x: __m256i) -> __m256 {
        // SAFETY: Simd contract.
        unsafe { _mm256_castsi256_ps(x) }
    }
    #[inline(always)]
    unsafe fn dwords_to_bf16(x: __m256i) -> [__m256; 2] {
        // SAFETY: Simd contract.
        unsafe {
            let second = _mm256_and_si256(x, _mm256_set1_epi32(0xffff_0000_u32 as i32));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)), _mm256_castsi256_ps(second)]
        }
    }
    #[inline(always)]
    unsafe fn dwords_to_f16(x: __m256i) -> [__m256; 2] {
        // SAFETY: Simd contract.
        unsafe {
            let first = _mm256_and_si256(x, _mm256_set1_epi32(0xffff));
            // The pack works within halves of 128 bits; the permutation restores the order.
            let words = _mm256_packus_epi32(first, _mm256_srli_epi32::<16>(x));
            let words = _mm256_permute4x64_epi64::<0xd8>(words);
            [
                _mm256_cvtph_ps(_mm256_castsi256_si128(words)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(words)),
            ]
        }
    }
}

impl<const VNNI: bool> Int8Dot for Avx2<VNNI> {
    fn unpack_read_bytes(bits: usize) -> usize {
        match bits {
            4 | 8 => 2 * Q8_GROUP * bits / 8,
            _ => 2 * bits + 16,
        }
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> __m256i {
        // SAFETY: Simd contract; `unpack_read_bytes` bytes can be read.
        unsafe {
            match BITS {
                8 => _mm256_loadu_si256(p.cast()),
                4 => {
                    // In 16-bit lanes: the low half of a byte stays, the high half moves to the
                    // upper byte.
                    let x = _mm256_cvtepu8_epi16(_mm_loadu_si128(p.cast()));
                    let x = _mm256_or_si256(x, _mm256_slli_epi16::<4>(x));
                    _mm256_and_si256(x, _mm256_set1_epi8(15))
                }
                _ => {
                    let (low, high) =
                        (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(2 * BITS).cast()));
                    let x = _mm256_set_m128i(high, low);
                    let mut halves = [x; 2];
                    for (i, half) in halves.iter_mut().enumerate() {
                        let bytes = _mm_loadu_si128(QuantShuffle::<BITS>::BYTES[i].as_ptr().cast());
                        let factors =
                            _mm_loadu_si128(QuantShuffle::<BITS>::FACTORS[i].as_ptr().cast());
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
    unsafe fn store_bytes(p: *mut u8, x: __m256i) {
        // SAFETY: Simd contract.
        unsafe { _mm256_storeu_si256(p.cast(), x) }
    }
    #[inline(always)]
    unsafe fn bytes_to_dwords(x: __m256i) -> [__m256i; MAX_UNPACKED] {
        [x; MAX_UNPACKED]
    }
    #[inline(always)]
    unsafe fn extract_bits(x: __m256i, shift: usize, bits: usize) -> __m256i {
        // SAFETY: Simd contract. The mask removes bits that the 16-bit shift carries across bytes.
        unsafe {
            let x = match shift {
                0 => x,
                2 => _mm256_srli_epi16::<2>(x),
                4 => _mm256_srli_epi16::<4>(x),
                _ => _mm256_srli_epi16::<6>(x),
            };
            _mm256_and_si256(x, _mm256_set1_epi8(((1u32 << bits) - 1) as u8 as i8))
        }
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], x: __m256i) -> __m256i {
        // SAFETY: Simd contract.
        unsafe {
            let table = _mm_loadu_si128(table.as_ptr().cast());
            _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), x)
        }
    }
    #[inline(always)]
    unsafe fn zero_i32() -> __m256i {
        // SAFETY: Simd contract.
        unsafe { _mm256_setzero_si256() }
    }
    #[inline(always)]
    unsafe fn dot<P: Packing, const N: usize>(
        mut sum: __m256i,
        w: [__m256i; MAX_UNPACKED],
        x: [__m256i; MAX_UNPACKED],
    ) -> __m256i {
        // SAFETY: Simd contract.
        unsafe {
            if VNNI {
                for i in 0..N {
                    sum = _mm256_dpbusd_avx_epi32(sum, w[i], x[i]);
                }
                return sum;
            }
            let ones = _mm256_set1_epi16(1);
            // Sums that fit in i16: two products of 127 * 127, four of 63 * 127, eight of 31 * 127.
            let at_once = match P::BITS {
                0..5 => 4,
                5..8 => 2,
                _ => 1,
            };
            for first in (0..N).step_by(at_once) {
                let mut products = _mm256_setzero_si256();
                for i in first..(first + at_once).min(N) {
                    // The top bit of 8-bit quants is summed separately, times 128.
                    let w = if P::BITS < 8 {
                        w[i]
                    } else {
                        _mm256_and_si256(w[i], _mm256_set1_epi8(127))
                    };
                    products = _mm256_add_epi16(products, _mm256_maddubs_epi16(w, x[i]));
                }
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(products, ones));
            }
            if P::BITS == 8 {
                let mut tops = _mm256_setzero_si256();
                for i in 0..N {
                    let top = _mm256_and_si256(_mm256_srli_epi16::<7>(w[i]), _mm256_set1_epi8(1));
                    tops = _mm256_add_epi16(tops, _mm256_maddubs_epi16(top, x[i]));
                }
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(tops, _mm256_set1_epi16(128)));
            }
            sum
        }
    }
    #[inline(always)]
    unsafe fn dot_broadcast<P: Packing>(
        mut sum: __m256i,
        w: [__m256i; MAX_UNPACKED],
        x: *const i8,
    ) -> __m256i {
        // SAFETY: Simd contract; 16 activations can be read.
        unsafe {
            let mut x_dwords = [_mm256_setzero_si256(); MAX_UNPACKED];
            for (i, dword) in x_dwords.iter_mut().enumerate() {
                *dword = _mm256_set1_epi32(x.add(4 * i).cast::<i32>().read_unaligned());
            }
            if P::BITS < 8 || !Self::CENTERED {
                return Self::dot::<P, MAX_UNPACKED>(sum, w, x_dwords);
            }
            // Two products of at most 128 * 127 fit in i16.
            for (w, x) in w.into_iter().zip(x_dwords) {
                let pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
                sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
            sum
        }
    }
    #[inline(always)]
    unsafe fn to_operand(x: __m256i) -> __m256i {
        x
    }
    const CENTERED: bool = !VNNI;
    #[inline(always)]
    unsafe fn center(x: __m256i) -> __m256i {
        // SAFETY: Simd contract.
        unsafe { _mm256_xor_si256(x, _mm256_set1_epi8(-128)) }
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::{isa::Isa, unpack_affine::Bits},
        *,
    };

    /// Sum of a lane: 16 products of the same quant and activation.
    #[target_feature(enable = "avx2,fma,f16c")]
    unsafe fn sum<P: Packing>(quant: u8, x: i8) -> i32 {
        // SAFETY: Simd contract.
        unsafe {
            let w = _mm256_set1_epi8(quant as i8);
            let w = if P::BITS == 8 { Avx2::<false>::center(w) } else { w };
            let sums = Avx2::<false>::dot_broadcast::<P>(
                _mm256_setzero_si256(),
                [w; MAX_UNPACKED],
                [x; Q8_GROUP].as_ptr(),
            );
            let lanes: [i32; 8] = transmute(sums);
            assert_eq!(lanes, [lanes[0]; 8]);
            lanes[0]
        }
    }

    #[test]
    fn the_largest_products_do_not_overflow() {
        if !Isa::available().contains(&Isa::Avx2) {
            return;
        }
        for x in [-127, 127] {
            // SAFETY: AVX2 was detected above.
            let sums = unsafe {
                [
                    sum::<Bits<4>>(31, x),
                    sum::<Bits<6>>(63, x),
                    sum::<Bits<8>>(255, x),
                    sum::<Bits<8>>(0, x),
                ]
            };
            // 8-bit quants are centered: 128 less.
            let exact = [31, 63, 127, -128].map(|quant| 16 * quant * i32::from(x));
            assert_eq!(sums, exact);
        }
    }
}
