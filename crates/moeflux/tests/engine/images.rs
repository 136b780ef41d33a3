//! Prompts with images against transformers 5.24.0 (torch 2.15.0, f32): logits, positions, experts,
//! and states that are forked, truncated, saved and found again.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, GenerateRequest, MemoryRequest, Sampling, Session,
    StepControl,
    runtime::{DeviceOptions, ImageRows, Logits, PromptImages},
    session::{BatchEntry, Prompt, RowSink, SnapshotOptions, Synced},
    text::{MessageImage, Text},
    vision::{ImageDetail, ImageEncoder, ImageOptions},
};
use safetensors::SafeTensors;

use crate::{
    common::{
        Golden, Seen, copy_folder, data, difference, exact, gpu, read_tensors, sets, write_tensors,
    },
    goldens::distance,
};

/// `max |a - b| <= BAR * rms(b)`.
const BAR: f64 = 1e-4;

/// `|a - b| <= FAST_BAR * |b|` on the fast path.
const FAST_BAR: f64 = 0.1;

const CASES: [&str; 2] = ["qwen3_5_moe", "qwen3_vl_moe"];
/// Token in the place of each row of an image.
const PLACEHOLDER: u32 = 262;

const PROMPTS: [&str; 5] = ["none", "one", "between", "two", "other"];

fn folder(case: &str) -> PathBuf {
    data().join("vision").join(case)
}

/// A prompt with its images and what transformers makes of it.
struct PromptCase {
    tokens: Vec<u32>,
    images: PromptImages,
    /// Greedy tokens that follow.
    answer: Vec<u32>,
    golden: Vec<u8>,
    name: &'static str,
}

impl PromptCase {
    fn tensor(&self, name: &str) -> Vec<[u8; 4]> {
        let golden = SafeTensors::deserialize(&self.golden).unwrap();
        let tensor = golden.tensor(&format!("{}.{name}", self.name)).unwrap();
        tensor.data().as_chunks().0.to_vec()
    }

    fn ints(&self, name: &str) -> Vec<u32> {
        self.tensor(name).into_iter().map(u32::from_le_bytes).collect()
    }

    fn logits(&self) -> Vec<f32> {
        self.tensor("logits").into_iter().map(f32::from_le_bytes).collect()
    }

    fn prompt(&self) -> Prompt<'_> {
        Prompt::new(&self.tokens, &self.images)
    }
}

/// The prompts of a case, with rows of the exact tower.
fn prompts(case: &str) -> Vec<PromptCase> {
    let folder = folder(case);
    let checkpoint = Arc::new(Checkpoint::open(&folder).unwrap());
    let mut text = Text::for_checkpoint(&*checkpoint, 272).unwrap().unwrap();
    text.set_image_token(Some(PLACEHOLDER));
    let options = ImageOptions::default().device(exact("cpu"));
    let encoder = ImageEncoder::open(&checkpoint, options).unwrap().unwrap();
    let names = fs::read(folder.join("images.json")).unwrap();
    let names: serde_json::Value = serde_json::from_slice(&names).unwrap();
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vision/tests/data/images");
    let of_file = |name: &serde_json::Value| {
        let bytes = fs::read(files.join(name.as_str().unwrap())).unwrap();
        let image = encoder.read(&bytes, ImageDetail::Auto).unwrap();
        let rows = encoder.rows(&image, &mut StepControl::default()).unwrap();
        let (at, digest) = (0, *image.digest());
        (MessageImage { at, tokens: rows.tokens(), digest }, rows)
    };
    let golden = fs::read(folder.join("golden.safetensors")).unwrap();
    let of_prompt = |name: &'static str| {
        let mut case = PromptCase {
            tokens: Vec::new(),
            images: PromptImages::default(),
            answer: Vec::new(),
            golden: golden.clone(),
            name,
        };
        let images = names[name].as_array().unwrap().iter().map(of_file);
        let (images, rows): (Vec<_>, Vec<_>) = images.unzip();
        let expanded = text.expand_images(&case.ints("short_ids"), &images).unwrap();
        for (image, rows) in expanded.images.iter().zip(rows) {
            case.images.push(image.place, image.digest, rows);
        }
        case.tokens = expanded.tokens;
        case.answer = case.ints("gen_ids");
        case
    };
    PROMPTS.map(of_prompt).into()
}

