//! Weights of block types: quantized random values, or random blocks of a magnitude.

use half::f16;
use moeflux_ops::{BlockType, Codec};

use super::{
    quantize::quantizer,
    values::{AFFINE_GROUP, LEAD_SHRINK, Lead, RandomStream},
};

/// Maximum weights of a block.
const MAX_WEIGHTS: usize = 256;
/// Blocks of which the magnitude of a type's random blocks is measured.
const SAMPLE: usize = 64;

/// Bytes of a block that carry its scales.
#[derive(Clone, Copy, Debug, PartialEq)]
enum ScalePlace {
    /// f16 at these bytes.
    F16(&'static [usize]),
    /// Four bits in each of the last four words.
    Spread,
    /// An E8M0 byte at the start.
    E8M0,
    /// Four E4M3 bytes at the start.
    E4M3,
}

impl ScalePlace {
    fn of(kind: BlockType) -> Self {
        match kind {
            BlockType::Q4_1 | BlockType::Q5_1 | BlockType::Q4K | BlockType::Q5K => {
                Self::F16(&[0, 2])
            }
            BlockType::Q2K => Self::F16(&[80, 82]),
            BlockType::Q3K => Self::F16(&[108]),
            BlockType::Q6K => Self::F16(&[208]),
            BlockType::TQ1_0 => Self::F16(&[52]),
            BlockType::TQ2_0 => Self::F16(&[64]),
            BlockType::IQ1M => Self::Spread,
            BlockType::MXFP4 => Self::E8M0,
            BlockType::NVFP4 => Self::E4M3,
            _ => Self::F16(&[0]),
        }
    }

    /// Multiplies the scales of a block.
    fn multiply(self, block: &mut [u8], factor: f32) {
        let scaled = |bits: u16| f16::from_f32(f16::from_bits(bits).to_f32() * factor).to_bits();
        match self {
            Self::F16(places) => {
                for at in places {
                    let bits = u16::from_le_bytes([block[*at], block[at + 1]]);
                    block[*at..at + 2].copy_from_slice(&scaled(bits).to_le_bytes());
                }
            }
            Self::Spread => {
                let words = block.len() - 7;
                let bits = (0..4)
                    .fold(0, |bits, i| bits | u16::from(block[words + 2 * i] >> 4) << (4 * i));
                let bits = scaled(bits);
                for i in 0..4 {
                    let high = &mut block[words + 2 * i];
                    *high = *high & 15 | ((bits >> (4 * i)) as u8 & 15) << 4;
                }
            }
            Self::E8M0 => {
                block[0] = (f32::from(block[0]) + factor.log2()).round().clamp(1.0, 250.0) as u8;
            }
            Self::E4M3 => block[..4].iter_mut().for_each(|scale| {
                *scale = e4m3_code(e4m3_value(*scale) * factor);
            }),
        }
    }
}

/// Smallest normal value of E4M3.
const E4M3_NORMAL: f32 = 1.0 / 64.0;
/// Subnormal codes of E4M3 per unit.
const E4M3_STEPS: f32 = 512.0;

/// Value of an E4M3 code without sign.
fn e4m3_value(code: u8) -> f32 {
    match code >> 3 {
        0 => f32::from(code) / E4M3_STEPS,
        exponent => f32::from(8 + code % 8) * 2f32.powi(i32::from(exponent) - 10),
    }
}

/// The finite E4M3 code nearest to a positive value; never 0.
fn e4m3_code(value: f32) -> u8 {
    if value < E4M3_NORMAL {
        return (value * E4M3_STEPS).round().max(1.0) as u8;
    }
    // The exponent and three bits of the mantissa, rounded; biases of 127 and 7.
    (((value.to_bits() + (1 << 19)) >> 20) - (120 << 3)).min(126) as u8
}

/// A matrix of blocks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BlockParams {
    kind: BlockType,
    /// Standard deviation of the weights.
    std: f32,
    /// Factor on random blocks that gives them this deviation.
    factor: f32,
    /// Weights per row.
    cols: u64,
    /// Mean of each row's first group, for types with a quantizer.
    lead: Lead,
}

