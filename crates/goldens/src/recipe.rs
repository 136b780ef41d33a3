//! `weights.json`: random tensors from a seed. `scripts/seeded.py` writes it and describes it.

use std::{collections::BTreeMap, fs, path::Path};

use moeflux_compute::SplitMix64;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::{encode::Float, hex};

/// The weights of a checkpoint.
#[derive(Deserialize)]
pub(crate) struct Recipe {
    seed: u64,
    files: Vec<ShardRecipe>,
}

/// One safetensors file, its tensors in the order of their bytes.
#[derive(Deserialize)]
struct ShardRecipe {
    name: String,
    sha256: String,
    metadata: Option<Value>,
    tensors: Vec<TensorRecipe>,
}

#[derive(Deserialize)]
struct TensorRecipe {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    #[serde(flatten)]
    fill: Fill,
    /// 1 or -1: multiplied with the value and with the random sign of the module.
    sign: Option<i64>,
    /// dtype of the elements, if they are packed in wider ones.
    code: Option<String>,
}

/// The contents of a tensor.
#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
enum Fill {
    /// Lowest and highest of integers of equal probability, and the exponent of their factor 2^e.
    Uniform(i64, i64, i32),
    /// Random bits.
    Words,
    /// Integers.
    Values(Vec<i64>),
}

impl Recipe {
    pub(crate) fn read(json: &[u8]) -> Self {
        serde_json::from_slice(json).unwrap()
    }

    /// Writes the weights into a folder.
    ///
    /// # Panics
    ///
    /// If their digests are not those of the recipe.
    pub(crate) fn write(&self, folder: &Path) {
        for shard in &self.files {
            let bytes = shard.bytes(self.seed);
            let digest = hex(&Sha256::digest(&bytes));
            assert_eq!(digest, shard.sha256, "{}: {}", folder.display(), shard.name);
            fs::write(folder.join(&shard.name), bytes).unwrap();
        }
    }
}

impl ShardRecipe {
    /// The file: its header has the names in order and no padding, so tensors are not aligned.
    fn bytes(&self, seed: u64) -> Vec<u8> {
        let (mut header, mut data) = (BTreeMap::new(), Vec::new());
        if let Some(metadata) = &self.metadata {
            header.insert("__metadata__", metadata.clone());
        }
        for tensor in &self.tensors {
            let begin = data.len();
            tensor.append(seed, &mut data);
            let offsets = [begin, data.len()];
            let entry =
                json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets});
            header.insert(&tensor.name, entry);
        }
        let header = serde_json::to_vec(&header).unwrap();
        [&(header.len() as u64).to_le_bytes(), &header[..], &data].concat()
    }
}

impl TensorRecipe {
    /// Appends the tensor's bytes.
    fn append(&self, seed: u64, data: &mut Vec<u8>) {
        let end = data.len() + self.shape.iter().product::<usize>() * size(&self.dtype);
        let code = self.code.as_ref().unwrap_or(&self.dtype);
        let mut words = words(&self.name, seed);
        match &self.fill {
            Fill::Values(values) => {
                for value in values {
                    data.extend(&value.to_le_bytes()[..size(code)]);
                }
            }
            Fill::Words => {
                while data.len() < end {
                    let word = words.next_u64().to_le_bytes();
                    data.extend(&word[..(end - data.len()).min(8)]);
                }
            }
            Fill::Uniform(lowest, highest, exponent) => {
                let count = (highest - lowest + 1) as u64;
                let module = self.name.rsplit_once('.').map_or("", |(module, _)| module);
                let mut signs = self.sign.map(|sign| (sign, self::words(module, seed)));
                let float = Float::of_dtype(code);
                while data.len() < end {
                    let mut value = lowest + (((words.next_u64() >> 32) * count) >> 32) as i64;
                    if let Some((sign, random)) = &mut signs {
                        value *= *sign * (1 - 2 * (random.next_u64() >> 63) as i64);
                    }
                    let bits = float.map_or(value as u64, |float| float.bits(value, *exponent));
                    data.extend(&bits.to_le_bytes()[..size(code)]);
                }
            }
        }
        assert_eq!(data.len(), end, "{}", self.name);
    }
}

/// The random words of a tensor or module.
fn words(name: &str, seed: u64) -> SplitMix64 {
    let digest = Sha256::digest(name);
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    SplitMix64::new(u64::from_le_bytes(first) ^ seed)
}

/// Bytes of an element.
fn size(dtype: &str) -> usize {
    match dtype {
        "I64" => 8,
        "F32" | "U32" | "I32" => 4,
        "BF16" | "F16" => 2,
        "F8_E4M3" | "F8_E8M0" | "U8" | "I8" => 1,
        _ => panic!("dtype {dtype}"),
    }
}
