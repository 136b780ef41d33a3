//! Block types of ggml: their names, sizes and planes.

use super::{
    super::{
        codec::{ActivationType, BlockSize, Codec, PerPlane, PlaneLayout},
        format::Format,
        plain::{Scalar, random_value},
    },
    bits, codebook, k_quants,
};
use crate::error::Error;

/// Block type of ggml.
///
/// A row is whole blocks of equal length without gaps or alignment. A block has a scale in f16,
/// unless noted, then small integers in an order that differs between types. `d` and `m` are
/// scales, `q` quants, `s` scales of sub-blocks, `g` codebook entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockType {
    /// `d (q - 8)`, 4 bits.
    Q4_0,
    /// `d q + m`, 4 bits.
    Q4_1,
    /// `d (q - 16)`, 5 bits.
    Q5_0,
    /// `d q + m`, 5 bits.
    Q5_1,
    /// `d q`, signed 8 bits.
    Q8_0,
    /// `d s q - m t`, 2 bits; scales `s` and minima `t` of 4 bits per 16 weights.
    Q2K,
    /// `d s (q - 4)`, 3 bits; signed scales of 6 bits per 16 weights.
    Q3K,
    /// `d s q - m t`, 4 bits; scales and minima of 6 bits per 32 weights.
    Q4K,
    /// `d s q - m t`, 5 bits; scales and minima of 6 bits per 32 weights.
    Q5K,
    /// `d s (q - 32)`, 6 bits; scales of 8 bits per 16 weights.
    Q6K,
    /// Codebook of 256 entries of 8 weights, signs apart; 2.06 bits.
    IQ2XXS,
    /// Codebook of 512 entries of 8 weights, signs apart; 2.31 bits.
    IQ2XS,
    /// Codebook of 256 entries of 4 weights, signs apart; 3.06 bits.
    IQ3XXS,
    /// Codebook of 2,048 entries of 8 weights, shifted by an eighth; 1.56 bits.
    IQ1S,
    /// `d k[q]`, 4 bits, with a table `k` of 16 values.
    IQ4NL,
    /// Codebook of 512 entries of 4 weights, signs apart; 3.44 bits.
    IQ3S,
    /// Codebook of 1,024 entries of 8 weights, signs apart; 2.56 bits.
    IQ2S,
    /// `d s k[q]`, 4 bits, with scales of 6 bits per 32 weights.
    IQ4XS,
    /// As [`BlockType::IQ1S`], with scales per 16 weights; 1.75 bits.
    IQ1M,
    /// `d (q - 1)`, five ternary digits per byte.
    TQ1_0,
    /// `d (q - 1)`, 2 bits, ternary.
    TQ2_0,
    /// E2M1 with an E8M0 scale per 32 weights.
    MXFP4,
    /// E2M1 with an unsigned E4M3 scale per 16 weights.
    NVFP4,
    /// `d` or `-d`, 1 bit.
    Q1_0,
    /// `d (q - 1)`, 2 bits.
    Q2_0,
}

/// Row of the table of block types.
struct BlockLayout {
    name: &'static str,
    /// Weights of a block.
    weights: usize,
    /// Bytes of a block.
    bytes: usize,
    /// Positions of the scales.
    scales: ScaleBytes,
    /// Magnitude of the largest weight where the first scale is 1.
    largest: f32,
}

/// Positions in bytes of the scales of a block.
enum ScaleBytes {
    /// An f16.
    One(usize),
    /// An f16, and one for an offset: the offset is the given part of the largest weight.
    Two { scale: usize, offset: usize, part: f32 },
    /// Four bits in each of the last four words.
    Spread,
    /// An E8M0 byte at the start.
    E8M0,
    /// Four E4M3 bytes at the start.
    E4M3,
}

impl BlockType {
    /// All block types, in the order of their numbers in GGUF.
    pub const ALL: [Self; 25] = [
        Self::Q4_0,
        Self::Q4_1,
        Self::Q5_0,
        Self::Q5_1,
        Self::Q8_0,
        Self::Q2K,
        Self::Q3K,
        Self::Q4K,
        Self::Q5K,
        Self::Q6K,
        Self::IQ2XXS,
        Self::IQ2XS,
        Self::IQ3XXS,
        Self::IQ1S,
        Self::IQ4NL,
        Self::IQ3S,
        Self::IQ2S,
        Self::IQ4XS,
        Self::IQ1M,
        Self::TQ1_0,
        Self::TQ2_0,
        Self::MXFP4,
        Self::NVFP4,
        Self::Q1_0,
        Self::Q2_0,
    ];

