//! GGUF files: a golden of llama.cpp, the same model in odd layouts, and files with a fault each.

mod converted;
mod families;

use std::{fs, path::Path};

use moeflux::{Checkpoint, Engine, EngineOptions, Error, MemoryRequest, runtime::DeviceOptions};
use safetensors::SafeTensors;
use serde_json::Value;

use crate::{
    common::{data, engine, exact, feed, gpu},
    gguf_use::says_the_conversation,
};

/// `|a - b| <= BAR * |b|` for each row.
const BAR: f64 = 2e-5;

/// Model with the logits that llama.cpp computes of its exact weights.
pub(crate) struct GgufGolden {
    pub(crate) tokens: Vec<u32>,
    greedy: Vec<u32>,
    pub(crate) json: Value,
    tensors: Vec<u8>,
}

impl GgufGolden {
    pub(crate) fn read(folder: &Path) -> Self {
        let json = fs::read(folder.join("golden.json")).unwrap();
        let json: Value = serde_json::from_slice(&json).unwrap();
        Self {
            tokens: ids(&json["tokens"]),
            greedy: ids(&json["greedy"]),
            json,
            tensors: fs::read(folder.join("golden.safetensors")).unwrap(),
        }
    }

    fn logits(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.tensors).unwrap();
        let bytes = file.tensor(name).unwrap().data();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
}

pub(crate) fn ids(list: &Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// The largest `|a - b| / |b|` of any row.
fn distance(a: &[f32], b: &[f32], width: usize) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |x: &[f32]| x.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>().sqrt();
    let rows = a.chunks_exact(width).zip(b.chunks_exact(width));
    let far = rows.map(|(a, b)| {
        let apart: Vec<f32> = a.iter().zip(b).map(|(a, b)| a - b).collect();
        norm(&apart) / norm(b)
    });
    far.fold(0.0, f64::max)
}

pub(crate) fn matches(model: &Path, golden: &GgufGolden, device: &DeviceOptions) {
    let at = format!("{} on {device:?}", model.display());
    let engine = engine(model, device.clone(), MemoryRequest::default());
    let mut session = engine.session().unwrap();
    let logits = feed(&mut session, &golden.tokens, None);
    let width = logits.len() / golden.tokens.len();
    // Of a long prompt there are a few rows.
    let positions = golden.json.get("positions").map(ids);
    let logits = match &positions {
        None => logits,
        Some(rows) => {
            rows.iter().flat_map(|i| logits[*i as usize * width..][..width].to_vec()).collect()
        }
    };
    let d = distance(&logits, &golden.logits("logits"), width);
    assert!(d <= BAR, "{at}: prefill is off by {d:e}");
    let wanted = golden.logits("greedy_logits");
    let greedy = golden.greedy.iter().take(wanted.len() / width);
    let greedy: Vec<f32> = greedy.flat_map(|token| feed(&mut session, &[*token], None)).collect();
    let d = distance(&greedy, &wanted, width);
    assert!(d <= BAR, "{at}: decode is off by {d:e}");
}

pub(crate) fn tiny() -> std::path::PathBuf {
    data().join("gguf/qwen3moe-tiny")
}

#[test]
fn a_model_has_the_logits_of_llama_cpp() {
    let golden = GgufGolden::read(&tiny());
    for device in ["reference", "cpu"] {
        // By its file, and by its folder.
        matches(&tiny().join("model.gguf"), &golden, &exact(device));
        matches(&tiny(), &golden, &exact(device));
    }
    if let Some(gpu) = gpu(true) {
        matches(&tiny(), &golden, &gpu);
    }
}

