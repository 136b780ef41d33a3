//! Uses of GGUF files that folders have, too: packed copies, mirrors, sessions, streaming, chat.

use std::{fs, ops::ControlFlow, path::Path};

use moeflux::{
    ChatOptions, Checkpoint, Engine, EngineOptions, MemoryRequest, Message,
    checkpoint::CheckpointOptions,
    session::SnapshotOptions,
    tools::{pack, verify_packed},
};

use crate::{
    common::{engine, exact, feed},
    gguf::{GgufGolden, GgufParts, base, ids, matches, split, tiny, with_factors},
};

fn go_on(_: u64, _: u64) -> ControlFlow<()> {
    ControlFlow::Continue(())
}

fn write(path: &Path, parts: &GgufParts) {
    fs::write(path, parts.write()).unwrap();
}

#[test]
fn packed_copies_are_the_same_model() {
    let golden = GgufGolden::read(&tiny());
    let temp = tempfile::tempdir().unwrap();
    for (name, parts) in [("plain", base()), ("factors", with_factors(&base()))] {
        let (file, out) = (temp.path().join(format!("{name}.gguf")), temp.path().join(name));
        write(&file, &parts);
        let source = Checkpoint::open(&file).unwrap();
        let id = source.identity().unwrap();
        pack(&source, &out, &mut go_on).unwrap();
        let copy = Checkpoint::open(&out).unwrap();
        assert!(copy.is_packed());
        assert_eq!(copy.identity().unwrap(), id, "{name}");
        let report = verify_packed(&out, Some(&source), &mut go_on).unwrap();
        assert!(report.damages.is_empty(), "{name}: {:?}", report.damages);
        matches(&out, &golden, &exact("cpu"));
        let tokens = |path: &Path| {
            let engine = engine(path, exact("cpu"), MemoryRequest::default());
            engine.text().unwrap().encode("The fox and the crow").unwrap()
        };
        assert_eq!(tokens(&out), tokens(&file), "{name}");
    }
}

#[test]
fn a_file_is_known_by_its_start() {
    let golden = GgufGolden::read(&tiny());
    let temp = tempfile::tempdir().unwrap();
    for name in ["sha256-0123abcd", "model.bin", "Model.GGUF"] {
        let file = temp.path().join(name);
        write(&file, &base());
        matches(&file, &golden, &exact("cpu"));
    }
    let other = temp.path().join("other.bin");
    fs::write(&other, "text").unwrap();
    assert!(Checkpoint::open(&other).is_err());
}

#[test]
fn a_pre_tokenizer_is_that_of_the_file_or_the_one_asked_for() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("model.gguf");
    let open = |parts: &GgufParts, asked: Option<&str>| {
        write(&path, parts);
        let options = CheckpointOptions::default().tokenizer_pre(asked.map(str::to_owned));
        Checkpoint::open_with(&path, &options)
    };
    let key = "tokenizer.ggml.pre";
    let bare = base().without(key);
    let (qwen, default, empty) = (base(), base().with_pre("default"), base().with_pre(""));
    let unknown = base().with_pre("qwen99");
    // Tokens of 1, 2, 3 and 4, of 12 and 34, of 12, 3 and 4.
    for (parts, asked, count, note) in [
        (&qwen, None, 4, None),
        (&qwen, Some("gpt-2"), 2, None),
        (&qwen, Some("default"), 3, None),
        (&default, None, 3, Some("names no model's")),
        (&bare, None, 3, Some("is missing")),
        (&empty, None, 3, Some("names no model's")),
        (&bare, Some("qwen2"), 4, None),
        (&unknown, Some("qwen2"), 4, None),
    ] {
        let checkpoint = open(parts, asked).unwrap();
        let notes = checkpoint.notes().concat();
        assert_eq!(notes.is_empty(), note.is_none(), "{notes}");
        for word in note.iter().copied().chain(note.map(|_| key)) {
            assert!(notes.contains(word), "{word}: {notes}");
        }
        let options = EngineOptions::default().device(exact("cpu"));
        let engine = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
        assert_eq!(engine.text().unwrap().encode("1234").unwrap().len(), count, "{asked:?}");
    }
    for (parts, asked, named) in [(&unknown, None, key), (&qwen, Some("qwen99"), "--tokenizer-pre")]
    {
        let said = open(parts, asked).unwrap_err().to_string();
        for word in [named, "qwen99", "default, qwen2, ", "sarvam-moe", "--tokenizer-pre NAME"] {
            assert!(said.contains(word), "{word}: {said}");
        }
    }
    // Other tokenizers have no pre-tokenizer, nor have folders a key for it.
    let pieces = base().with_tokenizer("gemma4");
    let said = open(&pieces, Some("qwen2")).unwrap_err().to_string();
    assert!(said.contains("gemma4") && said.contains("leave --tokenizer-pre out"), "{said}");
    let options = CheckpointOptions::default().tokenizer_pre("qwen2".to_owned());
    let folder = moeflux_goldens::golden("qwen3_moe");
    let said = Checkpoint::open_with(&folder, &options).unwrap_err().to_string();
    assert!(said.contains("not a model in GGUF"), "{said}");
    // A session may open the file again.
    let again = open(&unknown, Some("qwen2")).unwrap().options();
    assert_eq!(again.tokenizer_pre.as_deref(), Some("qwen2"));
}

