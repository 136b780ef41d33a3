//! Failing reads and steps leave the session at its last good token, with an error that names the
//! cause.

use std::{
    fs::{self, OpenOptions},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, MemoryRequest, StepControl,
    base::SessionError,
    checkpoint::CheckpointOptions,
    experts::{Access, ReadOptions, ReaderKind},
    runtime::{CancelToken, Logits},
};

use crate::common::{
    self, Golden, copy_golden, exact, feed,
    readers::{every_nth, faulty},
    tales,
};

const PROMPT: [u32; 6] = [17, 400, 33, 2050, 9, 1234];

#[test]
fn a_session_survives_failing_reads() {
    let memory = MemoryRequest::default().slots(8);
    let open = |wrap_reader| {
        let mut options = EngineOptions::default().memory(memory);
        options.wrap_reader = wrap_reader;
        Engine::open(Checkpoint::open(&tales()).unwrap(), options, &mut |_, _| {}).unwrap()
    };
    let good = open(None);
    let bad = open(Some(every_nth(17)));
    let (mut good, mut bad) = (good.session().unwrap(), bad.session().unwrap());
    let mut failures = 0;
    for token in PROMPT {
        let expected = feed(&mut good, &[token], None);
        let tokens = bad.tokens().to_vec();
        loop {
            let mut logits = Vec::new();
            let fed =
                bad.feed(&[token], Logits::All, &mut StepControl::default(), &mut |_, row| {
                    logits.extend_from_slice(row)
                });
            match fed {
                Ok(()) => {
                    assert!(logits == expected, "after {failures} failures");
                    break;
                }
                Err(error) => {
                    assert!(error.to_string().contains("injected"), "{error}");
                    assert_eq!(bad.tokens(), tokens);
                    failures += 1;
                    assert!(failures < 100);
                }
            }
        }
    }
    assert!(failures > 2, "the faults were injected");
}

/// A model with a table of rows.
const WITH_TABLE: &str = "qwen4_exp_hub";

/// Faults while all experts are in memory, so that the reads are those of rows.
#[test]
fn a_session_survives_failing_reads_of_rows() {
    let golden = Golden::read(WITH_TABLE);
    let is_armed = Arc::new(AtomicBool::new(false));
    let armed = Arc::clone(&is_armed);
    let options = EngineOptions::default()
        .memory(MemoryRequest::default().sessions(2))
        .device(exact("cpu"))
        .wrap_reader(faulty(move || armed.swap(false, Relaxed)));
    let checkpoint = Checkpoint::open(&golden.folder).unwrap();
    let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
    let (mut good, mut bad) = (engine.session().unwrap(), engine.session().unwrap());
    let prompt = golden.prompt();
    // The rows of the first step are read in several batches.
    let text: Vec<u32> = prompt.iter().copied().cycle().take(60).collect();
    let steps = [&text[..40], &text[40..41], &text[41..42], &text[42..]];
    let expected = steps.map(|step| feed(&mut good, step, None));
    let read = engine.read_counters();
    for (step, expected) in steps.into_iter().zip(expected) {
        let before = bad.tokens().to_vec();
        for _ in 0..2 {
            is_armed.store(true, Relaxed);
            let mut control = StepControl::default();
            let error = bad.feed(step, Logits::Last, &mut control, &mut |_, _| {}).unwrap_err();
            assert!(error.to_string().contains("injected"), "{error}");
            assert!(!is_armed.load(Relaxed) && bad.tokens() == before);
        }
        assert!(feed(&mut bad, step, None) == expected, "other bits after a failed step");
    }
    assert_eq!(engine.read_counters().bytes, read.bytes, "experts were read");
}

fn copy_of_tales() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(tales()).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