/// Cases in the folder that `MOEFLUX_TEST_GGUF` names: a folder each, as that of the test's data.
#[test]
fn further_models_have_the_logits_of_llama_cpp() {
    let Some(folder) = std::env::var_os("MOEFLUX_TEST_GGUF") else {
        println!("MOEFLUX_TEST_GGUF names no folder of further cases");
        return;
    };
    let mut failed = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let golden = GgufGolden::read(&path);
        let run = || {
            let devices = [Some(exact("cpu")), gpu(true)];
            devices.iter().flatten().for_each(|device| matches(&path, &golden, device));
            says_the_tokens(&path, &golden);
            says_the_conversation(&path, &golden);
        };
        if std::panic::catch_unwind(run).is_err() {
            failed.push(path);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// Checks the tokens of texts.
fn says_the_tokens(model: &Path, golden: &GgufGolden) {
    let engine = engine(model, exact("cpu"), MemoryRequest::default());
    let text = engine.text().unwrap();
    for case in golden.json["text"].as_array().into_iter().flatten() {
        let wanted = case.get("tokenizers").unwrap_or(&case["ids"]);
        let said = case["text"].as_str().unwrap();
        let tokens = text.tokenizer().encode(said, false).unwrap();
        assert_eq!(tokens, ids(wanted), "{}: {said:?}", model.display());
    }
}

#[test]
fn texts_become_the_tokens_of_the_makers() {
    says_the_tokens(&tiny(), &GgufGolden::read(&tiny()));
}

/// Kinds of values.
const U8: u32 = 0;
const U16: u32 = 2;
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;
const I64: u32 = 11;

/// Key and encoded value.
#[derive(Clone)]
struct Pair {
    key: Vec<u8>,
    kind: u32,
    value: Vec<u8>,
}

/// Tensor with its data.
#[derive(Clone)]
struct Tensor {
    name: Vec<u8>,
    dims: Vec<u64>,
    kind: u32,
    data: Vec<u8>,
    /// Offset to write in place of the right one.
    offset: Option<u64>,
}

/// Contents of a GGUF file.
#[derive(Clone)]
pub(crate) struct GgufParts {
    pairs: Vec<Pair>,
    tensors: Vec<Tensor>,
    version: u32,
    alignment: usize,
    /// Bytes before the data of each tensor, besides padding.
    gap: usize,
    /// Numbers of tensors and keys to write in place of the right ones.
    counts: Option<[u64; 2]>,
    /// Bytes after the pairs.
    raw: Vec<u8>,
}

fn text(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes(), bytes].concat()
}

fn pair(key: &str, kind: u32, value: impl AsRef<[u8]>) -> Pair {
    Pair { key: key.into(), kind, value: value.as_ref().into() }
}

fn number(key: &str, value: u32) -> Pair {
    pair(key, U32, value.to_le_bytes())
}

fn array(kind: u32, elements: &[Vec<u8>]) -> Vec<u8> {
    let head = [&kind.to_le_bytes()[..], &(elements.len() as u64).to_le_bytes()].concat();
    [head, elements.concat()].concat()
}

/// Reader of a valid file.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, n: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(n);
        self.0 = rest;
        head
    }

    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take(4).try_into().unwrap())
    }

    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take(8).try_into().unwrap())
    }

    fn string(&mut self) -> Vec<u8> {
        let len = self.u64() as usize;
        self.take(len).into()
    }

    fn skip(&mut self, kind: u32) {
        match kind {
            0 | 1 | 7 => drop(self.take(1)),
            2 | 3 => drop(self.take(2)),
            4..=6 => drop(self.take(4)),
            STRING => drop(self.string()),
            ARRAY => {
                let (kind, count) = (self.u32(), self.u64());
                (0..count).for_each(|_| self.skip(kind));
            }
            _ => drop(self.take(8)),
        }
    }
}

impl GgufParts {
    const EMPTY: Self = Self {
        pairs: Vec::new(),
        tensors: Vec::new(),
        version: 3,
        alignment: 32,
        gap: 0,
        counts: None,
        raw: Vec::new(),
    };

    /// Parts of a file with Q8_0 and F32 tensors.
    fn read(file: &[u8]) -> Self {
        let mut bytes = Bytes(&file[8..]);
        let (tensors, keys) = (bytes.u64(), bytes.u64());
        let pairs = (0..keys).map(|_| {
            let (key, kind, before) = (bytes.string(), bytes.u32(), bytes.0);
            bytes.skip(kind);
            Pair { key, kind, value: before[..before.len() - bytes.0.len()].into() }
        });
        let pairs = pairs.collect();
        let entries = (0..tensors).map(|_| {
            let (name, dims) = (bytes.string(), bytes.u32());
            let dims: Vec<u64> = (0..dims).map(|_| bytes.u64()).collect();
            (name, dims, bytes.u32(), bytes.u64() as usize)
        });
        let entries: Vec<_> = entries.collect();
        let start = (file.len() - bytes.0.len()).next_multiple_of(32);
        let tensors = entries.into_iter().map(|(name, dims, kind, offset)| {
            let elements = dims.iter().product::<u64>() as usize;
            let len = if kind == 8 { elements / 32 * 34 } else { elements * 4 };
            let data = file[start + offset..][..len].into();
            Tensor { name, dims, kind, data, offset: None }
        });
        let tensors = tensors.collect();
        Self { pairs, tensors, ..Self::EMPTY }
    }

