//! The tables of models and of GGUF's architectures are written from the families.
#![allow(clippy::unwrap_used)]

use std::{env, fs, path::Path};

use moeflux_model::seam::{gguf_architectures, model_rows};

/// Checks the rows after a table's head in a document, or writes them if `UPDATE` is set.
fn check_table(document: &str, head: &str, rows: impl Iterator<Item = String>) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(document);
    let found = fs::read_to_string(&file).unwrap();
    let (before, after) = found.split_once(head).unwrap();
    let after = after.split_once("\n\n").map_or(String::new(), |(_, text)| format!("\n{text}"));
    let expected = [before.to_owned(), head.to_owned()].into_iter().chain(rows).chain([after]);
    let expected: String = expected.collect();
    if env::var_os("UPDATE").is_some() {
        fs::write(&file, &expected).unwrap();
    }
    assert!(found == expected, "{document} differs: run this test with UPDATE=1");
}

/// Requires the number of names that the README states.
fn check_count(text: &str) {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    assert!(fs::read_to_string(readme).unwrap().contains(text), "README.md: expected {text}");
}

#[test]
fn the_document_has_the_models_of_the_families() {
    let head = "| `model_type` | checkpoints | special | checked against |\n|---|---|---|---|\n";
    let rows = model_rows().map(|row| {
        let names: Vec<_> = row.names.iter().map(|name| format!("`{name}`")).collect();
        let cells = [&*names.join(", "), row.checkpoints, row.special, row.checked];
        format!("| {} |\n", cells.join(" | ").replace("|  |", "| |"))
    });
    check_table("docs/models.md", head, rows);
}

#[test]
fn the_guide_has_the_architectures_of_gguf() {
    let head = "| `general.architecture` | models |\n|---|---|\n";
    let rows = gguf_architectures().map(|row| format!("| `{}` | {} |\n", row.name, row.models));
    check_table("docs/guide/gguf.md", head, rows);
}

#[test]
fn every_model_type_is_in_one_row() {
    let mut names: Vec<_> = model_rows().flat_map(|row| row.names).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
    check_count(&format!("{all} values of `model_type`"));
}

#[test]
fn every_architecture_of_gguf_is_in_one_row() {
    let mut names: Vec<_> = gguf_architectures().map(|row| row.name).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
    check_count(&format!("{all} values of `general.architecture`"));
}
