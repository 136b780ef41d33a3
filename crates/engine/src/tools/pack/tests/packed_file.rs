//! Tests of untrusted `experts.moeflux` files: opening is correct or an error, never a panic.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use moeflux_base::Error;
use moeflux_model::{
    blueprint::Blueprint,
    checkpoint::{Checkpoint, CheckpointOptions},
    seam::{ALIGN, DENSE, EXPERTS, Frame, digest},
};
use proptest::{prelude::*, test_runner::TestRunner};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{
    runtime::plan::MemoryRequest,
    session::engine::{Engine, EngineOptions},
    tools::pack::packer::pack,
};

const PREFIX: usize = Frame::PREFIX as usize;

/// A packed golden: its folder and the contents of its file of experts.
fn packed(name: &str) -> (TempDir, PathBuf, Vec<u8>) {
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("out");
    pack_golden(&golden(name), &out);
    let bytes = fs::read(out.join(EXPERTS)).unwrap();
    (temp, out, bytes)
}

fn golden(name: &str) -> PathBuf {
    moeflux_goldens::golden(name)
}

fn pack_golden(folder: &Path, out: &Path) {
    pack(&Checkpoint::open(folder).unwrap(), out, &mut |_, _| ControlFlow::Continue(())).unwrap();
}

fn json_of(file: &[u8]) -> Value {
    let len = u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize;
    serde_json::from_slice(&file[PREFIX..PREFIX + len]).unwrap()
}

/// The file with another header, with a valid digest, and the same records.
fn with_header(file: &[u8], header: &Value) -> Vec<u8> {
    let old = u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize;
    let records = &file[(PREFIX + old).next_multiple_of(4096)..];
    let json = header.to_string().into_bytes();
    let mut all = file[..16].to_vec();
    all.extend((json.len() as u64).to_le_bytes());
    let signed = digest(&[&all, &json[..]].concat());
    all.extend(signed.to_le_bytes());
    all.extend(json);
    all.resize(all.len().next_multiple_of(4096), 0);
    all.extend(records);
    all
}

/// Opens the folder: an error, or a model whose experts are all within their file.
fn open(folder: &Path, contents: &[u8]) -> Result<(), Error> {
    fs::write(folder.join(EXPERTS), contents).unwrap();
    let checkpoint = Checkpoint::open(folder)?;
    let blueprint = Blueprint::for_checkpoint(&checkpoint)?;
    let mut end = 0;
    for (_, moe) in blueprint.moe_layers() {
        for segment in (0..moe.experts.count).flat_map(|e| moe.experts.segments(e)) {
            assert!(segment.offset >= end && segment.offset.is_multiple_of(ALIGN));
            end = segment.offset + segment.bytes as u64;
            assert!(end <= contents.len() as u64);
        }
    }
    let memory = MemoryRequest { budget: Some(1 << 30), ..MemoryRequest::default() };
    Engine::open(checkpoint, EngineOptions { memory, ..EngineOptions::default() }, &mut |_, _| {})?;
    Ok(())
}

/// Collects the JSON pointers of all values of a header.
fn pointers(value: &Value, at: &str, all: &mut Vec<String>) {
    all.push(at.to_owned());
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(key, v)| pointers(v, &format!("{at}/{key}"), all))
        }
        Value::Array(list) => {
            let entries = list.iter().enumerate().take(2);
            entries.for_each(|(i, v)| pointers(v, &format!("{at}/{i}"), all))
        }
        _ => {}
    }
}

