//! Architectures: one file per `model_type`, which turns a config and tensor names into a
//! [`Blueprint`].
//!
//! Entry point is [`Blueprint::for_checkpoint`], which looks the `model_type` up in
//! [`ARCHITECTURES`]. Shared parts are in `body.rs` (embedding, head, layers, attention),
//! `rope.rs`, `softmax_moe.rs`, `grouped_moe.rs` and `expert_tensors.rs`; `scope.rs` looks tensors
//! up by name.

mod body;
mod deepseek_v3;
mod deepseek_v32;
mod dots1;
mod expert_tensors;
mod gemma4;
mod glm4_moe;
mod glm_moe_dsa;
mod gpt_oss;
mod grouped_moe;
mod minimax_m2;
mod qwen2_moe;
mod qwen3_5_moe;
mod qwen3_moe;
mod qwen3_next;
mod rope;
mod scope;
mod softmax_moe;
mod solar_open;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::{
    base::error::Error,
    checkpoint::{Checkpoint, source::TensorSource},
    model::blueprint::Blueprint,
};

/// Registry entry of an architecture.
struct ArchitectureEntry {
    model_type: &'static str,
    blueprint: fn(&dyn TensorSource) -> Result<Blueprint, Error>,
}

/// Registry of the supported architectures.
const ARCHITECTURES: &[ArchitectureEntry] = &[
    ArchitectureEntry { model_type: "deepseek_v3", blueprint: deepseek_v3::blueprint },
    ArchitectureEntry { model_type: "deepseek_v32", blueprint: deepseek_v32::blueprint },
    ArchitectureEntry { model_type: "dots1", blueprint: dots1::blueprint },
    ArchitectureEntry { model_type: "gemma4", blueprint: gemma4::blueprint },
    ArchitectureEntry { model_type: "glm4_moe", blueprint: glm4_moe::blueprint },
    ArchitectureEntry { model_type: "glm4_moe_lite", blueprint: deepseek_v3::blueprint },
    ArchitectureEntry { model_type: "glm_moe_dsa", blueprint: glm_moe_dsa::blueprint },
    ArchitectureEntry { model_type: "gpt_oss", blueprint: gpt_oss::blueprint },
    ArchitectureEntry { model_type: "kimi_k2", blueprint: deepseek_v3::blueprint },
    ArchitectureEntry { model_type: "kimi_k25", blueprint: deepseek_v3::blueprint },
    ArchitectureEntry { model_type: "minimax_m2", blueprint: minimax_m2::blueprint },
    ArchitectureEntry { model_type: "qwen2_moe", blueprint: qwen2_moe::blueprint },
    ArchitectureEntry { model_type: "qwen3_5_moe", blueprint: qwen3_5_moe::blueprint },
    ArchitectureEntry { model_type: "qwen3_moe", blueprint: qwen3_moe::blueprint },
    ArchitectureEntry { model_type: "qwen3_next", blueprint: qwen3_next::blueprint },
    ArchitectureEntry { model_type: "solar_open", blueprint: solar_open::blueprint },
];

/// Supported values of `model_type`.
pub fn supported() -> impl Iterator<Item = &'static str> {
    ARCHITECTURES.iter().map(|a| a.model_type)
}

impl Blueprint {
    /// Builds the blueprint of a checkpoint from its config and tensor index.
    ///
    /// # Errors
    /// The `model_type` is not supported, the config is incomplete or invalid, or a tensor is
    /// missing or has another shape than the config asks for.
    pub fn for_checkpoint(checkpoint: &Checkpoint) -> Result<Self, Error> {
        let mut blueprint = Self::for_source(checkpoint)?;
        checkpoint.place_packed(&mut blueprint)?;
        Ok(blueprint)
    }

    /// As [`Blueprint::for_checkpoint`], with the experts where the source has them.
    pub(crate) fn for_source(source: &dyn TensorSource) -> Result<Self, Error> {
        let model_type = model_type(source)?;
        let plain = model_type.strip_suffix("_text").unwrap_or(model_type);
        let Some(architecture) = ARCHITECTURES.iter().find(|a| a.model_type == plain) else {
            let supported = supported().collect::<Vec<_>>().join(", ");
            return Err(config_error(
                source,
                format!(
                    "the model_type {model_type:?} is not supported; supported are: {supported}"
                ),
            ));
        };
        (architecture.blueprint)(source)
    }
}

/// `model_type` of the config, or of its `text_config` if the outer config has none.
fn model_type(source: &dyn TensorSource) -> Result<&str, Error> {
    let config = source.config();
    let inner = config.get("text_config").and_then(|t| t.get("model_type"));
    let found = config.get("model_type").or(inner).and_then(|t| t.as_str());
    found.ok_or_else(|| config_error(source, "it has no \"model_type\""))
}

/// Error about `config.json`.
fn config_error(source: &dyn TensorSource, problem: impl Into<String>) -> Error {
    Error::Checkpoint { path: source.folder().join("config.json"), problem: problem.into() }
}

