//! Files that appear under their name only when they are complete, folders for private files, and
//! removal of leftovers of killed writers.
//!
//! A file replaces its target by a rename. A temporary name is random and created anew, so that
//! another user of a shared folder can neither guess it nor place a link there. A symbolic link at
//! the target is written through if the user made it, see [`follow_links`].

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, OpenOptions, TryLockError},
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, Read},
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::faulty_disk::sync_folder;

/// Attempts to find an unused name.
const TRIES: usize = 100;
const SUFFIX: &str = ".partial";
/// Random hexadecimal digits in the name.
const DIGITS: usize = 16;
/// Bytes of a block of most file systems.
pub const BLOCK_BYTES: u64 = 4096;
/// Maximum symbolic links from a path to its file, as in Linux.
const MAX_LINKS: usize = 40;

/// Users who may read a new file. A file that is replaced keeps its permissions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readers {
    /// The owner: mode 0600. For conversations.
    Owner,
    /// As the process's umask allows.
    Umask,
}

/// File with a temporary name beside its target, locked while it is written. It is deleted when
/// dropped before [`finish`](Self::finish).
#[derive(Debug)]
pub struct AtomicFile {
    file: File,
    path: PathBuf,
    target: PathBuf,
    placed: bool,
}

impl AtomicFile {
    /// Creates a temporary file for `target`, after removing stale ones.
    ///
    /// # Errors
    /// The folder cannot be written, or `target` names no file, or is a link of another user.
    pub fn create(target: &Path, readers: Readers) -> io::Result<Self> {
        let target = follow_links(target)?;
        let name = target.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
        remove_stale(folder_of(&target), |target| target == name.as_encoded_bytes());
        Self::create_among(target, readers)
    }

    /// Creates a temporary file for `target`, which is no link, in a folder of many files: stale
    /// ones are not looked for.
    ///
    /// # Errors
    /// The folder cannot be written, or `target` names no file.
    pub fn create_among(target: PathBuf, readers: Readers) -> io::Result<Self> {
        let name = target.file_name().ok_or(io::ErrorKind::InvalidFilename)?;
        let folder = folder_of(&target);
        for _ in 0..TRIES {
            // The standard library seeds a hasher from the system's random generator.
            let random = RandomState::new().build_hasher().finish();
            let mut temporary = OsString::from(".");
            temporary.push(name);
            temporary.push(format!(".{random:016x}{SUFFIX}"));
            let path = folder.join(temporary);
            let file = match options(readers).create_new(true).open(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => continue,
                file => file?,
            };
            let temporary = Self { file, path, target: target.clone(), placed: false };
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

    /// The open file, for writing.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Path of the temporary file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Folder of the file and of its target.
    #[doc(hidden)]
    pub fn folder(&self) -> &Path {
        folder_of(&self.target)
    }

    /// Syncs the file and renames it to its target, replacing an existing one.
    ///
    /// # Errors
    /// The file cannot be written or renamed.
    pub fn finish(self) -> io::Result<()> {
        self.file.sync_all()?;
        self.place()
    }

    /// Renames the file, which is synced, to its target. It has the permissions of the file that it
    /// replaces.
    #[doc(hidden)]
    pub fn place(mut self) -> io::Result<()> {
        #[cfg(unix)]
        if let Some(old) = fs::symlink_metadata(&self.target).ok().filter(fs::Metadata::is_file) {
            use std::os::unix::fs::PermissionsExt;

            let kept = fs::Permissions::from_mode(old.permissions().mode() & 0o777);
            // Some file systems have no permissions to change.
            let _ = self.file.set_permissions(kept);
        }
        fs::rename(&self.path, &self.target)?;
        self.placed = true;
        sync_folder(self.folder());
        Ok(())
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.placed {
            // Otherwise the next writer deletes it.
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Options that open a file for writing and create it for `readers`.
fn options(readers: Readers) -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true);
    #[cfg(unix)]
    if readers == Readers::Owner {
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    }
    #[cfg(not(unix))]
    let _ = readers;
    options
}

/// Folder of a path.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| *folder != Path::new("")).unwrap_or(Path::new("."))
}

/// Creates a folder, and those above it, for files that only their owner may read: mode 0700.
/// Existing folders stay as they are.
///
/// # Errors
/// A folder cannot be created.
pub fn create_private_folder(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.recursive(true).create(path)
}

/// Whether a disk, or the share of it that a user may have, is full.
pub fn is_disk_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// Bytes that a file takes on its disk: whole blocks, without holes.
pub fn allocated(meta: &fs::Metadata) -> u64 {
    #[cfg(unix)]
    let blocks = std::os::unix::fs::MetadataExt::blocks(meta).saturating_mul(512);
    #[cfg(not(unix))]
    let blocks = 0;
    // Some file systems do not count blocks.
    if blocks > 0 {
        return blocks;
    }
    meta.len().checked_next_multiple_of(BLOCK_BYTES).unwrap_or(u64::MAX)
}

/// Limits of a folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FolderLimits {
    /// Bytes on the disk of all files.
    pub bytes: u64,
    /// Number of files.
    pub files: usize,
}

/// A file of a folder with a size limit.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct UsedFile {
    /// Time of its last use.
    used: SystemTime,
    path: PathBuf,
    bytes: u64,
}

