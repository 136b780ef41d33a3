//! Model-based test of sessions: after any sequence of operations the logits equal those of a
//! session that computes everything again.

use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, MemoryRequest, Session, StepControl,
    runtime::{CancelToken, DeviceOptions, KvFormat, LineName, Logits},
    session::{BatchEntry, Mark, SnapshotFolder, SnapshotOptions},
};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRng, TestRunner},
};

use crate::common::{self, exact, gpu, readers::faulty, tales};

/// Context length: long enough for ring buffers to wrap.
const CONTEXT: usize = 320;
const CHUNK: usize = 32;

/// Fault injected into a step.
#[derive(Clone, Copy, Debug)]
enum Trouble {
    None,
    /// Cancels at a percentage of the work.
    Cancel(u8),
    /// Fails the n-th read.
    Fault(u8),
}

#[derive(Clone, Debug)]
enum Action {
    /// Sync to the first tokens of a text.
    Sync(usize, u8, usize, Trouble),
    /// Decode some tokens.
    Decode(usize, u8, usize, Trouble),
    /// One step of all sessions, each with some tokens.
    Step(Vec<usize>, Trouble),
    /// Truncate to a percentage of the tokens.
    Truncate(usize, usize, Trouble),
    Fork(usize),
    Drop(usize),
    Mark(usize),
    Rewind(usize, usize),
    Forget(usize),
    Snapshot(usize, u8),
    Restore(usize, u8),
    Reset(usize),
}

fn actions() -> impl Strategy<Value = Vec<Action>> {
    let trouble = || {
        prop_oneof![
            4 => Just(Trouble::None),
            1 => (0..100u8).prop_map(Trouble::Cancel),
            1 => (1..30u8).prop_map(Trouble::Fault),
        ]
    };
    let session = || 0..3usize;
    let len = || prop_oneof![2 => 1..40usize, 1 => 200..CONTEXT - 20];
    let action = prop_oneof![
        6 => (session(), 0..4u8, len(), trouble()).prop_map(|(s, t, n, e)| Action::Sync(s, t, n, e)),
        4 => (session(), 0..4u8, 1..6usize, trouble()).prop_map(|(s, t, n, e)| Action::Decode(s, t, n, e)),
        3 => (prop::collection::vec(1..6usize, 3), trouble()).prop_map(|(n, e)| Action::Step(n, e)),
        4 => (session(), 0..100usize, trouble()).prop_map(|(s, n, e)| Action::Truncate(s, n, e)),
        2 => session().prop_map(Action::Fork),
        1 => session().prop_map(Action::Drop),
        2 => session().prop_map(Action::Mark),
        3 => (session(), 0..8usize).prop_map(|(s, m)| Action::Rewind(s, m)),
        1 => (0..8usize).prop_map(Action::Forget),
        1 => (session(), 0..2u8).prop_map(|(s, f)| Action::Snapshot(s, f)),
        2 => (session(), 0..2u8).prop_map(|(s, f)| Action::Restore(s, f)),
        1 => session().prop_map(Action::Reset),
    ];
    prop::collection::vec(action, 1..40)
}

/// Token `i` of a text. Texts start equal and diverge at different positions.
fn text(text: u8, i: usize, vocab: usize) -> u32 {
    let own = match text {
        0 => 0,
        1 => usize::from(i >= 11),
        2 => usize::from(i >= 20) * 2,
        _ => usize::from(i >= 150) * 3,
    };
    ((i * 31 + own * 977 + i * i % 7) % vocab) as u32
}

/// Reference: computes everything from scratch and remembers the logits.
struct Oracle {
    engine: Engine,
    known: HashMap<Vec<u32>, Vec<f32>>,
}

impl Oracle {
    fn logits(&mut self, tokens: &[u32]) -> &[f32] {
        if !self.known.contains_key(tokens) {
            let mut session = self.engine.session().unwrap();
            session.sync(tokens, &mut StepControl::default()).unwrap();
            self.known.insert(tokens.to_vec(), session.logits().to_vec());
        }
        &self.known[tokens]
    }
}

