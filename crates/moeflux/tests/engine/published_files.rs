//! Folders as people publish and download them: stale indices, pointers, adapters, other
//! quantisations, the Hub's cache, end tokens in any file. The base model says `Hi`.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, GenerateRequest, MemoryRequest, Message, Sampling,
    StepControl, generate, runtime::Logits, text::Delta,
};
use serde_json::{Map, Value, json};
use tempfile::TempDir;

use crate::common::{copy_folder, copy_golden, data, exact};

const TENSORS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

fn published(case: &str) -> PathBuf {
    data().join("published_files").join(case)
}

/// A copy of the base model with the files of a case.
fn case(name: &str) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    copy_folder(&published("base"), folder.path());
    if name != "base" {
        copy_folder(&published(name), folder.path());
    }
    folder
}

fn open(folder: &Path) -> Result<Engine, Error> {
    let memory = MemoryRequest::default().budget(4 << 30);
    let options = EngineOptions::default().memory(memory).device(exact("cpu"));
    Engine::open(Checkpoint::open(folder)?, options, &mut |_, _| {})
}

/// Greedy answer to a question.
fn answer(folder: &Path, request: GenerateRequest) -> String {
    let engine = open(folder).unwrap_or_else(|e| panic!("{e}"));
    let prompt = engine.text().unwrap().chat(&[Message::user("q")], &Default::default()).unwrap();
    let request = request.sampling(Sampling::greedy()).max_tokens(20);
    let (mut session, mut control) = (engine.session().unwrap(), StepControl::default());
    let mut ignore = |_: Delta<'_>| ControlFlow::Continue(());
    generate(&mut session, &prompt, &request, &mut control, &mut ignore).unwrap().text
}

fn says_hi(folder: &Path) {
    assert_eq!(answer(folder, GenerateRequest::default()), "Hi");
}

/// Asserts that opening fails with all of `parts`, and advises a download only with `download`.
fn fails(folder: &Path, parts: &[&str], download: bool) {
    let message = open(folder).err().expect("an error").to_string();
    for part in parts {
        assert!(message.contains(part), "{message:?} does not contain {part:?}");
    }
    assert_eq!(message.contains("download"), download, "{message}");
}

fn write_json(folder: &Path, name: &str, value: &Value) {
    fs::write(folder.join(name), value.to_string()).unwrap();
}

fn config(folder: &Path, key: &str, value: Value) {
    let path = folder.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config[key] = value;
    fs::write(path, config.to_string()).unwrap();
}