    pub(crate) fn write(&self) -> Vec<u8> {
        let mut data = Vec::new();
        let offsets: Vec<u64> = self
            .tensors
            .iter()
            .map(|tensor| {
                data.resize(data.len().next_multiple_of(self.alignment) + self.gap, 0);
                data.extend(&tensor.data);
                (data.len() - tensor.data.len()) as u64
            })
            .collect();
        let mut file = [b"GGUF", &self.version.to_le_bytes()[..]].concat();
        let counts = [self.tensors.len() as u64, self.pairs.len() as u64];
        self.counts.unwrap_or(counts).iter().for_each(|n| file.extend(n.to_le_bytes()));
        for Pair { key, kind, value } in &self.pairs {
            file.extend([&text(key)[..], &kind.to_le_bytes(), value].concat());
        }
        file.extend(&self.raw);
        for (tensor, offset) in self.tensors.iter().zip(offsets) {
            file.extend(
                [&text(&tensor.name)[..], &(tensor.dims.len() as u32).to_le_bytes()].concat(),
            );
            tensor.dims.iter().for_each(|dim| file.extend(dim.to_le_bytes()));
            file.extend(tensor.kind.to_le_bytes());
            file.extend(tensor.offset.unwrap_or(offset).to_le_bytes());
        }
        file.resize(file.len().next_multiple_of(self.alignment), 0);
        [file, data].concat()
    }

    /// The parts with this name of a pre-tokenizer.
    pub(crate) fn with_pre(&self, name: &str) -> Self {
        self.with(pair("tokenizer.ggml.pre", STRING, text(name.as_bytes())))
    }

    /// The parts with this kind of tokenizer.
    pub(crate) fn with_tokenizer(&self, name: &str) -> Self {
        self.with(pair("tokenizer.ggml.model", STRING, text(name.as_bytes())))
    }

    /// The parts without a key.
    pub(crate) fn without(&self, key: &str) -> Self {
        let mut parts = self.clone();
        parts.pairs.retain(|pair| pair.key != key.as_bytes());
        assert_eq!(parts.pairs.len() + 1, self.pairs.len(), "{key}");
        parts
    }

    /// The parts with another value of a key.
    fn with(&self, changed: Pair) -> Self {
        let mut parts = self.clone();
        let found = parts.pairs.iter_mut().find(|pair| pair.key == changed.key);
        *found.unwrap() = changed;
        parts
    }

    /// The parts with further keys.
    fn and(&self, pairs: impl IntoIterator<Item = Pair>) -> Self {
        let mut parts = self.clone();
        parts.pairs.extend(pairs);
        parts
    }

    /// The parts with a changed tensor.
    fn tensor(&self, name: &str, change: impl Fn(&mut Tensor)) -> Self {
        let mut parts = self.clone();
        change(parts.tensors.iter_mut().find(|t| t.name == name.as_bytes()).unwrap());
        parts
    }

    /// The parts with these tensors.
    fn holding(&self, tensors: &[Tensor]) -> Self {
        Self { tensors: tensors.into(), ..self.clone() }
    }

    fn value(&self, key: &str) -> Vec<u8> {
        self.pairs.iter().find(|pair| pair.key == key.as_bytes()).unwrap().value.clone()
    }
}

const EXPERTS: &str = "blk.0.ffn_gate_exps.weight";
const TOKENS: &str = "tokenizer.ggml.tokens";

pub(crate) fn base() -> GgufParts {
    GgufParts::read(&fs::read(tiny().join("model.gguf")).unwrap())
}

/// A file with one key, and one tensor of 32 floats unless it is changed.
fn bare(change: impl Fn(&mut Tensor)) -> Vec<u8> {
    let mut tensor =
        Tensor { name: b"a".into(), dims: vec![32], kind: 0, data: vec![0; 256], offset: None };
    change(&mut tensor);
    let parts = base().holding(&[tensor]);
    let pairs = parts.pairs[..1].to_vec();
    GgufParts { pairs, ..parts }.write()
}

