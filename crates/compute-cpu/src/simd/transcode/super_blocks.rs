//! Blocks of 256 weights in groups with integer scales, and ternary blocks.

use super::block::{BlockQuants, IQ4_QUANTS, IQ4_ZERO, block, fields, or, words};

/// 32 bytes.
type Bytes32 = [[u8; 8]; 4];

/// The low `bits` bits of each byte of a word, moved up by `shift`.
#[inline(always)]
const fn low(word: u32, bits: u32, shift: u32) -> u32 {
    (word & (0x0101_0101 * ((1 << bits) - 1))) << shift
}

/// The three words of 12 bytes.
#[inline(always)]
fn three(packed: [[u8; 4]; 3]) -> [u32; 3] {
    packed.map(u32::from_le_bytes)
}

/// The bytes of two words.
#[inline(always)]
const fn bytes(low: u32, high: u32) -> [u8; 8] {
    (low as u64 | (high as u64) << 32).to_le_bytes()
}

/// Scales and minima of the eight groups in 12 bytes of 6-bit integers.
#[inline(always)]
fn scales_and_minima(packed: [[u8; 4]; 3]) -> [[u8; 8]; 2] {
    let [a, b, c] = three(packed);
    [
        bytes(low(a, 6, 0), low(c, 4, 0) | low(a >> 6, 2, 4)),
        bytes(low(b, 6, 0), low(c >> 4, 4, 0) | low(b >> 6, 2, 4)),
    ]
}

/// `factor` times integers.
#[inline(always)]
fn scaled<const N: usize>(factor: f32, integers: [u8; N]) -> [f32; N] {
    integers.map(|x| factor * f32::from(x))
}

impl BlockQuants<'_> {
    /// Sets 2-bit quants: 128 weights are the four pairs of bits of 32 bytes. `third(i)` has the
    /// higher bits of group `i` of 32.
    #[inline(always)]
    fn two_bits(&mut self, halves: [Bytes32; 2], third: impl Fn(usize) -> [u64; 4]) {
        for (half, bytes) in halves.into_iter().enumerate() {
            for pair in 0..4 {
                let i = 4 * half + pair;
                self.set(4 * i, or(fields(words(bytes), 2 * pair, 3), third(i)));
            }
        }
    }

    /// Sets quants of nibbles, which alternate between the groups of a pair. `fifth(i)` has the
    /// higher bits of group `i`.
    #[inline(always)]
    fn four_bits(&mut self, pairs: [Bytes32; 4], fifth: impl Fn(usize) -> [u64; 4]) {
        for (i, bytes) in pairs.into_iter().enumerate() {
            self.set(8 * i, or(fields(words(bytes), 0, 15), fifth(2 * i)));
            self.set(8 * i + 4, or(fields(words(bytes), 4, 15), fifth(2 * i + 1)));
        }
    }
}

/// Bit `i` of each byte, moved to the bit of value `to`.
#[inline(always)]
fn bit(bytes: Bytes32, i: usize, to: u64) -> [u64; 4] {
    fields(words(bytes), i, 1).map(|bits| bits * to)
}

block! {
    /// `d s q - m t`, 4 bits.
    Q4K { d: [u8; 2], m: [u8; 2], scales: [[u8; 4]; 3], nibbles: [Bytes32; 4] }
    (self, out; d = self.d, m = self.m) {
        out.four_bits(self.nibbles, |_| [0; 4]);
        let [s, t] = scales_and_minima(self.scales);
        out.scale(scaled(d, s), scaled(-m, t));
    }
}

block! {
    /// `d s q - m t`, 5 bits.
    Q5K {
        d: [u8; 2],
        m: [u8; 2],
        scales: [[u8; 4]; 3],
        /// Bit `g` of byte `i`: the fifth bit of weight `i` of group `g`.
        fifth: Bytes32,
        nibbles: [Bytes32; 4],
    }
    (self, out; d = self.d, m = self.m) {
        out.four_bits(self.nibbles, |i| bit(self.fifth, i, 16));
        let [s, t] = scales_and_minima(self.scales);
        out.scale(scaled(d, s), scaled(-m, t));
    }
}

block! {
    /// `d s q - m t`, 2 bits.
    Q2K {
        /// Scale in the low half, minimum in the high half.
        scales: [u8; 16],
        quants: [Bytes32; 2],
        d: [u8; 2],
        m: [u8; 2],
    }
    (self, out; d = self.d, m = self.m) {
        out.two_bits(self.quants, |_| [0; 4]);
        let (s, t) = (self.scales.map(|s| s & 15), self.scales.map(|s| s >> 4));
        out.scale(scaled(d, s), scaled(-m, t));
    }
}

