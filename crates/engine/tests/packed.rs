//! Packed models: the same logits as their source, bit for bit; and whatever happens to their files, never silently others.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use common::{data, exact, feed, goldens, tales};
use moeflux::{
    Blueprint, Checkpoint, Engine, EngineOptions, Error, Logits, MemoryRequest, Watch, pack, verify_packed,
};
use tempfile::TempDir;

fn go(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A packed copy of a folder.
fn packed(folder: &Path) -> (TempDir, PathBuf) {
    let temp = tempfile::tempdir().unwrap();
    let out = temp.path().join("packed");
    pack(&Checkpoint::open(folder).unwrap(), &out, &mut go).unwrap();
    (temp, out)
}

fn logits(folder: &Path, tokens: &[u32]) -> Vec<f32> {
    let engine = common::engine(folder, exact("cpu"), MemoryRequest::default());
    feed(&mut engine.session().unwrap(), tokens, None)
}

#[test]
fn every_golden_is_the_same_to_the_bit() {
    let mut count = 0;
    for golden in goldens() {
        let (_temp, out) = packed(&golden.folder);
        let prompt = golden.prompt();
        let prompt = &prompt[..prompt.len().min(16)];
        let (source, copy) = (Checkpoint::open(&golden.folder).unwrap(), Checkpoint::open(&out).unwrap());
        assert!(copy.is_packed() && !source.is_packed());
        let (a, b) = (Blueprint::of(&source).unwrap(), Blueprint::of(&copy).unwrap());
        for ((i, a), (_, b)) in a.moe_layers().zip(b.moe_layers()) {
            assert_eq!(
                (a.experts.shape, a.experts.bytes),
                (b.experts.shape, b.experts.bytes),
                "{}",
                golden.name
            );
            let mut end = 0;
            for expert in 0..b.experts.count {
                let [record] = b.experts.segments(expert).collect::<Vec<_>>()[..] else {
                    panic!("layer {i}")
                };
                assert!(record.offset.is_multiple_of(4096) && record.offset >= end, "{}", golden.name);
                end = record.offset + record.bytes as u64;
            }
        }
        assert_eq!(a.skipped, b.skipped, "{}", golden.name);
        assert!(logits(&golden.folder, prompt) == logits(&out, prompt), "{}", golden.name);
        let report = verify_packed(&out, Some(&source), &mut go).unwrap();
        assert_eq!((report.damages, report.experts), (vec![], a.experts()), "{}", golden.name);
        count += 1;
    }
    assert!(count > 40);
}
