//! Reading of `config.json`: keys of several names, keys that are refused, checks on values.

use moeflux_base::Error;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use crate::checkpoint::{source::TensorSource, text_config};

/// Value of a key for all layers, or a list with one for each.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub(crate) enum PerLayer<T> {
    Each(Vec<T>),
    All(T),
}

impl<T: Copy> PerLayer<T> {
    /// The value of layer `layer`. `name` is the key.
    pub(crate) fn of(
        &self,
        source: &dyn TensorSource,
        name: &str,
        layer: usize,
    ) -> Result<T, Error> {
        let each = match self {
            Self::All(value) => return Ok(*value),
            Self::Each(list) => list,
        };
        let missing = || config_error(source, format!("\"{name}\" has no value for layer {layer}"));
        each.get(layer).copied().ok_or_else(missing)
    }
}

/// Error about `config.json`.
pub(crate) fn config_error(source: &dyn TensorSource, problem: impl Into<String>) -> Error {
    Error::Checkpoint { path: source.config_path(), problem: problem.into() }
}

/// Config key that would change the computation, but is implemented only for neutral values.
struct UnsupportedKey {
    key: &'static str,
    /// Whether a value has no effect on the computation.
    is_neutral: fn(&Value) -> bool,
}

/// Keys that are refused for every architecture to which they are not harmless, unless their value
/// is neutral or null.
const UNSUPPORTED_KEYS: [UnsupportedKey; 12] = [
    UnsupportedKey { key: "attention_chunk_size", is_neutral: Value::is_null },
    UnsupportedKey { key: "attn_logit_softcapping", is_neutral: Value::is_null },
    UnsupportedKey {
        key: "attn_type_list",
        is_neutral: |v| v.as_array().is_some_and(|types| types.iter().all(|t| t == 1)),
    },
    UnsupportedKey { key: "clip_qkv", is_neutral: Value::is_null },
    UnsupportedKey { key: "hidden_act", is_neutral: |v| v == "silu" || v == "swish" },
    UnsupportedKey { key: "mlp_bias", is_neutral: |v| v == false },
    UnsupportedKey { key: "moe_apply_router_weight_on_input", is_neutral: |v| v == false },
    UnsupportedKey { key: "moe_router_enable_expert_bias", is_neutral: |v| v == true },
    UnsupportedKey { key: "moe_router_use_sigmoid", is_neutral: |v| v == true },
    UnsupportedKey { key: "use_bias", is_neutral: |v| v == false },
    UnsupportedKey {
        key: "use_bidirectional_attention",
        is_neutral: |v| v == false || v == "vision",
    },
    UnsupportedKey { key: "use_sliding_window", is_neutral: |v| v == false },
];

/// Names of one key. transformers maps some to each other (`attribute_map`), and its versions write
/// different ones; publishers chose others.
struct KeyNames {
    /// The key that an architecture reads.
    key: &'static str,
    /// Other names, of which the first that the config has is read if it lacks `key`.
    others: &'static [&'static str],
}

/// All keys of several names.
const KEY_NAMES: [KeyNames; 18] = [
    KeyNames { key: "num_experts", others: &["num_local_experts", "n_routed_experts"] },
    KeyNames { key: "num_local_experts", others: &["num_experts", "n_routed_experts"] },
    KeyNames {
        key: "n_routed_experts",
        others: &["num_local_experts", "num_experts", "moe_num_experts"],
    },
    KeyNames { key: "n_shared_experts", others: &["num_shared_experts", "moe_num_shared_experts"] },
    KeyNames {
        key: "num_experts_per_tok",
        others: &["experts_per_token", "num_experts_per_token", "moe_k", "moe_top_k"],
    },
    KeyNames { key: "n_group", others: &["num_expert_group"] },
    KeyNames { key: "moe_topk", others: &["num_experts_per_tok"] },
    KeyNames { key: "first_k_dense_replace", others: &["num_dense_layers"] },
    KeyNames {
        key: "norm_topk_prob",
        others: &["route_norm", "norm_expert_weight", "moe_renormalize"],
    },
    KeyNames {
        key: "routed_scaling_factor",
        others: &[
            "router_scaling_factor",
            "moe_routed_scaling_factor",
            "moe_router_scaling_factor",
            "route_scale",
        ],
    },
    KeyNames {
        key: "scoring_func",
        others: &[
            "score_func",
            "score_function",
            "moe_router_score_func",
            "moe_router_activation",
            "moe_router_activation_func",
            "router_score_function",
        ],
    },
    KeyNames {
        key: "shared_expert_intermediate_size",
        others: &["share_expert_dim", "shared_intermediate_size"],
    },
    KeyNames { key: "num_attention_groups", others: &["num_key_value_heads"] },
    KeyNames { key: "max_position_embeddings", others: &["model_max_length"] },
    KeyNames {
        key: "rms_norm_eps",
        others: &["layernorm_epsilon", "norm_eps", "layer_norm_epsilon"],
    },
    KeyNames { key: "qk_rope_head_dim", others: &["head_dim"] },
    KeyNames { key: "use_qk_norm", others: &["qk_norm"] },
    KeyNames { key: "tie_word_embeddings", others: &["tie_embedding"] },
];

