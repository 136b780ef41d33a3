//! Architectures: one file per `model_type`, from config and tensor names to a [`Blueprint`].

mod body;
mod deepseek_v3;
mod deepseek_v32;
mod experts;
mod gemma4;
mod glm4_moe;
mod glm_moe_dsa;
mod gpt_oss;
mod grouped;
mod minimax_m2;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod rope;
mod sparse;

use moeflux_compute::Activation;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{
    base::error::Error,
    checkpoint::{Checkpoint, VectorSource},
    model::blueprint::{Blueprint, LinearSource, MlpBlueprint},
};

/// One architecture.
struct Architecture {
    model_type: &'static str,
    blueprint: fn(&Checkpoint) -> Result<Blueprint, Error>,
}

/// All that are supported.
const ARCHITECTURES: [Architecture; 12] = [
    Architecture { model_type: "deepseek_v3", blueprint: deepseek_v3::blueprint },
    Architecture { model_type: "deepseek_v32", blueprint: deepseek_v32::blueprint },
    Architecture { model_type: "gemma4", blueprint: gemma4::blueprint },
    Architecture { model_type: "glm4_moe", blueprint: glm4_moe::blueprint },
    Architecture { model_type: "glm_moe_dsa", blueprint: glm_moe_dsa::blueprint },
    Architecture { model_type: "gpt_oss", blueprint: gpt_oss::blueprint },
    Architecture { model_type: "kimi_k2", blueprint: deepseek_v3::blueprint },
    Architecture { model_type: "kimi_k25", blueprint: deepseek_v3::blueprint },
    Architecture { model_type: "minimax_m2", blueprint: minimax_m2::blueprint },
    Architecture { model_type: "qwen3_5_moe", blueprint: qwen3_5_moe::blueprint },
    Architecture { model_type: "qwen3_moe", blueprint: qwen3_moe::blueprint },
    Architecture { model_type: "qwen3_next", blueprint: qwen3_next::blueprint },
];

/// The supported values of `model_type`.
pub fn supported() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|a| a.model_type)
}

impl Blueprint {
    /// Reads a checkpoint's config and tensor index into a blueprint.
    ///
    /// # Errors
    /// The `model_type` is not supported, the config is incomplete or impossible, or a tensor is missing or of
    /// another shape than the config asks for.
    pub fn of(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let model_type = model_type(checkpoint)?;
        let plain = model_type.strip_suffix("_text").unwrap_or(model_type);
        let Some(architecture) = ARCHITECTURES.iter().find(|a| a.model_type == plain) else {
            let supported = supported().collect::<Vec<_>>().join(", ");
            return Err(config_error(
                checkpoint,
                format!("the model_type {model_type:?} is not supported; these are: {supported}"),
            ));
        };
        let mut blueprint = (architecture.blueprint)(checkpoint)?;
        checkpoint.place_packed(&mut blueprint)?;
        Ok(blueprint)
    }
}

/// `model_type` of the config, or of its `text_config` where the outer one is silent.
fn model_type(checkpoint: &Checkpoint) -> Result<&str, Error> {
    let config = checkpoint.config();
    let inner = config.get("text_config").and_then(|t| t.get("model_type"));
    let found = config.get("model_type").or(inner).and_then(|t| t.as_str());
    found.ok_or_else(|| config_error(checkpoint, "it has no \"model_type\""))
}

/// An error in `config.json`.
fn config_error(checkpoint: &Checkpoint, problem: impl Into<String>) -> Error {
    Error::Checkpoint { path: checkpoint.folder().join("config.json"), problem: problem.into() }
}

/// Whether a value of a key changes nothing.
type Unchanging = fn(&Value) -> bool;

/// Keys that would change what is computed, each with the values that change nothing: no architecture here computes
/// what the others ask for.
const UNCHANGING: [(&str, Unchanging); 8] = [
    ("attention_chunk_size", Value::is_null),
    ("attn_logit_softcapping", Value::is_null),
    ("attn_type_list", |v| v.as_array().is_some_and(|types| types.iter().all(|t| t == 1))),
    ("hidden_act", |v| v == "silu" || v == "swish"),
    ("mlp_bias", |v| v == false),
    ("per_layer_config", Value::is_null),
    ("use_bidirectional_attention", |v| v == false || v == "vision"),
    ("use_sliding_window", |v| v == false),
];

