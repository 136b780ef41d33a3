//! Files of a folder of turns in the order of their last use, within limits of the disk.
//!
//! The folder is read once, and again after many writes, as other servers may write to it too. The
//! index never has more files than the limit, however many the folder has: the oldest ones are
//! deleted while it is read.

use std::{
    collections::{BTreeSet, HashMap},
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::SystemTime,
};

use moeflux::base::{allocated, remove_stale_files};

/// File extension of turns.
pub(crate) const SUFFIX: &str = "moeflux-turn";

/// Part of the limits after whose writes the folder is read again.
const REREAD: usize = 8;

/// Limits of a folder of turns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TurnLimits {
    /// Number of files.
    pub(crate) files: usize,
    /// Bytes that they take on the disk.
    pub(crate) bytes: u64,
}

/// The files that are known.
#[derive(Debug)]
pub(crate) struct TurnIndex {
    folder: PathBuf,
    limits: TurnLimits,
    files: HashMap<Arc<str>, FileUse>,
    by_use: BTreeSet<(SystemTime, Arc<str>)>,
    bytes: u64,
    /// Files that were written since the folder was read, and their bytes.
    written: FileSum,
}

/// A file's last use and bytes on the disk.
#[derive(Clone, Copy, Debug)]
struct FileUse {
    used: SystemTime,
    bytes: u64,
}

#[derive(Debug, Default)]
struct FileSum {
    files: usize,
    bytes: u64,
}

impl TurnIndex {
    pub(crate) fn new(folder: PathBuf, limits: TurnLimits) -> Self {
        Self {
            folder,
            limits,
            files: HashMap::new(),
            by_use: BTreeSet::new(),
            bytes: 0,
            written: FileSum::default(),
        }
    }

    /// Reads the folder, and deletes files over the limits and those of killed writers. Ends early
    /// when `is_ending`.
    pub(crate) fn read(&mut self, is_ending: &AtomicBool) {
        *self = Self::new(std::mem::take(&mut self.folder), self.limits);
        remove_stale_files(&self.folder, SUFFIX);
        // Without the folder there are no files.
        for entry in fs::read_dir(&self.folder).into_iter().flatten().flatten() {
            if is_ending.load(Ordering::Relaxed) {
                return;
            }
            let name = entry.file_name();
            let name = name
                .to_str()
                .filter(|name| name.strip_suffix(SUFFIX).is_some_and(|stem| stem.ends_with('.')));
            // Not that of a link's target.
            let meta = entry.metadata().ok().filter(fs::Metadata::is_file);
            if let (Some(name), Some(meta)) = (name, meta) {
                self.insert(name, &meta);
                self.shrink();
            }
        }
    }

    /// Adds a file that was written, and deletes the least recently used ones over the limits.
    pub(crate) fn add(&mut self, name: &str, is_ending: &AtomicBool) {
        // Another server may have deleted it.
        let Ok(meta) = fs::symlink_metadata(self.folder.join(name)) else { return };
        self.insert(name, &meta);
        self.shrink();
        self.written.files += 1;
        self.written.bytes = self.written.bytes.saturating_add(allocated(&meta));
        let TurnLimits { files, bytes } = self.limits;
        if self.written.files > files / REREAD || self.written.bytes > bytes / REREAD as u64 {
            self.read(is_ending);
        }
    }

    fn insert(&mut self, name: &str, meta: &fs::Metadata) {
        self.remove(name);
        let name: Arc<str> = name.into();
        let used = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
        let bytes = allocated(meta);
        self.bytes = self.bytes.saturating_add(bytes);
        self.by_use.insert((used, Arc::clone(&name)));
        self.files.insert(name, FileUse { used, bytes });
    }

    fn remove(&mut self, name: &str) {
        if let Some((name, FileUse { used, bytes })) = self.files.remove_entry(name) {
            self.bytes = self.bytes.saturating_sub(bytes);
            self.by_use.remove(&(used, name));
        }
    }