struct World {
    engine: Engine,
    until: Arc<AtomicUsize>,
    /// Sessions with their expected tokens.
    sessions: Vec<(Session, Vec<u32>)>,
    marks: Vec<(Mark, Vec<u32>)>,
    saved: HashMap<u8, Vec<u32>>,
    folder: tempfile::TempDir,
}

fn open(
    folder: &Path,
    device: DeviceOptions,
    memory: MemoryRequest,
    until: Option<Arc<AtomicUsize>>,
) -> Engine {
    let memory = memory.context(CONTEXT).chunk(CHUNK);
    // Fails the read at which the counter reaches zero.
    let wrap_reader = until.map(|until| {
        faulty(move || until.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1)) == Ok(1))
    });
    let mut options = EngineOptions::default().memory(memory).device(device);
    options.wrap_reader = wrap_reader;
    Engine::open(Checkpoint::open(folder).unwrap(), options, &mut |_, _| {}).unwrap()
}

impl World {
    fn new(folder: &Path, device: DeviceOptions, marks: u64) -> Self {
        let until = Arc::new(AtomicUsize::new(0));
        let memory = MemoryRequest::default().sessions(3).slots(16).marks(marks);
        let engine = open(folder, device, memory, Some(Arc::clone(&until)));
        let folder = tempfile::tempdir().unwrap();
        Self {
            engine,
            until,
            sessions: Vec::new(),
            marks: Vec::new(),
            saved: HashMap::new(),
            folder,
        }
    }

    /// Opens session `i` if needed.
    fn session(&mut self, i: usize) -> usize {
        while self.sessions.len() <= i {
            self.sessions.push((self.engine.session().unwrap(), Vec::new()));
        }
        i
    }

