//! Snapshot files: hostile or damaged contents and killed writers give an error or correct data,
//! never a panic.

use std::{
    collections::BTreeSet,
    env,
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, AtomicU64},
    time::{Duration, Instant},
};

use moeflux_base::seam::{WriteTarget, gb, write_all_at};
use moeflux_model::seam::Frame;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::{
    runtime::contents::ContentDigest,
    session::snapshot::writer::{SnapshotContents, SnapshotWriter},
};

const ALIGN: usize = 4096;

/// Contents of a plausible session.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::session::snapshot) struct Saved {
    pub(in crate::session::snapshot) tokens: Vec<u32>,
    pub(in crate::session::snapshot) contents: Vec<ContentDigest>,
    pub(in crate::session::snapshot) logits: Option<Vec<f32>>,
    pub(in crate::session::snapshot) hot: Vec<(u32, u32)>,
    pub(in crate::session::snapshot) states: Vec<(SavedState, Vec<u8>)>,
}

pub(in crate::session::snapshot) const VOCAB: usize = 50;

fn state(layer: usize, index: u8, entries: u64, entry_bytes: u64) -> (SavedState, Vec<u8>) {
    let bytes =
        (0..entries * entry_bytes).map(|i| (i * 7 + i / 251 + layer as u64) as u8).collect();
    (SavedState { layer, index, entries, entry_bytes, shape: format!("2 x {entry_bytes}") }, bytes)
}

/// Digests of images at some places.
pub(in crate::session::snapshot) fn images(places: &[usize]) -> Vec<ContentDigest> {
    let content = |place: usize| ContentDigest { place, digest: [place as u8 + 1; 32], grid: None };
    places.iter().copied().map(content).collect()
}

impl Saved {
    pub(in crate::session::snapshot) fn new(tokens: &[u32]) -> Self {
        let entries = tokens.len() as u64;
        Self {
            tokens: tokens.into(),
            contents: Vec::new(),
            logits: Some((0..VOCAB).map(|i| i as f32 / 3.0 - 5.0).collect()),
            hot: vec![(0, 3), (1, 7), (1, 2)],
            states: vec![state(0, 0, entries, 24), state(0, 1, entries, 9), state(3, 0, 1, 4096)],
        }
    }

    fn large() -> Self {
        let states = vec![
            state(0, 0, 3, READ_BYTES as u64),
            state(1, 0, 1, 2 * READ_BYTES as u64 + 5),
            state(2, 1, 0, 8),
        ];
        Self { logits: None, hot: vec![], states, ..Self::new(&[1, 2, 3]) }
    }

    fn contents(&self) -> SnapshotContents<'_> {
        SnapshotContents {
            model: ModelId([7; 32]),
            files: None,
            name: "a-model",
            kv_format: "f16",
            stored: None,
            lossy: false,
            exact: true,
            experts: Some("00ff".into()),
            vocab: VOCAB,
            key: PrefixKey { tokens: &self.tokens, contents: &self.contents },
            written: self.tokens.len() as u64 + 3,
            logits: self.logits.as_deref(),
            hot: &self.hot,
            states: self.states.iter().map(|(shape, _)| shape.clone()).collect(),
        }
    }

    pub(in crate::session::snapshot) fn expectation(&self) -> SnapshotRequirements {
        let states = self
            .states
            .iter()
            .map(|(s, _)| SavedState { entries: s.entries.max(100), ..s.clone() });
        SnapshotRequirements {
            model: ModelId([7; 32]),
            files: None,
            kv_format: "f16".into(),
            stored: None,
            exact: true,
            experts: None,
            needs_division: false,
            vocab: VOCAB,
            context: 100,
            states: states.collect(),
        }
    }

    fn write_states<T: WriteTarget>(
        &self,
        mut writer: SnapshotWriter<T>,
        piece: usize,
    ) -> Result<(), Error> {
        let all: Vec<u8> = self.states.iter().flat_map(|(_, bytes)| bytes).copied().collect();
        all.chunks(piece).try_for_each(|piece| writer.write(piece))?;
        writer.finish()
    }

    pub(in crate::session::snapshot) fn save(&self, path: &Path) {
        self.write_states(SnapshotWriter::create(path, &self.contents()).unwrap(), 5000).unwrap();
    }

    /// Reads back everything in a file.
    fn load(path: &Path) -> Result<Self, Error> {
        let snapshot = Snapshot::open(path)?;
        snapshot.verify()?;
        let state = |(i, shape): (usize, &SavedState)| {
            let mut bytes = vec![0; (shape.entries * shape.entry_bytes) as usize];
            let (a, b) = bytes.split_at_mut(shape.entry_bytes.min(shape.entries) as usize);
            snapshot.read_state(i, 0, a)?;
            snapshot.read_state(i, a.len() as u64, b)?;
            Ok((shape.clone(), bytes))
        };
        Ok(Self {
            tokens: snapshot.key().tokens.to_vec(),
            contents: snapshot.key().contents.to_vec(),
            logits: snapshot.logits()?,
            hot: snapshot.hot()?,
            states: snapshot
                .header()
                .states
                .iter()
                .enumerate()
                .map(state)
                .collect::<Result<_, Error>>()?,
        })
    }
}