/// Two sessions of an engine whose files disappear and return as new files, as on a disk that was
/// detached.
#[test]
fn an_engine_reopens_its_files() {
    let folder = copy_of_tales();
    let shard = folder.path().join("model.safetensors");
    let memory = MemoryRequest::default().slots(4).sessions(2);
    let engine = common::engine(folder.path(), exact("cpu"), memory);
    let (mut one, mut other) = (engine.session().unwrap(), engine.session().unwrap());
    let mut logits = feed(&mut one, &PROMPT[..3], None);
    let read = engine.read_counters().bytes;

    let whole = fs::read(&shard).unwrap();
    OpenOptions::new().write(true).open(&shard).unwrap().set_len(60_000).unwrap();
    for session in [&mut one, &mut other] {
        let before = session.tokens().to_vec();
        for _ in 0..2 {
            let error = session.decode(PROMPT[3]).unwrap_err().to_string();
            assert!(
                error.contains("model.safetensors") && error.contains("download it again"),
                "{error}"
            );
            assert_eq!(session.tokens(), before);
        }
    }
    // Other weights in the same layout are refused.
    let mut foreign = whole.clone();
    let len = foreign.len();
    foreign[len / 2..].iter_mut().for_each(|byte| *byte ^= 0x55);
    let replace = |bytes: &[u8]| {
        let aside = folder.path().join("aside");
        fs::write(&aside, bytes).unwrap();
        fs::rename(&aside, &shard).unwrap();
    };
    replace(&foreign);
    assert!(one.decode(PROMPT[3]).is_err() && other.decode(PROMPT[3]).is_err());

    replace(&whole);
    logits.extend(feed(&mut one, &PROMPT[3..], None));
    let again = feed(&mut other, &PROMPT, None);
    assert!(engine.read_counters().bytes > read);
    let engine = common::engine(&tales(), exact("cpu"), memory);
    let expected = feed(&mut engine.session().unwrap(), &PROMPT, None);
    assert!(logits == expected && again == expected);
}

/// As [`an_engine_reopens_its_files`], where all experts are in memory.
#[test]
fn an_engine_reopens_the_files_of_its_tables() {
    let folder = tempfile::tempdir().unwrap();
    copy_golden(WITH_TABLE, folder.path());
    let shard = folder.path().join("model.safetensors");
    let memory = MemoryRequest::default();
    let engine = common::engine(folder.path(), exact("cpu"), memory);
    let mut session = engine.session().unwrap();
    let text = Golden::read(WITH_TABLE).prompt();
    let (first, rest) = text.split_at(4);
    let expected = [feed(&mut session, first, None), feed(&mut session, rest, None)];
    session.reset().unwrap();
    let read = engine.read_counters();
    assert!(feed(&mut session, first, None) == expected[0]);

    let whole = fs::read(&shard).unwrap();
    OpenOptions::new().write(true).open(&shard).unwrap().set_len(60_000).unwrap();
    let fails = |session: &mut moeflux::Session| {
        let mut control = StepControl::default();
        let fed = session.feed(rest, Logits::Last, &mut control, &mut |_, _| {});
        let error = fed.unwrap_err().to_string();
        for part in ["model.safetensors", "ple_embedding.ngram_embedding.shard_", "row "] {
            assert!(error.contains(part), "{error}");
        }
        assert!(error.contains("download it again"), "{error}");
        assert_eq!(session.tokens(), first);
    };
    fails(&mut session);
    fails(&mut session);
    let replace = |bytes: &[u8]| {
        let aside = folder.path().join("aside");
        fs::write(&aside, bytes).unwrap();
        fs::rename(&aside, &shard).unwrap();
    };
    // Other weights in the same layout are refused.
    let half = whole.len() / 2;
    let foreign = whole[half..].iter().map(|byte| byte ^ 0x55);
    replace(&whole[..half].iter().copied().chain(foreign).collect::<Vec<_>>());
    fails(&mut session);

    replace(&whole);
    assert!(feed(&mut session, rest, None) == expected[1], "other bits after the return");
    assert_eq!(engine.read_counters().bytes, read.bytes, "experts were read");
}

