//! Tests of processors: files and defaults, fields that act, fields that are refused, digests.

use std::fs;

use moeflux_base::ImageError;
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;

const TYPES: [&str; 4] = ["qwen3_5_moe", "glm4v_moe", "gemma4", "kimi_k25"];

/// Processor of a folder with a config and a processor's file.
fn open(model_type: &str, file: &str, contents: &Value) -> Result<Processor, Error> {
    let folder = TempDir::new().unwrap();
    let config = json!({ "model_type": model_type }).to_string();
    fs::write(folder.path().join("config.json"), config).unwrap();
    fs::write(folder.path().join(file), contents.to_string()).unwrap();
    Processor::open(folder.path())
}

fn with(model_type: &str, contents: &Value) -> Result<Processor, Error> {
    open(model_type, "preprocessor_config.json", contents)
}

fn image(width: u32, height: u32) -> ImageData {
    let size = ImageSize { width, height };
    let rgb = (0..3 * size.pixels()).map(|i| (i * 37 % 251) as u8).collect();
    ImageData::from_rgb(size, rgb).unwrap()
}

fn values(processor: &Processor, image: &ImageData) -> PixelValues {
    processor.process(image).unwrap()
}

#[test]
fn fields_come_from_either_file_then_from_the_family() {
    let size = ImageSize { width: 400, height: 300 };
    let tokens = |processor: Processor| processor.layout(size).unwrap().tokens;
    let small = json!({ "max_soft_tokens": 70 });
    assert_eq!(tokens(with("gemma4", &json!({})).unwrap()), 266);
    assert_eq!(tokens(with("gemma4", &small).unwrap()), 63);
    let nested = json!({ "image_processor": small, "max_soft_tokens": 560 });
    assert_eq!(tokens(open("gemma4", "processor_config.json", &nested).unwrap()), 63);
    assert_eq!(tokens(open("gemma4", "processor_config.json", &small).unwrap()), 63);
    assert_eq!(tokens(open("gemma4", "other.json", &small).unwrap()), 266);
    let null = json!({ "image_processor": { "max_soft_tokens": null }, "max_soft_tokens": 70 });
    assert_eq!(tokens(open("gemma4", "processor_config.json", &null).unwrap()), 63);
    let limit = json!({ "media_proc_cfg": { "in_patch_limit": 100 } });
    assert_eq!(tokens(with("kimi_k25", &limit).unwrap()), 30);
    let old = json!({ "min_pixels": 3136, "max_pixels": 40_000 });
    let older = json!({ "size": { "min_pixels": 3136, "max_pixels": 40_000 } });
    let new = json!({ "size": { "shortest_edge": 3136, "longest_edge": 40_000 } });
    for file in [old, older, new] {
        assert_eq!(tokens(with("qwen3_vl_moe", &file).unwrap()), 35, "{file}");
    }
    for model_type in TYPES {
        let limited = with(model_type, &json!({})).unwrap().with_max_tokens(20);
        assert!(tokens(limited) <= 20, "{model_type}");
    }
}

#[test]
fn rescaling_normalization_and_scaling_can_be_off() {
    let image = image(32, 32);
    let first = |contents: Value| {
        let found = values(&with("qwen3_5_moe", &contents).unwrap(), &image);
        (found.grid, found.values[..3].to_vec())
    };
    let still = json!({ "do_resize": false });
    let set = |fields: Value| {
        let mut file = still.as_object().unwrap().clone();
        file.extend(fields.as_object().unwrap().clone());
        Value::Object(file)
    };
    // Red samples of the first pixels: 0, 111, 222.
    let value = |scale: fn(f32) -> f32| [0.0, 111.0, 222.0].map(scale).to_vec();
    assert_eq!(first(still.clone()), ([1, 2, 2], value(|v| (v - 127.5) / 127.5)));
    let plain = first(set(json!({ "do_normalize": false })));
    assert_eq!(plain.1, value(|v| v * (1.0 / 255.0)));
    let raw = first(set(json!({ "do_normalize": false, "do_rescale": false })));
    assert_eq!(raw.1, value(|v| v));
    let unscaled = first(set(json!({ "do_rescale": false })));
    assert_eq!(unscaled.1, value(|v| (v - 0.5) / 0.5));
    let own = set(json!({ "image_mean": [1, 2, 3], "image_std": [2, 2, 2], "rescale_factor": 1 }));
    assert_eq!(first(own).1, value(|v| (v - 1.0) / 2.0));
    let odd = with("qwen3_5_moe", &still).unwrap().process(&self::image(33, 32));
    assert!(matches!(odd, Err(Error::Image(ImageError::Size { width: 33, .. }))));
}

