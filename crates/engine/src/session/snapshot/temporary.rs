//! Files that get their names when they are complete, and what is left of them where their writers were killed.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions, TryLockError},
    hash::{BuildHasher, Hasher, RandomState},
    io,
    path::{Path, PathBuf},
};

/// Tries for a name that nobody else has.
const TRIES: usize = 100;
const SUFFIX: &str = ".partial";
/// Hexadecimal digits that tell the files of one target apart.
const DIGITS: usize = 16;

/// A file beside its target, locked while it is written and removed unless it is [`placed`](Temporary::place).
#[derive(Debug)]
pub(super) struct Temporary {
    file: File,
    path: PathBuf,
    placed: bool,
}

impl Temporary {
    /// Makes one for the file `name` in `folder`, once what killed writers of that file left is removed.
    pub(super) fn create(folder: &Path, name: &OsStr) -> io::Result<Self> {
        remove_stale(folder, |target| target == name.as_encoded_bytes());
        for _ in 0..TRIES {
            // The keys of a hash are the system's random numbers.
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
                // Another writer took it for a stale one and removes it.
                Err(TryLockError::WouldBlock) => false,
                // Where there are no locks, nobody takes it for a stale one.
                Ok(()) | Err(TryLockError::Error(_)) => true,
            };
            // It may have been removed before it was locked.
            if locked && temporary.path.exists() {
                return Ok(temporary);
            }
        }
        Err(io::Error::other("files that are made here vanish at once"))
    }

    pub(super) fn file(&self) -> &File {
        &self.file
    }

    /// Gives it the name of its target, in place of what has that name.
    pub(super) fn place(mut self, target: &Path) -> io::Result<()> {
        fs::rename(&self.path, target)?;
        self.placed = true;
        Ok(())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if !self.placed {
            // The next writer removes what cannot be removed now.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Removes the temporary files in a folder that no writer holds, of targets for which `of` says so. Where the file system
/// has no locks, none is known to be stale, and all stay.
pub(super) fn remove_stale(folder: &Path, of: impl Fn(&[u8]) -> bool) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let ours = target_of(name.as_encoded_bytes()).is_some_and(&of);
        if !ours || !entry.file_type().is_ok_and(|kind| kind.is_file()) {
            continue;
        }
        let path = entry.path();
        let Ok(file) = OpenOptions::new().write(true).open(&path) else { continue };
        if file.try_lock().is_ok() {
            // Another writer may have been faster.
            let _ = fs::remove_file(path);
        }
    }
}

/// The name of the target of a temporary file of that name.
fn target_of(name: &[u8]) -> Option<&[u8]> {
    let name = name.strip_prefix(b".")?.strip_suffix(SUFFIX.as_bytes())?;
    let (target, digits) = name.split_at(name.len().checked_sub(DIGITS + 1)?);
    let (dot, digits) = digits.split_first()?;
    (*dot == b'.' && digits.iter().all(u8::is_ascii_hexdigit)).then_some(target)
}
