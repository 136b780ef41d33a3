//! NEON; with `DOT`, also the dot products of Armv8.4.

use std::arch::{aarch64::*, asm};

use super::{
    algorithm::{GROUP, Simd},
    quants::{PARTS, Packing},
};

#[derive(Clone, Copy)]
pub(super) struct Neon<const DOT: bool>;

/// Where sixteen quants of `bits` bits lie in `2 * bits` bytes, seen from 16-bit lanes: for each quant the two
/// bytes that it is in, and by how much to shift them right.
///
/// Lanes 0..8 of the first table are quants 0..8, those of the second quants 8..16.
const fn lanes(bits: usize) -> ([[u8; 16]; 2], [[i16; 8]; 2]) {
    let (mut bytes, mut shifts) = ([[0; 16]; 2], [[0; 8]; 2]);
    let mut i = 0;
    while i < 16 {
        let at = i * bits;
        let (byte, shift) = (at / 8, at % 8);
        bytes[i / 8][i % 8 * 2] = byte as u8;
        // A quant that ends in its first byte takes nothing of the next, which may be another row's.
        bytes[i / 8][i % 8 * 2 + 1] = if shift + bits > 8 { byte as u8 + 1 } else { 0x80 };
        shifts[i / 8][i % 8] = -(shift as i16);
        i += 1;
    }
    (bytes, shifts)
}

struct Lanes<const BITS: usize>;

impl<const BITS: usize> Lanes<BITS> {
    const BYTES: [[u8; 16]; 2] = lanes(BITS).0;
    const SHIFTS: [[i16; 8]; 2] = lanes(BITS).1;
}

/// Sixteen quants of `BITS` bits, from `2 * BITS` bytes; reads sixteen.
#[inline(always)]
unsafe fn sixteen<const BITS: usize>(p: *const u8) -> uint8x16_t {
    // SAFETY: the caller's.
    unsafe {
        let x = vld1q_u8(p);
        let mut halves = [x; 2];
        for (i, half) in halves.iter_mut().enumerate() {
            let x = vqtbl1q_u8(x, vld1q_u8(Lanes::<BITS>::BYTES[i].as_ptr()));
            let shifts = vld1q_s16(Lanes::<BITS>::SHIFTS[i].as_ptr());
            *half = vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(x), shifts));
        }
        vandq_u8(vuzp1q_u8(halves[0], halves[1]), vdupq_n_u8(((1u32 << BITS) - 1) as u8))
    }
}

