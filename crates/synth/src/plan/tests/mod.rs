mod gguf;
mod models;

use std::{
    cell::Cell,
    collections::BTreeMap,
    fs,
    io::{self, Write},
    ops::ControlFlow,
    path::Path,
};

use moeflux_ops::{Affine, Format, Scalar};
use serde_json::{Value, json};

use super::{
    super::{
        Preset, Summary, byte_tokenizer,
        checkpoint_writer::{FileSink, write_to},
        presets,
        values::{AffineParams, Lead, Mxfp4Scales, RandomStream, TensorValues},
        write,
    },
    KV_B_PROJ, Options, plan, text_config,
};
use moeflux_base::Error;

fn go_on() -> ControlFlow<()> {
    ControlFlow::Continue(())
}

/// A small model of an architecture.
fn config(model_type: &str) -> Value {
    let mut text = json!({
        "hidden_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "intermediate_size": 128,
        "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "full_attention_interval": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "vocab_size": 320,
        "max_position_embeddings": 512
    });
    if model_type == "qwen3_5_moe" {
        return json!({ "model_type": model_type, "text_config": text });
    }
    if model_type == "qwen3_moe" {
        text.as_object_mut().unwrap().remove("shared_expert_intermediate_size");
    }
    text["model_type"] = model_type.into();
    text
}

/// The contents of a written checkpoint: tensors by name with dtype, shape and bytes.
fn read(folder: &Path) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let index: Value =
        serde_json::from_slice(&fs::read(folder.join("model.safetensors.index.json")).unwrap())
            .unwrap();
    let places = index["weight_map"].as_object().unwrap();
    let mut shards: Vec<&str> = places.values().map(|v| v.as_str().unwrap()).collect();
    shards.sort();
    shards.dedup();
    let mut out = BTreeMap::new();
    for shard in shards {
        let bytes = fs::read(folder.join(shard)).unwrap();
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&bytes[8..8 + len]).unwrap();
        let data = &bytes[8 + len..];
        let mut at = 0;
        for (name, t) in header.as_object().unwrap() {
            if name == "__metadata__" {
                assert_eq!(t, &json!({ "format": "mlx" }));
                continue;
            }
            assert_eq!(places[name], shard);
            let (from, to) =
                (t["data_offsets"][0].as_u64().unwrap(), t["data_offsets"][1].as_u64().unwrap());
            assert_eq!(from, at, "{name} follows the tensor before it");
            at = to;
            let shape: Vec<u64> =
                t["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
            let dtype = t["dtype"].as_str().unwrap().to_string();
            let size = match dtype.as_str() {
                "U8" => 1,
                "BF16" => 2,
                _ => 4,
            };
            assert_eq!(shape.iter().product::<u64>() * size, to - from, "{name}");
            out.insert(name.clone(), (dtype, shape, data[from as usize..to as usize].to_vec()));
        }
        assert_eq!(at as usize, data.len());
    }
    assert_eq!(out.len(), places.len());
    assert_eq!(
        index["metadata"]["total_size"],
        out.values().map(|(_, _, b)| b.len() as u64).sum::<u64>()
    );
    out
}

fn written(options: &Options) -> BTreeMap<String, (String, Vec<u64>, Vec<u8>)> {
    let folder = tempfile::tempdir().unwrap();
    write(options, folder.path(), |_, _| go_on()).unwrap();
    read(folder.path())
}

/// The rows of a quantized matrix, dequantized.
fn rows(
    tensors: &BTreeMap<String, (String, Vec<u64>, Vec<u8>)>,
    path: &str,
    bits: u8,
    cols: usize,
) -> Vec<Vec<f32>> {
    let format = Format::Affine(Affine { bits, group: 64, scale: Scalar::BF16 });
    let planes = ["weight", "scales", "biases"].map(|name| &tensors[&format!("{path}.{name}")].2);
    let layouts = format.planes(cols);
    (0..planes[0].len() / layouts[0].row_bytes)
        .map(|row| {
            let mut out = vec![0.0; cols];
            let row = std::array::from_fn(|i| {
                &planes[i][layouts[i].row_offset(row)..][..layouts[i].row_bytes]
            });
            format.dequantize(row, &mut out);
            out
        })
        .collect()
}

