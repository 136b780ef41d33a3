//! Portable vectors, for machines without a supported instruction set: types of the crate `wide`,
//! which are baseline SIMD on x86-64 and AArch64, and arrays elsewhere.

use bytemuck::{Pod, cast};
use moeflux_ops::Element;
use wide::{f32x4, f32x8, i8x32, i16x8, i16x16, i32x8, u8x16, u8x32, u16x8, u16x16, u32x8};

use super::{
    unpack_affine::{MAX_UNPACKED, Packing},
    vector::{Float, Int8Dot, Load, MAX_LANES, Q8_GROUP, RowPointers, Transpose, VectorTypes},
};

/// Portable vectors of 8 lanes.
#[derive(Clone, Copy)]
pub(super) struct Generic;

const LANES: usize = 8;

/// Reads a value at any alignment.
///
/// # Safety
/// `size_of::<T>()` bytes can be read.
#[inline(always)]
unsafe fn read<T: Pod>(p: *const u8) -> T {
    // SAFETY: as this function; any bytes are a `T: Pod`.
    unsafe { p.cast::<T>().read_unaligned() }
}

/// Zero-extends 8 bytes to u32.
#[inline(always)]
fn widen_bytes(bytes: u64) -> u32x8 {
    u32x8::from(u16x8::from_u8x16_low(cast::<[u64; 2], u8x16>([bytes, 0])))
}

/// Converts bf16 bits to f32.
#[inline(always)]
fn bf16_lanes(bits: u32x8) -> f32x8 {
    cast(bits << 16u32)
}

/// Converts f16 bits to f32 as [`f16_to_f32`](super::float_types::f16_to_f32). Slow for subnormals,
/// which are rare in KV caches and scales.
#[inline(always)]
fn f16_lanes(bits: u32x8) -> f32x8 {
    let moved = cast::<u32x8, i32x8>(bits << 16u32) >> 3u32 & i32x8::splat(0x8fff_e000_u32 as i32);
    let value = cast::<i32x8, f32x8>(moved) * f32x8::splat(f32::from_bits((127 + 112) << 23));
    let magnitude = cast::<u32x8, i32x8>(bits & u32x8::splat(0x7fff));
    // The largest exponent is an infinity or NaN.
    let infinite = magnitude.simd_gt(i32x8::splat(0x7bff)) & i32x8::splat(0x7f80_0000);
    cast(cast::<f32x8, i32x8>(value) | infinite)
}

/// Low and high bytes of 16-bit words, zero-extended.
#[inline(always)]
fn split_bytes(x: u16x16) -> [i16x16; 2] {
    [cast(x & u16x16::splat(255)), cast(x >> 8u32)]
}

/// Low and high bytes of 16-bit words, sign-extended.
#[inline(always)]
fn split_signed_bytes(x: i16x16) -> [i16x16; 2] {
    [x << 8u32 >> 8u32, x >> 8u32]
}

/// Moves the upper half of every field of `2 * bits` bits so that the halves start `apart` bits
/// from each other. `fields` has the lowest bit of every field set.
#[inline(always)]
const fn spread_halves(x: u64, bits: usize, apart: usize, fields: u64) -> u64 {
    let lower = fields * ((1 << bits) - 1);
    x & lower | (x & lower << bits) << (apart - bits)
}

/// Spreads eight packed quants of `bits` bits to bytes.
#[inline(always)]
const fn spread_quants(x: u64, bits: usize) -> u64 {
    if bits == 8 {
        return x;
    }
    let x = spread_halves(x, 4 * bits, 32, 1);
    let x = spread_halves(x, 2 * bits, 16, 0x1_0000_0001);
    spread_halves(x, bits, 8, 0x1_0001_0001_0001)
}

impl VectorTypes for Generic {
    type F32 = f32x8;
    type I32 = i32x8;
    type Dwords = u16x16;
    type DotOperand = [i16x16; 2];
    type UnitBytes = u8x32;
    const LANES: usize = LANES;
    const UNIT: usize = 2 * Q8_GROUP;
    const HAS_FMA: bool = false;
    const TILE_ACTIVATIONS: usize = 2;
    const GEMV_WEIGHT_ROWS: [usize; 2] = [2, 1];
}