#[test]
fn numbers_of_files_are_not_trusted() {
    let cases = [
        ("qwen3_5_moe", "patch_size", json!(0)),
        ("qwen3_5_moe", "patch_size", json!(u64::MAX)),
        ("qwen3_5_moe", "patch_size", json!(-16)),
        ("qwen3_5_moe", "patch_size", json!("16")),
        ("qwen3_5_moe", "merge_size", json!(1.5)),
        ("qwen3_5_moe", "temporal_patch_size", json!(1_000)),
        ("qwen3_5_moe", "min_pixels", json!(1_u64 << 40)),
        ("qwen3_5_moe", "size.longest_edge", json!({ "longest_edge": [] })),
        ("qwen3_5_moe", "size", json!({ "shortest_edge": 9_000, "longest_edge": 8_000 })),
        ("qwen3_5_moe", "resample", json!(2)),
        ("qwen3_5_moe", "do_resize", json!("no")),
        ("glm4v_moe", "max_pixels", json!(0)),
        ("glm4v_moe", "image_mean", json!([0.5, 0.5])),
        ("glm4v_moe", "image_mean", json!([0.5, 0.5, 1e300])),
        ("glm4v_moe", "image_mean", json!(0.5)),
        ("glm4v_moe", "image_std", json!([1, 0, 1])),
        ("glm4v_moe", "image_std", json!([1e-44, 1, 1])),
        ("glm4v_moe", "image_std", json!([1, "NaN", 1])),
        ("glm4v_moe", "rescale_factor", json!(0)),
        ("glm4v_moe", "rescale_factor", json!(1e-200)),
        ("gemma4", "pooling_kernel_size", json!(0)),
        ("gemma4", "max_soft_tokens", json!(0)),
        ("gemma4", "do_normalize", json!(1)),
        ("kimi_k25", "in_patch_limit", json!(0)),
        ("kimi_k25", "patch_limit_on_one_side", json!(1_u64 << 60)),
        ("kimi_k25", "merge_kernel_size", json!([2, 2])),
        ("kimi_k25", "fixed_output_tokens", json!(256)),
        ("kimi_k25", "do_center_crop", json!(true)),
        ("qwen3_5_moe", "do_center_crop", json!(true)),
        ("qwen3_5_moe", "do_pad", json!(true)),
        ("glm4v_moe", "do_pad", json!(true)),
        ("gemma4", "do_pad", json!(true)),
    ];
    for (model_type, field, value) in cases {
        let contents = json!({ field.split('.').next().unwrap(): value });
        let error = with(model_type, &contents).unwrap_err().to_string();
        assert!(error.contains("preprocessor_config.json: "), "{error}");
        assert!(error.contains(&format!(" {field}: expected ")), "{field}: {error}");
        assert!(error.contains(", got ") && error.contains("; take this file from"), "{error}");
    }
}

#[test]
fn computations_that_are_off_are_no_other_computations() {
    for model_type in TYPES {
        for value in [json!(false), Value::Null] {
            let contents = json!({ "do_center_crop": value, "do_pad": value });
            with(model_type, &contents).unwrap();
        }
    }
    with("kimi_k25", &json!({ "do_pad": true })).unwrap();
}

