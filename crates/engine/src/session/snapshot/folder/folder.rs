//! A folder of snapshots.

use std::{
    cmp::Reverse,
    fs::{self, File, FileTimes, OpenOptions},
    io::Read,
    path::{Path, PathBuf},
    time::SystemTime,
};

use moeflux_base::{
    Error, Notices, create_private_folder, is_disk_full,
    seam::{BLOCK_BYTES, FolderLimits, files_with_extension, shrink_folder},
};
use moeflux_model::seam::digest;

use super::super::{
    snapshot::{Snapshot, SnapshotRequirements},
    snapshot_header::{FRAME, SavedState},
};
use crate::session::prefix_key::PrefixKey;

/// File extension of snapshots in a folder.
const SUFFIX: &str = "moeflux-session";

/// Most snapshots in a folder. Each search reads the start of all.
const MAX_FILES: usize = 16 << 10;

/// A folder of snapshots with a size limit. Several processes may share it.
#[derive(Clone, Debug)]
pub struct SnapshotFolder {
    path: PathBuf,
    limit: u64,
    notices: Notices,
}

impl SnapshotFolder {
    /// Opens a folder, creating it for its owner alone if needed, and [shrinks](Self::shrink) it to
    /// `limit` bytes of snapshots. Where the disk is full, it may be missing until it is written.
    ///
    /// # Errors
    /// The folder cannot be created or read.
    pub fn open(path: impl Into<PathBuf>, limit: u64) -> Result<Self, Error> {
        let folder = Self { path: path.into(), limit, notices: Notices::default() };
        match create_private_folder(&folder.path) {
            Err(error) if is_disk_full(&error) => return Ok(folder),
            made => made.map_err(Error::file(
                &folder.path,
                "cannot make the folder of saved sessions; choose a folder that can be written",
            ))?,
        }
        folder.shrink()?;
        Ok(folder)
    }

    /// The folder with a receiver of troubles while prompts are served.
    #[must_use]
    pub fn notices(self, notices: Notices) -> Self {
        Self { notices, ..self }
    }

    /// Maximum length of a snapshot, which takes whole blocks of the disk.
    pub(crate) fn limit(&self) -> u64 {
        self.limit - self.limit % BLOCK_BYTES
    }

    /// Makes the folder anew if it was removed. One that cannot be made is an error of the writer.
    pub(crate) fn make_anew(&self) {
        if !self.path.exists() && create_private_folder(&self.path).is_ok() {
            let path = self.path.display();
            self.notices.say(format_args!("{path}: the folder was removed, and is made anew"));
        }
    }

    /// Takes note of whether a prompt was saved. Requests do not fail of it.
    pub(crate) fn note_save<T>(&self, saved: &Result<T, Error>) {
        match saved {
            Ok(_) => self.notices.well(&self.path),
            Err(error) => {
                let text = format_args!("prompts are not saved for later: {error}");
                self.notices.trouble(&self.path, text);
            }
        }
    }

    /// The snapshot with the longest usable prefix of a prompt, and the length of that prefix. If
    /// sessions are `truncatable`, this is the common prefix. Otherwise all tokens of the snapshot
    /// must match, and it needs logits if it covers all of the prompt. Ties: the shortest snapshot.
    /// Reads headers and tokens only; damaged or mismatched files are skipped.
    pub(crate) fn find<'k>(
        &self,
        expected: &SnapshotRequirements,
        prompt: impl Into<PrefixKey<'k>>,
        truncatable: bool,
    ) -> Option<(PathBuf, usize)> {
        let prompt = prompt.into();
        let usable = |path: PathBuf| {
            let snapshot = Snapshot::open(&path).ok().filter(|s| s.fits(expected).is_ok())?;
            let saved = snapshot.key();
            let common = saved.common_len(prompt);
            let has_next = common < prompt.len() || snapshot.header().logits;
            let usable = common > 0 && (truncatable || common == saved.len() && has_next);
            usable.then_some((common, Reverse(saved.len()), path))
        };
        let found = self.snapshots().filter_map(usable).max()?;
        Some((found.2, found.0))
    }

    /// Path for a session: the same for all sessions with an equal key and equal settings.
    pub(crate) fn path_for<'k>(
        &self,
        expected: &SnapshotRequirements,
        key: impl Into<PrefixKey<'k>>,
    ) -> PathBuf {
        let key = key.into();
        let mut settings =
            format!("{} {} {}\n", expected.model, expected.kv_format, expected.exact);
        settings += &format!("{:?}\n", expected.files);
        // `entries` is left out: a longer context only has room for more entries.
        for SavedState { layer, index, entry_bytes, shape, .. } in &expected.states {
            settings += &format!("{layer} {index} {entry_bytes} {shape}\n");
        }
        let named: Vec<u8> = settings.into_bytes().into_iter().chain(key.bytes()).collect();
        let model = &expected.model.to_string()[..16];
        self.path.join(format!("{model}-{}-{:016x}.{SUFFIX}", key.len(), digest(&named)))
    }

    /// Updates the time of last use. A file that cannot be updated is evicted earlier.
    pub(crate) fn touch(&self, path: &Path) {
        let now = SystemTime::now();
        let times = FileTimes::new().set_accessed(now).set_modified(now);
        let _ = OpenOptions::new().write(true).open(path).and_then(|file| file.set_times(times));
    }

    /// Deletes the least recently used snapshots until the rest is within the limit, in blocks of
    /// the disk, and the temporary files of killed writers. Other files stay.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn shrink(&self) -> Result<(), Error> {
        fs::read_dir(&self.path)
            .map_err(Error::file(&self.path, "cannot read the folder of saved sessions"))?;
        let is_snapshot = |path: &Path| {
            let mut magic = [0; FRAME.magic.len()];
            let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
            read.is_ok() && magic == FRAME.magic
        };
        let limits = FolderLimits { bytes: self.limit, files: MAX_FILES };
        shrink_folder(&self.path, SUFFIX, limits, is_snapshot);
        Ok(())
    }

    /// Regular files (no links) with the extension of snapshots.
    fn snapshots(&self) -> impl Iterator<Item = PathBuf> {
        files_with_extension(&self.path, SUFFIX)
    }
}
#[cfg(test)]
mod tests;