/// Config key that would change the computation, but is implemented only for neutral values.
struct UnsupportedKey {
    key: &'static str,
    /// Whether a value has no effect on the computation.
    is_neutral: fn(&Value) -> bool,
}

/// Keys that are refused for every architecture, unless their value is neutral.
const UNSUPPORTED_KEYS: [UnsupportedKey; 9] = [
    UnsupportedKey { key: "attention_chunk_size", is_neutral: Value::is_null },
    UnsupportedKey { key: "attn_logit_softcapping", is_neutral: Value::is_null },
    UnsupportedKey {
        key: "attn_type_list",
        is_neutral: |v| v.as_array().is_some_and(|types| types.iter().all(|t| t == 1)),
    },
    UnsupportedKey { key: "hidden_act", is_neutral: |v| v == "silu" || v == "swish" },
    UnsupportedKey { key: "mlp_bias", is_neutral: |v| v == false },
    UnsupportedKey { key: "per_layer_config", is_neutral: Value::is_null },
    UnsupportedKey { key: "use_bias", is_neutral: |v| v == false },
    UnsupportedKey {
        key: "use_bidirectional_attention",
        is_neutral: |v| v == false || v == "vision",
    },
    UnsupportedKey { key: "use_sliding_window", is_neutral: |v| v == false },
];

/// Parses the config of the language model: nested under `text_config`, or flat. A null value
/// counts as a missing key.
fn parse_config<T: DeserializeOwned>(source: &dyn TensorSource) -> Result<T, Error> {
    let config = source.config();
    let text = config.get("text_config").filter(|t| t.is_object()).unwrap_or(config);
    let mut map = text.as_object().cloned().unwrap_or_default();
    map.retain(|_, v| !v.is_null());
    for UnsupportedKey { key, is_neutral } in UNSUPPORTED_KEYS {
        if let Some(value) = map.get(key).filter(|v| !is_neutral(v)) {
            return Err(config_error(
                source,
                format!("\"{key}\" is {value}, which is not supported"),
            ));
        }
    }
    T::deserialize(&map).map_err(|e| {
        // The cause is a key without which, or with another value of which, parsing succeeds.
        let problem = e.to_string();
        let values = [json!(1), json!(true), json!(""), json!([]), json!({})];
        let cause = map.keys().find(|key| {
            let mut changed = map.clone();
            changed.remove(*key);
            T::deserialize(&changed).is_ok()
                || values.iter().any(|value| {
                    changed.insert((*key).clone(), value.clone());
                    T::deserialize(&changed).is_ok()
                })
        });
        let named = |key: &String| format!("\"{key}\": {problem}");
        config_error(source, cause.map_or(problem.clone(), named))
    })
}

/// Checks on the values of a config. Errors name the key.
struct Require<'a>(&'a dyn TensorSource);

impl Require<'_> {
    /// Requires sizes of at least 1, and small enough that products of a few cannot overflow.
    fn sizes(&self, sizes: &[(&str, usize)]) -> Result<(), Error> {
        match sizes.iter().find(|(_, n)| *n == 0 || *n > 1 << 24) {
            Some((name, n)) => Err(config_error(
                self.0,
                format!("\"{name}\" is {n}: a size from 1 to {} is needed", 1 << 24),
            )),
            None => Ok(()),
        }
    }

    /// Requires a finite factor above zero.
    fn factor(&self, name: &str, factor: f32) -> Result<(), Error> {
        self.that(factor.is_finite() && factor > 0.0, || {
            format!("\"{name}\" is {factor}: a number above zero is needed")
        })
    }

    /// Requires a list, if present, with an entry for each layer.
    fn layers<T>(&self, name: &str, list: Option<&Vec<T>>, layers: usize) -> Result<(), Error> {
        self.that(list.is_none_or(|list| list.len() >= layers), || {
            format!("\"{name}\" names fewer layers than \"num_hidden_layers\" says")
        })
    }

    /// Requires a condition; `problem` describes its violation.
    fn that(&self, holds: bool, problem: impl FnOnce() -> String) -> Result<(), Error> {
        if holds { Ok(()) } else { Err(config_error(self.0, problem())) }
    }
}

/// Whether a tensor belongs to a layer after the last one: multi-token prediction (MTP).
fn is_beyond(tensor: &str, layers: usize) -> bool {
    let number = tensor.split_once("layers.").and_then(|(_, rest)| rest.split('.').next());
    number.and_then(|n| n.parse::<usize>().ok()).is_some_and(|n| n >= layers)
}

/// Parts of a checkpoint that are not executed, with their bytes.
fn skipped(source: &dyn TensorSource, layers: usize) -> Vec<(String, u64)> {
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
        source.tensor_bytes().filter(|(name, _)| is(name)).map(|(_, bytes)| bytes).sum()
    };
    let all = [("vision", bytes(&is_vision)), ("multi-token prediction", bytes(&is_prediction))];
    all.into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(part, bytes)| (part.to_owned(), bytes))
        .collect()
}