/// Adds to each lane the products of four bytes.
#[inline(always)]
unsafe fn sdot(mut acc: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: the caller's: the processor has the instruction. Its intrinsic is not stable.
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

/// Adds to each lane the products of some bytes; `w` has at most seven bits.
#[inline(always)]
unsafe fn dot7<const DOT: bool>(acc: int32x4_t, w: uint8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: the caller's. Two products of at most 127 * 127 fit into 16 bits.
    unsafe {
        let w = vreinterpretq_s8_u8(w);
        if DOT {
            return sdot(acc, w, x);
        }
        let products = vmull_s8(vget_low_s8(w), vget_low_s8(x));
        vpadalq_s16(acc, vmlal_high_s8(products, w, x))
    }
}

impl<const DOT: bool> Simd for Neon<DOT> {
    type F = float32x4_t;
    type I = int32x4_t;
    type B = uint8x16x2_t;
    const LANES: usize = 4;
    const UNIT: usize = GROUP;
    const SPLITS: bool = false;
    const FUSED: bool = true;
    const WIDTH: usize = 2;

    #[inline(always)]
    unsafe fn zero() -> float32x4_t {
        // SAFETY: the caller's, here and below.
        unsafe { vdupq_n_f32(0.0) }
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> float32x4_t {
        // SAFETY: see `zero`.
        unsafe { vdupq_n_f32(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> float32x4_t {
        // SAFETY: see `zero`; read as bytes, which need no alignment.
        unsafe { vreinterpretq_f32_u8(vld1q_u8(p.cast())) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: float32x4_t) {
        // SAFETY: see `zero`.
        unsafe { vst1q_f32(p, x) }
    }
    #[inline(always)]
    unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        // SAFETY: see `zero`.
        unsafe { vmulq_f32(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        // SAFETY: see `zero`.
        unsafe { vfmaq_f32(c, a, b) }
    }
    #[inline(always)]
    unsafe fn sum(x: float32x4_t) -> f32 {
        // SAFETY: see `zero`.
        unsafe {
            let x = vpaddq_f32(x, x);
            vgetq_lane_f32::<0>(vpaddq_f32(x, x))
        }
    }
    #[inline(always)]
    unsafe fn sum4([a, b, c, d]: [float32x4_t; 4]) -> [f32; 4] {
        // SAFETY: see `zero`.
        unsafe {
            let mut sums = [0.0; 4];
            vst1q_f32(sums.as_mut_ptr(), vpaddq_f32(vpaddq_f32(a, b), vpaddq_f32(c, d)));
            sums
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> float32x4_t {
        // SAFETY: see `zero`.
        unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(p)))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> float32x4_t {
        // SAFETY: see `zero`.
        unsafe { vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))) }
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> float32x4_t {
        // SAFETY: see `zero`. Moved to where f16 has exponent and mantissa, an element is 2^8 times too small, because
        // the biases of the exponents differ by 8; what would be 480 is NaN.
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
        // The upper bytes of the elements as f16; the lower ones are zero, as is the first.
        const UPPER: [u8; 16] =
            [0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, 0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6];
        // SAFETY: see `zero`.
        unsafe {
            let shifts = vcreate_s16(0xfff4_fff8_fffc_0000);
            let x = vshl_u16(vdup_n_u16(p.cast::<u16>().read_unaligned()), shifts);
            let x = vreinterpret_u8_u16(vand_u16(x, vdup_n_u16(15)));
            let x = vreinterpret_u16_u8(vqtbl1_u8(vld1q_u8(UPPER.as_ptr()), x));
            vcvt_f32_f16(vreinterpret_f16_u16(vshl_n_u16::<8>(x)))
        }
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}

    fn reach(bits: usize) -> usize {
        match bits {
            4 | 8 => GROUP * bits / 8,
            _ => 2 * bits + 16,
        }
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> uint8x16x2_t {
        // SAFETY: see `zero`; `reach` bytes can be read.
        unsafe {
            match BITS {
                8 => uint8x16x2_t(vld1q_u8(p), vld1q_u8(p.add(16))),
                4 => {
                    let x = vld1q_u8(p);
                    let (low, high) = (vandq_u8(x, vdupq_n_u8(15)), vshrq_n_u8::<4>(x));
                    uint8x16x2_t(vzip1q_u8(low, high), vzip2q_u8(low, high))
                }
                _ => uint8x16x2_t(sixteen::<BITS>(p), sixteen::<BITS>(p.add(2 * BITS))),
            }
        }
    }
    #[inline(always)]
    unsafe fn bits(x: uint8x16x2_t, from: usize, bits: usize) -> uint8x16x2_t {
        // SAFETY: see `zero`.
        unsafe {
            let (shift, mask) = (vdupq_n_s8(-(from as i8)), vdupq_n_u8(((1u32 << bits) - 1) as u8));
            uint8x16x2_t(vandq_u8(vshlq_u8(x.0, shift), mask), vandq_u8(vshlq_u8(x.1, shift), mask))
        }
    }
    #[inline(always)]
    unsafe fn lookup(x: uint8x16x2_t, table: &[u8; 16]) -> uint8x16x2_t {
        // SAFETY: see `zero`.
        unsafe {
            let table = vld1q_u8(table.as_ptr());
            uint8x16x2_t(vqtbl1q_u8(table, x.0), vqtbl1q_u8(table, x.1))
        }
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> uint8x16x2_t {
        // SAFETY: see `zero`.
        unsafe { uint8x16x2_t(vld1q_u8(p), vld1q_u8(p.add(16))) }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, x: uint8x16x2_t) {
        // SAFETY: see `zero`.
        unsafe {
            vst1q_u8(p, x.0);
            vst1q_u8(p.add(16), x.1);
        }
    }
    #[inline(always)]
    unsafe fn dot<P: Packing>([w, ..]: [uint8x16x2_t; PARTS], [x, ..]: [uint8x16x2_t; PARTS]) -> int32x4_t {
        // SAFETY: see `zero`.
        unsafe {
            let zero = vdupq_n_s32(0);
            let x = [vreinterpretq_s8_u8(x.0), vreinterpretq_s8_u8(x.1)];
            if P::BITS < 8 {
                return dot7::<DOT>(dot7::<DOT>(zero, w.0, x[0]), w.1, x[1]);
            }
            // The upper bit is worth 128 and is summed apart.
            let low = vdupq_n_u8(127);
            let sum = dot7::<DOT>(dot7::<DOT>(zero, vandq_u8(w.0, low), x[0]), vandq_u8(w.1, low), x[1]);
            let (top, more) = (vshrq_n_u8::<7>(w.0), vshrq_n_u8::<7>(w.1));
            let tops = dot7::<DOT>(dot7::<DOT>(zero, top, x[0]), more, x[1]);
            vaddq_s32(sum, vshlq_n_s32::<7>(tops))
        }
    }
    #[inline(always)]
    unsafe fn float(x: int32x4_t) -> float32x4_t {
        // SAFETY: see `zero`.
        unsafe { vcvtq_f32_s32(x) }
    }
    #[inline(always)]
    unsafe fn spread(p: *const f32, n: usize) -> float32x4_t {
        // SAFETY: see `zero`; `n` numbers can be read.
        unsafe {
            match n {
                1 => vdupq_n_f32(*p),
                2 => vcombine_f32(vdup_n_f32(*p), vdup_n_f32(*p.add(1))),
                _ => vld1q_f32(p),
            }
        }
    }
}
