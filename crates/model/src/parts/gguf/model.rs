//! Keys of GGUF that every model has: sizes, norms, RoPE.

use moeflux_base::Error;
use serde_json::{Value, json};

use super::{
    key,
    row::{KeyRow, group, integer, layers, number, reads, size},
    writer::{KeyValue, KeyWriter, Place},
};
use crate::checkpoint::gguf::keys::{Config, Keys, add};

/// Keys of every model.
pub(crate) const MODEL: &[KeyRow] = &[
    size("hidden_size", "embedding_length"),
    layers("num_hidden_layers", "block_count"),
    integer("vocab_size", "vocab_size"),
    reads(rows_of_embedding),
    size("max_position_embeddings", "context_length"),
    number("rms_norm_eps", EPS),
    number("layer_norm_eps", LAYER_EPS),
    reads(one_epsilon),
    group(Place::Rope, read_rope, write_rope),
];

const EPS: &str = "attention.layer_norm_rms_epsilon";

/// Of LayerNorms, where all norms are.
const LAYER_EPS: &str = "attention.layer_norm_epsilon";

/// The vocabulary of files that lack its size.
fn rows_of_embedding(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let rows = keys.rows("token_embd.weight").unwrap_or(0);
    config.entry("vocab_size").or_insert(rows.into());
    Ok(())
}

fn one_epsilon(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    if config.contains_key("rms_norm_eps") {
        config.remove("layer_norm_eps");
    } else if !config.contains_key("layer_norm_eps") {
        return Err(keys.missing(EPS));
    }
    Ok(())
}

/// Number of a scaling of RoPE: its key in the config and in GGUF.
struct ScalingRow {
    config: &'static str,
    gguf: &'static str,
}

const fn scaling(config: &'static str, gguf: &'static str) -> ScalingRow {
    ScalingRow { config, gguf }
}

const SCALING_TYPE: &str = "rope.scaling.type";

const ORIGINAL: ScalingRow =
    scaling("original_max_position_embeddings", "rope.scaling.original_context_length");

/// Numbers of a scaling, in the order of configs.
const SCALING: [ScalingRow; 5] = [
    scaling("factor", "rope.scaling.factor"),
    ORIGINAL,
    scaling("beta_fast", "rope.scaling.yarn_beta_fast"),
    scaling("beta_slow", "rope.scaling.yarn_beta_slow"),
    scaling("attention_factor", "rope.scaling.yarn_attn_factor"),
];

/// The same in the order of files.
const SCALING_IN_FILES: [usize; 5] = [1, 0, 4, 2, 3];

fn read_rope(keys: &Keys<'_>, config: &mut Config) -> Result<(), Error> {
    let entries = json!({
        "tie_word_embeddings": !keys.has("output.weight"),
        "rope_theta": keys.number(key::ROPE_BASE)?.unwrap_or(10_000.0),
        "rope_scaling": rope_scaling(keys)?,
    });
    add(config, entries);
    Ok(())
}

/// Scaling of RoPE; null without one.
fn rope_scaling(keys: &Keys<'_>) -> Result<Value, Error> {
    let kind = keys.text(SCALING_TYPE)?;
    let kind = match kind.as_deref() {
        None | Some("none") => return Ok(Value::Null),
        Some(kind @ ("linear" | "yarn")) => kind,
        Some(other) => {
            return Err(keys.problem(SCALING_TYPE, &format!("is {other:?}, which is not read")));
        }
    };
    let mut scaling = Config::new();
    scaling.insert("rope_type".into(), kind.into());
    for ScalingRow { config, gguf } in &SCALING {
        if let Some(x) = keys.number(gguf)? {
            scaling.insert((*config).into(), x.into());
        }
    }
    Ok(scaling.into())
}

