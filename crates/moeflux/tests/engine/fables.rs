//! The embedded model has memorized some fables: a correct engine reproduces them word for word.

use std::{collections::BTreeMap, ops::ControlFlow};

use moeflux::{
    ChatOptions, Checkpoint, Engine, EngineOptions, Finish, GenerateRequest, MemoryRequest,
    Message, Sampling, StepControl,
    experts::ExpertsOnHost,
    generate,
    runtime::{DeviceOptions, KvFormat},
    session::SnapshotOptions,
};

use crate::common::{data, engine, exact, feed, gpu, is_full, simulated_gpu::Card, tales};

fn fables() -> BTreeMap<String, String> {
    serde_json::from_slice(&std::fs::read(data().join("fables.json")).unwrap()).unwrap()
}

/// The shortest known fables, to save time.
fn short(n: usize) -> Vec<(String, String)> {
    let mut all: Vec<_> = fables().into_iter().collect();
    all.sort_by_key(|(_, text)| text.len());
    all.truncate(n);
    all
}

fn tell(engine: &Engine, title: &str) -> moeflux::Answer {
    let prompt = [Message::user(format!("Tell me the fable of {title}."))];
    let prompt = engine.text().unwrap().chat(&prompt, &ChatOptions::default()).unwrap();
    let request = GenerateRequest::default().sampling(Sampling::greedy());
    let mut session = engine.session().unwrap();
    generate(&mut session, &prompt, &request, &mut StepControl::default(), &mut |_| {
        ControlFlow::Continue(())
    })
    .unwrap()
}

#[test]
fn the_embedded_model_tells_the_fable_of_its_readme() {
    let engine = engine(&tales(), DeviceOptions::default(), MemoryRequest::default());
    let answer = tell(&engine, "The Fox and the Crow");
    assert!(answer.text.starts_with(
        "A Crow was sitting on a branch of a tree with a piece of cheese in her beak"
    ));
    assert!(
        answer.text.ends_with("\"You have a voice, madam, I see: what you want is wits.\""),
        "{}",
        answer.text
    );
    assert_eq!(answer.finish, Finish::EndToken);
    assert_eq!(Some(&answer.text), fables().get("The Fox and the Crow"));
}

#[test]
fn fables_are_told_word_for_word_with_a_partial_expert_cache() {
    let memory = MemoryRequest::default().slots(96);
    for device in [DeviceOptions::default(), exact("cpu")] {
        let engine = engine(&tales(), device, memory);
        for (title, text) in short(if is_full() { 24 } else { 8 }) {
            let answer = tell(&engine, &title);
            assert_eq!(answer.text, text, "{title}, {}", engine.device().name);
            assert!(answer.decode.stats.hit_rate() < 1.0);
        }
    }
}

#[test]
fn a_gpu_tells_fables_word_for_word() {
    // Some of the experts in slots, then all of them.
    for (exact, slots) in [(true, Some(96)), (false, Some(96)), (false, None)] {
        let Some(gpu) = gpu(exact) else { return };
        let engine = engine(&tales(), gpu, MemoryRequest::default().slots(slots));
        for (title, text) in short(if is_full() { 3 } else { 1 }) {
            let answer = tell(&engine, &title);
            assert_eq!(answer.text, text, "{title}, {}", engine.device().name);
            // A GPU may use experts in host memory directly: those count as hits.
            let missed = slots.is_some() && engine.plan().card().is_none();
            assert_eq!(answer.decode.stats.hit_rate() < 1.0, missed);
        }
    }
}

/// The `n` shortest fables as conversations, tokenized.
fn told(n: usize, engine: &Engine) -> Vec<Vec<u32>> {
    let told = short(n).into_iter().map(|(title, text)| {
        format!(
            "<|im_start|>user\nTell me the fable of {title}.<|im_end|>\n<|im_start|>assistant\n{text}<|im_end|>"
        )
    });
    told.map(|text| engine.text().unwrap().encode(&text).unwrap()).collect()
}

