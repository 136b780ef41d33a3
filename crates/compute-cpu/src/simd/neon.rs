//! Vectors of NEON; with `DOT`, int8 dot products of Armv8.4 (`sdot`).
#![allow(clippy::needless_range_loop, reason = "arrays of vectors are indexed together")]

use std::arch::{aarch64::*, asm};

use super::{
    unpack_affine::{MAX_UNPACKED, Packing},
    vector::{Float, Int8Dot, Load, MAX_LANES, Q8_GROUP, RowPointers, Transpose, VectorTypes},
};

/// NEON, and its int8 dot products if `DOT`.
#[derive(Clone, Copy)]
pub(super) struct Neon<const DOT: bool>;

/// Shuffle that brings sixteen quants of `bits` bits, from `2 * bits` bytes, into 16-bit lanes: per
/// quant the two bytes that it is in, and by how many bits to shift them right.
///
/// Lanes 0..8 of the first table are quants 0..8, lanes of the second are quants 8..16.
const fn shuffle(bits: usize) -> ([[u8; 16]; 2], [[i16; 8]; 2]) {
    let (mut bytes, mut shifts) = ([[0; 16]; 2], [[0; 8]; 2]);
    let mut i = 0;
    while i < 16 {
        let bit = i * bits;
        let (byte, shift) = (bit / 8, bit % 8);
        bytes[i / 8][i % 8 * 2] = byte as u8;
        // A quant that ends in its first byte takes 0 for the second, which may be in another row.
        bytes[i / 8][i % 8 * 2 + 1] = if shift + bits > 8 { byte as u8 + 1 } else { 0x80 };
        shifts[i / 8][i % 8] = -(shift as i16);
        i += 1;
    }
    (bytes, shifts)
}

/// Table of [`shuffle`].
struct NeonShuffle<const BITS: usize>;

impl<const BITS: usize> NeonShuffle<BITS> {
    const BYTES: [[u8; 16]; 2] = shuffle(BITS).0;
    const SHIFTS: [[i16; 8]; 2] = shuffle(BITS).1;
}

/// Unpacks sixteen quants of `BITS` bits from `2 * BITS` bytes.
///
/// # Safety
/// The Simd contract; 16 bytes can be read.
#[inline(always)]
unsafe fn unpack_16<const BITS: usize>(p: *const u8) -> uint8x16_t {
    // SAFETY: Simd contract.
    unsafe {
        let x = vld1q_u8(p);
        let mut halves = [x; 2];
        for (i, half) in halves.iter_mut().enumerate() {
            let x = vqtbl1q_u8(x, vld1q_u8(NeonShuffle::<BITS>::BYTES[i].as_ptr()));
            let shifts = vld1q_s16(NeonShuffle::<BITS>::SHIFTS[i].as_ptr());
            *half = vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(x), shifts));
        }
        vandq_u8(vuzp1q_u8(halves[0], halves[1]), vdupq_n_u8(((1u32 << BITS) - 1) as u8))
    }
}

/// `acc[lane] + dot4(w[lane], x[lane])`
///
/// # Safety
/// The processor has `sdot`.
#[inline(always)]
unsafe fn sdot(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: as this function. The intrinsic is not stable yet.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {acc:v}.4s, {w:v}.16b, {x:v}.16b",
            acc = inout(vreg) acc,
            w = in(vreg) w,
            x = in(vreg) x,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    acc
}

