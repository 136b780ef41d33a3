//! A device that computes by itself is given the next token's work while it is busy with this one's: whatever comes in
//! between, logits are those of steps that were not prepared.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::{path::Path, sync::atomic::AtomicBool};

use common::{Golden, data, engine, feed, gpu, tales};
use moeflux::{Error, Logits, MemoryRequest, Session, Watch};

const TOKENS: [u32; 8] = [17, 4, 100, 4, 32, 7, 99, 5];

/// Submissions of work to the device until the logits after `token` are there.
fn decode(session: &mut Session, token: u32, expected: &[f32]) -> u64 {
    let before = session.stats().submissions;
    assert!(session.decode(token).unwrap() == expected, "other bits");
    session.stats().submissions - before
}

fn check(folder: &Path) {
    for exact in [false, true] {
        let Some(device) = gpu(exact) else { return };
        let memory =
            MemoryRequest { sessions: Some(2), context: Some(TOKENS.len() + 1), ..MemoryRequest::default() };
        let engine = engine(folder, device, memory);
        let (mut session, mut other) = (engine.session().unwrap(), engine.session().unwrap());
        // All logits are asked for where nothing is prepared.
        let mut unprepared = 0;
        let expected: Vec<_> = TOKENS
            .iter()
            .map(|token| {
                // The first steps wait for kernels, and are handed over whole.
                let before = session.stats().submissions;
                let logits = feed(&mut session, &[*token], None);
                unprepared = session.stats().submissions - before;
                logits
            })
            .collect();

        session.reset().unwrap();
        for (i, (token, expected)) in TOKENS.iter().zip(&expected).enumerate() {
            let submissions = decode(&mut session, *token, expected);
            assert!(i == 0 || submissions == 2, "one for the step and one for what is read: {submissions}");
            assert!(submissions <= unprepared);
        }
        // The step behind the last position of the context is never begun.
        feed(&mut session, &[1], None);
        assert!(matches!(session.decode(1), Err(Error::Input(_))));

        session.reset().unwrap();
        let stop = AtomicBool::new(true);
        for (i, token) in TOKENS.iter().enumerate() {
            decode(&mut session, *token, &expected[i]);
            match i {
                // Nothing was computed.
                0 | 1 => {
                    let mut watch = Watch { cancel: Some(&stop), ..Watch::default() };
                    let cancelled = session.feed(&[3], Logits::Last, &mut watch, &mut |_, _| {});
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

#[test]
fn the_model_in_the_box() {
    check(&tales());
}

#[test]
fn states_that_steps_write_over() {
    for name in ["qwen3_5_moe", "gpt_oss_mxfp4"] {
        check(&Golden::read(data().join("goldens").join(name)).folder);
    }
}