fn engine(case: &str, device: DeviceOptions, chunk: Option<usize>) -> Engine {
    engine_of(&folder(case), device, chunk)
}

fn engine_of(folder: &Path, device: DeviceOptions, chunk: Option<usize>) -> Engine {
    let memory = MemoryRequest::default().context(256).chunk(chunk).sessions(3).marks(8 << 20);
    let options = EngineOptions::default().memory(memory).device(device);
    Engine::open(Checkpoint::open(folder).unwrap(), options, &mut |_, _| {}).unwrap()
}

/// Feeds a prompt and returns all its logits.
fn feed(session: &mut Session, prompt: Prompt<'_>, seen: &mut Seen) -> Vec<f32> {
    let (mut all, mut control) = (Vec::new(), StepControl::default());
    control.observer = Some(seen);
    let mut sink = |_: usize, row: &[f32]| all.extend_from_slice(row);
    session.feed(prompt, Logits::All, &mut control, &mut sink).unwrap();
    all
}

fn sync(session: &mut Session, prompt: Prompt<'_>) -> Synced {
    session.sync(prompt, &mut StepControl::default()).unwrap()
}

/// Logits of the answer's tokens, decoded one by one.
fn decode(session: &mut Session, answer: &[u32]) -> Vec<f32> {
    answer.iter().flat_map(|token| session.decode(*token).unwrap().to_vec()).collect()
}

fn assert_golden(engine: &Engine, case: &PromptCase, bar: f64, at: &str) {
    let mut session = engine.session().unwrap();
    let mut seen = Seen::default();
    let mut logits = feed(&mut session, case.prompt(), &mut seen);
    for token in &case.answer {
        logits.extend(feed(&mut session, (&[*token]).into(), &mut seen));
    }
    let d = match bar == BAR {
        true => difference(&logits, &case.logits()),
        false => distance(&logits, &case.logits()),
    };
    assert!(d <= bar, "{at}, {}: logits differ by {d:e}", case.name);
    for (layer, experts) in seen.experts.iter().enumerate().filter(|_| bar == BAR) {
        let wanted = case.ints(&format!("experts.{layer}"));
        assert_eq!(sets(seen.k, experts), sets(seen.k, &wanted), "{at}, layer {layer}");
    }
}

#[test]
fn prompts_with_images_have_the_logits_of_transformers() {
    for case in CASES {
        let prompts = prompts(case);
        for chunk in [None, Some(1), Some(2), Some(3), Some(5), Some(7)] {
            let engine = engine(case, exact("cpu"), chunk);
            for prompt in &prompts {
                assert_golden(&engine, prompt, BAR, &format!("{case}, chunk {chunk:?}"));
            }
        }
        for (device, bar) in [
            (Some(exact("reference")), BAR),
            (Some(DeviceOptions::default().name("cpu")), FAST_BAR),
            (gpu(true), BAR),
            // Experts of small models with random weights change places.
            (gpu(false), 5.0 * FAST_BAR),
        ] {
            let Some(device) = device else { continue };
            let at = format!("{case} on {device:?}");
            let engine = engine(case, device, Some(16));
            prompts.iter().for_each(|prompt| assert_golden(&engine, prompt, bar, &at));
        }
    }
}