/// Renames tensors of a safetensors file.
fn rename_tensors(path: &Path, rename: impl Fn(&str) -> String) {
    let bytes = fs::read(path).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let rename = |name: String| if name == "__metadata__" { name } else { rename(&name) };
    let header: Map<_, _> = header.into_iter().map(|(name, at)| (rename(name), at)).collect();
    let header = Value::Object(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(&bytes[8 + n..]);
    fs::write(path, file).unwrap();
}

#[test]
fn configs_and_templates_are_read_where_others_write_them() {
    for name in ["base", "config_of_transformers_5", "one_token_more"] {
        says_hi(case(name).path());
    }
    let folder = case("chat_template_json");
    fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    says_hi(folder.path());
}

#[test]
fn any_file_may_name_the_end_of_a_turn() {
    let folder = case("end_of_turn");
    let path = folder.path();
    let says = |text: &str| assert_eq!(answer(path, GenerateRequest::default()), text);
    says("Paris");
    // The template alone.
    write_json(path, "tokenizer_config.json", &json!({}));
    says("Paris");
    fs::write(path.join("chat_template.jinja"), "{{ messages[0].content }}").unwrap();
    says("Parisuge");
    assert_eq!(answer(path, GenerateRequest::default().end_tokens(vec![258])), "Paris");
    for (name, value) in [
        ("tokenizer_config.json", json!({"eot_token": "<|im_end|>"})),
        ("special_tokens_map.json", json!({"eos_token": {"content": "<|im_end|>"}})),
        ("tokenizer_config.json", json!({"extra_special_tokens": {"eot_token": "<|im_end|>"}})),
        ("generation_config.json", json!({"eos_token_id": [256, 258]})),
    ] {
        let before = fs::read(path.join(name)).ok();
        write_json(path, name, &value);
        says("Paris");
        match before {
            Some(before) => fs::write(path.join(name), before).unwrap(),
            None => fs::remove_file(path.join(name)).unwrap(),
        }
    }
    config(path, "eos_token_id", json!(258));
    says("Paris");
    // An id of ordinary text beside others is a default of a class.
    config(path, "eos_token_id", json!(u32::from(b'i')));
    says("Parisuge");
}

#[test]
fn whole_files_win_over_a_stale_index() {
    let folder = case("stale_index");
    says_hi(folder.path());
    let notes = Checkpoint::open(folder.path()).unwrap().notes().to_vec();
    assert!(
        notes.len() == 1 && notes[0].contains(INDEX) && notes[0].contains(TENSORS),
        "{notes:?}"
    );
    for broken in ["{\"weight_map\": {", "{}", "{\"weight_map\": {}}"] {
        fs::write(folder.path().join(INDEX), broken).unwrap();
        says_hi(folder.path());
    }
    // Some of the files that the index names are missing.
    let folder = case("stale_index");
    let first = "model-00001-of-00002.safetensors";
    fs::rename(folder.path().join(TENSORS), folder.path().join(first)).unwrap();
    fails(folder.path(), &["model-00002-of-00002.safetensors", "1 of 2 files"], true);
    // The series itself is incomplete.
    fs::remove_file(folder.path().join(INDEX)).unwrap();
    fails(folder.path(), &["model-00002-of-00002.safetensors", "missing"], true);
    // Other names.
    let weights = folder.path().join("weights.00.safetensors");
    fs::rename(folder.path().join(first), &weights).unwrap();
    says_hi(folder.path());
}

#[test]
fn only_needed_tensors_matter() {
    let folder = case("base");
    let mut map = json!({"model.ghost.weight": TENSORS, "lm_head.weight": TENSORS});
    write_json(folder.path(), INDEX, &json!({"weight_map": map}));
    says_hi(folder.path());
    map["lm_head.weight"] = json!(TENSORS);
    rename_tensors(&folder.path().join(TENSORS), |name| name.replace("lm_head", "head"));
    fails(folder.path(), &["lm_head.weight", TENSORS, "lacks it"], true);
    fs::remove_file(folder.path().join(INDEX)).unwrap();
    let parts = ["lm_head.weight", "no shard has it", "; the file has head.weight"];
    fails(folder.path(), &parts, false);
    let rename = |name: &str| name.replace("embed_tokens", "embedding");
    rename_tensors(&folder.path().join(TENSORS), rename);
    let parts =
        ["known prefix", "model.embed_tokens.weight", "; the file has model.embedding.weight"];
    fails(folder.path(), &parts, false);
}

#[test]
fn what_training_tools_put_into_names_is_left_out() {
    type Rename = fn(&str) -> String;
    let renames: [Rename; 5] = [
        |name| format!("base_model.model.{name}"),
        |name| format!("module._orig_mod.{name}"),
        |name| name.replacen("model.", "model._orig_mod.", 1),
        |name| name.replace(".self_attn.", "._fsdp_wrapped_module.self_attn."),
        // Some of the names.
        |name| name.replace("lm_head", "module.lm_head"),
    ];
    for rename in renames {
        let folder = case("base");
        rename_tensors(&folder.path().join(TENSORS), rename);
        says_hi(folder.path());
        let map = json!({rename("lm_head.weight"): TENSORS});
        write_json(folder.path(), INDEX, &json!({"weight_map": map}));
        rename_tensors(&folder.path().join(TENSORS), |name| name.replace("lm_head", "head"));
        fails(folder.path(), &["lm_head.weight", TENSORS, "lacks it"], true);
    }
    // Quantised weights, with names of scales.
    let folder = tempfile::tempdir().unwrap();
    copy_golden("qwen3_moe", folder.path());
    let identity = |folder: &Path| Checkpoint::open(folder).unwrap().identity().unwrap();
    let before = identity(folder.path());
    rename_tensors(&folder.path().join(TENSORS), |name| format!("base_model.model.{name}"));
    assert_eq!(identity(folder.path()), before);

    let folder = case("base");
    let path = folder.path().join(TENSORS);
    rename_tensors(&path, |name| name.replace("lm_head", "module._orig_mod.model.norm"));
    let both = ["model.norm.weight", "module._orig_mod.model.norm.weight", "remove one"];
    fails(folder.path(), &both, false);
    let adapter = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight";
    rename_tensors(&path, |name| match name {
        "module._orig_mod.model.norm.weight" => adapter.to_owned(),
        name => format!("base_model.model.{name}"),
    });
    fails(folder.path(), &["q_proj.lora_A.default.weight", "LoRA", "merge_and_unload"], false);
}

#[test]
fn pointers_and_pages_are_named() {
    let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4976698672\n";
    for (name, contents, help) in [
        (TENSORS, pointer, "git lfs pull"),
        ("tokenizer.json", pointer, "git lfs pull"),
        ("config.json", pointer, "git lfs pull"),
        (TENSORS, "<!DOCTYPE html><html><body>Log in</body></html>", "web page"),
        ("tokenizer.json", "/annex/objects/MD5E-s5--00", "git annex get"),
    ] {
        let folder = case("base");
        fs::write(folder.path().join(name), contents).unwrap();
        let download = help == "web page";
        fails(folder.path(), &[name, help], download);
    }
}

#[test]
fn other_quantisations_are_named() {
    let rename = |to: &'static str| {
        move |name: &str| match name.strip_suffix("_proj.weight") {
            Some(module) => format!("{module}_proj{to}"),
            None => name.to_owned(),
        }
    };
    for (settings, to, parts) in [
        (json!({"quant_method": "exl3", "bits": 4}), ".trellis", ["exl3", "quant_method"]),
        (json!({"quant_method": "hqq"}), ".W_q", ["hqq", "quant_method"]),
        (json!({"quant_method": "quark"}), ".qweight", ["quark", "config.json"]),
        (json!(null), ".trellis", ["EXL3", ".trellis"]),
        (json!(null), ".W_q", ["HQQ", "MLX"]),
    ] {
        let folder = case("base");
        config(folder.path(), "quantization_config", settings);
        rename_tensors(&folder.path().join(TENSORS), rename(to));
        fails(folder.path(), &[&parts[..], &["q_proj", "not read", "unquantised"]].concat(), false);
    }
    // Methods that are read, in tensors that do not fit them.
    for (method, to, parts) in [
        ("gptq", ".qweight", ["q_proj.qweight", "GPTQ"]),
        ("awq", ".qweight", ["q_proj.qweight", "AWQ"]),
        ("compressed-tensors", ".weight_packed", ["q_proj.weight_packed", "I32"]),
    ] {
        let folder = case("base");
        config(folder.path(), "quantization_config", json!({"quant_method": method}));
        rename_tensors(&folder.path().join(TENSORS), rename(to));
        fails(folder.path(), &parts, false);
    }
    // Stale settings beside tensors that are read.
    for method in ["gptq", "bitsandbytes"] {
        let folder = case("base");
        config(folder.path(), "quantization_config", json!({"quant_method": method}));
        says_hi(folder.path());
    }
}

