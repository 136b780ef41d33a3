//! Tests of the tokenizer and its incremental decoder.

mod library;

use std::{path::Path, sync::LazyLock};

use proptest::{collection::vec, prelude::*, test_runner::RngSeed};
use serde_json::{Value, json};

use super::super::decoder::{MAX_PENDING, PendingText, byte_for_char};
use super::{super::TokenizerConfig, Tokenizer};

/// Tokenizer of the built-in model: byte-level BPE.
static TALES: LazyLock<Tokenizer> = LazyLock::new(|| {
    let json = include_bytes!("../../../../../tales/model/tokenizer.json");
    Tokenizer::from_bytes(json, Path::new("tokenizer.json")).unwrap()
});

const TEXTS: [&str; 5] = [
    "The Fox and the Crow. A Crow, perched in a tree!",
    "naïve café, Ångström, ﬁn",
    "狐狸和乌鸦。カラスと狐",
    "👩‍👩‍👧‍👦 😀🏳️‍🌈 and 🇩🇪",
    "a\u{FFFD}b \t\r\n  \u{0} العربية हिन्दी",
];

fn read(json: &Value) -> Result<Tokenizer, moeflux_base::Error> {
    Tokenizer::from_bytes(json.to_string().as_bytes(), Path::new("model/tokenizer.json"))
}

