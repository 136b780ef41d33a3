//! NaN and infinity in weights, weights that were never written, joined shards, and pipes in a
//! model's folder.

use std::{
    fs::{self, File},
    io::{Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, Error, Sampling, StepControl,
    experts::PrefetchMode,
    runtime::{DeviceOptions, Logits},
    text::Sampler,
    tools::perplexity,
};
use safetensors::Dtype;

use crate::common::{
    TWO_SHARDS, TensorData, copy_golden, gpu, read_tensors, split_golden, write_tensors,
};

const GOLDEN: &str = "qwen3_moe";

/// A copy of a golden with some bytes of tensors changed.
struct Patched {
    folder: tempfile::TempDir,
}

impl Patched {
    fn new(name: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        copy_golden(name, folder.path());
        Self { folder }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("model.safetensors")
    }

    /// Offset and length of a tensor in the file.
    fn place(&self, tensor: &str) -> (u64, u64) {
        let bytes = fs::read(self.file()).unwrap();
        let len = u64::from_le_bytes(bytes[..8].try_into().unwrap());
        let header: serde_json::Value =
            serde_json::from_slice(&bytes[8..8 + len as usize]).unwrap();
        let offsets = &header[tensor]["data_offsets"];
        let [start, end] = [0, 1].map(|i| offsets[i].as_u64().unwrap());
        (8 + len + start, end - start)
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        let mut file = File::options().write(true).open(self.file()).unwrap();
        file.seek(SeekFrom::Start(offset)).unwrap();
        file.write_all(bytes).unwrap();
    }

    /// Sets all values of a bf16 tensor.
    fn fill(self, tensor: &str, value: u16) -> Self {
        let (offset, bytes) = self.place(tensor);
        self.write(offset, &value.to_le_bytes().repeat(bytes as usize / 2));
        self
    }

    fn open(&self, device: &DeviceOptions, prefetch: PrefetchMode) -> Engine {
        let options = EngineOptions::default().device(device.clone()).prefetch(prefetch);
        open(self.folder.path(), options).unwrap()
    }

    /// Errors of all ways to use logits.
    fn errors(&self, tensor: &str, engine: &Engine) -> [Error; 3] {
        let silent = |way: &str| format!("{tensor}: no error of {way}");
        let tokens = [3, 7, 11, 200, 5];
        let (mut control, mut session) = (StepControl::default(), engine.session().unwrap());
        let mut sampler = Sampler::new(Sampling::greedy(), engine.blueprint().vocab).unwrap();
        let feed = session.feed(&tokens, Logits::All, &mut control, &mut |_, _| {});
        let feed = feed.expect_err(&silent("feed"));
        session.reset().unwrap();
        let next = session.next(&tokens, &mut sampler, &mut control).expect_err(&silent("next"));
        session.reset().unwrap();
        let perplexity = perplexity(&mut session, &tokens, &mut control);
        [feed, next, perplexity.map(|_| ()).expect_err(&silent("perplexity"))]
    }
}

fn on(device: &str) -> DeviceOptions {
    DeviceOptions::default().name(device)
}

fn open(folder: &Path, options: EngineOptions) -> Result<Engine, Error> {
    Engine::open(Checkpoint::open(folder)?, options, &mut |_, _| {})
}

#[test]
fn an_error_names_file_tensor_and_layer_of_a_nan() {
    let layer = "model.layers.1";
    for (tensor, place) in [
        ("lm_head.scales".to_owned(), "head"),
        ("model.embed_tokens.biases".to_owned(), "embedding"),
        ("model.norm.weight".to_owned(), "head"),
        (format!("{layer}.mlp.gate.scales"), "layer 1"),
        (format!("{layer}.self_attn.k_norm.weight"), "layer 1"),
        (format!("{layer}.mlp.switch_mlp.down_proj.scales"), "layer 1, expert "),
    ] {
        let cases = [(0x7fc0, on("cpu")), (0x7f80, on("cpu")), (0x7fc0, on("reference"))];
        let gpu = gpu(false).map(|gpu| (0x7fc0, gpu));
        for (value, device) in cases.into_iter().chain(gpu) {
            let patched = Patched::new(GOLDEN).fill(&tensor, value);
            for prefetch in [PrefetchMode::On, PrefetchMode::Off] {
                for error in patched.errors(&tensor, &patched.open(&device, prefetch)) {
                    let said = error.to_string();
                    let parts = ["model.safetensors", &tensor, place, "NaN", "download"];
                    for part in parts {
                        assert!(said.contains(part), "{tensor}, {device:?}, {prefetch:?}: {said}");
                    }
                }
            }
        }
    }
}

#[test]
fn weights_that_were_never_written_are_noted_and_do_not_prevent_a_run() {
    let notes = |patched: &Patched| {
        let engine = patched.open(&on("cpu"), PrefetchMode::Auto);
        engine.session().unwrap();
        engine.notes().to_vec()
    };
    let whole = Patched::new(GOLDEN);
    assert_eq!(notes(&whole), Vec::<String>::new());
    // All experts of a projection: one sample of 64 KiB.
    let tensor = "model.layers.1.mlp.switch_mlp.down_proj.weight";
    let (offset, bytes) = whole.place(tensor);
    whole.write(offset, &vec![0; bytes as usize]);
    let noted = notes(&whole);
    let [note] = &noted[..] else { panic!("{noted:?}") };
    for part in ["model.safetensors", tensor, "64 KiB", "zeros", "download"] {
        assert!(note.contains(part), "{note}");
    }

    #[cfg(target_os = "linux")]
    {
        // A copy that leaves a hole where the tensor is.
        let sparse = Patched::new(GOLDEN);
        let good = fs::read(sparse.file()).unwrap();
        let file = File::create(sparse.file()).unwrap();
        file.set_len(good.len() as u64).unwrap();
        let (start, end) = (offset as usize, (offset + bytes) as usize);
        sparse.write(0, &good[..start]);
        sparse.write(end as u64, &good[end..]);
        // Some file systems have no holes.
        let noted = notes(&sparse);
        if let [note] = &noted[..] {
            for part in ["model.safetensors", tensor, "never written", "download"] {
                assert!(note.contains(part), "{note}");
            }
        }
        assert!(noted.len() <= 1, "{noted:?}");
    }
}

#[test]
fn zeros_at_the_end_of_a_file_are_an_error_where_no_model_has_them() {
    const ROW: usize = 1024;
    // Rows of a tensor after the tensors of the model, and how many at its end are zeros.
    let opened = |tensors: &[(&str, usize, usize)]| {
        let patched = Patched::new(GOLDEN);
        let mut all = read_tensors(&patched.file());
        for (name, rows, zeros) in tensors {
            let mut bytes = vec![1; (rows * ROW).saturating_sub(*zeros)];
            bytes.resize(rows * ROW, 0);
            let tensor = TensorData { dtype: Dtype::U8, shape: vec![*rows, ROW], bytes };
            all.insert((*name).to_owned(), tensor);
        }
        write_tensors(&patched.file(), &all);
        open(patched.folder.path(), EngineOptions::default()).map(|_| ()).map_err(|error| {
            let length = fs::metadata(patched.file()).unwrap().len();
            (error.to_string(), length)
        })
    };
    let all = 2048 * ROW;
    for good in [
        &[("x.attn.weight", 2048, 1)][..],
        &[("x.attn.weight", 1000, 1000 * ROW)],
        &[("x.attn.bias", 2048, all)],
        &[("x.embed.weight", 3000, all)],
        &[("x.embed.weight", 3000, all + 9)],
        &[("x.experts.weight", 2048, 3), ("y.bias", 2048, all)],
    ] {
        assert_eq!(opened(good), Ok(()), "{good:?}");
    }
    let bad = [
        (&[("x.attn.weight", 2048, all)][..], "all of x.attn.weight"),
        (&[("x.weight", 2048, all - 99)], "the end of x.weight"),
        (&[("x.embed.weight", 3000, all + ROW / 2)], "the end of x.embed.weight"),
        (&[("x.norm.weight", 1, ROW), ("y.bias", 2048, all)], "all of x.norm.weight, y.bias"),
        (
            &[("x.q.weight", 1, 99), ("y.exps.weight", 2048, all), ("z", 1, ROW), ("zz", 1, ROW)],
            "the end of x.q.weight and all of y.exps.weight, z and 1 more tensors",
        ),
    ];
    for (tensors, parts) in bad {
        let (error, length) = opened(tensors).unwrap_err();
        let zeros: usize = tensors.iter().map(|(_, _, zeros)| zeros).sum();
        let bytes = format!("byte {} to byte {length}: {parts};", length - zeros as u64);
        assert!(error.contains("model.safetensors") && error.contains(&bytes), "{error}");
    }
}

#[test]
fn shards_that_were_joined_are_told() {
    let folder = tempfile::tempdir().unwrap();
    split_golden(GOLDEN, folder.path(), |name| name.contains("layers.0"));
    let [first, second] = TWO_SHARDS.map(|name| fs::read(folder.path().join(name)).unwrap());
    let joined = tempfile::tempdir().unwrap();
    fs::copy(folder.path().join("config.json"), joined.path().join("config.json")).unwrap();
    fs::write(joined.path().join("model.safetensors"), [&first[..], &second].concat()).unwrap();
    let error = open(joined.path(), EngineOptions::default()).map(|_| ()).unwrap_err().to_string();
    let place = format!("byte {}: shards were joined", first.len());
    assert!(error.contains("model.safetensors") && error.contains(&place), "{error}");
}

#[cfg(unix)]
#[test]
fn pipes_are_refused_and_not_waited_for() {
    use std::process::Command;

    for name in ["tokenizer.json", "model.safetensors", "config.json", "mirrors.txt"] {
        let patched = Patched::new(GOLDEN);
        let path = patched.folder.path().join(name);
        let _ = fs::remove_file(&path);
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let error = open(patched.folder.path(), EngineOptions::default()).err().unwrap();
        let said = error.to_string();
        assert!(said.contains(name) && said.contains("pipe"), "{said}");
    }
}

#[test]
fn a_byte_order_mark_in_json_is_skipped() {
    let patched = Patched::new(GOLDEN);
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        let path = patched.folder.path().join(name);
        if let Ok(json) = fs::read(&path) {
            fs::write(&path, [b"\xef\xbb\xbf", &json[..]].concat()).unwrap();
        }
    }
    patched.open(&on("cpu"), PrefetchMode::Auto);
}