#[test]
fn what_is_no_model_is_named() {
    let folder = case("base");
    let path = folder.path();
    let adapter = json!({"base_model_name_or_path": "org/base"});
    write_json(path, "adapter_config.json", &adapter);
    // A merged model may keep the file.
    says_hi(path);
    fs::rename(path.join(TENSORS), path.join("adapter_model.safetensors")).unwrap();
    fails(path, &["LoRA", "org/base", "merge"], false);
    fs::rename(path.join("config.json"), path.join("old.json")).unwrap();
    fails(path, &["LoRA", "org/base", "merge"], false);
    for (name, part) in [("model-q4.gguf", "GGUF"), ("params.json", "authors")] {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(name), "{}").unwrap();
        fails(folder.path(), &[part], false);
        if part == "GGUF" {
            fails(&folder.path().join(name), &[part], false);
        }
    }
    let folder = case("base");
    let pickle = folder.path().join("pytorch_model.bin");
    fs::rename(folder.path().join(TENSORS), pickle).unwrap();
    fails(folder.path(), &["pytorch_model.bin", "save_pretrained"], false);
    // A file instead of its folder, and a folder around the model's.
    let folder = case("base");
    let name = folder.path().to_str().unwrap();
    for file in ["config.json", TENSORS] {
        fails(&folder.path().join(file), &[file, "give the folder", name], false);
    }
    let outer = tempfile::tempdir().unwrap();
    fs::create_dir(outer.path().join("inner")).unwrap();
    copy_folder(folder.path(), &outer.path().join("inner"));
    fails(outer.path(), &["inner"], false);
}