impl BlockParams {
    pub(crate) fn new(kind: BlockType, std: f32, cols: u64, lead: Lead) -> Self {
        let mut params = Self { kind, std, factor: 1.0, cols, lead };
        if quantizer(kind).is_none() {
            let (weights, bytes) = (kind.block_weights(), kind.block_bytes());
            let (mut blocks, mut out) = (vec![0; SAMPLE * bytes], vec![0.0; SAMPLE * weights]);
            params.fill(RandomStream::new(0, kind.type_name()), 0, &mut blocks);
            kind.dequantize([&blocks, &[], &[]], &mut out);
            let squares: f32 = out.iter().map(|x| x * x).sum();
            params.factor = std / (squares / out.len() as f32).sqrt().max(f32::MIN_POSITIVE);
        }
        params
    }

    /// Bytes of `weights` weights, which are whole blocks.
    pub(crate) fn bytes(&self, weights: u64) -> Option<u64> {
        (weights / self.kind.block_weights() as u64).checked_mul(self.block_bytes() as u64)
    }

    /// Bytes of a block.
    pub(super) fn block_bytes(&self) -> usize {
        self.kind.block_bytes()
    }

    /// Fills whole blocks from byte `offset` on.
    pub(super) fn fill(&self, stream: RandomStream, offset: u64, out: &mut [u8]) {
        let (weights, bytes) = (self.kind.block_weights() as u64, self.block_bytes());
        let quantizer = quantizer(self.kind);
        for (i, block) in (offset / bytes as u64..).zip(out.chunks_exact_mut(bytes)) {
            let first = i * weights;
            let Some(quantize) = quantizer else {
                // More words than bytes of a block.
                let mut at = 2 * first;
                let mut next = || {
                    at += 1;
                    stream.word(at - 1)
                };
                self.kind.random([block, &mut [], &mut []], &mut next);
                ScalePlace::of(self.kind).multiply(block, self.factor);
                continue;
            };
            let mut x = [0.0; MAX_WEIGHTS];
            let x = &mut x[..weights as usize];
            self.weights(stream, first, x);
            block.fill(0);
            quantize(x, block);
        }
    }

    /// Uniform weights from index `first` on, which is even.
    fn weights(&self, stream: RandomStream, first: u64, x: &mut [f32]) {
        let spread = self.std * 12f32.sqrt();
        let value = |bits: u64| (bits as u32 >> 8) as f32 / (1u32 << 24) as f32 - 0.5;
        for (pair, word) in x.chunks_exact_mut(2).zip(first / 2..) {
            let word = stream.word(word);
            pair[0] = spread * value(word);
            pair[1] = spread * value(word >> 32);
        }
        if self.lead == Lead::Zero {
            return;
        }
        for (x, i) in x.iter_mut().zip(first..) {
            if i % self.cols < AFFINE_GROUP as u64 {
                *x = self.lead.mean(i / self.cols) + *x * LEAD_SHRINK;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Random blocks have the standard deviation that was asked for, whatever the chunks.
    #[test]
    fn blocks_have_their_magnitude() {
        for kind in BlockType::ALL {
            let (weights, bytes) = (kind.block_weights(), kind.block_bytes());
            let params = BlockParams::new(kind, 0.02, 1024, Lead::Zero);
            let stream = RandomStream::new(3, "a");
            let (mut blocks, mut out) = (vec![0; 200 * bytes], vec![0.0; 200 * weights]);
            params.fill(stream, 0, &mut blocks);
            kind.dequantize([&blocks, &[], &[]], &mut out);
            let std = (out.iter().map(|x| x * x).sum::<f32>() / out.len() as f32).sqrt();
            assert!((0.014..0.028).contains(&std), "{}: {std}", kind.type_name());
            let mut part = vec![0; 3 * bytes];
            params.fill(stream, 7 * bytes as u64, &mut part);
            assert_eq!(part, blocks[7 * bytes..10 * bytes]);
        }
    }
}
