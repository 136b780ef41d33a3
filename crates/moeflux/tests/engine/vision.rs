//! Vision towers against transformers 5.24.0 (torch 2.15.0, f32): random checkpoints in published
//! layouts, of which the towers are kept.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
};

use moeflux::{
    Checkpoint, Error, StepControl,
    base::SystemMemory,
    runtime::{CancelToken, DeviceOptions},
    vision::{
        ImageData, ImageDetail, ImageEncoder, ImageLimits, ImageOptions, ImageRows, PixelValues,
        PreparedImage, Processor, VisionTower,
    },
};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};
use serde_json::{Value, json};

use crate::common::{
    difference, exact, gpu, in_own_process,
    simulated_gpu::{Call, Card, Fault},
};

const CASES: [&str; 2] = ["qwen3_5_moe", "qwen3_vl_moe"];

fn folder(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/vision").join(case)
}

fn options(device: &DeviceOptions) -> ImageOptions {
    ImageOptions::default().device(device.clone())
}

fn open(folder: &Path, device: &DeviceOptions) -> Result<Option<VisionTower>, Error> {
    VisionTower::open(&Arc::new(Checkpoint::open(folder)?), options(device))
}

fn encoder(folder: &Path, options: ImageOptions) -> ImageEncoder {
    ImageEncoder::open(&Arc::new(Checkpoint::open(folder).unwrap()), options).unwrap().unwrap()
}

fn image_file(name: &str) -> Vec<u8> {
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vision/tests/data/images");
    fs::read(images.join(name)).unwrap()
}

/// Images of several sizes.
fn prepared(encoder: &ImageEncoder) -> [Arc<PreparedImage>; 3] {
    let read = |name| encoder.read(&image_file(name), ImageDetail::Auto).unwrap();
    ["gradient.png", "wide.png", "text.png"].map(read)
}

/// Copies a case with other fields in a file.
fn changed(case: &str, into: &Path, file: &str, change: impl Fn(&mut Value)) {
    for name in ["config.json", "preprocessor_config.json", "model.safetensors"] {
        fs::copy(folder(case).join(name), into.join(name)).unwrap();
    }
    let mut fields = serde_json::from_slice(&fs::read(into.join(file)).unwrap()).unwrap();
    change(&mut fields);
    fs::write(into.join(file), fields.to_string()).unwrap();
}

/// Pixel values of the images of a prompt.
fn pixels(case: &str, prompt: &str) -> Vec<PixelValues> {
    let names = fs::read(folder(case).join("images.json")).unwrap();
    let names: Value = serde_json::from_slice(&names).unwrap();
    let processor = Processor::open(&folder(case)).unwrap();
    let of_file = |name: &Value| {
        let bytes = image_file(name.as_str().unwrap());
        let image = ImageData::decode(&bytes, &ImageLimits::default()).unwrap();
        processor.process(&image).unwrap()
    };
    names[prompt].as_array().unwrap().iter().map(of_file).collect()
}

fn rows(tower: &mut VisionTower, image: &PixelValues) -> ImageRows {
    tower.rows(&[image], &mut StepControl::default()).unwrap().remove(0)
}