#[test]
fn parts_may_be_on_mirrors() {
    let golden = GgufGolden::read(&tiny());
    let [first, second] = split(&base());
    let (folder, mirror) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let names = [1, 2].map(|i| format!("m-0000{i}-of-00002.gguf"));
    write(&folder.path().join(&names[0]), &first);
    write(&mirror.path().join(&names[0]), &first);
    write(&mirror.path().join(&names[1]), &second);
    let path = folder.path().join(&names[0]);
    let missing = Checkpoint::open(&path).unwrap_err().to_string();
    assert!(missing.contains("missing") && missing.contains(&names[1]), "{missing}");
    let mirrors = vec![mirror.path().to_owned()];
    let options = CheckpointOptions::default().mirrors(mirrors.clone());
    let checkpoint = Checkpoint::open_with(&path, &options).unwrap();
    assert_eq!(checkpoint.mirrors(), mirrors);
    let options = EngineOptions::default().device(exact("cpu"));
    let opened = Engine::open(checkpoint, options, &mut |_, _| {}).unwrap();
    let alone = engine(&tiny(), exact("cpu"), MemoryRequest::default());
    let logits = |engine: &Engine| feed(&mut engine.session().unwrap(), &golden.tokens, None);
    assert!(logits(&opened) == logits(&alone));
}

/// Slots for one layer's experts only: the others are read from the file when they are needed.
#[test]
fn streamed_experts_give_the_same_bits() {
    let golden = GgufGolden::read(&tiny());
    let run = |memory: MemoryRequest| {
        let engine = engine(&tiny(), exact("cpu"), memory);
        let mut session = engine.session().unwrap();
        let logits = feed(&mut session, &golden.tokens, None);
        (logits, session.stats().experts_read)
    };
    let (all, _) = run(MemoryRequest::default());
    let (few, read) = run(MemoryRequest::default().slots(2));
    assert!(few == all);
    assert!(read > 2, "{read} reads");
}

#[test]
fn sessions_continue_on_a_packed_copy() {
    let golden = GgufGolden::read(&tiny());
    let temp = tempfile::tempdir().unwrap();
    let (saved, out) = (temp.path().join("saved.moeflux"), temp.path().join("packed"));
    let (before, after) = golden.tokens.split_at(20);
    let file = engine(&tiny(), exact("cpu"), MemoryRequest::default());
    let mut session = file.session().unwrap();
    feed(&mut session, before, None);
    session.snapshot(&saved, SnapshotOptions::default()).unwrap();
    let expected = feed(&mut session, after, None);
    pack(&Checkpoint::open(&tiny()).unwrap(), &out, &mut go_on).unwrap();
    for path in [tiny(), out] {
        let engine = engine(&path, exact("cpu"), MemoryRequest::default());
        let mut session = engine.session().unwrap();
        session.restore(&saved).unwrap();
        assert_eq!(session.tokens(), before);
        assert!(feed(&mut session, after, None) == expected, "{}", path.display());
    }
}

#[test]
fn conversations_become_the_tokens_of_the_makers() {
    says_the_conversation(&tiny(), &GgufGolden::read(&tiny()));
}

/// Checks the text and the tokens of a conversation, where the golden has one.
pub(crate) fn says_the_conversation(model: &Path, golden: &GgufGolden) {
    let chat = &golden.json["chat"];
    if chat.is_null() {
        return;
    }
    let engine = engine(model, exact("cpu"), MemoryRequest::default());
    let text = engine.text().unwrap();
    let messages: Vec<Message> = serde_json::from_value(chat["messages"].clone()).unwrap();
    let options = ChatOptions::default();
    let rendered = text.render(&messages, &options).unwrap();
    assert_eq!(rendered, chat["rendered"].as_str().unwrap(), "{}", model.display());
    assert_eq!(text.chat(&messages, &options).unwrap(), ids(&chat["ids"]), "{}", model.display());
}