    const fn layout(self) -> BlockLayout {
        const fn row(
            name: &'static str,
            weights: usize,
            bytes: usize,
            scales: ScaleBytes,
            largest: f32,
        ) -> BlockLayout {
            BlockLayout { name, weights, bytes, scales, largest }
        }
        use ScaleBytes::{E4M3, E8M0, One, Spread, Two};
        const fn offset_after(part: f32) -> ScaleBytes {
            Two { scale: 0, offset: 2, part }
        }
        match self {
            Self::Q4_0 => row("Q4_0", 32, 18, One(0), 8.0),
            Self::Q4_1 => row("Q4_1", 32, 20, offset_after(-7.5), 7.5),
            Self::Q5_0 => row("Q5_0", 32, 22, One(0), 16.0),
            Self::Q5_1 => row("Q5_1", 32, 24, offset_after(-15.5), 15.5),
            Self::Q8_0 => row("Q8_0", 32, 34, One(0), 128.0),
            Self::Q2K => row("Q2_K", 256, 84, Two { scale: 80, offset: 82, part: 1.5 }, 15.0 * 3.0),
            Self::Q3K => row("Q3_K", 256, 110, One(108), 32.0 * 4.0),
            Self::Q4K => row("Q4_K", 256, 144, offset_after(7.5), 63.0 * 15.0),
            Self::Q5K => row("Q5_K", 256, 176, offset_after(15.5), 63.0 * 31.0),
            Self::Q6K => row("Q6_K", 256, 210, One(208), 128.0 * 32.0),
            Self::IQ2XXS => row("IQ2_XXS", 256, 66, One(0), 31.0 / 8.0 * 43.0),
            Self::IQ2XS => row("IQ2_XS", 256, 74, One(0), 31.0 / 8.0 * 43.0),
            Self::IQ3XXS => row("IQ3_XXS", 256, 98, One(0), 31.0 / 4.0 * 62.0),
            Self::IQ1S => row("IQ1_S", 256, 50, One(0), 15.0 * 1.125),
            Self::IQ4NL => row("IQ4_NL", 32, 18, One(0), 127.0),
            Self::IQ3S => row("IQ3_S", 256, 110, One(0), 31.0 * 15.0),
            Self::IQ2S => row("IQ2_S", 256, 82, One(0), 31.0 / 8.0 * 43.0),
            Self::IQ4XS => row("IQ4_XS", 256, 136, One(0), 32.0 * 127.0),
            Self::IQ1M => row("IQ1_M", 256, 56, Spread, 15.0 * 1.125),
            Self::TQ1_0 => row("TQ1_0", 256, 54, One(52), 1.0),
            Self::TQ2_0 => row("TQ2_0", 256, 66, One(64), 1.0),
            Self::MXFP4 => row("MXFP4", 32, 17, E8M0, 6.0),
            Self::NVFP4 => row("NVFP4", 64, 36, E4M3, 6.0),
            Self::Q1_0 => row("Q1_0", 128, 18, One(0), 1.0),
            Self::Q2_0 => row("Q2_0", 64, 18, One(0), 2.0),
        }
    }

    /// Name as ggml spells it: `Q4_K`.
    #[inline]
    pub const fn type_name(self) -> &'static str {
        self.layout().name
    }

    /// The type that ggml gives this name.
    #[inline]
    pub fn from_type_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.type_name() == name)
    }

    /// Weights of a block.
    #[inline]
    pub const fn block_weights(self) -> usize {
        self.layout().weights
    }

    /// Bytes of a block.
    #[inline]
    pub const fn block_bytes(self) -> usize {
        self.layout().bytes
    }

    /// Weights that share a scale and an offset: 16 or 32. Blocks with one scale for more weights
    /// repeat it.
    #[doc(hidden)]
    #[inline]
    pub const fn group(self) -> usize {
        match self {
            Self::Q2K | Self::Q3K | Self::Q6K | Self::IQ2XS | Self::IQ2S | Self::IQ1M => 16,
            Self::NVFP4 => 16,
            _ => 32,
        }
    }

    /// Dequantizes whole blocks to f32, to the bit as ggml does.
    fn dequantize_blocks(self, blocks: &[u8], out: &mut [f32]) {
        let BlockLayout { weights, bytes, .. } = self.layout();
        for (block, out) in blocks.chunks_exact(bytes).zip(out.chunks_exact_mut(weights)) {
            match self {
                Self::Q4_0 => bits::q4_0(block, out),
                Self::Q4_1 => bits::q4_1(block, out),
                Self::Q5_0 => bits::q5_0(block, out),
                Self::Q5_1 => bits::q5_1(block, out),
                Self::Q8_0 => bits::q8_0(block, out),
                Self::Q2K => k_quants::q2_k(block, out),
                Self::Q3K => k_quants::q3_k(block, out),
                Self::Q4K => k_quants::q4_k(block, out),
                Self::Q5K => k_quants::q5_k(block, out),
                Self::Q6K => k_quants::q6_k(block, out),
                Self::IQ2XXS => codebook::iq2_xxs(block, out),
                Self::IQ2XS => codebook::iq2_xs(block, out),
                Self::IQ3XXS => codebook::iq3_xxs(block, out),
                Self::IQ1S => codebook::iq1_s(block, out),
                Self::IQ4NL => bits::iq4_nl(block, out),
                Self::IQ3S => codebook::iq3_s(block, out),
                Self::IQ2S => codebook::iq2_s(block, out),
                Self::IQ4XS => bits::iq4_xs(block, out),
                Self::IQ1M => codebook::iq1_m(block, out),
                Self::TQ1_0 => bits::tq1_0(block, out),
                Self::TQ2_0 => bits::tq2_0(block, out),
                Self::MXFP4 => bits::mxfp4(block, out),
                Self::NVFP4 => bits::nvfp4(block, out),
                Self::Q1_0 => bits::q1_0(block, out),
                Self::Q2_0 => bits::q2_0(block, out),
            }
        }
    }
}

