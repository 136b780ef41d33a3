//! Plain Rust: what a machine without a known instruction set runs.
//!
//! The compiler makes vectors of its arrays where each is as long as a vector of x86-64's first set, which also are those of
//! most others, and where products have 16 bits, as there those of 32 are not.

use std::hint::black_box;

use super::{
    algorithm::{GROUP, MOST_LANES, Pointers, Simd, widen_bf16, widen_f16},
    quants::{PARTS, Packing},
};
use crate::Element;

#[derive(Clone, Copy)]
pub(super) struct Generic;

const LANES: usize = 4;

/// Four bytes of each of as many rows, by twos.
type Words = [u16; 2 * LANES];

/// Reads `N` bytes.
#[inline(always)]
unsafe fn read<const N: usize>(p: *const u8) -> [u8; N] {
    // SAFETY: the caller's: N bytes can be read; arrays of bytes need no alignment.
    unsafe { p.cast::<[u8; N]>().read() }
}

#[inline(always)]
fn words(bytes: [u8; 4 * LANES]) -> Words {
    let twos = bytes.as_chunks::<2>().0;
    std::array::from_fn(|i| u16::from_le_bytes(twos[i]))
}

/// Makes the compiler keep an array in one piece. It looks for vectors a dozen steps back from where they are stored, and
/// takes longer expressions apart, which are six times slower then.
#[inline(always)]
fn vector(x: [i16; 2 * LANES]) -> [i16; 2 * LANES] {
    black_box(x)
}

/// Adds the two words of each lane to it.
#[inline(always)]
fn add_pairs(sum: [i32; LANES], words: [i16; 2 * LANES]) -> [i32; LANES] {
    std::array::from_fn(|i| sum[i] + i32::from(words[2 * i]) + i32::from(words[2 * i + 1]))
}

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(f)
}

impl Simd for Generic {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type D = Words;
    type B = [u8; 2 * GROUP];
    const LANES: usize = LANES;
    const UNIT: usize = 2 * GROUP;
    const DWORDS: usize = 8;
    const FUSED: bool = false;
    const WIDTH: usize = 2;
    const PACKED: [usize; 2] = [4, 2];