fn mean_and_std(numbers: impl Iterator<Item = f32> + Clone) -> (f32, f32) {
    let n = numbers.clone().count() as f32;
    let mean = numbers.clone().sum::<f32>() / n;
    (mean, (numbers.map(|x| (x - mean).powi(2)).sum::<f32>() / n).sqrt())
}

#[test]
fn presets_have_the_published_sizes() {
    let size = |name: &str| {
        let plan = plan(&Options::new(Preset::by_name(name).unwrap().config())).unwrap();
        plan.total_bytes() as f64 / 1e9
    };
    assert!((17.1..17.3).contains(&size("qwen3-30b-a3b")), "{}", size("qwen3-30b-a3b"));
    assert!((19.4..19.6).contains(&size("qwen3.6-35b-a3b")), "{}", size("qwen3.6-35b-a3b"));
    assert!((222.5..224.0).contains(&size("qwen3.5-397b-a17b")), "{}", size("qwen3.5-397b-a17b"));
    let error = Preset::by_name("gpt").unwrap_err().to_string();
    assert!(error.contains("qwen3.5-397b-a17b"), "{error}");

    let plan = plan(&Options::new(Preset::by_name("qwen3.5-397b-a17b").unwrap().config())).unwrap();
    let shape = |name: &str| plan.tensors().find(|t| t.name == name).map(|t| t.shape.to_vec());
    let at = "language_model.model.layers.59.";
    assert_eq!(shape(&format!("{at}mlp.switch_mlp.down_proj.weight")), Some(vec![512, 4096, 128]));
    assert_eq!(shape(&format!("{at}self_attn.q_proj.weight")), Some(vec![2 * 32 * 256, 512]));
    assert_eq!(
        shape("language_model.model.layers.0.linear_attn.conv1d.weight"),
        Some(vec![12288, 4, 1])
    );
}

#[test]
fn a_written_checkpoint_reads_back() {
    for model_type in ["qwen3_moe", "qwen3_5_moe"] {
        let options = Options { skew: 1.0, ..Options::new(config(model_type)) };
        let plan = plan(&options).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("deep/model");
        let mut last = (0, 0);
        let summary = write(&options, &out, |done, total| {
            assert!(done >= last.0 && done <= total);
            last = (done, total);
            go_on()
        })
        .unwrap();
        assert_eq!(last, (plan.total_bytes(), plan.total_bytes()));
        let tensors = read(&out);
        assert_eq!(tensors.len(), summary.tensors);
        for t in plan.tensors() {
            let (dtype, shape, bytes) = &tensors[t.name];
            assert_eq!(
                (dtype.as_str(), shape.as_slice(), bytes.len() as u64),
                (t.dtype, t.shape, t.bytes)
            );
        }
        let mut names: Vec<_> = fs::read_dir(&out)
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        assert_eq!(
            names,
            [
                "chat_template.jinja",
                "config.json",
                "generation_config.json",
                "model.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json",
                "tokenizer_config.json"
            ]
        );
        let sizes = fs::read_dir(&out).unwrap().map(|e| e.unwrap().metadata().unwrap().len());
        assert_eq!(sizes.sum::<u64>(), summary.bytes);

        let config: Value =
            serde_json::from_slice(&fs::read(out.join("config.json")).unwrap()).unwrap();
        assert_eq!(config["eos_token_id"], json!([258, 256]));
        let gates = if model_type == "qwen3_moe" { 3 } else { 6 };
        let quantization = config["quantization"].as_object().unwrap();
        assert_eq!(quantization.len(), 3 + gates);
        for (path, setting) in quantization.iter().skip(3) {
            assert_eq!(setting, &json!({ "group_size": 64, "bits": 8 }));
            assert_eq!(tensors[&format!("{path}.weight")].1[1], 256 * 8 / 32);
        }
    }
}