/// The formats of this family.
pub(in crate::format) fn formats() -> Vec<Format> {
    BlockType::ALL.map(Format::Blocks).into()
}

impl Codec for BlockType {
    fn name(&self) -> String {
        self.type_name().to_lowercase()
    }

    fn description(&self) -> String {
        self.type_name().into()
    }

    fn block(&self) -> BlockSize {
        BlockSize { rows: 1, cols: self.block_weights() }
    }

    fn planes(&self, cols: usize) -> PerPlane<PlaneLayout> {
        let row_bytes = cols / self.block_weights() * self.block_bytes();
        // The largest power of two that all blocks start at.
        let align = (1 << self.block_bytes().trailing_zeros()).min(16);
        let blocks = PlaneLayout { row_bytes, block_rows: 1, align };
        [blocks, PlaneLayout::NONE, PlaneLayout::NONE]
    }

    fn check(&self, cols: usize) -> Result<(), Error> {
        let weights = self.block_weights();
        if !cols.is_multiple_of(weights) {
            return Err(Error::Shape(format!(
                "{cols} inputs are not whole blocks of {weights} {}",
                self.type_name()
            )));
        }
        Ok(())
    }

    fn activations(&self) -> ActivationType {
        ActivationType::Int8
    }

    fn dequantize(&self, [blocks, ..]: PerPlane<&[u8]>, out: &mut [f32]) {
        self.dequantize_blocks(blocks, out);
    }

    fn random(&self, [blocks, ..]: PerPlane<&mut [u8]>, next: &mut dyn FnMut() -> u64) {
        let BlockLayout { bytes, scales, largest, .. } = self.layout();
        blocks.iter_mut().for_each(|byte| *byte = next() as u8);
        for block in blocks.chunks_exact_mut(bytes) {
            let d = (0.75 + 0.25 * random_value(next)) / largest;
            let mut put = |at: usize, value| Scalar::F16.put(value, &mut block[at..at + 2]);
            match scales {
                ScaleBytes::One(at) => put(at, d),
                ScaleBytes::Two { scale, offset, part } => {
                    put(scale, d);
                    put(offset, d * part);
                }
                ScaleBytes::Spread => {
                    let d = half::f16::from_f32(d).to_bits();
                    for i in 0..4 {
                        let high = &mut block[bytes - 7 + 2 * i];
                        *high = *high & 0x0f | ((d >> (4 * i)) as u8) << 4;
                    }
                }
                ScaleBytes::E8M0 => block[0] = 123 + (next() % 3) as u8,
                ScaleBytes::E4M3 => {
                    block[..4].iter_mut().for_each(|scale| *scale = 36 + (next() % 16) as u8);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names, sizes, blocks and weights of gguf-py; see `scripts/gguf-blocks.py`.
    const VECTORS: &[u8] = include_bytes!("../../../tests/data/block_types.bin");

    /// Every type dequantizes to the bits of another implementation.
    #[test]
    fn blocks_dequantize_to_the_bits_of_ggml() {
        let mut rest = VECTORS;
        let mut take = |n: usize| {
            let (head, tail) = rest.split_at(n);
            rest = tail;
            head
        };
        for kind in BlockType::ALL {
            let name = std::str::from_utf8(take(8)).unwrap().trim_end();
            assert_eq!(name, kind.type_name());
            assert_eq!(BlockType::from_type_name(name), Some(kind));
            let count = take(1)[0] as usize;
            let blocks = take(count * kind.block_bytes());
            let cols = count * kind.block_weights();
            let expected = take(4 * cols);
            let planes = Format::Blocks(kind).plane_bytes(1, cols).unwrap();
            assert_eq!(planes.total(), blocks.len());
            let mut out = vec![0.0; cols];
            kind.dequantize([blocks, &[], &[]], &mut out);
            for (i, out) in out.iter().enumerate() {
                let expected = Scalar::F32.get(expected, i);
                let same = out.to_bits() == expected.to_bits();
                assert!(same || out.is_nan() && expected.is_nan(), "{name} {i}: {out} {expected}");
            }
        }
        assert!(rest.is_empty());
    }

    /// Random weights have a magnitude of 1.
    #[test]
    fn random_weights_are_of_magnitude_one() {
        let mut state = 1u64;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state >> 33
        };
        for kind in BlockType::ALL {
            let cols = 16 * kind.block_weights();
            let mut blocks = vec![0; 16 * kind.block_bytes()];
            kind.random([&mut blocks, &mut [], &mut []], &mut next);
            let mut out = vec![0.0; cols];
            kind.dequantize([&blocks, &[], &[]], &mut out);
            let largest = out.iter().fold(0f32, |m, x| m.max(x.abs()));
            assert!((0.05..5.0).contains(&largest), "{}: {largest}", kind.type_name());
        }
    }
}
