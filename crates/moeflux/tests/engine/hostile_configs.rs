//! Hostile configs and tensors: with any value of a config, or any type or shape of a tensor,
//! opening gives an error that names a key or a tensor, or a model that runs. Nothing panics.

use std::{collections::BTreeSet, fs, path::Path};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, MemoryRequest, StepControl,
    model::blueprint::Blueprint, runtime::Logits,
};
use proptest::{prelude::*, test_runner::TestRunner};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::common::{Golden, copy_golden, exact, goldens};

/// Goldens with a variety of formats and keys.
const VARIED: [&str; 13] = [
    "deepseek_v3_direct_q",
    "deepseek_v3_hub_fp8",
    "deepseek_v32",
    "gemma4",
    "glm4_moe",
    "glm_moe_dsa_shared",
    "gpt_oss_hub",
    "gpt_oss_mxfp4",
    "kimi_k2_betas",
    "minimax_m2",
    "qwen3_5_moe_odd_group",
    "qwen3_moe_mxfp4",
    "qwen3_next",
];

/// Names of [`VARIED`] and of a golden of each other architecture.
fn varied_goldens() -> Vec<String> {
    let varied = VARIED.map(Golden::read);
    let mut covered: BTreeSet<_> = varied.iter().map(Golden::model_type).collect();
    let others = goldens().into_iter().filter(|golden| covered.insert(golden.model_type()));
    varied.map(|golden| golden.name).into_iter().chain(others.map(|golden| golden.name)).collect()
}

/// A folder with the files of a golden, and its config.
fn copy(name: &str) -> (TempDir, Value) {
    let folder = tempfile::tempdir().unwrap();
    copy_golden(name, folder.path());
    for entry in fs::read_dir(folder.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.file_name().unwrap().to_str().unwrap().starts_with("token") {
            fs::remove_file(path).unwrap();
        }
    }
    let config =
        serde_json::from_slice(&fs::read(folder.path().join("config.json")).unwrap()).unwrap();
    (folder, config)
}

/// JSON pointers to the leaf values of a config: lists as a whole, and their first element.
fn places(value: &Value, at: &str, all: &mut Vec<String>) {
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(key, v)| places(v, &format!("{at}/{key}"), all))
        }
        Value::Array(list) => {
            all.push(at.to_owned());
            if !list.is_empty() {
                all.push(format!("{at}/0"));
            }
        }
        _ => all.push(at.to_owned()),
    }
}

/// Replacements of a value.
fn hostile(old: &Value) -> Vec<Value> {
    let mut all = vec![
        json!(null),
        json!(true),
        json!(0),
        json!(1),
        json!(2),
        json!(3),
        json!(-1),
        json!(1u64 << 24),
        json!(1u64 << 40),
        json!(u64::MAX),
        json!(0.5),
        json!(-0.25),
        json!(1e-300),
        json!(1e300),
        json!("other"),
        json!([]),
        json!([0]),
        json!(["full_attention"]),
        json!({}),
    ];
    if let Some(n) = old.as_u64() {
        all.extend([json!(n + 1), json!(n * 2), json!(n / 2), json!(n.saturating_sub(1))]);
    }
    if let Some(list) = old.as_array() {
        all.push(list.iter().chain(list).cloned().collect());
        all.push(list.iter().take(list.len() / 2).cloned().collect());
    }
    all
}

/// Keys that other configs have.
const OTHERS: [&str; 20] = [
    "n_group",
    "topk_group",
    "moe_layer_freq",
    "first_k_dense_replace",
    "q_lora_rank",
    "rope_scaling",
    "rope_parameters",
    "rotary_dim",
    "partial_rotary_factor",
    "sliding_window",
    "layer_types",
    "mlp_layer_types",
    "indexer_types",
    "index_topk_pattern",
    "index_topk_freq",
    "index_skip_topk_offset",
    "swiglu_alpha",
    "final_logit_softcapping",
    "head_dim",
    "mlp_only_layers",
];

/// Opens the model and feeds some tokens.
fn run(folder: &Path) -> Result<(), Error> {
    let checkpoint = Checkpoint::open(folder)?;
    let vocab = Blueprint::for_checkpoint(&checkpoint)?.vocab as u32;
    let memory = MemoryRequest::default().budget(1 << 30).chunk(4);
    let options = EngineOptions::default().memory(memory).device(exact("cpu"));
    let engine = Engine::open(checkpoint, options, &mut |_, _| {})?;
    let mut session = engine.session()?;
    let n = engine.plan().context.min(12);
    let tokens: Vec<u32> = (0..n as u32).map(|i| (i * 7 + 3) % vocab).collect();
    session.feed(&tokens, Logits::Last, &mut StepControl::default(), &mut |_, _| {})
}

