//! Checkpoints of random weights with the shapes of published models, to test and measure with.
//!
//! The layout is the one that mlx-lm publishes: affine weights of 4 bits in groups of 64, routers and gates of
//! shared experts of 8 bits or not quantised, scales and biases in bf16, experts stacked, in MXFP4 where they were
//! trained so, shards of up to 5 GiB with an index. Weights have mean zero, and the residual stream keeps a sane size through all layers, so text, routing and logits behave
//! like a model's. Sampled text is printable ASCII and never ends by itself.
//!
//! To load a cut `qwen3_5_moe` in mlx-lm, keep at least one layer of full attention: four of the published models.

mod arch;
mod fields;
mod module;
mod parts;
mod presets;
mod tokenizer;
mod values;
mod write;

#[cfg(test)]
mod tests;

use serde_json::{Map, Value, json};

pub use presets::{Preset, presets};
pub use write::{Summary, write};

use crate::base::error::Error;
use arch::Routing;
use module::Tensor;

/// What `--skew` does, for a command's help.
pub const SKEW_HELP: &str = "\
How unevenly experts are chosen. 0: all equally often. 1: as in trained models with 512 experts, k = 10: an LRU
cache per layer hits about 47, 63, 67 and 72 % with 16, 32, 64 and 128 slots, and consecutive tokens share a
third of their experts. Above 1 a few experts serve nearly every token. Only the routers differ.";

/// The largest `skew`.
const MAX_SKEW: f64 = 8.0;

/// Bytes of a shard, as mlx-lm cuts them.
const SHARD: u64 = 5 << 30;

/// Lists in configs that have an entry for each layer.
const LAYER_LISTS: [&str; 4] =
    ["layer_types", "attn_type_list", "indexer_types", "mlp_layer_types"];

/// A key that published configs do not have, and that is not written: latent attention keeps `kv_b_proj` whole, as in
/// older exports, where newer ones split it into `embed_q` and `unembed_out`.
const KV_B_PROJ: &str = "synth_kv_b_proj";

/// Which checkpoint to make.
#[derive(Clone, Debug)]
pub struct Options {
    /// A `config.json` of a supported architecture: [`Preset::config`], or any other. With `"synth_kv_b_proj": true`,
    /// which is not written, latent attention has its older layout.
    pub config: Value,
    /// Keep only the first layers. They are the same as in the whole model.
    pub layers: Option<usize>,
    /// The same seed gives the same bytes.
    pub seed: u64,
    /// 0: every expert is chosen equally often; 1: as in trained models; see [`SKEW_HELP`].
    pub skew: f64,
}

impl Options {
    /// All layers, seed 0, no skew.
    pub fn new(config: Value) -> Self {
        Options { config, layers: None, seed: 0, skew: 0.0 }
    }
}

/// What will be written.
#[derive(Clone, Debug)]
pub struct Plan {
    tensors: Vec<Tensor>,
    config: Value,
    max_positions: usize,
}

/// A tensor of a [`Plan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedTensor<'a> {
    /// Its name in the checkpoint.
    pub name: &'a str,
    /// Element type as safetensors spells it: `U32` (packed quants), `U8` (their scales), `BF16` or
    /// `F32`.
    pub dtype: &'static str,
    /// Its shape; packed quants count in `u32`.
    pub shape: &'a [u64],
    /// Its size.
    pub bytes: u64,
}

impl Plan {
    /// All tensors, in the order in which they are written.
    pub fn tensors(&self) -> impl Iterator<Item = PlannedTensor<'_>> {
        self.tensors.iter().map(|t| PlannedTensor {
            name: &t.name,
            dtype: t.dtype,
            shape: &t.shape,
            bytes: t.bytes,
        })
    }

    /// Bytes of all tensors. Headers, index, config and tokenizer come on top, a few megabytes at most.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes).sum()
    }

    /// The `config.json` that is written.
    pub fn config(&self) -> &Value {
        &self.config
    }
}

/// Lists the tensors of the checkpoint that `options` ask for.
///
/// # Errors
/// The architecture is not supported (the error lists those that are), a number in the config is missing, absurd or
/// does not fit the others, there are fewer layers than asked for, or the skew is no number from 0 to 8.
pub fn plan(options: &Options) -> Result<Plan, Error> {
    if !(0.0..=MAX_SKEW).contains(&options.skew) {
        return Err(Error::Input(format!(
            "a skew of {} is not within 0 and {MAX_SKEW}",
            options.skew
        )));
    }
    let Value::Object(mut config) = options.config.clone() else {
        return Err(Error::Input("config: it is not a JSON object".into()));
    };
    if let Some(layers) = options.layers {
        edit_text_config(&mut config, |text| cut_layers(text, layers))?;
    }
    let routing = Routing { seed: options.seed, skew: options.skew };
    let (modules, all) = arch::modules(&config, routing)?;
    let mut quantization = all.setting();
    for (module, quant) in
        modules.iter().filter_map(|m| Some((m, m.quant().filter(|q| *q != all)?)))
    {
        quantization[&module.path] = quant.setting_among(all);
    }
    let mut tensors = Vec::new();
    let mut total = 0u64;
    for module in modules {
        for tensor in module.tensors(options.seed)? {
            total = total.checked_add(tensor.bytes).filter(|n| *n < 1 << 60).ok_or_else(|| {
                Error::Input(
                    "config: the model is too large to be addressed; are its sizes right?".into(),
                )
            })?;
            tensors.push(tensor);
        }
    }
    let max_positions = arch::text_config(&config)
        .get("max_position_embeddings")
        .and_then(Value::as_u64)
        .unwrap_or(4096);
    finish_config(&mut config, &quantization);
    Ok(Plan { tensors, config: Value::Object(config), max_positions: max_positions as usize })
}

fn edit_text_config<T>(
    config: &mut Map<String, Value>,
    edit: impl FnOnce(&mut Map<String, Value>) -> T,
) -> T {
    match config.get_mut("text_config") {
        Some(Value::Object(text)) => edit(text),
        _ => edit(config),
    }
}

fn cut_layers(config: &mut Map<String, Value>, layers: usize) -> Result<(), Error> {
    let all = config.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0);
    if layers == 0 || layers as u64 > all {
        return Err(Error::Input(format!(
            "{layers} layers asked for; the model has {all}, and 1 is the least"
        )));
    }
    config.insert("num_hidden_layers".into(), layers.into());
    for list in LAYER_LISTS {
        if let Some(Value::Array(list)) = config.get_mut(list) {
            list.truncate(layers);
        }
    }
    Ok(())
}

/// Names the quantisation as mlx-lm does, and the ids of the tokenizer that is written along.
fn finish_config(config: &mut Map<String, Value>, quantization: &Value) {
    let name_ids = |map: &mut Map<String, Value>| {
        for key in ["quantization", "quantization_config", "bos_token_id", KV_B_PROJ] {
            map.remove(key);
        }
        map.insert("eos_token_id".into(), eos_token_ids());
        map.insert("pad_token_id".into(), tokenizer::END_OF_TEXT.into());
    };
    name_ids(config);
    edit_text_config(config, name_ids);
    for key in ["quantization", "quantization_config"] {
        config.insert(key.into(), quantization.clone());
    }
}

fn eos_token_ids() -> Value {
    json!([tokenizer::IM_END, tokenizer::END_OF_TEXT])
}
