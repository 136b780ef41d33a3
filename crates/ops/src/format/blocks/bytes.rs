//! Integers and floats of a block's bytes.

use super::super::plain::Scalar;

/// The f16 at byte `at`.
#[inline]
pub(super) fn f16(block: &[u8], at: usize) -> f32 {
    Scalar::F16.get(&block[at..], 0)
}

/// The little-endian 16-bit word at byte `at`.
#[inline]
pub(super) fn u16_at(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// The little-endian 32-bit word at byte `at`.
#[inline]
pub(super) fn u32_at(block: &[u8], at: usize) -> u32 {
    u32::from(u16_at(block, at)) | u32::from(u16_at(block, at + 2)) << 16
}
