//! Plan of a synthetic GGUF file.

use moeflux_base::{Error, ToolError};
use moeflux_model::{
    blueprint::Blueprint,
    seam::{GgufArchitecture, GgufVector, KeyList, KeyValue, Recorder, SourceChanges, text_config},
};
use moeflux_ops::Scalar;
use serde_json::Value;

use super::{
    super::{
        byte_tokenizer,
        export::Export,
        module::{Module, ModuleKind, SynthTensor},
        options::Options,
        plan::{checked_skew, config_error, cut_config},
        values::{AFFINE_GROUP, BlockParams, Lead, RandomStream, TensorValues},
        weights::{ModuleList, RouterParams},
    },
    recipe::{GgufRecipe, MatrixType, TensorRole},
};

/// Tensors and metadata of a GGUF file to write.
#[derive(Clone, Debug)]
pub(crate) struct GgufPlan {
    /// With their names in GGUF, in the order of the file.
    pub(super) tensors: Vec<SynthTensor>,
    pub(super) keys: KeyList,
}

/// Plans the file that `options` describe.
///
/// # Errors
/// As [`plan`](super::plan()); or GGUF files of the architecture are not written.
pub(crate) fn plan_gguf(options: &Options, recipe: GgufRecipe) -> Result<GgufPlan, Error> {
    checked_skew(options.skew)?;
    let config = cut_config(options)?;
    let text = text_config(&config);
    let model_type = config.get("model_type").or_else(|| text.get("model_type"));
    let model_type = model_type.and_then(Value::as_str).unwrap_or("");
    let architecture = GgufArchitecture::for_config(model_type, text).ok_or_else(|| {
        config_error(format!("GGUF files of the model_type {model_type:?} are not written"))
    })?;
    let export = Export::of(model_type);
    let has = |tensor: &str| match tensor {
        _ if let Some(has) = (architecture.has_tensor)(text, tensor) => has,
        _ if tensor.ends_with(".embed_tokens.weight") => tensor == "model.embed_tokens.weight",
        _ if tensor.ends_with(".gate_up_proj") || tensor.contains(".moe.") => false,
        _ if tensor.ends_with(".shared_mlp.gate_proj.weight") => true,
        // Names that only exports of MLX have, or only the Hub.
        _ if [
            ".in_proj_qkvz.",
            ".query_key_value.",
            ".qkv_proj.",
            ".gate.proj.",
            ".gate.gate_proj.",
            ".q_conv.conv.",
            ".attention.dense.",
            ".index_qk_proj.",
            ".shard_0.",
        ]
        .iter()
        .any(|part| tensor.contains(part)) =>
        {
            false
        }
        _ => export.has(text, tensor),
    };
    let changes = SourceChanges {
        one_added_to_norms: true,
        kv_b_split: true,
        decays_computed: true,
        value_heads_dealt: architecture.value_heads_dealt,
        pairs_adjacent: architecture.pairs_adjacent,
        ..SourceChanges::default()
    };
    let recorder = Recorder::new(&config, changes, &has);
    let blueprint = Blueprint::for_source(&recorder)?;
    let recorded = recorder.into_recorded();
    let routing = RouterParams { seed: options.seed, skew: options.skew };
    let export = export.for_routers(&blueprint);
    let modules = ModuleList::new(&blueprint, &recorded, export, routing).collect();
    let types = TensorTypes { recipe, seed: options.seed, layers: blueprint.layers.len() as u64 };
    let mut tensors = Vec::new();
    for module in modules {
        // Constants of n-grams are metadata.
        if !matches!(module.kind, ModuleKind::Integers(_)) {
            tensors.push(types.tensor(architecture, module)?);
        }
    }
    tensors.extend((architecture.vectors)(text, &blueprint).into_iter().map(vector));
    let mut keys = KeyList::default();
    keys.push("general.architecture", KeyValue::Text(architecture.name.into()));
    keys.push("general.type", KeyValue::Text("model".into()));
    keys.push("general.name", KeyValue::Text(format!("random {model_type}")));
    let number = recipe.number().and_then(|n| u32::try_from(n).ok());
    keys.0.extend(number.map(|n| ("general.file_type".to_owned(), KeyValue::U32(n))));
    keys.push("general.quantization_version", KeyValue::U32(2));
    keys.0.extend(architecture.key_list(text, &blueprint).0);
    byte_tokenizer::gguf_keys(blueprint.vocab, &mut |key, value| keys.push(key, value));
    Ok(GgufPlan { tensors, keys })
}

/// Ending of the table of n-grams, which is not in a layer of the file.
const TABLE: &str = ".ngram_embedding.weight";

