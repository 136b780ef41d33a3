//! Packed models: the same logits as their source, bit for bit; damage to their files is detected
//! or repaired.

use std::{
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use moeflux::{
    Checkpoint, Error, MemoryRequest,
    model::blueprint::Blueprint,
    tools::{pack, verify_packed},
};
use proptest::{prelude::*, test_runner::TestRunner};
use tempfile::TempDir;

use crate::common::{self, exact, feed, goldens, tales};

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
fn every_packed_golden_is_bit_equal() {
    let mut count = 0;
    for golden in goldens() {
        let (_temp, out) = packed(&golden.folder);
        let prompt = golden.prompt();
        let prompt = &prompt[..prompt.len().min(16)];
        let (source, copy) =
            (Checkpoint::open(&golden.folder).unwrap(), Checkpoint::open(&out).unwrap());
        assert!(copy.is_packed() && !source.is_packed());
        let (a, b) = (
            Blueprint::for_checkpoint(&source).unwrap(),
            Blueprint::for_checkpoint(&copy).unwrap(),
        );
        for ((i, a), (_, b)) in a.moe_layers().zip(b.moe_layers()) {
            assert_eq!(
                (a.experts.shape, a.experts.file_bytes),
                (b.experts.shape, b.experts.file_bytes),
                "{}",
                golden.name
            );
            let mut end = 0;
            for expert in 0..b.experts.count {
                let [record] = b.experts.segments(expert).collect::<Vec<_>>()[..] else {
                    panic!("layer {i}")
                };
                assert!(
                    record.offset.is_multiple_of(4096) && record.offset >= end,
                    "{}",
                    golden.name
                );
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

/// All files of a folder, by name.
fn files(folder: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut all: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into(), fs::read(entry.path()).unwrap()))
        .collect();
    all.sort();
    all
}

/// Damage to a partial file between two runs.
#[derive(Clone, Debug)]
enum Mishap {
    Nothing,
    /// Truncated at a fraction of its length.
    Cut(f64),
    /// One bit flipped at a fraction of its length.
    Flip(f64),
    Gone,
}

impl Mishap {
    fn befall(&self, path: &Path) {
        let Ok(mut bytes) = fs::read(path) else { return };
        let at = |share: f64| (share * bytes.len() as f64) as usize;
        match *self {
            Mishap::Nothing => return,
            Mishap::Gone => return fs::remove_file(path).unwrap(),
            Mishap::Cut(share) => bytes.truncate(at(share)),
            Mishap::Flip(share) => {
                let at = at(share);
                if let Some(byte) = bytes.get_mut(at) {
                    *byte ^= 4;
                }
            }
        }
        fs::write(path, bytes).unwrap();
    }
}

/// Wherever a run ends, and however its files are damaged: the next run produces the correct files.
#[test]
fn interrupted_packing_resumes() {
    let source = Checkpoint::open(&moeflux_goldens::golden("deepseek_v3_hub")).unwrap();
    let temp = tempfile::tempdir().unwrap();
    let whole = temp.path().join("whole");
    pack(&source, &whole, &mut go).unwrap();
    let (whole, all) = (files(&whole), pieces(&source));
    let mishap = || {
        prop_oneof![
            3 => Just(Mishap::Nothing),
            2 => (0.0..1.0).prop_map(Mishap::Cut),
            2 => (0.0..1.0).prop_map(Mishap::Flip),
            1 => Just(Mishap::Gone),
        ]
    };
    let ends = prop::collection::vec((1..=all, mishap(), mishap(), mishap()), 1..4);
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 24,
        failure_persistence: None,
        ..Default::default()
    });
    runner
        .run(&ends, |ends| {
            let temp = tempfile::tempdir().unwrap();
            let out = temp.path().join("out");
            for (end, dense, experts, journal) in ends {
                let mut calls = 0;
                let mut until = |_, _| {
                    calls += 1;
                    if calls >= end { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
                };
                prop_assert!(matches!(pack(&source, &out, &mut until), Err(Error::Cancelled)));
                dense.befall(&out.join("model.safetensors.partial"));
                experts.befall(&out.join("experts.moeflux.partial"));
                // A folder without its journal is not resumed.
                if !matches!(journal, Mishap::Gone | Mishap::Flip(_)) {
                    journal.befall(&out.join("pack.partial"));
                }
            }
            pack(&source, &out, &mut go).unwrap();
            prop_assert!(files(&out) == whole);
            Ok(())
        })
        .unwrap();
}

/// Number of progress calls of a run.
fn pieces(source: &Checkpoint) -> usize {
    let temp = tempfile::tempdir().unwrap();
    let mut calls = 0;
    let mut count = |_, _| {
        calls += 1;
        ControlFlow::Continue(())
    };
    pack(source, &temp.path().join("out"), &mut count).unwrap();
    calls
}

/// A run that ended while files were being renamed.
#[test]
fn renamed_files_are_reused() {
    let source = Checkpoint::open(&moeflux_goldens::golden("qwen3_moe")).unwrap();
    let (_temp, out) = packed(&moeflux_goldens::golden("qwen3_moe"));
    let whole = files(&out);
    let part = out.parent().unwrap().join("part");
    assert!(matches!(
        pack(&source, &part, &mut |_, _| ControlFlow::Break(())),
        Err(Error::Cancelled)
    ));
    fs::copy(out.join("model.safetensors"), part.join("model.safetensors")).unwrap();
    fs::remove_file(part.join("model.safetensors.partial")).unwrap();
    pack(&source, &part, &mut go).unwrap();
    assert!(files(&part) == whole);
}

const PROMPT: [u32; 5] = [17, 400, 33, 2050, 9];

#[test]
fn a_flipped_bit_is_an_error_that_names_the_expert() {
    let (_temp, out) = packed(&tales());
    let memory = MemoryRequest::default().sessions(2);
    let engine = common::engine(&out, exact("cpu"), memory);
    let mut session = engine.session().unwrap();
    feed(&mut session, &PROMPT[..2], None);

    // Flips a bit of the last byte of every expert of layer 3: the next one read is damaged.
    let path = out.join("experts.moeflux");
    let good = fs::read(&path).unwrap();
    let mut bad = good.clone();
    let blueprint = Blueprint::for_checkpoint(&Checkpoint::open(&out).unwrap()).unwrap();
    let experts = &blueprint.layers[3].moe().unwrap().experts;
    let record = |expert: usize| experts.segments(expert).next().unwrap();
    for expert in 0..experts.count {
        bad[record(expert).offset as usize + record(expert).bytes - 1] ^= 0x80;
    }
    fs::write(&path, &bad).unwrap();
    let error = loop {
        match session.decode(PROMPT[2]) {
            Ok(_) => assert!(session.tokens().len() < 50, "no expert of layer 3 was read"),
            Err(error) => break error,
        }
    };
    let Error::Damaged { layer: 3, expert, path: named, offset, bytes } = &error else {
        panic!("{error}")
    };
    assert_eq!((named, *offset, *bytes), (&path, record(*expert).offset, experts.file_bytes));
    let said = error.to_string();
    assert!(said.contains("pack --verify") && said.contains(&format!("expert {expert}")), "{said}");

    let tokens = session.tokens().to_vec();
    let again = session.decode(PROMPT[3]).map(|_| ());
    assert!(again.is_ok() || matches!(again, Err(Error::Damaged { .. })));
    fs::write(&path, good).unwrap();
    if again.is_err() {
        assert_eq!(session.tokens(), tokens);
        session.decode(PROMPT[3]).unwrap();
    }
    let after = session.logits().to_vec();
    let mut fresh = engine.session().unwrap();
    for token in session.tokens() {
        fresh.decode(*token).unwrap();
    }
    assert!(after == fresh.logits());
}

/// Set in the child process, which runs in a separate mount namespace.
#[cfg(target_os = "linux")]
const TINY_DISK: &str = "MOEFLUX_TEST_TINY_DISK";

/// A really full disk: a small tmpfs in a separate mount namespace, which another file fills when
/// half is packed.
#[cfg(target_os = "linux")]
#[test]
#[allow(clippy::print_stderr, reason = "tests that do not run are to be seen")]
fn a_full_disk_loses_nothing() {
    use std::process::Command;

    if let Some(disk) = std::env::var_os(TINY_DISK) {
        return fill_a_disk(Path::new(&disk));
    }
    let temp = tempfile::tempdir().unwrap();
    let can = Command::new("unshare")
        .args(["-rm", "mount", "-t", "tmpfs", "none"])
        .arg(temp.path())
        .output();
    if !can.is_ok_and(|can| can.status.success()) {
        eprintln!("no full disk is tested: a tmpfs cannot be mounted here");
        return;
    }
    let script = r#"mount -t tmpfs -o size=14m none "$0" && exec "$1" --exact packed_models::a_full_disk_loses_nothing --nocapture"#;
    let test = std::env::current_exe().unwrap();
    let mut child = Command::new("unshare");
    child.args(["-rm", "sh", "-c", script]).arg(temp.path()).arg(test).env(TINY_DISK, temp.path());
    let out = child.output().unwrap();
    assert!(
        out.status.success(),
        "{}{}",
        String::from_utf8_lossy(&out.stdout),
        String::from_utf8_lossy(&out.stderr)
    );
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0, "the namespace was its own");
}

#[cfg(target_os = "linux")]
fn fill_a_disk(disk: &Path) {
    let source = Checkpoint::open(&tales()).unwrap();
    let (out, filler) = (disk.join("out"), disk.join("filler"));
    let too_full = |result: Result<moeflux::tools::PackReport, Error>, part: &str| {
        let said = result.unwrap_err().to_string();
        assert!(said.contains(part) && said.contains(disk.to_str().unwrap()), "{said}");
    };
    // Too full from the start.
    fs::write(&filler, vec![1; 8 << 20]).unwrap();
    too_full(pack(&source, &out, &mut go), "too few");
    assert!(!out.exists());
    // Full after half of the data.
    fs::remove_file(&filler).unwrap();
    let mut fill = |done: u64, total: u64| {
        if done > total / 2 && !filler.exists() {
            let filled = fs::write(&filler, vec![1; 14 << 20]);
            assert_eq!(filled.unwrap_err().kind(), std::io::ErrorKind::StorageFull);
        }
        ControlFlow::Continue(())
    };
    too_full(pack(&source, &out, &mut fill), "same command again");
    assert!(files(&out).iter().all(|(name, _)| name.extension().is_some_and(|e| e == "partial")));
    assert!(Checkpoint::open(&out).is_err());
    fs::remove_file(&filler).unwrap();
    let report = pack(&source, &out, &mut go).unwrap();
    assert!(report.reused > report.bytes / 3, "{report:?}");
    assert_eq!(verify_packed(&out, Some(&source), &mut go).unwrap().damages, []);
}