#[test]
fn weights_have_mean_zero_and_the_expected_spread() {
    let tensors = written(&Options::new(config("qwen3_5_moe")));
    let at = "language_model.model.layers.1";
    for (path, bits, cols) in [
        (format!("{at}.self_attn.q_proj"), 4, 256),
        (format!("{at}.mlp.switch_mlp.up_proj"), 4, 256),
        (format!("{at}.mlp.gate"), 8, 256),
    ] {
        let mut rows = rows(&tensors, &path, bits, cols);
        if bits == 8 {
            // The first group of a router's row multiplies the lead.
            rows.iter_mut().for_each(|row| drop(row.drain(..64)));
        }
        let (mean, std) = mean_and_std(rows.iter().flatten().copied());
        assert!(mean.abs() < 0.02 * std, "{path}: {mean} of {std}");
        assert!((std * 16.0 - 1.0).abs() < 0.1, "{path}: {std}");
        for row in &rows {
            let (mean, std) = mean_and_std(row.iter().copied());
            assert!(mean.abs() < 5.0 / 16.0 * std, "{path}: a row of mean {mean}");
        }
    }
    let plain = |name: &str| {
        let (dtype, _, bytes) = &tensors[&format!("language_model.model.layers.0.{name}")];
        let scalar = if dtype == "F32" { Scalar::F32 } else { Scalar::BF16 };
        (0..bytes.len() / scalar.bytes()).map(|i| scalar.get(bytes, i)).collect::<Vec<_>>()
    };
    assert!(plain("post_attention_layernorm.weight").iter().all(|w| (0.89..1.11).contains(w)));
    // Mixers do not see the lead.
    assert!(plain("input_layernorm.weight")[..64].iter().all(|w| w.abs() < 0.02));
    assert!(plain("input_layernorm.weight")[64..].iter().all(|w| (0.89..1.11).contains(w)));
    assert_eq!(tensors["language_model.model.layers.0.linear_attn.A_log"].0, "F32");
    assert!(plain("linear_attn.A_log").iter().all(|w| (-2.3..=2.0).contains(w)));
}

#[test]
fn mxfp4_weights_have_the_requested_spread() {
    for std in [0.01, 0.0186, 0.03, 1.0] {
        let mut powers = vec![0; 4096];
        TensorValues::Mxfp4Scales(Mxfp4Scales::mxfp4(std)).fill(
            RandomStream::new(0, "scales"),
            0,
            &mut powers,
        );
        let mut quants = vec![0; 4096 * 16];
        TensorValues::Quants.fill(RandomStream::new(0, "weight"), 0, &mut quants);
        let mut weights = vec![0.0; 4096 * 32];
        Format::MXFP4.dequantize([&quants, &powers, &[]], &mut weights);
        let (mean, found) = mean_and_std(weights.iter().copied());
        assert!(
            mean.abs() < 0.02 * std && (found / std - 1.0).abs() < 0.03,
            "{std}: {mean} and {found}"
        );
    }
}

#[test]
fn the_head_prefers_printable_text() {
    let tensors = written(&Options::new(config("qwen3_moe")));
    let lead = |row: &Vec<f32>| row[..64].iter().sum::<f32>();
    for (id, row) in rows(&tensors, "lm_head", 4, 256).iter().enumerate() {
        if (0x20..0x7f).contains(&id) {
            assert!(lead(row).abs() < 1.0, "{id}: {}", lead(row));
        } else {
            assert!(lead(row) < -30.0, "{id}: {}", lead(row));
        }
    }
    for row in rows(&tensors, "model.embed_tokens", 4, 256) {
        assert!((lead(&row) - 64.0).abs() < 2.0);
    }
}

#[test]
fn bytes_depend_on_the_seed_alone() {
    let options = Options { seed: 7, skew: 0.5, ..Options::new(config("qwen3_5_moe")) };
    let all = written(&options);
    assert_eq!(all, written(&options));
    let other = written(&Options { seed: 8, ..options.clone() });
    assert!(all.iter().all(|(name, tensor)| other[name] != *tensor));

    let first = written(&Options { layers: Some(2), ..options.clone() });
    assert!(first.len() < all.len());
    assert!(first.iter().all(|(name, tensor)| all[name] == *tensor));
    let cut = plan(&Options { layers: Some(2), ..options.clone() }).unwrap();
    assert_eq!(cut.config()["text_config"]["num_hidden_layers"], 2);

    // Only routers depend on the skew.
    let even = written(&Options { skew: 0.0, ..options });
    for (name, tensor) in &all {
        assert_eq!(even[name] != *tensor, name.ends_with("mlp.gate.biases"), "{name}");
    }
}

