//! Runs the program as a user does.

// clippy.toml allows these in functions marked as tests; their helpers are tests too.
#![allow(clippy::unwrap_used, clippy::panic)]

mod answers;
mod bench;
mod devices;
mod dialects;
mod file_versions;
mod hub;
mod images;
mod inspect;
mod logits;
mod machines;
mod memory;
mod pack;
#[cfg(unix)]
mod private_files;
mod replay;
mod scripted;
mod serve;
mod sessions;
mod tables;
mod usage;
mod vision;

use std::{
    collections::BTreeMap,
    io::Write,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};

/// Fable that every example asks for.
const FOX: &str = "Tell me the fable of The Fox and the Crow.";

/// Command `moeflux ARGS` without the user's settings, with a cache folder shared by all tests.
fn moeflux<S: AsRef<std::ffi::OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_moeflux"));
    for variable in ["MODEL", "MEMORY", "GPU_MEMORY", "THREADS"] {
        command.env_remove(format!("MOEFLUX_{variable}"));
    }
    // Settings of the user who runs the tests.
    command.env("MOEFLUX_CONFIG", "");
    // These tests assert bytes and bits of the CPU, whatever other devices exist.
    command.env("MOEFLUX_DEVICE", "cpu");
    command.env("XDG_CACHE_HOME", folder.join("cache")).env("XDG_STATE_HOME", folder.join("state"));
    command.stdin(Stdio::null()).args(args);
    command
}

/// Output and exit code of a run.
#[derive(Debug)]
struct Said {
    out: String,
    err: String,
    code: i32,
}

fn said(output: Output) -> Said {
    Said {
        out: String::from_utf8(output.stdout).unwrap(),
        err: String::from_utf8(output.stderr).unwrap(),
        code: output.status.code().unwrap_or(-1),
    }
}

fn run(args: &[&str]) -> Said {
    said(moeflux(args).output().unwrap())
}

/// Runs, asserts success and returns stdout.
fn succeed(args: &[&str]) -> String {
    let said = run(args);
    assert_eq!(said.code, 0, "{args:?}: {said:?}");
    said.out
}

fn with_stdin(args: &[&str], input: &[u8]) -> Said {
    fed(moeflux(args), input)
}

fn fed(mut command: Command, input: &[u8]) -> Said {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = piped.unwrap();
    // A program that rejects its arguments does not read stdin.
    let _ = child.stdin.take().unwrap().write_all(input);
    said(child.wait_with_output().unwrap())
}

fn json(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

fn engine_data() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../moeflux/tests/data")
}

fn fable(title: &str) -> String {
    let json = std::fs::read(engine_data().join("fables.json")).unwrap();
    let mut fables: BTreeMap<String, String> = serde_json::from_slice(&json).unwrap();
    fables.remove(title).unwrap()
}

fn temp() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

/// Asserts an error as users should see it: one line, without Rust internals.
fn assert_error(said: &Said, code: i32, parts: &[&str]) {
    assert_eq!(said.code, code, "{said:?}");
    assert!(said.err.starts_with("error: "), "{said:?}");
    for part in parts {
        assert!(said.err.contains(part), "{part:?} is not in {said:?}");
    }
    for inner in ["panicked", "RUST_BACKTRACE", "Os {", "Error(", "Some("] {
        assert!(!said.err.contains(inner), "{said:?}");
    }
}
