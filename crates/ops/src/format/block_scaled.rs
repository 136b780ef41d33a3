//! Small floats with block scales: MXFP4, MXFP8, NVFP4, FP8.

use super::{
    codec::{ActivationType, BlockSize, Codec, PerPlane, PlaneLayout},
    format::Format,
    plain::{Scalar, random_value},
};
use crate::error::Error;

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
    #[inline]
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
pub static E4M3: [f32; 256] = {
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

/// Scale type of [`Format::BlockScaled`].
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
    #[inline]
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

/// Small floats with one scale per block: `w = element * scale`, computed in f32.
///
/// A block is `block_rows` outputs by `block_cols` inputs. The last blocks in both dimensions may
/// be partial. The planes are elements and scales; the latter are `[ceil(rows / block_rows),
/// ceil(cols / block_cols)]`.
///
/// | format | elements | block | scales | described in |
/// |---|---|---|---|---|
/// | [MXFP4](Format::MXFP4) | E2M1 | 1 x 32 | E8M0 | OCP MX specification 1.0 |
/// | [MXFP8](Format::MXFP8) | E4M3 | 1 x 32 | E8M0 | OCP MX specification 1.0 |
/// | [NVFP4](Format::NVFP4) | E2M1 | 1 x 16 | E4M3 | NVIDIA, "Introducing NVFP4", 2025 |
/// | [FP8](Format::FP8) | E4M3 | 128 x 128 | f32 or bf16 | DeepSeek-V3 report, section 3.3 |
///
/// A per-tensor scale of NVFP4 is multiplied into its scales, which are then f32
/// ([`Format::NVFP4_WIDE`]). The scales of FP8 are `weight_scale_inv` of the
/// DeepSeek-V3 checkpoint. FP8 with a scale per row has blocks of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockScaled {
    /// Type of the elements.
    pub element: Element,
    /// Outputs that share a scale.
    pub block_rows: u16,
    /// Inputs that share a scale; even for [`Element::E2M1`].
    pub block_cols: u16,
    /// Type of the scales.
    pub scale: BlockScale,
}

/// The formats of this family that have names.
#[inline]
pub(super) fn formats() -> Vec<Format> {
    [Format::MXFP4, Format::NVFP4, Format::MXFP8, Format::FP8].into()
}

impl Format {
    /// E2M1 in blocks of 32 inputs with E8M0 scales.
    pub const MXFP4: Self = Self::mx(Element::E2M1);
    /// E4M3 in blocks of 32 inputs with E8M0 scales.
    pub const MXFP8: Self = Self::mx(Element::E4M3);
    /// E2M1 in blocks of 16 inputs with E4M3 scales.
    pub const NVFP4: Self = Self::BlockScaled(BlockScaled {
        element: Element::E2M1,
        block_rows: 1,
        block_cols: 16,
        scale: BlockScale::E4M3,
    });
    /// E2M1 in blocks of 16 inputs with f32 scales: NVFP4 whose scale per tensor is in them.
    pub const NVFP4_WIDE: Self = Self::BlockScaled(BlockScaled {
        element: Element::E2M1,
        block_rows: 1,
        block_cols: 16,
        scale: BlockScale::Plain(Scalar::F32),
    });
    /// E4M3 in blocks of 128 x 128 with f32 scales.
    pub const FP8: Self = Self::BlockScaled(BlockScaled {
        element: Element::E4M3,
        block_rows: 128,
        block_cols: 128,
        scale: BlockScale::Plain(Scalar::F32),
    });

    const fn mx(element: Element) -> Self {
        Self::BlockScaled(BlockScaled {
            element,
            block_rows: 1,
            block_cols: 32,
            scale: BlockScale::E8M0,
        })
    }
}

impl Codec for BlockScaled {
    fn name(&self) -> String {
        match Format::BlockScaled(*self) {
            Format::MXFP4 => "mxfp4".into(),
            Format::MXFP8 => "mxfp8".into(),
            Format::NVFP4 => "nvfp4".into(),
            Format::FP8 => "fp8".into(),
            _ => self.description(),
        }
    }

    fn description(&self) -> String {
        let &Self { element, block_rows, block_cols, scale } = self;
        match Format::BlockScaled(*self) {
            Format::MXFP4 | Format::MXFP8 | Format::NVFP4 => return self.name(),
            _ => {}
        }
        let element = match element {
            Element::E2M1 => "fp4",
            Element::E4M3 => "fp8",
        };
        format!("{element}, blocks of {block_rows} x {block_cols}, {} scales", scale.name())
    }

    fn block(&self) -> BlockSize {
        // Blocks of nothing are refused by `check`.
        BlockSize {
            rows: usize::from(self.block_rows).max(1),
            cols: usize::from(self.block_cols).max(1),
        }
    }

    fn planes(&self, cols: usize) -> PerPlane<PlaneLayout> {
        let block = self.block();
        let row_bytes = cols * self.element.bits() / 8;
        let scales = PlaneLayout {
            row_bytes: cols.div_ceil(block.cols) * self.scale.bytes(),
            block_rows: block.rows,
            align: 4,
        };
        [PlaneLayout { row_bytes, block_rows: 1, align: 16 }, scales, PlaneLayout::NONE]
    }

    fn check(&self, cols: usize) -> Result<(), Error> {
        let &Self { element, block_rows, block_cols, .. } = self;
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
        Ok(())
    }

    fn activations(&self) -> ActivationType {
        // Twice an E2M1 element is an integer. A group of int8 activations has one scale.
        match (self.element, self.block_cols) {
            (Element::E2M1, 16 | 32 | 64 | 128) => ActivationType::Int8,
            _ => ActivationType::F32,
        }
    }

    fn dequantize(&self, [elements, scales, _]: PerPlane<&[u8]>, out: &mut [f32]) {
        let block = self.block().cols;
        for (i, o) in out.iter_mut().enumerate() {
            *o = self.element.get(elements, i) * self.scale.get(scales, i / block);
        }
    }

    fn random(&self, [elements, scales, _]: PerPlane<&mut [u8]>, next: &mut dyn FnMut() -> u64) {
        elements.iter_mut().for_each(|byte| *byte = next() as u8);
        if self.element == Element::E4M3 {
            // No NaN, and no exponents so large that a few weights dominate a sum.
            elements.iter_mut().for_each(|byte| *byte = *byte & 0x80 | ((*byte & 0x7f) % 0x60));
        }
        for scale in scales.chunks_exact_mut(self.scale.bytes()) {
            match self.scale {
                BlockScale::E8M0 => scale[0] = 123 + (next() % 3) as u8,
                BlockScale::E4M3 => scale[0] = 36 + (next() % 16) as u8,
                BlockScale::Plain(scalar) => {
                    scalar.put(0.2 + 0.1 * random_value(next), scale);
                }
            }
        }
    }
}