/// Types and values of a file's tensors.
struct TensorTypes {
    recipe: GgufRecipe,
    seed: u64,
    layers: u64,
}

impl TensorTypes {
    /// The tensor of a module.
    fn tensor(
        &self,
        architecture: &GgufArchitecture,
        module: Module,
    ) -> Result<SynthTensor, Error> {
        let Module { path, shape, kind } = module;
        let is_matrix = matches!(kind, ModuleKind::Linear { .. });
        // Stacks that the Hub has without an ending are matrices, too.
        let names = [format!("{path}.weight"), path.clone()];
        let [with_ending, bare] = names.map(|name| architecture.tensor_name(&name));
        let table = || path.ends_with(TABLE).then(|| "per_layer_token_embd.weight".to_owned());
        let name = if is_matrix { with_ending.or(bare) } else { bare.or_else(table) };
        let name = name.ok_or_else(|| config_error(format!("GGUF has no name for {path}")))?;
        let cols = shape.last().copied().unwrap_or(1);
        let (values, kind) = match kind {
            ModuleKind::Linear { gain, lead, .. } => {
                let std = gain / (cols as f32).sqrt();
                match self.recipe.matrix_type(&self.role(&name), cols) {
                    MatrixType::Blocks(kind) => {
                        let params = BlockParams::new(kind, std, cols, lead);
                        (TensorValues::Blocks(params), kind.type_name())
                    }
                    MatrixType::Plain(scalar) => {
                        let bound = std * 3f32.sqrt();
                        (uniform(scalar, -bound, bound, cols, lead), scalar.name())
                    }
                }
            }
            ModuleKind::Ids { below } => (TensorValues::Ids { below, cols, bytes: 4 }, "I32"),
            ModuleKind::Integers(_) => {
                return Err(config_error(format!("GGUF has no type for {path}")));
            }
            ModuleKind::Plain { low, high, .. } if name.ends_with(".ssm_a") => {
                let is_negative = architecture.decays_negative;
                (TensorValues::Decays { low, high, is_negative }, Scalar::F32.name())
            }
            ModuleKind::Plain { low, high, lead, .. } => {
                (uniform(Scalar::F32, low, high, cols, lead), Scalar::F32.name())
            }
        };
        // Vectors as llama.cpp's converter squeezes them.
        let mut shape: Vec<u64> = match is_matrix && !name.contains("ffn_gate_inp_shexp") {
            true => shape,
            false => shape.into_iter().filter(|n| *n != 1).collect(),
        };
        if shape.is_empty() {
            shape.push(1);
        }
        let stream = RandomStream::new(self.seed, &name);
        let elements = shape.iter().try_fold(1u64, |n, dim| n.checked_mul(*dim));
        let bytes = match &values {
            TensorValues::Blocks(params) => elements.and_then(|n| params.bytes(n)),
            TensorValues::Uniform { scalar, .. } => {
                elements.and_then(|n| n.checked_mul(scalar.bytes() as u64))
            }
            _ => elements.and_then(|n| n.checked_mul(4)),
        };
        let bytes = bytes.filter(|n| *n < 1 << 60).ok_or_else(|| ToolError::TensorTooLarge {
            name: name.clone(),
            shape: shape.clone(),
        })?;
        Ok(SynthTensor { name, dtype: kind, shape, bytes, values, stream })
    }

    fn role<'a>(&self, name: &'a str) -> TensorRole<'a> {
        match name {
            "token_embd.weight" => TensorRole::Embedding,
            "output.weight" => TensorRole::Head,
            _ if name.contains(".ffn_gate_inp") => TensorRole::Router,
            _ => {
                let mut parts = name.splitn(3, '.').skip(1);
                let layer = parts.next().and_then(|n| n.parse().ok()).unwrap_or(0);
                let name = parts.next().unwrap_or(name);
                TensorRole::InLayer { name, layer, layers: self.layers }
            }
        }
    }
}

fn vector(vector: GgufVector) -> SynthTensor {
    let len = vector.numbers.len() as u64;
    SynthTensor {
        name: vector.name.to_owned(),
        dtype: Scalar::F32.name(),
        shape: vec![len],
        bytes: 4 * len,
        values: TensorValues::Numbers(vector.numbers),
        stream: RandomStream::new(0, vector.name),
    }
}

fn uniform(scalar: Scalar, low: f32, high: f32, cols: u64, lead: Lead) -> TensorValues {
    let cols = cols.max(AFFINE_GROUP as u64);
    TensorValues::Uniform { scalar, low, high, cols, lead }
}
