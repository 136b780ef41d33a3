//! The tables of models and of GGUF's architectures are written from the families.
#![allow(clippy::unwrap_used)]

use std::{
    collections::BTreeSet,
    env, fs,
    path::{Path, PathBuf},
};

use moeflux_model::seam::{gguf_architectures, model_rows};

fn path(document: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(document)
}

/// Compares a document with its expected text, or writes it if `UPDATE` is set.
fn check_document(document: &str, found: &str, expected: &str) {
    if env::var_os("UPDATE").is_some() {
        fs::write(path(document), expected).unwrap();
        return;
    }
    assert!(found == expected, "{document} differs: run this test with UPDATE=1");
}

/// Checks the rows after a table's head in a document.
fn check_table(document: &str, head: &str, rows: impl Iterator<Item = String>) {
    let found = fs::read_to_string(path(document)).unwrap();
    let (before, after) = found.split_once(head).unwrap();
    let after = after.split_once("\n\n").map_or(String::new(), |(_, text)| format!("\n{text}"));
    let expected = [before.to_owned(), head.to_owned()].into_iter().chain(rows).chain([after]);
    let expected: String = expected.collect();
    check_document(document, &found, &expected);
}

/// Checks the number of names that the README states before `text`.
fn check_count(count: usize, text: &str) {
    let found = fs::read_to_string(path("README.md")).unwrap();
    let (before, after) = found.split_once(text).unwrap();
    let before = before.trim_end_matches(|c: char| c.is_ascii_digit());
    let expected = format!("{before}{count}{text}{after}");
    check_document("README.md", &found, &expected);
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
fn every_name_is_in_one_row() {
    let models: Vec<_> = model_rows().flat_map(|row| row.names).copied().collect();
    let gguf: Vec<_> = gguf_architectures().map(|row| row.name).collect();
    for (names, text) in
        [(models, " values of `model_type`"), (gguf, " values of `general.architecture`")]
    {
        let different: BTreeSet<_> = names.iter().collect();
        assert_eq!(names.len(), different.len(), "{names:?}");
        check_count(names.len(), text);
    }
}
