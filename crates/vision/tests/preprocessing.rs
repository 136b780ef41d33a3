//! Decoding and pre-processing against transformers 5.24.0 with torchvision 0.29.2 and Pillow
//! 13.0.0: 29 files of every kind that users send, and the processors of published checkpoints.
//!
//! `data/preprocessing.json` has, for each file, sums and samples of the decoded bytes, and for
//! each processor grid, mean, rms and samples of the values. Values of lossless files are equal,
//! and those of lossy WebP, which has one decoding; JPEG leaves the rounding to decoders.

#![allow(clippy::unwrap_used)]

use std::{fs, path::PathBuf};

use moeflux_vision::{ImageData, ImageLimits, ImageSize, PixelValues, Processor};
use serde_json::{Map, Value};

/// 16-bit grey, which Pillow clips at 255: only sizes are comparable.
const CLIPPED_BY_PILLOW: &str = "grey16.png";

/// Largest distance from the mean of a decoded JPEG, in steps of 8 bits.
const LOSSY_MEAN: f64 = 1.0;

/// Largest distance of a value of a scaled JPEG, in steps of 8 bits.
const LOSSY_STEPS: f64 = 12.0;

fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

fn decode(name: &str) -> ImageData {
    let bytes = fs::read(data("images").join(name)).unwrap();
    ImageData::decode(&bytes, &ImageLimits::default()).unwrap()
}

fn expected() -> Map<String, Value> {
    serde_json::from_slice(&fs::read(data("preprocessing.json")).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|n| n.as_f64().unwrap()).collect()
}

/// Samples of a list, and the indices of these.
fn sampled<'a>(expected: &'a Value, list: &str) -> impl Iterator<Item = (usize, f64)> + use<'a> {
    let at = if list == "rgb" { "rgb_at" } else { "at" };
    numbers(&expected[at]).into_iter().map(|at| at as usize).zip(numbers(&expected[list]))
}

#[test]
fn decoded_bytes_are_those_of_pillow() {
    let expected = expected();
    assert_eq!(expected.len(), 29);
    for (name, expected) in &expected {
        let image = decode(name);
        let ImageSize { width, height } = image.size();
        assert_eq!([width, height].map(f64::from)[..], numbers(&expected["size"]), "{name}");
        if name == CLIPPED_BY_PILLOW {
            let mean = image.rgb().iter().map(|v| f64::from(*v)).sum::<f64>();
            assert!((20.0..235.0).contains(&(mean / image.rgb().len() as f64)), "{name} is white");
            continue;
        }
        let is_lossy = name.ends_with(".jpg");
        let pixels = image.size().pixels() as f64;
        for (channel, sum) in numbers(&expected["rgb_sum"]).into_iter().enumerate() {
            let samples = image.rgb().iter().skip(channel).step_by(3);
            let found: f64 = samples.map(|v| f64::from(*v)).sum();
            let tolerance = if is_lossy { LOSSY_MEAN * pixels } else { 0.0 };
            assert!((found - sum).abs() <= tolerance, "{name}: channel {channel}: {found} {sum}");
        }
        for (at, sample) in sampled(expected, "rgb") {
            let tolerance = if is_lossy { LOSSY_STEPS } else { 0.0 };
            let found = f64::from(image.rgb()[at]);
            assert!((found - sample).abs() <= tolerance, "{name}: byte {at}: {found} {sample}");
        }
    }
}

/// Distances of values from the expected ones.
struct Distance {
    mean: f64,
    rms: f64,
    sample: f64,
}

fn distance(found: &PixelValues, expected: &Value) -> Distance {
    let values = || found.values.iter().map(|v| f64::from(*v));
    let count = found.values.len() as f64;
    let mean = values().sum::<f64>() / count;
    let rms = (values().map(|v| v * v).sum::<f64>() / count).sqrt();
    let number = |key: &str| expected[key].as_f64().unwrap();
    let samples =
        sampled(expected, "values").map(|(at, v)| f64::from((found.values[at] - v as f32).abs()));
    Distance {
        mean: (mean - number("mean")).abs(),
        rms: (rms - number("rms")).abs(),
        sample: samples.fold(0.0, f64::max),
    }
}

#[test]
fn values_are_those_of_transformers() {
    let (mut cases, mut steps) = (0, 0.0);
    for (name, expected) in &expected() {
        let image = decode(name);
        for (processor, expected) in expected["processors"].as_object().unwrap() {
            let case = format!("{name}, {processor}");
            let found = Processor::open(&data("processors").join(processor)).unwrap();
            let found = found.process(&image).unwrap();
            assert_eq!(found.grid.map(f64::from)[..], numbers(&expected["grid"]), "{case}");
            assert_eq!(found.rows as u32, found.grid.iter().product::<u32>(), "{case}");
            assert_eq!(found.width as u64, expected["width"].as_u64().unwrap(), "{case}");
            assert_eq!(found.values.len(), found.rows * found.width, "{case}");
            if let Some(tokens) = expected["tokens"].as_u64() {
                assert_eq!(u64::from(found.tokens), tokens, "{case}");
            }
            cases += 1;
            let distance = distance(&found, expected);
            // A step of 8 bits is 1/255, divided by the deviation.
            let step = match &processor[..] {
                "gemma4_70" | "gemma4_280" => 1.0 / 255.0,
                "glm4v" => 1.0 / 255.0 / 0.2613,
                _ => 1.0 / 255.0 / 0.5,
            };
            match &name[..] {
                CLIPPED_BY_PILLOW => {}
                name if name.ends_with(".jpg") => {
                    steps = f64::max(steps, distance.sample / step);
                    assert!(distance.mean <= LOSSY_MEAN * step, "{case}: {}", distance.mean);
                    assert!(distance.sample <= LOSSY_STEPS * step, "{case}: {}", distance.sample);
                }
                _ => {
                    assert_eq!(distance.sample, 0.0, "{case}");
                    assert!(distance.mean <= 1e-7, "{case}: {}", distance.mean);
                    assert!(distance.rms <= 1e-7, "{case}: {}", distance.rms);
                }
            }
        }
    }
    assert_eq!(cases, 29 * 6);
    println!("largest distance of a value of a JPEG: {steps:.1} steps of 8 bits");
}
