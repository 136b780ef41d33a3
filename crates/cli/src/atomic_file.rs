//! Files that appear under their name only when they are complete.

use std::{
    ffi::OsString,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
};

use anyhow::{Context, ensure};

/// File with a temporary name beside its target. It is deleted when dropped before
/// [`finish`](Self::finish).
pub(crate) struct AtomicFile {
    pub(crate) file: File,
    path: PathBuf,
    target: PathBuf,
}

impl AtomicFile {
    /// Creates the file, so that a folder that cannot be written is reported early.
    ///
    /// # Errors
    /// The file cannot be created.
    pub(crate) fn create(target: &Path) -> anyhow::Result<Self> {
        let name = target
            .file_name()
            .with_context(|| format!("{}: this names no file", target.display()))?;
        ensure!(!target.is_dir(), "{}: this is a folder; name a file in it", target.display());
        let mut hidden = OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{}.partial", std::process::id()));
        let path = target.with_file_name(hidden);
        let file = File::create(&path).with_context(|| failed(target))?;
        Ok(Self { file, path, target: target.into() })
    }

    /// Path of the temporary file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Syncs the file and renames it to its target, replacing an older one.
    ///
    /// # Errors
    /// The file cannot be written or renamed.
    pub(crate) fn finish(self) -> anyhow::Result<()> {
        let finish = || {
            self.file.sync_all()?;
            fs::rename(&self.path, &self.target)
        };
        finish().with_context(|| self.failed())
    }

    /// Message for an I/O error.
    pub(crate) fn failed(&self) -> String {
        failed(&self.target)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        // It no longer exists after a rename.
        let _ = fs::remove_file(&self.path);
    }
}

fn failed(target: &Path) -> String {
    format!("{}: cannot be written", target.display())
}

/// Replaces a file atomically: an older one stays until the new one is on disk. Symbolic links are
/// followed; a target that is not a file, such as a terminal or a pipe, is written to directly.
///
/// # Errors
/// The file cannot be written; an older one is then unchanged.
pub(crate) fn write(target: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let found = fs::canonicalize(target);
    let target = found.as_deref().unwrap_or(target);
    if fs::metadata(target).is_ok_and(|meta| !meta.is_file() && !meta.is_dir()) {
        return fs::write(target, bytes).with_context(|| failed(target));
    }
    let mut file = AtomicFile::create(target)?;
    file.file.write_all(bytes).with_context(|| file.failed())?;
    file.finish()
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

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
