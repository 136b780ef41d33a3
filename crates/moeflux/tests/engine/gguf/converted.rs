//! Metadata and tensors of a golden as llama.cpp's converter makes them, by the file of a family.

use std::{collections::BTreeMap, fs};

use safetensors::{Dtype, SafeTensors};

use super::{ARRAY, F32, I32, Pair, STRING, Tensor, U32, U64, array, number, pair, text};
use crate::common::{Golden, data, shards};

/// A tensor of the golden in f32.
struct Weights {
    shape: Vec<usize>,
    numbers: Vec<f32>,
}

impl Weights {
    /// All weights of a golden, by name.
    fn of(golden: &Golden) -> BTreeMap<String, Self> {
        let mut all = BTreeMap::new();
        for shard in shards(&golden.folder) {
            let bytes = fs::read(golden.folder.join(shard)).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                let numbers = match view.dtype() {
                    Dtype::F32 => view
                        .data()
                        .chunks_exact(4)
                        .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                        .collect(),
                    Dtype::BF16 => view
                        .data()
                        .chunks_exact(2)
                        .map(|b| f32::from_bits(u32::from_le_bytes([0, 0, b[0], b[1]])))
                        .collect(),
                    // Small ones.
                    Dtype::I64 => view
                        .data()
                        .chunks_exact(8)
                        .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f32)
                        .collect(),
                    other => panic!("{name}: {other:?}"),
                };
                all.insert(name, Self { shape: view.shape().to_vec(), numbers });
            }
        }
        all
    }

    /// Rows `first..first + count`, in the order that `from` gives.
    fn rows(&self, count: usize, from: impl Fn(usize) -> usize) -> Self {
        let width = self.numbers.len() / self.shape[0];
        let row = |i| self.numbers[from(i) * width..][..width].to_vec();
        let numbers = (0..count).flat_map(row).collect();
        Self { shape: [&[count], &self.shape[1..]].concat(), numbers }
    }

    /// Value heads of delta-nets, dealt out to the key heads in turn: the rows from `first` on, of
    /// `width` for each head.
    fn dealt(&self, first: usize, width: usize, family: &Family) -> Self {
        let (heads, of_keys) = (family.size("ssm.time_step_rank"), family.size("ssm.group_count"));
        self.rows(self.shape[0], |i| {
            let Some(i) = i.checked_sub(first) else { return i };
            let head = i / width % of_keys * (heads / of_keys) + i / width / of_keys;
            first + head * width + i % width
        })
    }

    /// Rows as columns.
    fn transposed(&self) -> Self {
        let [rows, cols] = self.shape[..] else { panic!("{:?}", self.shape) };
        let numbers = (0..rows * cols).map(|i| self.numbers[i % rows * cols + i / rows]);
        Self { shape: vec![cols, rows], numbers: numbers.collect() }
    }

    /// Each head's rows: `0, n/2, 1, n/2 + 1, ...` of `n`.
    fn interleaved(&self, heads: usize) -> Self {
        let (rows, n) = (self.shape[0], self.shape[0] / heads);
        self.rows(rows, |i| i / n * n + i % n / 2 + i % 2 * (n / 2))
    }

    /// The same numbers in other dimensions.
    fn shaped(&self, shape: &[usize]) -> Self {
        assert_eq!(shape.iter().product::<usize>(), self.numbers.len());
        Self { shape: shape.to_vec(), numbers: self.numbers.clone() }
    }

    /// A function of each number.
    fn map(&self, of: impl Fn(f32) -> f32) -> Self {
        Self { shape: self.shape.clone(), numbers: self.numbers.iter().copied().map(of).collect() }
    }

    fn tensor(self, name: &str) -> Tensor {
        let dims = self.shape.iter().rev().map(|n| *n as u64).collect();
        let is_ids = name.ends_with("_tid2eid.weight");
        let bytes = |x: &f32| if is_ids { (*x as i32).to_le_bytes() } else { x.to_le_bytes() };
        let data = self.numbers.iter().flat_map(bytes).collect();
        // I32 or F32.
        let kind = if is_ids { 26 } else { 0 };
        Tensor { name: name.into(), dims, kind, data, offset: None }
    }
}

/// Line of a family's file that names a tensor.
struct Line {
    gguf: String,
    change: String,
    hub: String,
}