    /// Runs a step with a possible fault; `None` if it failed.
    fn with<T>(
        &mut self,
        trouble: Trouble,
        f: impl FnOnce(&mut Self, &mut StepControl<'_>) -> Result<T, Error>,
    ) -> Option<T> {
        let cancel = CancelToken::new();
        let mut progress = |share: f64| {
            if let Trouble::Cancel(at) = trouble
                && share * 100.0 >= f64::from(at)
            {
                cancel.cancel();
            }
        };
        if let Trouble::Fault(reads) = trouble {
            self.until.store(reads.into(), SeqCst);
        }
        let mut control = StepControl::default().cancel(&cancel).progress(&mut progress);
        let done = f(self, &mut control);
        self.until.store(0, SeqCst);
        match done {
            Ok(done) => Some(done),
            Err(Error::Cancelled) => {
                assert!(matches!(trouble, Trouble::Cancel(_)));
                None
            }
            Err(error) => {
                let text = error.to_string();
                // Live marks may leave no room: the error says so, and nothing is lost.
                let full = text.contains("do not fit the memory plan");
                assert!(
                    full || matches!(trouble, Trouble::Fault(_)) && text.contains("injected"),
                    "{text}"
                );
                None
            }
        }
    }

    fn act(&mut self, action: &Action, vocab: usize) {
        match *action {
            Action::Sync(i, of, len, trouble) => {
                let i = self.session(i);
                let tokens: Vec<u32> = (0..len).map(|t| text(of, t, vocab)).collect();
                let synced =
                    self.with(trouble, |world, control| world.sessions[i].0.sync(&tokens, control));
                let (session, expected) = &mut self.sessions[i];
                match synced {
                    Some(synced) => {
                        assert_eq!(synced.reused + synced.computed, tokens.len());
                        assert!(
                            synced.restored <= synced.reused && synced.rewound <= expected.len()
                        );
                        assert_eq!(session.logits().len(), vocab);
                        *expected = tokens;
                    }
                    // The session is at a prefix of the new tokens, or unchanged.
                    None => {
                        let now = session.tokens().to_vec();
                        assert!(tokens.starts_with(&now) || now == *expected);
                        *expected = now;
                    }
                }
            }
            Action::Decode(i, of, count, trouble) => {
                let i = self.session(i);
                for _ in 0..count {
                    let (_, before) = &self.sessions[i];
                    if before.len() == CONTEXT {
                        return;
                    }
                    let token = text(of, before.len(), vocab);
                    let done = self.with(trouble, |world, control| {
                        let tokens = [token];
                        let turn = BatchEntry::new(&mut world.sessions[i].0, &tokens);
                        world.engine.step(&mut [turn.logits(true)], control)
                    });
                    if done.is_some() {
                        self.sessions[i].1.push(token);
                        assert_eq!(self.sessions[i].0.logits().len(), vocab);
                    }
                }
            }
            Action::Step(ref counts, trouble) => {
                let more: Vec<Vec<u32>> = self
                    .sessions
                    .iter()
                    .zip(counts)
                    .map(|((_, before), count)| {
                        (before.len()..CONTEXT.min(before.len() + count))
                            .map(|t| text(1, t, vocab))
                            .collect()
                    })
                    .collect();
                if more.iter().any(Vec::is_empty) {
                    return;
                }
                let done = self.with(trouble, |world, control| {
                    let mut turns: Vec<BatchEntry<'_>> = world
                        .sessions
                        .iter_mut()
                        .zip(&more)
                        .map(|((session, _), tokens)| {
                            BatchEntry::new(session, tokens).logits(tokens.len() % 2 == 1)
                        })
                        .collect();
                    world.engine.step(&mut turns, control)
                });
                if done.is_some() {
                    for ((_, expected), more) in self.sessions.iter_mut().zip(more) {
                        expected.extend(more);
                    }
                }
            }
            Action::Truncate(i, share, trouble) => {
                let i = self.session(i);
                let len = self.sessions[i].1.len() * share / 100;
                let done =
                    self.with(trouble, |world, control| world.sessions[i].0.truncate(len, control));
                let (session, expected) = &mut self.sessions[i];
                match done {
                    Some(done) => {
                        assert_eq!(done.reused + done.computed, len);
                        expected.truncate(len);
                    }
                    None => {
                        let now = session.tokens().len();
                        assert!(now <= len || now == expected.len());
                        expected.truncate(now);
                    }
                }
            }
            Action::Fork(i) => {
                let i = self.session(i);
                if self.sessions.len() == 3 {
                    let error = self.sessions[i].0.fork().err().unwrap().to_string();
                    assert!(error.contains("room for 3 session"), "{error}");
                    return;
                }
                let fork = (self.sessions[i].0.fork().unwrap(), self.sessions[i].1.clone());
                assert_eq!(fork.0.logits(), self.sessions[i].0.logits());
                self.sessions.push(fork);
            }
            Action::Drop(i) => {
                if i < self.sessions.len() {
                    self.sessions.remove(i);
                }
            }
            Action::Mark(i) => {
                let i = self.session(i);
                if self.marks.len() < 8 {
                    let mark = self.sessions[i].0.mark().unwrap();
                    assert_eq!(mark.tokens(), self.sessions[i].1);
                    self.marks.push((mark, self.sessions[i].1.clone()));
                }
            }
            Action::Rewind(i, mark) => {
                let i = self.session(i);
                if let Some((mark, tokens)) = self.marks.get(mark) {
                    self.sessions[i].0.rewind(mark).unwrap();
                    self.sessions[i].1.clone_from(tokens);
                }
            }
            Action::Forget(mark) => {
                if mark < self.marks.len() {
                    self.marks.remove(mark);
                }
            }
            Action::Snapshot(i, file) => {
                let i = self.session(i);
                let path = self.folder.path().join(file.to_string());
                let options = SnapshotOptions::default().hot_experts(file == 0);
                let bytes = self.sessions[i].0.snapshot(&path, options).unwrap();
                assert_eq!(std::fs::metadata(path).unwrap().len(), bytes);
                self.saved.insert(file, self.sessions[i].1.clone());
            }
            Action::Restore(i, file) => {
                let i = self.session(i);
                let path = self.folder.path().join(file.to_string());
                match self.saved.get(&file).cloned() {
                    Some(tokens) => {
                        let done =
                            self.with(Trouble::None, |world, _| world.sessions[i].0.restore(&path));
                        match done {
                            Some(()) => self.sessions[i].1 = tokens,
                            // Marks leave no room: the session keeps what it still has.
                            None => self.sessions[i].1 = self.sessions[i].0.tokens().to_vec(),
                        }
                    }
                    None => assert!(self.sessions[i].0.restore(&path).is_err()),
                }
            }
            Action::Reset(i) => {
                let i = self.session(i);
                self.sessions[i].0.reset().unwrap();
                self.sessions[i].1.clear();
            }
        }
    }

    fn check(&self, oracle: &mut Oracle) {
        for (session, expected) in &self.sessions {
            assert_eq!(session.tokens(), expected);
            if !session.logits().is_empty() {
                assert!(
                    session.logits() == oracle.logits(expected),
                    "other logits after {}",
                    expected.len()
                );
            }
        }
    }

    /// Each session continues correctly, even if it was not used since a rewind.
    fn check_next(&mut self, oracle: &mut Oracle) {
        self.marks.clear();
        for (session, tokens) in &mut self.sessions {
            if tokens.len() < CONTEXT {
                tokens.push(1);
                assert!(
                    session.decode(1).unwrap() == oracle.logits(tokens),
                    "after {}",
                    tokens.len()
                );
            }
        }
    }
}

fn holds(folder: PathBuf, device: DeviceOptions, marks: u64, cases: u32) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(config.rng_algorithm);
    let engine = open(&folder, device.clone(), MemoryRequest::default().marks(0), None);
    let vocab = engine.blueprint().vocab;
    let oracle = std::cell::RefCell::new(Oracle { engine, known: HashMap::new() });
    let ran = TestRunner::new_with_rng(config, rng).run(&actions(), |actions| {
        let mut world = World::new(&folder, device.clone(), marks);
        for action in &actions {
            world.act(action, vocab);
            world.check(&mut oracle.borrow_mut());
        }
        world.check_next(&mut oracle.borrow_mut());
        Ok(())
    });
    if let Err(error) = ran {
        panic!("{error}");
    }
}