#[test]
fn every_value_of_a_header_may_be_hostile() {
    let (_temp, folder, file) = packed("qwen3_moe");
    let header = json_of(&file);
    assert!(with_header(&file, &header) == file);
    open(&folder, &file).unwrap();
    let mut all = Vec::new();
    pointers(&header, "", &mut all);
    assert!(all.len() > 30, "{all:?}");
    for at in all {
        let old = header.pointer(&at).unwrap().clone();
        let mut hostile = vec![
            json!(null),
            json!(0),
            json!(1),
            json!(-1),
            json!(u64::MAX),
            json!(1u64 << 62),
            json!([]),
            json!({}),
        ];
        hostile.push(json!("x"));
        hostile.push(json!("../../etc/passwd"));
        match &old {
            Value::Number(n) => {
                hostile.extend([
                    json!(n.as_u64().unwrap() + 1),
                    json!(n.as_u64().unwrap().wrapping_sub(1)),
                ]);
                hostile
                    .extend([json!(u64::MAX / n.as_u64().unwrap().max(1)), json!(u64::MAX - 4095)]);
            }
            Value::Array(list) => {
                hostile.push(list[..list.len().saturating_sub(1)].into());
                hostile.push([&list[..], &list[..1.min(list.len())]].concat().into());
                hostile.push(list.iter().rev().cloned().collect());
            }
            Value::String(text) => {
                hostile.extend([json!(format!("{text}0")), json!(text.replace(['0', '1'], "é"))]);
            }
            _ => {}
        }
        for value in hostile.into_iter().filter(|value| *value != old) {
            let mut changed = header.clone();
            *changed.pointer_mut(&at).unwrap() = value.clone();
            let opened = open(&folder, &with_header(&file, &changed));
            // Opening ignores descriptions of the source and digests that are checked on use.
            let unchecked =
                ["/architecture", "/source", "/digest"].iter().any(|part| at.contains(part))
                    || at.starts_with("/files");
            assert!(opened.is_err() || unchecked, "{at} was set to {value} without an error");
            if let Err(error) = opened {
                let folder = folder.to_string_lossy();
                assert!(error.to_string().contains(&*folder), "{at} {value}: {error}");
            }
        }
    }
}

#[test]
fn every_changed_header_byte_and_every_truncation_is_detected() {
    let (_temp, folder, file) = packed("qwen3_moe");
    let header = PREFIX + u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize;
    let change = (0..header, 1u8.., 0..file.len());
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 64,
        failure_persistence: None,
        ..Default::default()
    });
    runner
        .run(&change, |(at, flip, cut)| {
            let mut changed = file.clone();
            changed[at] ^= flip;
            prop_assert!(open(&folder, &changed).is_err(), "byte {} changed", at);
            prop_assert!(open(&folder, &file[..cut]).is_err(), "cut at {}", cut);
            Ok(())
        })
        .unwrap();
    let said = open(&folder, &[&file[..], &[0; 4096]].concat()).unwrap_err().to_string();
    assert!(said.contains("its last record ends"), "{said}");
    let mut newer = file.clone();
    newer[8] = 2;
    let said = open(&folder, &newer).unwrap_err().to_string();
    assert!(said.contains("version 2"), "{said}");
    assert!(
        said.ends_with(": use the version of moeflux that packed it, or pack the model again"),
        "{said}"
    );
}

#[test]
fn experts_of_another_model_are_refused() {
    let (_temp, folder, _) = packed("qwen3_moe");
    for other in ["qwen3_moe_mixed_3_6", "deepseek_v3"] {
        let (_other, _, file) = packed(other);
        let error = open(&folder, &file).unwrap_err().to_string();
        assert!(error.contains("out"), "{error}");
    }
}

/// Other weights of the same shapes, at the same offsets.
#[test]
fn experts_of_another_training_are_refused() {
    let (temp, folder, own) = packed("qwen3_moe");
    let [source, other] = ["source", "other"].map(|name| temp.path().join(name));
    fs::create_dir(&source).unwrap();
    for name in ["config.json", DENSE] {
        fs::copy(golden("qwen3_moe").join(name), source.join(name)).unwrap();
    }
    let mut weights = fs::read(source.join(DENSE)).unwrap();
    let header = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
    weights[header..].iter_mut().for_each(|byte| *byte ^= 1);
    fs::write(source.join(DENSE), weights).unwrap();
    pack_golden(&source, &other);
    let foreign = fs::read(other.join(EXPERTS)).unwrap();

    let said = open(&folder, &foreign).unwrap_err().to_string();
    assert!(said.contains("different models") && said.contains("pack the model again"), "{said}");
    let with_mirror = || {
        let options = CheckpointOptions::default().mirrors(vec![other.clone()]);
        let checkpoint = Checkpoint::open_with(&folder, &options)?;
        Engine::open(checkpoint, EngineOptions::default(), &mut |_, _| {}).map(|_| ())
    };
    // A folder whose experts are only in a mirror.
    fs::remove_file(folder.join(EXPERTS)).unwrap();
    let said = with_mirror().unwrap_err().to_string();
    assert!(
        said.starts_with(other.to_str().unwrap()) && said.contains("different models"),
        "{said}"
    );
    // A folder that has them, with a mirror.
    fs::write(folder.join(EXPERTS), &own).unwrap();
    fs::remove_file(other.join(DENSE)).unwrap();
    let said = with_mirror().unwrap_err().to_string();
    assert!(said.starts_with(other.to_str().unwrap()) && said.contains("other tensors"), "{said}");
    fs::write(other.join(EXPERTS), &own).unwrap();
    with_mirror().unwrap();
}
