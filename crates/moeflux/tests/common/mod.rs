//! Shared by the integration tests: golden cases, engines, reader wrappers, and a simulated GPU.

#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

pub mod readers;
pub mod simulated_gpu;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
};

use moeflux::{
    Checkpoint, Engine, EngineOptions, MemoryRequest, Session, StepControl,
    runtime::{DeviceOptions, Logits, StepObserver},
};
use safetensors::{Dtype, SafeTensors, View};
use serde_json::json;

/// Logits, hidden states and experts computed by mlx-lm.
pub struct Golden {
    pub name: String,
    pub folder: PathBuf,
    bytes: Vec<u8>,
}

/// A tensor of f32, row by row.
pub struct Rows {
    pub width: usize,
    pub numbers: Vec<f32>,
}

impl Rows {
    pub fn row(&self, i: usize) -> &[f32] {
        &self.numbers[i * self.width..(i + 1) * self.width]
    }
}

pub fn data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data")
}

pub fn tales() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tales/model")
}

/// Names of a folder's safetensors shards.
pub fn shards(folder: &Path) -> Vec<String> {
    let names =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> =
        names.filter(|n| n.starts_with("model") && n.ends_with(".safetensors")).collect();
    names.sort();
    names
}

/// Copies the files of a folder into another one.
pub fn copy_folder(from: &Path, into: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, into.join(path.file_name().unwrap())).unwrap();
    }
}

/// Copies a golden's checkpoint, without the expected results, into a folder.
pub fn copy_golden(name: &str, into: &Path) {
    for entry in std::fs::read_dir(moeflux_goldens::golden(name)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !name.starts_with("golden") {
            std::fs::copy(&path, into.join(name)).unwrap();
        }
    }
}

/// A tensor in memory.
#[derive(Clone, Debug)]
pub struct TensorData {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl View for &TensorData {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::from(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Tensors of a safetensors file, by name.
pub fn read_tensors(path: &Path) -> BTreeMap<String, TensorData> {
    let bytes = std::fs::read(path).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap().tensors().into_iter();
    let tensors = tensors.map(|(name, view)| {
        let (dtype, shape, bytes) = (view.dtype(), view.shape().to_vec(), view.data().to_vec());
        (name, TensorData { dtype, shape, bytes })
    });
    tensors.collect()
}

/// Writes a safetensors file.
pub fn write_tensors<'a>(
    path: &Path,
    tensors: impl IntoIterator<Item = (&'a String, &'a TensorData)>,
) {
    safetensors::serialize_to_file(tensors, None, path).unwrap();
}

/// Files of [`split_golden`].
pub const TWO_SHARDS: [&str; 2] =
    ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];

/// Copies a golden's checkpoint of one file into a folder, as two files. The first one has the
/// tensors for which `is_first` is true.
pub fn split_golden(name: &str, into: &Path, is_first: impl Fn(&str) -> bool) {
    copy_golden(name, into);
    let whole = into.join("model.safetensors");
    let tensors = read_tensors(&whole);
    std::fs::remove_file(&whole).unwrap();
    let file = |name: &str| TWO_SHARDS[usize::from(!is_first(name))];
    for of_shard in TWO_SHARDS {
        let tensors = tensors.iter().filter(|(name, _)| file(name) == of_shard);
        write_tensors(&into.join(of_shard), tensors);
    }
    let files: BTreeMap<_, _> = tensors.keys().map(|name| (name, file(name))).collect();
    let index = json!({ "weight_map": files }).to_string();
    std::fs::write(into.join("model.safetensors.index.json"), index).unwrap();
}

/// Goldens with every kind of expert layer.
pub const EXPERT_LAYERS: [&str; 6] =
    ["qwen3_5_moe", "gemma4", "deepseek_v3", "gpt_oss_mxfp4", "glm4_moe_plain", "minimax_m2_hub"];

/// Architectures without a golden: another test derives their checkpoint from one
/// (`composite_checkpoints`).
const DERIVED: [&str; 1] = ["kimi_k25"];

/// Every golden case in the repository; every supported architecture has one.
pub fn goldens() -> Vec<Golden> {
    let goldens: Vec<_> = moeflux_goldens::names().iter().map(|name| Golden::read(name)).collect();
    let covered: BTreeSet<String> = goldens.iter().flat_map(Golden::model_types).collect();
    let missing: Vec<_> = moeflux::model::supported_architectures()
        .filter(|name| !covered.contains(*name) && !DERIVED.contains(name))
        .collect();
    assert!(missing.is_empty(), "architectures without a golden: {missing:?}");
    goldens
}

impl Golden {
    pub fn read(name: &str) -> Self {
        let folder = moeflux_goldens::golden(name);
        let bytes = std::fs::read(folder.join("golden.safetensors")).unwrap();
        Self { name: name.to_owned(), folder, bytes }
    }

    /// The architecture of the language model.
    pub fn model_type(&self) -> String {
        self.model_types().remove(0)
    }

    /// The architecture of the language model, then that of the whole model.
    fn model_types(&self) -> Vec<String> {
        let config = std::fs::read(self.folder.join("config.json")).unwrap();
        let config: serde_json::Value = serde_json::from_slice(&config).unwrap();
        let names = [config.pointer("/text_config/model_type"), config.get("model_type")];
        let names = names.into_iter().flatten().map(|name| name.as_str().unwrap());
        names.map(|name| name.strip_suffix("_text").unwrap_or(name).to_owned()).collect()
    }

    fn tensor(&self, name: &str) -> Option<(Vec<usize>, Vec<u8>, Dtype)> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let view = file.tensor(name).ok()?;
        Some((view.shape().to_vec(), view.data().to_vec(), view.dtype()))
    }

