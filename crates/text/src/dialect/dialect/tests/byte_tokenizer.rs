//! A tokenizer of bytes and added tokens.

use std::path::Path;

use serde_json::json;

use crate::tokenizer::Tokenizer;

/// Tokenizer of the 256 bytes and of added tokens, from id 256 on. The first `special` of them are
/// special.
pub(super) fn tokenizer(added: &[&str], special: usize) -> Tokenizer {
    let is_plain = |b: u32| matches!(b, 0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF);
    let mut next = 256;
    let mut letter = |byte: u32| {
        if is_plain(byte) {
            return char::from_u32(byte).unwrap();
        }
        next += 1;
        char::from_u32(next - 1).unwrap()
    };
    let vocab: serde_json::Map<String, serde_json::Value> =
        (0..256).map(|byte| (letter(byte).to_string(), json!(byte))).collect();
    let tokens: Vec<_> = added
        .iter()
        .enumerate()
        .map(|(i, content)| {
            json!({
                "id": 256 + i, "content": content, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": i < special,
            })
        })
        .collect();
    let level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false
    });
    let json = json!({
        "version": "1.0", "added_tokens": tokens, "pre_tokenizer": level, "decoder": level,
        "model": {
            "type": "BPE", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    });
    Tokenizer::from_bytes(json.to_string().as_bytes(), Path::new("tokenizer.json")).unwrap()
}