/// The config of the language model.
pub(crate) fn text_config(source: &dyn TensorSource) -> &Value {
    text_config::text_config(source.config())
}

/// Number of the language model's config, under any of its key's names.
pub(crate) fn config_number(source: &dyn TensorSource, key: &str) -> Option<f64> {
    let names = KEY_NAMES.iter().find(|names| names.key == key);
    let mut names = [key].into_iter().chain(names.into_iter().flat_map(|n| n.others).copied());
    names.find_map(|name| text_config(source).get(name)?.as_f64())
}

/// Adds the keys that a config has under other names.
fn add_names(map: &mut Map<String, Value>) {
    for KeyNames { key, others } in KEY_NAMES {
        if !map.contains_key(key)
            && let Some(value) = others.iter().find_map(|other| map.get(*other)).cloned()
        {
            map.insert(key.into(), value);
        }
    }
}

/// A config in which each key has all names that families read. Null values are left out.
pub(crate) fn with_all_names(config: &Value) -> Value {
    let mut map = config.as_object().cloned().unwrap_or_default();
    map.retain(|_, v| !v.is_null());
    add_names(&mut map);
    map.into()
}

/// Deserializes a config whose keys may have other names.
fn deserialize<T: DeserializeOwned>(map: &Map<String, Value>) -> Result<T, serde_json::Error> {
    let mut map = map.clone();
    add_names(&mut map);
    T::deserialize(&map)
}

/// Parses the config of the language model. A null value counts as a missing key.
pub(crate) fn parse_config<T: DeserializeOwned>(source: &dyn TensorSource) -> Result<T, Error> {
    let mut map = text_config(source).as_object().cloned().unwrap_or_default();
    map.retain(|_, v| !v.is_null());
    deserialize(&map).map_err(|e| {
        // The cause is a key without which, or with another value of which, parsing succeeds.
        let problem = e.to_string();
        let values = [json!(1), json!(true), json!(""), json!([]), json!({})];
        let cause = map.keys().find(|key| {
            let mut changed = map.clone();
            changed.remove(*key);
            deserialize::<T>(&changed).is_ok()
                || values.iter().any(|value| {
                    changed.insert((*key).clone(), value.clone());
                    deserialize::<T>(&changed).is_ok()
                })
        });
        let named = |key: &String| format!("\"{key}\": {problem}");
        config_error(source, cause.map_or(problem.clone(), named))
    })
}

/// Checks that the values of unsupported keys, but those of `harmless` ones, have no effect.
pub(crate) fn check_keys(source: &dyn TensorSource, harmless: &[&str]) -> Result<(), Error> {
    for UnsupportedKey { key, is_neutral } in UNSUPPORTED_KEYS {
        let value = text_config(source).get(key).filter(|v| !v.is_null() && !is_neutral(v));
        if let Some(value) = value.filter(|_| !harmless.contains(&key)) {
            let problem = format!("\"{key}\" is {value}, which is not supported");
            return Err(config_error(source, problem));
        }
    }
    Ok(())
}

/// Checks that the config asks for no kind of layer but `types`, and overrides no key of a layer
/// but `keys`. `per_layer_config` may repeat the value of the whole model for any key.
pub(crate) fn check_layers(
    source: &dyn TensorSource,
    types: &[&str],
    keys: &[&str],
) -> Result<(), Error> {
    let config = text_config(source);
    let named = config.get("layer_types").and_then(Value::as_array);
    let unknown = |t: &&Value| !t.as_str().is_some_and(|name| types.contains(&name));
    if let Some(other) = named.into_iter().flatten().find(unknown) {
        let problem = format!(
            "the layer type {other} of \"layer_types\" is not supported; supported are: {}",
            types.join(", ")
        );
        return Err(config_error(source, problem));
    }
    let layers = match config.get("per_layer_config") {
        None | Some(Value::Null) => return Ok(()),
        Some(Value::Object(layers)) => layers,
        Some(other) => {
            let problem = format!("\"per_layer_config\" is {other}, not a map by layer");
            return Err(config_error(source, problem));
        }
    };
    for (layer, settings) in layers {
        let Some(settings) = settings.as_object() else {
            let problem = format!("layer {layer} of \"per_layer_config\" is {settings}, not a map");
            return Err(config_error(source, problem));
        };
        let other = |(key, value): &(&String, &Value)| {
            !keys.contains(&key.as_str()) && config.get(key.as_str()) != Some(*value)
        };
        if let Some((key, value)) = settings.iter().find(other) {
            let problem = format!(
                "\"per_layer_config\" gives layer {layer} the \"{key}\" {value}, which is not \
                 supported for single layers"
            );
            return Err(config_error(source, problem));
        }
    }
    Ok(())
}

/// Largest size in a config: products of a few cannot overflow.
pub(crate) const MAX_SIZE: usize = 1 << 24;

/// Checks on the values of a config. Errors name the key.
pub(crate) struct Require<'a>(pub(crate) &'a dyn TensorSource);

