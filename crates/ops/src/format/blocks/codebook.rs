//! Codebook types: 4 or 8 weights at a time are an entry of a grid.

use super::{
    bytes::{f16, u16_at, u32_at},
    grids::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS},
};

/// Eight signs of seven bits and their parity.
fn with_parity(bits: u32) -> u8 {
    let bits = (bits & 127) as u8;
    bits | (bits.count_ones() as u8 & 1) << 7
}

/// Writes magnitudes times a scale; bit `i` of `signs` is set where weight `i` is negative.
fn signed(magnitudes: &[i8], signs: u8, scale: f32, out: &mut [f32]) {
    for (i, (out, magnitude)) in out.iter_mut().zip(magnitudes).enumerate() {
        let value = scale * f32::from(*magnitude);
        *out = if signs >> i & 1 == 1 { -value } else { value };
    }
}

/// Scale of a sub-block: `d (s + 1/2)` times a power of two.
fn half_scale(d: f32, s: u8, factor: f32) -> f32 {
    d * (0.5 + f32::from(s)) * factor
}

#[inline]
pub(super) fn iq2_xxs(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    for (group, out) in block[2..].chunks_exact(8).zip(out.chunks_exact_mut(32)) {
        let bits = u32_at(group, 4);
        let scale = half_scale(d, (bits >> 28) as u8, 0.25);
        for (i, out) in out.chunks_exact_mut(8).enumerate() {
            signed(&IQ2_XXS[usize::from(group[i])], with_parity(bits >> (7 * i)), scale, out);
        }
    }
}

#[inline]
pub(super) fn iq2_xs(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let code = u16_at(block, 2 + 2 * i);
        let scale = half_scale(d, block[66 + i / 4] >> (i / 2 % 2 * 4) & 15, 0.25);
        let signs = with_parity(u32::from(code >> 9));
        signed(&IQ2_XS[usize::from(code & 511)], signs, scale, out);
    }
}

#[inline]
pub(super) fn iq2_s(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let high = usize::from(block[66 + i / 4] >> (i % 4 * 2) & 3);
        let scale = half_scale(d, block[74 + i / 4] >> (i / 2 % 2 * 4) & 15, 0.25);
        signed(&IQ2_S[usize::from(block[2 + i]) | high << 8], block[34 + i], scale, out);
    }
}

#[inline]
pub(super) fn iq3_xxs(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let bits = u32_at(block, 66 + i / 4 * 4);
        let scale = half_scale(d, (bits >> 28) as u8, 0.5);
        let signs = with_parity(bits >> (i % 4 * 7));
        let (low, high) = out.split_at_mut(4);
        signed(&IQ3_XXS[usize::from(block[2 + 2 * i])], signs, scale, low);
        signed(&IQ3_XXS[usize::from(block[3 + 2 * i])], signs >> 4, scale, high);
    }
}

#[inline]
pub(super) fn iq3_s(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let s = block[106 + i / 8] >> (i / 4 % 2 * 4) & 15;
        let scale = d * (1.0 + 2.0 * f32::from(s));
        let signs = block[74 + i];
        let entry = |j: usize| {
            let ninth = usize::from(block[66 + j / 8] >> (j % 8) & 1);
            &IQ3_S[usize::from(block[2 + j]) | ninth << 8]
        };
        let (low, high) = out.split_at_mut(4);
        signed(entry(2 * i), signs, scale, low);
        signed(entry(2 * i + 1), signs >> 4, scale, high);
    }
}

/// Writes an entry shifted by an eighth, down if `down`, times a scale.
fn shifted(entry: &[i8], down: bool, scale: f32, out: &mut [f32]) {
    let shift = if down { -0.125 } else { 0.125 };
    out.iter_mut().zip(entry).for_each(|(out, g)| *out = scale * (f32::from(*g) + shift));
}

#[inline]
pub(super) fn iq1_s(block: &[u8], out: &mut [f32]) {
    let d = f16(block, 0);
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let bits = u16_at(block, 34 + i / 4 * 2);
        let scale = d * f32::from(2 * (bits >> 12 & 7) + 1);
        let high = usize::from(bits >> (3 * (i % 4)) & 7);
        shifted(&IQ1[usize::from(block[2 + i]) | high << 8], bits >> 15 == 1, scale, out);
    }
}

#[inline]
pub(super) fn iq1_m(block: &[u8], out: &mut [f32]) {
    let words = [0, 1, 2, 3].map(|i| u16_at(block, 48 + 2 * i));
    let d = words.iter().enumerate().fold(0, |d, (i, word)| d | word >> 12 << (4 * i));
    let d = half::f16::from_bits(d).to_f32();
    for (i, out) in out.chunks_exact_mut(8).enumerate() {
        let bits = block[32 + i / 2] >> (i % 2 * 4);
        let scale = d * f32::from(2 * (words[i / 8] >> (i / 2 % 4 * 3) & 7) + 1);
        let entry = &IQ1[usize::from(block[i]) | usize::from(bits & 7) << 8];
        shifted(entry, bits >> 3 & 1 == 1, scale, out);
    }
}