/// Asserts that the rows of both prompts equal the golden's rows.
fn assert_golden(case: &str, tower: &mut VisionTower, tolerance: f64) {
    let golden = fs::read(folder(case).join("golden.safetensors")).unwrap();
    let golden = SafeTensors::deserialize(&golden).unwrap();
    let expected = |name: &str| -> Vec<f32> {
        let bytes = golden.tensor(name).unwrap().data().chunks_exact(4);
        bytes.map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    for prompt in ["one", "between"] {
        let images: Vec<_> = pixels(case, prompt).iter().map(|image| rows(tower, image)).collect();
        let close = |name: &str, values: Vec<&[f32]>| {
            let off = difference(&values.concat(), &expected(&format!("{prompt}.{name}")));
            assert!(off < tolerance, "{case}, {prompt}.{name}: {off:e} of the rms");
        };
        close("embeds", images.iter().map(|image| &image.values[..]).collect());
        for i in 0..images[0].deepstack.len() {
            let name = format!("deepstack.{i}");
            close(&name, images.iter().map(|image| &image.deepstack[i][..]).collect());
        }
    }
    let is_deepstack = |name: &&&str| name.starts_with("one.deepstack");
    assert_eq!(
        tower.blueprint().deepstack.len(),
        golden.names().iter().filter(is_deepstack).count()
    );
}

#[test]
fn towers_are_those_of_transformers() {
    for case in CASES {
        // Plain weights are multiplied by f32 activations on a processor's fast path, too.
        let fast = DeviceOptions::default().name("cpu");
        for (device, tolerance) in [
            (Some(exact("cpu")), 1e-4),
            (Some(exact("reference")), 1e-4),
            (Some(fast), 1e-4),
            (gpu(true), 1e-4),
            (gpu(false), 2e-2),
        ] {
            let Some(device) = device else { continue };
            assert_golden(case, &mut open(&folder(case), &device).unwrap().unwrap(), tolerance);
        }
    }
}

/// mlx-vlm names the module otherwise, and stores patch embeddings with the channels last.
#[test]
fn a_tower_in_the_layout_of_mlx_is_the_same() {
    let case = CASES[0];
    let copy = tempfile::tempdir().unwrap();
    fs::copy(folder(case).join("config.json"), copy.path().join("config.json")).unwrap();
    let file = fs::read(folder(case).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let of_tower = file.tensors().into_iter().filter(|(name, _)| name.contains(".visual."));
    let renamed = of_tower.map(|(name, tensor)| {
        let (mut shape, mut data) = (tensor.shape().to_vec(), tensor.data().to_vec());
        if let [rows, channels, frames, side, _] = shape[..] {
            data.clear();
            let pixels = side * side;
            for row in tensor.data().chunks_exact(2 * channels * frames * pixels) {
                for i in 0..frames * pixels {
                    let first = |c: usize| 2 * (c * frames * pixels + i);
                    (0..channels).for_each(|c| data.extend(&row[first(c)..first(c) + 2]));
                }
            }
            shape = vec![rows, frames, side, side, channels];
        }
        (name.replace("model.visual.", "vision_tower."), shape, data)
    });
    let renamed: Vec<_> = renamed.collect();
    let views = renamed.iter().map(|(name, shape, data)| {
        (name, TensorView::new(Dtype::BF16, shape.clone(), data).unwrap())
    });
    fs::write(copy.path().join("model.safetensors"), serialize(views, None).unwrap()).unwrap();
    assert_golden(case, &mut open(copy.path(), &exact("cpu")).unwrap().unwrap(), 1e-4);
}

#[test]
fn rows_of_an_image_depend_on_no_other_and_on_no_threads() {
    let case = CASES[1];
    let images = pixels(case, "between");
    let one = pixels(case, "one").remove(0);
    for device in [Some(exact("cpu")), Some(DeviceOptions::default().name("cpu")), gpu(false)] {
        let Some(device) = device else { continue };
        let mut tower = open(&folder(case), &device.clone().threads(1)).unwrap().unwrap();
        let expected = rows(&mut tower, &one);
        let mut tower = open(&folder(case), &device.threads(3)).unwrap().unwrap();
        let smaller = rows(&mut tower, &images[1]);
        rows(&mut tower, &images[0]);
        assert!(rows(&mut tower, &one) == expected, "after others");
        assert!(rows(&mut tower, &images[1]) == smaller, "again");
    }
}

#[test]
fn a_tower_that_is_cancelled_computes_the_next_image() {
    let mut tower = open(&folder(CASES[0]), &exact("cpu")).unwrap().unwrap();
    let image = pixels(CASES[0], "one").remove(0);
    let (expected, cancel, mut shares) =
        (rows(&mut tower, &image), CancelToken::default(), Vec::new());
    let mut progress = |share| {
        shares.push(share);
        cancel.cancel();
    };
    let mut control = StepControl::default().cancel(&cancel).progress(&mut progress);
    let cancelled = tower.rows(&[&image], &mut control);
    assert!(matches!(cancelled, Err(Error::Cancelled)), "{cancelled:?}");
    assert_eq!(shares, [0.0]);
    assert!(rows(&mut tower, &image) == expected);
    // Patches of another processor are an error.
    let mut other = image.clone();
    other.block = 1;
    let error = tower.rows(&[&other], &mut StepControl::default()).unwrap_err().to_string();
    assert!(error.contains("preprocessor_config.json") && error.contains("blocks of 1"), "{error}");
}

#[test]
fn towers_that_are_missing_or_damaged_are_told_apart() {
    let case = folder(CASES[1]);
    let config: Value =
        serde_json::from_slice(&fs::read(case.join("config.json")).unwrap()).unwrap();
    let copy = tempfile::tempdir().unwrap();
    fs::copy(case.join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
    let opened = |change: &dyn Fn(&mut Value)| {
        let mut changed = config.clone();
        change(&mut changed);
        fs::write(copy.path().join("config.json"), changed.to_string()).unwrap();
        open(copy.path(), &exact("cpu")).map(|tower| tower.is_some())
    };
    assert!(opened(&|_| ()).unwrap());
    assert!(!opened(&|config| config["vision_config"] = Value::Null).unwrap());
    let cases: [(&str, Value, &str); 11] = [
        ("depth", 5.into(), "blocks.4.norm1.weight"),
        ("depth", 0.into(), "\"depth\": expected 1 to"),
        ("hidden_size", 72.into(), "patch_embed.proj.weight"),
        ("hidden_size", 60.into(), "multiple of 4 * \"num_heads\""),
        ("num_heads", (1_u64 << 40).into(), "\"num_heads\": expected 1 to"),
        ("num_position_embeddings", 35.into(), "expected a square, got 35"),
        ("hidden_act", "silu".into(), "expected \"gelu_pytorch_tanh\", got \"silu\""),
        ("deepstack_visual_indexes", vec![0, 4].into(), "indexes below 4, got [0, 4]"),
        ("deepstack_visual_indexes", vec![2, 2].into(), "expected ascending indexes"),
        ("hidden_size", (1 << 12).into(), "heads of at most 512 elements, got 2048"),
        ("patch_size", "8".into(), "invalid type"),
    ];
    for (key, value, problem) in cases {
        let error = opened(&|config| config["vision_config"][key] = value.clone()).unwrap_err();
        assert!(error.to_string().contains(problem), "{key}: {error}");
    }
    let error = opened(&|config| config["model_type"] = "step3p7".into()).unwrap_err().to_string();
    assert!(error.contains("the vision tower of \"step3p7\" is not supported"), "{error}");
    // An export of the text alone.
    let empty = serialize::<&str, TensorView<'_>, _>([], None).unwrap();
    fs::write(copy.path().join("model.safetensors"), empty).unwrap();
    assert!(!opened(&|_| ()).unwrap());
}

/// The devices on which images are computed, and whether the tower is resident.
fn towers() -> impl Iterator<Item = (DeviceOptions, bool)> {
    let devices = [Some(exact("cpu")), Some(DeviceOptions::default().name("cpu")), gpu(false)];
    devices.into_iter().flatten().flat_map(|device| [(device.clone(), false), (device, true)])
}

#[test]
fn rows_of_several_images_and_of_a_resident_tower_have_the_same_bits() {
    for case in CASES {
        let mut alone: Vec<(DeviceOptions, Vec<ImageRows>)> = Vec::new();
        for (device, is_resident) in towers() {
            let encoder = encoder(&folder(case), options(&device).resident(is_resident));
            let images = prepared(&encoder);
            let images = images.each_ref().map(|image| &**image);
            let control = &mut StepControl::default();
            let together = encoder.rows_of(&images, control).unwrap();
            let together: Vec<_> = together.iter().map(|rows| (**rows).clone()).collect();
            if is_resident {
                let expected = &alone.last().unwrap().1;
                assert!(together == *expected, "{case}, {:?}: a resident tower", device.name);
                continue;
            }
            let mut tower = open(&folder(case), &device).unwrap().unwrap();
            let expected: Vec<_> = images.map(|image| rows(&mut tower, &image.pixels)).into();
            assert!(together == expected, "{case}, {:?}: several images", device.name);
            for (image, rows) in images.iter().zip(&together) {
                assert_eq!((image.grid, image.tokens() as usize), (rows.grid, rows.tokens()));
            }
            alone.push((device, expected));
        }
    }
}

#[test]
fn cached_images_are_not_computed_and_the_oldest_is_dropped() {
    let case = folder(CASES[0]);
    let [a, b, c] = prepared(&encoder(&case, options(&exact("cpu"))));
    let rows = encoder(&case, options(&exact("cpu")));
    let control = &mut StepControl::default();
    let bytes = |image: &PreparedImage, control: &mut StepControl<'_>| {
        rows.rows(image, control).unwrap().bytes() as u64
    };
    let largest = [&a, &b, &c].map(|image| bytes(image, control)).into_iter().max().unwrap();
    // Two images have room, whichever, three have not.
    let encoder = encoder(&case, options(&exact("cpu")).cache_bytes(2 * (largest + 512)));
    let mut computed = 0;
    let mut expect = |image: &PreparedImage, is_new: bool| {
        let found = encoder.rows(image, &mut StepControl::default()).unwrap();
        computed += u64::from(is_new);
        assert_eq!(encoder.stats().computed, computed);
        assert!(Arc::ptr_eq(&found, &encoder.cached(image.digest()).unwrap()));
    };
    expect(&a, true);
    expect(&b, true);
    expect(&a, false);
    expect(&c, true);
    assert!(encoder.cached(b.digest()).is_none());
    expect(&a, false);
    expect(&b, true);
    assert!(encoder.cached(c.digest()).is_none());
    assert_eq!(encoder.stats().hits, 2);
    // The same image twice in one call.
    encoder.rows_of(&[&c, &c], control).unwrap();
    assert_eq!((encoder.stats().computed, encoder.stats().hits), (5, 3));
}

#[test]
fn calls_share_a_tower_and_survive_each_other() {
    let case = folder(CASES[0]);
    // Rows that are larger than the cache are not kept.
    let encoder = encoder(&case, options(&exact("cpu")).cache_bytes(100));
    let [a, b, _] = prepared(&encoder);
    let expected = encoder.rows(&a, &mut StepControl::default()).unwrap();
    assert!(encoder.cached(a.digest()).is_none());
    let (cancel, cancel_waiting) = (CancelToken::new(), CancelToken::new());
    let (started, starts) = mpsc::channel();
    let (resume, resumes) = mpsc::channel();
    thread::scope(|scope| {
        let (encoder, a, b, cancel) = (&encoder, &a, &b, &cancel);
        scope.spawn(move || {
            let mut progress = |share| {
                if share == 0.0 {
                    started.send(()).unwrap();
                    resumes.recv().unwrap();
                }
            };
            let mut control = StepControl::default().cancel(cancel).progress(&mut progress);
            let cancelled = encoder.rows(a, &mut control);
            assert!(matches!(cancelled, Err(Error::Cancelled)), "{cancelled:?}");
        });
        starts.recv().unwrap();
        // Returns although the tower is taken, whether it waits at that moment or not.
        let waiting =
            scope.spawn(|| encoder.rows(b, &mut StepControl::default().cancel(&cancel_waiting)));
        cancel_waiting.cancel();
        assert!(matches!(waiting.join().unwrap(), Err(Error::Cancelled)));
        cancel.cancel();
        let next = scope.spawn(|| encoder.rows(a, &mut StepControl::default()));
        resume.send(()).unwrap();
        assert!(next.join().unwrap().unwrap() == expected);
    });
    let panics = thread::scope(|scope| {
        let call = || {
            let mut progress = |_| panic!("a callback of a test");
            encoder.rows(&b, &mut StepControl::default().progress(&mut progress))
        };
        scope.spawn(call).join()
    });
    assert!(panics.is_err());
    encoder.rows(&b, &mut StepControl::default()).unwrap();
    assert_eq!(encoder.stats().computed, 3);
}

#[test]
fn a_device_that_fails_is_opened_again() {
    for is_resident in [false, true] {
        let (wrap, asked) = Card::OWN.wrap();
        let options = options(&exact("cpu")).resident(is_resident).wrap_device(wrap);
        let encoder = encoder(&folder(CASES[1]), options.cache_bytes(0));
        let [image, ..] = prepared(&encoder);
        let expected = encoder.rows(&image, &mut StepControl::default()).unwrap();
        asked.lock().unwrap().fault = Some(Fault { call: Call::Run, after: 20, is_loss: true });
        let error = encoder.rows(&image, &mut StepControl::default()).unwrap_err().to_string();
        assert!(error.contains("the vision tower"), "{error}");
        asked.lock().unwrap().is_lost = false;
        assert!(encoder.rows(&image, &mut StepControl::default()).unwrap() == expected);
    }
}

#[test]
fn images_are_limited_by_options_and_by_detail() {
    let copy = tempfile::tempdir().unwrap();
    changed(CASES[0], copy.path(), "preprocessor_config.json", |fields| {
        fields["size"]["longest_edge"] = json!(1 << 24);
    });
    let encoder = |options| encoder(copy.path(), options);
    let on_card = || options(&exact("cpu")).wrap_device(Card::OWN.wrap().0);
    assert_eq!(encoder(options(&exact("cpu"))).max_tokens(), 256);
    assert_eq!(encoder(on_card()).max_tokens(), 4_096);
    assert_eq!(encoder(options(&exact("cpu")).max_tokens(1 << 20)).max_tokens(), 1 << 16);
    let page = image_file("page.png");
    let tokens = |options, detail| {
        let image = encoder(options).read(&page, detail).unwrap();
        (image.tokens(), image.note())
    };
    let (own, note) = tokens(options(&exact("cpu")).max_tokens(1 << 20), ImageDetail::High);
    assert!(own > 256 && note.is_none(), "{own}, {note:?}");
    assert_eq!(tokens(on_card(), ImageDetail::High), (own, None));
    let (low, note) = tokens(on_card(), ImageDetail::Low);
    assert!((200..=256).contains(&low) && note.is_none(), "{low}, {note:?}");
    let (limited, note) = tokens(options(&exact("cpu")), ImageDetail::Auto);
    assert_eq!(limited, low);
    let note = note.unwrap();
    assert!(note.ends_with(&format!("{low} tokens; --image-max-tokens raises it")), "{note}");
    let (lower, note) = tokens(on_card().max_tokens(100), ImageDetail::Low);
    assert!(lower <= 100 && note.is_some(), "{lower}, {note:?}");
    let error = encoder(on_card()).read(b"no image", ImageDetail::Low).unwrap_err();
    assert!(matches!(error, Error::Image(_)), "{error}");
}

/// Writes a case whose tower has `depth` blocks with MLPs of `inner` values, all zero.
fn vast(case: &str, into: &Path, depth: usize, inner: usize) {
    changed(case, into, "config.json", |config| {
        config["vision_config"]["depth"] = json!(depth);
        config["vision_config"]["intermediate_size"] = json!(inner);
    });
    let file = fs::read(folder(case).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&file).unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, tensor) in file.tensors() {
        let copies = if name.contains(".blocks.0.") { depth } else { 1 };
        let is_other = name.contains(".blocks.") && copies == 1;
        for copy in (0..copies).filter(|_| !is_other) {
            let wide = |side: &usize| if *side == 80 { inner } else { *side };
            let shape: Vec<usize> = tensor.shape().iter().map(wide).collect();
            let start = end;
            end += 2 * shape.iter().product::<usize>();
            let name = name.replace(".blocks.0.", &format!(".blocks.{copy}."));
            let offsets = [start, end];
            let info = json!({ "dtype": "BF16", "shape": shape, "data_offsets": offsets });
            header.insert(name, info);
        }
    }
    let mut header = Value::from(header).to_string();
    header += &" ".repeat(header.len().next_multiple_of(8) - header.len());
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.into_bytes());
    let path = into.join("model.safetensors");
    fs::write(&path, &bytes).unwrap();
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len((bytes.len() + end) as u64).unwrap();
}

