//! Plain Rust: what a machine without a known instruction set runs.

use super::{
    algorithm::{GROUP, MOST_LANES, Pointers, Simd},
    quants::{PARTS, Packing},
};
use crate::{Element, Scalar};

#[derive(Clone, Copy)]
pub(super) struct Generic;

const LANES: usize = 8;

/// Reads `N` bytes.
#[inline(always)]
unsafe fn read<const N: usize>(p: *const u8) -> [u8; N] {
    // SAFETY: the caller's: N bytes can be read; arrays of bytes need no alignment.
    unsafe { p.cast::<[u8; N]>().read() }
}

#[inline(always)]
fn each(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(f)
}

impl Simd for Generic {
    type F = [f32; LANES];
    type I = [i32; LANES];
    type D = [u8; LANES * 4];
    type B = [u8; 2 * GROUP];
    const LANES: usize = LANES;
    const UNIT: usize = 2 * GROUP;
    const DWORDS: usize = 8;
    const FUSED: bool = false;
    const WIDTH: usize = 1;

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
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        // SAFETY: the caller's: LANES numbers can be read.
        let bytes = unsafe { read::<{ LANES * 2 }>(p) };
        each(|i| Scalar::BF16.get(&bytes, i))
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        // SAFETY: the caller's: LANES numbers can be read.
        let bytes = unsafe { read::<{ LANES * 2 }>(p) };
        each(|i| Scalar::F16.get(&bytes, i))
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
        [x; PARTS]
    }
    #[inline(always)]
    unsafe fn columns(rows: &Pointers, at: usize) -> [Self::D; MOST_LANES] {
        let mut all = [[0; LANES * 4]; MOST_LANES];
        for (r, row) in rows[..LANES].iter().enumerate() {
            // SAFETY: the caller's: so many bytes can be read.
            let bytes = unsafe { read::<{ 4 * LANES }>(row.add(at)) };
            for (column, four) in all.iter_mut().zip(bytes.as_chunks::<4>().0) {
                column[4 * r..4 * r + 4].copy_from_slice(four);
            }
        }
        all
    }
    #[inline(always)]
    unsafe fn load_dwords(p: *const u8) -> Self::D {
        // SAFETY: the caller's.
        unsafe { read(p) }
    }
    #[inline(always)]
    unsafe fn store_dwords(p: *mut u8, x: Self::D) {
        // SAFETY: the caller's; arrays of bytes need no alignment.
        unsafe { p.cast::<Self::D>().write(x) }
    }
    #[inline(always)]
    unsafe fn bits(x: Self::D, from: usize, bits: usize) -> Self::D {
        x.map(|x| x >> from & ((1 << bits) - 1))
    }
    #[inline(always)]
    unsafe fn lookup(x: Self::D, table: &[u8; 16]) -> Self::D {
        x.map(|x| table[usize::from(x & 15)])
    }
    #[inline(always)]
    unsafe fn f32_column(x: Self::D) -> Self::F {
        each(|i| Scalar::F32.get(&x, i))
    }
    #[inline(always)]
    unsafe fn bf16_columns(x: Self::D) -> [Self::F; 2] {
        [0, 1].map(|n| each(|i| Scalar::BF16.get(&x, 2 * i + n)))
    }
    #[inline(always)]
    unsafe fn f16_columns(x: Self::D) -> [Self::F; 2] {
        [0, 1].map(|n| each(|i| Scalar::F16.get(&x, 2 * i + n)))
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
        for (w, x) in w[..N].iter().zip(&x) {
            for (sum, (w, x)) in sum.iter_mut().zip(w.as_chunks::<4>().0.iter().zip(x.as_chunks::<4>().0)) {
                *sum += w.iter().zip(x).map(|(w, x)| i32::from(*w) * i32::from(*x as i8)).sum::<i32>();
            }
        }
        sum
    }
    #[inline(always)]
    unsafe fn dot_fours<P: Packing>(sum: Self::I, w: [Self::D; PARTS], x: *const i8) -> Self::I {
        // SAFETY: the caller's: sixteen numbers can be read.
        let fours = unsafe { read::<16>(x.cast()) };
        let four = |i: usize| std::array::from_fn(|j| fours[4 * i + j % 4]);
        // SAFETY: the caller's.
        unsafe { Self::dot::<P, PARTS>(sum, w, std::array::from_fn(four)) }
    }
    #[inline(always)]
    unsafe fn unzip(a: Self::D, b: Self::D) -> [Self::D; 2] {
        [0, 4].map(|odd| {
            std::array::from_fn(|i| {
                let at = i / 4 * 8 + odd + i % 4;
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
