//! Goldens of many families as GGUF files: names, config and changes of tensors.
//!
//! Each file has the keys and names of tensors that llama.cpp's converter writes for the golden,
//! as literals from its files, and the golden's weights, changed as the converter changes them.

use std::{collections::BTreeMap, fs};

use safetensors::{Dtype, SafeTensors};

use super::{
    ARRAY, BAR, F32, GgufParts, I32, Pair, STRING, Tensor, U32, array, distance, number, pair, text,
};
use crate::common::{Golden, engine, exact, feed, shards};
use moeflux::MemoryRequest;

/// A family, and one of its goldens.
#[derive(Clone, Copy)]
struct Family {
    golden: &'static str,
    /// `general.architecture`.
    name: &'static str,
    /// FamilyKeys after the architecture's prefix, and values.
    keys: &'static str,
    /// Names in GGUF and on the Hub, in place of those of [`COMMON`] and besides them.
    names: &'static str,
    /// Tensors that the converter makes of the config.
    vectors: &'static [(&'static str, &'static [f32])],
}

const PLAIN: Family = Family { golden: "", name: "", keys: "", names: "", vectors: &[] };

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

    /// Each head's rows: `0, n/2, 1, n/2 + 1, ...` of `n`.
    fn interleaved(&self, heads: usize) -> Self {
        let (rows, n) = (self.shape[0], self.shape[0] / heads);
        self.rows(rows, |i| i / n * n + i % n / 2 + i % 2 * (n / 2))
    }

    fn tensor(self, name: &str) -> Tensor {
        let dims = self.shape.iter().rev().map(|n| *n as u64).collect();
        let data = self.numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        Tensor { name: name.into(), dims, kind: 0, data, offset: None }
    }
}

/// Metadata of a family's file.
struct FamilyKeys(BTreeMap<&'static str, &'static str>);

impl FamilyKeys {
    fn of(family: &Family) -> Self {
        let keys = family.keys.split_whitespace().map(|key| key.split_once('=').unwrap());
        Self(keys.collect())
    }

    fn size(&self, key: &str) -> usize {
        self.0[key].parse().unwrap()
    }

