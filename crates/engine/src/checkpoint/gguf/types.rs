//! Types of tensors and names of recipes, by their numbers in GGUF.

use moeflux_compute::{BlockType, Scalar};

/// Type of a tensor: the weights of a block, and its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TensorType {
    /// Name as ggml spells it.
    pub(super) name: &'static str,
    /// Elements of a block.
    pub(super) weights: u64,
    /// Bytes of a block.
    pub(super) bytes: u64,
}

impl From<Scalar> for TensorType {
    fn from(scalar: Scalar) -> Self {
        Self { name: scalar.name(), weights: 1, bytes: scalar.bytes() as u64 }
    }
}

impl From<BlockType> for TensorType {
    fn from(kind: BlockType) -> Self {
        let (weights, bytes) = (kind.block_weights() as u64, kind.block_bytes() as u64);
        Self { name: kind.type_name(), weights, bytes }
    }
}

impl TensorType {
    const fn plain(name: &'static str, bytes: u64) -> Self {
        Self { name, weights: 1, bytes }
    }

    /// The type with a number.
    ///
    /// # Errors
    /// There is no such type, or it was removed; the text completes "its type NUMBER".
    pub(super) fn from_number(number: u32) -> Result<Self, String> {
        Ok(match number {
            0 => Scalar::F32.into(),
            1 => Scalar::F16.into(),
            2 => BlockType::Q4_0.into(),
            3 => BlockType::Q4_1.into(),
            6 => BlockType::Q5_0.into(),
            7 => BlockType::Q5_1.into(),
            8 => BlockType::Q8_0.into(),
            10 => BlockType::Q2K.into(),
            11 => BlockType::Q3K.into(),
            12 => BlockType::Q4K.into(),
            13 => BlockType::Q5K.into(),
            14 => BlockType::Q6K.into(),
            16 => BlockType::IQ2XXS.into(),
            17 => BlockType::IQ2XS.into(),
            18 => BlockType::IQ3XXS.into(),
            19 => BlockType::IQ1S.into(),
            20 => BlockType::IQ4NL.into(),
            21 => BlockType::IQ3S.into(),
            22 => BlockType::IQ2S.into(),
            23 => BlockType::IQ4XS.into(),
            24 => Self::plain("I8", 1),
            25 => Self::plain("I16", 2),
            26 => Self::plain("I32", 4),
            27 => Self::plain("I64", 8),
            28 => Self::plain("F64", 8),
            29 => BlockType::IQ1M.into(),
            30 => Scalar::BF16.into(),
            34 => BlockType::TQ1_0.into(),
            35 => BlockType::TQ2_0.into(),
            39 => BlockType::MXFP4.into(),
            40 => BlockType::NVFP4.into(),
            41 => BlockType::Q1_0.into(),
            42 => BlockType::Q2_0.into(),
            4 | 5 | 31..=33 | 36..=38 => {
                let name = match number {
                    4 => "Q4_2",
                    5 => "Q4_3",
                    31 => "Q4_0_4_4",
                    32 => "Q4_0_4_8",
                    33 => "Q4_0_8_8",
                    36 => "IQ4_NL_4_4",
                    37 => "IQ4_NL_4_8",
                    _ => "IQ4_NL_8_8",
                };
                return Err(format!("({name}) was removed from GGUF: take a newer file"));
            }
            9 | 15 => return Err("is for activations only: the file is damaged".into()),
            _ => {
                return Err("is not one of llama.cpp's; forks have types of other numbers: take \
                            a file for llama.cpp"
                    .into());
            }
        })
    }
}

/// Names of `general.file_type`, by number. The types of tensors may differ from it.
const RECIPES: [(u64, &str); 37] = [
    (0, "F32"),
    (1, "F16"),
    (2, "Q4_0"),
    (3, "Q4_1"),
    (7, "Q8_0"),
    (8, "Q5_0"),
    (9, "Q5_1"),
    (10, "Q2_K"),
    (11, "Q3_K_S"),
    (12, "Q3_K_M"),
    (13, "Q3_K_L"),
    (14, "Q4_K_S"),
    (15, "Q4_K_M"),
    (16, "Q5_K_S"),
    (17, "Q5_K_M"),
    (18, "Q6_K"),
    (19, "IQ2_XXS"),
    (20, "IQ2_XS"),
    (21, "Q2_K_S"),
    (22, "IQ3_XS"),
    (23, "IQ3_XXS"),
    (24, "IQ1_S"),
    (25, "IQ4_NL"),
    (26, "IQ3_S"),
    (27, "IQ3_M"),
    (28, "IQ2_S"),
    (29, "IQ2_M"),
    (30, "IQ4_XS"),
    (31, "IQ1_M"),
    (32, "BF16"),
    (36, "TQ1_0"),
    (37, "TQ2_0"),
    (38, "MXFP4_MOE"),
    (39, "NVFP4"),
    (40, "Q1_0"),
    (41, "Q2_0"),
    (1024, "guessed"),
];

/// Name of a value of `general.file_type`.
pub(super) fn recipe(number: u64) -> String {
    let known = RECIPES.iter().find(|(known, _)| *known == number);
    known.map_or_else(|| format!("number {number}"), |(_, name)| (*name).into())
}
