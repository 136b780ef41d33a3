//! Invariants of the house that can be read off its sources.

#![allow(clippy::unwrap_used)]

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Where `unsafe` may be written, relative to `crates/`.
const UNSAFE: [&str; 7] = [
    "compute/src/cpu/dot/",
    "compute/src/cpu/pool.rs",
    "compute/src/gpu/card/native.rs",
    "engine/src/checkpoint/embedded.rs",
    "engine/src/experts/reader/open_file.rs",
    "engine/src/experts/reader/transfer.rs",
    "engine/src/experts/reader/uring.rs",
];

/// The code of a file: without comments, and without the tests at its end.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or("");
    code.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// Source files of a crate with their paths relative to `crates/`.
fn sources(of: &str) -> Vec<(String, String)> {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut folders = vec![crates.join(of)];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let name = path.strip_prefix(crates).unwrap().to_str().unwrap().replace('\\', "/");
                files.push((name, fs::read_to_string(path).unwrap()));
            }
        }
    }
    assert!(!files.is_empty(), "{of} has sources");
    files
}

fn absent(of: &str, words: &[&str]) {
    for (name, text) in sources(of).into_iter().filter(|(name, _)| !name.ends_with("/tests.rs")) {
        for word in words {
            assert!(!code(&text).contains(word), "{name} contains {word}");
        }
    }
}

#[test]
fn compute_opens_no_file() {
    absent(
        "compute/src",
        &["std::fs", "File::open", "fs::read", "safetensors", "q_proj", "model_type"],
    );
}

#[test]
fn the_engine_starts_no_async_runtime_and_neither_prints_nor_exits() {
    absent("engine/src", &["tokio", "async fn", "process::exit", "println!(", "eprintln!("]);
    absent("compute/src", &["tokio", "async fn", "process::exit", "println!(", "eprintln!("]);
}

#[test]
fn unsafe_lives_in_named_files() {
    for of in ["compute/src", "engine/src", "cli/src"] {
        for (name, text) in sources(of) {
            assert!(
                !code(&text).contains("unsafe") || UNSAFE.iter().any(|u| name.starts_with(u)),
                "{name} contains unsafe"
            );
        }
    }
}

#[test]
fn no_model_is_named_outside_its_architecture() {
    for (name, text) in sources("engine/src") {
        let home = ["arch/", "synth/"].iter().any(|h| name.starts_with(&format!("engine/src/{h}")));
        assert!(
            home || name.ends_with("/tests.rs") || !code(&text).contains("\"qwen"),
            "{name} names a model"
        );
    }
}

#[test]
fn no_test_is_ignored_and_no_file_outgrows_its_duty() {
    for of in ["compute", "engine", "cli"] {
        for (name, text) in sources(of) {
            assert!(!text.contains(concat!("#[", "ignore")), "{name} ignores a test");
            assert!(text.lines().count() <= 800, "{name} has more than 800 lines");
        }
    }
}
