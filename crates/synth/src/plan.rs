//! Plan of a synthetic checkpoint: config and tensors.

use std::collections::HashMap;

use moeflux_base::{Error, ToolError, setters};
use moeflux_model::{
    blueprint::{Blueprint, LayerBlueprint, MixerBlueprint},
    checkpoint::Checkpoint,
    seam::{
        NgramBase, Recorder, SourceChanges, TensorInfo, base_for_rows, text_config, text_config_mut,
    },
};
use serde_json::{Map, Value, json};

use super::{
    byte_tokenizer,
    export::{Export, HEAD},
    module::{Module, SynthTensor, WeightQuant},
    options::{FewerRows, NGRAM_ROWS, Options},
    weights::{ModuleList, RouterParams},
};

/// Maximum `skew`.
const MAX_SKEW: f64 = 8.0;

/// Shard size in bytes, as in mlx-lm.
pub(super) const SHARD: u64 = 5 << 30;

/// Sanity limits.
const MAX_LAYERS: u64 = 4096;
const MAX_EXPERTS: usize = 1 << 16;

/// Config lists with one entry per layer, or texts with a letter for each.
const LAYER_LISTS: [&str; 19] = [
    "compress_ratios",
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "attn_type_list",
    "indexer_types",
    "mlp_layer_types",
    "is_moe_layer",
    "num_attention_heads_per_layer",
    "hybrid_layer_pattern",
    "moe_layer_freq",
    "rope_theta",
    "partial_rotary_factors",
    "swiglu_limits",
    "swiglu_limits_shared",
    "moe_intermediate_size",
    "moe_topk",
    "num_shared_expert",
    "per_layer_num_experts",
];

/// A key that published configs do not have, and that is not written: keeps `kv_b_proj` of latent
/// attention whole, as in older exports. Newer ones split it into `embed_q` and `unembed_out`.
pub(super) const KV_B_PROJ: &str = "synth_kv_b_proj";

setters!(Options {
    layers: impl Into<Option<usize>>,
    seed: u64,
    skew: f64,
    ngram_rows: impl Into<Option<u64>>,
    head: bool,
});

/// The tensors and the config of a checkpoint to write.
#[derive(Clone, Debug)]
pub struct SynthPlan {
    pub(super) tensors: Vec<SynthTensor>,
    pub(super) config: Value,
    pub(super) max_positions: usize,
    pub(super) fewer_rows: Option<FewerRows>,
}

/// A tensor of a [`SynthPlan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedTensor<'a> {
    /// Name in the checkpoint.
    pub name: &'a str,
    /// Element type as safetensors spells it: `U32` (packed quants), `U8` (their scales), `BF16` or
    /// `F32`.
    pub dtype: &'static str,
    /// Shape; packed quants count in `u32`.
    pub shape: &'a [u64],
    /// Size in bytes.
    pub bytes: u64,
}

impl SynthPlan {
    /// All tensors, in the order of the files.
    pub fn tensors(&self) -> impl Iterator<Item = PlannedTensor<'_>> {
        self.tensors.iter().map(|t| PlannedTensor {
            name: &t.name,
            dtype: t.dtype,
            shape: &t.shape,
            bytes: t.bytes,
        })
    }

    /// Bytes of all tensors. Headers, index, config and tokenizer add a few megabytes at most.
    pub fn total_bytes(&self) -> u64 {
        self.tensors.iter().map(|t| t.bytes).sum()
    }

    /// Rows of tables, if there are fewer than the config of the options says.
    pub fn fewer_rows(&self) -> Option<FewerRows> {
        self.fewer_rows
    }

    /// The `config.json` that is written.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The checkpoint that [`write()`](super::write()) would write, without weights. It can be
    /// inspected and planned for, not run.
    ///
    /// # Errors
    /// The config has a broken "quantization".
    pub fn checkpoint(&self) -> Result<Checkpoint, Error> {
        let mut offset = 0;
        let tensors = self.tensors.iter().map(|t| {
            let shape = t.shape.iter().map(|n| *n as usize).collect();
            let info = TensorInfo { file: 0, offset, bytes: t.bytes, dtype: t.dtype.into(), shape };
            offset += t.bytes;
            (t.name.clone(), info)
        });
        let tensors: HashMap<_, _> = tensors.collect();
        Checkpoint::planned(self.config.clone(), tensors)
    }
}