#[test]
fn values_do_not_depend_on_the_write_size() {
    let affine = |lead| AffineParams { bits: 4, groups: 3, std: 0.1, lead };
    let leads = [
        Lead::Zero,
        Lead::Same(0.5),
        Lead::Ranges { ranges: vec![(1..3, 0.0), (0..4, 0.5)], rest: 1.0 },
        Lead::Rows(vec![(1, 0.5)]),
    ];
    for lead in leads {
        for values in [
            TensorValues::Quants,
            TensorValues::Scales(affine(lead.clone())),
            TensorValues::Biases(affine(lead.clone())),
            TensorValues::Mxfp4Scales(Mxfp4Scales::mxfp4(0.1)),
            TensorValues::Uniform {
                scalar: Scalar::BF16,
                low: -1.0,
                high: 1.0,
                cols: 100,
                lead: lead.clone(),
            },
            TensorValues::Uniform {
                scalar: Scalar::F32,
                low: -1.0,
                high: 1.0,
                cols: 100,
                lead: lead.clone(),
            },
        ] {
            let stream = RandomStream::new(3, "tensor");
            let mut whole = vec![0; 1004];
            values.fill(stream, 0, &mut whole);
            let mut pieces = vec![0; 1004];
            let mut at = 0;
            for piece in [8, 64, 128, 200, 600, 4] {
                values.fill(stream, at as u64, &mut pieces[at..at + piece]);
                at += piece;
            }
            assert_eq!(whole, pieces, "{values:?}");
        }
    }
}

/// Frequency of each expert of layer 0, for inputs of the lead plus random values of calibrated
/// size (400 tokens).
fn chosen(skew: f64) -> Vec<f32> {
    let tensors = written(&Options { skew, layers: Some(1), ..Options::new(config("qwen3_moe")) });
    let router = rows(&tensors, "model.layers.0.mlp.gate", 8, 256);
    let noise = RandomStream::new(1, "tokens");
    let mut counts = vec![0.0; router.len()];
    for token in 0..400u64 {
        // Uniform with the standard deviation of the residual stream at the first router.
        let x: Vec<f32> = (0..256)
            .map(|i| {
                let u = (noise.word(token * 256 + i) >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
                if i < 64 { 1.0 } else { u * 12f32.sqrt() * 0.477 }
            })
            .collect();
        let mut scores: Vec<(f32, usize)> = (router.iter().enumerate())
            .map(|(e, row)| (row.iter().zip(&x).map(|(w, x)| w * x).sum::<f32>(), e))
            .collect();
        scores.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (_, e) in &scores[..4] {
            counts[*e] += 1.0 / 400.0;
        }
    }
    counts.sort_by(|a: &f32, b| b.total_cmp(a));
    counts
}

#[test]
fn skew_makes_a_popular_head_on_an_even_tail() {
    // 4 of 64: an even share is 1/16.
    let even = chosen(0.0);
    assert!(even[0] < 0.16 && even[63] > 0.005, "{even:?}");
    // 1.2 * 4 experts, each chosen by about every other token.
    let skewed = chosen(1.0);
    assert!(skewed[0] < 0.85 && skewed[4] > 0.3, "{skewed:?}");
    assert!(skewed[5] < 0.12 && skewed[50] > 0.0, "{skewed:?}");
}

#[test]
fn shards_have_the_requested_size_and_whole_tensors() {
    let options = Options::new(config("qwen3_5_moe"));
    let folder = tempfile::tempdir().unwrap();
    let plan = plan(&options).unwrap();
    let disk = LimitedDisk::default();
    let summary = write_to(&&disk, &plan, 600_000, folder.path(), &mut |_, _| go_on()).unwrap();
    assert!(summary.shards > 2);
    assert_eq!(read(folder.path()), written(&options));
    for i in 1..=summary.shards {
        let name = format!("model-{i:05}-of-{:05}.safetensors", summary.shards);
        assert!(fs::metadata(folder.path().join(name)).unwrap().len() < 620_000);
    }
}

/// A disk of limited space.
struct LimitedDisk {
    room: Cell<u64>,
    /// Reported free space.
    free: Option<u64>,
}

impl Default for LimitedDisk {
    fn default() -> Self {
        LimitedDisk { room: Cell::new(u64::MAX), free: None }
    }
}

struct LimitedFile<'a>(fs::File, &'a Cell<u64>);