fn golden(name: &str) -> PathBuf {
    moeflux_goldens::golden(name)
}

#[test]
fn kv_caches() {
    holds(golden("qwen3_moe"), exact("cpu"), 1 << 20, 16);
}

#[test]
fn recurrent_states() {
    holds(golden("qwen3_5_moe"), exact("cpu"), 1 << 20, 16);
}

#[test]
fn sliding_windows() {
    holds(golden("gpt_oss"), exact("cpu"), 1 << 20, 16);
}

#[test]
fn latent_attention() {
    holds(golden("deepseek_v3"), exact("cpu"), 1 << 20, 8);
}

#[test]
fn sparse_attention() {
    holds(golden("deepseek_v32"), exact("cpu"), 1 << 20, 8);
}

#[test]
fn block_sparse_attention() {
    holds(golden("minimax_m3_vl_hub"), exact("cpu"), 1 << 20, 8);
}

#[test]
fn without_room_for_a_prefix_cache() {
    holds(tales(), exact("cpu"), 0, 4);
}

/// States are in GPU memory: forks share them until one advances.
#[test]
fn on_a_gpu() {
    let Some(device) = gpu(true) else { return };
    holds(golden("qwen3_5_moe"), device, 1 << 20, 2);
}

#[test]
fn an_empty_session_can_be_saved() {
    let engine = common::engine(&tales(), exact("cpu"), MemoryRequest::default());
    let file = tempfile::tempdir().unwrap();
    let (path, mut session) = (file.path().join("empty"), engine.session().unwrap());
    session.snapshot(&path, SnapshotOptions::default()).unwrap();
    session.restore(&path).unwrap();
    let first = session.decode(7).unwrap().to_vec();
    session.restore(&path).unwrap();
    assert!(session.tokens().is_empty() && session.decode(7).unwrap() == first);
}

/// Prompts with different logits.
fn prompt(n: u32) -> Vec<u32> {
    (0..40).map(|i| (i * 7 + n * 13) % 500 + 3).collect()
}