/// Regular files (no links) of a folder with an extension.
pub fn files_with_extension(folder: &Path, ext: &str) -> impl Iterator<Item = PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
    files.map(|entry| entry.path()).filter(move |path| path.extension() == Some(OsStr::new(ext)))
}

/// Deletes the temporary files of killed writers of files with the extension `ext`.
pub fn remove_stale_files(folder: &Path, ext: &str) {
    let suffix = format!(".{ext}");
    remove_stale(folder, |target| target.ends_with(suffix.as_bytes()));
}

/// Deletes the temporary files of killed writers of files with the extension `ext`. Then deletes
/// the least recently used ones of these files until the rest is within `limits`. A file that
/// another process has deleted counts as freed. One that cannot be deleted still counts. Files for
/// which `is_ours` is false stay and do not count.
pub fn shrink_folder(
    folder: &Path,
    ext: &str,
    limits: FolderLimits,
    is_ours: impl Fn(&Path) -> bool,
) {
    remove_stale_files(folder, ext);
    let usage = |path: PathBuf| {
        let meta = fs::metadata(&path).ok().filter(|_| is_ours(&path))?;
        Some(UsedFile { used: meta.modified().ok()?, path, bytes: allocated(&meta) })
    };
    let mut files: Vec<UsedFile> = files_with_extension(folder, ext).filter_map(usage).collect();
    files.sort();
    let mut total = files.iter().fold(0u64, |total, file| total.saturating_add(file.bytes));
    let mut count = files.len();
    for UsedFile { path, bytes, .. } in files {
        if total <= limits.bytes && count <= limits.files {
            break;
        }
        if fs::remove_file(path).map_or_else(|e| e.kind() == io::ErrorKind::NotFound, |()| true) {
            total = total.saturating_sub(bytes);
            count -= 1;
        }
    }
}

/// Text of a regular file of at most `max` bytes: opening a pipe would block.
///
/// # Errors
/// It cannot be read, is no regular file, is longer, or is not UTF-8.
pub fn read_text(path: &Path, max: u64) -> io::Result<String> {
    let meta = fs::metadata(path)?;
    if !meta.is_file() || meta.len() > max {
        return Err(io::Error::other(format!("expected a file of at most {max} bytes")));
    }
    let mut text = String::new();
    File::open(path)?.take(max).read_to_string(&mut text)?;
    Ok(text)
}

/// Path to the file that `path` names: symbolic links are followed, to a missing file too. A link
/// that neither the user, nor root, nor the owner of its folder made is an error: it would choose
/// the file that is written.
///
/// # Errors
/// A link cannot be read, is another user's, or leads to itself.
pub fn follow_links(path: &Path) -> io::Result<PathBuf> {
    let mut path = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        let Some(link) = fs::symlink_metadata(&path).ok().filter(fs::Metadata::is_symlink) else {
            return Ok(path);
        };
        if !is_trusted(&link, folder_of(&path)) {
            let problem = "this is a symbolic link of another user; name a file";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, problem));
        }
        path = folder_of(&path).join(fs::read_link(&path)?);
    }
    Err(io::Error::other("symbolic links lead to each other in a circle"))
}