/// [`sdot`] with dword `I` of `x` broadcast to all lanes.
///
/// # Safety
/// As [`sdot`].
#[inline(always)]
unsafe fn sdot_lane<const I: usize>(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: Simd contract.
    unsafe {
        asm!(
            ".arch_extension dotprod",
            "sdot {acc:v}.4s, {w:v}.16b, {x:v}.4b[{i}]",
            acc = inout(vreg) acc,
            w = in(vreg) w,
            x = in(vreg) x,
            i = const I,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    acc
}

/// `acc[lane] + sum_i dot4(w[i][lane], x[i][lane])` over the first `N` vectors; `w` has at most
/// `bits` bits, and `bits` is at most 7.
///
/// # Safety
/// The Simd contract.
#[inline(always)]
unsafe fn dot7<const DOT: bool, const N: usize>(
    mut acc: int32x4_t,
    w: [uint8x16_t; MAX_UNPACKED],
    x: [uint8x16_t; MAX_UNPACKED],
    bits: usize,
) -> int32x4_t {
    // SAFETY: Simd contract.
    unsafe {
        let (w, x) = (w.map(|w| vreinterpretq_s8_u8(w)), x.map(|x| vreinterpretq_s8_u8(x)));
        if DOT {
            for i in 0..N {
                acc = sdot(acc, w[i], x[i]);
            }
            return acc;
        }
        // Sums that fit in i16: two products of 127 * 127, four of 63 * 127.
        let at_once = if bits < 7 { 4 } else { 2 };
        for first in (0..N).step_by(at_once) {
            let mut low = vmull_s8(vget_low_s8(w[first]), vget_low_s8(x[first]));
            let mut high = vmull_high_s8(w[first], x[first]);
            for i in first + 1..(first + at_once).min(N) {
                low = vmlal_s8(low, vget_low_s8(w[i]), vget_low_s8(x[i]));
                high = vmlal_high_s8(high, w[i], x[i]);
            }
            acc = vaddq_s32(acc, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
        }
        acc
    }
}

/// Top bits of bytes, and the low seven bits.
///
/// # Safety
/// The Simd contract.
#[inline(always)]
unsafe fn tops_and_rest(w: [uint8x16_t; MAX_UNPACKED]) -> [[uint8x16_t; MAX_UNPACKED]; 2] {
    // SAFETY: Simd contract.
    unsafe { [w.map(|w| vshrq_n_u8::<7>(w)), w.map(|w| vandq_u8(w, vdupq_n_u8(127)))] }
}

impl<const DOT: bool> VectorTypes for Neon<DOT> {
    type F32 = float32x4_t;
    type I32 = int32x4_t;
    type Dwords = uint8x16_t;
    type DotOperand = uint8x16_t;
    type UnitBytes = uint8x16x2_t;
    const LANES: usize = 4;
    const UNIT: usize = 2 * Q8_GROUP;
    const HAS_FMA: bool = true;
    const TILE_ACTIVATIONS: usize = 2;
    const GEMV_WEIGHT_ROWS: [usize; 2] = [4, 2];
}

impl<const DOT: bool> Float for Neon<DOT> {
    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        // SAFETY: Simd contract.
        unsafe { vdupq_n_f32(0.0) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        // SAFETY: Simd contract.
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> float32x4_t {
        // SAFETY: Simd contract. Reads bytes, which need no alignment.
        unsafe { vreinterpretq_f32_u8(vld1q_u8(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: float32x4_t) {
        // SAFETY: Simd contract.
        unsafe { vst1q_f32(p, x) }
    }
    #[inline(always)]
    unsafe fn load_repeated(p: *const f32, n: usize) -> float32x4_t {
        // SAFETY: Simd contract; `n` values can be read.
        unsafe {
            match n {
                1 => vdupq_n_f32(*p),
                2 => vcombine_f32(vdup_n_f32(*p), vdup_n_f32(*p.add(1))),
                _ => vld1q_f32(p),
            }
        }
    }
    #[inline(always)]
    unsafe fn order_quads(x: float32x4_t) -> float32x4_t {
        x
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: Simd contract.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: Simd contract.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn sum(x: float32x4_t) -> f32 {
        // SAFETY: Simd contract.
        unsafe {
            let x = vpaddq_f32(x, x);
            vgetq_lane_f32::<0>(vpaddq_f32(x, x))
        }
    }
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [float32x4_t; 4]) -> [f32; 4] {
        // SAFETY: Simd contract.
        unsafe {
            let mut sums = [0.0; 4];
            vst1q_f32(sums.as_mut_ptr(), vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
            sums
        }
    }
    #[inline(always)]
    unsafe fn from_i32(x: int32x4_t) -> float32x4_t {
        // SAFETY: Simd contract.
        unsafe { vcvtq_f32_s32(x) }
    }
}

impl<const DOT: bool> Load for Neon<DOT> {
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> float32x4_t {
        // SAFETY: Simd contract.
        unsafe {
            let x = vreinterpret_u8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
            vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(x))))
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> float32x4_t {
        // SAFETY: Simd contract.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(p)))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> float32x4_t {
        // SAFETY: Simd contract.
        unsafe { vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> float32x4_t {
        // SAFETY: Simd contract. With exponent and mantissa moved to their place in f16, an element
        // is 2^8 times too small, because the exponent biases differ by 8. The code of 480 is NaN.
        unsafe {
            let x = vreinterpret_s8_u32(vdup_n_u32(p.cast::<u32>().read_unaligned()));
            let x = vreinterpret_u16_s16(vget_low_s16(vshll_n_s8::<7>(x)));
            let size = vand_u16(x, vdup_n_u16(0x3f80));
            let nan = vand_u16(vceq_u16(size, vdup_n_u16(0x3f80)), vdup_n_u16(0x7c00));
            let x = vorr_u16(vorr_u16(size, vand_u16(x, vdup_n_u16(0x8000))), nan);
            vmulq_f32(vcvt_f32_f16(vreinterpret_f16_u16(x)), vdupq_n_f32(256.0))
        }
    }
    #[inline(always)]
    unsafe fn load_e2m1(p: *const u8) -> float32x4_t {
        // High bytes of the elements as f16; low bytes are 0.
        const UPPER: [u8; 16] = [
            0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, 0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4,
            0xc6,
        ];
        // SAFETY: Simd contract.
        unsafe {
            let shifts = vcreate_s16(0xfff4_fff8_fffc_0000);
            let x = vshl_u16(vdup_n_u16(p.cast::<u16>().read_unaligned()), shifts);
            let x = vreinterpret_u8_u16(vand_u16(x, vdup_n_u16(15)));
            let x = vreinterpret_u16_u8(vqtbl1_u8(vld1q_u8(UPPER.as_ptr()), x));
            vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16::<8>(x)))
        }
    }
    #[inline(always)]
    unsafe fn prefetch_l2(_: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_l1(_: *const u8) {}
}

impl<const DOT: bool> Transpose for Neon<DOT> {
    const TRANSPOSE_DWORDS: usize = 8;
    #[inline(always)]
    unsafe fn load_dwords(p: *const u8) -> uint8x16_t {
        // SAFETY: Simd contract.
        unsafe { vld1q_u8(p) }
    }
    #[inline(always)]
    unsafe fn store_dwords(p: *mut u8, x: uint8x16_t) {
        // SAFETY: Simd contract.
        unsafe { vst1q_u8(p, x) }
    }
    #[inline(always)]
    unsafe fn transpose(rows: &RowPointers, offset: usize) -> [uint8x16_t; MAX_LANES] {
        // SAFETY: Simd contract.
        unsafe {
            let mut dwords = [vdupq_n_u8(0); MAX_LANES];
            for half in 0..2 {
                let mut x = [vdupq_n_u8(0); 4];
                for (x, row) in x.iter_mut().zip(rows) {
                    *x = vld1q_u8(row.add(offset + 16 * half));
                }
                for (i, column) in Self::transpose_quads(x).into_iter().enumerate() {
                    dwords[4 * half + i] = column;
                }
            }
            dwords
        }
    }
    #[inline(always)]
    unsafe fn transpose_quads(x: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
        // SAFETY: Simd contract.
        unsafe {
            let x = x.map(|x| vreinterpretq_u32_u8(x));
            let (a, b) = (vtrn1q_u32(x[0], x[1]), vtrn1q_u32(x[2], x[3]));
            let (c, d) = (vtrn2q_u32(x[0], x[1]), vtrn2q_u32(x[2], x[3]));
            let [a, b, c, d] = [a, b, c, d].map(|x| vreinterpretq_u64_u32(x));
            let columns = [vtrn1q_u64(a, b), vtrn1q_u64(c, d), vtrn2q_u64(a, b), vtrn2q_u64(c, d)];
            columns.map(|column| vreinterpretq_u8_u64(column))
        }
    }
    #[inline(always)]
    unsafe fn deinterleave(a: uint8x16_t, b: uint8x16_t) -> [uint8x16_t; 2] {
        // SAFETY: Simd contract.
        unsafe {
            let (a, b) = (vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b));
            [vreinterpretq_u8_u32(vuzp1q_u32(a, b)), vreinterpretq_u8_u32(vuzp2q_u32(a, b))]
        }
    }
    #[inline(always)]
    unsafe fn dwords_to_f32(x: uint8x16_t) -> float32x4_t {
        // SAFETY: Simd contract.
        unsafe { vreinterpretq_f32_u8(x) }
    }
    #[inline(always)]
    unsafe fn dwords_to_bf16(x: uint8x16_t) -> [float32x4_t; 2] {
        // SAFETY: Simd contract.
        unsafe {
            let x = vreinterpretq_u32_u8(x);
            let second = vandq_u32(x, vdupq_n_u32(0xffff_0000));
            [vreinterpretq_f32_u32(vshlq_n_u32::<16>(x)), vreinterpretq_f32_u32(second)]
        }
    }
    #[inline(always)]
    unsafe fn dwords_to_f16(x: uint8x16_t) -> [float32x4_t; 2] {
        // SAFETY: Simd contract.
        unsafe {
            let x = vreinterpretq_u32_u8(x);
            let (first, second) = (vmovn_u32(x), vshrn_n_u32::<16>(x));
            [vcvt_f32_f16(vreinterpret_f16_u16(first)), vcvt_f32_f16(vreinterpret_f16_u16(second))]
        }
    }
}

impl<const DOT: bool> Int8Dot for Neon<DOT> {
    fn unpack_read_bytes(bits: usize) -> usize {
        match bits {
            4 | 8 => 2 * Q8_GROUP * bits / 8,
            _ => 2 * bits + 16,
        }
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> uint8x16x2_t {
        // SAFETY: Simd contract; `unpack_read_bytes` bytes can be read.
        unsafe {
            match BITS {
                8 => uint8x16x2_t(vld1q_u8(p), vld1q_u8(p.add(16))),
                4 => {
                    let x = vld1q_u8(p);
                    let (low, high) = (vandq_u8(x, vdupq_n_u8(15)), vshrq_n_u8::<4>(x));
                    uint8x16x2_t(vzip1q_u8(low, high), vzip2q_u8(low, high))
                }
                _ => uint8x16x2_t(unpack_16::<BITS>(p), unpack_16::<BITS>(p.add(2 * BITS))),
            }
        }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, x: uint8x16x2_t) {
        // SAFETY: Simd contract.
        unsafe {
            vst1q_u8(p, x.0);
            vst1q_u8(p.add(16), x.1);
        }
    }
    #[inline(always)]
    unsafe fn bytes_to_dwords(x: uint8x16x2_t) -> [uint8x16_t; MAX_UNPACKED] {
        [x.0, x.1, x.0, x.1]
    }
    #[inline(always)]
    unsafe fn extract_bits(x: uint8x16_t, shift: usize, bits: usize) -> uint8x16_t {
        // SAFETY: Simd contract.
        unsafe {
            let x = vshlq_u8(x, vdupq_n_s8(-(shift as i8)));
            vandq_u8(x, vdupq_n_u8(((1u32 << bits) - 1) as u8))
        }
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], x: uint8x16_t) -> uint8x16_t {
        // SAFETY: Simd contract.
        unsafe { vqtbl1q_u8(vld1q_u8(table.as_ptr()), x) }
    }
    #[inline(always)]
    unsafe fn zero_i32() -> int32x4_t {
        // SAFETY: Simd contract.
        unsafe { vdupq_n_s32(0) }
    }
    #[inline(always)]
    unsafe fn dot<P: Packing, const N: usize>(
        sum: int32x4_t,
        w: [uint8x16_t; MAX_UNPACKED],
        x: [uint8x16_t; MAX_UNPACKED],
    ) -> int32x4_t {
        // SAFETY: Simd contract.
        unsafe {
            if P::BITS < 8 {
                return dot7::<DOT, N>(sum, w, x, 6);
            }
            // The top bit is summed separately, times 128.
            let [tops, rest] = tops_and_rest(w);
            let tops = dot7::<DOT, N>(vdupq_n_s32(0), tops, x, 1);
            vaddq_s32(dot7::<DOT, N>(sum, rest, x, 7), vshlq_n_s32::<7>(tops))
        }
    }
    #[inline(always)]
    unsafe fn dot_broadcast<P: Packing>(
        sum: int32x4_t,
        w: [uint8x16_t; MAX_UNPACKED],
        x: *const i8,
    ) -> int32x4_t {
        // SAFETY: Simd contract; 16 activations can be read.
        unsafe {
            let x = vld1q_u8(x.cast());
            if !DOT {
                let x = vreinterpretq_u32_u8(x);
                let fours = [
                    vdupq_laneq_u32::<0>(x),
                    vdupq_laneq_u32::<1>(x),
                    vdupq_laneq_u32::<2>(x),
                    vdupq_laneq_u32::<3>(x),
                ];
                return Self::dot::<P, MAX_UNPACKED>(
                    sum,
                    w,
                    fours.map(|four| vreinterpretq_u8_u32(four)),
                );
            }
            let x = vreinterpretq_s8_u8(x);
            let dot = |sum, w: [uint8x16_t; MAX_UNPACKED]| {
                let w = w.map(|w| vreinterpretq_s8_u8(w));
                let sum = sdot_lane::<1>(sdot_lane::<0>(sum, w[0], x), w[1], x);
                sdot_lane::<3>(sdot_lane::<2>(sum, w[2], x), w[3], x)
            };
            if P::BITS < 8 {
                return dot(sum, w);
            }
            let [tops, rest] = tops_and_rest(w);
            vaddq_s32(dot(sum, rest), vshlq_n_s32::<7>(dot(vdupq_n_s32(0), tops)))
        }
    }
    #[inline(always)]
    unsafe fn to_operand(x: uint8x16_t) -> uint8x16_t {
        x
    }
}
