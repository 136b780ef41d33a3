//! Folders that hold a model's tensor files: its own, and mirrors on other disks.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
};

use moeflux_base::Error;

use super::{arriving::ArrivingFile, data_file::DataFile};

/// File in a model's folder that lists mirrors, one per line; `#` starts a comment.
const LIST: &str = "mirrors.txt";

/// Maximum size of that file in bytes.
const MAX_LIST: u64 = 64 << 10;

/// A folder with the names of its entries.
struct ListedFolder {
    path: PathBuf,
    names: BTreeSet<String>,
}

impl ListedFolder {
    /// Lists `path`; `doing` describes the operation in an error.
    fn open(path: &Path, doing: &'static str) -> Result<Self, Error> {
        let entries = std::fs::read_dir(path).map_err(Error::file(path, doing))?;
        let mut names = BTreeSet::new();
        for entry in entries {
            let entry = entry.map_err(Error::file(path, "cannot list the folder"))?;
            names.extend(entry.file_name().into_string().ok());
        }
        Ok(Self { path: path.into(), names })
    }
}

/// A model's own folder, its mirrors, and the files of the own folder that are arriving.
pub(super) struct ModelFolders {
    own: ListedFolder,
    mirrors: Vec<ListedFolder>,
    arriving: Vec<ArrivingFile>,
}

impl ModelFolders {
    /// Lists a model's folder, the mirrors that its `mirrors.txt` names, and those in `mirrors`.
    ///
    /// # Errors
    /// A folder cannot be listed.
    pub(super) fn open(
        folder: &Path,
        mirrors: &[PathBuf],
        arriving: &[ArrivingFile],
    ) -> Result<Self, Error> {
        let mut own = ListedFolder::open(
            folder,
            "cannot open the model's folder; --model takes a folder with config.json and \
             model.safetensors",
        )?;
        let named = if own.names.contains(LIST) { read_list(folder)? } else { Vec::new() };
        let mut opened: Vec<ListedFolder> = Vec::new();
        for mirror in named.iter().chain(mirrors) {
            if mirror != folder && !opened.iter().any(|m| m.path == *mirror) {
                let doing = "cannot open this mirror of the model; is its disk there?";
                opened.push(ListedFolder::open(mirror, doing)?);
            }
        }
        let is_own = |file: &&ArrivingFile| file.path.parent() == Some(folder);
        let arriving: Vec<_> = arriving.iter().filter(is_own).cloned().collect();
        let names = arriving.iter().filter_map(|file| file.path.file_name()?.to_str());
        own.names.extend(names.map(str::to_owned));
        Ok(Self { own, mirrors: opened, arriving })
    }

    /// Names of the entries of the model's own folder.
    pub(super) fn own_names(&self) -> &BTreeSet<String> {
        &self.own.names
    }

    fn folders(&self) -> impl Iterator<Item = &ListedFolder> {
        [&self.own].into_iter().chain(&self.mirrors)
    }

    /// Names of the entries of all folders, with duplicates.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.folders().flat_map(|folder| &folder.names).map(String::as_str)
    }

    /// Opens a file in the first folder that has it; `None` if none has.
    ///
    /// # Errors
    /// The file cannot be opened.
    pub(super) fn open_file(&self, name: &str) -> Result<Option<DataFile>, Error> {
        let Some(folder) = self.folders().find(|folder| folder.names.contains(name)) else {
            return Ok(None);
        };
        let path = folder.path.join(name);
        let file = match self.arriving.iter().find(|file| file.path == path) {
            Some(file) => DataFile::arriving(file),
            None => DataFile::open(&path)?,
        };
        Ok(Some(file))
    }

    /// Checks that each mirror has at least one of the tensor files.
    pub(super) fn check_mirrors<'a>(
        &self,
        files: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), Error> {
        match self.mirrors.iter().find(|m| !files.clone().any(|name| m.names.contains(name))) {
            Some(mirror) => Err(Error::Checkpoint {
                path: mirror.path.clone(),
                problem: format!(
                    "it has none of the files of tensors of {}: a mirror has some or all of them; \
                     copy them, or leave it out",
                    self.own.path.display()
                ),
            }),
            None => Ok(()),
        }
    }

    pub(super) fn into_mirrors(self) -> Vec<PathBuf> {
        self.mirrors.into_iter().map(|mirror| mirror.path).collect()
    }
}

/// Whether a path names another machine on Windows: `\\server\share` with separators of either
/// kind, which is also how `\\?\UNC\` and `\\.\` start, or the kernel's `\??\`.
fn is_network_share(path: &str) -> bool {
    let is_separator = |c: char| c == '/' || c == '\\';
    path.strip_prefix(is_separator)
        .is_some_and(|rest| rest.starts_with(is_separator) || rest.starts_with("??"))
}

/// Mirrors that a model's `mirrors.txt` names, relative to the model's folder.
fn read_list(folder: &Path) -> Result<Vec<PathBuf>, Error> {
    let list = DataFile::open(&folder.join(LIST))?;
    let text = String::from_utf8(list.read_text(MAX_LIST)?).map_err(|_| Error::Checkpoint {
        path: list.path().into(),
        problem: "it is not UTF-8 text: it lists folders, one per line".into(),
    })?;
    let lines = text.lines().map(|line| line.split('#').next().unwrap_or("").trim());
    lines
        .filter(|line| !line.is_empty())
        .map(|line| {
            // A downloaded list must not make this machine connect to a network share.
            if is_network_share(line) {
                let problem = format!(
                    "{line} is on another machine: if that is intended, give it with --mirror"
                );
                return Err(Error::Checkpoint { path: list.path().into(), problem });
            }
            Ok(folder.join(line))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_cannot_name_a_network_share_in_any_spelling() {
        let folder = tempfile::tempdir().unwrap();
        let listed = |line: &str| {
            std::fs::write(folder.path().join(LIST), format!("\u{feff}# Disks\r\n  {line} \r\n"))
                .unwrap();
            read_list(folder.path())
        };
        for share in [
            r"\\server\share",
            "//server/share",
            r"/\server\share",
            r"\/server/share",
            r"\\?\UNC\server\share",
            r"//?/UNC/server/share",
            r"\\.\UNC\server\share",
            r"\??\UNC\server\share",
            r"/??/UNC/server/share",
        ] {
            let error = listed(share).unwrap_err().to_string();
            assert!(error.contains("--mirror"), "{share}: {error}");
        }
        for path in ["disk", "../disk", "/mnt/disk", r"\disk", r"D:\disk", "D:/disk"] {
            assert_eq!(listed(path).unwrap(), [folder.path().join(path)]);
        }
    }
}