#[test]
fn a_repository_in_the_hub_cache_is_its_snapshot() {
    let cache = tempfile::tempdir().unwrap();
    let repository = cache.path().join("models--org--name");
    let snapshots = repository.join("snapshots");
    for hash in ["aaaa", "bbbb"] {
        fs::create_dir_all(snapshots.join(hash)).unwrap();
        copy_folder(&published("base"), &snapshots.join(hash));
    }
    fails(&repository, &["aaaa", "bbbb", "give one"], false);
    fs::create_dir(repository.join("refs")).unwrap();
    fs::write(repository.join("refs/main"), "bbbb\n").unwrap();
    for path in [&repository, &snapshots] {
        let checkpoint = Checkpoint::open(path).unwrap();
        assert_eq!(checkpoint.folder(), snapshots.join("bbbb"));
    }
    fs::write(repository.join("refs/main"), "../../elsewhere").unwrap();
    fails(&repository, &["give one"], false);
    fs::remove_dir_all(snapshots.join("aaaa")).unwrap();
    says_hi(&repository);
    fails(Path::new("no-such-org/no-such-name"), &["no-such-org/no-such-name", "hf"], true);
}

#[cfg(unix)]
#[test]
fn a_link_without_its_file_is_missing() {
    let folder = case("base");
    fs::remove_file(folder.path().join(TENSORS)).unwrap();
    std::os::unix::fs::symlink("../blobs/gone", folder.path().join(TENSORS)).unwrap();
    fails(folder.path(), &[TENSORS, "link"], true);
}

#[test]
fn numbers_that_json_lacks_are_errors_only_where_they_are_read() {
    let edit = |name: &str, key: &str, word: &str| {
        let folder = case("base");
        let path = folder.path().join(name);
        let mut value: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        value[key] = json!("@");
        fs::write(&path, value.to_string().replace("\"@\"", word)).unwrap();
        folder
    };
    for word in ["NaN", "Infinity", "-Infinity"] {
        says_hi(edit("config.json", "initializer_range", word).path());
        says_hi(edit("tokenizer_config.json", "model_max_length", word).path());
        says_hi(edit("generation_config.json", "length_penalty", word).path());
        let folder = edit("config.json", "rope_theta", word);
        fails(folder.path(), &["config.json", "\"rope_theta\"", word], false);
        // Advice that is not needed is no error.
        let folder = edit("generation_config.json", "temperature", word);
        let engine = open(folder.path()).unwrap();
        let error = engine.text().unwrap().generation().unwrap_err().to_string();
        assert!(error.contains("generation_config.json") && error.contains(word), "{error}");
    }
    let folder = case("base");
    fs::write(folder.path().join("config.json"), "{\"model_type\": ").unwrap();
    fails(folder.path(), &["config.json", "ends early"], true);
}

#[test]
fn tokens_beyond_the_vocabulary_are_none() {
    let engine = open(case("one_token_more").path()).unwrap();
    let mut session = engine.session().unwrap();
    let mut control = StepControl::default();
    let error = session.feed(&[259], Logits::Last, &mut control, &mut |_, _| {}).unwrap_err();
    assert!(error.to_string().contains("259"), "{error}");
}

#[test]
fn the_class_of_a_tokenizer_adds_what_its_config_asks_for() {
    let folder = case("bos");
    let ids = |changes: Value| {
        let path = folder.path().join("tokenizer_config.json");
        let mut config: Map<String, Value> = serde_json::from_slice(
            &fs::read(published("bos").join("tokenizer_config.json")).unwrap(),
        )
        .unwrap();
        config.extend(changes.as_object().unwrap().clone());
        fs::write(path, Value::Object(config).to_string()).unwrap();
        open(folder.path()).unwrap().text().unwrap().encode("q").unwrap()
    };
    assert_eq!(ids(json!({})), [256, 113]);
    assert_eq!(ids(json!({"add_eos_token": true})), [256, 113, 257]);
    assert_eq!(ids(json!({"add_bos_token": false})), [113]);
    assert_eq!(ids(json!({"tokenizer_class": "PreTrainedTokenizerFast"})), [113]);
}
