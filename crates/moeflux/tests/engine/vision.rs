//! Vision towers against transformers 5.24.0 (torch 2.15.0, f32): random checkpoints in published
//! layouts, of which the towers are kept.

use std::{
    fs,
    path::{Path, PathBuf},
};

use moeflux::{
    Checkpoint, Error, StepControl,
    runtime::{CancelToken, DeviceOptions},
    vision::{ImageData, ImageLimits, ImageRows, PixelValues, Processor, VisionTower},
};
use safetensors::{Dtype, SafeTensors, serialize, tensor::TensorView};

use crate::common::{difference, exact, gpu};

const CASES: [&str; 2] = ["qwen3_5_moe", "qwen3_vl_moe"];

fn folder(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/vision").join(case)
}

fn open(folder: &Path, device: &DeviceOptions) -> Result<Option<VisionTower>, Error> {
    VisionTower::open(&Checkpoint::open(folder)?, device, &mut |_| ())
}

/// Pixel values of the images of a prompt.
fn pixels(case: &str, prompt: &str) -> Vec<PixelValues> {
    let names = fs::read(folder(case).join("images.json")).unwrap();
    let names: serde_json::Value = serde_json::from_slice(&names).unwrap();
    let processor = Processor::open(&folder(case)).unwrap();
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vision/tests/data/images");
    let of_file = |name: &serde_json::Value| {
        let bytes = fs::read(images.join(name.as_str().unwrap())).unwrap();
        let image = ImageData::decode(&bytes, &ImageLimits::default()).unwrap();
        processor.process(&image).unwrap()
    };
    names[prompt].as_array().unwrap().iter().map(of_file).collect()
}

fn rows(tower: &mut VisionTower, image: &PixelValues) -> ImageRows {
    tower.rows(image, &mut StepControl::default()).unwrap()
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
    let is_deepstack = |name: &&&String| name.starts_with("one.deepstack");
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
    let renamed = file.tensors().into_iter().map(|(name, tensor)| {
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
    let cancelled = tower.rows(&image, &mut control);
    assert!(matches!(cancelled, Err(Error::Cancelled)), "{cancelled:?}");
    assert_eq!(shares, [0.0]);
    assert!(rows(&mut tower, &image) == expected);
    // Patches of another processor are an error.
    let mut other = image.clone();
    other.block = 1;
    let error = tower.rows(&other, &mut StepControl::default()).unwrap_err().to_string();
    assert!(error.contains("preprocessor_config.json") && error.contains("blocks of 1"), "{error}");
}

#[test]
fn towers_that_are_missing_or_damaged_are_told_apart() {
    let case = folder(CASES[1]);
    let config: serde_json::Value =
        serde_json::from_slice(&fs::read(case.join("config.json")).unwrap()).unwrap();
    let copy = tempfile::tempdir().unwrap();
    fs::copy(case.join("model.safetensors"), copy.path().join("model.safetensors")).unwrap();
    let opened = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut changed = config.clone();
        change(&mut changed);
        fs::write(copy.path().join("config.json"), changed.to_string()).unwrap();
        open(copy.path(), &exact("cpu")).map(|tower| tower.is_some())
    };
    assert!(opened(&|_| ()).unwrap());
    assert!(!opened(&|config| config["vision_config"] = serde_json::Value::Null).unwrap());
    let cases: [(&str, serde_json::Value, &str); 11] = [
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
