//! Weight formats as kernels take them: constants, bias codes, dispatch by blocks of 32 inputs.

use moeflux_ops::{
    Affine, BlockScale, BlockScaled, BlockType, Element, Format, MatrixShape, PerPlane, Scalar,
    ScaledBlocks,
};

use super::super::kernel::Constants;

/// Code of a scalar type in kernels.
const fn scalar_code(scalar: Scalar) -> u32 {
    match scalar {
        Scalar::F32 => 0,
        Scalar::F16 => 1,
        Scalar::BF16 => 2,
    }
}

/// `ELEMENT` of the first block type of ggml; the others follow in their order.
const FIRST_BLOCK_TYPE: u32 = 16;

/// `SCALE` of block types with an f32 for the whole matrix.
const ONE_FACTOR: u32 = 5;

/// `ELEMENT` of a block type.
const fn block_code(kind: BlockType) -> u32 {
    FIRST_BLOCK_TYPE + kind as u32
}

/// `BIAS_SCALAR` of expert kernels and `BIAS` of `gemm_tile.wgsl`: source of the bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BiasSource {
    /// Stored with the weights, as this type.
    Weights(Scalar),
    /// GEMV of experts: the previous value of `out`.
    Output,
    /// GEMM: a buffer of activations.
    Activations,
    None,
}

impl BiasSource {
    /// Source of the bias of a matrix in a slot.
    pub(crate) fn of_matrix(bias: Option<(Scalar, usize)>) -> Self {
        bias.map_or(Self::None, |(scalar, _)| Self::Weights(scalar))
    }

    /// Code in kernels.
    pub(crate) const fn code(self) -> u32 {
        match self {
            Self::Weights(scalar) => scalar_code(scalar),
            Self::Output | Self::Activations => 8,
            Self::None => 9,
        }
    }
}

impl Constants {
    /// Constants of `load_blocks.wgsl`, for products with `cols` inputs of rows of a matrix.
    #[must_use]
    pub(crate) fn blocks(self, shape: MatrixShape, cols: usize) -> Self {
        let [weights, scales, _] = shape.format.planes(shape.cols);
        let new = self
            .with("COLS", cols as u32)
            .with("ROW_BYTES", weights.row_bytes as u32)
            .with("ROW_SCALES", scales.row_bytes as u32);
        match shape.format {
            // The kernel reads no scale, but needs scale blocks of whole [`Block32`]s.
            Format::Plain(scalar) => new
                .with("ELEMENT", scalar_code(scalar))
                .with("BITS", 8 * scalar.bytes() as u32)
                .with("BLOCK_COLS", 32)
                .with("BLOCK_ROWS", 1)
                .with("SCALE", 0),
            format => new.format(format),
        }
    }

    /// Constants of `any_format.wgsl`.
    #[must_use]
    pub(crate) fn format(self, format: Format) -> Self {
        let (element, bits, cols, rows, scale) = match format {
            Format::Plain(scalar) => (scalar_code(scalar), 8 * scalar.bytes() as u32, 1, 1, 0),
            Format::Affine(Affine { bits, group, scale }) => {
                (3, bits.into(), group.into(), 1, scalar_code(scale))
            }
            Format::BlockScaled(BlockScaled { element, block_rows, block_cols, scale }) => {
                let (element, bits) = match element {
                    Element::E2M1 => (4, 4),
                    Element::E4M3 => (5, 8),
                };
                let scale = match scale {
                    BlockScale::Plain(scalar) => scalar_code(scalar),
                    BlockScale::E8M0 => 3,
                    BlockScale::E4M3 => 4,
                };
                (element, bits, block_cols.into(), block_rows.into(), scale)
            }
            Format::Blocks(kind) => (block_code(kind), 0, kind.block_weights() as u32, 1, 0),
            Format::ScaledBlocks(ScaledBlocks(kind)) => {
                (block_code(kind), 0, kind.block_weights() as u32, 1, ONE_FACTOR)
            }
        };
        let block_bytes = match format {
            Format::Blocks(kind) | Format::ScaledBlocks(ScaledBlocks(kind)) => {
                kind.block_bytes() as u32
            }
            _ => 0,
        };
        self.with("ELEMENT", element)
            .with("BITS", bits)
            .with("BLOCK_COLS", cols)
            .with("BLOCK_ROWS", rows)
            .with("SCALE", scale)
            .with("BLOCK_BYTES", block_bytes)
    }
}