fn with_mirror(folder: &Path, mirror: &Path) -> Result<Engine, Error> {
    let memory = MemoryRequest::default().slots(4);
    let options = EngineOptions::default().memory(memory);
    let mirrors = CheckpointOptions::default().mirrors(vec![mirror.into()]);
    Engine::open(Checkpoint::open_with(folder, &mirrors)?, options, &mut |_, _| {})
}

#[test]
fn a_mirror_replaces_a_truncated_file() {
    let golden = Golden::read(WITH_TABLE);
    for (model, text) in [(tales(), &PROMPT[..]), (golden.folder.clone(), &golden.prompt()[..])] {
        let folder = tempfile::tempdir().unwrap();
        common::copy_folder(&model, folder.path());
        let engine = with_mirror(folder.path(), &model).unwrap();
        assert!(engine.reads().ends_with("from 2 folders"), "{}", engine.reads());
        let mut session = engine.session().unwrap();
        let mut logits = feed(&mut session, &text[..3], None);
        let shard = folder.path().join("model.safetensors");
        OpenOptions::new().write(true).open(&shard).unwrap().set_len(60_000).unwrap();
        logits.extend(feed(&mut session, &text[3..], None));

        let memory = MemoryRequest::default().slots(4);
        let alone = common::engine(&model, Default::default(), memory);
        let mut session = alone.session().unwrap();
        let mut expected = feed(&mut session, &text[..3], None);
        expected.extend(feed(&mut session, &text[3..], None));
        assert!(logits == expected, "{}", model.display());
    }
}

#[test]
fn a_mirror_that_differs_is_refused() {
    let folder = copy_of_tales();
    let shard = folder.path().join("model.safetensors");
    let refused = |what: &str| {
        let text = with_mirror(&tales(), folder.path()).err().unwrap().to_string();
        assert!(text.starts_with(shard.to_str().unwrap()) && text.contains(what), "{text}");
    };
    let mut contents = fs::read(&shard).unwrap();
    // A byte of a tensor name in the header.
    contents[40] ^= 1;
    fs::write(&shard, &contents).unwrap();
    refused("other tensors");
    contents.pop();
    fs::write(&shard, &contents).unwrap();
    refused("another length");
    fs::remove_file(&shard).unwrap();
    let text = with_mirror(&tales(), folder.path()).err().unwrap().to_string();
    assert!(
        text.starts_with(folder.path().to_str().unwrap()) && text.contains("none of the files"),
        "{text}"
    );
    let gone = folder.path().join("gone");
    let text = with_mirror(&tales(), &gone).err().unwrap().to_string();
    assert!(
        text.starts_with(gone.to_str().unwrap()) && text.contains("is its disk there"),
        "{text}"
    );
}

/// Pads the header with spaces to `len` bytes.
fn lengthen_header(shard: &Path, to: usize) {
    let contents = fs::read(shard).unwrap();
    let (length, rest) = contents.split_at(8);
    let (header, weights) = rest.split_at(u64::from_le_bytes(length.try_into().unwrap()) as usize);
    let spaces = vec![b' '; to - header.len()];
    fs::write(shard, [&(to as u64).to_le_bytes(), header, &spaces, weights].concat()).unwrap();
}

#[test]
fn a_mirror_with_other_weights_is_refused() {
    let (own, mirror) = (copy_of_tales(), tempfile::tempdir().unwrap());
    let header = 100_000;
    let shard = own.path().join("model.safetensors");
    lengthen_header(&shard, header);
    let contents = fs::read(&shard).unwrap();
    let copy = mirror.path().join("model.safetensors");
    fs::write(&copy, &contents).unwrap();
    with_mirror(own.path(), mirror.path()).unwrap();

    let (first, len) = (8 + header, contents.len());
    let flipped: fn(u8) -> u8 = |byte| byte ^ 1;
    let lost: fn(u8) -> u8 = |_| 0;
    // Every fiftieth part of the file contains a sampled block.
    let part = len / 50;
    let changes = [
        (first..first + 1, flipped, format!("at byte {first},")),
        (len - 1..len, flipped, format!("at byte {},", len - 1)),
        (len / 2..len / 2 + part, flipped, "other weights".into()),
        // An incomplete copy into a preallocated file.
        (len - part..len, lost, "other weights".into()),
    ];
    for (place, change, what) in changes {
        let mut changed = contents.clone();
        changed[place].iter_mut().for_each(|byte| *byte = change(*byte));
        fs::write(&copy, &changed).unwrap();
        let text = with_mirror(own.path(), mirror.path()).err().unwrap().to_string();
        assert!(text.starts_with(copy.to_str().unwrap()) && text.contains(&what), "{what}: {text}");
        assert!(text.contains("copy it again"), "{text}");
    }
}