/// A reset without room beside marks leaves nothing of the old text.
#[test]
fn a_failed_reset_is_completed_by_the_next_step() {
    let memory = MemoryRequest::default().context(320).chunk(32).marks(0);
    let engine = common::engine(&tales(), exact("cpu"), memory);
    let mut control = StepControl::default();
    let mut session = engine.session().unwrap();
    session.sync(&prompt(1), &mut control).unwrap();
    let mut marks = Vec::new();
    for _ in 0..50 {
        marks.push(session.mark().unwrap());
        if session.decode(5).is_err() {
            break;
        }
    }
    for _ in 0..2 {
        let error = session.sync(&prompt(2), &mut control).unwrap_err().to_string();
        assert!(error.contains("drop sessions or marks"), "{error}");
        assert!(session.tokens().is_empty() && session.logits().is_empty());
        assert!(
            session.mark().is_err() && session.snapshot("/no/such/x", Default::default()).is_err()
        );
    }
    drop(marks);
    session.sync(&prompt(2), &mut control).unwrap();
    let logits = session.logits().to_vec();
    session.reset().unwrap();
    session.sync(&prompt(2), &mut control).unwrap();
    assert!(session.logits() == logits);
}

#[test]
fn a_reset_evicts_cached_prefixes() {
    let memory = MemoryRequest::default().context(320).chunk(32).sessions(2).// Cached prefixes fill this to the last page.
        marks(25 << 16);
    let engine = common::engine(&tales(), exact("cpu"), memory);
    let (mut first, mut second) = (engine.session().unwrap(), engine.session().unwrap());
    first.sync(&prompt(0), &mut StepControl::default()).unwrap();
    let mark = first.mark().unwrap();
    first.rewind(&mark).unwrap();
    for n in 1..16 {
        second.sync(&prompt(n), &mut StepControl::default()).unwrap();
    }
    first.reset().unwrap();
}

/// A snapshot in the folder is kept only if it is equivalent; one that is too large leaves the
/// others alone.
#[test]
fn a_folder_replaces_unusable_snapshots() {
    let open = |folder: &Path, chunk| {
        let memory = MemoryRequest::default().context(1024).marks(0);
        common::engine(folder, exact("cpu"), memory.chunk(chunk))
    };
    let temp = tempfile::tempdir().unwrap();
    let cache = SnapshotFolder::open(temp.path(), 1 << 30).unwrap();
    let tokens: Vec<u32> = (0..100).map(|i| i * 7 % 60 + 1).collect();
    // Tokens computed with the help of the folder.
    let computed = |session: &mut Session| {
        session.reset().unwrap();
        session.sync_from(&cache, &tokens, &mut StepControl::default()).unwrap().computed
    };
    let engine = open(&tales(), 32);
    let mut session = engine.session().unwrap();
    assert_eq!(computed(&mut session), 100);
    let path = session.snapshot_to(&cache).unwrap().unwrap();
    assert_eq!(computed(&mut session), 0);

    let mut damaged = fs::read(&path).unwrap();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&path, &damaged).unwrap();
    assert_eq!(computed(&mut session), 100);
    session.snapshot_to(&cache).unwrap();
    assert_eq!(computed(&mut session), 0);

    // Without logits, as after generation.
    fs::remove_file(&path).unwrap();
    session.reset().unwrap();
    let mut sampler =
        moeflux::text::Sampler::new(moeflux::Sampling::greedy(), engine.blueprint().vocab).unwrap();
    session.next(&tokens, &mut sampler, &mut StepControl::default()).unwrap();
    assert!(session.logits().is_empty());
    session.snapshot_to(&cache).unwrap();
    assert_eq!(computed(&mut session), 100);
    session.snapshot_to(&cache).unwrap();
    assert_eq!(computed(&mut session), 0);

    // The file is larger than its states.
    let size = fs::metadata(&path).unwrap().len();
    let tight = SnapshotFolder::open(temp.path(), size - 1).unwrap();
    assert!(!path.exists());
    assert_eq!(session.snapshot_to(&tight).unwrap(), None);
    session.sync(&tokens[..20], &mut StepControl::default()).unwrap();
    let small = session.snapshot_to(&cache).unwrap().unwrap();
    session.sync(&tokens, &mut StepControl::default()).unwrap();
    assert_eq!(session.snapshot_to(&tight).unwrap(), None);
    assert!(small.exists() && !path.exists());

    // Windows of another length get separate files.
    for (chunk, wanted) in [(32, 100), (512, 100), (512, 0), (32, 0)] {
        let engine = open(&golden("gpt_oss"), chunk);
        let mut session = engine.session().unwrap();
        assert_eq!(computed(&mut session), wanted, "{chunk}");
        session.snapshot_to(&cache).unwrap();
    }
}

