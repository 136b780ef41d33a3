//! A minimal tokenizer: one token per byte, and the three special tokens of ChatML.

use std::ops::Range;

use serde_json::{Map, Value, json};

use moeflux_model::seam::KeyValue;

/// Ids below this are bytes.
const BYTES: u32 = 256;
/// Ids of printable ASCII.
pub(super) const PRINTABLE: Range<u64> = 0x20..0x7f;
/// Padding and end of text.
pub(super) const END_OF_TEXT: u32 = BYTES;
/// Start of a message.
const IM_START: u32 = BYTES + 1;
/// End of a message.
pub(super) const IM_END: u32 = BYTES + 2;
/// Number of ids; a model's vocabulary must be at least this large.
pub(super) const COUNT: u32 = BYTES + 3;

/// ChatML, without the parts that only trained models use.
pub(super) const CHAT_TEMPLATE: &str = "{%- for message in messages %}\
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}\
    {%- endfor %}\
    {%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// `tokenizer.json`: byte-level BPE without merges.
pub(super) fn tokenizer() -> Value {
    let mut vocab = Map::new();
    for (id, c) in byte_letters().enumerate() {
        vocab.insert(c.to_string(), id.into());
    }
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [
            special(END_OF_TEXT, "<|endoftext|>"),
            special(IM_START, "<|im_start|>"),
            special(IM_END, "<|im_end|>")
        ],
        "normalizer": null,
        "pre_tokenizer":
            { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
        "post_processor": null,
        "decoder": { "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true },
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocab,
            "merges": []
        }
    })
}

/// `tokenizer_config.json`.
pub(super) fn tokenizer_config(max_positions: usize) -> Value {
    json!({
        "add_prefix_space": false,
        "bos_token": null,
        "clean_up_tokenization_spaces": false,
        "eos_token": "<|im_end|>",
        "model_max_length": max_positions,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": null
    })
}

/// Types of tokens in GGUF.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;
const UNUSED: i32 = 5;

/// Keys of the tokenizer in a GGUF file, with unused tokens up to `vocab`.
pub(super) fn gguf_keys(vocab: usize, push: &mut dyn FnMut(&str, KeyValue)) {
    let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"];
    let letters = byte_letters().map(|c| (c.to_string(), NORMAL));
    let specials = specials.map(|text| (text.to_owned(), CONTROL));
    let unused = (COUNT as usize..vocab).map(|id| (format!("[PAD{id}]"), UNUSED));
    let (tokens, types) = letters.chain(specials).chain(unused).unzip();
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    push(&key("model"), KeyValue::Text("gpt2".into()));
    push(&key("pre"), KeyValue::Text("gpt-2".into()));
    push(&key("tokens"), KeyValue::Texts(tokens));
    push(&key("token_type"), KeyValue::I32s(types));
    push(&key("merges"), KeyValue::Texts(Vec::new()));
    push(&key("eos_token_id"), KeyValue::U32(IM_END));
    push(&key("padding_token_id"), KeyValue::U32(END_OF_TEXT));
    push(&key("add_bos_token"), KeyValue::Bool(false));
    push("tokenizer.chat_template", KeyValue::Text(CHAT_TEMPLATE.into()));
}

fn special(id: u32, content: &str) -> Value {
    json!({
        "id": id,
        "content": content,
        "single_word": false,
        "lstrip": false,
        "rstrip": false,
        "normalized": false,
        "special": true
    })
}

/// The character of each byte in byte-level BPE: printable bytes map to themselves, the others to
/// U+0100 and above (source: GPT-2, `bytes_to_unicode`).
fn byte_letters() -> impl Iterator<Item = char> {
    let mut next = 0x100u32;
    (0..=255u8).map(move |b| match b {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => char::from(b),
        _ => {
            next += 1;
            char::from_u32(next - 1).unwrap_or('?')
        }
    })
}
