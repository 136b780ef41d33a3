//! Heads for multi-token prediction: their logits, their drafts, and answers with them.

use std::{collections::BTreeMap, fs, ops::ControlFlow, path::Path};

use moeflux::{
    Checkpoint, Engine, EngineOptions, GenerateRequest, MemoryRequest, Sampling, Session,
    StepControl,
    checkpoint::CheckpointOptions,
    generate,
    runtime::{DeviceOptions, StepObserver},
    serve::{Event, Scheduler, SchedulerOptions},
    session::{BatchEntry, DraftMode, EntryKind, SnapshotOptions},
    text::Sampler,
};

use crate::common::{
    Golden, data, difference, exact, gpu,
    simulated_gpu::{Call, Card, Fault},
};

/// The goldens with heads, each of another family.
const HEADS: [&str; 3] = ["qwen3_5_moe_mtp_hub", "deepseek_v3_mtp_hub", "glm4_moe_mtp_hub"];

/// Logits of a head, run by run.
#[derive(Default)]
struct HeadLogits(Vec<Vec<f32>>);

impl StepObserver for HeadLogits {
    fn experts(&mut self, _: usize, _: usize, _: &[u32]) {}
    fn hidden(&mut self, _: usize, _: &[f32]) {}
    fn drafter(&mut self, logits: &[f32]) {
        self.0.push(logits.to_vec());
    }
}

fn open(checkpoint: Checkpoint, device: DeviceOptions, draft: DraftMode) -> Engine {
    let memory = MemoryRequest::default().context(512);
    let options = EngineOptions::default().memory(memory).device(device).draft(draft);
    Engine::open(checkpoint, options, &mut |_, _| {}).unwrap()
}

/// tales-18m with its head.
fn tales() -> Checkpoint {
    let head = Checkpoint::embedded(&moeflux_tales_head::FILES).unwrap();
    Checkpoint::embedded(&moeflux_tales::FILES).unwrap().with_drafter(head).unwrap()
}

/// Logits of the head over `ids`, the last of which is the greedy choice after the others, then of
/// one draft after another; and the drafts.
fn head_logits(engine: &Engine, ids: &[u32], drafts: usize) -> (Vec<Vec<f32>>, Vec<u32>) {
    let mut session = engine.session().unwrap();
    session.set_drafts_by_head(true);
    let mut greedy = Sampler::new(Sampling::greedy(), engine.blueprint().vocab).unwrap();
    let mut seen = HeadLogits::default();
    let mut control = StepControl::default();
    control.observer = Some(&mut seen);
    let (last, fed) = ids.split_last().unwrap();
    let prompt = EntryKind::Prompt { tokens: fed.len() };
    let mut entries = [BatchEntry::new(&mut session, fed).kind(prompt).sampler(&mut greedy)];
    engine.step(&mut entries, &mut control).unwrap();
    let [entry] = entries;
    assert_eq!(entry.chosen.unwrap().unwrap(), *last);
    let next = std::slice::from_ref(last);
    let entry = BatchEntry::new(&mut session, next).sampler(&mut greedy).head_drafts(drafts);
    let mut entries = [entry];
    engine.step(&mut entries, &mut control).unwrap();
    let drafted = entries[0].drafted.as_slice().to_vec();
    // The head takes the rows of the prompt but the last one first.
    let logits = if fed.len() > 1 {
        let [prompt, last, rest @ ..] = &seen.0[..] else { panic!("{} runs", seen.0.len()) };
        [&[[&prompt[..], last].concat()][..], rest].concat()
    } else {
        seen.0
    };
    (logits, drafted)
}

#[test]
fn logits_of_heads_are_those_of_transformers() {
    for name in HEADS {
        let golden = Golden::read(name);
        let (_, ids) = golden.ints("mtp_ids").unwrap();
        let [first, second] =
            ["mtp_logits_f32", "mtp2_post_norm_f32"].map(|tensor| golden.floats(tensor).unwrap());
        let (_, wanted) = golden.ints("mtp_draft_f32").unwrap();
        for device in
            [Some(exact("cpu")), Some(exact("reference")), gpu(true)].into_iter().flatten()
        {
            let checkpoint = Checkpoint::open(&golden.folder).unwrap();
            let engine = open(checkpoint, device.clone(), DraftMode::Mtp);
            // The choices after the prompt are greedy. A GPU by software is slow.
            let steps = if engine.device().graphics { 5 } else { 1 };
            for len in (golden.prompt().len() + 1..=ids.len()).step_by(steps) {
                let (logits, drafts) = head_logits(&engine, &ids[..len], 2);
                let rows = len - 1;
                let d = difference(&logits[0], &first.numbers[..rows * first.width]);
                assert!(d <= 1e-4, "{name} on {device:?}, {len}: {d:e}");
                let d = difference(&logits[1], second.row(rows - 1));
                assert!(d <= 1e-4, "{name} on {device:?}, {len}, second draft: {d:e}");
                assert_eq!(drafts[0], wanted[rows - 1], "{name} on {device:?}, {len}");
            }
        }
    }
}