#[test]
fn unusual_numbers_give_a_size_or_an_error() {
    let sides = [1_u32, 17, 256, 50_000];
    let extremes = [
        (
            "qwen3_5_moe",
            json!({
                "patch_size": 256,
                "merge_size": 16,
                "min_pixels": 1 << 25,
                "max_pixels": 1 << 30,
            }),
        ),
        (
            "qwen3_5_moe",
            json!({ "patch_size": 1, "merge_size": 1, "min_pixels": 1, "max_pixels": 1 }),
        ),
        ("glm4v_moe", json!({ "patch_size": 256, "merge_size": 16, "temporal_patch_size": 4 })),
        ("gemma4", json!({ "patch_size": 256, "max_soft_tokens": 1 << 20 })),
        ("gemma4", json!({ "patch_size": 1, "pooling_kernel_size": 1, "max_soft_tokens": 1 })),
        ("kimi_k25", json!({ "in_patch_limit": 1, "patch_limit_on_one_side": 1 })),
        ("kimi_k25", json!({ "patch_size": 256, "patch_limit_on_one_side": 1 << 20 })),
    ];
    for (model_type, contents) in extremes {
        let processor = with(model_type, &contents).unwrap();
        for (width, height) in sides.iter().flat_map(|w| sides.map(|h| (*w, h))) {
            if let Ok(layout) = processor.layout(ImageSize { width, height }) {
                let [_, rows, columns] = layout.grid.map(u64::from);
                let PatchOrder { patch, frames, .. } = processor.patches;
                let pixels = rows * columns * (patch * patch * frames) as u64;
                assert!(layout.tokens > 0 && pixels <= 1 << 25, "{contents}: {layout:?}");
            }
        }
    }
}

#[test]
fn files_that_are_none_are_refused_by_name() {
    let folder = TempDir::new().unwrap();
    let error = || Processor::open(folder.path()).unwrap_err().to_string();
    assert!(error().contains("config.json: cannot read the config"), "{}", error());
    let write = |name: &str, text: &str| fs::write(folder.path().join(name), text).unwrap();
    write("config.json", "{\"model_type\": \"qwen3_moe\"}");
    assert!(error().contains("model_type: expected a model whose images are read"), "{}", error());
    write("config.json", "{\"model_type\": 7}");
    assert!(error().contains("model_type: expected a text, got 7"), "{}", error());
    write("config.json", "{\"model_type\": \"gemma4\"}");
    for text in ["[]", "{\"patch_size\": 1", "\u{0}", "{\"patch_size\": 1e999}"] {
        write("processor_config.json", text);
        assert!(error().contains("processor_config.json: "), "{text}: {}", error());
    }
    fs::remove_file(folder.path().join("processor_config.json")).unwrap();
    Processor::open(folder.path()).unwrap();
    let file = |bytes, name: &str| TextFile { bytes, path: name.into() };
    let config = file(b"{\"model_type\": \"gemma4\"}", "config.json");
    Processor::from_files(&config, None).unwrap();
    let error = Processor::from_files(&config, Some(&file(b"{", "p.json"))).unwrap_err();
    assert!(error.to_string().starts_with("p.json: "), "{error}");
}

#[test]
fn a_digest_is_of_all_that_the_values_follow_from() {
    let digest = |contents: Value, image: &ImageData| {
        values(&with("qwen3_5_moe", &contents).unwrap(), image).digest
    };
    let image = image(64, 64);
    let plain = digest(json!({}), &image);
    assert_eq!(plain, digest(json!({ "patch_size": 16, "do_rescale": true }), &image));
    // Caches on disk compare digests of other versions.
    let hex: String = plain.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(hex, "954e17a124683195e11f154666fed15e9569059bbb410737dfa62d724fbb5293");
    let mut rgb = image.rgb().to_vec();
    rgb[0] ^= 128;
    let other = ImageData::from_rgb(image.size(), rgb).unwrap();
    let others = [
        digest(json!({}), &other),
        digest(json!({ "patch_size": 8 }), &image),
        digest(json!({ "merge_size": 1 }), &image),
        digest(json!({ "image_mean": [0.5, 0.5, 0.4] }), &image),
        digest(json!({ "temporal_patch_size": 1 }), &image),
        digest(json!({ "min_pixels": 1024 }), &image),
    ];
    for (i, digest) in others.iter().enumerate() {
        assert_ne!(*digest, plain, "{i}");
        assert!(!others[..i].contains(digest), "{i}");
    }
}