impl Require<'_> {
    /// Requires sizes from 1 to [`MAX_SIZE`].
    pub(crate) fn sizes(&self, sizes: &[(&str, usize)]) -> Result<(), Error> {
        match sizes.iter().find(|(_, n)| !(1..=MAX_SIZE).contains(n)) {
            Some((name, n)) => Err(config_error(
                self.0,
                format!("\"{name}\" is {n}: a size from 1 to {MAX_SIZE} is needed"),
            )),
            None => Ok(()),
        }
    }

    /// Requires a finite factor above zero.
    pub(crate) fn factor(&self, name: &str, factor: f32) -> Result<(), Error> {
        self.that(factor.is_finite() && factor > 0.0, || {
            format!("\"{name}\" is {factor}: a number above zero is needed")
        })
    }

    /// Requires a list, if present, with an entry for each layer.
    pub(crate) fn layers<T>(
        &self,
        name: &str,
        list: Option<&Vec<T>>,
        layers: usize,
    ) -> Result<(), Error> {
        self.that(list.is_none_or(|list| list.len() >= layers), || {
            format!("\"{name}\" names fewer layers than \"num_hidden_layers\" says")
        })
    }

    /// Whether layer `layer` has experts, by `mlp_layer_types`.
    pub(crate) fn is_sparse(&self, types: &[String], layer: usize) -> Result<bool, Error> {
        match types.get(layer).map(String::as_str) {
            Some("sparse") => Ok(true),
            Some("dense") => Ok(false),
            other => {
                let problem = format!(
                    "layer {layer} is {other:?} in \"mlp_layer_types\", neither \"sparse\" nor \
                     \"dense\""
                );
                Err(config_error(self.0, problem))
            }
        }
    }

    /// Requires a key whose absence would leave open which kind a layer has. `purpose` says what
    /// it decides.
    pub(crate) fn named<T>(&self, key: &str, value: Option<T>, purpose: &str) -> Result<T, Error> {
        value.ok_or_else(|| {
            config_error(self.0, format!("it has no \"{key}\", which decides {purpose}"))
        })
    }

    /// Requires a name that is supported, if the config has the key.
    pub(crate) fn one_of(
        &self,
        key: &str,
        name: Option<&str>,
        supported: &[&str],
    ) -> Result<(), Error> {
        match name.filter(|name| !supported.contains(name)) {
            Some(name) => Err(self.unsupported(key, name)),
            None => Ok(()),
        }
    }

    /// Error about a name that is not supported.
    pub(crate) fn unsupported(&self, key: &str, name: &str) -> Error {
        config_error(self.0, format!("the \"{key}\" {name:?} is not supported"))
    }

    /// Requires keys to be false.
    pub(crate) fn unset(&self, keys: &[(&str, bool)]) -> Result<(), Error> {
        match keys.iter().find(|(_, value)| *value) {
            Some((key, _)) => {
                Err(config_error(self.0, format!("\"{key}\" is true, which is not supported")))
            }
            None => Ok(()),
        }
    }

    /// Requires a condition; `problem` describes its violation.
    pub(crate) fn that(&self, holds: bool, problem: impl FnOnce() -> String) -> Result<(), Error> {
        if holds { Ok(()) } else { Err(config_error(self.0, problem())) }
    }
}

/// Name of the tensors for images and sound among the parts that are not executed.
pub(crate) const VISION: &str = "vision";

/// Name of the tensors for multi-token prediction among the parts that are not executed.
pub(crate) const PREDICTION: &str = "multi-token prediction";

/// Parts of a checkpoint that are not executed, with their bytes.
pub(crate) fn skipped(source: &dyn TensorSource, layers: usize) -> Vec<(String, u64)> {
    let vision = [
        "vision",
        "visual.",
        "multi_modal_projector.",
        "mm_projector.",
        "audio_tower.",
        "audio_encoder.",
        "speech_embeddings.",
        "talker.",
        "code2wav.",
        "vit_large_projector.",
        "patch_merge_mlp.",
        "embed_audio.",
    ];
    let is_vision = |name: &str| vision.iter().any(|p| name.contains(p));
    let is_prediction =
        |name: &str| name.contains("mtp.") || (!is_vision(name) && is_beyond(name, layers));
    let bytes = |is: &dyn Fn(&str) -> bool| -> u64 {
        source.tensor_bytes().filter(|(name, _)| is(name)).map(|(_, bytes)| bytes).sum()
    };
    let all = [(VISION, bytes(&is_vision)), (PREDICTION, bytes(&is_prediction))];
    all.into_iter()
        .filter(|(_, bytes)| *bytes > 0)
        .map(|(part, bytes)| (part.to_owned(), bytes))
        .collect()
}

/// Whether a tensor belongs to a layer after the last one: multi-token prediction (MTP).
pub(crate) fn is_beyond(tensor: &str, layers: usize) -> bool {
    let number = tensor.split_once("layers.").and_then(|(_, rest)| rest.split('.').next());
    number.and_then(|n| n.parse::<usize>().ok()).is_some_and(|n| n >= layers)
}