fn folder() -> (TempDir, PathBuf) {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("a.moeflux-session");
    (temp, path)
}

pub(in crate::session::snapshot) fn names(folder: &Path) -> BTreeSet<String> {
    fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

/// Overwrites a file in place: truncating it first would make the system write it out each time.
fn put(path: &Path, bytes: &[u8]) {
    let file = fs::OpenOptions::new().write(true).open(path).unwrap();
    write_all_at(&file, bytes, 0).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
}

fn problem(path: &Path) -> SnapshotProblem {
    match Saved::load(path) {
        Err(Error::Snapshot { path: named, problem }) => {
            assert_eq!(named, path);
            let said = problem.to_string();
            assert!(said.ends_with("; the session is as it was"), "{said}");
            problem
        }
        other => panic!("{other:?}"),
    }
}

fn is_damaged(path: &Path, part: &str) {
    match problem(path) {
        SnapshotProblem::Damaged { what } => {
            assert!(what.contains(part), "{part:?} is not in {what:?}")
        }
        other => panic!("{other:?} is not {part:?}"),
    }
}

#[test]
fn snapshots_round_trip() {
    let (temp, path) = folder();
    let whole = Saved::new(&[1, 49, 3]);
    let all = [
        Saved { logits: None, ..whole.clone() },
        Saved { hot: vec![], ..whole.clone() },
        Saved { contents: images(&[0, 2, 2]), ..whole.clone() },
        Saved { states: vec![], ..whole.clone() },
        Saved { logits: None, hot: vec![], states: vec![], ..Saved::new(&[]) },
        Saved::new(&(0..5000).map(|i| i % 50).collect::<Vec<_>>()),
        Saved::large(),
        whole.clone(),
    ];
    for saved in &all {
        for piece in [1000, 4096, 1 << 30] {
            saved
                .write_states(SnapshotWriter::create(&path, &saved.contents()).unwrap(), piece)
                .unwrap();
            assert!(Saved::load(&path).unwrap() == *saved);
            assert_eq!(names(temp.path()), ["a.moeflux-session".to_owned()].into());
        }
    }
    let snapshot = Snapshot::open(&path).unwrap();
    let (h, bytes) = (snapshot.header(), fs::read(&path).unwrap());
    assert_eq!(
        (h.name.as_str(), h.kv_format.as_str(), h.lossy, h.exact),
        ("a-model", "f16", false, true)
    );
    // Sections are at the documented offsets, with their plain digests.
    let json = u64::from_le_bytes(bytes[16..24].try_into().unwrap()) as usize;
    let mut at = (32 + json).next_multiple_of(ALIGN);
    assert_eq!(bytes[at..at + 8], [1, 0, 0, 0, 49, 0, 0, 0]);
    let lengths = [12, 4 * VOCAB, 24, 72, 27, 4096];
    for (len, wanted) in lengths.into_iter().zip(&h.digests.0) {
        assert_eq!(digest(&bytes[at..at + len]), *wanted);
        at = if len == 4096 { at + len } else { (at + len).next_multiple_of(ALIGN) };
    }
    assert_eq!(at, bytes.len());
    // Reads beyond a state are refused.
    for (i, at, len) in [(0, 72, 1), (0, u64::MAX, 2), (2, 4000, 97), (3, 0, 0), (usize::MAX, 0, 1)]
    {
        assert!(
            matches!(snapshot.read_state(i, at, &mut vec![0; len]), Err(Error::Internal { .. })),
            "{i} {at}"
        );
    }
}

#[test]
fn a_reduced_kv_format_is_reported() {
    let (_temp, path) = folder();
    let saved = Saved::new(&[1, 2, 3]);
    for stored in [Some("q8"), Some("q4"), None] {
        let contents = SnapshotContents { stored, lossy: stored.is_some(), ..saved.contents() };
        saved.write_states(SnapshotWriter::create(&path, &contents).unwrap(), 5000).unwrap();
        let snapshot = Snapshot::open(&path).unwrap();
        assert_eq!(
            (snapshot.header().stored.as_deref(), snapshot.header().lossy),
            (stored, stored.is_some())
        );
        for wanted in [None, Some("q8")] {
            let expected =
                SnapshotRequirements { stored: wanted.map(Into::into), ..saved.expectation() };
            match snapshot.fits(&expected) {
                Ok(()) => assert_eq!(wanted, stored),
                Err(Error::Snapshot { problem: SnapshotProblem::OtherSettings(what), .. }) => {
                    assert!(wanted != stored && what.contains(stored.unwrap_or("f16")), "{what}");
                }
                other => panic!("{other:?}"),
            }
        }
    }
    let long = "x".repeat(257);
    assert!(
        SnapshotWriter::create(
            &path,
            &SnapshotContents { stored: Some(&long), ..saved.contents() }
        )
        .is_err()
    );
}

#[test]
fn every_flipped_bit_is_detected() {
    let (_temp, path) = folder();
    Saved::new(&[1, 49, 3]).save(&path);
    let whole = fs::read(&path).unwrap();
    let json = u64::from_le_bytes(whole[16..24].try_into().unwrap()) as usize;
    let data = (32 + json).next_multiple_of(ALIGN);
    let names = [
        "tokens",
        "logits",
        "hot",
        "state 0 of layer 0",
        "state 1 of layer 0",
        "state 0 of layer 3",
    ];
    let lengths = [12, 4 * VOCAB, 24, 72, 27, 4096];
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    let mut seen = BTreeSet::new();
    for at in 0..whole.len() {
        let (section, within) = (at.saturating_sub(data) / ALIGN, at.saturating_sub(data) % ALIGN);
        let padding = if at < data { at >= 32 + json } else { within >= lengths[section] };
        let last = section + 1 == names.len();
        if (padding && at % 61 != 0 && within != lengths[section]) || (last && at % 61 != 0) {
            continue;
        }
        let bit = 1 << (at % 8);
        write_all_at(&file, &[whole[at] ^ bit], at as u64).unwrap();
        match at {
            0..8 => assert_eq!(problem(&path), SnapshotProblem::NotASnapshot),
            // Version 2, which is read.
            8 => is_damaged(&path, "its header"),
            9..12 => match problem(&path) {
                SnapshotProblem::OtherVersion { found, known: 3 } => assert!(found > 3),
                other => panic!("{other}"),
            },
            12..16 => is_damaged(&path, "its first bytes"),
            16..24 => assert!(matches!(
                problem(&path),
                SnapshotProblem::Truncated | SnapshotProblem::Damaged { .. }
            )),
            _ if at < data => {
                is_damaged(&path, if padding { "padding of its header" } else { "header" })
            }
            _ => is_damaged(&path, names[section]),
        }
        seen.insert((at >= data, section, padding));
        write_all_at(&file, &whole[at..at + 1], at as u64).unwrap();
    }
    assert_eq!(seen.len(), 2 + 2 * names.len() - 1, "{seen:?}");
    Saved::load(&path).unwrap();
}

#[test]
fn truncated_and_extended_files_are_refused() {
    let (temp, path) = folder();
    Saved::new(&[1, 49, 3]).save(&path);
    let whole = fs::read(&path).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    for len in (0..1100).chain((1100..whole.len()).step_by(97)).chain([whole.len() - 1]).rev() {
        file.set_len(len as u64).unwrap();
        let wanted =
            if len < 8 { SnapshotProblem::NotASnapshot } else { SnapshotProblem::Truncated };
        assert_eq!(problem(&path), wanted, "{len}");
    }
    for more in [1, 4096] {
        fs::write(&path, [&whole[..], &vec![0; more]].concat()).unwrap();
        is_damaged(&path, "after its end");
    }
    fs::write(&path, &whole).unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    fs::write(&path, &whole[..whole.len() - 1]).unwrap();
    for said in [snapshot.verify(), snapshot.read_state(2, 0, &mut [0; 4096])] {
        assert!(
            matches!(said, Err(Error::Snapshot { problem: SnapshotProblem::Truncated, .. })),
            "{said:?}"
        );
    }
    let folder = temp.path().join("folder");
    fs::create_dir(&folder).unwrap();
    assert_eq!(problem(&folder), SnapshotProblem::NotASnapshot);
    assert!(matches!(
        SnapshotWriter::create(&folder, &Saved::large().contents()),
        Err(Error::Snapshot { problem: SnapshotProblem::IsFolder, .. })
    ));
    assert!(matches!(Saved::load(&temp.path().join("none")), Err(Error::File { .. })));
    let nowhere = SnapshotWriter::create(&folder.join("none/a"), &Saved::large().contents());
    assert!(matches!(nowhere, Err(Error::File { .. })));
}

/// The file with another header, correctly digested, and the same sections.
fn with_header(file: &[u8], json: &[u8]) -> Vec<u8> {
    let old = u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize;
    let sections = &file[(Frame::PREFIX as usize + old).next_multiple_of(ALIGN)..];
    let mut all = file[..16].to_vec();
    all.extend((json.len() as u64).to_le_bytes());
    let signed = digest(&[&all, json].concat());
    all.extend(signed.to_le_bytes());
    all.extend(json);
    all.resize(all.len().next_multiple_of(ALIGN), 0);
    all.extend(sections);
    all
}

/// Collects the paths of all values of a header.
fn pointers(value: &Value, at: &str, all: &mut Vec<String>) {
    all.push(at.to_owned());
    match value {
        Value::Object(map) => {
            map.iter().for_each(|(key, v)| pointers(v, &format!("{at}/{key}"), all))
        }
        Value::Array(list) => {
            list.iter().enumerate().for_each(|(i, v)| pointers(v, &format!("{at}/{i}"), all))
        }
        _ => {}
    }
}

#[test]
fn hostile_header_values_are_refused() {
    let (_temp, path) = folder();
    let saved = Saved { logits: None, contents: images(&[0, 2]), ..Saved::new(&[1, 49, 3]) };
    saved.save(&path);
    let whole = fs::read(&path).unwrap();
    let len = u64::from_le_bytes(whole[16..24].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&whole[32..32 + len]).unwrap();
    let mut all = Vec::new();
    pointers(&header, "", &mut all);
    assert!(all.len() > 25, "{all:?}");
    let values = [
        json!(null),
        json!(-1),
        json!(0),
        json!(1),
        json!(2),
        json!(0.5),
        json!(1e300),
        json!((1u64 << 26) + 1),
        json!(1u64 << 40),
        json!(u64::MAX),
        json!(i64::MIN),
        json!(true),
        json!(""),
        json!("x".repeat(300)),
        json!("0".repeat(96)),
        json!([]),
        json!({}),
        json!([[[]]]),
    ];
    let (mut refused, mut opened) = (0, 0);
    for place in &all {
        for value in &values {
            let mut header = header.clone();
            *header.pointer_mut(place).unwrap() = value.clone();
            put(&path, &with_header(&whole, header.to_string().as_bytes()));
            match Saved::load(&path) {
                Err(Error::Snapshot { .. }) => refused += 1,
                Err(other) => panic!("{place} {value}: {other}"),
                Ok(found) => {
                    // Only fields without a second copy in the file can change.
                    assert_eq!(
                        (&found.tokens, &found.hot),
                        (&saved.tokens, &saved.hot),
                        "{place} {value}"
                    );
                    assert!(found.states.iter().zip(&saved.states).all(|(a, b)| a.1 == b.1));
                    opened += 1;
                }
            }
        }
    }
    assert!(refused > 300 && opened > 10, "{refused} {opened}");

    let says = |change: &dyn Fn(&mut Value)| {
        let mut header = header.clone();
        change(&mut header);
        put(&path, &with_header(&whole, header.to_string().as_bytes()));
        problem(&path)
    };
    assert_eq!(says(&|h| h["states"][2]["places"] = json!(1u64 << 40)), SnapshotProblem::Truncated);
    for (said, part) in [
        (says(&|h| h["states"][2]["places"] = json!(u64::MAX)), "more bytes than can be counted"),
        (
            says(&|h| {
                h["tokens"] = json!((1 << 26) + 1);
                h["written"] = json!((1 << 26) + 1);
            }),
            "tokens are too many",
        ),
        (says(&|h| h["written"] = json!(1)), "1 positions were written for"),
        (says(&|h| h["vocab"] = json!(49)), "token 49 of a vocabulary of 49"),
        (says(&|h| h["states"][0]["layer"] = json!(2)), "not ordered by layer"),
        (says(&|h| h["contents"][1]["place"] = json!(3)), "contents are not ordered by token"),
        (says(&|h| h["contents"][0]["place"] = json!(u64::MAX)), "contents are not ordered"),
        (says(&|h| h["contents"][0]["digest"] = json!("7g")), "expected a digest of 64"),
        (says(&|h| h["contents"][0]["grid"] = json!([0, 2])), "expected sides of an image"),
        (says(&|h| h["contents"][0]["grid"] = json!([2, 2])), "contents are not ordered"),
        (says(&|h| h["states"][0]["which"] = json!(-1)), "its header: invalid value"),
    ] {
        assert!(
            matches!(&said, SnapshotProblem::Damaged { what } if what.contains(part)),
            "{part}: {said}"
        );
    }
    for deep in ["[", "{\"states\":", "{\"unknown\":"] {
        fs::write(&path, with_header(&whole, deep.repeat(1 << 17).as_bytes())).unwrap();
        is_damaged(&path, "its header");
    }
    // An undigested length must not be trusted either.
    for (len, there) in [(u64::MAX, 0), (1 << 40, 0), (17 << 20, 18 << 20), (1 << 20, 0)] {
        let mut file = whole.clone();
        file[16..24].copy_from_slice(&len.to_le_bytes());
        file.resize(file.len().max(there), 0);
        fs::write(&path, file).unwrap();
        assert!(matches!(
            problem(&path),
            SnapshotProblem::Truncated | SnapshotProblem::Damaged { .. }
        ));
    }
    let mut later = whole.clone();
    later[8..32].fill(2);
    fs::write(&path, &later[..40]).unwrap();
    assert_eq!(problem(&path), SnapshotProblem::OtherVersion { found: 0x0202_0202, known: 3 });
}

#[test]
fn other_models_and_settings_are_distinguished() {
    let (_temp, path) = folder();
    let saved = Saved::new(&[1, 49, 3]);
    saved.save(&path);
    let snapshot = Snapshot::open(&path).unwrap();
    let fits = |change: &dyn Fn(&mut SnapshotRequirements)| {
        let mut expected = saved.expectation();
        change(&mut expected);
        match snapshot.fits(&expected) {
            Err(Error::Snapshot { problem, .. }) => Some(problem),
            Err(other) => panic!("{other}"),
            Ok(()) => None,
        }
    };
    assert_eq!(fits(&|_| {}), None);
    assert_eq!(fits(&|e| e.states[0].entries = 3), None);
    assert_eq!(fits(&|e| e.context = 3), None);
    assert_eq!(
        fits(&|e| e.model.0[0] = 0),
        Some(SnapshotProblem::OtherModel { of: "a-model".into() })
    );
    let other = |change: &dyn Fn(&mut SnapshotRequirements), part: &str| match fits(change) {
        Some(problem @ SnapshotProblem::OtherSettings(_)) => {
            assert!(problem.to_string().contains(part), "{part:?} is not in {problem}");
        }
        other => panic!("{part}: {other:?}"),
    };
    other(&|e| e.kv_format = "q8".into(), "its KV cache is \"f16\", that of this session \"q8\"");
    other(&|e| e.exact = false, "it was saved with --exact, this session runs without --exact");
    // Sessions of another division go on.
    assert_eq!(fits(&|e| e.needs_division = true), None);
    other(&|e| e.vocab = 51, "vocabulary of 50");
    other(&|e| e.context = 2, "it has 3 tokens, the context of this session is 2");
    other(&|e| e.states[0].entries = 2, "3 entries of 24 bytes");
    other(&|e| e.states[1].entry_bytes = 10, "state 1 of layer 0");
    other(&|e| e.states[2].shape = "other".into(), "state 0 of layer 3");
    other(&|e| e.states[2].layer = 4, "room for state 0 of layer 4");
    other(&|e| e.states.truncate(2), "it has 3 states, this session has 2");
}

#[test]
fn entries_of_a_prefix_cache_have_a_recorded_division() {
    let (_temp, path) = folder();
    let saved = Saved::new(&[1, 49, 3]);
    let files = Some(ModelId([9; 32]));
    let entry = SnapshotContents { files, ..saved.contents() };
    saved.write_states(SnapshotWriter::create(&path, &entry).unwrap(), 5).unwrap();
    let snapshot = Snapshot::open(&path).unwrap();
    let fits = |experts: Option<&str>, needs_division| {
        let experts = experts.map(Into::into);
        let expected =
            SnapshotRequirements { files, experts, needs_division, ..saved.expectation() };
        snapshot.fits(&expected).map_err(|error| error.to_string())
    };
    assert_eq!(fits(Some("00ff"), true), Ok(()));
    assert_eq!(fits(Some("11"), false), Ok(()));
    for (experts, part) in
        [(Some("11"), "plan 00ff, expected plan 11"), (None, "expected plan none")]
    {
        let error = fits(experts, true).unwrap_err();
        assert!(error.contains(part), "{error}");
    }
}

/// A disk that fails after some bytes, and optionally reports its free space.
struct Full {
    room: AtomicU64,
    tells: Option<u64>,
    syncs: bool,
}

impl WriteTarget for Full {
    fn free(&self, _: &Path) -> Option<u64> {
        self.tells
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        let less = |room: u64| room.checked_sub(bytes.len() as u64);
        match self.room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less) {
            Ok(_) => write_all_at(file, bytes, offset),
            Err(_) => Err(io::ErrorKind::StorageFull.into()),
        }
    }

    fn sync(&self, _: &File) -> io::Result<()> {
        if self.syncs { Ok(()) } else { Err(io::Error::other("a bad sector")) }
    }
}

