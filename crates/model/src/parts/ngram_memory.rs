//! N-gram memory of `qwen4_exp`: keys of config.json and tensors of a layer's `ple` module.

use moeflux_base::Error;
use serde::Deserialize;
use serde_json::Value;

use super::{
    config::{Require, config_error},
    scope::{NormWeights, Scope},
};
use crate::{
    blueprint::NgramMemoryBlueprint,
    checkpoint::{RowShard, RowTable, row_table::ShardRequest},
    ngram::{NgramConstants, NgramHash, NgramSettings},
};

/// Most shards of a table.
const MAX_SHARDS: u64 = 1 << 16;

/// Keys of n-gram memories in config.json, with the defaults of transformers.
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct NgramConfig {
    /// Layers with a memory, from 1 on.
    #[serde(default)]
    ple_layer_ids: Option<Vec<usize>>,
    /// Elements of a token's rows; by default `hidden_size`.
    ple_embed_dim: Option<usize>,
    #[serde(default = "four")]
    ple_conv_kernel_size: usize,
    #[serde(default = "three")]
    ngram_size: usize,
    #[serde(default = "eight")]
    heads_per_ngram: usize,
    #[serde(default = "base")]
    ngram_vocab_size_base: u64,
    #[serde(default = "divisor")]
    make_ngram_vocab_size_divisible_by: u64,
    #[serde(default = "parts")]
    split_ngram_parts: u64,
    #[serde(default = "seed")]
    seed: u64,
    eos_token_id: Option<TokenIds>,
    /// Constants of GGUF, which has the table in a tensor of the model.
    gguf_ngram_constants: Option<NgramConstants>,
}

/// Name of the table of a source with constants, without `.weight`.
const MODEL_TABLE: &str = "model.ngram_embedding";

/// An id, or several.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum TokenIds {
    One(u32),
    Several(Vec<u32>),
}

const fn four() -> usize {
    4
}
const fn three() -> usize {
    3
}
const fn eight() -> usize {
    8
}
const fn base() -> u64 {
    20_000_000
}
const fn divisor() -> u64 {
    128
}
const fn parts() -> u64 {
    512
}
const fn seed() -> u64 {
    1234
}

/// Shape of the model around a memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NgramModel {
    pub(crate) vocab: usize,
    pub(crate) hidden: usize,
    /// Residual streams.
    pub(crate) streams: usize,
}

/// The largest `ngram_vocab_size_base` up to that of a config with which all tables have at most
/// `rows` rows together, and the number of their rows with that of the config. `None` without
/// tables, or if no base is small enough.
pub fn base_for_rows(text_config: &Value, rows: u64) -> Option<NgramBase> {
    let config = NgramConfig::deserialize(text_config).ok()?;
    let vocab = text_config["vocab_size"].as_u64()? as usize;
    let layers = config.layers().len();
    let total = |base: u64| {
        let tables = (0..layers).map(|table| {
            let hash = NgramHash::new(&NgramSettings { base, ..config.settings(vocab, 0, table) });
            hash.ok().map(|hash| hash.table_rows())
        });
        tables.sum::<Option<u64>>().filter(|rows| *rows > 0)
    };
    let published = total(config.ngram_vocab_size_base)?;
    let fits = |base: u64| total(base).is_some_and(|of_base| of_base <= rows);
    let (mut base, mut beyond) = (1, config.ngram_vocab_size_base.saturating_add(1));
    while base + 1 < beyond {
        let middle = base.midpoint(beyond);
        if fits(middle) {
            base = middle;
        } else {
            beyond = middle;
        }
    }
    let rows = total(base).filter(|of_base| *of_base <= rows)?;
    Some(NgramBase { base, rows, published })
}

/// Result of [`base_for_rows`].
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramBase {
    pub base: u64,
    pub rows: u64,
    /// Rows with the base of the config.
    pub published: u64,
}

impl NgramConfig {
    /// Layers with a memory, from 1 on.
    fn layers(&self) -> Vec<usize> {
        let mut layers = self.ple_layer_ids.clone().unwrap_or_default();
        layers.sort_unstable();
        layers.dedup();
        layers
    }

    fn settings(&self, vocab: usize, eos: u32, table: usize) -> NgramSettings {
        NgramSettings {
            vocab,
            ngram_size: self.ngram_size,
            heads_per_ngram: self.heads_per_ngram,
            base: self.ngram_vocab_size_base,
            divisor: self.make_ngram_vocab_size_divisible_by,
            seed: self.seed,
            eos,
            table,
        }
    }

    /// Index of a layer among those with a memory; `None` for one without.
    pub(crate) fn table_of(&self, layer: usize) -> Option<usize> {
        self.layers().iter().position(|id| *id == layer + 1)
    }

