//! Integers in groups of 16: the bits of the same weights in larger groups.

use std::fs;

use moeflux::MemoryRequest;
use serde_json::{Value, json};

use crate::common::{
    Golden, TensorData, copy_golden, engine, exact, feed, read_tensors, write_tensors,
};

/// Repeats parts of `bytes` bytes.
fn repeated(tensor: &TensorData, bytes: usize) -> Vec<u8> {
    let parts = tensor.bytes.chunks_exact(bytes);
    parts.flat_map(|part| part.repeat(2)).collect()
}

/// Gives each half of a group its own scale and zero point or bias, which are equal.
fn halve_groups(name: &str, tensor: &mut TensorData, by_inputs: bool) {
    let is_factor = |suffix: &&str| name.ends_with(*suffix);
    if by_inputs && [".scales", ".qzeros"].iter().any(is_factor) {
        tensor.bytes = repeated(tensor, tensor.bytes.len() / tensor.shape[0]);
        tensor.shape[0] *= 2;
    } else if [".scales", ".biases", ".weight_scale"].iter().any(is_factor) {
        tensor.bytes = repeated(tensor, tensor.dtype.bitsize() / 8);
        *tensor.shape.last_mut().unwrap() *= 2;
    }
}

/// Halves the sizes of groups wherever a config has them.
fn halve_settings(config: &mut Value) {
    match config {
        Value::Object(map) => map.iter_mut().for_each(|(key, value)| match key.as_str() {
            "group_size" => *value = json!(value.as_u64().unwrap() / 2),
            _ => halve_settings(value),
        }),
        Value::Array(list) => list.iter_mut().for_each(halve_settings),
        _ => {}
    }
}

#[test]
fn groups_of_16_have_the_bits_of_groups_of_32() {
    for name in [
        "bailing_moe_group_32",
        "glm4_moe_plain",
        "minimax_m2_plain",
        "gemma4_own_values",
        "kimi_k2_pack_quantized",
        "qwen3_moe_awq",
        "qwen3_moe_gptq",
    ] {
        let folder = tempfile::tempdir().unwrap();
        copy_golden(name, folder.path());
        let path = folder.path().join("config.json");
        let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        halve_settings(&mut config);
        fs::write(&path, config.to_string()).unwrap();
        let path = folder.path().join("model.safetensors");
        let mut tensors = read_tensors(&path);
        let by_inputs = tensors.keys().any(|name| name.ends_with(".qweight"));
        tensors.iter_mut().for_each(|(name, tensor)| halve_groups(name, tensor, by_inputs));
        write_tensors(&path, &tensors);
        let golden = Golden::read(name);
        let logits = |folder| {
            let engine = engine(folder, exact("cpu"), MemoryRequest::default());
            feed(&mut engine.session().unwrap(), &golden.prompt(), None)
        };
        assert!(logits(folder.path()) == logits(&golden.folder), "{name}");
    }
}
