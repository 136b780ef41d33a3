//! Files of earlier commits: read with the same contents. Files of unknown versions: refused by
//! name, with the command that helps.

use std::{
    collections::BTreeSet,
    fs,
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use moeflux::{
    Checkpoint, Engine, MemoryRequest, Session, StepControl,
    experts::{DiskSpeed, PolicyKind, Trace},
    runtime::KvFormat,
    session::{SnapshotFolder, SnapshotOptions},
    tools::{Replayed, verify_packed},
};

use crate::common::{Golden, copy_folder, data, difference, engine, exact, feed, sets};

/// `max |a - b| <= BAR * rms(b)`, as of goldens.
const BAR: f64 = 1e-3;

/// A file of `tests/data/versions`, of the first version of its format.
fn kept(name: &str) -> PathBuf {
    data().join("versions/1").join(name)
}

/// The same of a later version.
fn kept_of(version: u32, name: &str) -> PathBuf {
    data().join(format!("versions/{version}")).join(name)
}

/// Versions of sessions that are read.
const SESSIONS: [u32; 2] = [2, 3];

/// The model of all kept files.
fn golden() -> Golden {
    Golden::read("qwen3_moe_nvfp4")
}

fn open(folder: &Path) -> Engine {
    engine(folder, exact("cpu"), MemoryRequest::default())
}

/// Decodes tokens and returns all their logits.
fn decode(session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    tokens.iter().flat_map(|token| feed(session, &[*token], None)).collect()
}

/// Compares logits with the last ones of a golden.
fn assert_near(what: &str, logits: &[f32], wanted: &[f32]) {
    let d = difference(logits, &wanted[wanted.len() - logits.len()..]);
    assert!(d <= BAR, "{what}: logits differ by {d:e} of the rms");
}

#[test]
fn a_packed_copy_is_read() {
    let (golden, folder) = (golden(), kept("packed"));
    let source = Checkpoint::open(&golden.folder).unwrap();
    assert!(Checkpoint::open(&folder).unwrap().is_packed());
    let mut go = |_: u64, _: u64| ControlFlow::Continue(());
    let report = verify_packed(&folder, Some(&source), &mut go).unwrap();
    assert_eq!((report.damages, report.experts), (vec![], 16));
    let engine = open(&folder);
    assert_eq!(engine.model().unwrap(), open(&golden.folder).model().unwrap(), "one identity");
    let mut session = engine.session().unwrap();
    let logits = feed(&mut session, &golden.prompt(), None);
    assert_near("prefill", &logits, &golden.floats("prefill_logits_f32").unwrap().numbers);
    let logits = decode(&mut session, &golden.generated());
    assert_near("decode", &logits, &golden.floats("decode_logits_f32").unwrap().numbers);
}

#[test]
fn a_session_continues() {
    let golden = golden();
    let [prefilled, decoded] = ["prefill_logits_f32", "decode_logits_f32"]
        .map(|name| golden.floats(name).unwrap().numbers);
    // A packed copy has the identity of its source.
    let folders = [golden.folder.clone(), kept("packed")];
    for (folder, version) in folders.iter().flat_map(|folder| SESSIONS.map(|v| (folder, v))) {
        let mut session = open(folder).session().unwrap();
        session.restore(kept_of(version, "exact.session")).unwrap();
        assert_eq!((session.tokens(), session.is_lossy()), (&*golden.prompt(), false));
        assert_near("saved", session.logits(), &prefilled);
        assert_near("decode", &decode(&mut session, &golden.generated()), &decoded);
    }
}

/// Fewer bits may choose other experts, so the logits are those of a session that is saved the same
/// way now.
#[test]
fn a_session_in_fewer_bits_continues() {
    let golden = golden();
    let temp = tempfile::tempdir().unwrap();
    let now = temp.path().join("now.session");
    let mut session = open(&golden.folder).session().unwrap();
    feed(&mut session, &golden.prompt(), None);
    let options = SnapshotOptions::default().hot_experts(false).kv_format(KvFormat::Q8);
    session.snapshot(&now, options).unwrap();
    let mut restored = |file: PathBuf| {
        session.reset().unwrap();
        session.restore(file).unwrap();
        assert_eq!((session.tokens(), session.is_lossy()), (&*golden.prompt(), true));
        decode(&mut session, &golden.generated())
    };
    let now = restored(now);
    for version in SESSIONS {
        assert_near("decode", &restored(kept_of(version, "q8.session")), &now);
    }
}

#[test]
fn a_trace_is_replayed() {
    let golden = golden();
    let trace = Trace::open(&kept("routing.trace")).unwrap();
    let (prompt, generated) = (golden.prompt().len(), golden.generated().len());
    assert_eq!((trace.steps(), trace.is_cut()), (1 + generated, false));
    assert_eq!(trace.tokens(), (prompt + generated) as u64);
    assert_eq!((&*trace.header().model, trace.header().experts()), ("qwen3_moe_nvfp4", 16));
    // The prompt needs the distinct experts of its rows, decode needs all.
    let (mut prefill, mut decode, mut distinct) = (0, 0, 0);
    for layer in 0..2 {
        let (k, ids) = golden.ints(&format!("experts_f32.{layer}")).unwrap();
        let rows = sets(k, &ids);
        let count = |rows: &[Vec<u32>]| rows.concat().into_iter().collect::<BTreeSet<_>>().len();
        prefill += count(&rows[..prompt]);
        decode += rows[prompt..].concat().len();
        distinct += count(&rows);
    }
    // Hits and missed bytes of decode as the writer's `replay` counted them.
    let cost = |replayed: Replayed| (replayed.decode.hits, replayed.decode.bytes_missed);
    assert_eq!(cost(trace.replay(PolicyKind::Lru, 4)), (14, 117_504));
    assert_eq!(cost(trace.replay(PolicyKind::Lru, 8)), (27, 72_576));
    assert_eq!(cost(trace.replay_optimum(4)), (21, 93_312));
    let bytes = trace.header().layers[0].bytes;
    for policy in PolicyKind::ALL {
        let replayed = trace.replay(policy, 16);
        assert_eq!(
            (replayed.prefill.needed, replayed.decode.needed),
            (prefill as u64, decode as u64)
        );
        let missed = replayed.prefill.bytes_missed + replayed.decode.bytes_missed;
        assert_eq!(missed, distinct as u64 * bytes);
    }
}

#[test]
fn a_disk_speed_is_remembered() {
    let speed = DiskSpeed::remembered(&kept("disk"), 4096).unwrap();
    assert_eq!((speed.block, speed.depths.len()), (4096, 4));
    assert!(speed.ceiling() > 0.0);
}

#[test]
fn unknown_versions_are_refused_by_name() {
    let golden = golden();
    let temp = tempfile::tempdir().unwrap();
    let packed = temp.path().join("packed");
    fs::create_dir(&packed).unwrap();
    copy_folder(&kept("packed"), &packed);
    let at = |name: &str| temp.path().join(name);
    let mut session = open(&golden.folder).session().unwrap();
    // Offset of the version, after the magic.
    let mut refused = |from: PathBuf, to: PathBuf, offset: usize, known: u32, help: &str| {
        let whole = fs::read(from).unwrap();
        let read = if known == 3 { &SESSIONS[..] } else { &[known] };
        for version in [0u32, 1, 2, 9].into_iter().filter(|version| !read.contains(version)) {
            let mut bytes = whole.clone();
            assert_eq!(bytes[offset..offset + 4], known.to_le_bytes());
            bytes[offset..offset + 4].copy_from_slice(&version.to_le_bytes());
            fs::write(&to, bytes).unwrap();
            let error = match to.extension().and_then(|e| e.to_str()) {
                Some("moeflux") => Checkpoint::open(&packed).err(),
                Some("trace") => Trace::open(&to).err(),
                _ => session.restore(&to).err(),
            };
            let said = error.unwrap().to_string();
            for part in [to.to_str().unwrap(), &format!("version {version},"), help] {
                assert!(said.contains(part), "{part:?} is not in {said:?}");
            }
        }
    };
    let experts = "experts.moeflux";
    refused(kept("packed").join(experts), packed.join(experts), 8, 1, "pack the model again");
    refused(kept("routing.trace"), at("a.trace"), 16, 1, "record the routing again with --trace");
    refused(kept_of(3, "exact.session"), at("a.session"), 8, 3, "--session");
    // The first version identified a model by its dense weights alone.
    for name in ["exact.session", "q8.session"] {
        let said = session.restore(kept(name)).unwrap_err().to_string();
        assert!(said.contains("version 1,") && said.contains("--session"), "{said}");
    }
    assert!(session.tokens().is_empty(), "a refused file leaves the session as it was");
}

#[test]
fn other_versions_in_a_prefix_cache_are_skipped() {
    let golden = golden();
    let temp = tempfile::tempdir().unwrap();
    copy_folder(&kept("prefix-cache"), temp.path());
    let folder = SnapshotFolder::open(temp.path(), u64::MAX).unwrap();
    let mut session = open(&golden.folder).session().unwrap();
    let prompt = golden.prompt();
    let synced = session.sync_from(&folder, &prompt, &mut StepControl::default()).unwrap();
    assert_eq!((synced.restored, synced.computed), (0, prompt.len()));
    let saved = session.snapshot_to(&folder).unwrap().unwrap();
    assert_eq!(fs::read(saved).unwrap()[8], 3);
    session.reset().unwrap();
    let synced = session.sync_from(&folder, &prompt, &mut StepControl::default()).unwrap();
    assert_eq!(synced.restored, prompt.len());
}
