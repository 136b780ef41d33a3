//! Continuous batching: batched sequences generate the same tokens as each session alone.

use std::{collections::HashMap, ops::ControlFlow, path::Path};

use moeflux::{
    ChatOptions, Checkpoint, Engine, EngineOptions, Error, Finish, GenerateRequest, MemoryRequest,
    Message, Sampling, Session, StepControl,
    base::SessionError,
    experts::ExpertsOnHost,
    generate,
    model::blueprint::Blueprint,
    runtime::{CancelToken, DeviceOptions, KvFormat},
    serve::{Event, Pooling, RequestId, Scheduler, SchedulerOptions},
    session::{BatchEntry, DraftMode, EntryKind},
    text::Sampler,
};

use crate::{
    common::{self, Golden, exact, gpu, is_full, simulated_gpu::Card, tales},
    goldens::KINDS,
};

const CHUNK: usize = 32;

fn engine(folder: &Path, device: DeviceOptions, sessions: usize) -> Engine {
    let memory = MemoryRequest::default().sessions(sessions).slots(20).context(256).chunk(CHUNK);
    common::engine(folder, device, memory)
}

fn prompt(i: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|t| if t < 9 { t + 1 } else { (t * 37 + i * 101) % 500 + 1 }).collect()
}

fn request(tokens: usize) -> GenerateRequest {
    GenerateRequest::default().max_tokens(tokens)
}

/// Tokens that a session generates alone.
fn alone(engine: &Engine, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut session = engine.session().unwrap();
    let mut control = StepControl::default();
    let made = session.generate(prompt, &request(tokens), &mut control).unwrap();
    made.map(Result::unwrap).collect()
}

/// Tokens and finish of all sequences, and the requests that got a token in each step.
struct Made {
    tokens: HashMap<RequestId, Vec<u32>>,
    finish: HashMap<RequestId, (Finish, Session)>,
    steps: Vec<Vec<RequestId>>,
}

