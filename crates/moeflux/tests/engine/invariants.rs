//! Invariants of every golden: the bits of a sequence do not depend on the slots of experts, nor on
//! snapshots, forks, marks and truncation, nor, on a processor and on the exact path, on the other
//! rows of a step.

use std::{path::Path, sync::Arc};

use moeflux::{
    Checkpoint, Engine, EngineOptions, GenerateRequest, MemoryRequest, Sampling, Session,
    StepControl,
    experts::PrefetchMode,
    model::blueprint::Blueprint,
    runtime::{DeviceOptions, KvFormat, Logits},
    session::{BatchEntry, DraftCounts, DraftMode, DraftScript, EntryKind, SnapshotOptions},
};
use moeflux_compute::{KV_BLOCK, StateShape};

use crate::common::{asked, exact, few_slots, gpu, is_full, readers::shuffled};

const CHUNK: usize = 32;

/// Steps of a text: two of prefill, then single tokens.
const STEPS: usize = 5;

/// A token sequence in steps.
struct Text {
    tokens: Vec<u32>,
    /// Length after each step.
    ends: [usize; STEPS],
}

impl Text {
    /// Texts share their first tokens. With `wraps`, if the KV cache of a window is a ring, its
    /// oldest positions are overwritten in the first step.
    fn new(model: &Blueprint, index: usize, wraps: bool) -> Self {
        let is_ring = |shape| match shape {
            StateShape::KeyValue { positions, .. } => positions <= KV_BLOCK,
            StateShape::Recurrent { .. } => false,
        };
        let mut shapes = model.layers.iter().flat_map(|layer| layer.states(2 * KV_BLOCK, CHUNK));
        let first = if wraps && shapes.any(is_ring) { KV_BLOCK + 8 } else { 24 };
        let ends = [0, 12, 13, 14, 15].map(|more| first + more);
        let other = |i| if i < 18 { 0 } else { index * 97 };
        let tokens = (0..ends[STEPS - 1]).map(|i| (i * 31 + i * i % 7 + other(i)) % model.vocab);
        Self { tokens: tokens.map(|token| token as u32).collect(), ends }
    }

    fn tokens(&self, steps: usize) -> &[u32] {
        &self.tokens[..steps.checked_sub(1).map_or(0, |last| self.ends[last])]
    }

    fn step(&self, step: usize) -> &[u32] {
        &self.tokens(step + 1)[self.tokens(step).len()..]
    }
}

/// Appends tokens, and returns the logits after them.
fn append(session: &mut Session, tokens: &[u32]) -> Vec<f32> {
    session.feed(tokens, Logits::Last, &mut StepControl::default(), &mut |_, _| {}).unwrap();
    session.logits().to_vec()
}

/// How the engine with few slots computes. Neither prefetch nor the order of reads change a bit.
struct Variant {
    device: DeviceOptions,
    prefetch: PrefetchMode,
    shuffle: Option<u64>,
}

impl Variant {
    fn plain(device: DeviceOptions) -> Self {
        Self { device, prefetch: PrefetchMode::Off, shuffle: None }
    }

    /// Whether the bits of a row depend on no other row of its step.
    fn has_independent_rows(&self) -> bool {
        self.device.exact || self.device.name.as_deref() == Some("cpu")
    }
}

/// An engine with a slot for each expert, and one with few slots. They share nothing.
struct Case<'a> {
    name: &'a str,
    variant: &'a Variant,
    texts: [Text; 2],
    /// Logits after each step of each text, by the engine with all slots.
    expected: [Vec<Vec<f32>>; 2],
    all: Engine,
    few: Engine,
}

impl<'a> Case<'a> {
    fn new(name: &'a str, variant: &'a Variant) -> Self {
        let folder = moeflux_goldens::golden(name);
        let open = || Checkpoint::open(&folder).unwrap();
        let model = Blueprint::for_checkpoint(&open()).unwrap();
        // Software drivers take long for hundreds of tokens.
        let wraps = is_full() || variant.device.name.as_deref() == Some("cpu");
        let texts = [0, 1].map(|i| Text::new(&model, i, wraps));
        let engine = |memory: MemoryRequest, variant: &Variant, draft: DraftMode| {
            let context = 2 * KV_BLOCK;
            let memory = memory.context(context).chunk(CHUNK).sessions(3).marks(16 << 20);
            let mut options = EngineOptions::default()
                .memory(memory)
                .device(variant.device.clone())
                .prefetch(variant.prefetch)
                .draft(draft);
            options.wrap_reader = variant.shuffle.map(shuffled);
            Engine::open(open(), options, &mut |_, _| {}).unwrap()
        };
        let one_thread = Variant::plain(variant.device.clone().threads(1));
        let all = engine(MemoryRequest::default(), &one_thread, DraftMode::Off);
        // Prefetch needs slots that the layer does not use.
        let layers = if variant.prefetch == PrefetchMode::Off { 1 } else { 2 };
        let slots = (layers * model.max_top_k()).min(model.experts());
        let few = engine(few_slots(slots), variant, DraftMode::Always(3));
        let mut session = all.session().unwrap();
        let expected = [0, 1].map(|i| {
            session.reset().unwrap();
            (0..STEPS).map(|step| append(&mut session, texts[i].step(step))).collect()
        });
        drop(session);
        Self { name, variant, texts, expected, all, few }
    }