#[test]
fn a_failed_write_keeps_the_previous_file() {
    let (temp, path) = folder();
    let (old, new) = (Saved::new(&[1, 2]), Saved::new(&[1, 49, 3]));
    old.save(&path);
    let only = names(temp.path());
    let write = |room, tells, syncs| {
        let full = Full { room: AtomicU64::new(room), tells, syncs };
        new.write_states(SnapshotWriter::create_on(full, &path, &new.contents())?, 1000)
    };
    let kept = |error: Error, part: &str| {
        let said = error.to_string();
        assert!(said.contains(part) && said.contains(path.to_str().unwrap()), "{said}");
        assert!(Saved::load(&path).unwrap() == old);
        assert_eq!(names(temp.path()), only);
    };
    let needed = new.contents().bytes().unwrap();
    let full = format!("the disk is full: the saved session needs {};", gb(needed));
    let mut failures = 0;
    for room in (0..).step_by(400) {
        match write(room, None, true) {
            Err(error) => kept(error, &full),
            Ok(()) => break,
        }
        failures += 1;
    }
    assert!(failures > 15, "{failures}");
    assert!(Saved::load(&path).unwrap() == new);
    old.save(&path);
    kept(
        write(1 << 20, Some(needed - 400), true).unwrap_err(),
        "KB are free, 0.4 KB too few; make room",
    );
    kept(write(1 << 20, None, false).unwrap_err(), "the previous file is unchanged: a bad sector");

    // States that end too early or too late.
    let begin = || SnapshotWriter::create(&path, &new.contents()).unwrap();
    drop(begin());
    kept(Error::internal(path.display().to_string()), "");
    let unwritable = |said: Result<(), Error>, part: &str| {
        assert!(
            matches!(&said, Err(Error::Internal { problem }) if problem.contains(part)),
            "{said:?}"
        );
        kept(Error::internal(path.display().to_string()), "");
    };
    unwritable(begin().finish(), "state 0 of layer 0 is missing");
    let much = begin().write(&[0; 72 + 27 + 4096 + 1]);
    unwritable(much, "too long");
    let refused = |contents: SnapshotContents<'_>, part| {
        unwritable(SnapshotWriter::create(&path, &contents).map(|_| ()), part);
    };
    refused(SnapshotContents { vocab: 49, ..new.contents() }, "not of its vocabulary");
    refused(
        SnapshotContents { vocab: 49, key: (&[]).into(), ..new.contents() },
        "not of its vocabulary",
    );
    refused(SnapshotContents { kv_format: &"x".repeat(257), ..new.contents() }, "too long");
    let mut states = new.contents().states;
    states.reverse();
    refused(SnapshotContents { states, ..new.contents() }, "not ordered by layer");
    // The folder name is truncated: it only appears in messages.
    let name = "日本".repeat(300);
    let contents = SnapshotContents { name: &name, states: vec![], ..new.contents() };
    SnapshotWriter::create(&path, &contents).unwrap().finish().unwrap();
    assert_eq!(Snapshot::open(&path).unwrap().header().name.chars().count(), 64);
}