/// Lists the tensors of the checkpoint that `options` describe.
///
/// # Errors
/// The architecture is not supported (the error lists the supported ones), a config value is
/// missing, out of range or inconsistent, there are fewer layers than requested, or the skew is not
/// in 0 to 8.
pub fn plan(options: &Options) -> Result<SynthPlan, Error> {
    checked_skew(options.skew)?;
    let (mut config, fewer_rows) = shrink_tables(cut_config(options)?, options)?;
    edit_text_config(&mut config, |text| text.insert(HEAD.into(), options.head.into()));
    let routing = RouterParams { seed: options.seed, skew: options.skew };
    let SynthModel { modules, expert_quant: default, max_positions } = model(&config, routing)?;
    let mut quantization = default.setting();
    for (module, quant) in
        modules.iter().filter_map(|m| Some((m, m.quant().filter(|q| *q != default)?)))
    {
        quantization[&module.path] = quant.setting_among(default);
    }
    let mut tensors = Vec::new();
    let mut total = 0u64;
    for module in modules {
        for tensor in module.tensors(options.seed)? {
            total = total.checked_add(tensor.bytes).filter(|n| *n < 1 << 60).ok_or_else(|| {
                config_error("the model is too large to be addressed; are its sizes right?")
            })?;
            tensors.push(tensor);
        }
    }
    finish_config(&mut config, &quantization);
    Ok(SynthPlan { tensors, config, max_positions, fewer_rows })
}

pub(super) fn checked_skew(skew: f64) -> Result<(), Error> {
    match (0.0..=MAX_SKEW).contains(&skew) {
        true => Ok(()),
        false => Err(ToolError::Skew { skew, most: MAX_SKEW }.into()),
    }
}

/// The config with as many layers as are wanted.
pub(super) fn cut_config(options: &Options) -> Result<Value, Error> {
    let mut config = options.config.clone();
    let layers = options.layers;
    let cut = |text: &mut _| layers.map_or(Ok(()), |layers| cut_layers(text, layers));
    edit_text_config(&mut config, cut)
        .unwrap_or_else(|| Err(config_error("it is not a JSON object")))?;
    Ok(config)
}

/// The config with as few rows of tables as are wanted.
fn shrink_tables(
    mut config: Value,
    options: &Options,
) -> Result<(Value, Option<FewerRows>), Error> {
    let wanted = options.ngram_rows.unwrap_or(NGRAM_ROWS);
    let Some(NgramBase { base, rows, published }) = base_for_rows(text_config(&config), wanted)
    else {
        return match options.ngram_rows {
            Some(rows) => {
                let problem = format!("it has no tables of n-grams that fit in {rows} rows");
                Err(config_error(problem))
            }
            None => Ok((config, None)),
        };
    };
    edit_text_config(&mut config, |text| text.insert("ngram_vocab_size_base".into(), base.into()));
    Ok((config, (rows < published).then_some(FewerRows { rows, published })))
}

pub(super) fn config_error(problem: impl Into<String>) -> Error {
    ToolError::Config { problem: problem.into() }.into()
}

/// Modules of a model, in the order of the files.
struct SynthModel {
    modules: Vec<Module>,
    /// Quantization of the experts, which is the most frequent one.
    expert_quant: WeightQuant,
    max_positions: usize,
}

