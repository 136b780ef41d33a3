//! Recording ahead: a device that records the next decode step while the current one runs returns
//! the same logits as without it, whatever happens in between.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, MemoryRequest, Session, StepControl,
    base::SessionError,
    runtime::{CancelToken, Logits, StepObserver},
    session::BatchEntry,
};

use crate::common::{Golden, engine, feed, gpu, readers::faulty, tales};

const TOKENS: [u32; 8] = [17, 4, 100, 4, 32, 7, 99, 5];

/// Submissions to the device until the logits after `token` are available.
fn decode(session: &mut Session, token: u32, expected: &[f32]) -> u64 {
    let before = session.stats().submissions;
    assert!(session.decode(token).unwrap() == expected, "other bits");
    session.stats().submissions - before
}

/// `grows` is a step that cannot be recorded, as a KV cache gets its first memory in it.
fn check(folder: &Path, grows: Option<usize>) {
    for exact in [false, true] {
        let Some(device) = gpu(exact) else { return };
        let memory = MemoryRequest::default().sessions(2).context(TOKENS.len() + 1);
        let engine = engine(folder, device, memory);
        let (mut session, mut other) = (engine.session().unwrap(), engine.session().unwrap());
        // A step with all logits (`feed`) is never recorded ahead.
        let mut unprepared = 0;
        let expected: Vec<_> = TOKENS
            .iter()
            .map(|token| {
                // The first steps wait for pipelines, and are submitted as a whole.
                let before = session.stats().submissions;
                let logits = feed(&mut session, &[*token], None);
                unprepared = session.stats().submissions - before;
                logits
            })
            .collect();

        session.reset().unwrap();
        for (i, (token, expected)) in TOKENS.iter().zip(&expected).enumerate() {
            let submissions = decode(&mut session, *token, expected);
            assert!(
                i == 0 || Some(i) == grows || submissions == 2,
                "one for the step {i} and one for the readback: {submissions}"
            );
            assert!(submissions <= unprepared);
        }
        // No step is started beyond the last position of the context.
        feed(&mut session, &[1], None);
        assert!(matches!(session.decode(1), Err(Error::Session(SessionError::ContextFull { .. }))));

        session.reset().unwrap();
        let stop = CancelToken::new();
        stop.cancel();
        for (i, token) in TOKENS.iter().enumerate() {
            decode(&mut session, *token, &expected[i]);
            match i {
                // Nothing was computed.
                0 | 1 => {
                    let mut control = StepControl::default().cancel(&stop);
                    let cancelled = session.feed(&[3], Logits::Last, &mut control, &mut |_, _| {});
                    assert!(matches!(cancelled, Err(Error::Cancelled)));
                }
                2 | 3 => {
                    decode(&mut other, TOKENS[i - 2], &expected[i - 2]);
                }
                4 => other.reset().unwrap(),
                5 => {
                    decode(&mut other, TOKENS[0], &expected[0]);
                    session.reset().unwrap();
                    TOKENS[..=i].iter().zip(&expected).for_each(|(token, expected)| {
                        decode(&mut session, *token, expected);
                    });
                }
                _ => {}
            }
        }
    }
}

/// An observer. Observed steps are not recorded ahead.
struct Onlooker;

impl StepObserver for Onlooker {
    fn experts(&mut self, _: usize, _: usize, _: &[u32]) {}
    fn hidden(&mut self, _: usize, _: &[f32]) {}
}

/// Logits of three sessions in changing batches, and the submissions of the last three steps, which
/// have equal batches.
fn turns(engine: &Engine, observed: bool) -> (Vec<Vec<f32>>, u64) {
    let mut sessions: [Session; 3] = std::array::from_fn(|_| engine.session().unwrap());
    let mut logits = Vec::new();
    let mut submissions = 0;
    let steps: [&[usize]; 13] = [
        &[0, 1],
        &[0, 1],
        &[0, 1],
        &[1],
        &[1],
        &[0, 1],
        &[1, 0],
        &[0, 1, 2],
        &[0, 1, 2],
        &[0, 2],
        &[0, 2],
        &[0, 2],
        &[0, 2],
    ];
    for (i, step) in steps.into_iter().enumerate() {
        let tokens: Vec<u32> = step.iter().map(|n| TOKENS[(i + 3 * n) % TOKENS.len()]).collect();
        let mut turns: Vec<BatchEntry<'_>> = Vec::new();
        let mut rest = sessions.iter_mut().map(Some).collect::<Vec<_>>();
        for (n, token) in step.iter().zip(&tokens) {
            let session = rest[*n].take().unwrap();
            turns.push(BatchEntry::new(session, std::slice::from_ref(token)).logits(true));
        }
        let mut onlooker = Onlooker;
        let mut control = StepControl::default();
        control.observer = observed.then_some(&mut onlooker as &mut dyn StepObserver);
        let stats = engine.step(&mut turns, &mut control).unwrap();
        if i + 3 >= steps.len() {
            submissions += stats.submissions;
        }
        logits.extend(turns.iter().map(|turn| turn.session.logits().to_vec()));
        if i == 7 {
            // One of the sessions whose next step is recorded.
            sessions[2].reset().unwrap();
        }
    }
    (logits, submissions)
}

fn check_together(folder: &Path, grows: Option<usize>) {
    for exact in [false, true] {
        let Some(device) = gpu(exact) else { return };
        let memory = MemoryRequest::default().sessions(3).context(16);
        let engine = engine(folder, device, memory);
        let (expected, _) = turns(&engine, true);
        let (logits, submissions) = turns(&engine, false);
        assert!(logits == expected, "other bits");
        // Sessions that are at different positions get memory in different steps.
        assert!(
            grows.is_some() || submissions == 3 * 2,
            "one for the step and one for the readback: {submissions}"
        );
    }
}

#[test]
fn the_embedded_model() {
    check(&tales(), None);
    check_together(&tales(), None);
}

/// Reads of rows fail before steps that were recorded ahead.
#[test]
fn failing_reads_of_rows() {
    let Some(device) = gpu(true) else { return };
    let folder = Golden::read("qwen4_exp_hub").folder;
    let is_armed = Arc::new(AtomicBool::new(false));
    let armed = Arc::clone(&is_armed);
    let options = EngineOptions::default()
        .device(device)
        .wrap_reader(faulty(move || armed.swap(false, Relaxed)));
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
    let mut session = engine.session().unwrap();
    let mut decoded = |faults: bool| -> Vec<Vec<f32>> {
        session.reset().unwrap();
        let mut decode = |(i, token): (usize, &u32)| {
            if faults && i % 3 == 2 {
                is_armed.store(true, Relaxed);
                let error = session.decode(*token).unwrap_err().to_string();
                assert!(error.contains("injected") && session.tokens().len() == i, "{error}");
            }
            session.decode(*token).unwrap().to_vec()
        };
        TOKENS.iter().enumerate().map(&mut decode).collect()
    };
    let expected = decoded(false);
    assert!(decoded(true) == expected, "other bits");
}

#[test]
fn recurrent_and_ring_buffer_states() {
    for name in ["qwen3_5_moe", "gpt_oss_mxfp4"] {
        let folder = Golden::read(name).folder;
        check(&folder, None);
        check_together(&folder, None);
    }
}

/// Rows of a table, which are written before the step starts, and entries for blocks of 4 tokens.
#[test]
fn rows_of_tables_and_compressed_entries() {
    let folder = Golden::read("qwen4_exp_hub").folder;
    let first_block = Some(3);
    check(&folder, first_block);
    check_together(&folder, first_block);
}