/// Mean KL divergence of `fast` from `slow` over all tokens, in nats.
fn divergence(slow: &Engine, fast: &Engine, texts: &[Vec<u32>]) -> f64 {
    divergence_by(usize::MAX, slow, fast, texts)
}

/// The same, with `at_once` tokens per step of `fast`.
fn divergence_by(at_once: usize, slow: &Engine, fast: &Engine, texts: &[Vec<u32>]) -> f64 {
    let (mut sum, mut rows) = (0.0, 0);
    for tokens in texts {
        let (mut p, mut q) = (slow.session().unwrap(), fast.session().unwrap());
        let p = feed(&mut p, tokens, None);
        let q: Vec<f32> = tokens.chunks(at_once).flat_map(|t| feed(&mut q, t, None)).collect();
        for (p, q) in p.chunks(slow.blueprint().vocab).zip(q.chunks(slow.blueprint().vocab)) {
            sum += kl(p, q);
            rows += 1;
        }
    }
    sum / f64::from(rows)
}

/// A text that is not in the training data.
const UNKNOWN: &str = "The ferry to the outer islands leaves at seven, unless fog keeps the pilot in bed. Two \
    engineers, a violin maker and a crate of tomatoes were waiting on the pier last Tuesday when the radio said that \
    the harbour of Inverkeld would stay closed until the tide had turned. Nobody was surprised. The violin maker asked \
    what a tide was worth in hours, and one of the engineers drew him the orbit of the moon on the back of a receipt, \
    with the wrong sign. They ate the tomatoes.";

#[test]
fn the_fast_path_stays_close_to_the_exact_one() {
    let memory = MemoryRequest::default();
    let (fast, slow) = (
        engine(&tales(), DeviceOptions::default(), memory),
        engine(&tales(), exact("cpu"), memory),
    );
    let unknown = slow.text().unwrap().encode(UNKNOWN).unwrap();
    for (what, texts, bar) in [("fables", told(24, &slow), 1e-3), ("a text", vec![unknown], 5e-3)] {
        let mean = divergence(&slow, &fast, &texts);
        assert!(mean < bar, "{what}: mean KL divergence {mean:e}");
    }
    let texts = told(24, &slow);
    let [of_slow, of_fast] = [&slow, &fast].map(|engine| perplexity(engine, &texts));
    assert!((of_fast / of_slow - 1.0).abs() < 5e-3, "perplexity {of_slow}, then {of_fast}");
}

/// Loss by a smaller KV format alone, without the other rounding of the fast path.
#[test]
fn smaller_kv_formats_lose_little() {
    let memory = MemoryRequest::default();
    let keeping = |keys| {
        let device = DeviceOptions::default().kv_format(keys);
        engine(&tales(), device, memory)
    };
    let whole = keeping(KvFormat::F32);
    let unknown = whole.text().unwrap().encode(UNKNOWN).unwrap();
    for keys in [KvFormat::F16, KvFormat::Q8] {
        let rounded = keeping(keys);
        for (texts, bar) in [(told(24, &whole), 5e-5), (vec![unknown.clone()], 5e-3)] {
            let mean = divergence(&whole, &rounded, &texts);
            assert!(mean < bar, "{}: mean KL divergence {mean:e}", keys.name());
        }
    }
}

/// Loss by restoring a snapshot with an 8-bit KV cache: compares second halves of texts after the
/// original and after the restored first half.
#[test]
fn a_reduced_snapshot_loses_little() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("half");
    for device in [DeviceOptions::default(), exact("cpu")] {
        let engine = engine(&tales(), device, MemoryRequest::default().sessions(2));
        let vocab = engine.blueprint().vocab;
        let unknown = engine.text().unwrap().encode(UNKNOWN).unwrap();
        for (what, texts, bar) in
            [("fables", told(12, &engine), 5e-5), ("a text", vec![unknown], 5e-3)]
        {
            let (mut sum, mut rows) = (0.0, 0);
            for tokens in texts {
                let (first, second) = tokens.split_at(tokens.len() / 2);
                let (mut session, mut restored) =
                    (engine.session().unwrap(), engine.session().unwrap());
                session.sync(first, &mut StepControl::default()).unwrap();
                let save = |keys| {
                    let options = SnapshotOptions::default().kv_format(keys);
                    session.snapshot(&file, options).unwrap()
                };
                let (whole, less) = (save(None), save(Some(KvFormat::Q8)));
                assert!(less < whole, "{less} {whole}");
                restored.restore(&file).unwrap();
                assert!(restored.is_lossy() && !session.is_lossy());
                assert!((restored.tokens(), restored.logits()) == (first, session.logits()));
                let (p, q) = (feed(&mut session, second, None), feed(&mut restored, second, None));
                for (p, q) in p.chunks(vocab).zip(q.chunks(vocab)) {
                    sum += kl(p, q);
                    rows += 1;
                }
            }
            let mean = sum / f64::from(rows);
            assert!(
                0.0 < mean && mean < bar,
                "{what}, {}: mean KL divergence {mean:e}",
                engine.device().name
            );
        }
    }
}

