//! The folders that a model's files of tensors lie in: its own, and others, on other disks.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use super::Source;
use crate::base::error::Error;

/// The file in a model's folder that names others, one in a line; what follows a `#` is a comment.
const LIST: &str = "mirrors.txt";

/// Most bytes of that file.
const MAX_LIST: u64 = 64 << 10;

/// Folders with the names of what is in them: the model's own, then the mirrors.
pub(super) struct Folders {
    own: (PathBuf, BTreeSet<String>),
    mirrors: Vec<(PathBuf, BTreeSet<String>)>,
}

impl Folders {
    /// A model's folder, the mirrors that its list names, and those that are given.
    ///
    /// # Errors
    /// One cannot be listed.
    pub(super) fn open(folder: &Path, mirrors: &[PathBuf]) -> Result<Self, Error> {
        let own = names(
            folder,
            "cannot open the model's folder; --model takes a folder with config.json and model.safetensors",
        )?;
        let listed = if own.contains(LIST) { listed(folder)? } else { Vec::new() };
        let mut all: Vec<(PathBuf, BTreeSet<String>)> = Vec::new();
        for mirror in listed.iter().chain(mirrors) {
            if mirror != folder && !all.iter().any(|(path, _)| path == mirror) {
                let doing = "cannot open this mirror of the model; is its disk there?";
                all.push((mirror.clone(), names(mirror, doing)?));
            }
        }
        Ok(Self { own: (folder.into(), own), mirrors: all })
    }

    /// Names of what is in the model's own folder.
    pub(super) fn own(&self) -> &BTreeSet<String> {
        &self.own.1
    }

    fn all(&self) -> impl Iterator<Item = &(PathBuf, BTreeSet<String>)> {
        [&self.own].into_iter().chain(&self.mirrors)
    }

    /// All names, some of them several times.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.all().flat_map(|(_, names)| names).map(String::as_str)
    }

    /// Where a file is, in the first folder that has it.
    pub(super) fn home(&self, name: &str) -> Option<PathBuf> {
        self.all().find(|(_, names)| names.contains(name)).map(|(folder, _)| folder.join(name))
    }

    /// Checks that each mirror has some of these files.
    pub(super) fn all_have_some<'a>(
        &self,
        files: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), Error> {
        match self.mirrors.iter().find(|(_, names)| !files.clone().any(|name| names.contains(name)))
        {
            Some((mirror, _)) => Err(Error::Checkpoint {
                path: mirror.clone(),
                problem: format!(
                    "it has none of the files of tensors of {}: a mirror has all of them or some; copy them, or \
                     leave it out",
                    self.own.0.display()
                ),
            }),
            None => Ok(()),
        }
    }

    pub(super) fn into_mirrors(self) -> Vec<PathBuf> {
        self.mirrors.into_iter().map(|(path, _)| path).collect()
    }
}

/// The names in a folder.
fn names(folder: &Path, doing: &'static str) -> Result<BTreeSet<String>, Error> {
    let entries = std::fs::read_dir(folder).map_err(Error::file(folder, doing))?;
    let mut names = BTreeSet::new();
    for entry in entries {
        let entry = entry.map_err(Error::file(folder, "cannot list the folder"))?;
        names.extend(entry.file_name().into_string().ok());
    }
    Ok(names)
}

/// The folders that a model's folder lists, relative to itself.
fn listed(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let list = Source::open(&folder.join(LIST))?;
    let text = String::from_utf8(list.read_all(MAX_LIST)?).map_err(|_| Error::Checkpoint {
        path: list.path().into(),
        problem: "it is no text: it names folders, one in a line".into(),
    })?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or("").trim());
    lines
        .filter(|line| !line.is_empty())
        .map(|line| {
            // Who wrote the list may not be who opens it: it does not make this machine greet another one.
            if line.starts_with("\\\\") || line.starts_with("//") {
                let problem = format!(
                    "{line} is on another machine: if that is meant, give it with --mirror"
                );
                return Err(Error::Checkpoint { path: list.path().into(), problem });
            }
            Ok(folder.join(line))
        })
        .collect()
}
