//! House rules: invariants that can be checked on the sources.

#![allow(clippy::unwrap_used)]

mod arrows;
mod prose;
mod public_paths;
mod surface;
mod type_names;

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Files and folders that may contain `unsafe`, relative to `crates/`.
const UNSAFE: [&str; 11] = [
    "capi/src/caller.rs",
    "cli/src/counted_alloc.rs",
    "cli/src/freed_memory.rs",
    "compute-cpu/src/pool.rs",
    "compute-cpu/src/simd/",
    "compute-gpu/src/card/native.rs",
    "compute-gpu/src/card/parts/",
    "engine/src/experts/io/file.rs",
    "engine/src/experts/io/transfer.rs",
    "engine/src/experts/io/uring.rs",
    "model/src/checkpoint/embedded.rs",
];

/// The engine's floors, lowest first. A floor imports from itself and from lower ones.
const FLOORS: [&str; 7] = ["text", "experts", "runtime", "vision", "session", "serve", "tools"];

/// Crates that make up the library, besides ops and devices.
const LIBRARY: [&str; 8] = [
    "base/src",
    "model/src",
    "sampling/src",
    "text/src",
    "vision/src",
    "synth/src",
    "engine/src",
    "moeflux/src",
];

/// Code of a file, without comments and without the test module at its end.
fn code(text: &str) -> String {
    let is_test = |rest: &str| rest.lines().next().is_some_and(|l| l.ends_with("mod tests {"));
    let mut tests = text.match_indices("#[cfg(test)]\n").map(|(at, mark)| (at, at + mark.len()));
    let end = tests.find(|(_, next)| is_test(&text[*next..])).map_or(text.len(), |(at, _)| at);
    let code = &text[..end];
    code.lines().filter(|l| !l.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

/// The folder of all crates.
fn crates() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// Names of the folders of all crates.
fn crate_names() -> Vec<String> {
    let folders = fs::read_dir(crates()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<_> = folders.map(|name| name.into_string().unwrap()).collect();
    names.sort();
    names
}

/// Source files of a crate, with their paths relative to `crates/`.
fn sources(folder: &str) -> Vec<(String, String)> {
    files(folder, &["rs"])
}

/// Files below a folder with one of some extensions, with their paths relative to `crates/`.
fn files(folder: &str, extensions: &[&str]) -> Vec<(String, String)> {
    let crates = crates();
    let mut folders = vec![crates.join(folder)];
    let mut files = Vec::new();
    while let Some(current) = folders.pop() {
        for entry in fs::read_dir(current).unwrap() {
            let path: PathBuf = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| extensions.iter().any(|known| e == *known)) {
                let name = path.strip_prefix(crates).unwrap().to_str().unwrap().replace('\\', "/");
                files.push((name, fs::read_to_string(path).unwrap()));
            }
        }
    }
    assert!(!files.is_empty(), "{folder} has sources");
    files
}

fn absent(folder: &str, words: &[&str]) {
    for (name, text) in sources(folder).into_iter().filter(|(name, _)| !name.ends_with("/tests.rs"))
    {
        for word in words {
            assert!(!code(&text).contains(word), "{name} contains {word}");
        }
    }
}

/// Crates of ops and devices.
const COMPUTE: [&str; 4] = ["ops/src", "compute-cpu/src", "compute-gpu/src", "compute/src"];

#[test]
fn compute_opens_no_file() {
    for folder in COMPUTE {
        absent(
            folder,
            &["std::fs", "File::open", "fs::read", "safetensors", "q_proj", "model_type"],
        );
    }
}

#[test]
fn the_library_starts_no_async_runtime_and_neither_prints_nor_exits() {
    for folder in COMPUTE.into_iter().chain(LIBRARY) {
        absent(folder, &["tokio", "async fn", "process::exit", "println!(", "eprintln!("]);
    }
}

#[test]
fn only_open_names_both_devices() {
    for (name, text) in sources("compute/src") {
        let devices = ["CpuDevice", "GpuDevice"].iter().any(|device| code(&text).contains(device));
        assert!(!devices || name == "compute/src/open.rs", "{name} names a device");
    }
}

#[test]
fn unsafe_lives_in_named_files() {
    for name in crate_names() {
        for (name, text) in sources(&format!("{name}/src")) {
            // Exported names of the C library, which its header lists.
            let text = text.replace("#[unsafe(no_mangle)]", "");
            assert!(
                !code(&text).contains("unsafe") || UNSAFE.iter().any(|u| name.starts_with(u)),
                "{name} contains unsafe"
            );
        }
    }
}

#[test]
fn no_model_is_named_outside_its_architecture() {
    let named = |code: &str| {
        moeflux::model::supported_architectures()
            .find(|architecture| code.contains(&format!("\"{architecture}")))
    };
    assert_eq!(named("x == \"kimi_k2_text\""), Some("kimi_k2"));
    assert!(moeflux::model::supported_architectures().count() > 10);
    for (name, text) in LIBRARY.into_iter().flat_map(sources) {
        let home = [
            "model/src/families/",
            // Defaults of RoPE that are named by families in transformers, too.
            "model/src/parts/rope.rs",
            "model/src/checkpoint/gguf/",
            "synth/src/",
            "vision/src/processor/family.rs",
        ];
        if !home.iter().any(|home| name.starts_with(home)) && !name.contains("/tests") {
            assert_eq!(named(&code(&text)), None, "{name} names a model");
        }
    }
}

#[test]
fn no_test_is_ignored_and_no_file_exceeds_800_lines() {
    for folder in crate_names() {
        for (name, text) in sources(&folder) {
            assert!(!text.contains(concat!("#[", "ignore")), "{name} ignores a test");
            assert!(text.lines().count() <= 800, "{name} has more than 800 lines");
        }
    }
}

/// First path segments after each `crate::` in a file.
fn imported(code: &str) -> Vec<String> {
    let mut segments = Vec::new();
    for path in code.split("crate::").skip(1) {
        // A group has one segment after each comma of its outermost level.
        let (mut depth, mut segment, mut reads) = (0, String::new(), true);
        for c in path.chars() {
            match c {
                '{' => depth += 1,
                '}' => depth -= 1,
                ',' if depth == 1 => reads = true,
                ',' | ';' if depth == 0 => break,
                c if c.is_alphanumeric() || c == '_' => segment.extend(reads.then_some(c)),
                _ if segment.is_empty() => {}
                _ => reads = false,
            }
            if (!reads || depth == 0 && !segment.is_empty() && !c.is_alphanumeric() && c != '_')
                && !segment.is_empty()
            {
                segments.push(std::mem::take(&mut segment));
                reads = false;
            }
            if depth < 0 || depth == 0 && !reads {
                break;
            }
        }
        if !segment.is_empty() {
            segments.push(segment);
        }
    }
    segments
}

#[test]
fn imports_are_read_from_paths_and_groups() {
    let code = "use crate::a::B;\nuse crate::{b::{C, D}, e::F, g};\nlet x = crate::h::i();";
    assert_eq!(imported(code), ["a", "b", "e", "g", "h"]);
}

#[test]
fn no_floor_imports_from_a_higher_one() {
    let mut upward = Vec::new();
    for (name, text) in sources("engine/src") {
        let path = name.trim_start_matches("engine/src/");
        let floor = path.split('/').next().unwrap();
        let Some(own) = FLOORS.iter().position(|f| *f == floor) else {
            assert_eq!(path, "lib.rs", "{name} is on no floor");
            continue;
        };
        if path.contains("/tests") {
            continue;
        }
        for import in imported(&code(&text)) {
            let Some(floor) = FLOORS.iter().position(|f| *f == import) else {
                panic!("{name} imports crate::{import}: name the module that defines it");
            };
            if floor > own {
                upward.push((name.clone(), FLOORS[floor]));
            }
        }
    }
    upward.sort();
    upward.dedup();
    assert_eq!(upward, [], "imports from a floor above");
}

/// Filters of an array in a shell script: `NAME=( ... )`.
fn shell_array<'a>(script: &'a str, name: &str) -> Vec<&'a str> {
    let start = script.find(&format!("\n{name}=(")).unwrap() + name.len() + 3;
    script[start..].split(')').next().unwrap().split_whitespace().collect()
}

#[test]
fn the_sample_for_other_kinds_of_gpu_names_existing_tests() {
    let script = fs::read_to_string(crates().join("../scripts/test.sh")).unwrap();
    for array in ["SAMPLE", "MATRIX_SAMPLE"] {
        let filters = shell_array(&script, array);
        assert!(filters.len() > 2, "{array} has {} filters", filters.len());
        for filter in filters {
            let (module, test) = filter.split_once("::").unwrap();
            let file = crates().join(format!("compute/tests/conformance/{module}.rs"));
            let text = fs::read_to_string(file).unwrap();
            assert!(text.contains(&format!("\nfn {test}")), "{array}: no test matches {filter}");
        }
    }
}