/// A file with one key and these bytes for another.
fn raw(bytes: &[&[u8]]) -> Vec<u8> {
    let parts = base().holding(&[]);
    let pairs = parts.pairs[..1].to_vec();
    GgufParts { pairs, raw: bytes.concat(), counts: Some([0, 2]), ..parts }.write()
}

#[test]
fn the_same_model_in_odd_layouts_has_the_same_logits() {
    let (golden, base) = (GgufGolden::read(&tiny()), base());
    let mut reversed = base.clone();
    reversed.pairs.reverse();
    let mut tensors_reversed = base.clone();
    tensors_reversed.tensors.reverse();
    let mut four = base.clone();
    four.tensors.iter_mut().for_each(|t| t.dims.resize(4, 1));
    let nested = array(ARRAY, &[array(U8, &[vec![1], vec![2]]), array(STRING, &[text(b"")])]);
    let kinds = [
        pair("x.u8", U8, [255]),
        pair("x.f64", 12, 0.1f64.to_le_bytes()),
        pair("x.bool", 7, [1]),
        pair("x.empty", ARRAY, array(U32, &[])),
        pair("x.nested", ARRAY, nested),
        pair("x.long", STRING, text(&[b'y'; 300_000])),
        pair("x.no-utf-8", STRING, text(b"\xff\xfe")),
    ];
    let aligned = |alignment: usize| GgufParts {
        alignment,
        ..base.and([number("general.alignment", alignment as u32)])
    };
    let per_layer = array(I32, &[1u32.to_le_bytes().into()]);
    let cases = [
        ("base", base.clone()),
        ("alignment 8", aligned(8)),
        ("alignment 4096", aligned(4096)),
        ("version 2", GgufParts { version: 2, ..base.clone() }),
        ("gaps", GgufParts { gap: 96, ..base.clone() }),
        ("keys reversed", reversed),
        ("tensors reversed", tensors_reversed),
        ("four dimensions", four),
        ("every kind", base.and(kinds)),
        ("u64", base.with(pair("qwen3moe.embedding_length", U64, 32u64.to_le_bytes()))),
        ("i64", base.with(pair("qwen3moe.expert_count", I64, 4i64.to_le_bytes()))),
        // Routers say the number of a pruned model's experts.
        ("experts", base.with(pair("qwen3moe.expert_count", I64, 5i64.to_le_bytes()))),
        ("u16", base.with(pair("qwen3moe.attention.head_count", U16, 2u16.to_le_bytes()))),
        ("heads", base.with(pair("qwen3moe.attention.head_count_kv", ARRAY, per_layer))),
        ("no template", base.without("tokenizer.chat_template")),
    ];
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    for (name, parts) in cases {
        println!("{name}");
        fs::write(&path, parts.write()).unwrap();
        matches(&path, &golden, &exact("cpu"));
    }
    let mut trailing = base.write();
    trailing.extend([255; 1000]);
    fs::write(&path, trailing).unwrap();
    matches(&path, &golden, &exact("cpu"));
}

/// Doubles or halves the weights of Q8_0 tensors by matrix, and puts the factors that undo it
/// beside them.
pub(crate) fn with_factors(base: &GgufParts) -> GgufParts {
    let mut parts = base.clone();
    parts.tensors.clear();
    for mut tensor in base.tensors.iter().cloned() {
        let count = tensor.dims.get(2).copied().unwrap_or(1) as usize;
        let is_row_table = tensor.name == b"token_embd.weight";
        let mut factors = Vec::new();
        if tensor.kind == 8 && !is_row_table {
            let bytes = tensor.data.len() / count;
            for (i, matrix) in tensor.data.chunks_exact_mut(bytes).enumerate() {
                let power = [2.0, 0.5, 4.0][i % 3];
                for block in matrix.chunks_exact_mut(34) {
                    let scale = half::f16::from_le_bytes([block[0], block[1]]).to_f32() * power;
                    block[..2].copy_from_slice(&half::f16::from_f32(scale).to_le_bytes());
                }
                factors.extend(power.recip().to_le_bytes());
            }
        }
        let name = tensor.name.strip_suffix(b"weight").map(|name| [name, b"scale"].concat());
        parts.tensors.push(tensor.clone());
        if let (Some(name), false) = (name, factors.is_empty()) {
            let dims = vec![count as u64];
            let ignored = [name.strip_suffix(b"scale").unwrap(), b"input_scale"].concat();
            let factor = Tensor { name, dims, kind: 0, data: factors, offset: None };
            parts.tensors.push(Tensor {
                name: ignored,
                data: vec![255; 4 * count],
                ..factor.clone()
            });
            parts.tensors.push(factor);
        }
    }
    parts
}