impl Write for LimitedFile<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = (bytes.len() as u64).min(self.1.get());
        if n == 0 && !bytes.is_empty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.1.set(self.1.get() - n);
        self.0.write_all(&bytes[..n as usize])?;
        Ok(n as usize)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The lifetime of the space that files share.
impl<'a> FileSink for &'a LimitedDisk {
    type File = LimitedFile<'a>;

    fn free(&self, _folder: &Path) -> Option<u64> {
        self.free
    }

    fn create(&self, path: &Path) -> io::Result<Self::File> {
        Ok(LimitedFile(fs::File::create_new(path)?, &self.room))
    }

    fn finish(&self, _file: Self::File) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_full_disk_leaves_nothing() {
    let plan = plan(&Options::new(config("qwen3_moe"))).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("model");
    let Summary { bytes, .. } =
        write_to(&&LimitedDisk::default(), &plan, 1 << 20, &out, &mut |_, _| go_on()).unwrap();
    fs::remove_dir_all(&out).unwrap();
    // Fails in the first header, in the first shard, in a later one, in the config.
    for room in [0, 100, 50_000, bytes / 2, bytes - 1] {
        let disk = LimitedDisk { room: Cell::new(room), free: None };
        let error = write_to(&&disk, &plan, 1 << 20, &out, &mut |_, _| go_on()).unwrap_err();
        let text = error.to_string();
        assert!(
            matches!(error, Error::File { .. }) && text.contains("model") && text.contains("GB"),
            "{text}"
        );
        assert!(!out.exists(), "{room}");
        // An existing folder stays.
        fs::create_dir(&out).unwrap();
        let disk = LimitedDisk { room: Cell::new(room), free: None };
        write_to(&&disk, &plan, 1 << 20, &out, &mut |_, _| go_on()).unwrap_err();
        assert_eq!(fs::read_dir(&out).unwrap().count(), 0);
        fs::remove_dir(&out).unwrap();
    }
    let disk = LimitedDisk { room: Cell::new(u64::MAX), free: Some(bytes - 1) };
    let text = write_to(&&disk, &plan, 1 << 20, &out, &mut |_, _| go_on()).unwrap_err().to_string();
    assert!(text.contains("are free"), "{text}");
    assert!(!out.exists());
    let disk = LimitedDisk { room: Cell::new(bytes), free: Some(bytes) };
    write_to(&&disk, &plan, 1 << 20, &out, &mut |_, _| go_on()).unwrap();
}

#[test]
fn a_non_empty_folder_is_not_changed() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), "mine").unwrap();
    let options = Options::new(config("qwen3_moe"));
    let text = write(&options, folder.path(), |_, _| go_on()).unwrap_err().to_string();
    assert!(text.contains("holds files"), "{text}");
    assert_eq!(fs::read(folder.path().join("config.json")).unwrap(), b"mine");
    let text = write(&options, &folder.path().join("config.json"), |_, _| go_on())
        .unwrap_err()
        .to_string();
    assert!(text.contains("config.json"), "{text}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn invalid_configs_and_options_give_specific_errors() {
    let edits: &[(&str, Value, &str)] = &[
        ("model_type", json!("llama"), "qwen3_5_moe, qwen3_moe"),
        ("model_type", json!(7), "model_type"),
        ("num_attention_heads", json!(0), "num_attention_heads"),
        ("num_attention_heads", json!(3), "num_key_value_heads"),
        ("num_key_value_heads", json!(-1), "num_key_value_heads"),
        ("head_dim", json!(7), "head_dim"),
        ("head_dim", json!("x"), "head_dim"),
        ("hidden_size", json!(null), "hidden_size"),
        ("hidden_size", json!(u64::MAX), "hidden_size"),
        ("hidden_size", json!(2048.5), "hidden_size"),
        ("num_hidden_layers", json!(1 << 20), "num_hidden_layers"),
        ("num_experts", json!(3), "num_experts_per_tok"),
        ("num_experts", json!(1 << 20), "num_experts"),
        ("vocab_size", json!(258), "vocab_size"),
        ("decoder_sparse_step", json!(0), "decoder_sparse_step"),
        ("mlp_only_layers", json!([-1]), "mlp_only_layers"),
        ("attention_bias", json!(true), "attention_bias"),
        ("tie_word_embeddings", json!("no"), "tie_word_embeddings"),
    ];
    for (key, value, says) in edits {
        let mut config = config("qwen3_moe");
        config[*key] = value.clone();
        let text = plan(&Options { skew: 1.0, ..Options::new(config) }).unwrap_err().to_string();
        assert!(text.contains(says), "{key} {value}: {text}");
    }
    let edits: &[(&str, Value, &str)] = &[
        ("linear_num_key_heads", json!(3), "linear_num_value_heads"),
        ("layer_types", json!(["full_attention", "full_attention"]), "layer_types"),
        ("full_attention_interval", json!(0), "full_attention_interval"),
    ];
    for (key, value, says) in edits {
        let mut config = config("qwen3_5_moe");
        config["text_config"][*key] = value.clone();
        let text = plan(&Options::new(config)).unwrap_err().to_string();
        assert!(text.contains(says), "{key} {value}: {text}");
    }
    // Each value is allowed, but not their product.
    let mut huge = config("qwen3_moe");
    for key in ["hidden_size", "moe_intermediate_size", "vocab_size"] {
        huge[key] = json!(1 << 20);
    }
    huge["num_experts"] = json!(1 << 16);
    huge["num_hidden_layers"] = json!(4096);
    assert!(plan(&Options::new(huge)).unwrap_err().to_string().contains("too large"));

    assert!(plan(&Options::new(json!([]))).is_err());
    for layers in [0, 4] {
        let options = Options { layers: Some(layers), ..Options::new(config("qwen3_moe")) };
        assert!(plan(&options).unwrap_err().to_string().contains("layers"));
    }
    for skew in [-1.0, 9.0, f64::NAN, f64::INFINITY] {
        assert!(plan(&Options { skew, ..Options::new(config("qwen3_moe")) }).is_err());
    }
}

