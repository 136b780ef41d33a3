//! Models in a folder: its folders with checkpoints, and its GGUF files.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use moeflux_base::Error;

use super::gguf::GgufSet;

/// Start of the name of a repository in the Hub's cache: `models--ORG--NAME`.
const REPOSITORY: &str = "models--";

/// A model in a folder of models.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ListedModel {
    /// Name of its folder, or of its GGUF file without ending and part number.
    pub name: String,
    /// Path for [`Checkpoint::open`](super::Checkpoint::open).
    pub path: PathBuf,
}

/// Models in a folder, by name: each folder with a checkpoint, and each GGUF file, of which all
/// parts are one model. Several models in GGUF in one folder have its name before their own. A
/// repository in the Hub's cache is `ORG/NAME`. Hidden files and other folders are left out.
///
/// # Errors
/// The folder cannot be read.
pub fn list_models(folder: &Path) -> Result<Vec<ListedModel>, Error> {
    let failed = |error| Error::file(folder, "cannot list the models in this folder")(error);
    let mut models = gguf_models(&names(folder).map_err(failed)?, folder);
    for name in names(folder).map_err(failed)? {
        let path = folder.join(&name);
        if !path.is_dir() {
            continue;
        }
        // A folder that cannot be read has no models.
        let inner = names(&path).unwrap_or_default();
        let is_checkpoint = inner.iter().any(|file| file == "config.json");
        let is_repository = name.starts_with(REPOSITORY) && path.join("snapshots").is_dir();
        if is_checkpoint || is_repository {
            models.push(ListedModel { name: shown(&name), path });
            continue;
        }
        match gguf_models(&inner, &path).as_slice() {
            [_] => models.push(ListedModel { name, path }),
            several => models.extend(several.iter().map(|model| ListedModel {
                name: format!("{name}/{}", model.name),
                path: model.path.clone(),
            })),
        }
    }
    models.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(models)
}

/// Names in a folder that are not hidden. Names that are not Unicode are left out, as no request
/// could give them.
fn names(folder: &Path) -> io::Result<Vec<String>> {
    let names = fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().into_string().ok()));
    let names: Vec<Option<String>> = names.collect::<io::Result<_>>()?;
    Ok(names.into_iter().flatten().filter(|name| !name.starts_with('.')).collect())
}

/// Models in GGUF among the files of a folder.
fn gguf_models(names: &[String], folder: &Path) -> Vec<ListedModel> {
    let mut sets = BTreeMap::new();
    for set in names.iter().filter_map(|name| GgufSet::of_model(folder, name)) {
        sets.insert(set.first(), set);
    }
    let model = |(path, set): (PathBuf, GgufSet)| ListedModel { name: set.title(), path };
    sets.into_iter().map(model).collect()
}

/// Name of a folder's model.
fn shown(name: &str) -> String {
    let repository = name.strip_prefix(REPOSITORY).and_then(|name| name.split_once("--"));
    repository.map_or_else(|| name.to_owned(), |(org, model)| format!("{org}/{model}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_and_files_are_models() {
        let folder = tempfile::tempdir().unwrap();
        for path in [
            "b/config.json",
            "models--org--name/snapshots/x/config.json",
            "one/model-00001-of-00002.gguf",
            "one/model-00002-of-00002.gguf",
            "one/mmproj-model.gguf",
            "two/a.gguf",
            "two/b.gguf",
            "none/readme.txt",
            ".hidden/config.json",
            "a-00001-of-00002.gguf",
            "a-00002-of-00002.gguf",
            "c.gguf",
            "moeflux.toml",
        ] {
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        let models = list_models(folder.path()).unwrap();
        let found = models.iter().map(|model| {
            let path = model.path.strip_prefix(folder.path()).unwrap();
            (&*model.name, path)
        });
        let expected = [
            ("a", "a-00001-of-00002.gguf"),
            ("b", "b"),
            ("c", "c.gguf"),
            ("one", "one"),
            ("org/name", "models--org--name"),
            ("two/a", "two/a.gguf"),
            ("two/b", "two/b.gguf"),
        ];
        let expected = expected.map(|(name, path)| (name, Path::new(path)));
        assert_eq!(found.collect::<Vec<_>>(), expected);
        assert!(list_models(&folder.path().join("absent")).is_err());
    }
}
