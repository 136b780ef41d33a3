//! K-quants: blocks of 256 weights in sub-blocks of 16 or 32 with integer scales.

use super::bytes::f16;

#[inline]
pub(super) fn q2_k(block: &[u8], out: &mut [f32]) {
    let (d, dmin) = (f16(block, 80), f16(block, 82));
    for (i, out) in out.iter_mut().enumerate() {
        let (half, shift) = (i / 128, i / 32 % 4 * 2);
        let scale = block[i / 16];
        let q = block[16 + half * 32 + i % 32] >> shift & 3;
        let (scale, min) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
        *out = scale * f32::from(q) - min;
    }
}

#[inline]
pub(super) fn q3_k(block: &[u8], out: &mut [f32]) {
    let (high, rest) = block.split_at(32);
    let (quants, scales) = rest.split_at(64);
    let d = f16(block, 108);
    let scale = |j: usize| {
        let low = if j < 8 { scales[j] & 15 } else { scales[j - 8] >> 4 };
        low | (scales[8 + j % 4] >> (2 * (j / 4)) & 3) << 4
    };
    for (i, out) in out.iter_mut().enumerate() {
        let (half, pair) = (i / 128, i / 32 % 4);
        let low = quants[half * 32 + i % 32] >> (2 * pair) & 3;
        let third = high[i % 32] >> (half * 4 + pair) & 1;
        let q = (low | third << 2) as i8 - 4;
        *out = d * f32::from(scale(i / 16) as i8 - 32) * f32::from(q);
    }
}

/// Scale and minimum of sub-block `j` of the 8 in 12 bytes of 6-bit integers.
fn scale_and_min(bytes: &[u8], j: usize) -> [u8; 2] {
    match j {
        0..4 => [bytes[j] & 63, bytes[j + 4] & 63],
        _ => [bytes[j + 4] & 15 | bytes[j - 4] >> 6 << 4, bytes[j + 4] >> 4 | bytes[j] >> 6 << 4],
    }
}

/// Blocks of nibbles with scales and minima; `fifth` has the fifth bit of weight `i`.
fn four_bits(block: &[u8], nibbles: &[u8], out: &mut [f32], fifth: impl Fn(usize) -> u8) {
    let (d, dmin) = (f16(block, 0), f16(block, 2));
    for (j, out) in out.chunks_exact_mut(32).enumerate() {
        let [scale, min] = scale_and_min(&block[4..16], j);
        let (scale, min) = (d * f32::from(scale), dmin * f32::from(min));
        for (i, out) in out.iter_mut().enumerate() {
            let q = nibbles[j / 2 * 32 + i] >> (j % 2 * 4) & 15;
            *out = scale * f32::from(q | fifth(j * 32 + i) << 4) - min;
        }
    }
}

#[inline]
pub(super) fn q4_k(block: &[u8], out: &mut [f32]) {
    four_bits(block, &block[16..], out, |_| 0);
}

#[inline]
pub(super) fn q5_k(block: &[u8], out: &mut [f32]) {
    four_bits(block, &block[48..], out, |i| block[16 + i % 32] >> (i / 32) & 1);
}

#[inline]
pub(super) fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, rest) = block.split_at(128);
    let (high, scales) = rest.split_at(64);
    let d = f16(block, 208);
    for (i, out) in out.iter_mut().enumerate() {
        let (half, quarter, l) = (i / 128, i / 32 % 4, i % 32);
        let nibble = low[half * 64 + quarter % 2 * 32 + l] >> (quarter / 2 * 4) & 15;
        let upper = high[half * 32 + l] >> (quarter * 2) & 3;
        let q = (nibble | upper << 4) as i8 - 32;
        *out = d * f32::from(scales[i / 16] as i8) * f32::from(q);
    }
}
