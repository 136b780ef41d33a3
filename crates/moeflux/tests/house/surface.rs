//! Public surface: the names at the crate's root, and its modules.

use std::fs;

use super::{FLOORS, code, crates};

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
fn the_root_has_the_names_of_first_use_and_a_module_for_each_floor() {
    let lib = code(&fs::read_to_string(crates().join("engine/src/lib.rs")).unwrap());
    assert_eq!(exported(&lib), ROOT);
    let modules: Vec<&str> =
        lib.lines().filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';')).collect();
    let mut floors = FLOORS;
    floors.sort_unstable();
    assert_eq!(modules, floors);
}
