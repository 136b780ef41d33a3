//! Files that replace their targets when they are complete, with messages for users.

use std::{
    fs::{self, File},
    io::{self, Write},
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};
use moeflux::base::{self, Readers};

/// A file being written. An older one stays until [`finish`](Self::finish).
pub(crate) struct AtomicFile {
    file: base::AtomicFile,
    target: PathBuf,
}

impl AtomicFile {
    /// Creates the file, so that a folder that cannot be written is reported early.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(crate) fn create(target: &Path, readers: Readers) -> anyhow::Result<Self> {
        ensure!(target.file_name().is_some(), "{}: this names no file", target.display());
        ensure!(!target.is_dir(), "{}: this is a folder; name a file in it", target.display());
        let file =
            base::AtomicFile::create(target, readers).with_context(|| cannot_write(target))?;
        Ok(Self { file, target: target.into() })
    }

    /// The open file.
    pub(crate) fn file(&self) -> &File {
        self.file.file()
    }

    /// Path of the temporary file.
    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// Syncs the file and renames it to its target, replacing an older one.
    ///
    /// # Errors
    /// The file cannot be written or renamed.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        self.file.finish().with_context(|| cannot_write(&self.target))
    }

    /// Message for an I/O error.
    pub(crate) fn failed(&self) -> String {
        cannot_write(&self.target)
    }
}

fn cannot_write(target: &Path) -> String {
    format!("{}: cannot be written", target.display())
}

/// Replaces a file atomically: an older one stays until the new one is on disk. A target that is
/// not a file, such as a terminal or a pipe, is written to directly.
///
/// # Errors
/// The file cannot be written; an older one is then unchanged.
pub(crate) fn write(target: &Path, readers: Readers, bytes: &[u8]) -> anyhow::Result<()> {
    let is_special = || -> io::Result<bool> {
        let meta = fs::metadata(base::follow_links(target)?)?;
        Ok(!meta.is_file() && !meta.is_dir())
    };
    if is_special().unwrap_or(false) {
        return fs::write(target, bytes).with_context(|| cannot_write(target));
    }
    let file = AtomicFile::create(target, readers)?;
    file.file().write_all(bytes).with_context(|| file.failed())?;
    file.finish()
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use super::*;

    fn write(target: &Path, bytes: &[u8]) -> anyhow::Result<()> {
        super::write(target, Readers::Umask, bytes)
    }

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let [file, old, link] = ["file", "old", "link"].map(path);
        write(&file, b"one").unwrap();
        fs::hard_link(&file, &old).unwrap();
        std::os::unix::fs::symlink("file", &link).unwrap();
        write(&link, b"two").unwrap();
        assert_eq!([&file, &old].map(|path| fs::read(path).unwrap()), [b"two", b"one"]);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());

        // A name too long for a temporary one beside it simulates a disk that cannot be written.
        let long = path(&"s".repeat(250));
        fs::rename(&old, &long).unwrap();
        let error = write(&long, b"two").unwrap_err().to_string();
        assert!(error.contains("cannot be written"), "{error}");
        assert_eq!(fs::read(&long).unwrap(), b"one");
        assert!(write(folder.path(), b"two").unwrap_err().to_string().contains("folder"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }

    #[test]
    fn special_files_are_not_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("socket");
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        // A socket cannot be opened for writing.
        assert!(write(&socket, b"one").is_err());
        assert!(!fs::metadata(&socket).unwrap().is_file());
    }
}
