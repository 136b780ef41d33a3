//! Composite checkpoints: the language model's config is nested, its tensors have a prefix.

use std::{fs, path::Path};

use moeflux::MemoryRequest;
use serde_json::{Map, Value, json};

use crate::common::{Golden, engine, exact, feed};

/// Rewrites `golden` in the layout of Kimi-K2.5: `kimi_k25` around `kimi_k2`, tensors prefixed by
/// `language_model.`, and `outer` merged into the outer config.
fn write_composite(golden: &Path, outer: &Value, into: &Path) {
    let bytes = fs::read(golden.join("model.safetensors")).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let below = |(name, at): (String, Value)| match name.as_str() {
        "__metadata__" => (name, at),
        _ => (format!("language_model.{name}"), at),
    };
    let header = Value::Object(header.into_iter().map(below).collect()).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(&bytes[8 + n..]);
    fs::write(into.join("model.safetensors"), file).unwrap();

    let mut text: Map<String, Value> =
        serde_json::from_slice(&fs::read(golden.join("config.json")).unwrap()).unwrap();
    let mut config =
        json!({"model_type": "kimi_k25", "architectures": ["KimiK25ForConditionalGeneration"]});
    for key in ["quantization", "quantization_config"] {
        if let Some(Value::Object(map)) = text.remove(key) {
            let below = |(name, of): (String, Value)| match of {
                Value::Object(_) => (format!("language_model.{name}"), of),
                _ => (name, of),
            };
            config[key] = Value::Object(map.into_iter().map(below).collect());
        }
    }
    config["text_config"] = Value::Object(text);
    config.as_object_mut().unwrap().extend(outer.as_object().unwrap().clone());
    fs::write(into.join("config.json"), config.to_string()).unwrap();
}

#[test]
fn a_nested_kimi_equals_the_flat_one() {
    let golden = Golden::read("kimi_k2");
    let logits = |folder: &Path| {
        let engine = engine(folder, exact("cpu"), MemoryRequest::default());
        feed(&mut engine.session().unwrap(), &golden.prompt(), None)
    };
    let flat = logits(&golden.folder);
    // transformers writes "tie_word_embeddings" into the outer config even if there is a separate
    // head.
    for outer in
        [json!({}), json!({"tie_word_embeddings": true, "vision_config": {"hidden_size": 3}})]
    {
        let folder = tempfile::tempdir().unwrap();
        write_composite(&golden.folder, &outer, folder.path());
        assert_eq!(logits(folder.path()), flat, "{outer}");
    }
}
