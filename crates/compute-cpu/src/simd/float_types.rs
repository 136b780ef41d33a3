//! Plain float types (f32, f16, bf16) as type parameters, and their conversion to f32.

use moeflux_ops::Scalar;

use super::vector::Simd;

/// A float type in memory.
///
/// # Safety
/// Functions need the [Simd contract](Simd).
pub(super) trait FloatType: Copy {
    const SCALAR: Scalar;
    /// Reads `LANES` values.
    unsafe fn load<S: Simd>(p: *const u8) -> S::F32;
    /// Reads one value.
    unsafe fn get(p: *const u8) -> f32;
}

/// A float type that can be converted from vectors of dwords.
pub(super) trait TransposeFloat: FloatType {
    /// The values of a row's dword: first and second; f32 has one, which is returned twice.
    unsafe fn from_dwords<S: Simd>(x: S::Dwords) -> [S::F32; 2];
}

#[derive(Clone, Copy)]
pub(super) struct F32Type;
#[derive(Clone, Copy)]
pub(super) struct F16Type;
#[derive(Clone, Copy)]
pub(super) struct Bf16Type;

/// Converts bf16 bits to f32.
#[inline(always)]
pub(super) fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Converts f16 bits to f32 without branches, so that the compiler can vectorize it. Exponent and
/// mantissa are moved to their place in f32, where the value is 2^112 times too small.
#[inline(always)]
pub(super) fn f16_to_f32(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff);
    let value = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
    // The largest exponent is an infinity or NaN.
    let infinite = if magnitude >= 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(value.to_bits() | infinite | u32::from(bits & 0x8000) << 16)
}

impl FloatType for F32Type {
    const SCALAR: Scalar = Scalar::F32;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F32 {
        // SAFETY: Simd contract.
        unsafe { S::load(p.cast()) }
    }
    #[inline(always)]
    unsafe fn get(p: *const u8) -> f32 {
        // SAFETY: Simd contract: one value can be read.
        f32::from_bits(u32::from_le(unsafe { p.cast::<u32>().read_unaligned() }))
    }
}
impl FloatType for F16Type {
    const SCALAR: Scalar = Scalar::F16;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F32 {
        // SAFETY: Simd contract.
        unsafe { S::load_f16(p) }
    }
    #[inline(always)]
    unsafe fn get(p: *const u8) -> f32 {
        // SAFETY: Simd contract: one value can be read.
        f16_to_f32(u16::from_le(unsafe { p.cast::<u16>().read_unaligned() }))
    }
}
impl FloatType for Bf16Type {
    const SCALAR: Scalar = Scalar::BF16;
    #[inline(always)]
    unsafe fn load<S: Simd>(p: *const u8) -> S::F32 {
        // SAFETY: Simd contract.
        unsafe { S::load_bf16(p) }
    }
    #[inline(always)]
    unsafe fn get(p: *const u8) -> f32 {
        // SAFETY: Simd contract: one value can be read.
        bf16_to_f32(u16::from_le(unsafe { p.cast::<u16>().read_unaligned() }))
    }
}

impl TransposeFloat for F32Type {
    #[inline(always)]
    unsafe fn from_dwords<S: Simd>(x: S::Dwords) -> [S::F32; 2] {
        // SAFETY: Simd contract.
        unsafe { [S::dwords_to_f32(x); 2] }
    }
}
impl TransposeFloat for F16Type {
    #[inline(always)]
    unsafe fn from_dwords<S: Simd>(x: S::Dwords) -> [S::F32; 2] {
        // SAFETY: Simd contract.
        unsafe { S::dwords_to_f16(x) }
    }
}
impl TransposeFloat for Bf16Type {
    #[inline(always)]
    unsafe fn from_dwords<S: Simd>(x: S::Dwords) -> [S::F32; 2] {
        // SAFETY: Simd contract.
        unsafe { S::dwords_to_bf16(x) }
    }
}

/// Converts `out.len()` values to f32, exactly.
///
/// # Safety
/// The Simd contract; `bytes` has `out.len()` values.
#[inline(always)]
pub(super) unsafe fn widen<S: Simd, E: FloatType>(bytes: &[u8], out: &mut [f32]) {
    let whole = out.len() / S::LANES * S::LANES;
    // SAFETY: Simd contract; there are bytes for all of `out`.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            S::store(
                out.as_mut_ptr().add(i),
                E::load::<S>(bytes.as_ptr().add(i * E::SCALAR.bytes())),
            );
        }
    }
    // The few remaining values one by one: a padded copy would take two calls to memcpy.
    for (i, out) in out.iter_mut().enumerate().skip(whole) {
        // SAFETY: as above.
        *out = unsafe { E::get(bytes.as_ptr().add(i * E::SCALAR.bytes())) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn f16_is_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), half::f16::from_bits(bits).to_f32());
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{bits:#x}"
            );
        }
    }
}
