//! Block types without sub-blocks of several scales, and those of small floats and tables.

use super::bytes::{f16, u16_at, u32_at};

/// Values of 4-bit codes of IQ4_NL and IQ4_XS.
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

/// Twice the value of each E2M1 code.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Writes `value(code)` of nibbles: the low ones are the first half of the weights.
fn nibbles(bytes: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    let (low, high) = out.split_at_mut(bytes.len());
    for ((byte, low), high) in bytes.iter().zip(low).zip(high) {
        *low = value(byte & 15);
        *high = value(byte >> 4);
    }
}

/// Writes `value(code)` of 5-bit codes: nibbles, with the fifth bit of weight `j` in bit `j`.
fn five_bits(fifth: u32, bytes: &[u8], out: &mut [f32], value: impl Fn(u8) -> f32) {
    for (j, out) in out.iter_mut().enumerate() {
        let nibble = bytes[j % 16] >> (j / 16 * 4) & 15;
        *out = value(nibble | ((fifth >> j & 1) as u8) << 4);
    }
}

#[inline]
pub(super) fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    nibbles(&block[2..], out, |q| f32::from(q as i8 - 8) * d);
}

#[inline]
pub(super) fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (f16(block, 0), f16(block, 2));
    nibbles(&block[4..], out, |q| f32::from(q) * d + m);
}

#[inline]
pub(super) fn q5_0(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    five_bits(u32_at(block, 2), &block[6..], out, |q| f32::from(q as i8 - 16) * d);
}

#[inline]
pub(super) fn q5_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (f16(block, 0), f16(block, 2));
    five_bits(u32_at(block, 4), &block[8..], out, |q| f32::from(q) * d + m);
}

#[inline]
pub(super) fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    out.iter_mut().zip(&block[2..]).for_each(|(out, q)| *out = f32::from(*q as i8) * d);
}

#[inline]
pub(super) fn iq4_nl(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    nibbles(&block[2..], out, |q| d * f32::from(IQ4[usize::from(q)]));
}

#[inline]
pub(super) fn iq4_xs(block: &[u8], out: &mut [f32]) {
    let (d, high) = (f16(block, 0), u16_at(block, 2));
    let groups = block[8..].chunks_exact(16).zip(out.chunks_exact_mut(32));
    for (i, (bytes, out)) in groups.enumerate() {
        let low = block[4 + i / 2] >> (i % 2 * 4) & 15;
        let scale = i32::from(low) | i32::from(high >> (2 * i) & 3) << 4;
        let scale = d * (scale - 32) as f32;
        nibbles(bytes, out, |q| scale * f32::from(IQ4[usize::from(q)]));
    }
}

/// Half of the value of an E8M0 code; exact also where that is subnormal.
#[inline]
pub fn e8m0_half(code: u8) -> f32 {
    f32::from_bits(match code {
        0 | 1 => 0x0020_0000 << code,
        _ => u32::from(code - 1) << 23,
    })
}

#[inline]
pub(super) fn mxfp4(block: &[u8], out: &mut [f32]) {
    let d = e8m0_half(block[0]);
    nibbles(&block[1..], out, |q| f32::from(E2M1_DOUBLED[usize::from(q)]) * d);
}

/// Value of an unsigned E4M3 code, whose sign bit is ignored; the code of NaN is 0.
fn ue4m3(code: u8) -> f32 {
    if matches!(code, 0 | 0x7f) {
        return 0.0;
    }
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    match exponent {
        0 => mantissa * (-9f32).exp2(),
        _ => (1.0 + mantissa / 8.0) * ((exponent - 7) as f32).exp2(),
    }
}

#[inline]
pub(super) fn nvfp4(block: &[u8], out: &mut [f32]) {
    let (scales, codes) = block.split_at(4);
    let groups = codes.chunks_exact(8).zip(out.chunks_exact_mut(16));
    for ((bytes, out), scale) in groups.zip(scales) {
        let d = ue4m3(*scale) * 0.5;
        nibbles(bytes, out, |q| f32::from(E2M1_DOUBLED[usize::from(q)]) * d);
    }
}

#[inline]
pub(super) fn tq1_0(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 52);
    // Bytes of five, five and four ternary digits.
    let groups = [(&block[..32], 5), (&block[32..48], 5), (&block[48..52], 4)];
    let mut out = out.iter_mut();
    for (bytes, digits) in groups {
        for digit in 0..digits {
            for (byte, out) in bytes.iter().zip(&mut out) {
                let rest = byte.wrapping_mul(3u8.pow(digit));
                *out = f32::from(((u16::from(rest) * 3) >> 8) as i8 - 1) * d;
            }
        }
    }
}

#[inline]
pub(super) fn tq2_0(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 64);
    for (bytes, out) in block[..64].chunks_exact(32).zip(out.chunks_exact_mut(128)) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = f32::from((bytes[i % 32] >> (i / 32 * 2) & 3) as i8 - 1) * d;
        }
    }
}

#[inline]
pub(super) fn q1_0(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        *out = if block[2 + i / 8] >> (i % 8) & 1 == 1 { d } else { -d };
    }
}

#[inline]
pub(super) fn q2_0(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    for (i, out) in out.iter_mut().enumerate() {
        *out = f32::from((block[2 + i / 4] >> (i % 4 * 2) & 3) as i8 - 1) * d;
    }
}