/// Checks that an error names a key or a tensor.
fn names_its_cause(error: &Error, at: &str) {
    let (message, key) =
        (error.to_string(), at.rsplit('/').find(|k| k.parse::<usize>().is_err()).unwrap());
    let known = [key, "\"", "layers.", "embed", "lm_head", "norm.weight", "floor of", "layer "];
    assert!(
        known.iter().any(|k| message.contains(k)),
        "{at}: {message:?} names no key and no tensor"
    );
}

/// Runs a golden's config with the value at `at` replaced or, without a value, removed.
fn check(folder: &Path, config: &Value, at: &str, value: Option<Value>, whole: bool) {
    let mut config = config.clone();
    let (parent, key) = at.rsplit_once('/').unwrap();
    match (config.pointer_mut(parent).unwrap(), value) {
        (Value::Object(map), Some(value)) => drop(map.insert(key.into(), value)),
        (Value::Object(map), None) => drop(map.remove(key)),
        (Value::Array(list), Some(value)) => list[0] = value,
        (_, _) => return,
    }
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let result = if whole {
        run(folder)
    } else {
        Checkpoint::open(folder).and_then(|c| Blueprint::for_checkpoint(&c)).map(drop)
    };
    if let Err(error) = result {
        names_its_cause(&error, at);
    }
}

/// Tests some values of each golden's config, one at a time; `whole` runs the model too.
fn some_values(cases: u32, whole: bool) {
    for name in varied_goldens() {
        let (folder, config) = copy(&name);
        let mut all = Vec::new();
        places(&config, "", &mut all);
        let text = if config.get("text_config").is_some() { "/text_config" } else { "" };
        all.extend(OTHERS.iter().map(|key| format!("{text}/{key}")));
        let mut runner = TestRunner::new_with_rng(
            ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() },
            proptest::test_runner::TestRng::deterministic_rng(
                proptest::test_runner::RngAlgorithm::ChaCha,
            ),
        );
        let case = (any::<prop::sample::Index>(), any::<prop::sample::Index>());
        let result = runner.run(&case, |(place, value)| {
            let at = place.get(&all);
            let mut values: Vec<_> =
                hostile(config.pointer(at).unwrap_or(&Value::Null)).into_iter().map(Some).collect();
            values.push(None);
            check(folder.path(), &config, at, value.get(&values).clone(), whole);
            Ok(())
        });
        if let Err(error) = result {
            panic!("{name}: {error}");
        }
    }
}

#[test]
fn configs_become_blueprints_or_errors_that_name_their_cause() {
    some_values(64, false);
}

#[test]
fn configs_become_models_that_run_or_errors_that_name_their_cause() {
    some_values(8, true);
}

/// Changes a tensor's entry so that its size stays the same or is unknown.
fn hostile_entry(entry: &Value, which: usize) -> Value {
    let (dtype, shape) = (entry["dtype"].as_str().unwrap(), entry["shape"].as_array().unwrap());
    let same: &[&str] = match dtype {
        "F32" | "U32" | "I32" => &["F32", "U32", "I32"],
        "U8" | "F8_E4M3" | "F8_E8M0" => &["U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"],
        _ => &["F16", "BF16", "I16"],
    };
    let numbers: u64 = shape.iter().map(|n| n.as_u64().unwrap()).product();
    let mut entry = entry.clone();
    match which {
        0..4 => entry["dtype"] = json!(same[which % same.len()]),
        4 => entry["shape"] = shape.iter().rev().cloned().collect(),
        5 => entry["shape"] = json!([numbers]),
        6 => entry["shape"] = json!([1, numbers, 1]),
        7 => (entry["dtype"], entry["shape"]) = (json!("C64"), json!([1u64 << 40, 1u64 << 40])),
        _ => (entry["shape"], entry["data_offsets"]) = (json!([0]), json!([0, 0])),
    }
    entry
}

#[test]
fn tensors_of_other_types_and_shapes_are_errors_that_name_them() {
    for name in varied_goldens() {
        let (folder, _) = copy(&name);
        let path = folder.path().join("model.safetensors");
        let Ok(bytes) = fs::read(&path) else { continue };
        fs::remove_file(folder.path().join("model.safetensors.index.json")).ok();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Map<String, Value> =
            serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        for (i, tensor) in header.keys().filter(|key| *key != "__metadata__").enumerate().step_by(7)
        {
            let mut header = header.clone();
            header[tensor] = hostile_entry(&header[tensor], i % 9);
            let header = Value::Object(header).to_string();
            let mut file = (header.len() as u64).to_le_bytes().to_vec();
            file.extend(header.as_bytes());
            file.extend(&bytes[8 + n..]);
            fs::write(&path, file).unwrap();
            if let Err(error) = run(folder.path()) {
                let (message, stem) = (error.to_string(), tensor.rsplit_once('.').unwrap().0);
                assert!(
                    message.contains(stem) || message.contains("layer "),
                    "{tensor}: {message}"
                );
            }
        }
    }
}
