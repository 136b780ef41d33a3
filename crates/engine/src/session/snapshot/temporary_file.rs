//! Temporary files that are renamed when complete, and removal of leftovers of killed writers.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions, TryLockError},
    hash::{BuildHasher, Hasher, RandomState},
    io,
    path::{Path, PathBuf},
};

/// Attempts to find an unused name.
const TRIES: usize = 100;
const SUFFIX: &str = ".partial";
/// Random hexadecimal digits in the name.
const DIGITS: usize = 16;

/// A file next to its target, locked while it is written, and deleted unless
/// [`placed`](TemporaryFile::place).
#[derive(Debug)]
pub(super) struct TemporaryFile {
    file: File,
    path: PathBuf,
    placed: bool,
}

impl TemporaryFile {
    /// Creates a temporary file for `name` in `folder`, after removing stale ones of that target.
    pub(super) fn create(folder: &Path, name: &OsStr) -> io::Result<Self> {
        remove_stale(folder, |target| target == name.as_encoded_bytes());
        for _ in 0..TRIES {
            // The standard library seeds a hasher from the system's random generator.
            let random = RandomState::new().build_hasher().finish();
            let mut temporary = OsString::from(".");
            temporary.push(name);
            temporary.push(format!(".{random:016x}{SUFFIX}"));
            let path = folder.join(temporary);
            let file = match OpenOptions::new().write(true).create_new(true).open(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                file => file?,
            };
            let temporary = Self { file, path, placed: false };
            let locked = match temporary.file.try_lock() {
                // Another writer considers the file stale and is about to delete it.
                Err(TryLockError::WouldBlock) => false,
                // On a file system without locks no file is considered stale.
                Ok(()) | Err(TryLockError::Error(_)) => true,
            };
            // It may have been deleted before it was locked.
            if locked && temporary.path.exists() {
                return Ok(temporary);
            }
        }
        Err(io::Error::other("files that are made here vanish at once"))
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Renames the file to its target, replacing an existing one.
    pub(super) fn place(mut self, target: &Path) -> io::Result<()> {
        fs::rename(&self.path, target)?;
        self.placed = true;
        Ok(())
    }
}

impl Drop for TemporaryFile {
    fn drop(&mut self) {
        if !self.placed {
            // Otherwise the next writer deletes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Deletes temporary files that no writer has locked, of targets for which `is_target` returns
/// true. On a file system without locks all stay, as none is known to be stale.
pub(super) fn remove_stale(folder: &Path, is_target: impl Fn(&[u8]) -> bool) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let ours = target_of(name.as_encoded_bytes()).is_some_and(&is_target);
        if !ours || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let path = entry.path();
        let Ok(file) = OpenOptions::new().write(true).open(&path) else { continue };
        if file.try_lock().is_ok() {
            // Another writer may have deleted it first.
            let _ = fs::remove_file(path);
        }
    }
}

/// Target name of a temporary file's name.
fn target_of(name: &[u8]) -> Option<&[u8]> {
    let name = name.strip_prefix(b".")?.strip_suffix(SUFFIX.as_bytes())?;
    let (target, digits) = name.split_at(name.len().checked_sub(DIGITS + 1)?);
    let (dot, digits) = digits.split_first()?;
    (*dot == b'.' && digits.iter().all(u8::is_ascii_hexdigit)).then_some(target)
}
