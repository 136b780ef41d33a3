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

/// A small floating-point type of quantised weights.
///
/// Names and bits are those of the OCP Microscaling Formats (MX) Specification 1.0, section 5.3; E4M3 is the type of
/// the OCP 8-bit Floating Point Specification (OFP8), also called E4M3FN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 4 bits: sign, two of exponent (bias 1), one of mantissa. 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives.
    ///
    /// Two lie in a byte, the first in the low bits.
    E2M1,
    /// 8 bits: sign, four of exponent (bias 7), three of mantissa. 448 at most; no infinities, `S.1111.111` is NaN.
    E4M3,
}

impl Element {
    /// Bits of one element.
    pub const fn bits(self) -> usize {
        match self {
            Element::E2M1 => 4,
            Element::E4M3 => 8,
        }
    }

    /// Element `i` of a row, exactly.
    ///
    /// # Panics
    /// When `row` ends before element `i` does.
    #[inline]
    pub fn get(self, row: &[u8], i: usize) -> f32 {
        match self {
            Element::E2M1 => E2M1[usize::from(row[i / 2] >> (i % 2 * 4) & 15)],
            Element::E4M3 => E4M3[usize::from(row[i])],
        }
    }
}

const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// What each code is.
pub(crate) static E4M3: [f32; 256] = {
    let (mut all, mut code) = ([0.0; 256], 0);
    while code < 256 {
        let (exponent, mantissa) = (code >> 3 & 15, code & 7);
        let size = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa as f32 / 512.0,
            _ => f32::from_bits(((exponent + 127 - 7) << 23 | mantissa << 20) as u32),
        };
        all[code] = if code < 128 { size } else { -size };
        code += 1;
    }
    all
};

