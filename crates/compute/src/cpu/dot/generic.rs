//! What a machine without a known instruction set runs: vectors of the crate `wide`, which are those that every x86-64 and
//! every AArch64 has, and arrays elsewhere.

use bytemuck::{Pod, cast};
use wide::{f32x4, f32x8, i8x32, i16x8, i16x16, i32x8, u8x16, u8x32, u16x8, u16x16, u32x8};

use super::{
    algorithm::{GROUP, MAX_LANES, Pointers, Simd},
    quants::{KV_SPLITS, Packing},
};
use crate::Element;

#[derive(Clone, Copy)]
pub(super) struct Generic;

const LANES: usize = 8;

/// Reads what may lie anywhere.
#[inline(always)]
unsafe fn read<T: Pod>(p: *const u8) -> T {
    // SAFETY: the caller's: so many bytes can be read, and any bytes are a T.
    unsafe { p.cast::<T>().read_unaligned() }
}

/// Each byte of eight.
#[inline(always)]
fn widen_bytes(bytes: u64) -> u32x8 {
    u32x8::from(u16x8::from_u8x16_low(cast::<[u64; 2], u8x16>([bytes, 0])))
}

/// The numbers of bf16's bits.
#[inline(always)]
fn of_bf16(bits: u32x8) -> f32x8 {
    cast(bits << 16u32)
}

/// The numbers of f16's bits, as [`widen_f16`](super::algorithm::widen_f16) has them: few are subnormal, of keys, values and scales.
#[inline(always)]
fn of_f16(bits: u32x8) -> f32x8 {
    let moved = cast::<u32x8, i32x8>(bits << 16u32) >> 3u32 & i32x8::splat(0x8fff_e000_u32 as i32);
    let number = cast::<i32x8, f32x8>(moved) * f32x8::splat(f32::from_bits((127 + 112) << 23));
    let size = cast::<u32x8, i32x8>(bits & u32x8::splat(0x7fff));
    // What has the largest exponent is infinite, or NaN.
    let infinite = size.simd_gt(i32x8::splat(0x7bff)) & i32x8::splat(0x7f80_0000);
    cast(cast::<f32x8, i32x8>(number) | infinite)
}

/// The lower byte of each word, and the upper one.
#[inline(always)]
fn bytes_of(x: u16x16) -> [i16x16; 2] {
    [cast(x & u16x16::splat(255)), cast(x >> 8u32)]
}

/// The same of bytes with signs.
#[inline(always)]
fn signed_bytes_of(x: i16x16) -> [i16x16; 2] {
    [x << 8u32 >> 8u32, x >> 8u32]
}

/// Moves the upper half of every field of `2 * bits` bits to where `apart` bits lie between the starts of halves.
#[inline(always)]
const fn spread_halves(x: u64, bits: usize, apart: usize, fields: u64) -> u64 {
    let lower = fields * ((1 << bits) - 1);
    x & lower | (x & lower << bits) << (apart - bits)
}

/// Eight quants of so many bits, each in a byte.
#[inline(always)]
const fn spread_quants(x: u64, bits: usize) -> u64 {
    if bits == 8 {
        return x;
    }
    let x = spread_halves(x, 4 * bits, 32, 1);
    let x = spread_halves(x, 2 * bits, 16, 0x1_0000_0001);
    spread_halves(x, bits, 8, 0x1_0001_0001_0001)
}

impl Simd for Generic {
    type F = f32x8;
    type I = i32x8;
    type D = u16x16;
    type W = [i16x16; 2];
    type B = u8x32;
    const LANES: usize = LANES;
    const UNIT: usize = 2 * GROUP;
    const DWORDS: usize = 8;
    const FUSED: bool = false;
    const WIDTH: usize = 2;
    const PACKED: [usize; 2] = [2, 1];