block! {
    /// `d (s - 32) (q - 4)`
    Q3K {
        /// Bit `4 h + p` of byte `i`: the third bit of weight `i` of pair `p` of half `h`.
        third: Bytes32,
        quants: [Bytes32; 2],
        scales: [[u8; 4]; 3],
        d: [u8; 2],
    }
    (self, out; d = self.d) {
        out.two_bits(self.quants, |i| bit(self.third, i, 4));
        let [a, b, c] = three(self.scales);
        let scales = [
            bytes(low(a, 4, 0) | low(c, 2, 4), low(b, 4, 0) | low(c >> 2, 2, 4)),
            bytes(low(a >> 4, 4, 0) | low(c >> 4, 2, 4), low(b >> 4, 4, 0) | low(c >> 6, 2, 4)),
        ];
        let scales = scales.as_flattened();
        let scales = std::array::from_fn::<_, 16, _>(|i| d * f32::from(scales[i] as i8 - 32));
        out.scale_around(4, scales);
    }
}

block! {
    /// `d s (q - 32)`
    Q6K { nibbles: [[Bytes32; 2]; 2], high: [Bytes32; 2], scales: [i8; 16], d: [u8; 2] }
    (self, out; d = self.d) {
        for (half, bytes) in self.nibbles.into_iter().enumerate() {
            let high = words(self.high[half]);
            for pair in 0..4 {
                let nibbles = fields(words(bytes[pair % 2]), pair / 2 * 4, 15);
                let high = fields(high, 2 * pair, 3).map(|bits| bits << 4);
                out.set(16 * half + 4 * pair, or(nibbles, high));
            }
        }
        out.scale_around(32, self.scales.map(|scale| d * f32::from(scale)));
    }
}

block! {
    /// `d (s - 32) k[q]`
    IQ4XS, codes IQ4_QUANTS {
        d: [u8; 2],
        /// Two high bits of each scale.
        high: [u8; 2],
        /// Four low bits of each scale.
        low: [u8; 4],
        nibbles: [[[u8; 8]; 2]; 8],
    }
    (self, out; d = self.d) {
        for (i, bytes) in self.nibbles.into_iter().enumerate() {
            out.set(4 * i, fields(words(bytes), 0, 15));
            out.set(4 * i + 2, fields(words(bytes), 4, 15));
        }
        let high = u32::from(u16::from_le_bytes(self.high));
        let low = u32::from_le_bytes(self.low);
        let scales = std::array::from_fn::<_, 8, _>(|i| {
            let scale = low >> (4 * i) & 15 | (high >> (2 * i) & 3) << 4;
            d * (scale as i32 - 32) as f32
        });
        out.scale_around(IQ4_ZERO, scales);
    }
}

/// Ternary digit `i` of each byte.
#[inline(always)]
fn ternary<const N: usize>(words: [u64; N], i: u32) -> [u64; N] {
    // Words of 16 bits each: no product carries into the next one.
    const LOW: u64 = 0x00ff_00ff_00ff_00ff;
    let factor = 3u64.pow(i);
    let digit = |bytes: u64| ((((bytes * factor) & LOW) * 3) >> 8) & LOW;
    words.map(|word| digit(word & LOW) | digit(word >> 8 & LOW) << 8)
}

block! {
    /// `d (q - 1)`, five ternary digits per byte.
    TQ1_0 { fives: [[u8; 8]; 6], fours: [u8; 4], d: [u8; 2] }
    (self, out; d = self.d) {
        let [first @ .., e, f] = words(self.fives);
        let last = [u64::from(u32::from_le_bytes(self.fours))];
        for i in 0..5 {
            out.set(4 * i, ternary(first, i as u32));
            out.set(20 + 2 * i, ternary([e, f], i as u32));
        }
        let last = [0, 1, 2, 3].map(|i| ternary(last, i)[0]);
        out.set(30, [last[0] | last[1] << 32, last[2] | last[3] << 32]);
        out.scale_around(1, [d; 8]);
    }
}

block! {
    /// `d (q - 1)`, 2 bits.
    TQ2_0 { quants: [Bytes32; 2], d: [u8; 2] }
    (self, out; d = self.d) {
        out.two_bits(self.quants, |_| [0; 4]);
        out.scale_around(1, [d; 8]);
    }
}