    fn pairs(&self, family: &Family) -> Vec<Pair> {
        let element = |text: &str| match text {
            "true" | "false" => (7, vec![u8::from(text == "true")]),
            _ if text.contains('.') => (F32, text.parse::<f32>().unwrap().to_le_bytes().into()),
            _ => (I32, text.parse::<i32>().unwrap().to_le_bytes().into()),
        };
        let pairs = self.0.iter().map(|(key, value)| {
            let key = format!("{}.{key}", family.name);
            if let Some(list) = value.strip_prefix('[') {
                let elements: Vec<_> = list.trim_end_matches(']').split(',').map(element).collect();
                let bytes: Vec<_> = elements.iter().map(|(_, bytes)| bytes.clone()).collect();
                return pair(&key, ARRAY, array(elements[0].0, &bytes));
            }
            if value.starts_with(|c: char| c.is_alphabetic()) && !["true", "false"].contains(value)
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
            pair("general.architecture", STRING, text(family.name.as_bytes())),
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
                "experts" => Some((&mut found.expert, "#")),
                _ => None,
            };
            let part = match (place, part.parse().ok()) {
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

/// A line of a table: `GGUF = HUB` or `GGUF = CHANGE HUB`.
#[derive(Clone, Copy)]
struct Line {
    gguf: &'static str,
    change: &'static str,
    hub: &'static str,
}

fn lines(table: &'static str) -> Vec<Line> {
    let line = |line: &'static str| {
        let (gguf, hub) = line.split_once(" = ")?;
        let (change, hub) = hub.split_once(' ').unwrap_or(("", hub));
        Some(Line { gguf, change, hub })
    };
    table.lines().filter_map(line).collect()
}

/// A tensor as the converter changes it.
fn changed(line: Line, weights: &Weights, keys: &FamilyKeys) -> Weights {
    let part = line.gguf.trim_end_matches(".weight").rsplit('.').next().unwrap();
    let heads = keys.0["attention.head_count"].parse().unwrap_or(0);
    let kv_heads = keys.0["attention.head_count_kv"].parse().unwrap_or(0);
    let of_part = if part == "attn_q" { heads } else { kv_heads };
    match line.change {
        "" => Weights { shape: weights.shape.clone(), numbers: weights.numbers.clone() },
        "plus1" => Weights {
            shape: weights.shape.clone(),
            numbers: weights.numbers.iter().map(|x| x + 1.0).collect(),
        },
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
        // A stack of gate and up matrices, one below the other.
        "half" => {
            let [experts, rows, cols] = weights.shape[..] else { panic!("{:?}", weights.shape) };
            let half = rows / 2 * cols;
            let first = if part == "ffn_up_exps" { half } else { 0 };
            let numbers = (0..experts)
                .flat_map(|expert| weights.numbers[expert * 2 * half + first..][..half].to_vec());
            Weights { shape: vec![experts, rows / 2, cols], numbers: numbers.collect() }
        }
        "centered" => {
            let mean = weights.numbers.iter().sum::<f32>() / weights.numbers.len() as f32;
            let numbers = weights.numbers.iter().map(|x| x - mean).collect();
            Weights { shape: weights.shape.clone(), numbers }
        }
        // FamilyKeys by head, transposed, and values by head.
        "kv_b" => {
            let (rank, values) =
                (keys.size("attention.kv_lora_rank"), keys.size("attention.value_length_mla"));
            let plain = keys.size("attention.key_length_mla") - keys.size("rope.dimension_count");
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
fn tensors(family: &Family, golden: &Golden, keys: &FamilyKeys) -> Vec<Tensor> {
    let (own, common) = (lines(family.names), lines(COMMON));
    let predicted = keys.0.get("nextn_predict_layers").map_or(0, |n| n.parse().unwrap());
    let layers = keys.size("block_count") - predicted;
    let mut files: BTreeMap<String, Vec<(usize, Weights)>> = BTreeMap::new();
    for (name, weights) in Weights::of(golden) {
        let pattern = Pattern::of(&name);
        if pattern.layer.is_some_and(|layer| layer >= layers) || name.contains("vision") {
            continue;
        }
        let is_it = |line: &&Line| line.hub == pattern.name;
        let mut found: Vec<_> = own.iter().filter(is_it).collect();
        if found.is_empty() {
            found = common.iter().filter(is_it).collect();
        }
        assert!(!found.is_empty(), "{}: no name for {name}", family.golden);
        for line in found {
            let layer = pattern.layer.map_or(String::new(), |layer| layer.to_string());
            let gguf = line.gguf.replace('*', &layer);
            let weights = changed(*line, &weights, keys);
            files.entry(gguf).or_default().push((pattern.expert.unwrap_or(0), weights));
        }
    }
    let stacked = |(name, mut parts): (String, Vec<(usize, Weights)>)| {
        parts.sort_by_key(|(expert, _)| *expert);
        let shape = parts[0].1.shape.clone();
        let shape = if parts.len() == 1 { shape } else { [&[parts.len()], &shape[..]].concat() };
        let numbers = parts.into_iter().flat_map(|(_, weights)| weights.numbers).collect();
        Weights { shape, numbers }.tensor(&name)
    };
    let made = family.vectors.iter().map(|(name, numbers)| {
        Weights { shape: vec![numbers.len()], numbers: numbers.to_vec() }.tensor(name)
    });
    files.into_iter().map(stacked).chain(made).collect()
}

#[test]
fn families_have_the_logits_of_their_goldens() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    let mut failed = Vec::new();
    for family in &FAMILIES {
        let golden = Golden::read(family.golden);
        let keys = FamilyKeys::of(family);
        let tensors = tensors(family, &golden, &keys);
        let parts = GgufParts { pairs: keys.pairs(family), tensors, ..GgufParts::EMPTY };
        fs::write(&path, parts.write()).unwrap();
        let run = || {
            let engine = engine(&path, exact("cpu"), MemoryRequest::default());
            let mut session = engine.session().unwrap();
            let prefilled = feed(&mut session, &golden.prompt(), None);
            let decoded: Vec<f32> = golden
                .generated()
                .iter()
                .flat_map(|token| feed(&mut session, &[*token], None))
                .collect();
            let wanted = golden.floats("prefill_logits_f32").unwrap();
            let last = &prefilled[prefilled.len() - wanted.numbers.len()..];
            let d = distance(last, &wanted.numbers, wanted.width);
            let wanted = golden.floats("decode_logits_f32").unwrap();
            let d = d.max(distance(&decoded, &wanted.numbers, wanted.width));
            println!("{}: {d:e}", family.golden);
            assert!(d <= BAR, "{}: off by {d:e}", family.golden);
        };
        if std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)).is_err() {
            failed.push(family.golden);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

/// Names of all families that have the tensor.
const COMMON: &str = "
token_embd.weight = model.embed_tokens.weight
output_norm.weight = model.norm.weight
output.weight = lm_head.weight
blk.*.attn_norm.weight = model.layers.*.input_layernorm.weight
blk.*.attn_q.weight = model.layers.*.self_attn.q_proj.weight
blk.*.attn_k.weight = model.layers.*.self_attn.k_proj.weight
blk.*.attn_v.weight = model.layers.*.self_attn.v_proj.weight
blk.*.attn_output.weight = model.layers.*.self_attn.o_proj.weight
blk.*.attn_q_norm.weight = model.layers.*.self_attn.q_norm.weight
blk.*.attn_k_norm.weight = model.layers.*.self_attn.k_norm.weight
blk.*.ffn_norm.weight = model.layers.*.post_attention_layernorm.weight
blk.*.ffn_gate.weight = model.layers.*.mlp.gate_proj.weight
blk.*.ffn_up.weight = model.layers.*.mlp.up_proj.weight
blk.*.ffn_down.weight = model.layers.*.mlp.down_proj.weight
blk.*.ffn_gate_inp.weight = model.layers.*.mlp.gate.weight
blk.*.exp_probs_b.bias = model.layers.*.mlp.gate.e_score_correction_bias
blk.*.ffn_gate_exps.weight = model.layers.*.mlp.experts.#.gate_proj.weight
blk.*.ffn_up_exps.weight = model.layers.*.mlp.experts.#.up_proj.weight
blk.*.ffn_down_exps.weight = model.layers.*.mlp.experts.#.down_proj.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.mlp.shared_experts.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.mlp.shared_experts.up_proj.weight
blk.*.ffn_down_shexp.weight = model.layers.*.mlp.shared_experts.down_proj.weight
blk.*.attn_q_a.weight = model.layers.*.self_attn.q_a_proj.weight
blk.*.attn_q_a_norm.weight = model.layers.*.self_attn.q_a_layernorm.weight
blk.*.attn_q_b.weight = model.layers.*.self_attn.q_b_proj.weight
blk.*.attn_kv_a_mqa.weight = model.layers.*.self_attn.kv_a_proj_with_mqa.weight
blk.*.attn_kv_a_norm.weight = model.layers.*.self_attn.kv_a_layernorm.weight
blk.*.attn_k_b.weight = kv_b model.layers.*.self_attn.kv_b_proj.weight
blk.*.attn_v_b.weight = kv_b model.layers.*.self_attn.kv_b_proj.weight
";

const FAMILIES: [Family; 25] = [
    Family {
        // With the interval of layers with full attention, which is 4 without the key.
        golden: "afmoe_hub",
        name: "afmoe",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 expert_gating_func=2 attention.key_length=16 attention.value_length=16
vocab_size=272 rope.dimension_count=16 expert_shared_count=1 expert_feed_forward_length=32
leading_dense_block_count=1 expert_weights_norm=true expert_weights_scale=2.448
attention.sliding_window=8 attention.sliding_window_pattern=3
",
        names: "
blk.*.post_attention_norm.weight = model.layers.*.post_attention_layernorm.weight
blk.*.post_ffw_norm.weight = model.layers.*.post_mlp_layernorm.weight
blk.*.ffn_norm.weight = model.layers.*.pre_mlp_layernorm.weight
blk.*.attn_gate.weight = model.layers.*.self_attn.gate_proj.weight
blk.*.exp_probs_b.bias = model.layers.*.mlp.expert_bias
blk.*.ffn_gate_inp.weight = model.layers.*.mlp.router.gate.weight
",
        ..PLAIN
    },
    Family {
        golden: "bailing_moe_hub",
        name: "bailingmoe",
        keys: "
block_count=2 context_length=32768 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=600000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=3
rope.dimension_count=16 leading_dense_block_count=0 vocab_size=259 expert_feed_forward_length=32
expert_weights_scale=1.0 expert_shared_count=2 expert_weights_norm=false
",
        names: "
blk.*.attn_output.weight = model.layers.*.attention.dense.weight
token_embd.weight = model.word_embeddings.weight
blk.*.attn_q.weight = qkv model.layers.*.attention.query_key_value.weight
blk.*.attn_k.weight = qkv model.layers.*.attention.query_key_value.weight
blk.*.attn_v.weight = qkv model.layers.*.attention.query_key_value.weight
",
        ..PLAIN
    },
    Family {
        golden: "bailing_moe_v2_hub",
        name: "bailingmoe2",
        keys: "
block_count=3 context_length=32768 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=600000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=16 expert_used_count=3
expert_group_count=4 expert_group_used_count=2 expert_gating_func=2 attention.key_length=16
attention.value_length=16 rope.dimension_count=8 leading_dense_block_count=1 vocab_size=259
expert_feed_forward_length=32 expert_shared_feed_forward_length=32 expert_weights_scale=2.5
expert_shared_count=1 expert_weights_norm=true nextn_predict_layers=0
",
        names: "
blk.*.attn_output.weight = model.layers.*.attention.dense.weight
blk.*.attn_k_norm.weight = model.layers.*.attention.key_layernorm.weight
blk.*.attn_qkv.weight = model.layers.*.attention.query_key_value.weight
blk.*.attn_q_norm.weight = model.layers.*.attention.query_layernorm.weight
blk.*.exp_probs_b.bias = model.layers.*.mlp.gate.expert_bias
token_embd.weight = model.word_embeddings.weight
",
        ..PLAIN
    },
    Family {
        golden: "cohere2_moe_hub",
        name: "cohere2moe",
        keys: "
block_count=4 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=50000.0
attention.layer_norm_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_gating_func=2
attention.key_length=16 attention.value_length=16 logit_scale=0.25 attention.sliding_window=8
attention.sliding_window_pattern=[false,true,true,false] vocab_size=272
expert_feed_forward_length=32 leading_dense_block_count=1 expert_weights_norm=true
expert_shared_count=2 expert_shared_feed_forward_length=64 rope.dimension_count=16
rope.scaling.type=none
",
        ..PLAIN
    },
    Family {
        golden: "deepseek_v2_hub",
        name: "deepseek2",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=1 rope.scaling.type=yarn rope.scaling.factor=8.0
rope.scaling.original_context_length=16 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=8 expert_used_count=3 expert_group_count=4 expert_group_used_count=2
expert_gating_func=1 attention.key_length=48 attention.value_length=32
leading_dense_block_count=1 vocab_size=259 attention.q_lora_rank=32 attention.kv_lora_rank=32
attention.key_length_mla=32 attention.value_length_mla=24 expert_feed_forward_length=32
expert_shared_count=2 expert_weights_scale=1.5 rope.dimension_count=16
rope.scaling.yarn_log_multiplier=0.0707
",
        ..PLAIN
    },
    Family {
        golden: "deepseek_v3_hub",
        name: "deepseek2",
        keys: "
block_count=2 context_length=163840 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=1 rope.scaling.type=yarn rope.scaling.factor=40.0
rope.scaling.original_context_length=4096 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=8 expert_used_count=3 expert_group_count=4 expert_group_used_count=2
expert_gating_func=2 attention.key_length=80 attention.value_length=64
leading_dense_block_count=1 vocab_size=259 attention.q_lora_rank=64 attention.kv_lora_rank=64
attention.key_length_mla=48 attention.value_length_mla=32 expert_feed_forward_length=32
expert_shared_count=1 expert_weights_scale=2.5 expert_weights_norm=true rope.dimension_count=16
rope.scaling.yarn_log_multiplier=0.1
",
        ..PLAIN
    },
    Family {
        golden: "dots1_hub",
        name: "dots1",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 expert_gating_func=2 attention.key_length=16 attention.value_length=16
expert_feed_forward_length=32 leading_dense_block_count=1 expert_shared_count=2
expert_weights_scale=2.5 expert_weights_norm=true
",
        ..PLAIN
    },
    Family {
        golden: "ernie4_5_moe_hub",
        name: "ernie4_5-moe",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=500000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2
interleave_moe_layer_step=1 leading_dense_block_count=1 expert_feed_forward_length=32
expert_shared_count=2 expert_shared_feed_forward_length=48
",
        names: "
blk.*.exp_probs_b.bias = model.layers.*.mlp.moe_statics.e_score_correction_bias
",
        ..PLAIN
    },
    Family {
        golden: "exaone_moe_hub",
        name: "exaone-moe",
        keys: "
block_count=4 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=1000000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 expert_gating_func=2 attention.key_length=16 attention.value_length=16
vocab_size=272 attention.sliding_window=8
attention.sliding_window_pattern=[true,true,true,false] expert_feed_forward_length=32
expert_shared_count=1 expert_shared_feed_forward_length=32 expert_weights_scale=2.5
expert_weights_norm=true leading_dense_block_count=1 nextn_predict_layers=0
rope.scaling.type=none
",
        names: "
blk.*.exp_probs_b.bias = model.layers.*.mlp.e_score_correction_bias
",
        ..PLAIN
    },
    Family {
        golden: "glm4_moe_lite_hub",
        name: "deepseek2",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=1 rope.freq_base=1000000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 leading_dense_block_count=1 vocab_size=272 attention.q_lora_rank=32
attention.kv_lora_rank=32 attention.key_length=48 attention.value_length=32
attention.key_length_mla=32 attention.value_length_mla=24 expert_feed_forward_length=32
expert_shared_count=1 expert_weights_scale=1.8 expert_weights_norm=true rope.dimension_count=16
",
        ..PLAIN
    },
    Family {
        golden: "granitemoe_hub",
        name: "granitemoe",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=64
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=10000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=3 vocab_size=259
rope.dimension_count=16 attention.scale=0.15 embedding_scale=1.5 residual_scale=0.4
logit_scale=3.0
",
        names: "
blk.*.ffn_gate_exps.weight = half model.layers.*.block_sparse_moe.input_linear.weight
blk.*.ffn_up_exps.weight = half model.layers.*.block_sparse_moe.input_linear.weight
blk.*.ffn_down_exps.weight = model.layers.*.block_sparse_moe.output_linear.weight
blk.*.ffn_gate_inp.weight = model.layers.*.block_sparse_moe.router.layer.weight
blk.*.attn_k.weight = rope model.layers.*.self_attn.k_proj.weight
blk.*.attn_q.weight = rope model.layers.*.self_attn.q_proj.weight
",
        ..PLAIN
    },
    Family {
        golden: "hunyuan_v1_moe_hub",
        name: "hunyuan-moe",
        keys: "
block_count=3 context_length=32768 embedding_length=64 feed_forward_length=32
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=26826958.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 attention.key_length=16
attention.value_length=16 expert_shared_feed_forward_length=32 expert_feed_forward_length=32
expert_used_count=3 expert_shared_count=1
",
        names: "
blk.*.ffn_gate_inp.weight = model.layers.*.mlp.gate.wg.weight
blk.*.ffn_down_shexp.weight = model.layers.*.mlp.shared_mlp.down_proj.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.mlp.shared_mlp.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.mlp.shared_mlp.up_proj.weight
blk.*.attn_k_norm.weight = model.layers.*.self_attn.key_layernorm.weight
blk.*.attn_q_norm.weight = model.layers.*.self_attn.query_layernorm.weight
",
        ..PLAIN
    },
    Family {
        golden: "hy_v3_hub",
        name: "hy_v3",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=11158840.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2
attention.key_length=16 attention.value_length=16 expert_feed_forward_length=32
expert_shared_feed_forward_length=32 expert_weights_norm=true expert_weights_scale=2.826
expert_gating_func=2
",
        names: "
blk.*.exp_probs_b = model.layers.*.mlp.expert_bias
blk.*.ffn_gate_inp.weight = model.layers.*.mlp.router.gate.weight
blk.*.ffn_down_shexp.weight = model.layers.*.mlp.shared_mlp.down_proj.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.mlp.shared_mlp.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.mlp.shared_mlp.up_proj.weight
",
        ..PLAIN
    },
    Family {
        golden: "laguna_hub",
        name: "laguna",
        keys: "
block_count=4 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=[4,6,6,4] attention.head_count_kv=2 rope.scaling.type=yarn
rope.scaling.factor=8.0 rope.scaling.original_context_length=64
rope.scaling.yarn_attn_factor=1.2079442 rope.scaling.yarn_beta_fast=64.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=500000.0 rope.freq_base_swa=10000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=2
attention.key_length=16 attention.value_length=16 vocab_size=272 attention.sliding_window=8
expert_feed_forward_length=32 expert_shared_feed_forward_length=32 expert_weights_norm=true
expert_weights_scale=2.5 expert_gating_func=2 leading_dense_block_count=1 rope.dimension_count=8
rope.dimension_count_swa=16
",
        names: "
blk.*.attn_gate.weight = model.layers.*.self_attn.g_proj.weight
blk.*.exp_probs_b.bias = model.layers.*.mlp.experts.e_score_correction_bias
blk.*.ffn_down_shexp.weight = model.layers.*.mlp.shared_expert.down_proj.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.mlp.shared_expert.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.mlp.shared_expert.up_proj.weight
",
        ..PLAIN
    },
    Family {
        golden: "mellum_hub",
        name: "mellum",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.scaling.type=yarn rope.scaling.factor=8.0
rope.scaling.original_context_length=16 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=500000.0 rope.freq_base_swa=10000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=2
attention.key_length=16 attention.value_length=16 expert_feed_forward_length=32
attention.sliding_window=8 attention.sliding_window_pattern=[true,false,true]
",
        ..PLAIN
    },
    Family {
        golden: "mimo_v2_flash_hub",
        name: "mimo2",
        keys: "
block_count=7 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=[1,2,2,1,2,2,2] rope.freq_base=5000000.0
rope.freq_base_swa=10000.0 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 expert_gating_func=2 attention.key_length=24 attention.value_length=16
attention.sliding_window=8 attention.sliding_window_pattern=[0,1,1,0,1,1,1]
expert_feed_forward_length=32 rope.dimension_count=8 attention.layer_norm_rms_epsilon=0.00001
attention.value_scale=0.707 nextn_predict_layers=3
",
        names: "
blk.*.attn_sinks.weight = model.layers.*.self_attn.attention_sink_bias
",
        ..PLAIN
    },
    Family {
        golden: "minimax_m2_hub",
        name: "minimax-m2",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=32
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=5000000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=3
expert_gating_func=2 attention.key_length=32 attention.value_length=32
expert_feed_forward_length=32 rope.dimension_count=16
",
        names: "
blk.*.exp_probs_b.bias = model.layers.*.block_sparse_moe.e_score_correction_bias
blk.*.ffn_gate_exps.weight = model.layers.*.block_sparse_moe.experts.#.w1.weight
blk.*.ffn_down_exps.weight = model.layers.*.block_sparse_moe.experts.#.w2.weight
blk.*.ffn_up_exps.weight = model.layers.*.block_sparse_moe.experts.#.w3.weight
blk.*.ffn_gate_inp.weight = model.layers.*.block_sparse_moe.gate.weight
",
        ..PLAIN
    },
    Family {
        golden: "mistral4_hub",
        name: "mistral4",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=1 rope.scaling.type=yarn rope.scaling.factor=8.0
rope.scaling.original_context_length=16 rope.scaling.yarn_beta_fast=32.0
rope.scaling.yarn_beta_slow=1.0 rope.freq_base=10000.0 attention.layer_norm_rms_epsilon=0.000001
expert_count=8 expert_used_count=2 expert_group_count=1 expert_group_used_count=1
attention.key_length=48 attention.value_length=32 leading_dense_block_count=1 vocab_size=272
attention.q_lora_rank=32 attention.kv_lora_rank=32 attention.key_length_mla=32
attention.value_length_mla=24 expert_feed_forward_length=32 expert_shared_count=1
expert_weights_scale=1.0 expert_weights_norm=true rope.dimension_count=16
rope.scaling.yarn_log_multiplier=0.1
",
        names: "
blk.*.ffn_down_exps.weight = model.layers.*.mlp.experts.down_proj
blk.*.ffn_gate_up_exps.weight = model.layers.*.mlp.experts.gate_up_proj
",
        ..PLAIN
    },
    Family {
        golden: "mixtral_hub",
        name: "llama",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=48
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=1000000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 vocab_size=272
rope.dimension_count=16
",
        names: "
blk.*.ffn_gate_exps.weight = model.layers.*.block_sparse_moe.experts.#.w1.weight
blk.*.ffn_down_exps.weight = model.layers.*.block_sparse_moe.experts.#.w2.weight
blk.*.ffn_up_exps.weight = model.layers.*.block_sparse_moe.experts.#.w3.weight
blk.*.ffn_gate_inp.weight = model.layers.*.block_sparse_moe.gate.weight
blk.*.attn_k.weight = rope model.layers.*.self_attn.k_proj.weight
blk.*.attn_q.weight = rope model.layers.*.self_attn.q_proj.weight
",
        ..PLAIN
    },
    Family {
        golden: "olmoe_hub",
        name: "olmoe",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=48
attention.head_count=4 attention.head_count_kv=4 rope.freq_base=10000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=3
",
        ..PLAIN
    },
    Family {
        golden: "phimoe_hub",
        name: "phimoe",
        keys: "
rope.scaling.attn_factor=1.1902381 context_length=131072
rope.scaling.original_context_length=4096 embedding_length=64 feed_forward_length=32
block_count=3 attention.head_count=4 attention.head_count_kv=2
attention.layer_norm_rms_epsilon=0.00001 rope.dimension_count=16 rope.freq_base=10000.0
attention.sliding_window=131072 expert_used_count=2 expert_count=8
",
        names: "
output.bias = lm_head.bias
blk.*.ffn_gate_exps.weight = model.layers.*.block_sparse_moe.experts.#.w1.weight
blk.*.ffn_down_exps.weight = model.layers.*.block_sparse_moe.experts.#.w2.weight
blk.*.ffn_up_exps.weight = model.layers.*.block_sparse_moe.experts.#.w3.weight
blk.*.ffn_gate_inp.weight = model.layers.*.block_sparse_moe.gate.weight
blk.*.attn_norm.bias = model.layers.*.input_layernorm.bias
blk.*.ffn_norm.bias = model.layers.*.post_attention_layernorm.bias
blk.*.attn_k.bias = model.layers.*.self_attn.k_proj.bias
blk.*.attn_output.bias = model.layers.*.self_attn.o_proj.bias
blk.*.attn_q.bias = model.layers.*.self_attn.q_proj.bias
blk.*.attn_v.bias = model.layers.*.self_attn.v_proj.bias
output_norm.bias = model.norm.bias
",
        vectors: &[
            ("rope_factors_long.weight", &[1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0]),
            ("rope_factors_short.weight", &[1.0, 1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.4]),
        ],
    },
    Family {
        golden: "qwen2_moe_hub",
        name: "qwen2moe",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=1000000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=2
expert_feed_forward_length=32 expert_shared_feed_forward_length=48
",
        names: "
blk.*.ffn_down_shexp.weight = model.layers.*.mlp.shared_expert.down_proj.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.mlp.shared_expert.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.mlp.shared_expert.up_proj.weight
blk.*.ffn_gate_inp_shexp.weight = model.layers.*.mlp.shared_expert_gate.weight
blk.*.attn_k.bias = model.layers.*.self_attn.k_proj.bias
blk.*.attn_q.bias = model.layers.*.self_attn.q_proj.bias
blk.*.attn_v.bias = model.layers.*.self_attn.v_proj.bias
",
        ..PLAIN
    },
    Family {
        golden: "sarvam_moe_hub",
        name: "bailingmoe2",
        keys: "
block_count=3 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=8 attention.head_count_kv=2 rope.freq_base=8000000.0
attention.layer_norm_rms_epsilon=0.000001 expert_count=8 expert_used_count=3
expert_group_count=1 expert_group_used_count=1 expert_gating_func=2 attention.key_length=16
attention.value_length=16 rope.dimension_count=16 leading_dense_block_count=1 vocab_size=259
expert_feed_forward_length=32 expert_shared_feed_forward_length=32 expert_weights_scale=2.5
expert_shared_count=1 expert_weights_norm=true
",
        names: "
blk.*.attn_output.weight = model.layers.*.attention.dense.weight
blk.*.attn_k_norm.weight = model.layers.*.attention.key_layernorm.weight
blk.*.attn_qkv.weight = model.layers.*.attention.query_key_value.weight
blk.*.attn_q_norm.weight = model.layers.*.attention.query_layernorm.weight
blk.*.exp_probs_b.bias = centered model.layers.*.mlp.gate.expert_bias
token_embd.weight = model.word_embeddings.weight
",
        ..PLAIN
    },
    Family {
        golden: "solar_open_hub",
        name: "glm4moe",
        keys: "
block_count=2 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=4 attention.head_count_kv=2 rope.freq_base=1000000.0
attention.layer_norm_rms_epsilon=0.00001 expert_count=8 expert_used_count=2 expert_group_count=1
expert_group_used_count=1 attention.key_length=16 attention.value_length=16
rope.dimension_count=16 expert_feed_forward_length=32 expert_shared_count=1
leading_dense_block_count=0 expert_gating_func=2 expert_weights_scale=1.0
expert_weights_norm=true
",
        names: "
blk.*.post_attention_norm.weight = model.layers.*.post_attention_layernorm.weight
",
        ..PLAIN
    },
    Family {
        golden: "step3p7_hub",
        name: "step35",
        keys: "
block_count=4 context_length=4096 embedding_length=64 feed_forward_length=96
attention.head_count=[4,6,6,4] rope.freq_base=5000000.0 rope.freq_base_swa=10000.0
attention.layer_norm_rms_epsilon=0.00001 expert_gating_func=2 attention.key_length=16
attention.value_length=16 attention.head_count_kv=[2,2,2,2] attention.sliding_window=8
attention.sliding_window_pattern=[false,true,true,false] expert_count=8 expert_used_count=2
expert_feed_forward_length=32 expert_shared_feed_forward_length=32 expert_weights_scale=3.0
expert_weights_norm=true leading_dense_block_count=1 moe_every_n_layers=1
swiglu_clamp_exp=[0.0,0.0,0.2,0.2] swiglu_clamp_shexp=[0.0,0.0,0.1,0.1]
",
        names: "
blk.*.attn_norm.weight = plus1 model.layers.*.input_layernorm.weight
blk.*.ffn_norm.weight = plus1 model.layers.*.post_attention_layernorm.weight
blk.*.attn_gate.weight = model.layers.*.self_attn.g_proj.weight
blk.*.attn_k_norm.weight = plus1 model.layers.*.self_attn.k_norm.weight
blk.*.attn_q_norm.weight = plus1 model.layers.*.self_attn.q_norm.weight
blk.*.ffn_down_exps.weight = model.layers.*.moe.down_proj.weight
blk.*.ffn_gate_inp.weight = model.layers.*.moe.gate.weight
blk.*.ffn_gate_exps.weight = model.layers.*.moe.gate_proj.weight
blk.*.exp_probs_b.bias = model.layers.*.moe.router_bias
blk.*.ffn_up_exps.weight = model.layers.*.moe.up_proj.weight
blk.*.ffn_down_shexp.weight = model.layers.*.share_expert.down_proj.weight
blk.*.ffn_gate_shexp.weight = model.layers.*.share_expert.gate_proj.weight
blk.*.ffn_up_shexp.weight = model.layers.*.share_expert.up_proj.weight
output_norm.weight = plus1 model.norm.weight
",
        vectors: &[("rope_freqs.weight", &[1.542829, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0])],
    },
];