impl Float for Generic {
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
        // SAFETY: Simd contract.
        unsafe { read(p.cast()) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: f32x8) {
        // SAFETY: Simd contract.
        unsafe { p.cast::<f32x8>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_repeated(p: *const f32, n: usize) -> f32x8 {
        // SAFETY: Simd contract: `n` values can be read.
        f32x8::from(std::array::from_fn::<_, LANES, _>(|i| unsafe { *p.add(i * n / LANES) }))
    }
    #[inline(always)]
    unsafe fn order_quads(x: f32x8) -> f32x8 {
        let x = x.to_array();
        f32x8::from([0, 2, 4, 6, 1, 3, 5, 7].map(|lane: usize| x[lane]))
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
    unsafe fn from_i32(x: i32x8) -> f32x8 {
        x.round_float()
    }
}

impl Load for Generic {
    #[inline(always)]
    unsafe fn load_u8(p: *const u8) -> f32x8 {
        // SAFETY: Simd contract.
        cast::<u32x8, i32x8>(widen_bytes(unsafe { read(p) })).round_float()
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> f32x8 {
        // SAFETY: Simd contract.
        bf16_lanes(u32x8::from(unsafe { read::<u16x8>(p) }))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> f32x8 {
        // SAFETY: Simd contract.
        f16_lanes(u32x8::from(unsafe { read::<u16x8>(p) }))
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> f32x8 {
        // SAFETY: Simd contract.
        let bytes: [u8; LANES] = unsafe { read(p) };
        f32x8::from(std::array::from_fn::<_, LANES, _>(|i| Element::E4M3.get(&bytes, i)))
    }
    #[inline(always)]
    unsafe fn load_e2m1(p: *const u8) -> f32x8 {
        // SAFETY: Simd contract.
        let bytes: [u8; LANES / 2] = unsafe { read(p) };
        f32x8::from(std::array::from_fn::<_, LANES, _>(|i| Element::E2M1.get(&bytes, i)))
    }
    #[inline(always)]
    unsafe fn prefetch_l2(_: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_l1(_: *const u8) {}
}

impl Transpose for Generic {
    const TRANSPOSE_DWORDS: usize = 8;
    #[inline(always)]
    unsafe fn load_dwords(p: *const u8) -> u16x16 {
        // SAFETY: Simd contract.
        unsafe { read(p) }
    }
    #[inline(always)]
    unsafe fn store_dwords(p: *mut u8, x: u16x16) {
        // SAFETY: Simd contract.
        unsafe { p.cast::<u16x16>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn transpose(rows: &RowPointers, offset: usize) -> [u16x16; MAX_LANES] {
        let mut columns = [u16x16::ZERO; MAX_LANES];
        for half in 0..2 {
            let mut fours = [[f32x4::ZERO; 4]; 2];
            for r in 0..LANES {
                // SAFETY: Simd contract.
                fours[r / 4][r % 4] = unsafe { read(rows[r].add(offset + 16 * half)) };
            }
            let [upper, lower] = fours.map(f32x4::transpose);
            for c in 0..4 {
                columns[4 * half + c] = cast([upper[c], lower[c]]);
            }
        }
        columns
    }
    #[inline(always)]
    unsafe fn transpose_quads(x: [u16x16; 4]) -> [u16x16; 4] {
        let halves: [[f32x4; 2]; 4] = cast(x);
        let [lower, upper] = [0, 1].map(|half| f32x4::transpose(halves.map(|halves| halves[half])));
        std::array::from_fn(|i| cast([lower[i], upper[i]]))
    }
    #[inline(always)]
    unsafe fn deinterleave(a: u16x16, b: u16x16) -> [u16x16; 2] {
        let fours: [u32; 2 * LANES] = cast([a, b]);
        [0, 1].map(|odd| cast(std::array::from_fn::<_, LANES, _>(|i| fours[2 * i + odd])))
    }
    #[inline(always)]
    unsafe fn dwords_to_f32(x: u16x16) -> f32x8 {
        cast(x)
    }
    #[inline(always)]
    unsafe fn dwords_to_bf16(x: u16x16) -> [f32x8; 2] {
        let x: u32x8 = cast(x);
        [bf16_lanes(x), cast(x & u32x8::splat(0xffff_0000))]
    }
    #[inline(always)]
    unsafe fn dwords_to_f16(x: u16x16) -> [f32x8; 2] {
        let x: u32x8 = cast(x);
        [f16_lanes(x & u32x8::splat(0xffff)), f16_lanes(x >> 16u32)]
    }
}

impl Int8Dot for Generic {
    fn unpack_read_bytes(bits: usize) -> usize {
        2 * Q8_GROUP * bits / 8
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> u8x32 {
        let mut out = [0; 4];
        for (i, out) in out.iter_mut().enumerate() {
            let mut bytes = [0u8; 8];
            // SAFETY: Simd contract; eight quants take `BITS` bytes.
            unsafe { std::ptr::copy_nonoverlapping(p.add(i * BITS), bytes.as_mut_ptr(), BITS) };
            *out = spread_quants(u64::from_le_bytes(bytes), BITS);
        }
        cast(out)
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, x: u8x32) {
        // SAFETY: Simd contract.
        unsafe { p.cast::<u8x32>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn bytes_to_dwords(x: u8x32) -> [u16x16; MAX_UNPACKED] {
        [cast(x); MAX_UNPACKED]
    }
    #[inline(always)]
    unsafe fn extract_bits(x: u16x16, shift: usize, bits: usize) -> u16x16 {
        // The mask removes bits that the 16-bit shift carries across bytes.
        x >> shift as u32 & u16x16::splat(((1 << bits) - 1) * 0x0101)
    }
    #[inline(always)]
    unsafe fn look_up(table: &[u8; 16], x: u16x16) -> u16x16 {
        cast(cast::<u16x16, [u8; 32]>(x).map(|code| table[usize::from(code & 15)]))
    }
    #[inline(always)]
    unsafe fn decode_e2m1(x: u16x16) -> u16x16 {
        // Without a table: twice the magnitude of an element is 0, 1, 2, 3, 4, 6, 8 or 12.
        let x: i8x32 = cast(x);
        let code = x & i8x32::splat(7);
        let [above4, above5, above6] = [4, 5, 6].map(|n| code.simd_gt(i8x32::splat(n)));
        // Comparisons yield -1 for true.
        let size = code - above4 - above5 + (above6 & i8x32::splat(3));
        let negative = x.simd_gt(i8x32::splat(7));
        cast(((size ^ negative) - negative) + i8x32::splat(12))
    }
    #[inline(always)]
    unsafe fn zero_i32() -> i32x8 {
        i32x8::ZERO
    }
    #[inline(always)]
    unsafe fn dot<P: Packing, const N: usize>(
        mut sum: i32x8,
        w: [u16x16; MAX_UNPACKED],
        x: [u16x16; MAX_UNPACKED],
    ) -> i32x8 {
        for i in 0..N {
            let ([w_lower, w_upper], [x_lower, x_upper]) =
                (split_bytes(w[i]), split_signed_bytes(cast(x[i])));
            sum += w_lower.dot(x_lower) + w_upper.dot(x_upper);
        }
        sum
    }
    #[inline(always)]
    unsafe fn dot_broadcast<P: Packing>(
        sum: i32x8,
        w: [[i16x16; 2]; MAX_UNPACKED],
        x: *const i8,
    ) -> i32x8 {
        // SAFETY: Simd contract.
        let [products] = unsafe { Self::dot_broadcast_rows::<P, 1>(w, [x]) };
        sum + products
    }
    #[inline(always)]
    unsafe fn dot_broadcast_rows<P: Packing, const X: usize>(
        w: [[i16x16; 2]; MAX_UNPACKED],
        x: [*const i8; X],
    ) -> [i32x8; X] {
        // Rows of activations are the inner loop: the quants of all four vectors do not fit in
        // registers.
        let mut fours = [[[0i32; MAX_UNPACKED]; 2]; X];
        for c in 0..X {
            // SAFETY: Simd contract: 16 activations can be read.
            let x: i16x8 = unsafe { read(x[c].cast()) };
            fours[c] = [cast(x << 8u32 >> 8u32), cast(x >> 8u32)];
        }
        let mut sums = [i32x8::ZERO; X];
        for i in 0..MAX_UNPACKED {
            for c in 0..X {
                let [lower, upper] =
                    [cast(i32x8::splat(fours[c][0][i])), cast(i32x8::splat(fours[c][1][i]))];
                sums[c] += w[i][0].dot(lower) + w[i][1].dot(upper);
            }
        }
        sums
    }
    #[inline(always)]
    unsafe fn to_operand(x: u16x16) -> [i16x16; 2] {
        split_bytes(x)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::unpack_affine::Bits, *};

    #[test]
    fn the_largest_products_do_not_overflow() {
        let lanes = |x: i32x8| {
            let x = x.to_array();
            assert_eq!(x, [x[0]; LANES]);
            x[0]
        };
        for x in [-128i8, -127, 127] {
            let of_x: [u16x16; MAX_UNPACKED] = [cast([x; 4 * LANES]); MAX_UNPACKED];
            let w: [u16x16; MAX_UNPACKED] = [cast([255u8; 4 * LANES]); MAX_UNPACKED];
            // SAFETY: Generic needs no instruction set; `x` has 16 values.
            let sums = unsafe {
                [
                    Generic::dot::<Bits<8>, MAX_UNPACKED>(i32x8::ONE, w, of_x),
                    Generic::dot_broadcast::<Bits<8>>(
                        i32x8::ONE,
                        w.map(split_bytes),
                        [x; Q8_GROUP].as_ptr(),
                    ),
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