/// Steps of a GPU are recorded before the tokens that they feed are known.
#[test]
fn answers_after_an_image_are_as_in_transformers() {
    for case in CASES {
        let devices = [Some(exact("cpu")), gpu(true)].into_iter().flatten();
        for engine in devices.map(|device| engine(case, device, Some(16))) {
            for prompt in prompts(case) {
                let mut session = engine.session().unwrap();
                sync(&mut session, prompt.prompt());
                let logits = decode(&mut session, &prompt.answer);
                let expected = prompt.logits();
                let d = difference(&logits, &expected[expected.len() - logits.len()..]);
                assert!(d <= BAR, "{case}, {}: logits differ by {d:e}", prompt.name);
                let request = GenerateRequest::default().images(prompt.images.clone());
                let request = request.sampling(Sampling::greedy()).ignore_eos(true);
                let request = request.max_tokens(prompt.answer.len());
                let (mut session, tokens) = (engine.session().unwrap(), &prompt.tokens);
                let mut control = StepControl::default();
                let made = session.generate(tokens, &request, &mut control).unwrap();
                let made: Vec<_> = made.collect::<Result<_, _>>().unwrap();
                assert_eq!(made, prompt.answer, "{case}, {}", prompt.name);
            }
        }
    }
}

/// The two families have sections, in turn, without being told.
#[test]
fn sections_of_m_rope_have_the_defaults_of_the_family() {
    for (case, key) in [("qwen3_5_moe", "mrope_section"), ("qwen3_vl_moe", "mrope_interleaved")] {
        let copy = tempfile::tempdir().unwrap();
        copy_folder(&folder(case), copy.path());
        let path = copy.path().join("config.json");
        let mut config: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let text = config["text_config"].as_object_mut().unwrap();
        let rope = ["rope_parameters", "rope_scaling"].into_iter().find(|k| text.contains_key(*k));
        let removed = text[rope.unwrap()].as_object_mut().unwrap().remove(key);
        assert!(removed.is_some(), "{case}");
        fs::write(&path, config.to_string()).unwrap();
        let engine = engine_of(copy.path(), exact("cpu"), None);
        assert_golden(&engine, &prompts(case)[3], BAR, case);
    }
}

#[test]
fn position_ids_are_as_in_transformers() {
    for case in CASES.iter().flat_map(|case| prompts(case)) {
        let len = case.tokens.len() + case.answer.len();
        let axis = |axis: usize| (0..len).map(move |index| (index, axis));
        let ids = (0..3).flat_map(axis).map(|(index, axis)| case.images.position_ids(index)[axis]);
        assert_eq!(ids.collect::<Vec<_>>(), case.ints("position_ids"), "{}", case.name);
        assert_eq!(case.tokens, case.ints("ids"), "{}", case.name);
    }
}

/// Collects logits.
#[derive(Default)]
struct Rows(Vec<f32>);

impl RowSink for Rows {
    fn row(&mut self, _: usize, values: &[f32]) {
        self.0.extend_from_slice(values);
    }
}

#[test]
fn two_sequences_with_images_in_one_step_equal_each_alone() {
    for case in CASES {
        let prompts = prompts(case);
        let engine = engine(case, exact("cpu"), None);
        let [text, between, two] = [0, 2, 3].map(|i| &prompts[i]);
        let mut sessions = [(); 3].map(|()| engine.session().unwrap());
        let mut rows = [(); 3].map(|()| Rows::default());
        let all = sessions.iter_mut().zip([between, text, two]).zip(&mut rows);
        let mut entries: Vec<_> = all
            .map(|((session, case), rows)| {
                let entry = BatchEntry::new(session, &case.tokens).images(&case.images);
                entry.each_row(rows as &mut dyn RowSink)
            })
            .collect();
        engine.step(&mut entries, &mut StepControl::default()).unwrap();
        drop(sessions);
        for (case, rows) in [between, text, two].into_iter().zip(&rows) {
            let mut alone = engine.session().unwrap();
            let expected = feed(&mut alone, case.prompt(), &mut Seen::default());
            assert!(rows.0 == expected, "{}", case.name);
        }
    }
}

