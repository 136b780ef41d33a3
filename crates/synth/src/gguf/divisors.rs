//! Divisors of RoPE's frequencies, which the converter writes as tensors for some models.

use moeflux_model::blueprint::{Blueprint, MixerBlueprint};
use moeflux_ops::Scalar;
use serde_json::Value;

use super::super::{
    module::SynthTensor,
    values::{RandomStream, TensorValues},
};

/// Tensors of divisors of an architecture's file. `text` is the language model's config.
pub(super) fn tensors(architecture: &str, text: &Value, blueprint: &Blueprint) -> Vec<SynthTensor> {
    match architecture {
        "gemma4" => vec![vector("rope_freqs.weight", gemma4(text))],
        "phimoe" => {
            let factors = |list: &str| {
                let all = text["rope_scaling"][list].as_array().into_iter().flatten();
                all.filter_map(|factor| Some(factor.as_f64()? as f32)).collect()
            };
            vec![
                vector("rope_factors_long.weight", factors("long_factor")),
                vector("rope_factors_short.weight", factors("short_factor")),
            ]
        }
        "step35" => step35(text, blueprint)
            .map(|all| vector("rope_freqs.weight", all))
            .into_iter()
            .collect(),
        _ => Vec::new(),
    }
}

/// Next to infinite for pairs of full layers that are not rotated.
fn gemma4(text: &Value) -> Vec<f32> {
    let width = text["global_head_dim"].as_u64().or(text["head_dim"].as_u64()).unwrap_or(0);
    let full = &text["rope_parameters"]["full_attention"];
    let share = full["partial_rotary_factor"].as_f64().unwrap_or(1.0);
    let (pairs, ones) = (width / 2, (width as f64 / 2.0 * share) as u64);
    (0..pairs).map(|pair| if pair < ones { 1.0 } else { 1e30 }).collect()
}

/// The scaling of Llama 3 in full layers, then ones for pairs that only layers with windows rotate.
fn step35(text: &Value, blueprint: &Blueprint) -> Option<Vec<f32>> {
    let (layer, full) = blueprint.layers.iter().enumerate().find_map(|(i, layer)| {
        let Some(MixerBlueprint::Gqa(gqa)) = layer.mixer() else { return None };
        gqa.shape.window.is_none().then_some((i, gqa))
    })?;
    let (theta, scaled) = (text["rope_theta"].get(layer)?.as_f64()?, &full.rope.frequencies);
    let divisor = |pair: usize| match scaled.get(pair) {
        Some(frequency) => {
            let plain = theta.powf(-(pair as f64) / scaled.len() as f64);
            (plain / f64::from(*frequency)) as f32
        }
        None => 1.0,
    };
    Some((0..full.shape.head_dim / 2).map(divisor).collect())
}

fn vector(name: &str, numbers: Vec<f32>) -> SynthTensor {
    let len = numbers.len() as u64;
    SynthTensor {
        name: name.to_owned(),
        dtype: Scalar::F32.name(),
        shape: vec![len],
        bytes: 4 * len,
        values: TensorValues::Numbers(numbers),
        stream: RandomStream::new(0, name),
    }
}
