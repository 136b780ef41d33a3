//! Blocks of 256 weights whose codes are entries of codebooks.

use moeflux_ops::seam::{IQ1, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS};

use super::block::{MASKS, block, entry, splat};

/// [`MASKS`] of seven bits and their parity.
static SEVEN: [u64; 128] = {
    let (mut masks, mut bits) = ([0; 128], 0);
    while bits < 128 {
        masks[bits] = MASKS[bits | (bits.count_ones() as usize & 1) << 7];
        bits += 1;
    }
    masks
};

/// `zero` plus or minus the magnitudes, none of which is larger than `zero`.
#[inline(always)]
const fn signed(zero: u8, magnitudes: u64, negative: u64) -> u64 {
    splat(zero) + (magnitudes & !negative) - (magnitudes & negative)
}

/// Entries as words.
const fn grid<const WIDTH: usize, const ENTRIES: usize>(
    entries: &[[i8; WIDTH]; ENTRIES],
) -> [u64; ENTRIES] {
    let (mut words, mut i) = ([0; ENTRIES], 0);
    while i < WIDTH * ENTRIES {
        words[i / WIDTH] |= (entries[i / WIDTH][i % WIDTH] as u8 as u64) << (8 * (i % WIDTH));
        i += 1;
    }
    words
}

static EIGHTS_XXS: [u64; 256] = grid(&IQ2_XXS);
static EIGHTS_XS: [u64; 512] = grid(&IQ2_XS);
static EIGHTS_S: [u64; 1024] = grid(&IQ2_S);
static EIGHTS_1: [u64; 2048] = grid(&IQ1);
static FOURS_XXS: [u64; 256] = grid(&IQ3_XXS);
static FOURS_S: [u64; 512] = grid(&IQ3_S);

/// Quant of 0 of the types with entries of 8 weights.
const IQ2_ZERO: u8 = 43;
/// Quant of 0 of IQ3_XXS.
const IQ3_XXS_ZERO: u8 = 62;
/// Quant of 0 of IQ3_S.
const IQ3_S_ZERO: u8 = 15;
/// Quant of 0 of the types with shifted entries, whose quants count eighths.
const IQ1_ZERO: u8 = 9;

block! {
    /// `d (2 s + 1) / 8` times signed entries; four indexes, four times seven signs, `s` per 32.
    IQ2XXS { d: [u8; 2], groups: [[u8; 8]; 8] }
    (self, out; d = self.d) {
        let bits = |[.., a, b, c, d]: [u8; 8]| u32::from_le_bytes([a, b, c, d]);
        out.set_eights(|i| {
            let (group, j) = (&self.groups[i / 4], i % 4);
            let negative = entry(&SEVEN, (bits(*group) >> (7 * j) & 127) as usize);
            signed(IQ2_ZERO, entry(&EIGHTS_XXS, usize::from(group[j])), negative)
        });
        let d = 0.125 * d;
        out.scale_around(IQ2_ZERO, self.groups.map(|g| d * (2 * (bits(g) >> 28) + 1) as f32));
    }
}

/// Scale `2 s + 1` of 4 bits of sub-block `i`.
#[inline(always)]
fn odd(scales: &[u8], i: usize) -> f32 {
    f32::from(2 * (scales[i / 2] >> (i % 2 * 4) & 15) + 1)
}

block! {
    /// `d (2 s + 1) / 8` times signed entries; words of an index and seven signs.
    IQ2XS { d: [u8; 2], words: [[u8; 2]; 32], scales: [u8; 8] }
    (self, out; d = self.d) {
        out.set_eights(|i| {
            let word = u16::from_le_bytes(self.words[i]);
            let negative = entry(&SEVEN, usize::from(word >> 9));
            signed(IQ2_ZERO, entry(&EIGHTS_XS, usize::from(word & 511)), negative)
        });
        let d = 0.125 * d;
        out.scale_around(IQ2_ZERO, std::array::from_fn::<_, 16, _>(|i| d * odd(&self.scales, i)));
    }
}

block! {
    /// `d (2 s + 1) / 8` times signed entries; the index has two high bits apart.
    IQ2S { d: [u8; 2], indexes: [u8; 32], signs: [u8; 32], high: [u8; 8], scales: [u8; 8] }
    (self, out; d = self.d) {
        out.set_eights(|i| {
            let high = usize::from(self.high[i / 4] >> (i % 4 * 2) & 3);
            let eight = entry(&EIGHTS_S, usize::from(self.indexes[i]) | high << 8);
            signed(IQ2_ZERO, eight, entry(&MASKS, usize::from(self.signs[i])))
        });
        let d = 0.125 * d;
        out.scale_around(IQ2_ZERO, std::array::from_fn::<_, 16, _>(|i| d * odd(&self.scales, i)));
    }
}

