//! Drafts: answers with them equal answers without, whatever ends or shares them.

use std::{ops::ControlFlow, path::Path, sync::Arc};

use moeflux::{
    ChatOptions, Checkpoint, Engine, EngineOptions, Finish, GenerateRequest, MemoryRequest,
    Message, Sampling, Session, StepControl, generate,
    serve::{Event, Scheduler, SchedulerOptions},
    session::{DraftCounts, DraftMode, DraftScript, Drafter, DrafterSource},
};

use crate::{
    common::{exact, tales},
    token_choice::ForcedRuns,
};

const CHUNK: usize = 32;
const CONTEXT: usize = 64;

fn engine(folder: &Path, draft: DraftMode, sessions: usize) -> Engine {
    let memory = MemoryRequest::default().sessions(sessions).context(CONTEXT).chunk(CHUNK);
    let options = EngineOptions::default().memory(memory).device(exact("cpu")).draft(draft);
    Engine::open(Checkpoint::open(folder).unwrap(), options, &mut |_, _| {}).unwrap()
}

fn prompt(i: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|t| (t * 37 + i * 101) % 250 + 1).collect()
}

/// Drafts that are always right.
fn right(prompt: &[u32], answer: &[u32]) -> Option<Arc<dyn DrafterSource>> {
    Some(Arc::new(DraftScript::new(prompt.len(), answer, 1.0, 1)))
}

/// Tokens, their end and the session's tokens of an answer alone.
fn alone(
    session: &mut Session,
    prompt: &[u32],
    request: &GenerateRequest,
) -> (Vec<u32>, Option<Finish>, Vec<u32>) {
    let mut tokens = session.generate(prompt, request, &mut StepControl::default()).unwrap();
    let made: Vec<u32> = tokens.by_ref().map(Result::unwrap).collect();
    let finish = tokens.finish();
    (made, finish, session.tokens().to_vec())
}

#[test]
fn answers_end_where_they_end_without_drafts() {
    let folder = moeflux_goldens::golden("qwen3_5_moe");
    let (plain, drafts) =
        (engine(&folder, DraftMode::Off, 1), engine(&folder, DraftMode::Always(3), 1));
    let (mut plain, mut drafted) = (plain.session().unwrap(), drafts.session().unwrap());
    let prompt = prompt(1, 20);
    // To the end of the context.
    let whole = GenerateRequest::default().ignore_eos(true);
    let (answer, finish, held) = alone(&mut plain, &prompt, &whole);
    assert_eq!((finish, held.len()), (Some(Finish::Context), CONTEXT));
    let sampling = Sampling::default().temperature(0.9).seed(11);
    let named = |i: usize| whole.clone().end_tokens(vec![answer[i]]);
    let mut requests = vec![whole.clone(), whole.clone().sampling(sampling)];
    requests.extend((1..9).map(|n| whole.clone().max_tokens(n)));
    requests.extend([0, 3, 4, 5, 6].map(named));
    requests.extend([named(4).min_tokens(9), named(4).max_tokens(5)]);
    for request in requests {
        let expected = alone(&mut plain, &prompt, &request);
        for counts in [DraftCounts::All, DraftCounts::Random, DraftCounts::LastWrong] {
            let script = DraftScript::new(prompt.len(), &expected.0[..], 1.0, 9).counts(counts);
            let request = request.clone().drafter(Some(Arc::new(script) as _));
            assert!(alone(&mut drafted, &prompt, &request) == expected, "{request:?}");
        }
    }
    let stats = drafted.stats();
    assert!(stats.accepted > 100, "{stats:?}");
}

#[test]
fn stop_strings_end_answers_in_the_middle_of_drafts() {
    let (plain, drafts) =
        (engine(&tales(), DraftMode::Off, 1), engine(&tales(), DraftMode::Always(3), 1));
    let (mut plain, mut drafted) = (plain.session().unwrap(), drafts.session().unwrap());
    let messages = [Message::new("user", "Recite The Fox and the Crow.")];
    let text = plain.engine().text().unwrap();
    let prompt = text.prompt(&messages, &ChatOptions::default()).unwrap().tokens;
    let answer = |session: &mut Session, request: &GenerateRequest| {
        let mut control = StepControl::default();
        let made =
            generate(session, &prompt, request, &mut control, &mut |_| ControlFlow::Continue(()));
        let made = made.unwrap();
        (made.text, made.tokens, made.finish, session.tokens().to_vec())
    };
    for stop in ["branch", "sitting on a", "A Crow", "zebra"] {
        let request = GenerateRequest::default().stop(vec![stop.into()]).max_tokens(20);
        let expected = answer(&mut plain, &request);
        let request = request.drafter(right(&prompt, &expected.1));
        assert_eq!(answer(&mut drafted, &request), expected, "{stop}");
    }
}

