//! Weight formats: how the numbers of a matrix lie in bytes.
//!
//! Nothing else in the project knows bit positions, except the kernels that are checked against
//! [`Format::dequantize`].

use std::fmt;

use crate::Error;

/// An element type of unquantised numbers, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scalar {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// bfloat16: the upper half of an `F32`.
    BF16,
}

impl Scalar {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Scalar::F32 => 4,
            Scalar::F16 | Scalar::BF16 => 2,
        }
    }

    /// Element `i` of `bytes`, widened exactly. The bytes need no alignment.
    ///
    /// # Panics
    /// When `bytes` ends before element `i` does.
    #[inline]
    pub fn get(self, bytes: &[u8], i: usize) -> f32 {
        match self {
            Scalar::F32 => {
                let b = &bytes[i * 4..i * 4 + 4];
                f32::from_le_bytes([b[0], b[1], b[2], b[3]])
            }
            Scalar::F16 => half::f16::from_le_bytes([bytes[i * 2], bytes[i * 2 + 1]]).to_f32(),
            Scalar::BF16 => half::bf16::from_le_bytes([bytes[i * 2], bytes[i * 2 + 1]]).to_f32(),
        }
    }

    /// The name as safetensors spells it.
    pub const fn name(self) -> &'static str {
        match self {
            Scalar::F32 => "F32",
            Scalar::F16 => "F16",
            Scalar::BF16 => "BF16",
        }
    }
}

/// How a matrix of weights is stored. Rows are outputs, columns are inputs; a row is contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// One number per weight.
    Plain(Scalar),
    /// MLX affine quantisation: `w = scale * q + bias` per group of `group` consecutive inputs.
    ///
    /// `q` has `bits` bits; the quants of a row are one little-endian bit stream, lowest bits first, so quant
    /// `i` occupies the bits `i * bits ..` of the row. Scales and biases are `[rows, cols / group]` of `scale`.
    Affine {
        /// Bits of one quant: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Inputs that share a scale and a bias: 32, 64 or 128.
        group: u16,
        /// Element type of scales and biases.
        scale: Scalar,
    },
}

/// Bytes of the three parts of a matrix; the last two are zero for plain formats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartBytes {
    /// Packed quants, or plain numbers.
    pub weights: usize,
    /// One scale per group.
    pub scales: usize,
    /// One bias per group.
    pub biases: usize,
}

impl PartBytes {
    /// Bytes of all parts together.
    pub const fn total(self) -> usize {
        self.weights + self.scales + self.biases
    }
}

impl Format {
    /// Checks that a matrix of this format and shape can exist, and sizes its parts.
    ///
    /// # Errors
    /// Bits or group size outside what the format has, a row that is not a whole number of groups, or a size
    /// that overflows.
    pub fn parts(self, rows: usize, cols: usize) -> Result<PartBytes, Error> {
        let too_large =
            || Error::Shape(format!("a matrix of {rows} x {cols} {self} is too large to address"));
        let fits = rows.max(1).checked_mul(cols.max(1)).is_some_and(|n| n <= isize::MAX as usize / 8);
        if !fits {
            return Err(too_large());
        }
        match self {
            Format::Plain(scalar) => {
                Ok(PartBytes { weights: rows * cols * scalar.bytes(), scales: 0, biases: 0 })
            }
            Format::Affine { bits, group, scale } => {
                if !matches!(bits, 2 | 3 | 4 | 5 | 6 | 8) {
                    return Err(Error::Shape(format!(
                        "affine weights of {bits} bits are not supported: 2, 3, 4, 5, 6 and 8 are"
                    )));
                }
                if !matches!(group, 32 | 64 | 128) {
                    return Err(Error::Shape(format!(
                        "affine groups of {group} are not supported: 32, 64 and 128 are"
                    )));
                }
                if !cols.is_multiple_of(group as usize) {
                    return Err(Error::Shape(format!(
                        "{cols} inputs are not a whole number of groups of {group}"
                    )));
                }
                let groups = rows * (cols / group as usize) * scale.bytes();
                Ok(PartBytes { weights: rows * (cols * bits as usize / 8), scales: groups, biases: groups })
            }
        }
    }

    /// Whether the numbers are quants with scales and biases.
    pub const fn is_affine(self) -> bool {
        matches!(self, Format::Affine { .. })
    }

    /// Bytes of the weights of one row of `cols` inputs.
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self {
            Format::Plain(scalar) => cols * scalar.bytes(),
            Format::Affine { bits, .. } => cols * bits as usize / 8,
        }
    }

    /// Bytes of the scales of one row of `cols` inputs (the biases take as many); zero for plain formats.
    pub const fn row_scale_bytes(self, cols: usize) -> usize {
        match self {
            Format::Plain(_) => 0,
            Format::Affine { group, scale, .. } => cols / group as usize * scale.bytes(),
        }
    }

    /// Widens one row to f32: the specification that every kernel is checked against.
    ///
    /// `weights`, `scales` and `biases` are the parts of that row; `out` has one element per input.
    pub fn dequantize(self, weights: &[u8], scales: &[u8], biases: &[u8], out: &mut [f32]) {
        match self {
            Format::Plain(scalar) => {
                for (i, o) in out.iter_mut().enumerate() {
                    *o = scalar.get(weights, i);
                }
            }
            Format::Affine { bits, group, scale } => {
                for (i, o) in out.iter_mut().enumerate() {
                    let g = i / group as usize;
                    *o = scale.get(scales, g) * quant(weights, bits, i) as f32 + scale.get(biases, g);
                }
            }
        }
    }
}

/// Quant `i` of a row that is a little-endian stream of `bits`-bit numbers.
#[inline]
pub fn quant(row: &[u8], bits: u8, i: usize) -> u8 {
    let at = i * bits as usize;
    let (byte, shift) = (at / 8, at % 8);
    let low = row[byte] as u16;
    let high = if shift + bits as usize > 8 { row[byte + 1] as u16 } else { 0 };
    (((low | high << 8) >> shift) & ((1u16 << bits) - 1)) as u8
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Format::Plain(scalar) => f.write_str(&scalar.name().to_lowercase()),
            Format::Affine { bits, group, .. } => write!(f, "affine {bits} bits, groups of {group}"),
        }
    }
}
