//! Goldens: stored models and their expected logits.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use super::encode::hex;
use crate::recipe::Recipe;

const RECIPE: &str = "weights.json";
/// Folder of the tokenizer of goldens that have none.
const TOKENIZER: &str = "tokenizer";

/// The folder of all goldens in the repository, without weights that have a recipe.
fn stored() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../moeflux/tests/data/goldens")
}

/// Names of all goldens, in order.
pub fn names() -> Vec<String> {
    let folders = fs::read_dir(stored()).unwrap().map(|entry| entry.unwrap().path());
    let goldens = folders.filter(|folder| folder.join("golden.safetensors").exists());
    let mut names: Vec<_> =
        goldens.map(|folder| folder.file_name().unwrap().to_str().unwrap().to_owned()).collect();
    names.sort();
    names
}

/// The folder of a golden with its weights.
///
/// It is written beside the test binary, in a folder named by the digest of the golden's name and
/// files, and stays there for later runs. Processes may write the same one at once: the folder
/// appears when it is complete.
pub fn golden(name: &str) -> PathBuf {
    // A golden's own tokenizer replaces the usual one.
    let mut files = files(&stored().join(TOKENIZER));
    files.extend(self::files(&stored().join(name)));
    let all = std::env::current_exe().unwrap().with_file_name("goldens");
    let kept = all.join(digest(name, &files)).join(name);
    if kept.exists() {
        return kept;
    }
    fs::create_dir_all(&all).unwrap();
    let temp = tempfile::tempdir_in(&all).unwrap();
    let folder = temp.path().join(name);
    fs::create_dir(&folder).unwrap();
    for (file, bytes) in &files {
        match file == RECIPE {
            true => Recipe::read(bytes).write(&folder),
            false => fs::write(folder.join(file), bytes).unwrap(),
        }
    }
    // Another process may have been first.
    let moved = fs::rename(temp.path(), kept.parent().unwrap());
    assert!(kept.exists(), "{}: {moved:?}", kept.display());
    kept
}

/// Files of a folder: names and contents.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    let paths = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    paths
        .map(|path| {
            let name = path.file_name().unwrap().to_str().unwrap().to_owned();
            (name, fs::read(&path).unwrap())
        })
        .collect()
}

/// Digest of a golden's name and files, as the name of a folder.
fn digest(golden: &str, files: &BTreeMap<String, Vec<u8>>) -> String {
    let mut hash = Sha256::new_with_prefix(golden);
    for (name, bytes) in files {
        hash.update(Sha256::digest(name));
        hash.update(Sha256::digest(bytes));
    }
    hex(&hash.finalize()[..8])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The recipes' digests are of files that numpy wrote.
    #[test]
    fn every_recipe_gives_the_weights_of_its_digest() {
        for name in names() {
            golden(&name);
        }
    }
}
