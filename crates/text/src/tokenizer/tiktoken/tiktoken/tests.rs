//! Tests of `tiktoken.model` tokenizers against tiktoken.

use std::{path::PathBuf, sync::LazyLock};

use proptest::{collection::vec, prelude::*, test_runner::RngSeed};
use serde_json::{Value, json};

use super::*;

const RANKS: &[u8] = include_bytes!("../../../../tests/data/tiktoken/tiktoken.model");
const CONFIG: &[u8] = include_bytes!("../../../../tests/data/tiktoken/tokenizer_config.json");

static KIMI: LazyLock<Tokenizer> = LazyLock::new(|| read(RANKS, CONFIG).unwrap());

fn path(name: &str) -> PathBuf {
    PathBuf::from("model").join(name)
}

/// Asserts that an error begins with the file's path.
fn assert_names(error: &str, name: &str) {
    assert!(error.starts_with(&format!("{}: ", path(name).display())), "{error}");
}

fn read(ranks: &[u8], config: &[u8]) -> Result<Tokenizer, Error> {
    let file = |bytes, name| TextFile { bytes, path: path(name) };
    Tokenizer::from_tiktoken(&file(ranks, "tiktoken.model"), &file(config, "tokenizer_config.json"))
}

/// Decodes `ids` incrementally, with or without special tokens.
fn stream(ids: &[u32], keep_special: bool) -> String {
    let mut decoder = KIMI.decoder();
    if keep_special {
        decoder = decoder.keep_special();
    }
    let mut text: String = ids.iter().map(|&id| decoder.push(id).unwrap().to_owned()).collect();
    text.push_str(decoder.finish().unwrap());
    text
}

/// Expected ids are from tiktoken, see `scripts/make-tiktoken-golden.py`. `MOEFLUX_TIKTOKEN` may
/// name another folder written by it.
#[test]
fn matches_tiktoken() {
    let folder = std::env::var_os("MOEFLUX_TIKTOKEN").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiktoken"),
        PathBuf::from,
    );
    let file = |name| std::fs::read(folder.join(name)).unwrap();
    let tokenizer = read(&file("tiktoken.model"), &file("tokenizer_config.json")).unwrap();
    let cases: Vec<(String, Vec<u32>)> = serde_json::from_slice(&file("golden.json")).unwrap();
    assert!(cases.len() > 80);
    for (text, ids) in cases {
        assert_eq!(tokenizer.encode(&text, true).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
    }
}

#[test]
fn special_tokens_are_read_and_skipped() {
    assert_eq!(KIMI.vocab_size(), 600 + 256);
    for (token, id, special) in [
        ("[BOS]", 600, true),
        ("<|im_end|>", 602, true),
        ("<|reserved_token_605|>", 605, true),
        // As in published checkpoints, thinking tags are not special.
        ("<think>", 622, false),
        ("[PAD]", 855, true),
    ] {
        assert_eq!(KIMI.token_to_id(token), Some(id));
        assert_eq!(KIMI.is_special(id), special);
        assert_eq!(KIMI.encode(&format!("{token}{token}"), false).unwrap(), [id, id]);
        assert_eq!(stream(&[id], true), token);
        assert_eq!(stream(&[id], false), if special { "" } else { token });
    }
    let ids = KIMI.encode("<think>好</think> 😀<|im_end|>", true).unwrap();
    assert_eq!(stream(&ids, false), "<think>好</think> 😀");
    assert_eq!(KIMI.decode(&ids, true).unwrap(), "<think>好</think> 😀");
    // Ids beyond the vocabulary, as a model's may be padded.
    assert_eq!(stream(&[856, u32::MAX], true), "");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200, rng_seed: RngSeed::Fixed(7), failure_persistence: None, ..ProptestConfig::default()
    })]

    #[test]
    fn any_text_comes_back(text in "\\PC{0,40}") {
        let ids = KIMI.encode(&text, true).unwrap();
        prop_assert_eq!(&KIMI.decode(&ids, false).unwrap(), &text);
        prop_assert_eq!(stream(&ids, true), text);
    }

    #[test]
    fn any_ids_stream_as_at_once(ids in vec(0..860u32, 0..60), keep in any::<bool>()) {
        prop_assert_eq!(stream(&ids, keep), KIMI.decode(&ids, !keep).unwrap());
    }

    #[test]
    fn damaged_bytes_are_no_panic(place in 0..RANKS.len(), byte in any::<u8>()) {
        let mut ranks = RANKS.to_vec();
        ranks[place] = byte;
        let _ = read(&ranks, CONFIG);
        let _ = read(&RANKS[..place], CONFIG);
    }
}

/// Encoding a run without white space must not take quadratic time.
#[test]
fn long_runs_are_fast() {
    for run in ["a", " ", "\n", "狐", "=", "7", "a ", "\u{301}"] {
        let text = run.repeat(50_000);
        let ids = KIMI.encode(&text, false).unwrap();
        assert_eq!(KIMI.decode(&ids, false).unwrap(), text);
    }
}