#[test]
fn drafts_of_fables_are_those_of_mlx_vlm() {
    // Ids of each prompt and its answer, and the draft of mlx-vlm 0.7.10 after each of these, in
    // f32.
    let text = std::fs::read(data().join("fables-drafts.json")).unwrap();
    let fables: BTreeMap<String, BTreeMap<String, Vec<u32>>> =
        serde_json::from_slice(&text).unwrap();
    let engine = open(tales(), exact("cpu"), DraftMode::Mtp);
    let plain =
        open(Checkpoint::embedded(&moeflux_tales::FILES).unwrap(), exact("cpu"), DraftMode::Off);
    for (i, (title, fable)) in fables.into_iter().enumerate() {
        let [prompt, answer, expected] = ["prompt", "answer", "drafts"].map(|key| &fable[key]);
        let ids = [&prompt[..], answer].concat();
        let (logits, _) = head_logits(&engine, &ids, 1);
        let of_answer = logits[0].chunks_exact(engine.blueprint().vocab).skip(prompt.len() - 1);
        let best = |row: &[f32]| (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b]));
        let drafts: Vec<_> = of_answer.map(|row| best(row).unwrap() as u32).collect();
        assert_eq!(drafts, *expected, "{title}");

        // To save time, some are told.
        if i > 0 {
            continue;
        }
        let request = GenerateRequest::default().max_tokens(answer.len());
        let tell = |engine: &Engine, draft| {
            let mut session = engine.session().unwrap();
            let (request, mut control) = (request.clone().draft(draft), StepControl::default());
            let made = generate(&mut session, prompt, &request, &mut control, &mut |_| {
                ControlFlow::Continue(())
            });
            made.unwrap()
        };
        let told = tell(&plain, None);
        assert_eq!(told.tokens, *answer, "{title}");
        for draft in [DraftMode::Always(1), DraftMode::Always(3), DraftMode::Auto] {
            let drafted = tell(&engine, Some(draft));
            assert_eq!((drafted.tokens, drafted.text), (answer.clone(), told.text.clone()));
            let stats = drafted.decode.stats;
            if draft == DraftMode::Always(1) {
                assert!(stats.drafted * 9 < stats.accepted * 10, "{title}: {stats:?}");
                assert!(stats.drafted * 5 > answer.len() as u64 * 2, "{title}: {stats:?}");
            }
        }
    }
}

fn golden(name: &str, draft: DraftMode, sessions: usize) -> Engine {
    let memory = MemoryRequest::default().context(96).chunk(24).sessions(sessions).slots(7);
    let options = EngineOptions::default().memory(memory).device(exact("cpu")).draft(draft);
    let folder = moeflux_goldens::golden(name);
    Engine::open(Checkpoint::open(&folder).unwrap(), options, &mut |_, _| {}).unwrap()
}

fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|t| (t * 31 + seed * 57) % 250 + 1).collect()
}

/// Tokens of an answer that is not ended by an end token.
fn answer(session: &mut Session, prompt: &[u32], draft: Option<DraftMode>) -> Vec<u32> {
    let request = GenerateRequest::default().max_tokens(24).ignore_eos(true).draft(draft);
    let tokens = session.generate(prompt, &request, &mut StepControl::default()).unwrap();
    tokens.map(Result::unwrap).collect()
}