    pub fn floats(&self, name: &str) -> Option<Rows> {
        let (shape, bytes, dtype) = self.tensor(name)?;
        assert_eq!(dtype, Dtype::F32, "{name}");
        let numbers =
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        Some(Rows { width: *shape.last().unwrap(), numbers })
    }

    pub fn ints(&self, name: &str) -> Option<(usize, Vec<u32>)> {
        let (shape, bytes, dtype) = self.tensor(name)?;
        let numbers = match dtype {
            Dtype::U8 => bytes.into_iter().map(u32::from).collect(),
            Dtype::I32 => {
                bytes.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect()
            }
            other => panic!("{name}: {other:?}"),
        };
        Some((*shape.last().unwrap(), numbers))
    }

    pub fn prompt(&self) -> Vec<u32> {
        self.ints("prompt_ids").unwrap().1
    }

    pub fn generated(&self) -> Vec<u32> {
        self.ints("gen_ids_f32").unwrap().1
    }
}

/// Hidden states and experts observed during steps.
#[derive(Default)]
pub struct Seen {
    pub hidden: Vec<Vec<f32>>,
    pub experts: Vec<Vec<u32>>,
    pub k: usize,
}

impl StepObserver for Seen {
    fn experts(&mut self, layer: usize, k: usize, ids: &[u32]) {
        self.experts.resize_with(self.experts.len().max(layer + 1), Vec::new);
        self.experts[layer].extend(ids);
        self.k = k;
    }

    fn hidden(&mut self, layer: usize, rows: &[f32]) {
        self.hidden.resize_with(self.hidden.len().max(layer + 1), Vec::new);
        self.hidden[layer].extend(rows);
    }
}

pub fn exact(device: &str) -> DeviceOptions {
    DeviceOptions::default().name(device).threads(2).exact(true)
}

/// Whether the complete set of goldens runs on the GPU too: `MOEFLUX_TEST_FULL` is set.
pub fn is_full() -> bool {
    std::env::var_os("MOEFLUX_TEST_FULL").is_some()
}

/// The GPU to test on, by the same variables as the conformance tests of `moeflux-compute`:
/// `MOEFLUX_TEST_GPU` names it, `none` disables it; by default the best adapter.
/// `MOEFLUX_TEST_GPU_ISA=plain` disables subgroups. Prints a line if there is no GPU, and fails if
/// one was named.
#[allow(clippy::print_stderr, reason = "tests that do not run are to be seen")]
pub fn gpu(exact: bool) -> Option<DeviceOptions> {
    let asked = std::env::var("MOEFLUX_TEST_GPU").ok();
    let name = asked.clone().unwrap_or_else(|| "gpu".into());
    if name == "none" {
        return None;
    }
    let isa = std::env::var("MOEFLUX_TEST_GPU_ISA").ok();
    let options = DeviceOptions::default().name(name).threads(2).exact(exact).isa(isa);
    match moeflux_compute::open(&options) {
        Ok(_) => Some(options),
        Err(error) => {
            assert!(asked.is_none(), "{error}");
            eprintln!("no GPU is tested: {error}");
            None
        }
    }
}

/// Start of the names of the goldens to test, `MOEFLUX_TEST_GOLDENS`; by default all are.
pub fn asked() -> Option<String> {
    std::env::var("MOEFLUX_TEST_GOLDENS").ok()
}

/// Slots for this number of experts. A card with its own memory gets as many host slots, so that
/// the others are read from disk there too.
pub fn few_slots(slots: impl Into<Option<usize>>) -> MemoryRequest {
    let slots = slots.into();
    MemoryRequest::default().slots(slots).host_slots(slots)
}

pub fn engine(folder: &Path, device: DeviceOptions, memory: MemoryRequest) -> Engine {
    let options = EngineOptions::default().memory(memory).device(device);
    Engine::open(Checkpoint::open(folder).unwrap(), options, &mut |_, _| {}).unwrap()
}

/// Feeds tokens and returns all their logits, row by row.
pub fn feed(session: &mut Session, tokens: &[u32], observer: Option<&mut Seen>) -> Vec<f32> {
    let mut all = Vec::new();
    let mut watch = StepControl::default();
    watch.observer = observer.map(|o| o as &mut dyn StepObserver);
    session
        .feed(tokens, Logits::All, &mut watch, &mut |_, row| all.extend_from_slice(row))
        .unwrap();
    all
}

/// `max |a - b| / rms(b)`.
pub fn difference(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let rms = (b.iter().map(|b| f64::from(*b).powi(2)).sum::<f64>() / b.len() as f64).sqrt();
    let max = a
        .iter()
        .zip(b)
        .map(|(a, b)| f64::from((a - b).abs()))
        .fold(0.0, |m: f64, d| if d.is_nan() { f64::NAN } else { m.max(d) });
    max / rms
}

/// Sorted expert sets, one per token.
pub fn sets(k: usize, ids: &[u32]) -> Vec<Vec<u32>> {
    ids.chunks(k)
        .map(|ids| {
            let mut set = ids.to_vec();
            set.sort_unstable();
            set
        })
        .collect()
}

/// Runs the calling test in a child process, for tests that measure the process. Returns true in
/// the child; in the parent, false once the child has passed. `test` is the full path of the test.
pub fn in_own_process(test: &str) -> bool {
    const CHILD: &str = "MOEFLUX_TEST_CHILD";
    if std::env::var(CHILD).is_ok_and(|child| child == test) {
        return true;
    }
    let mut child = Command::new(std::env::current_exe().unwrap());
    let out = child.args(["--exact", test, "--nocapture"]).env(CHILD, test).output().unwrap();
    let [stdout, stderr] = [&out.stdout, &out.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    assert!(out.status.success() && stdout.contains("1 passed"), "{stdout}{stderr}");
    false
}
