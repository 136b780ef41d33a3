//! Recipes: which type each tensor of a GGUF file has.

use std::str::FromStr;

use moeflux_base::{Error, ToolError};
use moeflux_model::seam::recipe_number;
use moeflux_ops::{BlockType, Scalar};

use crate::values::quantizer;

/// Types of a file's tensors, by a name of `general.file_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufRecipe {
    kind: BlockType,
    /// Type of some values and down projections, in the layers that llama.cpp's `_M` mixes choose.
    finer: Option<BlockType>,
}

/// Mixes of two types.
const MIXES: [(&str, BlockType, BlockType); 3] = [
    ("Q3_K_M", BlockType::Q3K, BlockType::Q4K),
    ("Q4_K_M", BlockType::Q4K, BlockType::Q6K),
    ("Q5_K_M", BlockType::Q5K, BlockType::Q6K),
];

/// Ending of recipes without a finer type.
const SMALL: &str = "_S";

impl GgufRecipe {
    /// Names of all recipes.
    pub fn names() -> Vec<String> {
        let types = BlockType::ALL.map(|kind| kind.type_name());
        let mixes = MIXES.map(|(name, ..)| name);
        types.into_iter().chain(mixes).map(str::to_lowercase).collect()
    }

    /// Value of `general.file_type`.
    pub(super) fn number(self) -> Option<u64> {
        let name = self.name();
        [name, &format!("{name}{SMALL}"), &format!("{name}_MOE")]
            .into_iter()
            .find_map(recipe_number)
    }

    /// Name as in GGUF.
    pub(super) fn name(self) -> &'static str {
        let mix =
            MIXES.iter().find(|(_, kind, finer)| (*kind, Some(*finer)) == (self.kind, self.finer));
        mix.map_or(self.kind.type_name(), |(name, ..)| name)
    }

    /// Type of a matrix of `cols` columns; plain if no type has rows of so few.
    pub(super) fn matrix_type(self, tensor: &TensorRole<'_>, cols: u64) -> MatrixType {
        let kind = match *tensor {
            TensorRole::Router => return MatrixType::Plain(Scalar::F32),
            TensorRole::Embedding => embedding_type(self.kind),
            TensorRole::Head => BlockType::Q6K,
            TensorRole::InLayer { name, layer, layers } => {
                let is_finer = name.starts_with("ffn_down") || name.starts_with("attn_v.");
                let chosen =
                    layer < layers / 8 || layer >= 7 * layers / 8 || (layer - layers / 8) % 3 == 2;
                self.finer.filter(|_| is_finer && chosen).unwrap_or(self.kind)
            }
        };
        MatrixType::for_rows(kind, cols)
    }
}

/// Role of a matrix.
pub(super) enum TensorRole<'a> {
    /// A router, or the gate of a shared expert.
    Router,
    Embedding,
    Head,
    /// `attn_v.weight` of a layer.
    InLayer {
        name: &'a str,
        layer: u64,
        layers: u64,
    },
}

/// Type of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MatrixType {
    Blocks(BlockType),
    Plain(Scalar),
}

impl MatrixType {
    /// The type, or the one that llama.cpp takes for rows that are not whole blocks of it.
    fn for_rows(kind: BlockType, cols: u64) -> Self {
        let fits = |kind: &BlockType| cols.is_multiple_of(kind.block_weights() as u64);
        let kinds = [kind, fallback(kind), BlockType::Q8_0];
        kinds.into_iter().find(fits).map_or(Self::Plain(Scalar::F16), Self::Blocks)
    }
}

/// The type of embeddings beside experts of a type. Rows of random types have no mean, which
/// embeddings need.
fn embedding_type(kind: BlockType) -> BlockType {
    match quantizer(kind) {
        Some(_) => kind,
        None => BlockType::Q4K,
    }
}

/// The type of shorter blocks in place of one with 256 weights.
fn fallback(kind: BlockType) -> BlockType {
    match kind {
        BlockType::Q4K => BlockType::Q5_0,
        BlockType::Q5K => BlockType::Q5_1,
        BlockType::Q6K => BlockType::Q8_0,
        BlockType::Q2K | BlockType::Q3K | BlockType::TQ1_0 | BlockType::TQ2_0 => BlockType::Q4_0,
        _ => BlockType::IQ4NL,
    }
}

impl FromStr for GgufRecipe {
    type Err = Error;

    /// A type (`q4_k`), or a mix (`q4_k_m`).
    fn from_str(text: &str) -> Result<Self, Error> {
        let name = text.to_uppercase();
        if let Some((_, kind, finer)) = MIXES.into_iter().find(|(mix, ..)| *mix == name) {
            return Ok(Self { kind, finer: Some(finer) });
        }
        let kind = [name.as_str(), name.strip_suffix(SMALL).unwrap_or("")]
            .into_iter()
            .find_map(BlockType::from_type_name);
        let kind = kind.ok_or_else(|| ToolError::UnknownRecipe {
            name: text.to_owned(),
            known: Self::names().join(", "),
        })?;
        Ok(Self { kind, finer: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recipes_have_the_types_that_llama_cpp_gives_them() {
        let recipe = |name: &str| name.parse::<GgufRecipe>().unwrap();
        let down = |layer| TensorRole::InLayer { name: "ffn_down_exps.weight", layer, layers: 48 };
        let finer: Vec<_> = (0..48)
            .filter(|layer| {
                let kind = recipe("q4_k_m").matrix_type(&down(*layer), 768);
                kind == MatrixType::Blocks(BlockType::Q6K)
            })
            .collect();
        let expected =
            (0..48).filter(|i| *i < 6 || *i >= 42 || (*i - 6) % 3 == 2).collect::<Vec<u64>>();
        assert_eq!(finer, expected);
        let kind = |name: &str, cols| recipe(name).matrix_type(&down(20), cols);
        assert_eq!(kind("q4_k", 2880), MatrixType::Blocks(BlockType::Q5_0));
        assert_eq!(kind("iq2_xxs", 2880), MatrixType::Blocks(BlockType::IQ4NL));
        assert_eq!(kind("q4_k_s", 512), MatrixType::Blocks(BlockType::Q4K));
        assert_eq!(kind("q4_0", 40), MatrixType::Plain(Scalar::F16));
        for name in GgufRecipe::names() {
            assert!(recipe(&name).number().is_some(), "{name}");
        }
        let unknown = "q9_x".parse::<GgufRecipe>().unwrap_err().to_string();
        assert!(unknown.contains("q9_x") && unknown.contains("q4_k_m"), "{unknown}");
    }
}