block! {
    /// `d (2 s + 1) / 4` times signed entries; four times seven signs and `s` per 32.
    IQ3XXS { d: [u8; 2], indexes: [[u8; 2]; 32], signs: [[u8; 4]; 8] }
    (self, out; d = self.d) {
        out.set_eights(|i| {
            let signs = u32::from_le_bytes(self.signs[i / 4]) >> (i % 4 * 7);
            let [low, high] = self.indexes[i].map(usize::from);
            let entries = entry(&FOURS_XXS, low) | entry(&FOURS_XXS, high) << 32;
            let negative = entry(&SEVEN, (signs & 127) as usize);
            signed(IQ3_XXS_ZERO, entries, negative)
        });
        let d = 0.25 * d;
        let scales = self.signs.map(|bits| d * (2 * (u32::from_le_bytes(bits) >> 28) + 1) as f32);
        out.scale_around(IQ3_XXS_ZERO, scales);
    }
}

block! {
    /// `d (2 s + 1)` times signed entries; the index has a high bit apart.
    IQ3S {
        d: [u8; 2],
        indexes: [[u8; 2]; 32],
        ninth: [u8; 8],
        signs: [u8; 32],
        scales: [u8; 4],
    }
    (self, out; d = self.d) {
        out.set_eights(|i| {
            let ninth = usize::from(self.ninth[i / 4] >> (i % 4 * 2));
            let [low, high] = self.indexes[i].map(usize::from);
            let (low, high) = (low | (ninth & 1) << 8, high | (ninth >> 1 & 1) << 8);
            let entries = entry(&FOURS_S, low) | entry(&FOURS_S, high) << 32;
            signed(IQ3_S_ZERO, entries, entry(&MASKS, usize::from(self.signs[i])))
        });
        out.scale_around(IQ3_S_ZERO, std::array::from_fn::<_, 8, _>(|i| d * odd(&self.scales, i)));
    }
}

/// Eight times an entry, plus or minus 1.
#[inline(always)]
fn shifted(eight: u64, down: bool) -> u64 {
    // 0, 1 or 2.
    let entry = (eight ^ splat(0x80)) - splat(0x7f);
    (entry << 3) + splat(if down { IQ1_ZERO - 9 } else { IQ1_ZERO - 7 })
}

block! {
    /// `d (2 s + 1)` times shifted entries; high bits of four indexes, `s` and the shift per 32.
    IQ1S { d: [u8; 2], indexes: [[u8; 4]; 8], high: [[u8; 2]; 8] }
    (self, out; d = self.d) {
        out.set_eights(|i| {
            let bits = u16::from_le_bytes(self.high[i / 4]);
            let high = usize::from(bits >> (3 * (i % 4)) & 7);
            let eight = entry(&EIGHTS_1, usize::from(self.indexes[i / 4][i % 4]) | high << 8);
            shifted(eight, bits >> 15 == 1)
        });
        let d = 0.125 * d;
        let scale = |bits| d * f32::from(2 * (u16::from_le_bytes(bits) >> 12 & 7) + 1);
        out.scale_around(IQ1_ZERO, self.high.map(scale));
    }
}

/// `d` in the high four bits of the four words of scales.
#[inline(always)]
fn scattered(words: [[u8; 2]; 4]) -> [u8; 2] {
    let [a, b, c, d] = words.map(|word| u16::from_le_bytes(word) >> 12);
    (a | b << 4 | c << 8 | d << 12).to_le_bytes()
}

block! {
    /// `d (2 s + 1)` times shifted entries; a nibble per index has its high bits and the shift.
    IQ1M {
        indexes: [u8; 32],
        high: [u8; 16],
        /// Four scales of 3 bits each, and a part of `d`.
        scales: [[u8; 2]; 4],
    }
    (self, out; d = scattered(self.scales)) {
        out.set_eights(|i| {
            let bits = self.high[i / 2] >> (i % 2 * 4);
            let eight = entry(&EIGHTS_1, usize::from(self.indexes[i]) | usize::from(bits & 7) << 8);
            shifted(eight, bits >> 3 & 1 == 1)
        });
        let (d, words) = (0.125 * d, self.scales.map(u16::from_le_bytes));
        let scale = |i: usize| d * f32::from(2 * (words[i / 4] >> (i % 4 * 3) & 7) + 1);
        out.scale_around(IQ1_ZERO, std::array::from_fn::<_, 16, _>(scale));
    }
}