#[test]
fn concurrent_writers_do_not_interfere() {
    let (temp, path) = folder();
    let all: Vec<_> = (1..4).map(|n| Saved::new(&vec![n; 700 * n as usize])).collect();
    let [a, b] = [&all[0], &all[1]];
    let [mut first, second] = [a, b].map(|s| SnapshotWriter::create(&path, &s.contents()).unwrap());
    assert_eq!(names(temp.path()).len(), 2);
    first.write(&a.states[0].1).unwrap();
    b.write_states(second, 999).unwrap();
    assert!(Saved::load(&path).unwrap() == *b);
    let rest = Saved { states: a.states[1..].to_vec(), ..a.clone() };
    rest.write_states(first, 999).unwrap();
    assert!(Saved::load(&path).unwrap() == *a);

    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers: Vec<_> = all
            .iter()
            .map(|saved| scope.spawn(|| (0..40).for_each(|_| saved.save(&path))))
            .collect();
        let reader = scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                assert!(all.contains(&Saved::load(&path).unwrap()));
            }
        });
        let failed = writers.into_iter().filter_map(|writer| writer.join().err()).count();
        stop.store(true, Ordering::Relaxed);
        reader.join().unwrap();
        assert_eq!(failed, 0);
    });
    assert_eq!(names(temp.path()).len(), 1);
}

