//! Models that say a given row of tokens after any prompt, at temperature 0.
//!
//! The residual stream of the one layer is the embedding alone (`o_proj` and `down_proj` are zero),
//! and the head maps each token of the script to the next one. So a script holds no token twice.

use std::{fs, path::Path};

use serde_json::{Map, Value, json};

const HIDDEN: usize = 32;
const EXPERTS: usize = 2;
const HEAD_DIM: usize = 16;

/// A model to write. Tokens are the 256 bytes, then `special`, then `plain`.
pub(crate) struct Scripted<'a> {
    pub(crate) special: &'a [&'a str],
    pub(crate) plain: &'a [&'a str],
    /// Added tokens, and texts that are spelled in bytes.
    pub(crate) script: &'a [&'a str],
    pub(crate) eos: &'a str,
    pub(crate) template: &'a str,
}

impl Scripted<'_> {
    /// Writes the model's files.
    pub(crate) fn write(&self, folder: &Path) {
        let added: Vec<&str> = self.special.iter().chain(self.plain).copied().collect();
        let vocab = 256 + added.len();
        let mut script = Vec::new();
        for part in self.script {
            match added.iter().position(|token| token == part) {
                Some(i) => script.push(256 + i),
                None => script.extend(part.bytes().map(usize::from)),
            }
        }
        let config = json!({
            "model_type": "qwen3_moe", "hidden_size": HIDDEN, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HEAD_DIM,
            "num_experts": EXPERTS, "num_experts_per_tok": 1, "moe_intermediate_size": 16,
            "intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "norm_topk_prob": true, "vocab_size": vocab, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
            "max_position_embeddings": 2048, "tie_word_embeddings": false, "hidden_act": "silu",
        });
        let write = |name: &str, bytes: &[u8]| fs::write(folder.join(name), bytes).unwrap();
        write("config.json", config.to_string().as_bytes());
        write("tokenizer.json", tokenizer(&added, self.special.len()).to_string().as_bytes());
        let names = json!({ "eos_token": self.eos });
        write("tokenizer_config.json", names.to_string().as_bytes());
        write("chat_template.jinja", self.template.as_bytes());
        write("model.safetensors", &weights(vocab, &script));
    }
}

/// GPT-2's letters of the bytes.
fn letters() -> Vec<char> {
    let mut next = 256;
    (0..256)
        .map(|byte| match byte {
            0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => char::from_u32(byte).unwrap(),
            _ => {
                next += 1;
                char::from_u32(next - 1).unwrap()
            }
        })
        .collect()
}

fn tokenizer(added: &[&str], special: usize) -> Value {
    let vocab: Map<String, Value> =
        letters().iter().enumerate().map(|(i, letter)| (letter.to_string(), json!(i))).collect();
    let token = |(i, content): (usize, &&str)| {
        json!({
            "id": 256 + i, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": i < special,
        })
    };
    let tokens: Vec<Value> = added.iter().enumerate().map(token).collect();
    let level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false,
    });
    json!({
        "version": "1.0", "added_tokens": tokens, "pre_tokenizer": level, "decoder": level,
        "model": {
            "type": "BPE", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    })
}

/// Row of random signs.
fn signs(seed: &mut u64, len: usize) -> Vec<f32> {
    let mut next = || {
        *seed ^= *seed << 13;
        *seed ^= *seed >> 7;
        *seed ^= *seed << 17;
        if *seed & (1 << 20) == 0 { 1.0 } else { -1.0 }
    };
    (0..len).map(|_| next()).collect()
}

fn weights(vocab: usize, script: &[usize]) -> Vec<u8> {
    let mut seed = 0x9E37_79B9_7F4A_7C15;
    let start = signs(&mut seed, HIDDEN);
    let (mut embed, mut head) = (vec![start.clone(); vocab], vec![vec![0.0; HIDDEN]; vocab]);
    head[script[0]] = start;
    for pair in script.windows(2) {
        let row = signs(&mut seed, HIDDEN);
        (embed[pair[0]], head[pair[1]]) = (row.clone(), row);
    }
    let (mut header, mut data) = (Map::new(), Vec::new());
    let mut put = |name: String, shape: &[usize], numbers: &[f32]| {
        let begin = data.len();
        // Cut off: these numbers are exact in bf16.
        data.extend(numbers.iter().flat_map(|x| x.to_le_bytes()[2..].to_vec()));
        let offsets = [begin, data.len()];
        header.insert(name, json!({ "dtype": "BF16", "shape": shape, "data_offsets": offsets }));
    };
    let small = |seed: &mut u64, len| signs(seed, len).iter().map(|x| x / 16.0).collect::<Vec<_>>();
    put("model.embed_tokens.weight".into(), &[vocab, HIDDEN], &embed.concat());
    put("lm_head.weight".into(), &[vocab, HIDDEN], &head.concat());
    put("model.norm.weight".into(), &[HIDDEN], &[1.0; HIDDEN]);
    let layer = |name: &str| format!("model.layers.0.{name}.weight");
    for norm in ["input_layernorm", "post_attention_layernorm"] {
        put(layer(norm), &[HIDDEN], &[1.0; HIDDEN]);
    }
    for (name, rows) in [("q", HIDDEN), ("k", HEAD_DIM), ("v", HEAD_DIM)] {
        let numbers = small(&mut seed, rows * HIDDEN);
        put(layer(&format!("self_attn.{name}_proj")), &[rows, HIDDEN], &numbers);
    }
    put(layer("self_attn.o_proj"), &[HIDDEN, HIDDEN], &[0.0; HIDDEN * HIDDEN]);
    for norm in ["q_norm", "k_norm"] {
        put(layer(&format!("self_attn.{norm}")), &[HEAD_DIM], &[1.0; HEAD_DIM]);
    }
    put(layer("mlp.gate"), &[EXPERTS, HIDDEN], &small(&mut seed, EXPERTS * HIDDEN));
    for expert in 0..EXPERTS {
        let name = |projection: &str| layer(&format!("mlp.experts.{expert}.{projection}_proj"));
        for projection in ["gate", "up"] {
            put(name(projection), &[16, HIDDEN], &small(&mut seed, 16 * HIDDEN));
        }
        put(name("down"), &[HIDDEN, 16], &[0.0; HIDDEN * 16]);
    }
    let header = Value::Object(header).to_string();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}