#[test]
fn factors_beside_tensors_multiply_the_weights() {
    let golden = GgufGolden::read(&tiny());
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let parts = with_factors(&base());
    fs::write(&path, parts.write()).unwrap();
    for device in ["reference", "cpu"] {
        matches(&path, &golden, &exact(device));
    }
    let name = "blk.0.ffn_up_exps.scale";
    let short = parts.tensor(name, |t| (t.dims, t.data) = (vec![1], vec![0; 4]));
    let other = parts.tensor(name, |t| (t.kind, t.data) = (1, vec![0; 8]));
    for (wrong, part) in [(short, "4 bytes of F32"), (other, "bytes of F16")] {
        fs::write(&path, wrong.write()).unwrap();
        let said = refusal(&path);
        assert!(said.contains("up_proj.scale") && said.contains(part), "{said}");
    }
}

/// Two parts of the model, under the names of parts.
pub(crate) fn split(base: &GgufParts) -> [GgufParts; 2] {
    let keys = |number: u16| {
        [
            pair("split.no", U16, number.to_le_bytes()),
            pair("split.count", U16, 2u16.to_le_bytes()),
            pair("split.tensors.count", I32, (base.tensors.len() as u32).to_le_bytes()),
        ]
    };
    let (first, second) = base.tensors.split_at(6);
    let later = GgufParts { pairs: Vec::new(), ..base.holding(second) };
    [base.holding(first).and(keys(0)), later.and(keys(1))]
}

#[test]
fn parts_are_one_model_and_found_by_any_of_them() {
    let (golden, [first, second]) = (GgufGolden::read(&tiny()), split(&base()));
    let folder = tempfile::tempdir().unwrap();
    let paths = [1, 2].map(|i| folder.path().join(format!("m-0000{i}-of-00002.gguf")));
    fs::write(&paths[0], first.write()).unwrap();
    fs::write(&paths[1], second.write()).unwrap();
    fs::write(folder.path().join("mmproj-model.gguf"), "").unwrap();
    for path in [&paths[0], &paths[1], folder.path()] {
        matches(path, &golden, &exact("cpu"));
    }
    let fails = |parts: &[&str]| {
        for path in &paths {
            let said = refusal(path);
            assert!(parts.iter().all(|part| said.contains(part)), "{said}");
        }
    };
    fs::write(&paths[1], first.write()).unwrap();
    fails(&["00002-of", "split.no"]);
    let mut twice = second.clone();
    twice.tensors.push(first.tensors[0].clone());
    let mut one_more = first.clone();
    let total = (base().tensors.len() as u32 + 1).to_le_bytes();
    for parts in [&mut twice, &mut one_more] {
        *parts = parts.with(pair("split.tensors.count", I32, total));
    }
    fs::write(&paths[0], one_more.write()).unwrap();
    fs::write(&paths[1], twice.write()).unwrap();
    fails(&["also in"]);
    fs::remove_file(&paths[0]).unwrap();
    let said = refusal(&paths[1]);
    assert!(said.contains("00001-of-00002.gguf") && said.contains("missing"), "{said}");
    fs::write(folder.path().join("alone.gguf"), first.write()).unwrap();
    let said = refusal(&folder.path().join("alone.gguf"));
    assert!(said.contains("split.count"), "{said}");
    let said = refusal(folder.path());
    assert!(said.contains("several") && said.contains("alone.gguf"), "{said}");
}

/// The error of opening a model, which is one line and names the path.
fn refusal(path: &Path) -> String {
    let options = EngineOptions::default().device(exact("cpu"));
    let opened = Checkpoint::open(path)
        .and_then(|checkpoint| Engine::open(checkpoint, options, &mut |_, _| {}));
    let said = opened.map(drop).unwrap_err().to_string();
    assert!(!said.contains('\n') && said.contains(".gguf"), "{said}");
    said
}