#[test]
fn a_decode_step_beside_an_image_equals_each_alone() {
    for case in CASES {
        let prompts = prompts(case);
        let engine = engine(case, exact("cpu"), None);
        let [one, two] = [1, 3].map(|i| &prompts[i]);
        let mut answering = engine.session().unwrap();
        sync(&mut answering, one.prompt());
        let (mut prefilled, mut rows) =
            (engine.session().unwrap(), [(); 2].map(|()| Rows::default()));
        let [of_answer, of_prompt] = &mut rows;
        let mut entries = [
            BatchEntry::new(&mut answering, &one.answer[..1])
                .each_row(of_answer as &mut dyn RowSink),
            BatchEntry::new(&mut prefilled, &two.tokens)
                .images(&two.images)
                .each_row(of_prompt as &mut dyn RowSink),
        ];
        engine.step(&mut entries, &mut StepControl::default()).unwrap();
        let mut alone = engine.session().unwrap();
        sync(&mut alone, one.prompt());
        drop((answering, prefilled));
        assert!(rows[0].0 == decode(&mut alone, &one.answer[..1]));
        let mut alone = engine.session().unwrap();
        assert!(rows[1].0 == feed(&mut alone, two.prompt(), &mut Seen::default()));
    }
}

#[test]
fn a_session_goes_on_with_its_images_after_forks_marks_and_snapshots() {
    for case in CASES {
        let prompts = prompts(case);
        let engine = engine(case, exact("cpu"), Some(7));
        let case = &prompts[2];
        let mut session = engine.session().unwrap();
        sync(&mut session, case.prompt());
        let mark = session.mark().unwrap();
        let expected = decode(&mut session, &case.answer);
        let mut fork = engine.session().unwrap();
        fork.rewind(&mark).unwrap();
        assert!(decode(&mut fork, &case.answer) == expected);
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("session");
        session.rewind(&mark).unwrap();
        session.snapshot(&file, SnapshotOptions::default()).unwrap();
        drop(session);
        fork.reset().unwrap();
        fork.restore(&file).unwrap();
        assert!(decode(&mut fork, &case.answer) == expected);
        // The next turn has the same images.
        let longer = [&case.tokens[..], &case.answer[..1], &[5, 6]].concat();
        let prompt = Prompt::new(&longer, &case.images);
        fork.restore(&file).unwrap();
        let synced = sync(&mut fork, prompt);
        assert_eq!((synced.reused, synced.computed), (case.tokens.len(), 3));
        let continued = fork.logits().to_vec();
        fork.reset().unwrap();
        sync(&mut fork, prompt);
        assert!(fork.logits() == continued);
    }
}

#[test]
fn another_picture_is_another_prompt() {
    for name in CASES {
        let prompts = prompts(name);
        let engine = engine(name, exact("cpu"), Some(5));
        let [one, other] = [1, 4].map(|i| &prompts[i]);
        let fresh = |case: &PromptCase| {
            let mut session = engine.session().unwrap();
            session
                .feed(case.prompt(), Logits::Last, &mut StepControl::default(), &mut |_, _| {})
                .unwrap();
            session.logits().to_vec()
        };
        let mut session = engine.session().unwrap();
        sync(&mut session, one.prompt());
        // Texts are the same up to the image, whose placeholders are, too.
        let start =
            one.tokens.iter().zip(&other.tokens).position(|(a, b)| *a == PLACEHOLDER && a == b);
        let synced = sync(&mut session, other.prompt());
        assert!(synced.reused <= start.unwrap(), "{synced:?}");
        assert!(session.logits() == fresh(other));
        // The first picture is found again, whole.
        let synced = sync(&mut session, one.prompt());
        assert_eq!((synced.reused, synced.computed), (one.tokens.len(), 0), "{synced:?}");
        assert!(session.logits() == fresh(one));
    }
}

#[test]
fn truncation_never_ends_inside_an_image() {
    let prompts = prompts("qwen3_vl_moe");
    let engine = engine("qwen3_vl_moe", exact("cpu"), None);
    let case = &prompts[1];
    let start = case.tokens.iter().position(|token| *token == PLACEHOLDER).unwrap();
    let mut session = engine.session().unwrap();
    sync(&mut session, case.prompt());
    let expected = session.logits().to_vec();
    session.truncate(start + 3, &mut StepControl::default()).unwrap();
    assert_eq!(session.tokens().len(), start);
    sync(&mut session, case.prompt());
    assert!(session.logits() == expected);
}

