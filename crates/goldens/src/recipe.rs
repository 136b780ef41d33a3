//! `weights.json`: random tensors from a seed. `scripts/seeded.py` writes it and describes it.

use std::{collections::BTreeMap, fs, path::Path};

use moeflux_base::SplitMix64;
use serde::Deserialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::encode::{Float, hex};

const INDEX: &str = "model.safetensors.index.json";

/// The weights of a checkpoint.
#[derive(Deserialize)]
pub(crate) struct Recipe {
    seed: u64,
    files: Vec<ShardRecipe>,
}

/// One safetensors file.
#[derive(Deserialize)]
struct ShardRecipe {
    name: String,
    sha256: String,
    metadata: Option<Value>,
    /// The tensors in the order of their bytes, as indices of their sorted names. Without it their
    /// bytes are in the order of the names.
    order: Option<Vec<usize>>,
    tensors: NameTree,
}

/// Tensors by the parts of their names.
#[derive(Deserialize)]
#[serde(untagged)]
enum NameTree {
    Tensor(String),
    Module(BTreeMap<String, NameTree>),
}

struct TensorRecipe {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    fill: Fill,
    /// 1 or -1: multiplied with the value and with the random sign of the module.
    sign: Option<i64>,
    /// dtype of the elements, if they are packed in wider ones.
    code: Option<String>,
}

/// The contents of a tensor.
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

    /// Writes the weights into a folder, and an index of several files.
    ///
    /// # Panics
    ///
    /// If their digests are not those of the recipe.
    pub(crate) fn write(&self, folder: &Path) {
        let mut index = BTreeMap::new();
        for shard in &self.files {
            let tensors = shard.tensors();
            let bytes = shard.bytes(&tensors, self.seed);
            let digest = hex(&Sha256::digest(&bytes));
            assert_eq!(digest, shard.sha256, "{}: {}", folder.display(), shard.name);
            fs::write(folder.join(&shard.name), bytes).unwrap();
            index.extend(tensors.into_iter().map(|tensor| (tensor.name, &shard.name)));
        }
        if self.files.len() > 1 {
            let index = json!({"weight_map": index}).to_string();
            fs::write(folder.join(INDEX), index).unwrap();
        }
    }
}

impl ShardRecipe {
    /// The tensors in the order of their bytes.
    fn tensors(&self) -> Vec<TensorRecipe> {
        let mut sorted = BTreeMap::new();
        self.tensors.collect("", &mut sorted);
        let names: Vec<_> = sorted.iter().collect();
        let order = self.order.clone().unwrap_or_else(|| (0..names.len()).collect());
        let tensors = order.into_iter().map(|i| TensorRecipe::read(names[i].0, names[i].1));
        tensors.collect()
    }

    /// The file: its header has the names in order and no padding, so tensors are not aligned.
    fn bytes(&self, tensors: &[TensorRecipe], seed: u64) -> Vec<u8> {
        let (mut header, mut data) = (BTreeMap::new(), Vec::new());
        if let Some(metadata) = &self.metadata {
            header.insert("__metadata__", metadata.clone());
        }
        for tensor in tensors {
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

impl NameTree {
    /// Adds the tensors and their descriptions, `prefix` before their names.
    fn collect<'a>(&'a self, prefix: &str, tensors: &mut BTreeMap<String, &'a str>) {
        match self {
            Self::Tensor(text) => {
                tensors.insert(prefix.to_owned(), text);
            }
            Self::Module(children) => {
                let dot = if prefix.is_empty() { "" } else { "." };
                for (name, child) in children {
                    child.collect(&format!("{prefix}{dot}{name}"), tensors);
                }
            }
        }
    }
}

impl TensorRecipe {
    /// A tensor by its description: dtype and shape, then what fills it.
    fn read(name: &str, text: &str) -> Self {
        let mut words = text.split(' ');
        let (dtype, shape) = words.next().unwrap().split_once('[').unwrap();
        let shape = serde_json::from_str(&format!("[{shape}")).unwrap();
        let fill = match words.next().unwrap() {
            "words" => Fill::Words,
            "values" => Fill::Values(words.by_ref().map(|v| v.parse().unwrap()).collect()),
            range => {
                let (lowest, rest) = range.split_once("..").unwrap();
                let (highest, exponent) = rest.split_once('p').unwrap();
                let [lowest, highest] = [lowest, highest].map(|v| v.parse().unwrap());
                Fill::Uniform(lowest, highest, exponent.parse().unwrap())
            }
        };
        let (mut sign, mut code) = (None, None);
        while let Some(word) = words.next() {
            match word {
                "+" => sign = Some(1),
                "-" => sign = Some(-1),
                "as" => code = words.next().map(str::to_owned),
                _ => panic!("{name}: {text}"),
            }
        }
        Self { name: name.to_owned(), dtype: dtype.to_owned(), shape, fill, sign, code }
    }

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