#[test]
fn a_model_can_be_spread_over_several_folders() {
    let prompt = PROMPT.map(|token| token % 250);
    let whole = moeflux_goldens::golden("qwen3_5_moe_hub");
    let shards: Vec<_> = common::shards(&whole);
    let [first, second] = &shards[..] else { panic!("{shards:?}") };
    let copy = |name: &str, to: &Path| fs::copy(whole.join(name), to.join(name)).unwrap();
    let own = tempfile::tempdir().unwrap();
    let [stripe, replica] = ["stripe", "replica"].map(|name| own.path().join(name));
    for folder in [&stripe, &replica] {
        fs::create_dir(folder).unwrap();
    }
    for name in ["config.json", "model.safetensors.index.json", first] {
        copy(name, own.path());
    }

    let text = Checkpoint::open(own.path()).unwrap_err().to_string();
    assert!(text.contains(second.as_str()) && text.contains("download"), "{text}");
    fs::write(own.path().join("mirrors.txt"), "//server/share\n").unwrap();
    let text = Checkpoint::open(own.path()).unwrap_err().to_string();
    assert!(text.contains("mirrors.txt") && text.contains("another machine"), "{text}");
    fs::write(
        own.path().join("mirrors.txt"),
        "# The other disk\nstripe\n\nreplica # and a third\n",
    )
    .unwrap();
    copy(second, &stripe);
    let text = Checkpoint::open(own.path()).unwrap_err().to_string();
    assert!(
        text.starts_with(replica.to_str().unwrap()) && text.contains("none of the files"),
        "{text}"
    );
    copy(second, &replica);

    let memory = MemoryRequest::default().slots(4);
    let expected =
        feed(&mut common::engine(&whole, exact("cpu"), memory).session().unwrap(), &prompt, None);
    let engine = common::engine(own.path(), exact("cpu"), memory);
    assert!(engine.reads().ends_with("from 3 folders"), "{}", engine.reads());
    let mut session = engine.session().unwrap();
    let mut logits = feed(&mut session, &prompt[..3], None);
    // One disk is lost: its shard is read from the other one, and the engine continues.
    let shard = stripe.join(second);
    OpenOptions::new().write(true).open(&shard).unwrap().set_len(100).unwrap();
    logits.extend(feed(&mut session, &prompt[3..], None));
    assert!(logits == expected);
    let [_, from_stripe, from_replica, ..] = engine.read_counters().by_copy;
    assert!(from_stripe > 0 && from_replica > 0, "{:?}", engine.read_counters());
}

#[test]
fn a_truncated_file_is_named_and_the_session_continues_once_it_is_restored() {
    let kinds = [ReaderKind::Threads, ReaderKind::Uring];
    for (kind, access) in kinds.iter().flat_map(|k| [(*k, Access::Buffered), (*k, Access::Direct)])
    {
        // Also a length within a block, where a direct read comes short.
        for len in [60_000, 64 << 10] {
            shrinks(ReadOptions::default().kind(kind).access(access), len);
        }
    }
}