    #[inline(always)]
    unsafe fn zero() -> Self::F {
        [0.0; LANES]
    }
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: the caller's.
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: the caller's.
        unsafe { p.cast::<Self::F>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        each(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn sum(x: Self::F) -> f32 {
        (x[0] + x[2]) + (x[1] + x[3])
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::F {
        // SAFETY: the caller's: LANES bytes can be read.
        let bytes = unsafe { read::<LANES>(p) };
        each(|i| f32::from(bytes[i]))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        // SAFETY: the caller's: LANES numbers can be read.
        let bytes = unsafe { read::<{ LANES * 2 }>(p) };
        each(|i| widen_bf16(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        // SAFETY: the caller's: LANES numbers can be read.
        let bytes = unsafe { read::<{ LANES * 2 }>(p) };
        each(|i| widen_f16(u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]])))
    }
    #[inline(always)]
    unsafe fn load_e4m3(p: *const u8) -> Self::F {
        // SAFETY: the caller's: LANES elements can be read.
        let bytes = unsafe { read::<LANES>(p) };
        each(|i| Element::E4M3.get(&bytes, i))
    }
    #[inline(always)]
    unsafe fn load_e2m1(p: *const u8) -> Self::F {
        // SAFETY: the caller's: LANES elements can be read.
        let bytes = unsafe { read::<{ LANES / 2 }>(p) };
        each(|i| Element::E2M1.get(&bytes, i))
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_near(_: *const u8) {}

    fn reach(bits: usize) -> usize {
        2 * GROUP * bits / 8
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> Self::B {
        let mut out = [0; 2 * GROUP];
        for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let mut bytes = [0u8; 8];
            // SAFETY: eight quants take BITS bytes, and a unit can be read.
            unsafe { std::ptr::copy_nonoverlapping(p.add(i * BITS), bytes.as_mut_ptr(), BITS) };
            let bits = u64::from_le_bytes(bytes);
            for (j, out) in out.iter_mut().enumerate() {
                *out = (bits >> (j * BITS) & ((1 << BITS) - 1)) as u8;
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, x: Self::B) {
        // SAFETY: the caller's; arrays of bytes need no alignment.
        unsafe { p.cast::<Self::B>().write(x) }
    }
    #[inline(always)]
    unsafe fn in_order(x: Self::B) -> [Self::D; PARTS] {
        let halves = x.as_chunks::<{ 4 * LANES }>().0;
        std::array::from_fn(|i| words(halves[i % 2]))
    }
    #[inline(always)]
    unsafe fn columns(rows: &Pointers, at: usize) -> [Self::D; MOST_LANES] {
        let mut all = [[0; 2 * LANES]; MOST_LANES];
        for (r, row) in rows[..LANES].iter().enumerate() {
            for (c, column) in all[..Self::DWORDS].iter_mut().enumerate() {
                // SAFETY: the caller's: so many bytes can be read.
                let [a, b, c, d] = unsafe { read(row.add(at + 4 * c)) };
                column[2 * r] = u16::from_le_bytes([a, b]);
                column[2 * r + 1] = u16::from_le_bytes([c, d]);
            }
        }
        all
    }
    #[inline(always)]
    unsafe fn load_dwords(p: *const u8) -> Self::D {
        // SAFETY: the caller's.
        unsafe { p.cast::<Self::D>().read_unaligned() }.map(u16::from_le)
    }
    #[inline(always)]
    unsafe fn store_dwords(p: *mut u8, x: Self::D) {
        // SAFETY: the caller's.
        unsafe { p.cast::<Self::D>().write_unaligned(x.map(u16::to_le)) }
    }
    #[inline(always)]
    unsafe fn bits(x: Self::D, from: usize, bits: usize) -> Self::D {
        // What a shift of words brings from the other byte is masked.
        x.map(|x| x >> from & (((1 << bits) - 1) * 0x0101))
    }
    #[inline(always)]
    unsafe fn lookup(x: Self::D, table: &[u8; 16]) -> Self::D {
        x.map(|x| u16::from_le_bytes(x.to_le_bytes().map(|x| table[usize::from(x & 15)])))
    }
    #[inline(always)]
    unsafe fn f32_column(x: Self::D) -> Self::F {
        each(|i| f32::from_bits(u32::from(x[2 * i]) | u32::from(x[2 * i + 1]) << 16))
    }
    #[inline(always)]
    unsafe fn bf16_columns(x: Self::D) -> [Self::F; 2] {
        [0, 1].map(|n| each(|i| widen_bf16(x[2 * i + n])))
    }
    #[inline(always)]
    unsafe fn f16_columns(x: Self::D) -> [Self::F; 2] {
        [0, 1].map(|n| each(|i| widen_f16(x[2 * i + n])))
    }
    #[inline(always)]
    unsafe fn none() -> Self::I {
        [0; LANES]
    }
    #[inline(always)]
    unsafe fn dot<P: Packing, const N: usize>(
        mut sum: Self::I,
        w: [Self::D; PARTS],
        x: [Self::D; PARTS],
    ) -> Self::I {
        // One product of 255 * 127 fits into 16 bits, four of 63 * 127, and eight of 31 * 127; a word has two.
        let at_once = match P::BITS {
            0..5 => 4,
            5..8 => 2,
            _ => 1,
        };
        for first in (0..N).step_by(at_once) {
            let mut products = [0i16; 2 * LANES];
            for i in first..(first + at_once).min(N) {
                let (w, x) = (w[i], x[i]);
                let low = std::array::from_fn(|j| (w[j] & 255) as i16 * ((x[j] << 8) as i16 >> 8));
                let high = std::array::from_fn(|j| (w[j] >> 8) as i16 * (x[j] as i16 >> 8));
                if P::BITS < 8 {
                    let both = vector(std::array::from_fn(|j| low[j] + high[j]));
                    products = std::array::from_fn(|j| products[j] + both[j]);
                } else {
                    sum = add_pairs(add_pairs(sum, vector(low)), vector(high));
                }
            }
            if P::BITS < 8 {
                sum = add_pairs(sum, vector(products));
            }
        }
        sum
    }
    #[inline(always)]
    unsafe fn dot_fours<P: Packing>(sum: Self::I, w: [Self::D; PARTS], x: *const i8) -> Self::I {
        // SAFETY: the caller's: sixteen numbers can be read.
        let x = unsafe { x.cast::<Self::D>().read_unaligned() }.map(u16::from_le);
        let four = |i: usize| std::array::from_fn(|j| x[2 * i + j % 2]);
        // SAFETY: the caller's.
        unsafe { Self::dot::<P, PARTS>(sum, w, std::array::from_fn(four)) }
    }
    #[inline(always)]
    unsafe fn unzip(a: Self::D, b: Self::D) -> [Self::D; 2] {
        [0, 2].map(|odd| {
            std::array::from_fn(|i| {
                let at = i / 2 * 4 + odd + i % 2;
                if at < a.len() { a[at] } else { b[at - a.len()] }
            })
        })
    }
    #[inline(always)]
    unsafe fn spread(p: *const f32, n: usize) -> Self::F {
        // SAFETY: the caller's: so many numbers can be read.
        each(|i| unsafe { *p.add(i * n / LANES) })
    }
    #[inline(always)]
    unsafe fn float(x: Self::I) -> Self::F {
        each(|i| x[i] as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::quants::Bits, *};

    /// The sum of a lane of four vectors of the largest quants, and what it has to be.
    fn largest<P: Packing>(largest: u8, x: i8) -> (i32, i32) {
        let (w, of_x) = (words([largest; 4 * LANES]), words([x as u8; 4 * LANES]));
        // SAFETY: plain Rust needs no instruction set.
        let sum = unsafe { Generic::dot::<P, PARTS>([1; LANES], [w; PARTS], [of_x; PARTS]) };
        assert_eq!(sum, [sum[0]; LANES]);
        (sum[0], 1 + 4 * PARTS as i32 * i32::from(largest) * i32::from(x))
    }

    #[test]
    fn the_largest_products_do_not_overflow() {
        for x in [-128, -127, 127] {
            for (ours, exact) in
                [largest::<Bits<4>>(31, x), largest::<Bits<6>>(63, x), largest::<Bits<8>>(255, x)]
            {
                assert_eq!(ours, exact, "{x}");
            }
        }
    }
}
