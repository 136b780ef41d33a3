//! Programs in C, with the header and the library, as their compiler sees them.
#![cfg(unix)]
#![allow(clippy::unwrap_used)]

use std::{
    env,
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Compiles a C program and runs it, in a new folder.
fn run(program: &str) -> Output {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    let name = Path::new(program).file_stem().unwrap().to_str().unwrap();
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::create_dir_all(&out).unwrap();
    let libraries: PathBuf = env::current_exe().unwrap().parent().unwrap().to_owned();
    let executable = out.join(name);
    // The compiler that links Rust programs.
    let compiled = Command::new("cc")
        .args(["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-D_POSIX_C_SOURCE=200809L"])
        .arg("-I")
        .arg(folder.join("include"))
        .arg(folder.join(program))
        .arg("-L")
        .arg(&libraries)
        .args(["-lmoeflux_capi", "-lpthread"])
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .arg("-o")
        .arg(&executable)
        .output()
        .unwrap();
    assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    Command::new(executable).current_dir(out).output().unwrap()
}

fn text(output: &Output) -> String {
    let errors = String::from_utf8_lossy(&output.stderr);
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success(), "{:?}: {text}{errors}", output.status);
    assert_eq!(errors, "", "the library prints nothing");
    text
}

#[test]
fn the_example_answers() {
    let text = text(&run("examples/hello.c"));
    let (answer, json) = text.trim_end().rsplit_once('\n').unwrap();
    let json: serde_json::Value = serde_json::from_str(json).unwrap();
    assert!(answer.starts_with("A Crow was sitting"), "{answer}");
    assert_eq!((&json["text"], &json["finish"]), (&answer.into(), &"stop".into()));
}

#[test]
fn every_function_keeps_the_rules_of_the_header() {
    assert_eq!(text(&run("tests/rules.c")), "");
}
