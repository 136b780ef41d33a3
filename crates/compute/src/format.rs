//! Weight formats: plain, affine and block-scaled encodings of a matrix.
//!
//! Bit layouts are defined here only. Kernels that also know them are checked against
//! [`Format::dequantize`].

use std::fmt;

use crate::Error;

/// Element type of unquantized values, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Scalar {
    /// IEEE 754 single precision.
    F32,
    /// IEEE 754 half precision.
    F16,
    /// bfloat16: the upper 16 bits of an `F32`.
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

    /// Element `i` of `bytes`, converted exactly to f32. The bytes need no alignment.
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

    /// Name as in safetensors.
    pub const fn name(self) -> &'static str {
        match self {
            Scalar::F32 => "F32",
            Scalar::F16 => "F16",
            Scalar::BF16 => "BF16",
        }
    }
}

/// Small floating-point element type of quantized weights.
///
/// Names and bits follow the OCP Microscaling Formats (MX) Specification 1.0, section 5.3. E4M3 is
/// the type of the OCP 8-bit Floating Point Specification (OFP8), also called E4M3FN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 4 bits: sign, 2 exponent bits (bias 1), 1 mantissa bit. Values 0, 0.5, 1, 1.5, 2, 3, 4, 6
    /// and their negatives.
    ///
    /// Two elements per byte, the first in the low bits.
    E2M1,
    /// 8 bits: sign, 4 exponent bits (bias 7), 3 mantissa bits. Maximum 448; no infinities;
    /// `S.1111.111` is NaN.
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

    /// Element `i` of a row, converted exactly to f32.
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

/// Value of each E4M3 code.
pub(crate) static E4M3: [f32; 256] = {
    let (mut values, mut code) = ([0.0; 256], 0);
    while code < 256 {
        let (exponent, mantissa) = (code >> 3 & 15, code & 7);
        let magnitude = match (exponent, mantissa) {
            (15, 7) => f32::NAN,
            (0, _) => mantissa as f32 / 512.0,
            _ => f32::from_bits(((exponent + 127 - 7) << 23 | mantissa << 20) as u32),
        };
        values[code] = if code < 128 { magnitude } else { -magnitude };
        code += 1;
    }
    values
};

/// Decodes E8M0: `2^(code - 127)`; 255 is NaN.
#[inline(always)]
fn e8m0(code: u8) -> f32 {
    match code {
        // 2^-127 is a subnormal f32.
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        _ => f32::from_bits(u32::from(code) << 23),
    }
}

/// Scale type of [`Format::Scaled`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockScale {
    /// 8 exponent bits of the MX specification: `2^(code - 127)`; 255 is NaN.
    E8M0,
    /// The same encoding as [`Element::E4M3`].
    E4M3,
    /// A plain floating-point value.
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

    /// Scale `i` of `bytes`, converted exactly to f32. The bytes need no alignment.
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

/// Storage format of a weight matrix. Rows are outputs, columns are inputs. Rows are contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    /// One floating-point value per weight.
    Plain(Scalar),
    /// MLX affine quantization: `w = scale * q + bias` per group of `group` consecutive inputs.
    ///
    /// `q` has `bits` bits. The quants of a row are one little-endian bit stream, lowest bits
    /// first: quant `i` occupies bits `i * bits ..` of the row. Scales and biases are `[rows, cols
    /// / group]` of type `scale`.
    Affine {
        /// Bits of one quant: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Inputs that share a scale and a bias: 32, 64 or 128.
        group: u16,
        /// Element type of scales and biases.
        scale: Scalar,
    },
    /// Small floats with one scale per block: `w = element * scale`, computed in f32.
    ///
    /// A block is `block_rows` outputs by `block_cols` inputs. The last blocks in both dimensions
    /// may be partial. Scales are `[ceil(rows / block_rows), ceil(cols / block_cols)]`. There are
    /// no biases.
    ///
    /// | format | elements | block | scales | described in |
    /// |---|---|---|---|---|
    /// | [MXFP4](Format::MXFP4) | E2M1 | 1 x 32 | E8M0 | OCP MX specification 1.0 |
    /// | [MXFP8](Format::MXFP8) | E4M3 | 1 x 32 | E8M0 | OCP MX specification 1.0 |
    /// | [NVFP4](Format::NVFP4) | E2M1 | 1 x 16 | E4M3 | NVIDIA, "Introducing NVFP4", 2025 |
    /// | FP8 | E4M3 | 128 x 128 | f32 or bf16 | DeepSeek-V3 technical report, section 3.3 |
    ///
    /// NVFP4 is used without its per-tensor scale. The scales of FP8 are `weight_scale_inv` of the
    /// DeepSeek-V3 checkpoint.
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

/// Sizes in bytes of the planes of a matrix. A plane that the format does not have is zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneBytes {
    /// Packed quants, or plain values.
    pub weights: usize,
    /// One scale per group or block.
    pub scales: usize,
    /// One bias per group.
    pub biases: usize,
}

impl PlaneBytes {
    /// Total bytes.
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

    /// Validates the format and shape of a matrix, and returns the sizes of its planes.
    ///
    /// # Errors
    /// Bits, group or block size are not supported; a row is not a whole number of groups or bytes;
    /// or the size overflows.
    pub fn plane_bytes(self, rows: usize, cols: usize) -> Result<PlaneBytes, Error> {
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

    /// Whether weights are quants with scales and biases.
    pub const fn is_affine(self) -> bool {
        matches!(self, Format::Affine { .. })
    }

    /// Bytes of weights per row of `cols` inputs.
    pub const fn row_bytes(self, cols: usize) -> usize {
        match self {
            Format::Plain(scalar) => cols * scalar.bytes(),
            Format::Affine { bits, .. } => cols * bits as usize / 8,
            Format::Scaled { element, .. } => cols * element.bits() / 8,
        }
    }

    /// Outputs that share a row of scales; at least 1.
    pub const fn block_rows(self) -> usize {
        match self {
            Format::Scaled { block_rows: rows @ 1.., .. } => rows as usize,
            _ => 1,
        }
    }

    /// Inputs that share a scale; at least 1.
    pub(crate) const fn block_cols(self) -> usize {
        match self {
            Format::Plain(_) => 1,
            Format::Affine { group, .. } => group as usize,
            Format::Scaled { block_cols, .. } => block_cols as usize,
        }
    }

    /// Bytes of scales per row of `cols` inputs, which is also the bytes of affine biases. Zero for
    /// plain formats.
    pub const fn row_scale_bytes(self, cols: usize) -> usize {
        match self {
            Format::Plain(_) => 0,
            Format::Affine { group, scale, .. } => cols / group as usize * scale.bytes(),
            Format::Scaled { block_cols, scale, .. } => {
                cols.div_ceil(block_cols as usize) * scale.bytes()
            }
        }
    }

    /// Dequantizes one row to f32. Every kernel is checked against this function.
    ///
    /// `weights`, `scales` and `biases` are the planes of the row, as
    /// [`Matrix::row`](crate::Matrix::row) returns them. `out` has one element per input.
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

/// Quant `i` of a row that is a little-endian stream of `bits`-bit integers.
#[inline]
pub fn quant(row: &[u8], bits: u8, i: usize) -> u8 {
    let bit = i * bits as usize;
    let (byte, shift) = (bit / 8, bit % 8);
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
