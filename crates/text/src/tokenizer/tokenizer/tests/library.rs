//! The tokenizer against the library's own: ids, long texts, and files that the library fails on.

use std::{fs, ops::ControlFlow, path::PathBuf};

use moeflux_base::{Error, seam::guarded};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{RngSeed, TestRunner},
};
use serde_json::{Value, json};

use super::{super::Tokenizer, TALES, TEXTS, read};

/// A BPE tokenizer of these tokens, with settings of its model and of the pipeline.
fn bpe(tokens: &[&str], merges: &[[&str; 2]], model: &Value, pipeline: &Value) -> Value {
    let vocab: serde_json::Map<_, _> =
        tokens.iter().zip(0..).map(|(t, id): (_, u32)| ((*t).to_owned(), id.into())).collect();
    let mut file = json!({"version": "1.0", "added_tokens": [],
        "model": {"type": "BPE", "vocab": vocab, "merges": merges}});
    let add = |to: &mut Value, more: &Value| {
        more.as_object().unwrap().iter().for_each(|(key, value)| to[key] = value.clone());
    };
    add(&mut file["model"], model);
    add(&mut file, pipeline);
    file
}

/// Words of published tokenizers: Qwen's, Gemma's, Mixtral's and DeepSeek's pipelines.
fn pipelines() -> Vec<(Value, Value)> {
    let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
        "use_regex": false});
    let split = |pattern: &str| {
        json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated",
            "invert": false})
    };
    let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    let qwen = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let fallback = json!({"byte_fallback": true, "fuse_unk": true, "unk_token": "▁"});
    let sequence = |parts: &[Value]| json!({"type": "Sequence", "pretokenizers": parts});
    vec![
        (
            json!({}),
            json!({"normalizer": {"type": "NFC"},
                "pre_tokenizer": sequence(&[split(qwen), bytes.clone()])}),
        ),
        (
            fallback.clone(),
            json!({"normalizer": spaces, "pre_tokenizer": {"type": "Split",
                "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": false}}),
        ),
        (fallback, json!({"normalizer": {"type": "Sequence", "normalizers": [prepend, spaces]}})),
        (
            json!({"ignore_merges": true}),
            json!({"pre_tokenizer":
                sequence(&[split(r"\p{N}{1,3}"), split("[一-龥]+"), split(qwen), bytes])}),
        ),
    ]
}

/// A vocabulary of letters, `▁`, byte fallbacks and some words.
fn words(pipeline: &(Value, Value)) -> Value {
    let mut tokens: Vec<String> = ('\0'..='\u{143}').map(String::from).collect();
    tokens.push("▁".into());
    tokens.extend((0..=255).map(|byte| format!("<{byte:#04X}>")));
    let mut merges = Vec::new();
    let pairs = [
        ("▁", "t"),
        ("Ġ", "t"),
        ("t", "h"),
        ("▁t", "h"),
        ("e", "r"),
        ("th", "e"),
        ("▁", "▁"),
        ("1", "2"),
        ("12", "3"),
        ("Ġ", "Ġ"),
        ("a", "a"),
        ("aa", "aa"),
        ("Ċ", "Ċ"),
    ];
    for (a, b) in pairs {
        tokens.push(format!("{a}{b}"));
        merges.push([a, b]);
    }
    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
    bpe(&tokens, &merges, &pipeline.0, &pipeline.1)
}

/// Ids by the library alone.
fn library(json: &Value, text: &str) -> Vec<u32> {
    let tokenizer = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
    tokenizer.encode_fast(text, false).unwrap().get_ids().to_vec()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64, rng_seed: RngSeed::Fixed(3), failure_persistence: None, ..ProptestConfig::default()
    })]

    /// Any vocabulary and merges of short words, and any settings.
    #[test]
    fn ids_are_those_of_the_library(
        merges in vec(("[a-c]{1,3}", "[a-c]{1,3}"), 0..40),
        unknown in any::<bool>(), fuse in any::<bool>(), whole in any::<bool>(),
        suffix in any::<bool>(),
        texts in vec("[a-dé ]{0,30}", 1..8),
    ) {
        let mut tokens: Vec<String> = ["a", "b", "?", " ", "a$", "c$"].map(String::from).to_vec();
        let mut pairs: Vec<[&str; 2]> = Vec::new();
        for (a, b) in &merges {
            tokens.extend([a.clone(), b.clone(), format!("{a}{b}")]);
            pairs.push([a, b]);
        }
        let mut seen = std::collections::HashSet::new();
        tokens.retain(|token| seen.insert(token.clone()));
        let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
        let model = json!({
            "unk_token": unknown.then_some("?"), "fuse_unk": fuse, "ignore_merges": whole,
            "end_of_word_suffix": suffix.then_some("$"),
        });
        let json = bpe(&tokens, &pairs, &model, &json!({}));
        let ours = read(&json).unwrap();
        for text in texts {
            prop_assert_eq!(ours.encode(&text, false).unwrap(), library(&json, &text));
        }
    }

}

/// A long text has the tokens of the whole one, wherever it is cut. A case takes long, so their
/// number is fixed.
#[test]
fn long_texts_are_cut_between_tokens() {
    let part = "(the|there|tea|aaaa|12345|é|狐狸|  |\n\n|\t|[a-z]{1,6}|\\PC){1,9}";
    let config = ProptestConfig {
        cases: 6,
        rng_seed: RngSeed::Fixed(3),
        failure_persistence: None,
        ..ProptestConfig::default()
    };
    let mut runner = TestRunner::new(config);
    runner.run(&vec(part, 40..60), |parts| has_the_tokens_of_the_library(&parts)).unwrap();
}

