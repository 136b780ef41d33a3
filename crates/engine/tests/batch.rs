//! Many answers at once are those that each session would have given alone.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::{collections::HashMap, path::Path, sync::atomic::AtomicBool};

use common::{data, exact, tales};
use moeflux::{
    Batch, BatchOptions, DeviceOptions, Engine, Event, Finish, GenerateRequest, Job, MemoryRequest, Session,
    Turn, Watch,
};

const CHUNK: usize = 32;

fn engine(folder: &Path, device: DeviceOptions, sessions: usize) -> Engine {
    let memory = MemoryRequest {
        sessions: Some(sessions),
        slots: Some(20),
        context: Some(256),
        chunk: Some(CHUNK),
        ..MemoryRequest::default()
    };
    common::engine(folder, device, memory)
}

fn prompt(i: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|t| if t < 9 { t + 1 } else { (t * 37 + i * 101) % 500 + 1 }).collect()
}

fn request(tokens: usize) -> GenerateRequest {
    GenerateRequest { max_tokens: Some(tokens), ..GenerateRequest::default() }
}

/// What a session answers alone.
fn alone(engine: &Engine, prompt: &[u32], tokens: usize) -> Vec<u32> {
    let mut session = engine.session().unwrap();
    let mut watch = Watch::default();
    let made = session.generate(prompt, &request(tokens), &mut watch).unwrap();
    made.map(Result::unwrap).collect()
}

/// All answers of a batch, how each ended, and the tokens of each step by job.
struct Made {
    tokens: HashMap<Job, Vec<u32>>,
    finish: HashMap<Job, (Finish, Session)>,
    steps: Vec<Vec<Job>>,
}

fn run(batch: &mut Batch) -> Made {
    let mut made = Made { tokens: HashMap::new(), finish: HashMap::new(), steps: Vec::new() };
    while !batch.is_empty() {
        let mut of_step = Vec::new();
        for event in batch.step(&mut Watch::default()).unwrap() {
            match event {
                Event::Token { job, token } => {
                    made.tokens.entry(job).or_default().push(token);
                    of_step.push(job);
                }
                Event::Finished { job, finish, session } => {
                    made.finish.insert(job, (finish, session));
                }
                Event::Failed { error, .. } => panic!("{error}"),
            }
        }
        made.steps.push(of_step);
    }
    made
}