/// Files with a fault each: the name, the file and a part of the error.
fn wrong() -> Vec<(String, Vec<u8>, &'static str)> {
    let base = base();
    let good = base.write();
    let all_data: usize = base.tensors.iter().map(|t| t.data.len()).sum();
    let key = |name: &str| format!("qwen3moe.{name}");
    let mut all: Vec<(String, Vec<u8>, &'static str)> = Vec::new();
    let mut add = |name: &str, file: Vec<u8>, part| all.push((name.into(), file, part));
    add("empty", Vec::new(), "empty");
    add("magic only", b"GGUF".into(), "short");
    add("magic", [b"GGUX", &good[4..]].concat(), "not a GGUF file");
    add("ggjt", [b"tjgg", &good[4..4000]].concat(), "older formats");
    for version in [0u32, 1, 4] {
        add("version", [&good[..4], &version.to_le_bytes(), &good[8..]].concat(), "version");
    }
    add("big-endian", [b"GGUF", &3u32.to_be_bytes()[..], &good[8..]].concat(), "big-endian");
    for n in [7, 12, 20, 23, 40, 200, 3000] {
        add("cut", good[..n].into(), "short");
    }
    let ends =
        format!("it ends at byte {}, but the file has {} bytes", good.len(), good.len() - 100);
    add("cut data", good[..good.len() - 100].into(), ends.leak());
    add("cut all data", good[..good.len() - all_data].into(), "short");
    let counted = |counts| GgufParts { counts: Some(counts), ..base.clone() }.write();
    let [tensors, keys] = [base.tensors.len() as u64, base.pairs.len() as u64];
    add("tensors 2^63", counted([1 << 63, keys]), "short");
    add("tensors 2^32", counted([1 << 32, keys]), "short");
    add("keys 2^63", counted([tensors, 1 << 63]), "short");
    add("one key more", counted([tensors, keys + 1]), "");
    for len in [1u64 << 62, u64::MAX] {
        add("key long", raw(&[&len.to_le_bytes(), b"abc"]), "short");
        add("string long", raw(&[&text(b"k"), &STRING.to_le_bytes(), &len.to_le_bytes()]), "short");
    }
    add("key empty", raw(&[&text(b""), &U32.to_le_bytes(), &[1, 0, 0, 0]]), "empty");
    add("key no UTF-8", raw(&[&text(b"\xff\xfe"), &U32.to_le_bytes(), &[1; 4]]), "UTF-8");
    add("key twice", base.and([number(&key("block_count"), 7)]).write(), "twice");
    let claims = |kind: u32, count: u64| {
        raw(&[&text(b"k"), &ARRAY.to_le_bytes(), &kind.to_le_bytes(), &count.to_le_bytes()])
    };
    add("array 2^61", claims(U64, 1 << 61), "short");
    add("array 2^30", claims(U8, 1 << 30), "short");
    add("strings 2^40", claims(STRING, 1 << 40), "short");
    let deep = [&ARRAY.to_le_bytes()[..], &1u64.to_le_bytes()].concat().repeat(10_000);
    add("deep", raw(&[&text(b"k"), &ARRAY.to_le_bytes(), &deep, &[0; 13]]), "too deep");
    add("kind 13", raw(&[&text(b"k"), &13u32.to_le_bytes(), &[0; 8]]), "unknown kind 13");
    let unknown = raw(&[
        &text(b"k"),
        &ARRAY.to_le_bytes(),
        &99u32.to_le_bytes(),
        &1u64.to_le_bytes(),
        &[0; 64],
    ]);
    add("kind 99", unknown, "unknown kind 99");
    let architecture = "general.architecture";
    add("architecture", base.with(number(architecture, 7)).write(), "a text is needed");
    add("architecture", base.without(architecture).write(), "missing");
    add("architecture", base.with(pair(architecture, STRING, text(b"qwen99"))).write(), "qwen99");
    for n in [0, 3, 1 << 31] {
        add("alignment", base.and([number("general.alignment", n)]).write(), "");
    }
    add(
        "alignment",
        base.and([pair("general.alignment", STRING, text(b"32"))]).write(),
        "a whole number is needed",
    );
    add("dims 5", bare(|t| t.dims = vec![32, 1, 1, 1, 1]), "5 dimensions");
    add("dims -1", bare(|t| t.dims = vec![u64::MAX]), "exceed");
    add("dims overflow", bare(|t| t.dims = vec![1 << 32, 1 << 32]), "exceed");
    add("bytes overflow", bare(|t| t.dims = vec![1 << 62]), "exceed");
    add("padding", bare(|t| t.dims = vec![4, (1 << 30) - 1, (1 << 30) + 1]), "exceed");
    add("dims 0", bare(|t| t.dims = vec![32, 0]), "dimensions is 0");
    for kind in [4, 5, 31, 36, 38, 43, 9999, 1 << 31] {
        add("type", bare(|t| (t.dims, t.kind) = (vec![256], kind)), "its type");
    }
    let experts = |change: &dyn Fn(&mut Tensor)| base.tensor(EXPERTS, change).write();
    add("rows", experts(&|t| t.kind = 12), "whole blocks");
    add("offset odd", experts(&|t| t.offset = Some(28420)), "multiple");
    add("offset beyond", experts(&|t| t.offset = Some(1 << 40)), "it ends at byte 10995");
    for offset in [1 << 63, u64::MAX - 31] {
        add("offset huge", experts(&|t| t.offset = Some(offset)), "exceeds any file");
    }
    add("offset odd and huge", experts(&|t| t.offset = Some(u64::MAX)), "2^63 or more");
    add("dims odd and huge", experts(&|t| t.dims[0] = u64::MAX), "exceed any file");
    add("overlap", experts(&|t| t.offset = Some(0)), "overlap");
    let mut twice = base.clone();
    twice.tensors.push(twice.tensors[0].clone());
    add("tensor twice", twice.write(), "twice");
    add("name long", experts(&|t| t.name = vec![b'n'; 10_000]), "");
    let mut missing = base.clone();
    missing.tensors.retain(|t| t.name != b"blk.0.ffn_down_exps.weight");
    add("no down", missing.write(), "down_proj");
    add("transposed", experts(&|t| t.dims.reverse()), "whole blocks");
    let short = base.tensor("blk.0.attn_norm.weight", |t| {
        t.dims = vec![16];
        t.data.truncate(64);
    });
    add("norm short", short.write(), "shape");
    for (name, values) in [
        ("expert_count", &[0, 1 << 31][..]),
        ("expert_used_count", &[0, 5]),
        ("block_count", &[0, u32::MAX]),
        ("attention.head_count", &[0]),
        ("embedding_length", &[0]),
    ] {
        for value in values {
            add(name, base.with(number(&key(name), *value)).write(), "");
        }
    }
    add("no experts", base.without(&key("expert_count")).write(), "expert_count");
    let embedding = pair(&key("embedding_length"), STRING, text(b"32"));
    add("embedding", base.with(embedding).write(), "a whole number is needed");
    let eps = pair(&key("attention.layer_norm_rms_epsilon"), F32, f32::NAN.to_le_bytes());
    add("epsilon", base.with(eps).write(), "a finite number is needed");
    let none = pair(&key("attention.head_count_kv"), ARRAY, array(I32, &[]));
    add("heads", base.with(none).write(), "0 values for 1 layers");
    add("no tokens", base.without(TOKENS).write(), "missing");
    let numbers: Vec<_> = (0..300u32).map(|n| n.to_le_bytes().to_vec()).collect();
    add("tokens", base.with(pair(TOKENS, ARRAY, array(U32, &numbers))).write(), "texts");
    let tokens = base.value(TOKENS);
    let mut bytes = Bytes(&tokens[12..]);
    let mut list: Vec<_> = (0..300).map(|_| text(&bytes.string())).collect();
    list[299] = list[0].clone();
    add("token twice", base.with(pair(TOKENS, ARRAY, array(STRING, &list))).write(), "twice");
    let types = array(I32, &[1, 1, 1].map(|n: u32| n.to_le_bytes().to_vec()));
    let types = pair("tokenizer.ggml.token_type", ARRAY, types);
    add("types", base.with(types).write(), "token_type");
    add("eos", base.with(number("tokenizer.ggml.eos_token_id", 1 << 31)).write(), "eos_token_id");
    let named = |key: &str, name: &[u8]| base.with(pair(key, STRING, text(name))).write();
    add("pre", base.with_pre("qwen99").write(), "qwen99");
    add("tokenizer", base.with_tokenizer("rwkv9").write(), "rwkv9");
    add("adapter", named("general.type", b"adapter"), "adapter");
    add("projector", named("general.type", b"mmproj"), "projector");
    add("imatrix", named("general.type", b"imatrix"), "importance matrix");
    let none = [pair("split.no", U16, [0, 0]), pair("split.count", U16, [0, 0])];
    add("split", base.and(none).write(), "split.count");
    all
}

/// Tokenizers of all kinds, in the model with rows of zeros for their tokens.
#[test]
fn every_kind_of_tokenizer_is_that_of_its_makers() {
    let folder = tempfile::tempdir().unwrap();
    let vocab = data().join("gguf/vocab");
    for name in ["deepseek-v3", "gemma4", "glm4", "gpt-4o", "kimi-k2", "llama", "qwen35"] {
        let json = fs::read(vocab.join(format!("{name}.json"))).unwrap();
        let json: Value = serde_json::from_slice(&json).unwrap();
        let tokenizer = GgufParts::read(&fs::read(vocab.join(format!("{name}.gguf"))).unwrap());
        let is_text = |pair: &&Pair| pair.key.starts_with(b"tokenizer.");
        let mut model = base();
        model.pairs.retain(|pair| !is_text(&pair));
        let model = model.and(tokenizer.pairs.iter().filter(is_text).cloned());
        let tokens = model.value(TOKENS);
        let count = u64::from_le_bytes(tokens[4..12].try_into().unwrap());
        let embedding = |t: &mut Tensor| {
            (t.dims, t.kind, t.data) = (vec![32, count], 0, vec![0; count as usize * 128]);
        };
        let model = model.tensor("token_embd.weight", embedding).tensor("output.weight", embedding);
        let path = folder.path().join(format!("{name}.gguf"));
        fs::write(&path, model.write()).unwrap();
        let engine = engine(&path, exact("cpu"), MemoryRequest::default());
        let text = engine.text().unwrap();
        for case in json["text"].as_array().unwrap() {
            let said = case["text"].as_str().unwrap();
            let tokens = text.tokenizer().encode(said, false).unwrap();
            assert_eq!(tokens, ids(&case["ids"]), "{name}: {said:?}");
        }
        let (said, wanted) = (&json["with_bos"]["text"], ids(&json["with_bos"]["ids"]));
        assert_eq!(text.encode(said.as_str().unwrap()).unwrap(), wanted, "{name}");
    }
}

#[test]
fn files_with_a_fault_are_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("wrong.gguf");
    for (name, file, part) in wrong() {
        fs::write(&path, file).unwrap();
        let said = refusal(&path);
        assert!(said.contains(part), "{name}: {said}");
        // No number is one that was saturated or wrapped.
        let mut numbers = said.split(|c: char| !c.is_ascii_digit()).filter(|n| !n.is_empty());
        assert!(numbers.all(|n| n.parse::<i64>().is_ok()), "{name}: {said}");
    }
}