fn write_rope(keys: &mut KeyWriter<'_>) {
    let parameters = &keys.config["rope_parameters"];
    let full = parameters.get("full_attention").unwrap_or(parameters);
    let base = keys.config["rope_theta"].as_f64().or(full["rope_theta"].as_f64());
    let base = base.or(layer_theta(keys, false)).unwrap_or(10_000.0);
    let swa = parameters["sliding_attention"]["rope_theta"].as_f64();
    let swa = swa.or(keys.config["swa_rope_theta"].as_f64()).or(layer_theta(keys, true));
    let sections = parameters["mrope_section"].as_array().cloned();
    let scaling = match &keys.config["rope_scaling"] {
        Value::Null => full,
        scaling => scaling,
    };
    let scaling = scaling.clone();
    // The converter puts this scaling into the base.
    let width = keys.attentions().next().map_or(0.0, |gqa| gqa.shape.head_dim as f64);
    let alpha = keys.config["rope_scaling"]["alpha"].as_f64();
    let base = base * alpha.map_or(1.0, |alpha| alpha.powf(width / (width - 2.0)));
    keys.push(key::ROPE_BASE, KeyValue::F32(base as f32));
    if let Some(base) = swa {
        keys.push(key::SLIDING_ROPE_BASE, KeyValue::F32(base as f32));
    }
    if let Some(sections) = sections {
        let section = |n: &Value| n.as_i64().unwrap_or(0) as i32;
        let sections = sections.iter().map(section).chain([0]).collect();
        keys.push(key::ROPE_SECTIONS, KeyValue::I32s(sections));
    }
    let kind = scaling.get("rope_type").or_else(|| scaling.get("type"));
    let kind = kind.and_then(Value::as_str);
    let number = |name: &str| scaling[name].as_f64().map(|x| x as f32);
    let positions = keys.config["max_position_embeddings"].as_f64();
    match (kind, number(ORIGINAL.config), positions) {
        (Some("longrope"), Some(original), Some(positions)) => {
            // The divisors are tensors.
            let factor = (1.0 + (positions as f32 / original).ln() / original.ln()).sqrt();
            keys.push(ORIGINAL.gguf, KeyValue::U32(original as u32));
            keys.push("rope.scaling.attn_factor", KeyValue::F32(factor));
        }
        (Some(kind @ ("linear" | "yarn")), ..) => {
            keys.push(SCALING_TYPE, KeyValue::Text(kind.to_owned()));
            for ScalingRow { config, gguf } in SCALING_IN_FILES.map(|row| &SCALING[row]) {
                let is_integer = *gguf == ORIGINAL.gguf;
                let value = number(config).map(|x| match is_integer {
                    true => KeyValue::U32(x as u32),
                    false => KeyValue::F32(x),
                });
                if let Some(value) = value {
                    keys.push(gguf, value);
                }
            }
        }
        _ => {}
    }
}

/// RoPE's base of the first layer that has a window or has none, of a list for each layer.
fn layer_theta(keys: &KeyWriter<'_>, slides: bool) -> Option<f64> {
    let layer = keys.attentions().position(|gqa| gqa.shape.window.is_some() == slides)?;
    keys.config["rope_theta"].get(layer)?.as_f64()
}

/// RoPE with a divisor for each of `pairs` frequencies, as the converter expresses the scaling of
/// Llama 3; null without one.
pub(crate) fn divided_rope(keys: &Keys<'_>, pairs: u64) -> Result<Value, Error> {
    let name = "rope_freqs.weight";
    let Some(mut divisors) = keys.floats(name)? else { return Ok(Value::Null) };
    if (divisors.len() as u64) < pairs {
        let problem = format!("{name} has {} divisors of {pairs} pairs", divisors.len());
        return Err(keys.error(problem));
    }
    divisors.truncate(pairs as usize);
    // The same at any length.
    Ok(json!({
        "rope_type": "longrope",
        "short_factor": divisors,
        "long_factor": divisors,
        "short_mscale": 1.0,
        "long_mscale": 1.0,
        "original_max_position_embeddings": keys.size("context_length")?,
    }))
}