    #[inline(always)]
    unsafe fn zero() -> f32x8 {
        f32x8::ZERO
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> f32x8 {
        f32x8::splat(x)
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> f32x8 {
        // SAFETY: the caller's.
        unsafe { read(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: f32x8) {
        // SAFETY: the caller's.
        unsafe { p.cast::<f32x8>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn mul(a: f32x8, b: f32x8) -> f32x8 {
        a * b
    }
    #[inline(always)]
    unsafe fn fma(a: f32x8, b: f32x8, c: f32x8) -> f32x8 {
        a * b + c
    }
    #[inline(always)]
    unsafe fn sum(x: f32x8) -> f32 {
        let [a, b]: [f32x4; 2] = cast(x);
        let [a, b, c, d] = (a + b).to_array();
        (a + c) + (b + d)
    }
    #[inline(always)]
    unsafe fn sum4(x: [f32x8; 4]) -> [f32; 4] {
        let halves: [[f32x4; 2]; 4] = cast(x);
        let [a, b, c, d] = f32x4::transpose(halves.map(|[a, b]| a + b));
        ((a + c) + (b + d)).to_array()
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> f32x8 {
        // SAFETY: the caller's: LANES bytes can be read.
        cast::<u32x8, i32x8>(widen_bytes(unsafe { read(p) })).round_float()
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> f32x8 {
        // SAFETY: the caller's: LANES numbers can be read.
        of_bf16(u32x8::from(unsafe { read::<u16x8>(p) }))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> f32x8 {
        // SAFETY: the caller's: LANES numbers can be read.
        of_f16(u32x8::from(unsafe { read::<u16x8>(p) }))
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> f32x8 {
        // SAFETY: the caller's: LANES elements can be read.
        let bytes: [u8; LANES] = unsafe { read(p) };
        f32x8::from(std::array::from_fn::<_, LANES, _>(|i| Element::E4M3.get(&bytes, i)))
    }
    #[inline(always)]
    unsafe fn load_e2m1(p: *const u8) -> f32x8 {
        // SAFETY: the caller's: LANES elements can be read.
        let bytes: [u8; LANES / 2] = unsafe { read(p) };
        f32x8::from(std::array::from_fn::<_, LANES, _>(|i| Element::E2M1.get(&bytes, i)))
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_near(_: *const u8) {}

    fn reach(bits: usize) -> usize {
        2 * GROUP * bits / 8
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> u8x32 {
        let mut out = [0; 4];
        for (i, out) in out.iter_mut().enumerate() {
            let mut bytes = [0u8; 8];
            // SAFETY: eight quants take BITS bytes, and a unit can be read.
            unsafe { std::ptr::copy_nonoverlapping(p.add(i * BITS), bytes.as_mut_ptr(), BITS) };
            *out = spread_quants(u64::from_le_bytes(bytes), BITS);
        }
        cast(out)
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, x: u8x32) {
        // SAFETY: the caller's.
        unsafe { p.cast::<u8x32>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn in_order(x: u8x32) -> [u16x16; KV_SPLITS] {
        [cast(x); KV_SPLITS]
    }
    #[inline(always)]
    unsafe fn columns(rows: &Pointers, at: usize) -> [u16x16; MAX_LANES] {
        let mut all = [u16x16::ZERO; MAX_LANES];
        for half in 0..2 {
            let mut fours = [[f32x4::ZERO; 4]; 2];
            for r in 0..LANES {
                // SAFETY: the caller's: so many bytes can be read.
                fours[r / 4][r % 4] = unsafe { read(rows[r].add(at + 16 * half)) };
            }
            let [upper, lower] = fours.map(f32x4::transpose);
            for c in 0..4 {
                all[4 * half + c] = cast([upper[c], lower[c]]);
            }
        }
        all
    }
    #[inline(always)]
    unsafe fn load_dwords(p: *const u8) -> u16x16 {
        // SAFETY: the caller's.
        unsafe { read(p) }
    }
    #[inline(always)]
    unsafe fn store_dwords(p: *mut u8, x: u16x16) {
        // SAFETY: the caller's.
        unsafe { p.cast::<u16x16>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn bits(x: u16x16, from: usize, bits: usize) -> u16x16 {
        // What a shift of words brings from the other byte is masked.
        x >> from as u32 & u16x16::splat(((1 << bits) - 1) * 0x0101)
    }
    #[inline(always)]
    unsafe fn e2m1_quants(x: u16x16) -> u16x16 {
        // Without a table: twice the size of an element is 0, 1, 2, 3, 4, 6, 8 or 12.
        let x: i8x32 = cast(x);
        let code = x & i8x32::splat(7);
        let [above4, above5, above6] = [4, 5, 6].map(|n| code.simd_gt(i8x32::splat(n)));
        // What is true is -1.
        let size = code - above4 - above5 + (above6 & i8x32::splat(3));
        let negative = x.simd_gt(i8x32::splat(7));
        cast(((size ^ negative) - negative) + i8x32::splat(12))
    }
    #[inline(always)]
    unsafe fn f32_column(x: u16x16) -> f32x8 {
        cast(x)
    }
    #[inline(always)]
    unsafe fn bf16_columns(x: u16x16) -> [f32x8; 2] {
        let x: u32x8 = cast(x);
        [of_bf16(x), cast(x & u32x8::splat(0xffff_0000))]
    }
    #[inline(always)]
    unsafe fn f16_columns(x: u16x16) -> [f32x8; 2] {
        let x: u32x8 = cast(x);
        [of_f16(x & u32x8::splat(0xffff)), of_f16(x >> 16u32)]
    }
    #[inline(always)]
    unsafe fn none() -> i32x8 {
        i32x8::ZERO
    }
    #[inline(always)]
    unsafe fn dot<P: Packing, const N: usize>(
        mut sum: i32x8,
        w: [u16x16; KV_SPLITS],
        x: [u16x16; KV_SPLITS],
    ) -> i32x8 {
        for i in 0..N {
            let ([w_lower, w_upper], [x_lower, x_upper]) =
                (bytes_of(w[i]), signed_bytes_of(cast(x[i])));
            sum += w_lower.dot(x_lower) + w_upper.dot(x_upper);
        }
        sum
    }
    #[inline(always)]
    unsafe fn dot_fours<P: Packing>(
        sum: i32x8,
        w: [[i16x16; 2]; KV_SPLITS],
        x: *const i8,
    ) -> i32x8 {
        // SAFETY: the caller's.
        let [products] = unsafe { Self::dot_rows::<P, 1>(w, [x]) };
        sum + products
    }
    #[inline(always)]
    unsafe fn dot_rows<P: Packing, const X: usize>(
        w: [[i16x16; 2]; KV_SPLITS],
        x: [*const i8; X],
    ) -> [i32x8; X] {
        // What meets the same quants comes together: quants of all four vectors do not fit into registers.
        let mut fours = [[[0i32; KV_SPLITS]; 2]; X];
        for c in 0..X {
            // SAFETY: the caller's: sixteen numbers can be read.
            let x: i16x8 = unsafe { read(x[c].cast()) };
            fours[c] = [cast(x << 8u32 >> 8u32), cast(x >> 8u32)];
        }
        let mut sums = [i32x8::ZERO; X];
        for i in 0..KV_SPLITS {
            for c in 0..X {
                let [lower, upper] =
                    [cast(i32x8::splat(fours[c][0][i])), cast(i32x8::splat(fours[c][1][i]))];
                sums[c] += w[i][0].dot(lower) + w[i][1].dot(upper);
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn factors(x: u16x16) -> [i16x16; 2] {
        bytes_of(x)
    }
    #[inline(always)]
    unsafe fn unzip(a: u16x16, b: u16x16) -> [u16x16; 2] {
        let fours: [u32; 2 * LANES] = cast([a, b]);
        [0, 1].map(|odd| cast(std::array::from_fn::<_, LANES, _>(|i| fours[2 * i + odd])))
    }
    #[inline(always)]
    unsafe fn spread(p: *const f32, n: usize) -> f32x8 {
        // SAFETY: the caller's: so many numbers can be read.
        f32x8::from(std::array::from_fn::<_, LANES, _>(|i| unsafe { *p.add(i * n / LANES) }))
    }
    #[inline(always)]
    unsafe fn float(x: i32x8) -> f32x8 {
        x.round_float()
    }
}

#[cfg(test)]
mod tests {
    use super::{super::quants::Bits, *};

    #[test]
    fn the_largest_products_do_not_overflow() {
        let lanes = |x: i32x8| {
            let all = x.to_array();
            assert_eq!(all, [all[0]; LANES]);
            all[0]
        };
        for x in [-128i8, -127, 127] {
            let of_x: [u16x16; KV_SPLITS] = [cast([x; 4 * LANES]); KV_SPLITS];
            let w: [u16x16; KV_SPLITS] = [cast([255u8; 4 * LANES]); KV_SPLITS];
            // SAFETY: no instruction set is needed.
            let sums = unsafe {
                [
                    Generic::dot::<Bits<8>, KV_SPLITS>(i32x8::ONE, w, of_x),
                    Generic::dot_fours::<Bits<8>>(i32x8::ONE, w.map(bytes_of), [x; GROUP].as_ptr()),
                ]
            };
            assert_eq!(sums.map(lanes), [1 + 16 * 255 * i32::from(x); 2]);
        }
    }

    #[test]
    fn quants_are_spread_to_bytes() {
        for bits in [2, 3, 4, 5, 6, 8] {
            let packed = 0x9e37_79b9_7f4a_7c15_u64 >> (64 - 8 * bits);
            let bytes =
                std::array::from_fn(|i| (packed >> (i * bits)) as u8 & ((1 << bits) - 1) as u8);
            assert_eq!(spread_quants(packed, bits), u64::from_le_bytes(bytes), "{bits}");
        }
    }
}