#[test]
fn odd_widths_dense_layers_and_tied_embeddings() {
    let mut config = config("qwen3_moe");
    config["moe_intermediate_size"] = json!(96);
    config["mlp_only_layers"] = json!([1]);
    config["tie_word_embeddings"] = json!(true);
    let plan = plan(&Options::new(config)).unwrap();
    let shape =
        |name: &str| plan.tensors().find(|t| t.name == name).map(|t| (t.dtype, t.shape.to_vec()));
    // 96 inputs are not a multiple of the group size: not quantized.
    assert_eq!(
        shape("model.layers.0.mlp.switch_mlp.down_proj.weight"),
        Some(("BF16", vec![64, 256, 96]))
    );
    assert_eq!(shape("model.layers.0.mlp.switch_mlp.down_proj.scales"), None);
    assert_eq!(
        shape("model.layers.0.mlp.switch_mlp.up_proj.weight"),
        Some(("U32", vec![64, 96, 32]))
    );
    assert_eq!(shape("model.layers.1.mlp.down_proj.weight"), Some(("U32", vec![256, 16])));
    assert_eq!(shape("model.layers.1.mlp.gate.weight"), None);
    assert_eq!(shape("lm_head.weight"), None);
}

#[test]
fn the_tokenizer_encodes_every_text() {
    let json = byte_tokenizer::tokenizer().to_string();
    let tokenizer: tokenizers::Tokenizer = json.parse().unwrap();
    let text = "<|im_start|>user\nGrüße, 世界! \u{1}\t🦊<|im_end|>";
    let ids = tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    assert_eq!((ids[0], *ids.last().unwrap()), (257, 258));
    assert_eq!(ids[1], u32::from(b'u'));
    assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    assert_eq!(tokenizer.get_vocab_size(true), byte_tokenizer::COUNT as usize);
}

#[test]
fn text_configs_may_be_flat_or_nested() {
    let nested = config("qwen3_5_moe");
    let mut flat = nested["text_config"].clone();
    flat["model_type"] = "qwen3_5_moe".into();
    let names = |config| {
        plan(&Options::new(config))
            .unwrap()
            .tensors()
            .map(|t| t.name.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(nested.clone()), names(flat));
    assert!(text_config(&nested).get("num_experts").is_some());
}

#[test]
fn cancelled_writing_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let options = Options::new(config("qwen3_moe"));
    let mut calls = 0;
    let error = write(&options, folder.path(), |_, _| {
        calls += 1;
        if calls == 3 { ControlFlow::Break(()) } else { go_on() }
    })
    .unwrap_err();
    assert!(matches!(error, Error::Cancelled), "{error}");
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
}
