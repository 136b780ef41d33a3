//! Blocks of 16 to 128 weights that share one scale each, and NVFP4.

use bytemuck::{Pod, Zeroable};
use moeflux_ops::{BlockType, seam::e8m0_half};

use super::{
    super::unpack_affine::{E2M1_BIAS, E2M1_QUANTS},
    block::{Block, BlockQuants, IQ4_QUANTS, IQ4_ZERO, MASKS, entry, fields, or, splat, words},
};

/// The quant of 0 among those of E2M1 elements.
const E2M1_ZERO: u8 = -E2M1_BIAS as u8;

/// 4-bit codes: low halves of the bytes first, then high halves.
#[inline(always)]
fn nibbles(bytes: [[u8; 8]; 2]) -> [u64; 4] {
    let [[a, b], [c, d]] = [0, 4].map(|shift| fields(words(bytes), shift, 15));
    [a, b, c, d]
}

/// `d (q - 8)`
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q4Zero {
    d: [u8; 2],
    nibbles: [[u8; 8]; 2],
}

impl Block for Q4Zero {
    const KIND: BlockType = BlockType::Q4_0;
    #[inline(always)]
    fn halves(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), 0]
    }
    #[inline(always)]
    fn transcode(&self, [d, _]: [f32; 2], mut out: BlockQuants<'_>) {
        out.set(0, nibbles(self.nibbles));
        out.scale_around(8, [d]);
    }
}

/// `d q + m`
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q4One {
    d: [u8; 2],
    m: [u8; 2],
    nibbles: [[u8; 8]; 2],
}

impl Block for Q4One {
    const KIND: BlockType = BlockType::Q4_1;
    #[inline(always)]
    fn halves(&self) -> [u16; 2] {
        [self.d, self.m].map(u16::from_le_bytes)
    }
    #[inline(always)]
    fn transcode(&self, [d, m]: [f32; 2], mut out: BlockQuants<'_>) {
        out.set(0, nibbles(self.nibbles));
        out.scale([d], [m]);
    }
}

/// 5-bit quants: nibbles, with the fifth bit of weight `i` in bit `i`.
#[inline(always)]
fn five_bits(fifth: [u8; 4], bytes: [[u8; 8]; 2]) -> [u64; 4] {
    or(nibbles(bytes), fifth.map(|bits| entry(&MASKS, bits.into()) & splat(16)))
}

/// `d (q - 16)`
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q5Zero {
    d: [u8; 2],
    fifth: [u8; 4],
    nibbles: [[u8; 8]; 2],
}

impl Block for Q5Zero {
    const KIND: BlockType = BlockType::Q5_0;
    #[inline(always)]
    fn halves(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), 0]
    }
    #[inline(always)]
    fn transcode(&self, [d, _]: [f32; 2], mut out: BlockQuants<'_>) {
        out.set(0, five_bits(self.fifth, self.nibbles));
        out.scale_around(16, [d]);
    }
}

/// `d q + m`
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q5One {
    d: [u8; 2],
    m: [u8; 2],
    fifth: [u8; 4],
    nibbles: [[u8; 8]; 2],
}

impl Block for Q5One {
    const KIND: BlockType = BlockType::Q5_1;
    #[inline(always)]
    fn halves(&self) -> [u16; 2] {
        [self.d, self.m].map(u16::from_le_bytes)
    }
    #[inline(always)]
    fn transcode(&self, [d, m]: [f32; 2], mut out: BlockQuants<'_>) {
        out.set(0, five_bits(self.fifth, self.nibbles));
        out.scale([d], [m]);
    }
}

/// `d q` with signed `q`, which becomes `q + 128`.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q8Zero {
    d: [u8; 2],
    bytes: [[u8; 8]; 4],
}

impl Block for Q8Zero {
    const KIND: BlockType = BlockType::Q8_0;
    #[inline(always)]
    fn halves(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), 0]
    }
    #[inline(always)]
    fn transcode(&self, [d, _]: [f32; 2], mut out: BlockQuants<'_>) {
        out.set(0, words(self.bytes).map(|word| word ^ splat(0x80)));
        out.scale_around(128, [d]);
    }
}

/// `d k[q]`
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Iq4Nl {
    d: [u8; 2],
    nibbles: [[u8; 8]; 2],
}

impl Block for Iq4Nl {
    const KIND: BlockType = BlockType::IQ4NL;
    const TABLE: Option<[u8; 16]> = Some(IQ4_QUANTS);
    #[inline(always)]
    fn halves(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), 0]
    }
    #[inline(always)]
    fn transcode(&self, [d, _]: [f32; 2], mut out: BlockQuants<'_>) {
        out.set(0, nibbles(self.nibbles));
        out.scale_around(IQ4_ZERO, [d]);
    }
}

/// E2M1 with an E8M0 scale.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Mxfp4 {
    exponent: u8,
    nibbles: [[u8; 8]; 2],
}

impl Block for Mxfp4 {
    const KIND: BlockType = BlockType::MXFP4;
    const TABLE: Option<[u8; 16]> = Some(E2M1_QUANTS);
    #[inline(always)]
    fn halves(&self) -> [u16; 2] {
        [0; 2]
    }
    #[inline(always)]
    fn transcode(&self, _: [f32; 2], mut out: BlockQuants<'_>) {
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

/// E2M1 with an unsigned E4M3 scale per 16 weights.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Nvfp4 {
    scales: [u8; 4],
    nibbles: [[u8; 8]; 4],
}

impl Block for Nvfp4 {
    const KIND: BlockType = BlockType::NVFP4;
    const TABLE: Option<[u8; 16]> = Some(E2M1_QUANTS);
    #[inline(always)]
    fn halves(&self) -> [u16; 2] {
        [0; 2]
    }
    #[inline(always)]
    fn transcode(&self, _: [f32; 2], mut out: BlockQuants<'_>) {
        for (i, word) in words(self.nibbles).into_iter().enumerate() {
            out.set(2 * i, [word & splat(15), word >> 4 & splat(15)]);
        }
        out.scale_around(E2M1_ZERO, self.scales.map(ue4m3_half));
    }
}

/// `d` or `-d`: `d (2 q - 1)`
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q1Zero {
    d: [u8; 2],
    bits: [u8; 16],
}

impl Block for Q1Zero {
    const KIND: BlockType = BlockType::Q1_0;
    #[inline(always)]
    fn halves(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), 0]
    }
    #[inline(always)]
    fn transcode(&self, [d, _]: [f32; 2], mut out: BlockQuants<'_>) {
        out.set(0, self.bits.map(|bits| entry(&MASKS, bits.into()) & splat(1)));
        out.scale([2.0 * d; 4], [-d; 4]);
    }
}

/// `d (q - 1)`
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Q2Zero {
    d: [u8; 2],
    quants: [[u8; 2]; 8],
}

impl Block for Q2Zero {
    const KIND: BlockType = BlockType::Q2_0;
    #[inline(always)]
    fn halves(&self) -> [u16; 2] {
        [u16::from_le_bytes(self.d), 0]
    }
    #[inline(always)]
    fn transcode(&self, [d, _]: [f32; 2], mut out: BlockQuants<'_>) {
        // The four quants of a byte are moved to bytes.
        let four = |byte: u8| {
            let byte = u32::from(byte);
            u64::from((byte | byte << 6 | byte << 12 | byte << 18) & 0x0303_0303)
        };
        out.set(0, self.quants.map(|[low, high]| four(low) | four(high) << 32));
        out.scale_around(1, [d; 2]);
    }
}