fn run(batch: &mut Scheduler) -> Made {
    let mut made = Made { tokens: HashMap::new(), finish: HashMap::new(), steps: Vec::new() };
    while !batch.is_empty() {
        let mut of_step = Vec::new();
        for event in batch.step(&mut StepControl::default()).unwrap() {
            match event {
                Event::Token { id, token, .. } => {
                    made.tokens.entry(id).or_default().push(token);
                    of_step.push(id);
                }
                Event::Finished { id, finish, session } => {
                    made.finish.insert(id, (finish, session));
                }
                Event::Failed { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
        made.steps.push(of_step);
    }
    made
}

#[test]
fn batched_sequences_equal_single_sessions() {
    for golden in ["qwen3_moe", "qwen3_5_moe", "gpt_oss", "deepseek_v3"] {
        let folder = moeflux_goldens::golden(golden);
        let (together, by_itself) =
            (engine(&folder, exact("cpu"), 6), engine(&folder, exact("cpu"), 1));
        for options in [
            SchedulerOptions::default(),
            SchedulerOptions::default().tokens(5).prompt_tokens(3),
            SchedulerOptions::default().tokens(2),
        ] {
            let mut batch = Scheduler::new(&together, options);
            let wanted: Vec<(Vec<u32>, usize)> =
                [(3, 7), (70, 5), (12, 9), (1, 0), (40, 3), (9, 6)]
                    .map(|(len, n)| (prompt(n, len), n as usize))
                    .into();
            let jobs: Vec<RequestId> = wanted
                .iter()
                .map(|(prompt, n)| {
                    batch.add(together.session().unwrap(), prompt, &request(*n)).unwrap()
                })
                .collect();
            let made = run(&mut batch);
            for ((prompt, n), id) in wanted.iter().zip(jobs) {
                let expected = alone(&by_itself, prompt, *n);
                let tokens = made.tokens.get(&id).cloned().unwrap_or_default();
                assert_eq!(tokens, expected, "{golden}, a prompt of {}", prompt.len());
                let (finish, session) = &made.finish[&id];
                if expected.len() == *n {
                    assert_eq!(*finish, Finish::MaxTokens);
                }
                if let Some((_, before)) = tokens.split_last() {
                    assert_eq!(session.tokens(), [prompt, before].concat());
                }
            }
            assert!(batch.stats().tokens > 20);
        }
    }
}

/// Prompt `i`, whose first `common` tokens are equal in all prompts.
fn branch(common: usize, i: u32, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|t| (t * 37 + if t < common as u32 { 0 } else { i * 101 }) % 500 + 1)
        .collect()
}

/// An engine without prefix cache: sharing happens in the scheduler only.
fn keeps_nothing(golden: &str, sessions: usize) -> Engine {
    let memory = MemoryRequest::default().sessions(sessions).context(256).chunk(CHUNK).marks(0);
    common::engine(&moeflux_goldens::golden(golden), exact("cpu"), memory)
}

#[test]
fn common_prefixes_are_computed_once() {
    for golden in ["qwen3_moe", "qwen3_5_moe", "gpt_oss", "deepseek_v3"] {
        let (together, by_itself) = (keeps_nothing(golden, 6), keeps_nothing(golden, 1));
        let prompts = [
            branch(100, 1, 130),
            // Other suffix; identical; a prefix; an earlier divergence; almost nothing in common.
            branch(100, 2, 120),
            branch(100, 1, 130),
            branch(100, 1, 70),
            branch(60, 3, 90),
            branch(5, 4, 40),
        ];
        for (options, backwards) in [
            (SchedulerOptions::default(), false),
            (SchedulerOptions::default().tokens(7), false),
            (SchedulerOptions::default().tokens(40).prompt_tokens(9), true),
        ] {
            let mut prompts: Vec<_> = prompts.iter().collect();
            if backwards {
                prompts.reverse();
            }
            let mut batch = Scheduler::new(&together, options);
            let session = || together.session().unwrap();
            let jobs: Vec<RequestId> = prompts
                .iter()
                .map(|prompt| batch.add(session(), prompt, &request(4)).unwrap())
                .collect();
            let made = run(&mut batch);
            // A prompt that is a prefix of another computes its last token itself, for the logits.
            let mut fed = 130 + 20 + 30 + 40 + usize::from(!backwards);
            for (prompt, id) in prompts.iter().zip(jobs) {
                let expected = alone(&by_itself, prompt, 4);
                assert_eq!(made.tokens[&id], expected, "{golden}, a prompt of {}", prompt.len());
                let session = &made.finish[&id].1;
                fed += session.tokens().len() - prompt.len();
                let mut again = by_itself.session().unwrap();
                again.sync(session.tokens(), &mut StepControl::default()).unwrap();
                assert!(
                    session.logits() == again.logits(),
                    "{golden}, a prompt of {}",
                    prompt.len()
                );
            }
            assert_eq!(batch.stats().tokens, fed as u64, "{golden}, {options:?}");
        }
    }
}

/// A prompt that continues like another one only up to one of its `ends` starts there, also in a
/// model whose states cannot be truncated.
#[test]
fn ends_of_prompts_are_cached() {
    let golden = "qwen3_5_moe";
    let by_itself = keeps_nothing(golden, 1);
    let memory = MemoryRequest::default().context(256).chunk(CHUNK).marks(1 << 20);
    let together = common::engine(&moeflux_goldens::golden(golden), exact("cpu"), memory);
    let mut batch = Scheduler::new(&together, SchedulerOptions::default());
    let (first, second) = (branch(100, 1, 150), branch(100, 2, 130));
    for (prompt, reused) in [(&first, 0), (&second, 100)] {
        let ends = vec![20, 100];
        let id = batch.add(together.session().unwrap(), prompt, &request(3).ends(ends)).unwrap();
        assert_eq!(batch.synced(id).unwrap().reused, reused);
        assert_eq!(run(&mut batch).tokens[&id], alone(&by_itself, prompt, 3));
    }
}

#[test]
fn later_requests_adopt_prefixes_in_flight() {
    for (golden, cuttable) in [("qwen3_moe", true), ("qwen3_5_moe", false)] {
        let (together, by_itself) = (keeps_nothing(golden, 3), keeps_nothing(golden, 1));
        let mut batch = Scheduler::new(&together, SchedulerOptions::default());
        let (long, late, soon) = (branch(200, 1, 200), branch(100, 2, 130), branch(40, 3, 60));
        let add = |batch: &mut Scheduler, prompt: &[u32]| {
            batch.add(together.session().unwrap(), prompt, &request(3)).unwrap()
        };
        let first = add(&mut batch, &long);
        (0..2).for_each(|_| drop(batch.step(&mut StepControl::default()).unwrap()));
        // 64 tokens are computed. A KV cache can be truncated at the divergence, a recurrent state
        // cannot.
        let soon_job = add(&mut batch, &soon);
        assert_eq!(batch.synced(soon_job).unwrap().reused, if cuttable { 40 } else { 0 });
        let late_job = add(&mut batch, &late);
        let start = batch.synced(late_job).unwrap();
        assert_eq!((start.reused, start.computed), (0, 130));
        // This sequence waits for the first one to prefill their common prefix.
        while batch.synced(late_job).unwrap().reused < 100 {
            for event in batch.step(&mut StepControl::default()).unwrap() {
                assert!(
                    matches!(event, Event::Token { id, .. } | Event::Finished { id, .. } if id == soon_job)
                );
            }
        }
        let synced = batch.synced(late_job).unwrap();
        assert_eq!((synced.reused, synced.restored, synced.computed), (100, 100, 30), "{golden}");
        // Cancelling the leader does not affect sequences that forked its state.
        let gone = batch.cancel(first).unwrap();
        assert_eq!(gone.tokens(), &long[..gone.tokens().len()]);
        drop(gone);
        let made = run(&mut batch);
        assert_eq!(made.tokens[&late_job], alone(&by_itself, &late, 3), "{golden}");
    }
}

/// A state that two sessions share and both write in one step is copied once.
#[test]
fn forks_advance_together_without_extra_memory() {
    let engine = keeps_nothing("qwen3_moe", 2);
    let mut first = engine.session().unwrap();
    first.sync(&branch(9, 1, 40), &mut StepControl::default()).unwrap();
    let mut second = first.fork().unwrap();
    let mut turns =
        [&mut first, &mut second].map(|session| BatchEntry::new(session, &[7]).logits(true));
    engine.step(&mut turns, &mut StepControl::default()).unwrap();
    assert_eq!((first.tokens(), first.logits()), (second.tokens(), second.logits()));
    // If there is no room for all, no session advances, and the error says so.
    let _mark = first.mark().unwrap();
    let mut turns =
        [&mut first, &mut second].map(|session| BatchEntry::new(session, &[8]).logits(true));
    let error = engine.step(&mut turns, &mut StepControl::default()).unwrap_err().to_string();
    assert!(error.contains("do not fit the memory plan"), "{error}");
    assert_eq!((first.tokens().len(), second.tokens().len()), (41, 41));
}

#[test]
fn a_cancelled_leader_blocks_no_sequence() {
    let (together, by_itself) = (keeps_nothing("qwen3_5_moe", 2), keeps_nothing("qwen3_5_moe", 1));
    let mut batch = Scheduler::new(&together, SchedulerOptions::default());
    let (one, two) = (branch(100, 1, 130), branch(100, 2, 110));
    let first = batch.add(together.session().unwrap(), &one, &request(3)).unwrap();
    let second = batch.add(together.session().unwrap(), &two, &request(3)).unwrap();
    batch.step(&mut StepControl::default()).unwrap();
    assert_eq!(batch.cancel(first).unwrap().tokens().len(), CHUNK);
    let made = run(&mut batch);
    assert_eq!(made.tokens[&second], alone(&by_itself, &two, 3));
}

#[test]
fn a_rejected_request_returns_its_session() {
    let folder = moeflux_goldens::golden("qwen3_moe");
    let (engine, other) = (engine(&folder, exact("cpu"), 1), engine(&folder, exact("cpu"), 1));
    let mut session = engine.session().unwrap();
    session.sync(&prompt(1, 20), &mut StepControl::default()).unwrap();
    let before = (session.tokens().to_vec(), session.logits().to_vec());
    let mut batch = Scheduler::new(&engine, SchedulerOptions::default());
    let mut wrong = request(3);
    wrong.sampling.temperature = -1.0;
    let refused = [
        (vec![], request(3), "empty"),
        (vec![1 << 30], request(3), "vocabulary"),
        (vec![1; 300], request(3), "context"),
        (vec![1, 2], wrong, "temperature"),
    ];
    for (tokens, request, why) in refused {
        let refused = batch.add(session, &tokens, &request).unwrap_err();
        assert!(refused.to_string().contains(why), "{refused}");
        session = *refused.session;
        assert_eq!((session.tokens(), session.logits()), (&before.0[..], &before.1[..]), "{why}");
    }
    let stranger = batch.add(other.session().unwrap(), &[1], &request(3)).unwrap_err();
    assert!(other.session().is_err() && stranger.error.to_string().contains("another engine"));
    drop(stranger);
    assert!(other.session().is_ok() && batch.is_empty());
    let refuse = |batch: &mut Scheduler, session| -> Result<RequestId, Error> {
        Ok(batch.add(session, &[], &request(3))?)
    };
    assert!(matches!(refuse(&mut batch, session), Err(Error::Session(SessionError::NoTokens))));
    assert!(engine.session().is_ok());
}

#[test]
fn short_prompts_share_a_step() {
    let engine = engine(&moeflux_goldens::golden("qwen3_moe"), exact("cpu"), 3);
    let mut batch = Scheduler::new(&engine, SchedulerOptions::default().tokens(16));
    let ids = [5, 6, 9].map(|len| {
        let prompt = branch(0, len, len as usize);
        batch.add(engine.session().unwrap(), &prompt, &request(2)).unwrap()
    });
    let chosen = batch.step(&mut StepControl::default()).unwrap();
    // The first request comes last in the first round.
    assert_eq!(ids.map(|id| batch.prefilled(id)), [Some(1), None, None], "16 tokens of 20");
    assert_eq!(chosen.len(), 2, "a token for each complete prompt");
}

#[test]
fn no_sequence_starves() {
    let folder = moeflux_goldens::golden("qwen3_moe");
    let engine = engine(&folder, exact("cpu"), 5);
    let mut batch =
        Scheduler::new(&engine, SchedulerOptions::default().tokens(12).prompt_tokens(6));
    let answering: Vec<RequestId> = (0..2)
        .map(|i| batch.add(engine.session().unwrap(), &prompt(i, 2), &request(40)).unwrap())
        .collect();
    for _ in 0..2 {
        batch.step(&mut StepControl::default()).unwrap();
    }
    let reading: Vec<RequestId> = (2..4)
        .map(|i| batch.add(engine.session().unwrap(), &prompt(i, 60), &request(2)).unwrap())
        .collect();
    let made = run(&mut batch);
    let first = |id| made.steps.iter().position(|step| step.contains(id)).unwrap();
    // Decoding sequences get a token in every step; the two prompts alternate, six tokens at a
    // time.
    let last = made.steps.iter().rposition(|step| step.contains(&answering[0])).unwrap();
    assert!(made.steps[..=last].iter().all(|step| step.contains(&answering[0])));
    assert_eq!([first(&reading[0]), first(&reading[1])], [18, 19]);
}

#[test]
fn sequences_take_turns_with_a_small_token_budget() {
    let folder = moeflux_goldens::golden("qwen3_moe");
    let engine = engine(&folder, exact("cpu"), 5);
    let mut batch = Scheduler::new(&engine, SchedulerOptions::default().tokens(2));
    for i in 0..5 {
        batch.add(engine.session().unwrap(), &prompt(i, 1), &request(10)).unwrap();
    }
    let made = run(&mut batch);
    let mut counts: HashMap<RequestId, usize> = HashMap::new();
    for step in &made.steps {
        step.iter().for_each(|id| *counts.entry(*id).or_default() += 1);
        let (least, most) = (counts.values().min().unwrap(), counts.values().max().unwrap());
        assert!(counts.len() < 5 || most - least <= 4, "{counts:?}");
    }
}

#[test]
fn a_cancelled_or_invalid_step_changes_no_session() {
    let folder = moeflux_goldens::golden("qwen3_5_moe");
    let (engine, other) = (engine(&folder, exact("cpu"), 3), engine(&folder, exact("cpu"), 3));
    let mut sessions: Vec<Session> = (0..2).map(|_| engine.session().unwrap()).collect();
    for (i, session) in sessions.iter_mut().enumerate() {
        session.sync(&prompt(i as u32, 20), &mut StepControl::default()).unwrap();
    }
    let before: Vec<_> =
        sessions.iter().map(|s| (s.tokens().to_vec(), s.logits().to_vec())).collect();
    let cancel = CancelToken::new();
    cancel.cancel();
    let step = |sessions: &mut [Session], tokens: &[u32], control: &mut StepControl<'_>| {
        let mut turns: Vec<BatchEntry<'_>> = sessions
            .iter_mut()
            .map(|session| BatchEntry::new(session, tokens).logits(true))
            .collect();
        engine.step(&mut turns, control).map_err(|error| error.to_string())
    };
    let cancelled = step(&mut sessions, &[5], &mut StepControl::default().cancel(&cancel));
    assert_eq!(cancelled.unwrap_err(), "cancelled");
    let large = step(&mut sessions, &[5; CHUNK], &mut StepControl::default()).unwrap_err();
    assert!(large.contains("--chunk"), "{large}");
    let unknown = step(&mut sessions, &[1 << 30], &mut StepControl::default()).unwrap_err();
    assert!(unknown.contains("vocabulary"), "{unknown}");
    let mut strangers = vec![other.session().unwrap()];
    let stranger = step(&mut strangers, &[5], &mut StepControl::default()).unwrap_err();
    assert!(stranger.contains("another engine"), "{stranger}");
    assert!(other.session().unwrap().rewind(&sessions[0].mark().unwrap()).is_err());
    for (session, (tokens, logits)) in sessions.iter().zip(&before) {
        assert_eq!((session.tokens(), session.logits()), (&tokens[..], &logits[..]));
    }
    let stats = step(&mut sessions, &[5], &mut StepControl::default()).unwrap();
    assert_eq!(stats.tokens, 2);
}

#[test]
fn a_failed_step_loses_no_finished_sequence() {
    let engine = engine(&moeflux_goldens::golden("qwen3_5_moe"), exact("cpu"), 2);
    let mut there = engine.session().unwrap();
    there.sync(&prompt(1, 40), &mut StepControl::default()).unwrap();
    let mut batch = Scheduler::new(&engine, SchedulerOptions::default());
    let done = batch.add(there, &prompt(1, 40), &request(0)).unwrap();
    batch.add(engine.session().unwrap(), &prompt(2, 30), &request(4)).unwrap();
    let cancel = CancelToken::new();
    cancel.cancel();
    let mut control = StepControl::default().cancel(&cancel);
    assert!(batch.step(&mut control).is_err());
    let made = run(&mut batch);
    assert_eq!((made.finish.len(), made.finish[&done].0), (2, Finish::MaxTokens));
}

/// Answers beside seven others and a prompt, on the fast path.
#[test]
fn on_the_fast_path_of_a_processor_batching_changes_nothing() {
    let memory = MemoryRequest::default().sessions(18).context(256);
    let engine = common::engine(&tales(), DeviceOptions::default(), memory);
    let text = engine.text().unwrap();
    let fable = std::fs::read_to_string(tales().join("README.md")).unwrap();
    let tokens: Vec<u32> = text.tokenizer().encode(&fable, false).unwrap();
    let mut alone = engine.session().unwrap();
    let lead = &tokens[..32];
    alone.sync(lead, &mut StepControl::default()).unwrap();
    let fork = |n: usize| (0..n).map(|_| alone.fork().unwrap()).collect::<Vec<_>>();
    let (mut few, mut many) = (fork(4), fork(8));
    let mut prompt = engine.session().unwrap();
    for (token, part) in tokens[32..96].iter().zip(tokens.chunks(3)) {
        alone.decode(*token).unwrap();
        for (company, part) in [(&mut few, &part[..1]), (&mut many, part)] {
            let answers = company.iter_mut();
            let mut turns: Vec<BatchEntry<'_>> = answers
                .map(|session| BatchEntry::new(session, std::slice::from_ref(token)).logits(true))
                .collect();
            // Entries of prompts may come before entries of answers.
            let kind = EntryKind::Prompt { tokens: part.len() };
            turns.insert(1, BatchEntry::new(&mut prompt, part).kind(kind));
            engine.step(&mut turns, &mut StepControl::default()).unwrap();
            for session in &*company {
                assert!(session.logits() == alone.logits(), "of {} sessions", company.len());
            }
        }
    }
}

/// A prompt in pieces, beside an answer and another prompt, on the fast path. Latent attention has
/// two forms, of which a prompt takes one for all its pieces.
#[test]
fn on_the_fast_path_of_a_processor_pieces_of_a_prompt_have_its_bits() {
    for (name, len) in [("deepseek_v3", 300), ("deepseek_v3", 40), ("gpt_oss", 300)] {
        let memory = MemoryRequest::default().sessions(4).context(512);
        let device = DeviceOptions::default();
        let engine = common::engine(&moeflux_goldens::golden(name), device, memory);
        let tokens = prompt(3, len);
        let (mut whole, mut pieces) = (engine.session().unwrap(), engine.session().unwrap());
        whole.sync(&tokens, &mut StepControl::default()).unwrap();
        let (mut answer, mut beside) = (engine.session().unwrap(), engine.session().unwrap());
        let others = prompt(5, 16);
        let kind = EntryKind::Prompt { tokens: len };
        let (first, rest) = tokens.split_at(1);
        for (piece, other) in [first].into_iter().chain(rest.chunks(len * 2 / 3)).zip(&others) {
            let other = std::slice::from_ref(other);
            let mut turns = [
                BatchEntry::new(&mut pieces, piece).kind(kind).logits(true),
                BatchEntry::new(&mut beside, &others[..3]),
                BatchEntry::new(&mut answer, other),
            ];
            engine.step(&mut turns, &mut StepControl::default()).unwrap();
        }
        assert!(pieces.logits() == whole.logits(), "{name}, {len} tokens");
        whole.decode(7).unwrap();
        let mut turns = [
            BatchEntry::new(&mut beside, &tokens),
            BatchEntry::new(&mut pieces, &[7]).logits(true),
        ];
        engine.step(&mut turns, &mut StepControl::default()).unwrap();
        assert!(pieces.logits() == whole.logits(), "{name}, an answer after {len} tokens");
    }
}

/// On the fast path of a GPU, too, steps of up to four rows have the bits of steps of one.
#[test]
fn few_sessions_have_the_bits_of_each_alone_on_a_gpu() {
    for name in ["qwen3_moe", "qwen3_5_moe", "gpt_oss_mxfp4", "deepseek_v3"] {
        let Some(device) = gpu(false) else { return };
        let golden = Golden::read(name);
        let memory = MemoryRequest::default().sessions(8).context(128);
        let engine = common::engine(&golden.folder, device, memory);
        let tokens: Vec<u32> = golden.prompt().into_iter().cycle().take(60).collect();
        let prompts = [&tokens[..40], &tokens[3..7], &tokens[5..50], &tokens[..9]];
        let start = |prompt: &&[u32]| {
            let mut session = engine.session().unwrap();
            session.sync(prompt, &mut StepControl::default()).unwrap();
            session
        };
        let mut alone: Vec<_> = prompts.iter().map(start).collect();
        let mut together: Vec<_> = prompts.iter().map(start).collect();
        for i in 0..6 {
            let next = &tokens[50 + i..54 + i];
            for (session, token) in alone.iter_mut().zip(next) {
                session.decode(*token).unwrap();
            }
            let mut turns: Vec<_> = together
                .iter_mut()
                .zip(next)
                .map(|(session, token)| {
                    BatchEntry::new(session, std::slice::from_ref(token)).logits(true)
                })
                .collect();
            engine.step(&mut turns, &mut StepControl::default()).unwrap();
            for (i, (one, other)) in alone.iter().zip(&together).enumerate() {
                assert!(one.logits() == other.logits(), "{name}: session {i} differs");
            }
        }
    }
}

#[test]
fn stop_strings_end_all_kinds_of_generation() {
    let engine = engine(&tales(), exact("cpu"), 5);
    let question = Message::user("Tell me the fable of The Fox and the Crow.");
    let prompt = engine.text().unwrap().chat(&[question], &ChatOptions::default()).unwrap();
    let stops = [vec![], vec!["bran"], vec!["tree", "sitting on"], vec!["nowhere"]];
    let request = |stop: &[&str]| {
        GenerateRequest::default()
            .sampling(Sampling::greedy())
            .max_tokens(30)
            .stop(stop.iter().map(|stop| (*stop).to_owned()).collect())
    };
    let mut batch = Scheduler::new(&engine, SchedulerOptions::default());
    let jobs = stops
        .each_ref()
        .map(|stop| batch.add(engine.session().unwrap(), &prompt, &request(stop)).unwrap());
    let made = run(&mut batch);
    let mut lengths = Vec::new();
    for (stop, id) in stops.iter().zip(jobs) {
        let (mut session, mut control) = (engine.session().unwrap(), StepControl::default());
        let told = generate(&mut session, &prompt, &request(stop), &mut control, &mut |_| {
            ControlFlow::Continue(())
        });
        let told = told.unwrap();
        assert_eq!(
            (&made.tokens[&id], made.finish[&id].0),
            (&told.tokens, told.finish),
            "{stop:?}"
        );
        let mut alone = session.generate(&prompt, &request(stop), &mut control).unwrap();
        assert!(alone.by_ref().map(Result::unwrap).eq(told.tokens.iter().copied()), "{stop:?}");
        assert_eq!(alone.finish(), Some(told.finish));
        lengths.push((told.finish == Finish::StopString).then_some(told.tokens.len()));
    }
    assert!(lengths[0].is_none() && lengths[3].is_none() && lengths[2] < lengths[1], "{lengths:?}");
    let mut session = engine.session().unwrap();
    assert!(session.generate(&prompt, &request(&[""]), &mut StepControl::default()).is_err());
    assert!(batch.add(session, &prompt, &request(&[""])).is_err() && batch.is_empty());
}

/// Embedding of a prompt, in steps that it shares with an answer to another one.
fn embedding(engine: &Engine, prompt_ids: &[u32], pooling: Pooling) -> Vec<f32> {
    let mut batch = Scheduler::new(engine, SchedulerOptions::default());
    let answer = batch.add(engine.session().unwrap(), &prompt(7, 12), &request(9)).unwrap();
    let wanted = GenerateRequest::default().embedding(pooling);
    let id = batch.add(engine.session().unwrap(), prompt_ids, &wanted).unwrap();
    // A cancelled step is tried again.
    let cancel = CancelToken::default();
    cancel.cancel();
    assert!(batch.step(&mut StepControl::default().cancel(&cancel)).is_err());
    let (mut found, mut tokens, mut finishes) = (None, 0, 0);
    while !batch.is_empty() {
        for event in batch.step(&mut StepControl::default()).unwrap() {
            match event {
                Event::Embedding { id: of, values } => {
                    assert!(of == id && found.is_none());
                    found = Some(values);
                }
                Event::Token { id: of, .. } => {
                    assert_eq!(of, answer);
                    tokens += 1;
                }
                Event::Finished { id: of, finish, .. } => {
                    assert!(of == answer || finish == Finish::MaxTokens && found.is_some());
                    finishes += 1;
                }
                Event::Failed { error, .. } => panic!("{error}"),
                _ => {}
            }
        }
    }
    assert_eq!((tokens, finishes), (9, 2));
    found.unwrap()
}

#[test]
fn the_mean_embedding_is_that_of_all_prefixes() {
    for golden in ["qwen3_moe", "qwen3_5_moe"] {
        let engine = engine(&moeflux_goldens::golden(golden), exact("cpu"), 2);
        let ids = prompt(3, 70);
        let mut mean = vec![0.0; engine.blueprint().hidden];
        for len in 1..=ids.len() {
            let last = embedding(&engine, &ids[..len], Pooling::Last);
            mean.iter_mut().zip(&last).for_each(|(sum, x)| *sum += f64::from(*x) / 70.0);
        }
        let found = embedding(&engine, &ids, Pooling::Mean);
        for (found, mean) in found.iter().zip(&mean) {
            assert!((f64::from(*found) - mean).abs() < 1e-5, "{golden}: {found} {mean}");
        }
    }
}

/// Setting of an engine whose steps of few rows are compared with single rows.
#[derive(Clone, Copy, Debug)]
enum FewRows {
    Usual,
    Keys(KvFormat),
    /// Slots for the experts of one token.
    OneToken,
    /// The host computes experts beside a card with a few slots.
    ExpertsOnHost,
}

impl FewRows {
    const ALL: [Self; 5] = [
        Self::Usual,
        Self::Keys(KvFormat::F32),
        Self::Keys(KvFormat::F16),
        Self::OneToken,
        Self::ExpertsOnHost,
    ];

    fn open(self, golden: &Golden, device: DeviceOptions) -> Engine {
        let checkpoint = Checkpoint::open(&golden.folder).unwrap();
        let of_token = Blueprint::for_checkpoint(&checkpoint).unwrap().experts_per_token();
        let memory = MemoryRequest::default().sessions(6).context(128);
        let (device, memory) = match self {
            Self::Usual => (device, memory),
            Self::Keys(format) => (device.kv_format(format), memory),
            Self::OneToken => (device, memory.slots(of_token).host_slots(of_token)),
            Self::ExpertsOnHost => {
                (device, memory.slots(of_token).experts_on_host(ExpertsOnHost::Compute))
            }
        };
        let mut options = EngineOptions::default().memory(memory).device(device);
        if matches!(self, Self::ExpertsOnHost) {
            options = options.wrap_device(Card::OWN.wrap().0);
        }
        let options = options.draft(DraftMode::Always(3));
        let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
        let is_divided = engine.plan().computed_on_host() > 0;
        assert_eq!(is_divided, matches!(self, Self::ExpertsOnHost), "{self:?}");
        engine
    }
}

#[test]
fn few_rows_of_a_session_have_the_bits_of_single_rows_on_a_gpu() {
    // A mixer each: heads with norms, delta rule, latents, a delta rule with a decay per channel.
    const FEW: [&str; 4] = ["qwen3_moe", "qwen3_5_moe_mtp_hub", "deepseek_v3", "kimi_linear_hub"];
    let names = if is_full() { &KINDS[..] } else { &FEW };
    for (i, name) in names.iter().enumerate() {
        let all = [FewRows::Usual, FewRows::ALL[1 + i % 4], FewRows::ALL[1 + (i + 2) % 4]];
        for setting in if is_full() { &FewRows::ALL[..] } else { &all } {
            let Some(device) = gpu(false) else { return };
            let golden = Golden::read(name);
            assert_bits_of_few_rows(&golden, &setting.open(&golden, device), *setting);
        }
    }
}

/// Compares steps of two to four rows, of one session and of two, with steps of single rows.
fn assert_bits_of_few_rows(golden: &Golden, engine: &Engine, setting: FewRows) {
    let name = &golden.name;
    let tokens: Vec<u32> = golden.prompt().into_iter().cycle().take(60).collect();
    let prompts = [&tokens[..40], &tokens[3..19]];
    let start = |prompt: &&[u32]| {
        let mut session = engine.session().unwrap();
        session.sync(prompt, &mut StepControl::default()).unwrap();
        session
    };
    let best = |logits: &[f32]| (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
    // Greedy tokens, and the logits after each.
    let alone = prompts.each_ref().map(|prompt| {
        let mut session = start(prompt);
        let (mut fed, mut logits) = (vec![7], Vec::new());
        for i in 0..4 {
            logits.push(session.decode(fed[i]).unwrap().to_vec());
            fed.push(best(&logits[i]).unwrap() as u32);
        }
        (fed, logits)
    });
    for counts in [&[2][..], &[3], &[4], &[1, 3], &[2, 2], &[3, 1]] {
        let mut sessions: Vec<_> = prompts.iter().take(counts.len()).map(start).collect();
        let vocab = engine.blueprint().vocab;
        let sampler = || Sampler::new(Sampling::greedy(), vocab).unwrap();
        let mut samplers = [sampler(), sampler()];
        let mut entries: Vec<_> = sessions
            .iter_mut()
            .zip(&mut samplers)
            .zip(counts.iter().zip(&alone))
            .map(|((session, sampler), (rows, (fed, _)))| {
                let entry = BatchEntry::new(session, &fed[..*rows]).kind(EntryKind::Answer);
                entry.drafts(rows - 1).sampler(sampler).logits(true)
            })
            .collect();
        engine.step(&mut entries, &mut StepControl::default()).unwrap();
        let accepted: Vec<_> = entries.iter().map(|entry| entry.accepted).collect();
        assert_eq!(accepted, counts, "{name}, {setting:?}");
        for (session, (rows, (_, logits))) in sessions.iter().zip(counts.iter().zip(&alone)) {
            let is_same = session.logits() == logits[rows - 1];
            assert!(is_same, "{name}, {setting:?}: {counts:?} differ");
        }
    }
}