    fn same(&self, what: &str, got: &[f32], expected: &[f32]) {
        let (name, device) = (self.name, &self.variant.device);
        assert!(got == expected && !got.is_empty(), "{name} on {device:?}: other bits {what}");
    }

    /// Runs steps of the first text from `step` on, of a session that has those before.
    fn goes_on(&self, session: &mut Session, step: usize, what: &str) {
        let text = &self.texts[0];
        assert_eq!(session.tokens(), text.tokens(step), "{}: {what}", self.name);
        for step in step..STEPS {
            let got = append(session, text.step(step));
            self.same(&format!("{what}, in step {step}"), &got, &self.expected[0][step]);
        }
    }

    /// Branches sessions of the engine with few slots, and saves some on the way.
    fn branches(&self, files: &Path) {
        let [text, other] = &self.texts;
        let expected = &self.expected[0];
        let mut session = self.few.session().unwrap();
        self.same("with few slots", &append(&mut session, text.step(0)), &expected[0]);
        let (mark, mut fork) = (session.mark().unwrap(), session.fork().unwrap());
        session.snapshot(files.join("0"), SnapshotOptions::default().hot_experts(true)).unwrap();
        if self.few.kv_format() != KvFormat::Q8 {
            let lossy = SnapshotOptions::default().kv_format(KvFormat::Q8);
            session.snapshot(files.join("lossy"), lossy).unwrap();
        }
        fork.decode(other.tokens[0]).unwrap();
        self.same("after a fork", &append(&mut session, text.step(1)), &expected[1]);
        session.snapshot(files.join("1"), SnapshotOptions::default()).unwrap();
        let mut parent = session.fork().unwrap();
        self.goes_on(&mut session, 2, "with few slots");
        self.goes_on(&mut parent, 2, "in a fork");
        fork.rewind(&mark).unwrap();
        self.goes_on(&mut fork, 1, "after a rewind");
        session.truncate(text.ends[0], &mut StepControl::default()).unwrap();
        self.goes_on(&mut session, 1, "after a truncation");
        // Slots of two layers, or of card and host, may hold all experts of a small model.
        let reads = !self.few.plan().holds_all;
        assert!(!reads || session.stats().hit_rate() < 1.0, "{}: nothing was read", self.name);
    }

    /// Restores what the engine with few slots has saved, in the other engine.
    fn is_restored(&self, files: &Path) {
        let mut session = self.all.session().unwrap();
        for step in 0..2 {
            session.restore(files.join(step.to_string())).unwrap();
            self.same("in a snapshot", session.logits(), &self.expected[0][step]);
            self.goes_on(&mut session, step + 1, "after a snapshot");
        }
        if self.few.kv_format() == KvFormat::Q8 {
            return;
        }
        let mut same = self.few.session().unwrap();
        for session in [&mut session, &mut same] {
            session.restore(files.join("lossy")).unwrap();
            assert!(session.is_lossy());
        }
        for step in 1..STEPS {
            let [got, expected] =
                [&mut session, &mut same].map(|s| append(s, self.texts[0].step(step)));
            self.same("after a lossy snapshot", &got, &expected);
        }
    }