fn shrinks(reads: ReadOptions, len: u64) {
    let folder = copy_of_tales();
    let shard = folder.path().join("model.safetensors");
    let contents = fs::read(&shard).unwrap();
    let memory = MemoryRequest::default().slots(4).sessions(2);
    let options = EngineOptions::default().memory(memory).reads(reads);
    let engine =
        Engine::open(Checkpoint::open(folder.path()).unwrap(), options, &mut |_, _| {}).unwrap();
    let mut session = engine.session().unwrap();
    feed(&mut session, &PROMPT[..3], None);

    OpenOptions::new().write(true).open(&shard).unwrap().set_len(len).unwrap();
    let error = session.decode(PROMPT[3]).unwrap_err();
    let Error::Expert { path, expert, offset, .. } = &error else {
        panic!("{}: {error}", engine.reads())
    };
    assert_eq!(path, &shard);
    let said = error.to_string();
    assert!(
        said.contains(&format!("expert {expert}")) && said.contains(&offset.to_string()),
        "{said}"
    );
    assert_eq!(session.tokens(), &PROMPT[..3]);

    fs::write(&shard, contents).unwrap();
    let after = session.decode(PROMPT[3]).unwrap().to_vec();
    let mut fresh = engine.session().unwrap();
    fresh.feed(&PROMPT[..4], Logits::Last, &mut StepControl::default(), &mut |_, _| {}).unwrap();
    let difference = common::difference(&after, fresh.logits());
    assert!(difference < 1e-3, "{difference}");
}

#[test]
fn a_cancelled_step_changes_nothing() {
    let engine = common::engine(&tales(), Default::default(), MemoryRequest::default().sessions(2));
    let mut session = engine.session().unwrap();
    feed(&mut session, &PROMPT[..3], None);
    let cancel = CancelToken::new();
    cancel.cancel();
    let mut control = StepControl::default().cancel(&cancel);
    let error = session.feed(&PROMPT[3..], Logits::Last, &mut control, &mut |_, _| {}).unwrap_err();
    assert!(matches!(error, Error::Cancelled), "{error}");
    assert_eq!(session.tokens(), &PROMPT[..3]);
    let after = feed(&mut session, &PROMPT[3..], None);
    let mut fresh = engine.session().unwrap();
    feed(&mut fresh, &PROMPT[..3], None);
    assert!(after == feed(&mut fresh, &PROMPT[3..], None));
}

/// A trace that cannot be written fails a step after its logits were read: they belong to dropped
/// tokens.
#[cfg(unix)]
#[test]
fn a_step_that_fails_at_its_end_leaves_no_logits() {
    let memory = MemoryRequest::default().sessions(2);
    let engine = common::engine(&tales(), exact("cpu"), memory);
    let mut sessions = [engine.session().unwrap(), engine.session().unwrap()];
    let mut control = StepControl::default();
    for session in &mut sessions {
        session.sync(&PROMPT, &mut control).unwrap();
    }
    let good = sessions[0].logits().to_vec();

    // A pipe whose reader closes after the header.
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe");
    assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let reader = std::thread::spawn({
        let pipe = pipe.clone();
        move || std::io::Read::read(&mut fs::File::open(pipe).unwrap(), &mut [0; 1 << 16]).unwrap()
    });
    engine.record_routing(Some(&pipe)).unwrap();
    reader.join().unwrap();
    let error = sessions[0].decode(9).unwrap_err().to_string();
    assert!(error.contains("routing trace"), "{error}");
    let turn = |session| moeflux::session::BatchEntry::new(session, &[9]).logits(true);
    assert!(engine.step(&mut sessions.each_mut().map(turn), &mut control).is_err());
    engine.record_routing(None).unwrap();
    for session in &mut sessions {
        assert!(session.tokens() == PROMPT && session.logits().is_empty());
        session.sync(&PROMPT, &mut control).unwrap();
        assert!(session.logits() == good);
    }
}

#[test]
fn sessions_beyond_the_plan_are_refused() {
    let engine = common::engine(&tales(), Default::default(), MemoryRequest::default());
    let first = engine.session().unwrap();
    assert!(matches!(
        engine.session().err(),
        Some(Error::Session(SessionError::TooManySessions { .. }))
    ));
    drop(first);
    assert!(engine.session().is_ok());
}