#[cfg(unix)]
fn is_trusted(link: &fs::Metadata, folder: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;

    let folder = fs::metadata(folder).ok().map(|folder| folder.uid());
    LinkOwners { link: link.uid(), folder, user: rustix::process::geteuid().as_raw() }.are_trusted()
}

#[cfg(not(unix))]
fn is_trusted(_: &fs::Metadata, _: &Path) -> bool {
    // Only administrators make symbolic links on Windows, or developers on their own machine.
    true
}

/// Ids of the users around a symbolic link.
#[cfg(unix)]
struct LinkOwners {
    link: u32,
    folder: Option<u32>,
    user: u32,
}

#[cfg(unix)]
impl LinkOwners {
    fn are_trusted(&self) -> bool {
        [Some(0), Some(self.user), self.folder].contains(&Some(self.link))
    }
}

/// Opens an existing or new file for writing from its start; a link of another user is not
/// followed. For output that is read while it is written, or that is no regular file.
pub fn create(target: &Path) -> io::Result<File> {
    options(Readers::Umask).create(true).truncate(true).open(follow_links(target)?)
}

/// Deletes temporary files that no writer has locked, of targets for which `is_target` returns
/// true. On a file system without locks all stay, as none is known to be stale.
pub fn remove_stale(folder: &Path, is_target: impl Fn(&[u8]) -> bool) {
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

/// Lock of one writer on a file that is replaced while it is held, such as a session that is saved
/// after each answer. It is a file beside the target, deleted when dropped.
#[derive(Debug)]
pub struct WriterLock {
    /// Holds the lock of the operating system, which ends with the process.
    _file: File,
    path: PathBuf,
}

impl WriterLock {
    /// Locks `target`, which need not exist. `None` on a file system without locks.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if another writer holds the lock. The folder cannot be
    /// written.
    pub fn acquire(target: &Path) -> io::Result<Option<Self>> {
        let target = follow_links(target)?;
        if target.is_dir() {
            return Err(io::ErrorKind::IsADirectory.into());
        }
        let mut name = OsString::from(".");
        name.push(target.file_name().ok_or(io::ErrorKind::InvalidFilename)?);
        name.push(OsStr::new(".lock"));
        let path = target.with_file_name(name);
        for _ in 0..TRIES {
            let file = match options(Readers::Owner).create_new(true).open(&path) {
                Err(e) if e.kind() == io::ErrorKind::AlreadyExists => open_lock(&path),
                file => file,
            };
            let file = match file {
                // It was deleted in between.
                Err(e) if e.kind() == io::ErrorKind::NotFound && folder_of(&path).is_dir() => {
                    continue;
                }
                file => file?,
            };
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => return Err(io::ErrorKind::WouldBlock.into()),
                Err(TryLockError::Error(_)) => {
                    let _ = fs::remove_file(&path);
                    return Ok(None);
                }
                // Its last holder may have deleted it before it was locked.
                Ok(()) if is_same(&file, &path) => return Ok(Some(Self { _file: file, path })),
                Ok(()) => {}
            }
        }
        Err(io::Error::other("files that are made here vanish at once"))
    }
}

impl Drop for WriterLock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// Opens a lock that a writer left, or holds; not through a link.
fn open_lock(path: &Path) -> io::Result<File> {
    if !fs::symlink_metadata(path)?.is_file() {
        return Err(io::Error::other(
            "the name of its lock is taken by something else than a file",
        ));
    }
    options(Readers::Owner).open(path)
}

/// Whether an open file is still the one at `path`.
fn is_same(file: &File, path: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;

        let key = |meta: io::Result<fs::Metadata>| meta.ok().map(|meta| (meta.dev(), meta.ino()));
        key(file.metadata()) == key(fs::symlink_metadata(path))
    }
    #[cfg(not(unix))]
    {
        let _ = file;
        path.exists()
    }
}

#[cfg(unix)]
#[cfg(test)]
mod tests {
    use std::{
        io::Write,
        os::unix::fs::{PermissionsExt, symlink},
        time::Duration,
    };

    use super::*;