/// A family and one of its goldens: a file of `tests/data/gguf/converted`.
#[derive(Default)]
pub(super) struct Family {
    pub(super) golden: String,
    /// `general.architecture`.
    name: String,
    /// Keys after the architecture's prefix, and values.
    pub(super) keys: BTreeMap<String, String>,
    /// Names in GGUF and on the Hub, in place of the common ones and besides them.
    names: Vec<Line>,
    /// Tensors that the converter makes of the config.
    vectors: Vec<Tensor>,
}

impl Family {
    /// All families, in the order of their goldens' names.
    pub(super) fn all() -> Vec<Self> {
        let files = fs::read_dir(data().join("gguf/converted")).unwrap();
        let names = files.map(|file| file.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.filter(|name| name != "common.keys").collect();
        names.sort();
        assert!(names.len() >= 37, "{names:?}");
        let families = names.iter().map(|name| Self::read(name.strip_suffix(".keys").unwrap()));
        let families: Vec<_> = families.collect();
        let nameless = families.iter().find(|family| family.name.is_empty());
        assert!(nameless.is_none(), "no general.architecture: {:?}", nameless.map(|f| &f.golden));
        families
    }

    /// The file of a golden: lines `KEY = VALUE`, then the sections `[tensors]` with lines
    /// `GGUF = HUB` or `GGUF = CHANGE HUB`, or `as GOLDEN` for the names of another file,
    /// and `[vectors]` with lines `GGUF = NUMBERS`.
    pub(super) fn read(golden: &str) -> Self {
        let path = data().join(format!("gguf/converted/{golden}.keys"));
        let file = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut family = Self { golden: golden.into(), ..Self::default() };
        let mut section = "";
        for (i, line) in file.lines().enumerate() {
            let at = format!("{}:{}: {line}", path.display(), i + 1);
            let words: Vec<_> = line.split(' ').collect();
            match (section, &words[..]) {
                (_, [""] | ["#", ..]) => {}
                (_, ["[tensors]" | "[vectors]"]) => section = line,
                ("", ["general.architecture", "=", name]) => family.name = name.to_string(),
                ("", [key, "=", value]) => {
                    let before = family.keys.insert(key.to_string(), value.to_string());
                    assert_eq!(before, None, "{at}");
                }
                ("[tensors]", ["as", golden]) => family.names.extend(Self::read(golden).names),
                ("[tensors]", [gguf, "=", change @ .., hub]) if change.len() < 2 => {
                    let (gguf, hub) = (gguf.to_string(), hub.to_string());
                    family.names.push(Line { gguf, change: change.concat(), hub });
                }
                ("[vectors]", [name, "=", numbers @ ..]) => {
                    let numbers: Vec<f32> = numbers.iter().map(|n| n.parse().expect(&at)).collect();
                    let vector = Weights { shape: vec![numbers.len()], numbers };
                    family.vectors.push(vector.tensor(name));
                }
                _ => panic!("{at}"),
            }
        }
        family
    }

    fn size(&self, key: &str) -> usize {
        self.keys[key].parse().unwrap()
    }

    /// The family with another value of one key, or without it.
    pub(super) fn with(mut self, key: &str, value: &str) -> Self {
        match value {
            "" => self.keys.remove(key),
            value => self.keys.insert(key.into(), value.into()),
        };
        self
    }

    /// The largest number of a list, or the only one; 0 without the key.
    fn largest(&self, key: &str) -> usize {
        let list = self.keys.get(key).map_or("", |list| list.trim_matches(['[', ']']));
        list.split(',').filter_map(|n| n.parse().ok()).max().unwrap_or(0)
    }

    /// Metadata of the file.
    pub(super) fn pairs(&self) -> Vec<Pair> {
        let element = |text: &str| match text {
            "true" | "false" => (7, vec![u8::from(text == "true")]),
            _ if text.contains('.') => (F32, text.parse::<f32>().unwrap().to_le_bytes().into()),
            _ => match text.parse::<i32>() {
                Ok(n) => (I32, n.to_le_bytes().into()),
                Err(_) => (U64, text.parse::<u64>().unwrap().to_le_bytes().into()),
            },
        };
        let pairs = self.keys.iter().map(|(key, value)| {
            let (key, value) = (format!("{}.{key}", self.name), value.as_str());
            if let Some(list) = value.strip_prefix('[') {
                let elements: Vec<_> = list.trim_end_matches(']').split(',').map(element).collect();
                let bytes: Vec<_> = elements.iter().map(|(_, bytes)| bytes.clone()).collect();
                return pair(&key, ARRAY, array(elements[0].0, &bytes));
            }
            if value.starts_with(|c: char| c.is_alphabetic()) && !["true", "false"].contains(&value)
            {
                return pair(&key, STRING, text(value.as_bytes()));
            }
            let (kind, bytes) = element(value);
            pair(&key, if kind == I32 { U32 } else { kind }, bytes)
        });
        let words = |words: &[&str]| {
            array(STRING, &words.iter().map(|word| text(word.as_bytes())).collect::<Vec<_>>())
        };
        let fixed = [
            pair("general.architecture", STRING, text(self.name.as_bytes())),
            pair("tokenizer.ggml.model", STRING, text(b"gpt2")),
            pair("tokenizer.ggml.pre", STRING, text(b"gpt-2")),
            pair("tokenizer.ggml.tokens", ARRAY, words(&["a", "b"])),
            pair("tokenizer.ggml.merges", ARRAY, words(&[])),
            number("tokenizer.ggml.eos_token_id", 1),
        ];
        fixed.into_iter().chain(pairs).collect()
    }
}

/// A name without the numbers of layer and expert: `*` and `#` stand for them.
struct Pattern {
    name: String,
    layer: Option<usize>,
    expert: Option<usize>,
}

impl Pattern {
    fn of(name: &str) -> Self {
        let mut found = Self { name: String::new(), layer: None, expert: None };
        let mut before = "";
        for part in name.split('.') {
            let place = match before {
                "layers" => Some((&mut found.layer, "*")),
                "experts" | "ngram_embedding" => Some((&mut found.expert, "#")),
                _ => None,
            };
            let part = match (place, part.trim_start_matches("shard_").parse().ok()) {
                (Some((place, sign)), Some(n)) => {
                    *place = Some(n);
                    sign
                }
                _ => part,
            };
            found.name += if before.is_empty() { "" } else { "." };
            found.name += part;
            before = part;
        }
        found
    }
}

/// A tensor as the converter changes it.
fn changed(line: &Line, weights: &Weights, family: &Family) -> Weights {
    let part = line.gguf.trim_end_matches(".weight").rsplit('.').next().unwrap();
    let heads = family.largest("attention.head_count");
    let kv_heads = family.largest("attention.head_count_kv");
    let of_part = if part == "attn_q" { heads } else { kv_heads };
    match line.change.as_str() {
        "" => weights.map(|x| x),
        "plus1" => weights.map(|x| x + 1.0),
        "decay" => weights.map(|x| -x.exp()),
        "decay_column" => weights.map(|x| -x.exp()).shaped(&[weights.numbers.len(), 1]),
        "growth_column" => weights.map(f32::exp).shaped(&[weights.numbers.len(), 1]),
        "column" => weights.shaped(&[weights.numbers.len(), 1]),
        // A row for each group.
        "groups" => {
            let groups = family.size("ssm.group_count");
            weights.shaped(&[groups, weights.numbers.len() / groups])
        }
        // Filters `[channels, 1, taps]`.
        "taps" => weights.shaped(&[weights.shape[0], weights.shape[2]]),
        "taps4" => weights.shaped(&[1, weights.shape[0], 1, weights.shape[2]]),
        "rope" => weights.interleaved(of_part),
        // One matrix of queries, keys and values, of which RoPE rotates the first two.
        "qkv" => {
            let width = weights.shape[0] / (heads + 2 * kv_heads);
            let first = match part {
                "attn_q" => 0,
                "attn_k" => heads,
                _ => heads + kv_heads,
            };
            let rows = weights.rows(of_part * width, |i| first * width + i);
            if part == "attn_v" { rows } else { rows.interleaved(of_part) }
        }
        "dealt" => {
            let heads = family.size("ssm.time_step_rank");
            let width = family.size("ssm.inner_size") / heads;
            let queries_and_keys =
                2 * family.size("ssm.group_count") * family.size("ssm.state_size");
            match part {
                "attn_qkv" => weights.dealt(queries_and_keys, width, family),
                "ssm_conv1d" => {
                    let channels = weights.dealt(queries_and_keys, width, family);
                    channels.shaped(&[weights.shape[0], weights.shape[2]])
                }
                "attn_gate" => weights.dealt(0, width, family),
                "ssm_out" => weights.transposed().dealt(0, width, family).transposed(),
                "ssm_a" => weights.dealt(0, 1, family).map(|x| -x.exp()),
                _ => weights.dealt(0, 1, family),
            }
        }
        // Queries of an indexer above its keys.
        "indexer" => {
            let queries = family.size("attention.indexer.head_count")
                * family.size("attention.indexer.key_length");
            match part {
                "q_proj" => weights.rows(queries, |i| i),
                _ => weights.rows(weights.shape[0] - queries, |i| queries + i),
            }
        }
        // Gate and up matrices, one below the other, of one or of several experts.
        "half" => {
            let mut shape = weights.shape.clone();
            let [.., rows, cols] = &mut shape[..] else { panic!("{:?}", weights.shape) };
            *rows /= 2;
            let half = *rows * *cols;
            let first = if part.starts_with("ffn_up") { half } else { 0 };
            let numbers = weights.numbers.chunks_exact(2 * half);
            let numbers = numbers.flat_map(|both| both[first..][..half].to_vec()).collect();
            Weights { shape, numbers }
        }
        "centered" => {
            let mean = weights.numbers.iter().sum::<f32>() / weights.numbers.len() as f32;
            let numbers = weights.numbers.iter().map(|x| x - mean).collect();
            Weights { shape: weights.shape.clone(), numbers }
        }
        // Keys by head, transposed, and values by head.
        "kv_b" => {
            let (rank, values) =
                (family.size("attention.kv_lora_rank"), family.size("attention.value_length_mla"));
            let plain =
                family.size("attention.key_length_mla") - family.size("rope.dimension_count");
            let at = |head: usize, row: usize, col: usize| {
                weights.numbers[(head * (plain + values) + row) * rank + col]
            };
            let [rows, cols] = if part == "attn_v_b" { [values, rank] } else { [rank, plain] };
            let numbers = (0..heads * rows * cols).map(|i| {
                let (head, row, col) = (i / (rows * cols), i / cols % rows, i % cols);
                match part {
                    "attn_v_b" => at(head, plain + row, col),
                    _ => at(head, col, row),
                }
            });
            Weights { shape: vec![heads, rows, cols], numbers: numbers.collect() }
        }
        other => panic!("{other}"),
    }
}

/// The tensors of a family's file.
pub(super) fn tensors(family: &Family, golden: &Golden) -> Vec<Tensor> {
    let (own, common) = (&family.names, Family::read("common").names);
    let layers = family.size("block_count") - family.largest("nextn_predict_layers");
    let mut files: BTreeMap<String, Vec<(usize, Weights)>> = BTreeMap::new();
    for (name, weights) in Weights::of(golden) {
        // Models that see or listen have a module more.
        let name = name.replacen("model.language_model.", "model.", 1);
        let name = name.strip_prefix("thinker.").unwrap_or(&name).to_owned();
        let pattern = Pattern::of(&name);
        if pattern.layer.is_some_and(|layer| layer >= layers) || name.contains("vision") {
            continue;
        }
        // A line for one layer counts before those for all.
        let is_it = |line: &&Line| line.hub == name;
        let is_of_all = |line: &&Line| line.hub == pattern.name;
        let mut found: Vec<_> = own.iter().filter(is_it).collect();
        for lines in [own, &common] {
            if found.is_empty() {
                found = lines.iter().filter(is_of_all).collect();
            }
        }
        assert!(!found.is_empty(), "{}: no name for {name}", family.golden);
        // A tensor that became metadata has no name.
        for line in found.into_iter().filter(|line| line.gguf != "-") {
            let layer = pattern.layer.map_or(String::new(), |layer| layer.to_string());
            let gguf = line.gguf.replace('*', &layer);
            let weights = changed(line, &weights, family);
            files.entry(gguf).or_default().push((pattern.expert.unwrap_or(0), weights));
        }
    }
    let stacked = |(name, mut parts): (String, Vec<(usize, Weights)>)| {
        parts.sort_by_key(|(expert, _)| *expert);
        let shape = parts[0].1.shape.clone();
        let shape = match parts.len() {
            1 => shape,
            // Rows of a table in shards.
            _ if name.starts_with("per_layer") => vec![parts.len() * shape[0], shape[1]],
            count => [&[count], &shape[..]].concat(),
        };
        let numbers = parts.into_iter().flat_map(|(_, weights)| weights.numbers).collect();
        Weights { shape, numbers }.tensor(&name)
    };
    files.into_iter().map(stacked).chain(family.vectors.iter().cloned()).collect()
}