    /// Logits of three sessions in two steps: two of them decode, and one prefills. With each, the
    /// text and the step after which one session alone has the same logits.
    fn together(&self, engine: &Engine) -> Vec<(usize, usize, Vec<f32>)> {
        let texts = &self.texts;
        let mut sessions = [(0, 2), (1, 2), (0, 1)].map(|(text, steps)| {
            let mut session = engine.session().unwrap();
            (0..steps).for_each(|step| drop(append(&mut session, texts[text].step(step))));
            session
        });
        let prefill = texts[0].ends[0] + 4;
        let mut logits = Vec::new();
        for [a, b, c] in [[2, 3, 0], [4, 4, 1]] {
            let [one, other, last] = &mut sessions;
            let to = |session: &Session, text: usize, step: usize| {
                let end = if step == 0 { prefill } else { texts[text].ends[step] };
                &texts[text].tokens[session.tokens().len()..end]
            };
            let tokens = [to(one, 0, a), to(other, 1, b), to(last, 0, c)];
            let mut entries = [
                BatchEntry::new(one, tokens[0]).kind(EntryKind::Answer).logits(true),
                BatchEntry::new(other, tokens[1]).kind(EntryKind::Answer).logits(true),
                BatchEntry::new(last, tokens[2]).logits(c > 0),
            ];
            engine.step(&mut entries, &mut StepControl::default()).unwrap();
            let steps = [(0, a), (1, b), (0, c)].into_iter().zip(&sessions);
            let with_logits = steps.filter(|((_, step), _)| *step > 0);
            logits.extend(with_logits.map(|((text, step), s)| (text, step, s.logits().to_vec())));
        }
        logits
    }

    /// Sessions that are stepped together, and one session in other chunks.
    fn shares_steps(&self) {
        let (few, all) = (self.together(&self.few), self.together(&self.all));
        for ((text, step, got), (_, _, resident)) in few.iter().zip(&all) {
            self.same("together with few slots", got, resident);
            if self.variant.has_independent_rows() {
                self.same("together", got, &self.expected[*text][*step]);
            }
        }
        if !self.variant.has_independent_rows() {
            return;
        }
        let mut session = self.all.session().unwrap();
        let prompt = self.texts[0].tokens(2);
        let mut ends = [1, 2, 3, 5].into_iter().cycle().scan(0, |end, rows| {
            *end += rows;
            (*end < prompt.len()).then_some(*end)
        });
        let mut sync = |end: usize| session.sync(&prompt[..end], &mut StepControl::default());
        ends.try_for_each(|end| sync(end).map(|_| ())).unwrap();
        sync(prompt.len()).unwrap();
        self.same("of a prompt in small chunks", session.logits(), &self.expected[0][1]);
        self.goes_on(&mut session, 2, "in small chunks");
    }

    /// Answers whose drafts are right with several probabilities: tokens, session and the logits
    /// after it equal the answer without drafts.
    fn checks_drafts(&self) {
        const TOKENS: usize = 14;
        let (prompt, vocab) = (self.texts[0].tokens(2), self.all.blueprint().vocab as u32);
        let (mut plain, mut drafted) = (self.all.session().unwrap(), self.few.session().unwrap());
        for (sampling, is_seeded) in
            [(Sampling::greedy(), false), (Sampling::default().temperature(1.3).seed(5), true)]
        {
            let request =
                GenerateRequest::default().sampling(sampling).max_tokens(TOKENS).ignore_eos(true);
            let answer = |session: &mut Session, request: &GenerateRequest| {
                let tokens = session.generate(prompt, request, &mut StepControl::default());
                let tokens: Vec<u32> = tokens.unwrap().map(Result::unwrap).collect();
                let held = session.tokens().to_vec();
                let last = *tokens.last().unwrap();
                (append(session, &[last, (last + 7) % vocab]), tokens, held)
            };
            let (logits, tokens, held) = answer(&mut plain, &request);
            assert_eq!(tokens.len(), TOKENS);
            let cases = [
                (0.0, DraftCounts::All),
                (0.5, DraftCounts::Random),
                (1.0, DraftCounts::Random),
                (1.0, DraftCounts::LastWrong),
            ];
            let scripts = cases.map(|(acceptance, counts)| {
                let script = DraftScript::new(prompt.len(), &tokens[..], acceptance, 3);
                let with = request.clone().drafter(Some(Arc::new(script.counts(counts)) as _));
                (format!("{acceptance}, {counts:?}"), with)
            });
            let own = ("by its own drafters".to_owned(), request.clone());
            for (drafts, with) in scripts.into_iter().chain([own]) {
                let what = format!("of drafts ({drafts}, seeded: {is_seeded})");
                let (got, chosen, got_held) = answer(&mut drafted, &with);
                assert_eq!(chosen, tokens, "{} {what}", self.name);
                assert_eq!(got_held, held, "{} {what}", self.name);
                self.same(&what, &got, &logits);
            }
        }
        let stats = drafted.stats();
        assert!(0 < stats.accepted && stats.accepted < stats.drafted, "{}", self.name);
    }