    fn write(path: &Path, readers: Readers, bytes: &[u8]) -> io::Result<()> {
        let file = AtomicFile::create(path, readers)?;
        file.file().write_all(bytes)?;
        file.finish()
    }

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn new_private_files_are_their_owners_and_replaced_ones_keep_their_mode() {
        let folder = tempfile::tempdir().unwrap();
        let below = folder.path().join("a/b");
        create_private_folder(&below).unwrap();
        assert_eq!([&below, below.parent().unwrap()].map(mode), [0o700; 2]);
        let path = below.join("session");
        write(&path, Readers::Owner, b"one").unwrap();
        assert_eq!(mode(&path), 0o600);
        for kept in [0o640, 0o604, 0o400, 0o666] {
            fs::set_permissions(&path, fs::Permissions::from_mode(kept)).unwrap();
            for readers in [Readers::Owner, Readers::Umask] {
                write(&path, readers, b"two").unwrap();
                assert_eq!(mode(&path), kept);
            }
        }
        assert_eq!(fs::read_dir(&below).unwrap().count(), 1);
    }

    #[test]
    fn the_least_recently_used_files_of_a_folder_are_deleted() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(format!("{name}.turn"));
        for (i, name) in ["b", "a", "c", "foreign"].into_iter().enumerate() {
            fs::write(path(name), [1; 10]).unwrap();
            let file = File::options().write(true).open(path(name)).unwrap();
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(i as u64);
            file.set_times(fs::FileTimes::new().set_modified(time)).unwrap();
        }
        let killed = folder.path().join(".d.turn.0123456789abcdef.partial");
        fs::write(&killed, "").unwrap();
        let running = AtomicFile::create(&path("e"), Readers::Owner).unwrap();
        fs::write(folder.path().join("other"), [0; 100]).unwrap();
        let shrink = |bytes, files| {
            let limits = FolderLimits { bytes, files };
            shrink_folder(folder.path(), "turn", limits, |file| file != path("foreign"));
        };
        let block = allocated(&fs::metadata(path("a")).unwrap());
        assert!(block > 10, "whole blocks count");
        shrink(2 * block, 3);
        assert!(!path("b").exists() && path("a").exists() && path("c").exists());
        assert!(!killed.exists() && running.path().exists());
        shrink(2 * block, 1);
        assert!(!path("a").exists() && path("c").exists());
        shrink(9, 1);
        assert!(!path("c").exists());
        assert!(path("foreign").exists() && folder.path().join("other").exists());
    }

    #[test]
    fn the_users_links_are_written_through_and_a_missing_target_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("disk")).unwrap();
        symlink("second", path("first")).unwrap();
        symlink("disk/file", path("second")).unwrap();
        for text in [b"one", b"two"] {
            write(&path("first"), Readers::Owner, text).unwrap();
            assert_eq!(fs::read(path("disk/file")).unwrap(), text);
        }
        assert!(["first", "second"].map(path).iter().all(|link| link.is_symlink()));
        symlink("circle", path("circle")).unwrap();
        assert!(write(&path("circle"), Readers::Owner, b"one").is_err());
        assert!(path("circle").is_symlink());
    }

    #[test]
    fn a_link_is_trusted_if_the_user_or_root_or_the_folders_owner_made_it() {
        let trusted =
            |link, folder| LinkOwners { link, folder: Some(folder), user: 1000 }.are_trusted();
        assert!(trusted(1000, 0) && trusted(0, 0) && trusted(7, 7));
        assert!(!trusted(7, 0) && !trusted(7, 1000));
        assert!(!LinkOwners { link: 7, folder: None, user: 1000 }.are_trusted());
    }

    #[test]
    fn one_writer_holds_a_lock_and_a_left_one_is_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("session");
        let lock = folder.path().join(".session.lock");
        fs::write(&lock, "").unwrap();
        let held = WriterLock::acquire(&path).unwrap().unwrap();
        let second = WriterLock::acquire(&path).unwrap_err();
        assert_eq!(second.kind(), io::ErrorKind::WouldBlock);
        drop(held);
        assert!(!lock.exists());
        drop(WriterLock::acquire(&path).unwrap());
        // A link at its name is not followed.
        symlink(folder.path().join("elsewhere"), &lock).unwrap();
        assert!(WriterLock::acquire(&path).is_err());
        assert!(!folder.path().join("elsewhere").exists());
    }
}