/// Perplexity of texts.
fn perplexity(engine: &Engine, texts: &[Vec<u32>]) -> f64 {
    let (mut sum, mut count) = (0.0, 0);
    for tokens in texts {
        let logits = feed(&mut engine.session().unwrap(), tokens, None);
        for (logits, next) in logits.chunks(engine.blueprint().vocab).zip(&tokens[1..]) {
            sum -= log_softmax(logits)[*next as usize];
            count += 1;
        }
    }
    (sum / f64::from(count)).exp()
}

#[test]
fn the_fast_path_of_a_gpu_stays_close_to_its_exact_one() {
    let (Some(of_fast), Some(of_slow)) = (gpu(false), gpu(true)) else { return };
    let memory = MemoryRequest::default();
    let (fast, slow) = (engine(&tales(), of_fast, memory), engine(&tales(), of_slow, memory));
    let vocab = slow.blueprint().vocab as u32;
    let unknown = slow.text().unwrap().encode(UNKNOWN).unwrap();
    let random: Vec<u32> = (0..200u32).map(|i| i.wrapping_mul(2_654_435_761) % vocab).collect();
    let (fables, unknown, random) =
        (told(if is_full() { 4 } else { 1 }, &slow), vec![unknown], vec![random]);
    // Single tokens use other kernels than batches, with quantized activations.
    for (what, texts, at_once, bar) in [
        ("fables", &fables, usize::MAX, 1e-3),
        ("a text", &unknown, usize::MAX, 1e-3),
        ("a text, one by one", &unknown, 1, 1e-3),
        ("tokens", &random, usize::MAX, 3e-3),
    ] {
        let mean = divergence_by(at_once, &slow, &fast, texts);
        assert!(mean < bar, "{what}: mean KL divergence {mean:e}");
    }
}

/// Some experts on a card, the others computed by the processor.
#[test]
fn experts_on_the_host_stay_close_to_those_on_a_card() {
    let Some(gpu) = gpu(false) else { return };
    let [read, compute] = [ExpertsOnHost::Read, ExpertsOnHost::Compute].map(|how| {
        let (wrap, _) = Card::OWN.wrap();
        let memory = MemoryRequest::default().slots(96).experts_on_host(how);
        let options = EngineOptions::default().memory(memory).device(gpu.clone());
        let checkpoint = Checkpoint::open(&tales()).unwrap();
        Engine::open(checkpoint, options.wrap_device(wrap), &mut |_, _| {}).unwrap()
    });
    let unknown = read.text().unwrap().encode(UNKNOWN).unwrap();
    for (what, texts, at_once) in [("fables", told(1, &read), 16), ("a text", vec![unknown], 2)] {
        let mean = divergence_by(at_once, &read, &compute, &texts);
        println!("{what}: mean KL divergence {mean:e}");
        assert!(mean < 1e-3, "{what}: mean KL divergence {mean:e}");
    }
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|x| f64::from(x - max).exp()).sum();
    logits.iter().map(|x| f64::from(x - max) - sum.ln()).collect()
}

fn kl(p: &[f32], q: &[f32]) -> f64 {
    let (p, q) = (log_softmax(p), log_softmax(q));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}