    /// Prompts with a common prefix, whose states are in the prefix cache.
    fn reuses_prefixes(&self) {
        let mut control = StepControl::default();
        let mut sessions = [self.few.session().unwrap(), self.few.session().unwrap()];
        for (session, text, steps) in [(0, 0, 1), (0, 0, 2), (0, 1, 2), (1, 0, 2), (1, 0, 1)] {
            let tokens = self.texts[text].tokens(steps);
            sessions[session].sync(tokens, &mut control).unwrap();
            let logits = sessions[session].logits();
            self.same("of a reused prefix", logits, &self.expected[text][steps - 1]);
        }
        let [_, session] = &mut sessions;
        self.goes_on(session, 1, "after a reused prefix");
    }
}

fn check(names: impl Iterator<Item = String>, variant: &Variant) {
    let start = asked().unwrap_or_default();
    for name in names.filter(|name| name.starts_with(&start)) {
        let case = Case::new(&name, variant);
        let files = tempfile::tempdir().unwrap();
        case.branches(files.path());
        case.is_restored(files.path());
        case.shares_steps();
        if variant.has_independent_rows() {
            case.checks_drafts();
            case.reuses_prefixes();
        }
    }
}

fn on_the_cpu(kv_format: KvFormat, prefetch: PrefetchMode, shuffle: Option<u64>) {
    let device = exact("cpu").exact(false).kv_format(kv_format);
    check(moeflux_goldens::names().into_iter(), &Variant { device, prefetch, shuffle });
}

#[test]
fn every_golden_on_the_exact_path() {
    check(moeflux_goldens::names().into_iter(), &Variant::plain(exact("cpu")));
}

#[test]
fn every_golden_with_a_kv_cache_of_f32() {
    on_the_cpu(KvFormat::F32, PrefetchMode::On, None);
}

#[test]
fn every_golden_with_a_kv_cache_of_f16() {
    on_the_cpu(KvFormat::F16, PrefetchMode::Off, Some(0x9E37_79B9));
}

#[test]
fn every_golden_with_a_kv_cache_of_q8() {
    on_the_cpu(KvFormat::Q8, PrefetchMode::Auto, Some(0xDEAD_BEEF));
}

/// Goldens that a GPU runs in every test run: each kind of mixer, and experts of one block of
/// inputs, whose kernels differ most with residency.
const ON_A_GPU: [&str; 7] = [
    "gemma4",
    "gpt_oss",
    "qwen3_next",
    "deepseek_v2_hub",
    "phimoe_hub",
    "bailing_hybrid_hub",
    "nemotron_h_hub",
];

/// With `MOEFLUX_TEST_FULL`, all goldens.
fn on_a_gpu(device: DeviceOptions) {
    let takes = |name: &String| is_full() || ON_A_GPU.contains(&&**name);
    check(moeflux_goldens::names().into_iter().filter(takes), &Variant::plain(device));
}

#[test]
fn goldens_on_the_exact_path_of_a_gpu() {
    gpu(true).into_iter().for_each(on_a_gpu);
}

#[test]
fn goldens_on_the_fast_path_of_a_gpu() {
    gpu(false).into_iter().for_each(on_a_gpu);
}

/// Contexts shorter than windows, blocks and convolutions.
const SHORT: [usize; 5] = [1, 2, 3, 5, 11];

#[test]
fn every_golden_in_a_short_context() {
    for name in moeflux_goldens::names() {
        let folder = moeflux_goldens::golden(&name);
        let engine = |context: usize| {
            let memory = MemoryRequest::default().context(context).chunk(CHUNK);
            let options = EngineOptions::default().memory(memory).device(exact("cpu"));
            Engine::open(Checkpoint::open(&folder).unwrap(), options, &mut |_, _| {})
        };
        let usual = engine(2 * KV_BLOCK).unwrap();
        let tokens = Text::new(usual.blueprint(), 0, false).tokens;
        for context in SHORT {
            let short = engine(context).unwrap_or_else(|e| panic!("{name}, {context}: {e}"));
            let mut sessions = [&short, &usual].map(|engine| engine.session().unwrap());
            // A prompt, and a token that fills the context.
            let (prompt, last) = tokens[..context].split_at(context - 1);
            for part in [prompt, last].into_iter().filter(|part| !part.is_empty()) {
                let [got, expected] = sessions.each_mut().map(|s| append(s, part));
                assert!(got == expected, "{name}: other bits in a context of {context}");
            }
        }
    }
}