#[test]
fn lines_may_end_in_crlf_and_be_in_any_order() {
    let text = str::from_utf8(RANKS).unwrap();
    let mut lines: Vec<&str> = text.lines().collect();
    lines.reverse();
    let other = read(format!("\r\n{}\r\n\r\n", lines.join("\r\n")).as_bytes(), CONFIG).unwrap();
    let prompt = "狐狸 and wxyz, it's 1234!";
    assert_eq!(other.encode(prompt, false).unwrap(), KIMI.encode(prompt, false).unwrap());
}

#[test]
fn damaged_ranks_are_named() {
    let text = str::from_utf8(RANKS).unwrap();
    let with = |line: usize, new: &str| {
        let mut lines: Vec<&str> = text.lines().collect();
        lines[line - 1] = new;
        lines.join("\n")
    };
    let long = format!("{} 299", "QUFB".repeat(342));
    for (ranks, parts) in [
        (with(300, "dGhl"), &["line 300", "base64"][..]),
        (with(300, "dGhl  299"), &["line 300"]),
        (with(300, "dGhl -1"), &["line 300"]),
        (with(300, "dGhl 1e3"), &["line 300"]),
        (with(300, "dGhl 99999999999999999999"), &["line 300"]),
        (with(300, "dGh 299"), &["line 300", "dGh 299"]),
        (with(300, "dG=l 299"), &["line 300"]),
        (with(300, "dGhl==== 299"), &["line 300"]),
        (with(300, "dGé= 299"), &["line 300"]),
        (with(300, "dGh= 299"), &["line 300"]),
        (with(300, " 299"), &["line 300"]),
        (with(300, "= 299"), &["line 300"]),
        (with(300, &long), &["line 300", "1026"]),
        (with(300, "dGhl 18446744073709551615"), &["line 300", "18446744073709551615"]),
        (with(300, "dGhl 600"), &["line 300", "600", "gap"]),
        (with(300, "cXF4 298"), &["line 300", "298", "twice"]),
        (with(300, "Qg== 299"), &["ranks", "299", "same token"]),
        (with(34, "cXF4cXF4 33"), &["byte 0x42", "download"]),
        (String::new(), &["byte 0x00"]),
        ("\n\n".into(), &["byte 0x00"]),
        (r#"{"version": "1.0"}"#.into(), &["line 1", "version"]),
        ("version https://git-lfs.github.com/spec/v1\n".into(), &["line 1", "git-lfs"]),
        ("Q\n".repeat(MAX_RANKS + 1), &["1048577", "1048576"]),
    ] {
        let error = read(ranks.as_bytes(), CONFIG).unwrap_err().to_string();
        assert_names(&error, "tiktoken.model");
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?}: {error}");
    }
}

#[test]
fn configs_that_do_not_fit_are_named() {
    let whole: Value = serde_json::from_slice(CONFIG).unwrap();
    let with = |edit: &dyn Fn(&mut Value)| {
        let mut config = whole.clone();
        edit(&mut config);
        config.to_string()
    };
    let token = |id: &'static str, content: &'static str| {
        with(&move |c| c["added_tokens_decoder"][id] = json!({"content": content, "special": true}))
    };
    for (config, parts) in [
        (String::new(), &["special tokens"][..]),
        (
            r#"{"auto_map": {"AutoTokenizer": ["tokenization_qwen.QWenTokenizer", null]}}"#.into(),
            &["QWenTokenizer", "tokenizer.json"],
        ),
        (
            with(&|c| c["tokenizer_class"] = json!("QWenTokenizer")),
            &["QWenTokenizer", "TikTokenTokenizer"],
        ),
        (with(&|c| c["added_tokens_decoder"]["600"] = json!("[BOS]")), &["line 1"]),
        (token("x", "x"), &["line 1"]),
        (token("99999999999", "x"), &["line 1"]),
        (token("4294967295", "x"), &["4294967295", "600 to 855"]),
        (token("599", "x"), &["599", "600 to 855"]),
        (token("856", "x"), &["856"]),
        (token("611", ""), &["611", "empty"]),
        (token("611", "[BOS]"), &["611", "[BOS]"]),
        (token("611", "wxyz"), &["611", "wxyz"]),
    ] {
        let error = read(RANKS, config.as_bytes()).unwrap_err().to_string();
        assert_names(&error, "tokenizer_config.json");
        assert!(parts.iter().all(|part| error.contains(part)), "{parts:?}: {error}");
    }
    // Unnamed tokens are reserved ones.
    for config in [
        r#"{"tokenizer_class": "TikTokenTokenizer"}"#,
        r#"{"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", null]}}"#,
        "{}",
    ] {
        let bare = read(RANKS, config.as_bytes()).unwrap();
        assert_eq!(bare.token_to_id("<|reserved_token_600|>"), Some(600));
    }
}