/// The config of the language model: nested under `text_config`, or flat. A null is as good as no key.
fn parse_config<T: DeserializeOwned>(checkpoint: &Checkpoint) -> Result<T, Error> {
    let config = checkpoint.config();
    let text = config.get("text_config").filter(|t| t.is_object()).unwrap_or(config);
    let mut map = text.as_object().cloned().unwrap_or_default();
    map.retain(|_, v| !v.is_null());
    for (key, changes_nothing) in UNCHANGING {
        if let Some(value) = map.get(key).filter(|v| !changes_nothing(v)) {
            return Err(config_error(
                checkpoint,
                format!("\"{key}\" is {value}, which is not supported"),
            ));
        }
    }
    T::deserialize(&map).map_err(|e| {
        // What goes wrong without a key in another way than with it, goes wrong because of it.
        let problem = e.to_string();
        let cause = map.keys().find(|key| {
            let mut others = map.clone();
            others.remove(*key);
            T::deserialize(&others).err().is_none_or(|other| other.to_string() != problem)
        });
        let named = |key: &String| format!("\"{key}\": {problem}");
        config_error(checkpoint, cause.map_or(problem.clone(), named))
    })
}

/// Checks on a config's numbers; the first that fails is the error.
struct Require<'a>(&'a Checkpoint);

impl Require<'_> {
    /// Each number is at least one and small enough that products of a few of them cannot overflow.
    fn sizes(&self, sizes: &[(&str, usize)]) -> Result<(), Error> {
        match sizes.iter().find(|(_, n)| *n == 0 || *n > 1 << 24) {
            Some((name, n)) => Err(config_error(
                self.0,
                format!("\"{name}\" is {n}: a size from 1 to {} is needed", 1 << 24),
            )),
            None => Ok(()),
        }
    }

    /// A number that other numbers are multiplied by.
    fn factor(&self, name: &str, factor: f32) -> Result<(), Error> {
        self.that(factor.is_finite() && factor > 0.0, || {
            format!("\"{name}\" is {factor}: a number above zero is needed")
        })
    }

    /// A list with an entry for each layer.
    fn layers<T>(&self, name: &str, list: Option<&Vec<T>>, layers: usize) -> Result<(), Error> {
        self.that(list.is_none_or(|list| list.len() >= layers), || {
            format!("\"{name}\" names fewer layers than \"num_hidden_layers\" says")
        })
    }

    fn that(&self, holds: bool, problem: impl FnOnce() -> String) -> Result<(), Error> {
        if holds { Ok(()) } else { Err(config_error(self.0, problem())) }
    }
}

/// `name` of `len` numbers, if the checkpoint has it.
fn vector_if_there(
    checkpoint: &Checkpoint,
    name: &str,
    len: usize,
) -> Result<Option<VectorSource>, Error> {
    checkpoint.has(name).then(|| checkpoint.vector(name, len, 0.0)).transpose()
}

/// `name.weight` with `name.bias` where there is one.
fn linear(
    checkpoint: &Checkpoint,
    name: &str,
    rows: usize,
    cols: usize,
) -> Result<LinearSource, Error> {
    let bias = format!("{name}.bias");
    Ok(LinearSource {
        weight: checkpoint.matrix(name, rows, cols)?,
        bias: vector_if_there(checkpoint, &bias, rows)?,
    })
}

/// `gate_proj`, `up_proj` and `down_proj` below `name`.
fn mlp(
    checkpoint: &Checkpoint,
    name: &str,
    hidden: usize,
    intermediate: usize,
) -> Result<MlpBlueprint, Error> {
    Ok(MlpBlueprint {
        gate_proj: checkpoint.matrix(&format!("{name}.gate_proj"), intermediate, hidden)?,
        up_proj: checkpoint.matrix(&format!("{name}.up_proj"), intermediate, hidden)?,
        down_proj: checkpoint.matrix(&format!("{name}.down_proj"), hidden, intermediate)?,
        activation: Activation::SwiGlu,
    })
}

/// Whether a tensor belongs to a layer behind the last one, where multi-token prediction has its own.
fn is_beyond(tensor: &str, layers: usize) -> bool {
    let number = tensor.split_once("layers.").and_then(|(_, rest)| rest.split('.').next());
    number.and_then(|n| n.parse::<usize>().ok()).is_some_and(|n| n >= layers)
}

/// Bytes of what a checkpoint has and a text runtime does not run, by what it is.
fn skipped(checkpoint: &Checkpoint, layers: usize) -> Vec<(String, u64)> {
    let vision = [
        "vision",
        "visual.",
        "multi_modal_projector.",
        "mm_projector.",
        "audio_tower.",
        "embed_audio.",
    ];
    let is_vision = |name: &str| vision.iter().any(|p| name.contains(p));
    let is_prediction =
        |name: &str| name.contains("mtp.") || (!is_vision(name) && is_beyond(name, layers));
    let bytes = |is: &dyn Fn(&str) -> bool| -> u64 {
        checkpoint.tensor_bytes().filter(|(name, _)| is(name)).map(|(_, bytes)| bytes).sum()
    };
    let all = [("vision", bytes(&is_vision)), ("multi-token prediction", bytes(&is_prediction))];
    all.into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(what, bytes)| (what.to_owned(), bytes))
        .collect()
}
