//! Blocks of 16 to 128 weights that share one scale each, and NVFP4.

use moeflux_ops::seam::e8m0_half;

use super::{
    super::unpack_affine::{E2M1_BIAS, E2M1_QUANTS},
    block::{IQ4_QUANTS, IQ4_ZERO, MASKS, block, entry, fields, or, splat, words},
};

/// The quant of 0 among those of E2M1 elements.
const E2M1_ZERO: u8 = -E2M1_BIAS as u8;

/// 4-bit codes: low halves of the bytes first, then high halves.
#[inline(always)]
fn nibbles(bytes: [[u8; 8]; 2]) -> [u64; 4] {
    let [[a, b], [c, d]] = [0, 4].map(|shift| fields(words(bytes), shift, 15));
    [a, b, c, d]
}

block! {
    /// `d (q - 8)`
    Q4_0 { d: [u8; 2], nibbles: [[u8; 8]; 2] }
    (self, out; d = self.d) {
        out.set(0, nibbles(self.nibbles));
        out.scale_around(8, [d]);
    }
}

block! {
    /// `d q + m`
    Q4_1 { d: [u8; 2], m: [u8; 2], nibbles: [[u8; 8]; 2] }
    (self, out; d = self.d, m = self.m) {
        out.set(0, nibbles(self.nibbles));
        out.scale([d], [m]);
    }
}

/// 5-bit quants: nibbles, with the fifth bit of weight `i` in bit `i`.
#[inline(always)]
fn five_bits(fifth: [u8; 4], bytes: [[u8; 8]; 2]) -> [u64; 4] {
    or(nibbles(bytes), fifth.map(|bits| entry(&MASKS, bits.into()) & splat(16)))
}

block! {
    /// `d (q - 16)`
    Q5_0 { d: [u8; 2], fifth: [u8; 4], nibbles: [[u8; 8]; 2] }
    (self, out; d = self.d) {
        out.set(0, five_bits(self.fifth, self.nibbles));
        out.scale_around(16, [d]);
    }
}

block! {
    /// `d q + m`
    Q5_1 { d: [u8; 2], m: [u8; 2], fifth: [u8; 4], nibbles: [[u8; 8]; 2] }
    (self, out; d = self.d, m = self.m) {
        out.set(0, five_bits(self.fifth, self.nibbles));
        out.scale([d], [m]);
    }
}

block! {
    /// `d q` with signed `q`, which becomes `q + 128`.
    Q8_0 { d: [u8; 2], bytes: [[u8; 8]; 4] }
    (self, out; d = self.d) {
        out.set(0, words(self.bytes).map(|word| word ^ splat(0x80)));
        out.scale_around(128, [d]);
    }
}

block! {
    /// `d k[q]`
    IQ4NL, codes IQ4_QUANTS { d: [u8; 2], nibbles: [[u8; 8]; 2] }
    (self, out; d = self.d) {
        out.set(0, nibbles(self.nibbles));
        out.scale_around(IQ4_ZERO, [d]);
    }
}

block! {
    /// E2M1 with an E8M0 scale.
    MXFP4, codes E2M1_QUANTS { exponent: u8, nibbles: [[u8; 8]; 2] }
    (self, out) {
        out.set(0, nibbles(self.nibbles));
        out.scale_around(E2M1_ZERO, [e8m0_half(self.exponent)]);
    }
}

/// Half of the value of an unsigned E4M3 code, whose sign bit is ignored; the code of NaN is 0.
/// Exponent and mantissa are moved to their place in f32, where the value is 2^120 times too small.
#[inline(always)]
fn ue4m3_half(code: u8) -> f32 {
    let code = if code == 0x7f { 0 } else { code & 0x7f };
    f32::from_bits(u32::from(code) << 20) * f32::from_bits((127 + 119) << 23)
}

block! {
    /// E2M1 with an unsigned E4M3 scale per 16 weights.
    NVFP4, codes E2M1_QUANTS { scales: [u8; 4], nibbles: [[u8; 8]; 4] }
    (self, out) {
        for (i, word) in words(self.nibbles).into_iter().enumerate() {
            out.set(2 * i, [word & splat(15), word >> 4 & splat(15)]);
        }
        out.scale_around(E2M1_ZERO, self.scales.map(ue4m3_half));
    }
}

block! {
    /// `d` or `-d`: `d (2 q - 1)`
    Q1_0 { d: [u8; 2], bits: [u8; 16] }
    (self, out; d = self.d) {
        out.set(0, self.bits.map(|bits| entry(&MASKS, bits.into()) & splat(1)));
        out.scale([2.0 * d; 4], [-d; 4]);
    }
}

block! {
    /// `d (q - 1)`
    Q2_0 { d: [u8; 2], quants: [[u8; 2]; 8] }
    (self, out; d = self.d) {
        // The four quants of a byte are moved to bytes.
        let four = |byte: u8| {
            let byte = u32::from(byte);
            u64::from((byte | byte << 6 | byte << 12 | byte << 18) & 0x0303_0303)
        };
        out.set(0, self.quants.map(|[low, high]| four(low) | four(high) << 32));
        out.scale_around(1, [d; 2]);
    }
}