#[cfg(target_os = "linux")]
#[test]
fn the_memory_of_a_run_is_planned_and_returned() {
    const SLACK: u64 = 8 << 20;
    if !in_own_process("vision::the_memory_of_a_run_is_planned_and_returned") {
        return;
    }
    let copy = tempfile::tempdir().unwrap();
    vast(CASES[0], copy.path(), 24, 1 << 14);
    // A resident tower is the second: its peak is higher.
    for is_resident in [false, true] {
        let options = options(&exact("cpu")).max_tokens(24).resident(is_resident);
        let encoder = encoder(copy.path(), options);
        let images = prepared(&encoder);
        let before = SystemMemory::now().resident;
        let images = images.each_ref().map(|image| &**image);
        encoder.rows_of(&images, &mut StepControl::default()).unwrap();
        let now = SystemMemory::now();
        let (peak, kept) = (now.peak - before, now.resident.saturating_sub(before));
        let memory = encoder.memory();
        let activations = memory.activations_at_max_tokens;
        if is_resident {
            let weights = memory.weights;
            assert!(kept > weights && peak < weights + activations + SLACK, "{peak}, {memory:?}");
        } else {
            let planned = memory.weights_in_passing + activations + SLACK;
            assert!(peak < planned && kept < SLACK, "{peak}, {kept} after it: {memory:?}");
            assert!(2 * planned < memory.weights, "a whole tower is within {planned}: {memory:?}");
        }
    }
}