    /// The memory of the module `ple`, with the table `index` of the model.
    ///
    /// # Errors
    /// A key or tensor does not fit, or the checkpoint's constants are not those of the hash.
    pub(crate) fn memory(
        &self,
        ple: &Scope<'_>,
        model: NgramModel,
        index: usize,
    ) -> Result<NgramMemoryBlueprint, Error> {
        let NgramModel { vocab, hidden, streams } = model;
        let eos = match &self.eos_token_id {
            Some(TokenIds::One(id)) => Some(*id),
            Some(TokenIds::Several(ids)) => ids.first().copied(),
            None => None,
        };
        let eos = Require(ple.source).named("eos_token_id", eos, "the hash of n-grams")?;
        let wrong = |problem: String| config_error(ple.source, problem);
        let settings = self.settings(vocab, eos, index);
        let hash = match &self.gguf_ngram_constants {
            Some(constants) => NgramHash::of_constants(&settings, constants),
            None => NgramHash::new(&settings),
        };
        let hash = hash.map_err(wrong)?;
        let embedding = self.ple_embed_dim.unwrap_or(hidden);
        let heads = hash.rows_per_token();
        if embedding == 0 || !embedding.is_multiple_of(heads) {
            return Err(wrong(format!("ple_embed_dim is {embedding}, not a multiple of {heads}")));
        }
        let taps = self.ple_conv_kernel_size;
        if !(2..=64).contains(&taps) {
            let problem = format!("ple_conv_kernel_size is {taps}, from 2 to 64 is supported");
            return Err(wrong(problem));
        }
        let rows = ple.child("ple_embedding");
        let module = match self.gguf_ngram_constants {
            Some(_) => Scope::new(rows.source, MODEL_TABLE.to_owned(), NormWeights::OnePlus),
            None => rows.child("ngram_embedding"),
        };
        let table = self.table(&module, &hash, embedding / heads)?;
        let constants = [
            ("layer_multipliers", hash.multipliers()),
            ("ngram_heads_offsets", hash.offsets()),
            ("ngram_heads_vocab_sizes", hash.sizes()),
        ];
        let has_tensors = self.gguf_ngram_constants.is_none();
        let constants = constants
            .into_iter()
            .filter(|_| has_tensors)
            .map(|(name, values)| rows.source.known_integers(&rows.path(name), values));
        let channels = streams * hidden;
        Ok(NgramMemoryBlueprint {
            constants: constants.collect::<Result<_, _>>()?,
            hash,
            table,
            key_proj: ple.matrix("key_proj", channels, embedding)?,
            value_proj: ple.matrix("value_proj", hidden, embedding)?,
            norm_key: ple.norm("norm_key", channels)?,
            norm_query: ple.norm("norm_query", channels)?,
            norm_conv: ple.norm("norm_conv", channels)?,
            conv: ple.array("conv1d.weight", &[channels, 1, taps])?,
            taps,
            dilation: self.ngram_size,
        })
    }

    /// The table: one tensor `weight`, or shards of equal numbers of rows, the last of which may
    /// have fewer.
    fn table(&self, module: &Scope<'_>, hash: &NgramHash, width: usize) -> Result<RowTable, Error> {
        let total = hash.table_rows();
        let is_split = module.has("shard_0.weight") || !module.has("weight");
        let parts = if is_split { self.split_ngram_parts } else { 1 };
        if parts == 0 || parts > MAX_SHARDS.min(total) {
            let problem = format!("split_ngram_parts is {parts}, from 1 to {MAX_SHARDS} is read");
            return Err(config_error(module.source, problem));
        }
        let each = total.div_ceil(parts);
        let table_scale = module.path("weight_scale");
        let parts = total.div_ceil(each);
        let shards = (0..parts).map(|i| {
            let name = match is_split {
                true => module.path(&format!("shard_{i}.weight")),
                false => module.path("weight"),
            };
            module.source.row_shard(&ShardRequest {
                name: &name,
                table_scale: &table_scale,
                first: i * each,
                rows: each.min(total - i * each),
                table_rows: total,
                part: i,
                parts,
                width,
            })
        });
        let shards = shards.collect::<Result<Vec<_>, Error>>()?;
        let differs = |shard: &&RowShard| shard.row_bytes() != shards[0].row_bytes();
        if let Some(other) = shards.iter().find(differs) {
            let problem = format!("its rows have another type than those of {}", shards[0].name);
            return Err(module.source.tensor_error(&other.name, &problem));
        }
        Ok(RowTable { width, shards })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn tables_shrink_to_the_rows_that_are_asked_for() {
        let published =
            json!({"vocab_size": 248_320, "ple_layer_ids": [2], "eos_token_id": 248_044});
        let shrunk = base_for_rows(&published, 1_000_000).unwrap();
        assert_eq!(shrunk.published, 320_001_536);
        assert!((990_000..=1_000_000).contains(&shrunk.rows), "{shrunk:?}");
        let all = base_for_rows(&published, u64::MAX).unwrap();
        assert_eq!((all.base, all.rows), (20_000_000, 320_001_536));
        assert_eq!(base_for_rows(&published, 100), None, "16 primes have more rows together");
        let two = json!({"vocab_size": 272, "ple_layer_ids": [4, 2, 2], "eos_token_id": [1]});
        assert!(base_for_rows(&two, 50_000).unwrap().rows <= 50_000);
        assert_eq!(base_for_rows(&json!({"vocab_size": 272}), 1000), None, "no tables");
    }

    #[test]
    fn layers_are_counted_from_one() {
        let config = NgramConfig::deserialize(&json!({"ple_layer_ids": [5, 2]})).unwrap();
        assert_eq!([0, 1, 4].map(|layer| config.table_of(layer)), [None, Some(0), Some(1)]);
    }
}