#[test]
fn sessions_share_steps_with_drafts_of_a_head() {
    for name in HEADS {
        let plain = golden(name, DraftMode::Off, 1);
        let together = golden(name, DraftMode::Always(3), 3);
        let mut alone = plain.session().unwrap();
        let options = SchedulerOptions::default().tokens(20).prompt_tokens(5);
        let mut batch = Scheduler::new(&together, options);
        let modes = [DraftMode::Always(3), DraftMode::Always(1), DraftMode::Auto];
        let mut jobs = BTreeMap::new();
        for (i, draft) in modes.into_iter().enumerate() {
            let prompt = prompt(i as u32, 11 + 20 * i);
            let request = GenerateRequest::default().max_tokens(24).ignore_eos(true).draft(draft);
            let session = together.session().unwrap();
            let id = batch.add(session, &prompt, &request).unwrap();
            jobs.insert(id, (answer(&mut alone, &prompt, None), Vec::new()));
        }
        while !batch.is_empty() {
            for event in batch.step(&mut StepControl::default()).unwrap() {
                if let Event::Token { id, token, .. } = event {
                    jobs.get_mut(&id).unwrap().1.push(token);
                }
            }
        }
        assert!(jobs.values().all(|(expected, got)| got == expected), "{name}: {jobs:?}");
        assert!(batch.stats().drafted > 30, "{name}: {:?}", batch.stats());
    }
}

/// A head needs no state of a session: it goes on from what it has seen.
#[test]
fn sessions_are_cut_forked_and_restored_between_drafts() {
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("session");
    for name in HEADS {
        let (plain, drafts) =
            (golden(name, DraftMode::Off, 2), golden(name, DraftMode::Always(2), 2));
        let (mut alone, mut session) = (plain.session().unwrap(), drafts.session().unwrap());
        let first = prompt(1, 30);
        let answered = answer(&mut alone, &first, None);
        assert_eq!(answer(&mut session, &first, None), answered, "{name}");
        // Later turns, from each place of the answer.
        for cut in [1, 9, 23] {
            let longer = [&first[..], &answered[..cut], &[5, 6, 7]].concat();
            let expected = answer(&mut alone, &longer, None);
            let mut fork = session.fork().unwrap();
            assert_eq!(answer(&mut fork, &longer, None), expected, "{name}, {cut}");
        }
        // With a head and without one, files are the same.
        session.snapshot(&path, SnapshotOptions::default()).unwrap();
        alone.restore(&path).unwrap();
        assert_eq!(alone.tokens(), session.tokens(), "{name}");
        alone.snapshot(&path, SnapshotOptions::default()).unwrap();
        session.restore(&path).unwrap();
        let longer = [session.tokens(), &[9, 8, 7]].concat();
        assert_eq!(
            answer(&mut session, &longer, None),
            answer(&mut alone, &longer, None),
            "{name}"
        );
        assert!(session.stats().drafted > 20, "{name}");
    }
}

/// A card runs the head in the submission of a step, which it records ahead for each number of
/// right drafts.
#[test]
fn a_card_drafts_in_the_submission_of_a_step() {
    let prompt: Vec<u32> = {
        let text = fs::read(data().join("fables-drafts.json")).unwrap();
        let fables: BTreeMap<String, BTreeMap<String, Vec<u32>>> =
            serde_json::from_slice(&text).unwrap();
        fables["The Fox and the Crow"]["prompt"].clone()
    };
    let sampled = Sampling::default().temperature(0.7).seed(7);
    let tell = |engine: &Engine, sampling: &Sampling, draft| {
        let request = GenerateRequest::default().max_tokens(40).sampling(sampling.clone());
        let (request, mut control) = (request.draft(draft), StepControl::default());
        let mut session = engine.session().unwrap();
        let told = generate(&mut session, &prompt, &request, &mut control, &mut |_| {
            ControlFlow::Continue(())
        });
        told.unwrap()
    };
    let on_cpu = open(tales(), exact("cpu"), DraftMode::Mtp);
    // The head sees little of a prompt that is in the prefix cache, on both devices.
    tell(&on_cpu, &Sampling::greedy(), Some(DraftMode::Off));
    for device in [gpu(true), gpu(false)].into_iter().flatten() {
        let is_exact = device.exact;
        let engine = open(tales(), device, DraftMode::Mtp);
        for sampling in [Sampling::greedy(), sampled.clone()] {
            let plain = tell(&engine, &sampling, Some(DraftMode::Off));
            // To save time, not all.
            for count in if is_exact { 1..=1 } else { 2..=3 } {
                let draft = Some(DraftMode::Always(count));
                let drafted = tell(&engine, &sampling, draft);
                let what = format!("exact: {is_exact}, {sampling:?}, {count} drafts");
                assert_eq!(drafted.tokens, plain.tokens, "{what}");
                let stats = drafted.decode.stats;
                let (steps, wrong) =
                    (stats.tokens - stats.accepted, stats.drafted - stats.accepted);
                // The first step is not recorded, nor need be those after wrong drafts. Each has a
                // submission for its results.
                let most = 2 * steps + 12 + 12 * wrong;
                assert!(stats.submissions <= most, "{what}, {steps} steps: {stats:?}");
                assert!(stats.accepted * 3 > stats.tokens, "{what}: {stats:?}");
                if is_exact {
                    let expected = tell(&on_cpu, &sampling, draft).decode.stats;
                    assert_eq!(stats.drafted, expected.drafted, "{what}");
                    assert_eq!(stats.accepted, expected.accepted, "{what}");
                }
            }
        }
    }
}