/// Checks a text of some 90 KiB made of these parts.
fn has_the_tokens_of_the_library(parts: &[String]) -> Result<(), TestCaseError> {
    let mut text = String::new();
    for i in 0.. {
        if text.len() > 90 << 10 {
            break;
        }
        text.push_str(&parts[i * i % parts.len()]);
        text.push_str([" ", " ", "\n", " 7", ""][i % 5]);
    }
    for pipeline in pipelines() {
        let json = words(&pipeline);
        let ours = read(&json).unwrap();
        let (mut ids, mut pieces) = (Vec::new(), 0);
        let _ = ours
            .encode_pieces(&text, false, &mut |piece| {
                pieces += 1;
                ids.extend_from_slice(piece);
                ControlFlow::Continue(())
            })
            .unwrap();
        prop_assert!(pieces > 1, "{pipeline:?}");
        prop_assert!(ids == library(&json, &text), "{pipeline:?}");
    }
    Ok(())
}

#[test]
fn a_text_that_nobody_needs_is_not_encoded() {
    let ours = read(&words(&pipelines()[0])).unwrap();
    let fox = "The Fox. ".repeat(1 << 14);
    let encoded = ours.encode(&fox, false).unwrap();
    assert_eq!(ours.encode_literal(&fox, usize::MAX).unwrap().unwrap().len(), encoded.len());
    ours.cancel_when(|| true);
    assert!(matches!(ours.encode(&fox, false), Err(Error::Cancelled)));
    assert!(matches!(ours.encode_literal(&fox, usize::MAX), Err(Error::Cancelled)));
}

#[test]
fn a_text_that_cannot_fit_is_refused_by_its_bytes() {
    let fox = "The Fox. ".repeat(1 << 20);
    assert_eq!(TALES.encode_within(&fox, true, 8192).unwrap(), None);
    assert!(TALES.exceeds(fox.len(), 8192));
    for text in TEXTS {
        let ids = TALES.encode(text, false).unwrap();
        assert!(!TALES.exceeds(text.len(), ids.len()));
        assert_eq!(TALES.encode_within(text, false, ids.len()).unwrap(), Some(ids.clone()));
        assert_eq!(TALES.encode_within(text, false, ids.len() - 1).unwrap(), None);
    }
    // A text that cannot be cut anywhere.
    let run = "a".repeat(10 << 20);
    for pipeline in pipelines() {
        let tokenizer = read(&words(&pipeline)).unwrap();
        assert_eq!(tokenizer.encode_within(&fox, true, 8192).unwrap(), None);
        assert!(tokenizer.exceeds(run.len(), 8192));
        assert!(!tokenizer.exceeds(6 * 8192, 8192));
    }
    // Where no bound is known, encoding ends at the limit.
    let mut dropping = pipelines().remove(1);
    dropping.1["normalizer"] =
        json!({"type": "Replace", "pattern": {"String": "x"}, "content": ""});
    let tokenizer = read(&words(&dropping)).unwrap();
    assert!(!tokenizer.exceeds(fox.len(), 8192));
    assert_eq!(tokenizer.encode_within(&fox, true, 8192).unwrap(), None);
}

/// The library panics on each of these, when it reads it or later.
#[test]
fn files_on_which_the_library_fails_are_refused() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/tokenizer");
    for (name, part) in [
        ("charsmap", "precompiled_charsmap"),
        ("fixed-length-0", "FixedLength"),
        ("long-prefix", "does not begin with \"####\""),
        ("strip-stop", "stop"),
    ] {
        let path = folder.join(format!("{name}.json"));
        let error = Tokenizer::from_bytes(&fs::read(&path).unwrap(), &path).unwrap_err();
        let error = error.to_string();
        assert!(error.starts_with(&path.display().to_string()) && error.contains(part), "{error}");
    }
}

#[test]
fn parts_that_fail_or_grow_are_refused() {
    let with = |pipeline: Value| read(&bpe(&["a", "b"], &[], &json!({}), &pipeline));
    let replace =
        |a: &str, b: &str| json!({"type": "Replace", "pattern": {"String": a}, "content": b});
    for (pipeline, part) in [
        // Not in the template's table.
        (
            json!({"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
                    {"Sequence": {"id": "A", "type_id": 0}}]}}),
            "library",
        ),
        (
            json!({"normalizer": {"type": "Sequence", "normalizers": vec![replace("a", "aa"); 40]}}),
            "longer",
        ),
        (json!({"normalizer": replace("", &"a".repeat(300))}), "longer"),
        (
            json!({"decoder": {"type": "Sequence", "decoders": vec![replace("a", "aa"); 40]}}),
            "longer",
        ),
        // Without types, as in old files.
        (json!({"normalizer": {"pattern": {"String": "a"}, "content": "b".repeat(300)}}), "longer"),
        (json!({"decoder": {"content": "a", "start": 0, "stop": 1}}), "stop"),
        (json!({"decoder": 7}), "decoder"),
    ] {
        let error = with(pipeline.clone()).unwrap_err().to_string();
        assert!(error.starts_with("model/tokenizer.json: "), "{error}");
        assert!(error.contains(part) || part == "decoder", "{pipeline}: {error}");
    }
    let far = json!({"model": {"type": "BPE", "vocab": {"a": u32::MAX}, "merges": []}});
    assert!(read(&far).unwrap_err().to_string().contains("4294967295"));
}

#[test]
fn settings_have_a_limit() {
    let zeros = json!({"normalizer": vec![0; 5 << 20], "model": {}});
    let error = read(&zeros).unwrap_err().to_string();
    assert!(error.contains("besides vocabulary and merges"), "{error}");
}

#[test]
fn a_panic_names_the_file() {
    let panic = guarded(|| [0u8; 1][std::hint::black_box(1)]).unwrap_err();
    assert!(super::super::library_failed(&panic).contains("out of bounds"));
}