/// `2^(code - 127)`; 255 is NaN.
#[inline(always)]
fn e8m0(code: u8) -> f32 {
    match code {
        // 2^-127 is less than the smallest number with all bits.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// The type of the scales of [`Format::Scaled`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockScale {
    /// The MX specification's 8 bits of exponent: `2^(code - 127)`; 255 is NaN.
    E8M0,
    /// As [`Element::E4M3`].
    E4M3,
    /// An ordinary number.
    Plain(Scalar),
}

impl BlockScale {
    /// Bytes of one scale.
    pub const fn bytes(self) -> usize {
        match self {
            BlockScale::E8M0 | BlockScale::E4M3 => 1,
            BlockScale::Plain(scalar) => scalar.bytes(),
        }
    }

    /// Scale `i` of `bytes`, exactly. The bytes need no alignment.
    ///
    /// # Panics
    /// When `bytes` ends before scale `i` does.
    #[inline(always)]
    pub fn get(self, bytes: &[u8], i: usize) -> f32 {
        match self {
            BlockScale::E8M0 => e8m0(bytes[i]),
            BlockScale::E4M3 => E4M3[usize::from(bytes[i])],
            BlockScale::Plain(scalar) => scalar.get(bytes, i),
        }
    }

    const fn name(self) -> &'static str {
        match self {
            BlockScale::E8M0 => "e8m0",
            BlockScale::E4M3 => "e4m3",
            BlockScale::Plain(Scalar::F32) => "f32",
            BlockScale::Plain(Scalar::F16) => "f16",
            BlockScale::Plain(Scalar::BF16) => "bf16",
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
    /// Small floats with a scale per block, `w = element * scale`, the product in f32.
    ///
    /// A block is `block_rows` outputs by `block_cols` inputs; the last blocks of both directions may be cut off by
    /// the matrix' edge. Scales are `[ceil(rows / block_rows), ceil(cols / block_cols)]`. There are no biases.
    ///
    /// | format | elements | block | scales | described in |
    /// |---|---|---|---|---|
    /// | [MXFP4](Format::MXFP4) | E2M1 | 1 x 32 | E8M0 | OCP MX specification 1.0 |
    /// | [MXFP8](Format::MXFP8) | E4M3 | 1 x 32 | E8M0 | OCP MX specification 1.0 |
    /// | [NVFP4](Format::NVFP4) | E2M1 | 1 x 16 | E4M3 | NVIDIA, "Introducing NVFP4" (2025), without its scale per tensor |
    /// | FP8 | E4M3 | 128 x 128 | f32 or bf16 | DeepSeek-V3 technical report, 3.3; `weight_scale_inv` of its model card |
    Scaled {
        /// Type of the elements.
        element: Element,
        /// Outputs that share a scale.
        block_rows: u16,
        /// Inputs that share a scale; even for [`Element::E2M1`].
        block_cols: u16,
        /// Type of the scales.
        scale: BlockScale,
    },
}

/// Bytes of the three parts of a matrix; those that its format lacks are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneBytes {
    /// Packed quants, or plain numbers.
    pub weights: usize,
    /// One scale per group or block.
    pub scales: usize,
    /// One bias per group.
    pub biases: usize,
}

impl PlaneBytes {
    /// Bytes of all parts together.
    pub const fn total(self) -> usize {
        self.weights + self.scales + self.biases
    }
}

impl Format {
    /// E2M1 in blocks of 32 inputs with E8M0 scales.
    pub const MXFP4: Self = Self::mx(Element::E2M1);
    /// E4M3 in blocks of 32 inputs with E8M0 scales.
    pub const MXFP8: Self = Self::mx(Element::E4M3);
    /// E2M1 in blocks of 16 inputs with E4M3 scales.
    pub const NVFP4: Self = Self::Scaled {
        element: Element::E2M1,
        block_rows: 1,
        block_cols: 16,
        scale: BlockScale::E4M3,
    };

    const fn mx(element: Element) -> Self {
        Self::Scaled { element, block_rows: 1, block_cols: 32, scale: BlockScale::E8M0 }
    }

    /// Checks that a matrix of this format and shape can exist, and sizes its parts.
    ///
    /// # Errors
    /// Bits, group or block size outside what the format has, a row that is not a whole number of groups or bytes,
    /// or a size that overflows.
    pub fn parts(self, rows: usize, cols: usize) -> Result<PlaneBytes, Error> {
        let too_large =
            || Error::Shape(format!("a matrix of {rows} x {cols} {self} is too large to address"));
        let fits =
            rows.max(1).checked_mul(cols.max(1)).is_some_and(|n| n <= isize::MAX as usize / 8);
        if !fits {
            return Err(too_large());
        }
        match self {
            Format::Plain(scalar) => {
                Ok(PlaneBytes { weights: rows * cols * scalar.bytes(), scales: 0, biases: 0 })
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
                Ok(PlaneBytes {
                    weights: rows * (cols * bits as usize / 8),
                    scales: groups,
                    biases: groups,
                })
            }
            Format::Scaled { element, block_rows, block_cols, .. } => {
                if block_rows == 0 || block_cols == 0 {
                    return Err(Error::Shape(format!(
                        "blocks of {block_rows} x {block_cols} hold nothing"
                    )));
                }
                let whole = |n: usize| (n * element.bits()).is_multiple_of(8);
                if !whole(cols) || !whole(block_cols as usize) {
                    return Err(Error::Shape(format!(
                        "{cols} inputs in blocks of {block_cols} are not whole bytes of two elements"
                    )));
                }
                Ok(PlaneBytes {
                    weights: rows * self.row_bytes(cols),
                    scales: rows.div_ceil(block_rows as usize) * self.row_scale_bytes(cols),
                    biases: 0,
                })
            }
        }
    }

    /// Whether the numbers are quants with scales and as many biases.
    pub const fn is_affine(self) -> bool {
        matches!(self, Format::Affine { .. })
    }

    /// Bytes of the weights of one row of `cols` inputs.
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self {
            Format::Plain(scalar) => cols * scalar.bytes(),
            Format::Affine { bits, .. } => cols * bits as usize / 8,
            Format::Scaled { element, .. } => cols * element.bits() / 8,
        }
    }

    /// Outputs that share a row of scales; at least one.
    pub const fn block_rows(self) -> usize {
        match self {
            Format::Scaled { block_rows: rows @ 1.., .. } => rows as usize,
            _ => 1,
        }
    }

    /// Inputs that share a scale; at least one.
    pub(crate) const fn block_cols(self) -> usize {
        match self {
            Format::Plain(_) => 1,
            Format::Affine { group, .. } => group as usize,
            Format::Scaled { block_cols, .. } => block_cols as usize,
        }
    }

    /// Bytes of one row of scales for `cols` inputs (affine biases take as many); zero for plain formats.
    pub const fn row_scale_bytes(self, cols: usize) -> usize {
        match self {
            Format::Plain(_) => 0,
            Format::Affine { group, scale, .. } => cols / group as usize * scale.bytes(),
            Format::Scaled { block_cols, scale, .. } => {
                cols.div_ceil(block_cols as usize) * scale.bytes()
            }
        }
    }

    /// Widens one row to f32: the specification that every kernel is checked against.
    ///
    /// `weights`, `scales` and `biases` are the parts of that row, as [`Matrix::row`](crate::Matrix::row) finds them;
    /// `out` has one element per input.
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
                    *o = scale.get(scales, g) * quant(weights, bits, i) as f32
                        + scale.get(biases, g);
                }
            }
            Format::Scaled { element, block_cols, scale, .. } => {
                for (i, o) in out.iter_mut().enumerate() {
                    *o = element.get(weights, i) * scale.get(scales, i / block_cols as usize);
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
        match *self {
            Format::Plain(scalar) => f.write_str(&scalar.name().to_lowercase()),
            Format::Affine { bits, group, .. } => {
                write!(f, "affine {bits} bits, groups of {group}")
            }
            Format::MXFP4 => f.write_str("mxfp4"),
            Format::MXFP8 => f.write_str("mxfp8"),
            Format::NVFP4 => f.write_str("nvfp4"),
            Format::Scaled { element, block_rows, block_cols, scale } => {
                let element = match element {
                    Element::E2M1 => "fp4",
                    Element::E4M3 => "fp8",
                };
                write!(
                    f,
                    "{element}, blocks of {block_rows} x {block_cols}, {} scales",
                    scale.name()
                )
            }
        }
    }
}