#[test]
fn only_stale_temporary_files_are_removed() {
    let (temp, path) = folder();
    let make = |name: &str| File::create(temp.path().join(name)).unwrap();
    let live = make(".a.moeflux-session.0123456789abcdef.partial");
    live.lock().unwrap();
    make(".a.moeflux-session.0123456789abcdee.partial");
    let others = [
        ".b.moeflux-session.0123456789abcdef.partial",
        ".a.moeflux-session.0123456789abcde.partial",
        ".a.moeflux-session.0123456789abcdeg.partial",
        ".a.moeflux-session-0123456789abcdef.partial",
        ".partial",
        "a.moeflux-session.partial",
    ];
    others.iter().for_each(|name| drop(make(name)));
    fs::create_dir(temp.path().join(".a.moeflux-session.0123456789abcded.partial")).unwrap();
    Saved::new(&[1]).save(&path);
    let mut wanted: BTreeSet<String> = others.into_iter().map(String::from).collect();
    wanted.insert("a.moeflux-session".into());
    wanted.insert(".a.moeflux-session.0123456789abcdef.partial".into());
    wanted.insert(".a.moeflux-session.0123456789abcded.partial".into());
    assert_eq!(names(temp.path()), wanted);
    // A process started by another test may hold the file for a moment, so closing it is not
    // enough.
    live.unlock().unwrap();
    Saved::new(&[1]).save(&path);
    assert!(!names(temp.path()).contains(".a.moeflux-session.0123456789abcdef.partial"));
}