/// A step whose head fails is computed without it, and the answer goes on without its drafts.
#[test]
fn an_answer_outlives_its_head() {
    let (wrap, asked) = Card::REAL.wrap();
    let options = EngineOptions::default().device(exact("cpu")).draft(DraftMode::Always(1));
    let engine = Engine::open(tales(), options.wrap_device(wrap), &mut |_, _| {}).unwrap();
    let (prompt, request) = (prompt(4, 20), GenerateRequest::default().max_tokens(30));
    let request = request.ignore_eos(true);
    let mut session = engine.session().unwrap();
    let mut told = |fault: bool, draft: DraftMode| {
        let (request, mut control) = (request.clone().draft(draft), StepControl::default());
        let before = session.stats().drafted;
        let mut tokens = session.generate(&prompt, &request, &mut control).unwrap();
        let mut all: Vec<u32> = tokens.by_ref().take(8).map(Result::unwrap).collect();
        let at_fault = tokens.session().stats().drafted - before;
        if fault {
            let fault = Fault { call: Call::Run, after: 0, is_loss: false };
            asked.lock().unwrap().fault = Some(fault);
        }
        all.extend(tokens.by_ref().map(Result::unwrap));
        (all, at_fault, tokens.session().stats().drafted - before)
    };
    let (plain, ..) = told(false, DraftMode::Off);
    let (failed, before, after) = told(true, DraftMode::Always(1));
    assert!(failed == plain && before > 0 && after == before, "{before}, {after}");
    // The next answer tries again.
    let (whole, before, after) = told(false, DraftMode::Always(1));
    assert!(whole == plain && after > before, "{before}, {after}");
}

#[test]
fn drafters_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let write = |config: &str, weights: &[u8]| {
        fs::write(folder.path().join("config.json"), config).unwrap();
        fs::write(folder.path().join("model.safetensors"), weights).unwrap();
    };
    let [(_, config), (_, weights)] = moeflux_tales_head::FILES;
    let config = std::str::from_utf8(config).unwrap();
    let tales = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tales/model");
    let error = |model: &Path, draft| {
        let options = CheckpointOptions::default().drafter(folder.path().to_owned());
        let opened = Checkpoint::open_with(model, &options).and_then(|checkpoint| {
            let options = EngineOptions::default().device(exact("cpu")).draft(draft);
            Engine::open(checkpoint, options, &mut |_, _| {})
        });
        opened.map(drop).map_err(|error| error.to_string())
    };
    write(config, weights);
    assert_eq!(error(&tales, DraftMode::Mtp), Ok(()));
    let other = error(&moeflux_goldens::golden("qwen3_5_moe"), DraftMode::Mtp).unwrap_err();
    assert!(other.contains("expected \"hidden_size\" 256") || other.contains("got 256"), "{other}");
    let cases = [
        (config.replace("qwen3_5_mtp", "eagle3"), weights, "got \"eagle3\""),
        (config.replace("_per_tok\": 4", "_per_tok\": 33"), weights, "33, of 32 experts"),
        (config.to_owned(), &weights[..weights.len() / 2], "model.safetensors"),
    ];
    for (config, weights, part) in cases {
        write(&config, weights);
        let error = error(&tales, DraftMode::Mtp).unwrap_err();
        assert!(error.contains(part), "{part}: {error}");
    }
    // A model without a head, which other modes do without.
    let options = |draft| EngineOptions::default().device(exact("cpu")).draft(draft);
    let open = |draft| {
        let checkpoint = Checkpoint::embedded(&moeflux_tales::FILES).unwrap();
        Engine::open(checkpoint, options(draft), &mut |_, _| {}).map(drop)
    };
    assert!(open(DraftMode::Auto).is_ok());
    let error = open(DraftMode::Mtp).unwrap_err().to_string();
    assert!(error.contains("--drafter DIR"), "{error}");
}