#[test]
fn text_has_the_same_bits_with_a_tower_and_without() {
    let name = "qwen3_5_moe";
    let copy = tempfile::tempdir().unwrap();
    copy_folder(&folder(name), copy.path());
    let file = copy.path().join("model.safetensors");
    let tensors = read_tensors(&file);
    let of_text = tensors.iter().filter(|(name, _)| !name.contains(".visual."));
    write_tensors(&file, of_text);
    let prompt: Vec<u32> = (1..40).collect();
    let logits = |folder: &Path, images: Option<ImageOptions>| {
        let options = EngineOptions::default().device(exact("cpu")).images(images);
        let checkpoint = Checkpoint::open(folder).unwrap();
        let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
        assert_eq!(engine.images().is_some(), folder != copy.path());
        crate::common::feed(&mut engine.session().unwrap(), &prompt, None)
    };
    let images = || Some(ImageOptions::default().device(exact("cpu")));
    assert!(logits(&folder(name), images()) == logits(copy.path(), images()));
}

#[test]
fn a_model_with_a_damaged_processor_answers_text() {
    let copy = tempfile::tempdir().unwrap();
    copy_folder(&folder("qwen3_5_moe"), copy.path());
    fs::write(copy.path().join("preprocessor_config.json"), "{").unwrap();
    let options = EngineOptions::default().device(exact("cpu"));
    let options = options.images(Some(ImageOptions::default()));
    let checkpoint = Checkpoint::open(copy.path()).unwrap();
    let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
    assert!(engine.images().is_none());
    let notes = engine.notes().join("\n");
    assert!(notes.contains("no images") && notes.contains("preprocessor_config.json"), "{notes}");
    crate::common::feed(&mut engine.session().unwrap(), &[1, 2, 3], None);
}

#[test]
fn images_that_do_not_fit_are_refused() {
    let prompts = prompts("qwen3_vl_moe");
    let case = &prompts[1];
    let engine = engine("qwen3_5_moe", exact("cpu"), None);
    let mut session = engine.session().unwrap();
    let refused = |session: &mut Session, prompt: Prompt<'_>| {
        session.sync(prompt, &mut StepControl::default()).unwrap_err().to_string()
    };
    let error = refused(&mut session, case.prompt());
    assert!(error.contains("0 rows for DeepStack, got 64 and 2"), "{error}");
    let text = Golden::read("qwen3_moe_hub").folder;
    let text = crate::common::engine(&text, exact("cpu"), MemoryRequest::default());
    let mut images = PromptImages::default();
    images.push(1, [0; 32], Arc::new(ImageRows::new([1, 1], 64, vec![0.0; 64], Vec::new())));
    let error = refused(&mut text.session().unwrap(), Prompt::new(&[1, 2, 3], &images));
    assert!(error.contains("the model takes none"), "{error}");
    let own = self::engine("qwen3_vl_moe", exact("cpu"), None);
    let first = case.tokens.iter().position(|token| *token == PLACEHOLDER).unwrap();
    let cut = Prompt::new(&case.tokens[..=first], &case.images);
    let error = refused(&mut own.session().unwrap(), cut);
    assert!(error.contains("it ends at token"), "{error}");
    let words = vec![1; case.tokens.len()];
    let error = refused(&mut own.session().unwrap(), Prompt::new(&words, &case.images));
    assert!(error.contains("expected placeholders under it, got token 1"), "{error}");
    // The states of the session's own images are there, other images need their rows.
    let mut session = own.session().unwrap();
    sync(&mut session, case.prompt());
    let images = session.images();
    let synced = sync(&mut session, Prompt::new(&[&case.tokens[..], &[5]].concat(), &images));
    assert_eq!(synced.computed, 1);
    let other = self::engine("qwen3_vl_moe", exact("cpu"), None);
    let error = refused(&mut other.session().unwrap(), Prompt::new(&case.tokens, &images));
    assert!(error.contains("expected its rows"), "{error}");
}