#[test]
fn answers_are_those_of_sessions_alone() {
    for golden in ["qwen3_moe", "qwen3_5_moe", "gpt_oss", "deepseek_v3"] {
        let folder = data().join("goldens").join(golden);
        let (together, by_itself) = (engine(&folder, exact("cpu"), 6), engine(&folder, exact("cpu"), 1));
        for options in [
            BatchOptions::default(),
            BatchOptions { tokens: Some(5), prompt_tokens: Some(3) },
            BatchOptions { tokens: Some(2), ..BatchOptions::default() },
        ] {
            let mut batch = Batch::new(&together, options);
            let wanted: Vec<(Vec<u32>, usize)> = [(3, 7), (70, 5), (12, 9), (1, 0), (40, 3), (9, 6)]
                .map(|(len, n)| (prompt(n, len), n as usize))
                .into();
            let jobs: Vec<Job> = wanted
                .iter()
                .map(|(prompt, n)| batch.add(together.session().unwrap(), prompt, &request(*n)).unwrap())
                .collect();
            let made = run(&mut batch);
            for ((prompt, n), job) in wanted.iter().zip(jobs) {
                let expected = alone(&by_itself, prompt, *n);
                let tokens = made.tokens.get(&job).cloned().unwrap_or_default();
                assert_eq!(tokens, expected, "{golden}, a prompt of {}", prompt.len());
                let (finish, session) = &made.finish[&job];
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

#[test]
fn nobody_starves() {
    let folder = data().join("goldens/qwen3_moe");
    let engine = engine(&folder, exact("cpu"), 5);
    let mut batch = Batch::new(&engine, BatchOptions { tokens: Some(12), prompt_tokens: Some(6) });
    let answering: Vec<Job> =
        (0..2).map(|i| batch.add(engine.session().unwrap(), &prompt(i, 2), &request(40)).unwrap()).collect();
    for _ in 0..2 {
        batch.step(&mut Watch::default()).unwrap();
    }
    let reading: Vec<Job> =
        (2..4).map(|i| batch.add(engine.session().unwrap(), &prompt(i, 60), &request(2)).unwrap()).collect();
    let made = run(&mut batch);
    let first = |job| made.steps.iter().position(|step| step.contains(job)).unwrap();
    // Answers go on at every step; the two prompts take turns, six tokens at a time.
    let last = made.steps.iter().rposition(|step| step.contains(&answering[0])).unwrap();
    assert!(made.steps[..=last].iter().all(|step| step.contains(&answering[0])));
    assert_eq!([first(&reading[0]), first(&reading[1])], [18, 19]);
}

#[test]
fn many_answers_take_turns_where_a_step_is_small() {
    let folder = data().join("goldens/qwen3_moe");
    let engine = engine(&folder, exact("cpu"), 5);
    let mut batch = Batch::new(&engine, BatchOptions { tokens: Some(2), ..BatchOptions::default() });
    for i in 0..5 {
        batch.add(engine.session().unwrap(), &prompt(i, 1), &request(10)).unwrap();
    }
    let made = run(&mut batch);
    let mut counts: HashMap<Job, usize> = HashMap::new();
    for step in &made.steps {
        step.iter().for_each(|job| *counts.entry(*job).or_default() += 1);
        let (least, most) = (counts.values().min().unwrap(), counts.values().max().unwrap());
        assert!(counts.len() < 5 || most - least <= 4, "{counts:?}");
    }
}

#[test]
fn a_step_that_is_cancelled_or_wrong_changes_nobody() {
    let folder = data().join("goldens/qwen3_5_moe");
    let (engine, other) = (engine(&folder, exact("cpu"), 3), engine(&folder, exact("cpu"), 3));
    let mut sessions: Vec<Session> = (0..2).map(|_| engine.session().unwrap()).collect();
    for (i, session) in sessions.iter_mut().enumerate() {
        session.sync(&prompt(i as u32, 20), &mut Watch::default()).unwrap();
    }
    let before: Vec<_> = sessions.iter().map(|s| (s.tokens().to_vec(), s.logits().to_vec())).collect();
    let cancel = AtomicBool::new(true);
    let step = |sessions: &mut [Session], tokens: &[u32], watch: &mut Watch<'_>| {
        let mut turns: Vec<Turn<'_>> =
            sessions.iter_mut().map(|session| Turn { session, tokens, logits: true }).collect();
        engine.step(&mut turns, watch).map_err(|error| error.to_string())
    };
    let cancelled = step(&mut sessions, &[5], &mut Watch { cancel: Some(&cancel), ..Watch::default() });
    assert_eq!(cancelled.unwrap_err(), "cancelled");
    let large = step(&mut sessions, &[5; CHUNK], &mut Watch::default()).unwrap_err();
    assert!(large.contains("--chunk"), "{large}");
    let unknown = step(&mut sessions, &[1 << 30], &mut Watch::default()).unwrap_err();
    assert!(unknown.contains("vocabulary"), "{unknown}");
    let mut strangers = vec![other.session().unwrap()];
    let stranger = step(&mut strangers, &[5], &mut Watch::default()).unwrap_err();
    assert!(stranger.contains("another engine"), "{stranger}");
    assert!(other.session().unwrap().rewind(&sessions[0].mark().unwrap()).is_err());
    for (session, (tokens, logits)) in sessions.iter().zip(&before) {
        assert_eq!((session.tokens(), session.logits()), (&tokens[..], &logits[..]));
    }
    let stats = step(&mut sessions, &[5], &mut Watch::default()).unwrap();
    assert_eq!(stats.tokens, 2);
}

/// On the fast path rows that share a step sum in another order: it must not show.
#[test]
fn on_the_fast_path_company_changes_little() {
    let memory = MemoryRequest { sessions: Some(9), context: Some(256), ..MemoryRequest::default() };
    let engine = common::engine(&tales(), DeviceOptions::default(), memory);
    let text = engine.text().unwrap();
    let fable = std::fs::read_to_string(tales().join("README.md")).unwrap();
    let tokens: Vec<u32> = text.tokenizer().encode(&fable, false).unwrap();
    let (mut alone, mut company) = (engine.session().unwrap(), Vec::new());
    let lead = &tokens[..32];
    alone.sync(lead, &mut Watch::default()).unwrap();
    for _ in 0..8 {
        company.push(alone.fork().unwrap());
    }
    let (mut sum, mut most) = (0.0, 0.0f64);
    let next = &tokens[32..96];
    for token in next {
        alone.decode(*token).unwrap();
        let mut turns: Vec<Turn<'_>> = company
            .iter_mut()
            .map(|session| Turn { session, tokens: std::slice::from_ref(token), logits: true })
            .collect();
        engine.step(&mut turns, &mut Watch::default()).unwrap();
        for session in &company {
            assert!(session.logits() == company[0].logits(), "rows of one step are alike");
        }
        let kl = divergence(alone.logits(), company[0].logits());
        sum += kl;
        most = most.max(kl);
    }
    let mean = sum / next.len() as f64;
    assert!(mean < 5e-3, "mean {mean:.2e}, most {most:.2e}");
}

/// KL divergence of two softmaxes.
fn divergence(p: &[f32], q: &[f32]) -> f64 {
    let log_softmax = |x: &[f32]| -> Vec<f64> {
        let max = f64::from(x.iter().copied().fold(f32::MIN, f32::max));
        let sum: f64 = x.iter().map(|x| (f64::from(*x) - max).exp()).sum();
        x.iter().map(|x| f64::from(*x) - max - sum.ln()).collect()
    };
    let (p, q) = (log_softmax(p), log_softmax(q));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}