/// A session restored from a lossy file stays marked in all copies, and no other session reuses it.
#[test]
fn lossy_states_stay_marked_and_are_not_shared() {
    for folder in [tales(), golden("qwen3_moe")] {
        let memory = MemoryRequest::default().sessions(3).marks(1 << 20);
        let engine = common::engine(&folder, exact("cpu"), memory);
        let vocab = engine.blueprint().vocab;
        let tokens: Vec<u32> = (0..120).map(|i| text(0, i, vocab)).collect();
        let temp = tempfile::tempdir().unwrap();
        let path = temp.path().join("lossy");
        let lossy = SnapshotOptions::default().kv_format(KvFormat::Q8);
        let mut control = StepControl::default();
        let mut session = engine.session().unwrap();
        session.feed(&tokens[..60], Logits::Last, &mut control, &mut |_, _| {}).unwrap();
        session.snapshot(&path, lossy).unwrap();
        session.restore(&path).unwrap();
        assert!(session.is_lossy() && session.fork().unwrap().is_lossy());
        let mark = session.mark().unwrap();

        // A bit-exact snapshot of a lossy session is lossy.
        session.snapshot(&path, SnapshotOptions::default()).unwrap();
        session.reset().unwrap();
        assert!(!session.is_lossy());
        session.restore(&path).unwrap();
        let follows =
            session.sync(&tokens, &mut control).map(|_| session.logits().to_vec()).unwrap();
        assert!(session.is_lossy());
        let cache = SnapshotFolder::open(temp.path().join("cache"), 1 << 30).unwrap();
        assert_eq!(session.snapshot_to(&cache).unwrap(), None);

        let mut other = engine.session().unwrap();
        assert_eq!(
            other.sync(&tokens, &mut control).unwrap().computed,
            tokens.len(),
            "a lossy state entered the prefix cache"
        );
        assert!(!other.is_lossy() && other.logits() != follows);
        other.rewind(&mark).unwrap();
        assert!(other.is_lossy());
        // Now the prefix cache has computed states.
        let mut third = engine.session().unwrap();
        assert!(third.sync(&tokens, &mut control).unwrap().computed < 2 && !third.is_lossy());
    }
    let options = DeviceOptions::default().kv_format(KvFormat::F16);
    let engine = common::engine(&tales(), options, MemoryRequest::default());
    let session = engine.session().unwrap();
    let wider = SnapshotOptions::default().kv_format(KvFormat::F32);
    let error = session.snapshot("/no/such/folder/x", wider).unwrap_err().to_string();
    assert!(error.contains("f16") && error.contains("f32"), "{error}");
}

/// Pages are allocated as they are written: a context may be far longer than memory, and running
/// out is an error.
#[test]
fn a_context_costs_only_its_used_part() {
    let folder = golden("qwen3_moe");
    let context =
        moeflux::model::blueprint::Blueprint::for_checkpoint(&Checkpoint::open(&folder).unwrap())
            .unwrap()
            .max_positions;
    let memory = MemoryRequest::default().context(context).marks(0).chunk(256);
    let full = common::engine(&folder, exact("cpu"), memory).plan().bytes(LineName::State);
    let state = full / context as u64 * 1024;
    let engine = common::engine(&folder, exact("cpu"), memory.state(state));
    let planned = engine.plan().bytes(LineName::State);
    assert!(planned <= state + 4096 && full > 3 * planned);
    let mut session = engine.session().unwrap();
    let vocab = engine.blueprint().vocab;
    let tokens: Vec<u32> = (0..2000).map(|i| text(0, i, vocab)).collect();
    session.sync(&tokens[..1000], &mut StepControl::default()).unwrap();
    let before = session.logits().to_vec();
    let error = session.sync(&tokens, &mut StepControl::default()).unwrap_err().to_string();
    assert!(
        error.contains("do not fit the memory plan") && error.contains("more are needed"),
        "{error}"
    );
    assert!(session.tokens().len() >= 1000 && tokens.starts_with(session.tokens()));
    session.sync(&tokens[..900], &mut StepControl::default()).unwrap();
    session.sync(&tokens[..1000], &mut StepControl::default()).unwrap();
    assert!(session.logits() == before);
}