#[test]
fn batched_answers_with_drafts_equal_single_ones() {
    for golden in ["qwen3_5_moe", "gpt_oss", "deepseek_v3", "nemotron_h_hub"] {
        let folder = moeflux_goldens::golden(golden);
        let plain = engine(&folder, DraftMode::Off, 1);
        let together = engine(&folder, DraftMode::Always(3), 3);
        let mut session = plain.session().unwrap();
        for (options, acceptance) in [
            (SchedulerOptions::default(), 0.7),
            (SchedulerOptions::default().tokens(7).prompt_tokens(3), 1.0),
        ] {
            let mut batch = Scheduler::new(&together, options);
            let jobs = [(9, 12), (25, 20), (14, 7)].map(|(len, tokens)| {
                let prompt = prompt(len as u32, len);
                let request = GenerateRequest::default().max_tokens(tokens);
                let expected = alone(&mut session, &prompt, &request);
                let script = DraftScript::new(len, &expected.0[..], acceptance, len as u64);
                let script = script.counts(DraftCounts::Random);
                let request = request.drafter(Some(Arc::new(script) as _));
                let session = together.session().unwrap();
                (batch.add(session, &prompt, &request).unwrap(), expected, Vec::new())
            });
            let mut jobs = jobs;
            while !batch.is_empty() {
                for event in batch.step(&mut StepControl::default()).unwrap() {
                    match event {
                        Event::Token { id, token, .. } => {
                            jobs.iter_mut().find(|job| job.0 == id).unwrap().2.push(token);
                        }
                        Event::Finished { id, finish, session } => {
                            let (_, expected, made) = jobs.iter().find(|job| job.0 == id).unwrap();
                            let held = session.tokens().to_vec();
                            let got = (made.clone(), Some(finish), held);
                            assert!(got == *expected, "{golden}: {got:?}, {expected:?}");
                        }
                        _ => panic!("{golden}: another event"),
                    }
                }
            }
            assert!(batch.stats().accepted > 0, "{golden}");
        }
    }
}

/// Drafts of a known answer, after forced tokens only.
#[derive(Clone, Debug)]
struct AfterRuns {
    answer: Vec<u32>,
    /// Position of the answer's first token.
    start: usize,
}

impl DrafterSource for AfterRuns {
    fn start(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }
}

impl Drafter for AfterRuns {
    fn draft(&mut self, session: &[u32], next: &[u32], max: usize, drafts: &mut Vec<u32>) {
        let done = session.len() + next.len() - self.start;
        if next.len() > 1 {
            drafts.extend(self.answer[done..].iter().take(max));
        }
    }
}

#[test]
fn drafts_share_steps_with_forced_tokens() {
    let folder = moeflux_goldens::golden("qwen3_moe");
    let prompt = prompt(3, 20);
    let request = GenerateRequest::default().masks(vec![Arc::new(ForcedRuns::default())]);
    let request = request.max_tokens(35).ignore_eos(true);
    let expected =
        alone(&mut engine(&folder, DraftMode::Off, 1).session().unwrap(), &prompt, &request);
    let after_runs = AfterRuns { answer: expected.0.clone(), start: prompt.len() };
    let after_runs: Arc<dyn DrafterSource> = Arc::new(after_runs);
    for mode in [DraftMode::Always(2), DraftMode::Auto] {
        let engine = engine(&folder, mode, 1);
        for drafter in [right(&prompt, &expected.0), Some(Arc::clone(&after_runs))] {
            let mut session = engine.session().unwrap();
            let request = request.clone().drafter(drafter);
            assert_eq!(alone(&mut session, &prompt, &request), expected, "{mode:?}");
            let stats = session.stats();
            assert!(mode == DraftMode::Auto || stats.accepted > 0, "{stats:?}");
        }
    }
}

/// A drafter whose drafts are no tokens.
#[derive(Debug)]
struct Nonsense;

impl DrafterSource for Nonsense {
    fn start(&self) -> Box<dyn Drafter> {
        Box::new(Self)
    }
}

impl Drafter for Nonsense {
    fn draft(&mut self, _: &[u32], _: &[u32], max: usize, drafts: &mut Vec<u32>) {
        drafts.extend((0..max as u32 + 9).map(|i| u32::MAX - i));
    }
}

#[test]
fn drafts_that_are_no_tokens_and_drafts_that_are_off_are_left_out() {
    let folder = moeflux_goldens::golden("qwen3_moe");
    let prompt = prompt(2, 9);
    let request = GenerateRequest::default().max_tokens(8);
    let expected =
        alone(&mut engine(&folder, DraftMode::Off, 1).session().unwrap(), &prompt, &request);
    for (mode, drafter, of_request) in [
        (DraftMode::Always(3), Some(Arc::new(Nonsense) as Arc<dyn DrafterSource>), None),
        (DraftMode::Off, right(&prompt, &expected.0), Some(DraftMode::Always(2))),
        (DraftMode::Always(1), right(&prompt, &expected.0), Some(DraftMode::Off)),
    ] {
        let engine = engine(&folder, mode, 1);
        let mut session = engine.session().unwrap();
        let request = request.clone().drafter(drafter).draft(of_request);
        assert!(alone(&mut session, &prompt, &request) == expected, "{mode:?}");
        assert_eq!(session.stats().drafted, 0, "{mode:?}");
    }
}

#[test]
fn lookup_drafts_what_the_prompt_repeats() {
    let folder = moeflux_goldens::golden("qwen3_moe");
    let prompt: Vec<u32> = (0..40).map(|i| i % 5 + 3).collect();
    let request = GenerateRequest::default().max_tokens(16);
    let expected =
        alone(&mut engine(&folder, DraftMode::Off, 1).session().unwrap(), &prompt, &request);
    for mode in [DraftMode::Auto, DraftMode::Lookup, DraftMode::Always(2)] {
        let engine = engine(&folder, mode, 1);
        let mut session = engine.session().unwrap();
        assert!(alone(&mut session, &prompt, &request) == expected, "{mode:?}");
        assert!(session.stats().drafted > 0, "{mode:?}");
    }
}