#[test]
fn pieces_of_a_file_are_to_be_joined() {
    let temp = tempfile::tempdir().unwrap();
    for (name, command) in [
        ("m.gguf.part1of2", "`cat m.gguf.part1of2 m.gguf.part2of2 > m.gguf`"),
        ("m.gguf.part2of11", "m.gguf.part9of11 m.gguf.part10of11 m.gguf.part11of11 > m.gguf`"),
        ("m.gguf.part1of4000000000", "`cat m.gguf.part* > m.gguf`"),
        ("m.gguf.split-a", "`cat m.gguf.split* > m.gguf`"),
        ("m.gguf-split-a", "`cat m.gguf-split* > m.gguf`"),
    ] {
        let folder = temp.path().join(name);
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join(name), "").unwrap();
        let (file, whole) = (refusal(&folder.join(name)), refusal(&folder));
        // Repositories of GGUF files have configs, too.
        fs::write(folder.join("config.json"), "{}").unwrap();
        for said in [file, whole, refusal(&folder)] {
            assert!(said.contains(&format!("{name} is a piece")), "{said}");
            assert!(said.contains(command), "{said}");
        }
    }
}

#[test]
fn errors_are_of_the_checkpoint() {
    let missing = Checkpoint::open(&tiny().join("none.gguf")).unwrap_err();
    assert!(matches!(missing, Error::Checkpoint { .. }), "{missing}");
}