/// A tokenizer for decoding: `tokens` by id, then `added` ones with their special flag.
fn vocabulary(tokens: &[String], added: &[(&str, bool)], decoder: &Value) -> Tokenizer {
    let vocab: serde_json::Map<_, _> =
        tokens.iter().zip(0..).map(|(t, id): (_, u32)| (t.clone(), id.into())).collect();
    let added: Vec<_> = added
        .iter()
        .zip(tokens.len()..)
        .map(|((content, special), id)| {
            json!({"id": id, "content": content, "special": special, "single_word": false,
                "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let model = json!({"type": "WordLevel", "vocab": vocab, "unk_token": "?"});
    read(&json!({"version": "1.0", "added_tokens": added, "model": model, "decoder": decoder}))
        .unwrap()
}

/// Byte-level vocabulary: all single bytes, some pieces that split characters, and added tokens
/// that are not byte spellings (`｜`) or resemble one (`é`).
static BYTES: LazyLock<Tokenizer> = LazyLock::new(|| {
    let spell = |bytes: &[u8]| -> String {
        bytes
            .iter()
            .map(|&byte| ('\0'..='\u{143}').find(|&c| byte_for_char(c) == Some(byte)).unwrap())
            .collect()
    };
    let mut tokens: Vec<_> = (0..=255).map(|byte| spell(&[byte])).collect();
    let pieces: [&[u8]; 6] = [
        b"\xF0\x9F",
        b"\x98\x80",
        b"\xE4\xB8",
        b"\xADa",
        b"\x80\xE4\xB8\xAD\xF0",
        "中😀".as_bytes(),
    ];
    tokens.extend(pieces.map(spell));
    let decoder = json!({"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true});
    vocabulary(
        &tokens,
        &[("<s>", true), ("<think>", false), ("｜", false), ("é", false), ("｜特｜", true)],
        &decoder,
    )
});

const WORDS: [&str; 9] = ["▁", "▁a", "b", "▁▁", "c▁d", "▁中", "😀", "##e", "."];

fn words(decoder: &Value) -> Tokenizer {
    vocabulary(&WORDS.map(String::from), &[("<s>", true), ("<think>", false)], decoder)
}

/// Llama 2's decoder with byte fallback: tokens `<0x00>` to `<0xFF>` after the words.
static FALLBACK: LazyLock<Tokenizer> = LazyLock::new(|| {
    let bytes = (0..=255).map(|byte| format!("<0x{byte:02X}>"));
    let tokens: Vec<_> = WORDS.into_iter().map(String::from).chain(bytes).collect();
    let decoder = json!({"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]});
    vocabulary(&tokens, &[("<s>", true), ("<think>", false)], &decoder)
});

/// Decodes `ids` incrementally. Checks after each token that the emitted text is a prefix of the
/// text decoded at once, and that at most an incomplete character is missing. Returns the text.
fn stream(tokenizer: &Tokenizer, ids: &[u32], keep_special: bool) -> String {
    let mut decoder = tokenizer.decoder();
    if keep_special {
        decoder = decoder.keep_special();
    }
    let mut text = String::new();
    for (i, &id) in ids.iter().enumerate() {
        text.push_str(decoder.push(id).unwrap());
        let now = tokenizer.decode(&ids[..=i], !keep_special).unwrap();
        let missing = now.strip_prefix(&text).unwrap_or_else(|| panic!("{text:?} of {now:?}"));
        assert!(
            missing.chars().all(|c| c == '\u{FFFD}') && missing.chars().count() <= 3,
            "{missing:?} of {now:?}"
        );
        match &decoder.pending {
            PendingText::Bytes(bytes) => assert!(bytes.len() <= 3),
            PendingText::Tokens { ids, .. } => assert!(ids.len() <= 2 * MAX_PENDING),
        }
    }
    text + decoder.finish().unwrap()
}

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        rng_seed: RngSeed::Fixed(7),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(200))]

    #[test]
    fn byte_level_streams_as_at_once(ids in vec(0..300u32, 0..60), keep in any::<bool>()) {
        prop_assert_eq!(stream(&BYTES, &ids, keep), BYTES.decode(&ids, !keep).unwrap());
    }

    #[test]
    fn tales_stream_as_at_once(ids in vec(0..4200u32, 0..60), keep in any::<bool>()) {
        prop_assert_eq!(stream(&TALES, &ids, keep), TALES.decode(&ids, !keep).unwrap());
    }

    #[test]
    fn any_text_comes_back(text in "\\PC{0,40}") {
        // The tokenizer normalises to NFC, which is idempotent.
        let text = TALES.decode(&TALES.encode(&text, false).unwrap(), false).unwrap();
        prop_assert_eq!(stream(&TALES, &TALES.encode(&text, false).unwrap(), true), text);
    }

    #[test]
    fn word_decoders_stream_as_at_once(ids in vec(0..12u32, 0..40), keep in any::<bool>()) {
        for decoder in [
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": true}),
            json!({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": true}),
            json!({"type": "WordPiece", "prefix": "##", "cleanup": true}),
            json!({"type": "BPEDecoder", "suffix": "."}),
            Value::Null,
        ] {
            let tokenizer = words(&decoder);
            prop_assert_eq!(stream(&tokenizer, &ids, keep), tokenizer.decode(&ids, !keep).unwrap());
        }
    }

    #[test]
    fn byte_fallback_streams_as_at_once(units in vec(prop_oneof![Just(None), any::<char>().prop_map(Some)], 0..20),
        words in vec(0..11u32, 20)) {
        let bytes = |c: char| c.to_string().bytes().map(|byte| 9 + u32::from(byte)).collect();
        let word = |id: u32| vec![if id < 9 { id } else { id + 256 }];
        let ids: Vec<u32> =
            units.iter().zip(words).flat_map(|(unit, id)| unit.map_or_else(|| word(id), bytes)).collect();
        let mut decoder = FALLBACK.decoder();
        let mut text: String = ids.iter().map(|&id| decoder.push(id).unwrap().to_owned()).collect();
        text.push_str(decoder.finish().unwrap());
        prop_assert_eq!(text, FALLBACK.decode(&ids, true).unwrap());
    }

    /// The text of an invalid run is unspecified (see `Decoder`), but the pending window is
    /// bounded.
    #[test]
    fn broken_byte_fallback_is_bounded(ids in vec(0..267u32, 0..80)) {
        let mut decoder = FALLBACK.decoder();
        for id in ids {
            decoder.push(id).unwrap();
            let PendingText::Tokens { ids, .. } = &decoder.pending else { unreachable!() };
            prop_assert!(ids.len() <= 2 * MAX_PENDING);
        }
        decoder.finish().unwrap();
    }
}

#[test]
fn texts_come_back_whole() {
    for text in TEXTS {
        let ids = TALES.encode(text, false).unwrap();
        assert_eq!(TALES.decode(&ids, true).unwrap(), text);
        assert_eq!(stream(&TALES, &ids, false), text);
    }
}

#[test]
fn a_character_waits_for_its_bytes() {
    let mut decoder = BYTES.decoder();
    let mut push = |byte: u32| decoder.push(byte).unwrap().to_owned();
    assert_eq!([0xF0, 0x9F, 0x98, 0x80, 0x41].map(&mut push), ["", "", "", "😀", "A"]);
    // The second byte makes the first one invalid.
    assert_eq!([0xF0, 0x41, 0xE4, 0xB8].map(&mut push), ["", "\u{FFFD}A", "", ""]);
    assert_eq!(decoder.finish().unwrap(), "\u{FFFD}");
    assert_eq!(decoder.finish().unwrap(), "");
    assert_eq!(decoder.push(0x41).unwrap(), "A");
}

#[test]
fn bytes_of_a_token_are_those_of_the_text() {
    for text in TEXTS {
        let ids = TALES.encode(text, false).unwrap();
        let bytes: Vec<u8> = ids.iter().flat_map(|id| TALES.token_bytes(*id).unwrap()).collect();
        assert_eq!(bytes, text.as_bytes());
    }
    assert_eq!(BYTES.token_bytes(0xF0).unwrap(), [0xF0]);
    assert_eq!(BYTES.token_bytes(256).unwrap(), [0xF0, 0x9F]);
    let mark = BYTES.token_to_id("｜特｜").unwrap();
    assert_eq!(BYTES.token_bytes(mark).unwrap(), "｜特｜".as_bytes());
    let byte = WORDS.len() as u32;
    assert_eq!(FALLBACK.token_bytes(byte + 0xF0).unwrap(), [0xF0]);
    assert_eq!(FALLBACK.token_bytes(1).unwrap(), b" a");
    assert_eq!(FALLBACK.token_bytes(byte + 256).unwrap(), b"<s>");
    let end = TALES.token_to_id("<|im_end|>").unwrap();
    assert_eq!(TALES.token_bytes(end).unwrap(), b"<|im_end|>");
    assert_eq!(TALES.token_bytes(5000), None);
}

#[test]
fn special_tokens_are_parsed_and_skipped() {
    let end = TALES.token_to_id("<|im_end|>").unwrap();
    assert_eq!(end, 4095);
    assert!(TALES.is_special(end) && !TALES.is_special(0) && !TALES.is_special(u32::MAX));
    assert_eq!(TALES.vocab_size(), 4096);
    let ids = TALES.encode("Hi<|im_end|>", false).unwrap();
    assert_eq!(ids.last(), Some(&end));
    assert_eq!(TALES.decode(&ids, true).unwrap(), "Hi");
    assert_eq!(stream(&TALES, &ids, true), "Hi<|im_end|>");
    assert!(TALES.encode("", true).unwrap().is_empty());
    // Ids without a token, as in a padded vocabulary, are skipped.
    assert_eq!(stream(&TALES, &[5000, u32::MAX], false), "");
}

/// Truncation and padding for training must not apply to prompts.
#[test]
fn truncation_and_padding_are_dropped() {
    let mut json: Value =
        serde_json::from_slice(include_bytes!("../../../../../tales/model/tokenizer.json"))
            .unwrap();
    json["truncation"] =
        json!({"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0});
    json["padding"] = json!({"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": null,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "!"});
    let tokenizer = read(&json).unwrap();
    assert_eq!(tokenizer.encode(TEXTS[0], true).unwrap(), TALES.encode(TEXTS[0], true).unwrap());
}

#[test]
fn damaged_files_are_named() {
    let whole = include_bytes!("../../../../../tales/model/tokenizer.json");
    let path = Path::new("model/tokenizer.json");
    let half = &whole[..whole.len() / 2];
    for bytes in [
        &b""[..],
        b"null",
        b"{}",
        b"\xFF",
        half,
        br#"{"decoder": {"type": "Fu"#,
        br#"{"decoder": "\ud800"}"#,
    ] {
        let text = Tokenizer::from_bytes(bytes, path).unwrap_err().to_string();
        assert!(text.starts_with("model/tokenizer.json: not a tokenizer"), "{text}");
    }
    let none = json!({"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {}, "unk_token": "?"}});
    assert!(read(&none).unwrap_err().to_string().contains("no tokens"));
    // A text that the vocabulary cannot represent.
    let text = words(&Value::Null).encode("zebra", false).unwrap_err().to_string();
    assert!(text.contains("tokenizer.json") && text.contains("cannot encode"), "{text}");
    // Ids may have gaps; the largest one sets the size.
    let sparse = json!({"type": "WordLevel", "vocab": {"?": 3, "b": 900}, "unk_token": "?"});
    let tokenizer = read(&json!({"version": "1.0", "added_tokens": [], "model": sparse})).unwrap();
    assert_eq!(tokenizer.vocab_size(), 901);
}

#[test]
fn the_config_names_special_tokens() {
    let json = include_bytes!("../../../../../tales/model/tokenizer_config.json");
    let config = TokenizerConfig::from_bytes(json, Path::new("tokenizer_config.json")).unwrap();
    assert_eq!(config.chat_template, None);
    let tokens: Vec<_> =
        config.special_tokens.iter().map(|(role, token)| (role.as_str(), token.as_str())).collect();
    assert_eq!(tokens, [("eos_token", "<|im_end|>"), ("pad_token", "<|endoftext|>")]);
}