#[test]
fn a_callback_that_panics_fails_its_step_only() {
    let memory = MemoryRequest::default().context(64).sessions(2).slots(10);
    let engine = common::engine(&moeflux_goldens::golden("qwen3_moe"), exact("cpu"), memory);
    let (mut one, mut other) = (engine.session().unwrap(), engine.session().unwrap());
    // Number of allowed progress calls; then the sink must not be called.
    let feed = |session: &mut Session, mut left: usize| {
        let (mut logits, panics) = (Vec::new(), left < 9);
        let mut progress = |_: f64| left = left.checked_sub(1).unwrap();
        let mut control = StepControl::default().progress(&mut progress);
        let step = || {
            session.feed(&[5, 6, 7], Logits::Last, &mut control, &mut |_, row| {
                assert!(!panics, "by a caller");
                logits = row.to_vec();
            })
        };
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(step));
        done.map(|done| done.map(|()| logits).unwrap()).ok()
    };
    let expected = feed(&mut other, 9);
    for left in 0..4 {
        assert_eq!(feed(&mut one, left), None);
        other.reset().unwrap();
        assert!(one.tokens().is_empty() && feed(&mut other, 9) == expected);
    }
    assert!(feed(&mut one, 9) == expected && expected.is_some());
}

#[test]
fn opening_ends_at_the_weight_after_which_it_is_cancelled() {
    let cancel = Arc::new(CancelToken::new());
    let open = |at: usize| {
        let device = DeviceOptions::default().name("cpu").threads(1);
        let options = EngineOptions::default().device(device).cancel(Arc::clone(&cancel));
        let mut calls = 0;
        cancel.reset();
        let checkpoint = Checkpoint::open(&tales()).unwrap();
        let opened = Engine::open(checkpoint, options, &mut |_, _| {
            calls += 1;
            if calls == at {
                cancel.cancel();
            }
        });
        (opened.map(drop), calls)
    };
    let (opened, calls) = open(usize::MAX);
    assert!(opened.is_ok() && calls > 10, "{calls} weights");
    for at in [1, calls / 2, calls] {
        let (opened, seen) = open(at);
        assert!(matches!(opened, Err(Error::Cancelled)) && seen == at, "{opened:?}");
    }
}

#[test]
fn hidden_states_are_fed_in_chunks() {
    let engine = common::engine(
        &moeflux_goldens::golden("qwen3_moe"),
        exact("cpu"),
        MemoryRequest::default().context(64).chunk(5).sessions(2).slots(10),
    );
    let tokens: Vec<u32> = (1..12).collect();
    let (mut session, mut rows) = (engine.session().unwrap(), Vec::new());
    let mut sink = |row: usize, hidden: &[f32]| rows.push((row, hidden.to_vec()));
    session.feed_hidden(&tokens, &mut StepControl::default(), &mut sink).unwrap();
    assert!(session.logits().is_empty() && session.tokens() == tokens);
    let is_in_order = rows.iter().enumerate().all(|(i, (row, _))| i == *row);
    assert!(is_in_order && rows.len() == tokens.len());
    assert!(rows.iter().all(|(_, hidden)| hidden.len() == engine.blueprint().hidden));
    // The state after them is the same as after `feed`.
    let mut other = engine.session().unwrap();
    other.feed(&tokens, Logits::Last, &mut StepControl::default(), &mut |_, _| {}).unwrap();
    for session in [&mut session, &mut other] {
        session.feed(&[3], Logits::Last, &mut StepControl::default(), &mut |_, _| {}).unwrap();
    }
    assert_eq!(session.logits(), other.logits());
}