/// Environment of the child process: the file to write, and which version first.
const WRITE_TO: [&str; 2] = ["MOEFLUX_TEST_SNAPSHOT", "MOEFLUX_TEST_SNAPSHOT_FIRST"];

#[test]
fn a_killed_writer_leaves_a_whole_file() {
    let versions: Vec<_> = (1..4)
        .map(|n| Saved { states: vec![state(0, 0, u64::from(n), 60_000)], ..Saved::new(&[n]) })
        .collect();
    if let [Ok(path), Ok(first)] = WRITE_TO.map(env::var) {
        eprintln!("writing");
        let began = Instant::now();
        for saved in versions.iter().cycle().skip(first.parse().unwrap()) {
            saved.save(Path::new(&path));
            if began.elapsed() > Duration::from_secs(20) {
                break;
            }
        }
        return;
    }
    let (temp, path) = folder();
    versions[0].save(&path);
    let (mut left, mut found) = (0, [0; 3]);
    for round in 0..150u64 {
        let mut child = Command::new(env::current_exe().unwrap())
            .args([
                "--exact",
                "session::snapshot::snapshot::tests::a_killed_writer_leaves_a_whole_file",
                "--nocapture",
            ])
            .env(WRITE_TO[0], &path)
            .env(WRITE_TO[1], (round % 3).to_string())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let began = lines.map_while(Result::ok).any(|line| line.contains("writing"));
        // Spreads the kill times over the duration of a few files.
        thread::sleep(Duration::from_micros(round * 7919 % 12_000));
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(began, "the child has not run");
        let now = Saved::load(&path).unwrap();
        found[versions.iter().position(|version| *version == now).unwrap()] += 1;
        let partial = names(temp.path()).len() - 1;
        assert!(partial <= 1, "the next writer removes what one left");
        left += partial;
    }
    assert!(left > 0, "{left} writers were killed while they wrote");
    assert!(found.iter().all(|n| *n > 0), "{found:?}");
    versions[0].save(&path);
    assert_eq!(names(temp.path()), ["a.moeflux-session".to_owned()].into());
}