    /// Deletes files until the rest is within the limits.
    fn shrink(&mut self) {
        while self.files.len() > self.limits.files || self.bytes > self.limits.bytes {
            let Some((used, name)) = self.by_use.first().cloned() else { return };
            let path = self.folder.join(&*name);
            let meta = fs::symlink_metadata(&path).ok();
            let is_newer = |meta: &fs::Metadata| meta.modified().is_ok_and(|now| now > used);
            match meta.filter(is_newer) {
                // It was used since, by this server or another one.
                Some(meta) => self.insert(&name, &meta),
                None => {
                    // One that cannot be deleted is found again when the folder is read.
                    let _ = fs::remove_file(&path);
                    self.remove(&name);
                }
            }
        }
    }

    /// Number of files that are known.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.files.len()
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, path::Path, time::Duration};

    use super::*;

    static RUNNING: AtomicBool = AtomicBool::new(false);

    fn write(folder: &Path, name: &str, seconds: u64) {
        let path = folder.join(name);
        fs::write(&path, b"x").unwrap();
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_last_used_files_stay_within_both_limits() {
        let folder = tempfile::tempdir().unwrap();
        let name = |i: u64| format!("{i:03}.{SUFFIX}");
        // Not in the order of their use.
        (0..50).for_each(|i| write(folder.path(), &name(i), i * 7 % 50));
        write(folder.path(), "other", 0);
        write(folder.path(), &format!(".x.{SUFFIX}.0123456789abcdef.partial"), 0);
        let read = |files, bytes| {
            let mut index = TurnIndex::new(folder.path().into(), TurnLimits { files, bytes });
            index.read(&RUNNING);
            index
        };
        assert_eq!(read(50, u64::MAX).len(), 50);
        assert_eq!(read(20, u64::MAX).len(), 20);
        let mut last: Vec<_> = (0..50).filter(|i| i * 7 % 50 >= 30).map(name).collect();
        last.push("other".into());
        assert_eq!(names(folder.path()), last);
        // A file of a byte takes a block.
        let block = allocated(&fs::metadata(folder.path().join(&last[0])).unwrap());
        assert!(block > 1);
        let mut index = read(20, 5 * block);
        assert_eq!((index.len(), names(folder.path()).len()), (5, 6));
        // The oldest one was used since, the second one has vanished.
        let time = |i: &u64| i * 7 % 50;
        let mut left: Vec<u64> = (0..50).filter(|i| time(i) >= 45).collect();
        left.sort_by_key(time);
        write(folder.path(), &name(left[0]), 1000);
        fs::remove_file(folder.path().join(name(left[1]))).unwrap();
        write(folder.path(), &name(60), 60);
        index.add(&name(60), &RUNNING);
        let stay = [left[0], left[2], left[3], left[4], 60].map(|i| i);
        assert!(stay.iter().all(|i| folder.path().join(name(*i)).exists()));
    }

    #[test]
    fn files_of_other_servers_count_after_some_writes() {
        let folder = tempfile::tempdir().unwrap();
        let limits = TurnLimits { files: 16, bytes: u64::MAX };
        let mut index = TurnIndex::new(folder.path().into(), limits);
        index.read(&RUNNING);
        for i in 0..100 {
            write(folder.path(), &format!("other-{i}.{SUFFIX}"), i);
            write(folder.path(), &format!("ours-{i}.{SUFFIX}"), i);
            index.add(&format!("ours-{i}.{SUFFIX}"), &RUNNING);
            assert!(names(folder.path()).len() <= 16 + 16 / REREAD + 1);
        }
        let last = names(folder.path());
        assert!(last.contains(&format!("other-99.{SUFFIX}")), "{last:?}");
    }

    #[test]
    fn a_folder_that_is_gone_has_no_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("gone");
        let mut index = TurnIndex::new(path, TurnLimits { files: 1, bytes: 1 });
        index.read(&RUNNING);
        index.add("x", &RUNNING);
        assert_eq!(index.len(), 0);
    }
}