/// How GEMV kernels read a format: in blocks of 32 inputs. Those with integers come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Block32 {
    /// 4-bit quants.
    Q4,
    /// 8-bit quants.
    Q8,
    /// Quants of another width.
    Q,
    /// 4-bit floats.
    E2m1,
    /// Types of ggml with a scale per 32 weights or fewer.
    SimpleBlocks,
    /// K-quants of ggml, and IQ4_XS.
    KQuants,
    /// IQ types of ggml with codebooks.
    Codebooks,
    /// Types of ggml of one or two bits with one scale.
    FewBits,
    /// f32, f16 or bf16.
    Plain,
    /// 8-bit floats.
    E4m3,
}

impl Block32 {
    /// Number of block types.
    pub(crate) const COUNT: usize = 10;

    /// Index of its kernel in arrays with one kernel for each block type, in this order.
    pub(crate) const fn index(self) -> usize {
        self as usize
    }

    /// Block type of a matrix shape; `None` if its rows are not whole blocks.
    pub(crate) fn for_shape(shape: MatrixShape) -> Option<Self> {
        let kind = match shape.format {
            Format::Plain(_) => Block32::Plain,
            Format::Affine(Affine { bits: 4, .. }) => Block32::Q4,
            Format::Affine(Affine { bits: 8, .. }) => Block32::Q8,
            Format::Affine(_) => Block32::Q,
            Format::Blocks(kind) => Self::for_block_type(kind),
            // Weights are read one at a time.
            Format::ScaledBlocks(_) => return None,
            Format::BlockScaled(BlockScaled { element, block_cols, .. }) => {
                let whole = block_cols.is_multiple_of(32);
                match element {
                    // The halves of a block may have separate scales.
                    Element::E2M1 if whole || block_cols == 16 => Block32::E2m1,
                    Element::E4M3 if whole => Block32::E4m3,
                    _ => return None,
                }
            }
        };
        shape.cols.is_multiple_of(32).then_some(kind)
    }

    const fn for_block_type(kind: BlockType) -> Self {
        match kind {
            BlockType::Q4_0
            | BlockType::Q4_1
            | BlockType::Q5_0
            | BlockType::Q5_1
            | BlockType::Q8_0
            | BlockType::IQ4NL
            | BlockType::MXFP4
            | BlockType::NVFP4 => Self::SimpleBlocks,
            BlockType::Q2K
            | BlockType::Q3K
            | BlockType::Q4K
            | BlockType::Q5K
            | BlockType::Q6K
            | BlockType::IQ4XS => Self::KQuants,
            BlockType::IQ2XXS
            | BlockType::IQ2XS
            | BlockType::IQ3XXS
            | BlockType::IQ1S
            | BlockType::IQ3S
            | BlockType::IQ2S
            | BlockType::IQ1M => Self::Codebooks,
            BlockType::TQ1_0 | BlockType::TQ2_0 | BlockType::Q1_0 | BlockType::Q2_0 => {
                Self::FewBits
            }
        }
    }

    /// Block type of a matrix whose planes start at these byte offsets; `None` also if they are not
    /// aligned as the kernels require.
    pub(crate) fn for_planes(shape: MatrixShape, offsets: PerPlane<usize>) -> Option<Self> {
        let mut planes = shape.format.planes(shape.cols).into_iter().zip(offsets);
        let aligned = planes.all(|(plane, offset)| offset.is_multiple_of(plane.align));
        Self::for_shape(shape).filter(|_| aligned)
    }

    /// Bytes of the unit in which offsets of weights are given: `UNIT_BYTES`.
    pub(crate) const fn load_bytes(self) -> usize {
        match self {
            Self::Q => 4,
            Self::SimpleBlocks | Self::KQuants | Self::Codebooks | Self::FewBits => 1,
            Self::Q4 | Self::Q8 | Self::E2m1 | Self::Plain | Self::E4m3 => 16,
        }
    }

    /// Whether integer activations can be used: weights are integers times their scale.
    pub(crate) const fn is_integer(self) -> bool {
        !matches!(self, Self::Plain | Self::E4m3)
    }
}