/// The model that a config describes, as its architecture asks a recorder for it.
fn model(config: &Value, routing: RouterParams) -> Result<SynthModel, Error> {
    let text = text_config(config);
    let wrong = |problem: String| Err(config_error(problem));
    if let Some(layers) = text["num_hidden_layers"].as_u64().filter(|n| *n > MAX_LAYERS) {
        return wrong(format!("num_hidden_layers {layers} exceeds {MAX_LAYERS}"));
    }
    let model_type = config.get("model_type").or_else(|| text.get("model_type"));
    let export = Export::of(model_type.and_then(Value::as_str).unwrap_or(""));
    let has = |tensor: &str| export.has(text, tensor);
    let changes = SourceChanges {
        one_added_to_norms: true,
        kv_b_split: text[KV_B_PROJ] != true,
        ..SourceChanges::default()
    };
    let recorder = Recorder::new(config, changes, &has);
    let blueprint = Blueprint::for_source(&recorder)?;
    let export = export.for_routers(&blueprint);
    if blueprint.vocab < byte_tokenizer::COUNT as usize {
        return wrong(format!(
            "vocab_size {} is smaller than the tokenizer's {} ids",
            blueprint.vocab,
            byte_tokenizer::COUNT
        ));
    }
    if text[HEAD] == true && blueprint.drafter.is_none() {
        return wrong("no head for multi-token prediction of this model is written".into());
    }
    let experts = blueprint.moe_layers().map(|(_, moe)| moe.experts.count).max().unwrap_or(0);
    if experts > MAX_EXPERTS {
        return wrong(format!("{experts} experts of a layer (num_experts) exceed {MAX_EXPERTS}"));
    }
    let lacks_biases = |layer: &LayerBlueprint| match layer.mixer() {
        Some(MixerBlueprint::Gqa(gqa)) => gqa.q_proj.bias.is_none(),
        _ => false,
    };
    if text["attention_bias"] == true && blueprint.layers.iter().any(lacks_biases) {
        return wrong("attention_bias true is not supported: published models have false".into());
    }
    let recorded = recorder.into_recorded();
    Ok(SynthModel {
        modules: ModuleList::new(&blueprint, &recorded, export, routing).collect(),
        expert_quant: export.experts,
        max_positions: blueprint.max_positions,
    })
}

fn edit_text_config<T>(
    config: &mut Value,
    edit: impl FnOnce(&mut Map<String, Value>) -> T,
) -> Option<T> {
    text_config_mut(config).and_then(Value::as_object_mut).map(edit)
}

fn cut_layers(config: &mut Map<String, Value>, layers: usize) -> Result<(), Error> {
    let total = config.get("num_hidden_layers").and_then(Value::as_u64).unwrap_or(0);
    if layers == 0 || layers as u64 > total {
        return Err(ToolError::Layers { layers, total }.into());
    }
    config.insert("num_hidden_layers".into(), layers.into());
    for list in LAYER_LISTS {
        match config.get_mut(list) {
            Some(Value::Array(list)) => list.truncate(layers),
            Some(Value::String(letters)) => *letters = letters.chars().take(layers).collect(),
            _ => {}
        }
    }
    Ok(())
}

/// Writes the quantization as mlx-lm does, and the special token ids of the written tokenizer.
fn finish_config(config: &mut Value, quantization: &Value) {
    let name_ids = |map: &mut Map<String, Value>| {
        for key in ["quantization", "quantization_config", "bos_token_id", KV_B_PROJ, HEAD] {
            map.remove(key);
        }
        map.insert("eos_token_id".into(), eos_token_ids());
        map.insert("pad_token_id".into(), byte_tokenizer::END_OF_TEXT.into());
    };
    edit_text_config(config, name_ids);
    if let Some(config) = config.as_object_mut() {
        name_ids(config);
        for key in ["quantization", "quantization_config"] {
            config.insert(key.into(), quantization.clone());
        }
    }
}

pub(super) fn eos_token_ids() -> Value {
    json!([byte_tokenizer::IM_END, byte_tokenizer::END_OF_TEXT])
}

#[cfg(test)]
mod tests;
