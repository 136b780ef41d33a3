//! Public surface: the names at the crate's root, and its modules.

use std::fs;

use super::{code, crates};

/// Names that a first program needs. Everything else is in the module of its floor.
const ROOT: [&str; 15] = [
    "Answer",
    "ChatOptions",
    "Checkpoint",
    "Engine",
    "EngineOptions",
    "Error",
    "Finish",
    "GenerateRequest",
    "MemoryPlan",
    "MemoryRequest",
    "Message",
    "Sampling",
    "Session",
    "StepControl",
    "generate",
];

/// Modules of the crate's root.
const MODULES: [&str; 10] = [
    "base",
    "checkpoint",
    "experts",
    "model",
    "runtime",
    "serve",
    "session",
    "text",
    "tools",
    "vision",
];

/// Names that a file re-exports, sorted.
fn exported(code: &str) -> Vec<&str> {
    let statements = code.split("pub use ").skip(1).filter_map(|rest| rest.split(';').next());
    let paths = statements.flat_map(|statement| statement.split(['{', ',', '}']).map(str::trim));
    let names = paths.filter_map(|path| path.rsplit("::").next().filter(|name| !name.is_empty()));
    let mut names: Vec<&str> = names.collect();
    names.sort_unstable();
    names
}

#[test]
fn exported_names_are_read_from_nested_paths() {
    let code = "mod a;\npub use b::C;\npub use d::{\n    e::{F, g},\n    h::I,\n};\n";
    assert_eq!(exported(code), ["C", "F", "I", "g"]);
}

#[test]
fn the_root_has_the_names_of_first_use_and_a_module_for_each_part() {
    let lib = code(&fs::read_to_string(crates().join("moeflux/src/lib.rs")).unwrap());
    let (mut modules, names): (Vec<&str>, Vec<&str>) =
        exported(&lib).into_iter().partition(|name| MODULES.contains(name));
    assert_eq!(names, ROOT);
    modules.extend(lib.lines().filter_map(|l| l.strip_prefix("pub mod ")?.strip_suffix(';')));
    modules.sort_unstable();
    assert_eq!(modules, MODULES);
}
