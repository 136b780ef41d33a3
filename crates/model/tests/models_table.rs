//! The table of models is written from the families.
#![allow(clippy::unwrap_used)]

use std::{env, fs, path::Path};

use moeflux_model::seam::model_rows;

const HEAD: &str =
    "| `model_type` | checkpoints | special | checked against |\n|---|---|---|---|\n";

#[test]
fn the_document_has_the_models_of_the_families() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/models.md");
    let found = fs::read_to_string(&file).unwrap();
    let (before, _) = found.split_once(HEAD).unwrap();
    let mut expected = before.to_owned() + HEAD;
    for row in model_rows() {
        let names: Vec<_> = row.names.iter().map(|name| format!("`{name}`")).collect();
        let cells = [&*names.join(", "), row.checkpoints, row.special, row.checked];
        expected += &format!("| {} |\n", cells.join(" | ").replace("|  |", "| |"));
    }
    if env::var_os("UPDATE").is_some() {
        fs::write(&file, &expected).unwrap();
    }
    assert!(found == expected, "docs/models.md differs: run this test with UPDATE=1");
}

#[test]
fn every_model_type_is_in_one_row() {
    let mut names: Vec<_> = model_rows().flat_map(|row| row.names).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all);
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../README.md");
    let count = format!("{all} values of `model_type`");
    assert!(fs::read_to_string(readme).unwrap().contains(&count), "README.md: expected {count}");
}
