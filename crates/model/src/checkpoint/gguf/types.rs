//! Types of tensors and names of recipes, by their numbers in GGUF.

use moeflux_ops::{BlockType, Scalar};

/// Number in GGUF of the type that ggml gives a name.
pub fn type_number(name: &str) -> Option<u32> {
    (0..=LAST_TYPE).find(|n| TensorType::from_number(*n).is_ok_and(|kind| kind.name == name))
}

/// The value of `general.file_type` with a name.
pub fn recipe_number(name: &str) -> Option<u64> {
    RECIPES.iter().find(|known| known.name == name).map(|known| known.number)
}

/// Number of the newest type.
const LAST_TYPE: u32 = 42;

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

/// A value of `general.file_type`.
struct Recipe {
    number: u64,
    name: &'static str,
}

const fn recipe_row(number: u64, name: &'static str) -> Recipe {
    Recipe { number, name }
}

/// The values of `general.file_type`. The types of tensors may differ from it.
const RECIPES: [Recipe; 37] = [
    recipe_row(0, "F32"),
    recipe_row(1, "F16"),
    recipe_row(2, "Q4_0"),
    recipe_row(3, "Q4_1"),
    recipe_row(7, "Q8_0"),
    recipe_row(8, "Q5_0"),
    recipe_row(9, "Q5_1"),
    recipe_row(10, "Q2_K"),
    recipe_row(11, "Q3_K_S"),
    recipe_row(12, "Q3_K_M"),
    recipe_row(13, "Q3_K_L"),
    recipe_row(14, "Q4_K_S"),
    recipe_row(15, "Q4_K_M"),
    recipe_row(16, "Q5_K_S"),
    recipe_row(17, "Q5_K_M"),
    recipe_row(18, "Q6_K"),
    recipe_row(19, "IQ2_XXS"),
    recipe_row(20, "IQ2_XS"),
    recipe_row(21, "Q2_K_S"),
    recipe_row(22, "IQ3_XS"),
    recipe_row(23, "IQ3_XXS"),
    recipe_row(24, "IQ1_S"),
    recipe_row(25, "IQ4_NL"),
    recipe_row(26, "IQ3_S"),
    recipe_row(27, "IQ3_M"),
    recipe_row(28, "IQ2_S"),
    recipe_row(29, "IQ2_M"),
    recipe_row(30, "IQ4_XS"),
    recipe_row(31, "IQ1_M"),
    recipe_row(32, "BF16"),
    recipe_row(36, "TQ1_0"),
    recipe_row(37, "TQ2_0"),
    recipe_row(38, "MXFP4_MOE"),
    recipe_row(39, "NVFP4"),
    recipe_row(40, "Q1_0"),
    recipe_row(41, "Q2_0"),
    recipe_row(1024, "guessed"),
];

/// Name of a value of `general.file_type`.
pub(super) fn recipe(number: u64) -> String {
    let known = RECIPES.iter().find(|known| known.number == number);
    known.map_or_else(|| format!("number {number}"), |known| known.name.into())
}
