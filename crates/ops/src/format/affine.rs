//! MLX affine quantization.

use super::{
    codec::{ActivationType, BlockSize, Codec, PerPlane, PlaneLayout},
    format::Format,
    plain::{Scalar, random_value},
};
use crate::error::Error;

/// MLX affine quantization: `w = scale * q + bias` per group of `group` consecutive inputs.
///
/// `q` has `bits` bits. The quants of a row are one little-endian bit stream, lowest bits first:
/// quant `i` occupies bits `i * bits ..` of the row, which has whole words of 32 bits.
///
/// The planes are quants, scales and biases; the latter two are `[rows, cols / group]` of type
/// `scale`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Affine {
    /// Bits of one quant: 2, 3, 4, 5, 6 or 8.
    pub bits: u8,
    /// Inputs that share a scale and a bias: 16, 32, 64 or 128.
    pub group: u16,
    /// Element type of scales and biases.
    pub scale: Scalar,
}

/// The formats of this family: scales of bf16 first.
#[inline]
pub(super) fn formats() -> Vec<Format> {
    let mut formats = Vec::new();
    for scale in [Scalar::BF16, Scalar::F16, Scalar::F32] {
        for bits in [2, 3, 4, 5, 6, 8] {
            let affine = |group| Format::Affine(Affine { bits, group, scale });
            formats.extend([16, 32, 64, 128].map(affine));
        }
    }
    formats
}

impl Affine {
    /// Bytes of the scales of a row, which is also the bytes of its biases.
    const fn scale_row_bytes(self, cols: usize) -> usize {
        cols / self.group as usize * self.scale.bytes()
    }
}

impl Codec for Affine {
    fn name(&self) -> String {
        format!("affine{}/{}", self.bits, self.group)
    }

    fn description(&self) -> String {
        format!("affine {} bits, groups of {}", self.bits, self.group)
    }

    fn block(&self) -> BlockSize {
        BlockSize { rows: 1, cols: self.group.into() }
    }

    fn planes(&self, cols: usize) -> PerPlane<PlaneLayout> {
        // Quants that straddle bytes are loaded as words.
        let align = if matches!(self.bits, 4 | 8) { 16 } else { 4 };
        let row_bytes = cols * self.bits as usize / 8;
        let factors =
            PlaneLayout { row_bytes: self.scale_row_bytes(cols), block_rows: 1, align: 4 };
        [PlaneLayout { row_bytes, block_rows: 1, align }, factors, factors]
    }

    fn check(&self, cols: usize) -> Result<(), Error> {
        let &Self { bits, group, .. } = self;
        if !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) {
            return Err(Error::Shape(format!(
                "affine weights of {bits} bits are not supported: 2, 3, 4, 5, 6 and 8 are"
            )));
        }
        if !matches!(group, 16 | 32 | 64 | 128) {
            return Err(Error::Shape(format!(
                "affine groups of {group} are not supported: 16, 32, 64 and 128 are"
            )));
        }
        if !cols.is_multiple_of(group as usize) {
            return Err(Error::Shape(format!(
                "{cols} inputs are not a whole number of groups of {group}"
            )));
        }
        if !(cols % 32 * usize::from(bits)).is_multiple_of(32) {
            return Err(Error::Shape(format!(
                "{cols} inputs of {bits} bits are not whole words of 32 bits"
            )));
        }
        Ok(())
    }

    fn activations(&self) -> ActivationType {
        ActivationType::Int8
    }

    fn dequantize(&self, [quants, scales, biases]: PerPlane<&[u8]>, out: &mut [f32]) {
        for (i, o) in out.iter_mut().enumerate() {
            let g = i / self.group as usize;
            *o = self.scale.get(scales, g) * quant(quants, self.bits, i) as f32
                + self.scale.get(biases, g);
        }
    }

    fn random(&self, [quants, scales, biases]: PerPlane<&mut [u8]>, next: &mut dyn FnMut() -> u64) {
        quants.iter_mut().for_each(|byte| *byte = next() as u8);
        let step = 2.0 / f32::from(self.bits).exp2();
        let size = self.scale.bytes();
        for scale in scales.chunks_exact_mut(size) {
            self.scale.put(step * (1.0 + 0.5 * random_value(next)), scale);
        }
        for (g, bias) in biases.chunks_exact_mut(size).enumerate() {
            let middle = -self.scale.get(scales, g) / step;
            self.scale.put(middle * (1.0 + 0.1 * random_value(next)), bias);
        }
    }
}

/// Quant `i` of a row that is a little-endian stream of `bits`-bit integers.
#[inline]
pub fn quant(row: &[u8], bits: u8, i: usize) -> u8 {
    let bit = i * bits as usize;
    let (byte, shift) = (bit / 8, bit % 8);
    let low = row[byte] as u16;
    let high = if shift + bits as usize > 8 { row[byte + 1] as u16 } else { 0 };
    (((low | high << 8) >> shift) & ((1u16 << bits) - 1)) as u8
}
