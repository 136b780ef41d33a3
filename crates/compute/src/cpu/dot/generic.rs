//! Plain Rust: what a machine without a known instruction set runs.

use super::{
    algorithm::{GROUP, Simd},
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
    type B = [u8; GROUP];
    const LANES: usize = LANES;
    const UNIT: usize = GROUP;
    const SPLITS: bool = false;
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
        GROUP * bits / 8
    }
    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(p: *const u8) -> Self::B {
        let mut out = [0; GROUP];
        for (i, out) in out.as_chunks_mut::<8>().0.iter_mut().enumerate() {
            let mut bytes = [0u8; 8];
            // SAFETY: eight quants take BITS bytes, and GROUP quants can be read.
            unsafe { std::ptr::copy_nonoverlapping(p.add(i * BITS), bytes.as_mut_ptr(), BITS) };
            let bits = u64::from_le_bytes(bytes);
            for (j, out) in out.iter_mut().enumerate() {
                *out = (bits >> (j * BITS) & ((1 << BITS) - 1)) as u8;
            }
        }
        out
    }
    #[inline(always)]
    unsafe fn bits(x: Self::B, from: usize, bits: usize) -> Self::B {
        x.map(|x| x >> from & ((1 << bits) - 1))
    }
    #[inline(always)]
    unsafe fn lookup(x: Self::B, table: &[u8; 16]) -> Self::B {
        x.map(|x| table[usize::from(x & 15)])
    }
    #[inline(always)]
    unsafe fn load_bytes(p: *const u8) -> Self::B {
        // SAFETY: the caller's.
        unsafe { read(p) }
    }
    #[inline(always)]
    unsafe fn store_bytes(p: *mut u8, x: Self::B) {
        // SAFETY: the caller's; arrays of bytes need no alignment.
        unsafe { p.cast::<Self::B>().write(x) }
    }
    #[inline(always)]
    unsafe fn dot<P: Packing>([w, ..]: [Self::B; PARTS], [x, ..]: [Self::B; PARTS]) -> Self::I {
        std::array::from_fn(|i| (0..4).map(|j| i32::from(w[i * 4 + j]) * i32::from(x[i * 4 + j] as i8)).sum())
    }
    #[inline(always)]
    unsafe fn float(x: Self::I) -> Self::F {
        each(|i| x[i] as f32)
    }
    #[inline(always)]
    unsafe fn spread(p: *const f32, n: usize) -> Self::F {
        // SAFETY: the caller's: so many numbers can be read.
        each(|i| unsafe { *p.add(i * n / LANES) })
    }
}
