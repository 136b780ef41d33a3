//! A folder of snapshots that stays below a size: what was computed of many prompts, to go on from.

#[cfg(test)]
mod tests;

use std::{
    cmp::Reverse,
    ffi::OsStr,
    fs::{self, File, FileTimes, OpenOptions},
    io::{ErrorKind, Read},
    path::{Path, PathBuf},
    time::SystemTime,
};

use super::{Expectation, Snapshot, StateShape, header::FRAME, temporary::remove_stale};
use crate::{base::error::Error, checkpoint::digest};

/// What snapshots in a folder end in.
const SUFFIX: &str = "moeflux-session";

/// A folder of snapshots with a limit to its size. Several processes may share one.
#[derive(Clone, Debug)]
pub struct SnapshotFolder {
    path: PathBuf,
    limit: u64,
}

impl SnapshotFolder {
    /// Opens a folder, which is made if need be, and [shrinks](Self::shrink) it: its snapshots have `limit` bytes at most from now on.
    ///
    /// # Errors
    /// The folder cannot be made or read.
    pub fn open(path: impl Into<PathBuf>, limit: u64) -> Result<Self, Error> {
        let path = path.into();
        fs::create_dir_all(&path).map_err(Error::file(
            &path,
            "cannot make the folder of saved sessions; choose a folder that can be written",
        ))?;
        let folder = Self { path, limit };
        folder.shrink()?;
        Ok(folder)
    }

    /// Bytes that its snapshots may have.
    pub(crate) fn limit(&self) -> u64 {
        self.limit
    }

    /// The snapshot of which most can be used for `tokens`, and how many of its tokens: if a session like this one is
    /// `cuttable`, all that are the same from the first on; else all of the snapshot's or none, and not all of `tokens`
    /// without the logits behind them. Of equal ones the shortest. Reads headers and tokens only; what is damaged or does
    /// not fit is passed over.
    pub(crate) fn find(
        &self,
        expected: &Expectation,
        tokens: &[u32],
        cuttable: bool,
    ) -> Option<(PathBuf, usize)> {
        let usable = |path: PathBuf| {
            let snapshot = Snapshot::open(&path).ok().filter(|s| s.fits(expected).is_ok())?;
            let saved = snapshot.tokens();
            let common = saved.iter().zip(tokens).take_while(|(a, b)| a == b).count();
            let goes_on = common < tokens.len() || snapshot.header().logits;
            let usable = common > 0 && (cuttable || common == saved.len() && goes_on);
            usable.then_some((common, Reverse(saved.len()), path))
        };
        let found = self.snapshots().filter_map(usable).max()?;
        Some((found.2, found.0))
    }

    /// Where to save a session of `tokens`: every session like this one with these tokens has the same place.
    pub(crate) fn place_for(&self, expected: &Expectation, tokens: &[u32]) -> PathBuf {
        let mut like = format!("{} {} {}\n", expected.model, expected.keys, expected.exact);
        // A longer context has room for more places of the same.
        for StateShape { layer, which, place_bytes, shape, .. } in &expected.states {
            like += &format!("{layer} {which} {place_bytes} {shape}\n");
        }
        let bytes = tokens.iter().flat_map(|token| token.to_le_bytes());
        let all: Vec<u8> = like.into_bytes().into_iter().chain(bytes).collect();
        let model = &expected.model.to_string()[..16];
        self.path.join(format!("{model}-{}-{:016x}.{SUFFIX}", tokens.len(), digest(&all)))
    }

    /// Notes that a snapshot was used now. One that cannot be noted is given up sooner.
    pub(crate) fn touch(&self, path: &Path) {
        let now = SystemTime::now();
        let times = FileTimes::new().set_accessed(now).set_modified(now);
        let _ = OpenOptions::new().write(true).open(path).and_then(|file| file.set_times(times));
    }

    /// Deletes the snapshots that were not used for the longest time until the others are within the limit, and what
    /// killed writers left. Other files stay.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn shrink(&self) -> Result<(), Error> {
        fs::read_dir(&self.path)
            .map_err(Error::file(&self.path, "cannot read the folder of saved sessions"))?;
        let suffix = format!(".{SUFFIX}");
        remove_stale(&self.path, |target| target.ends_with(suffix.as_bytes()));
        let told = |path: PathBuf| {
            let meta = fs::metadata(&path).ok()?;
            let mut magic = [0; FRAME.magic.len()];
            File::open(&path).and_then(|mut file| file.read_exact(&mut magic)).ok()?;
            (magic == FRAME.magic).then_some((meta.modified().ok()?, path, meta.len()))
        };
        let mut all: Vec<_> = self.snapshots().filter_map(told).collect();
        all.sort();
        let mut total = all.iter().fold(0u64, |total, (_, _, bytes)| total.saturating_add(*bytes));
        for (_, path, bytes) in all {
            if total <= self.limit {
                break;
            }
            // One that another process has deleted is gone, too; one that cannot be deleted leaves the others the less room.
            if fs::remove_file(path).map_or_else(|e| e.kind() == ErrorKind::NotFound, |()| true) {
                total -= bytes;
            }
        }
        Ok(())
    }

    /// Files, not links, that end as snapshots do.
    fn snapshots(&self) -> impl Iterator<Item = PathBuf> {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        let files = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_file()));
        files.map(|entry| entry.path()).filter(|path| path.extension() == Some(OsStr::new(SUFFIX)))
    }
}
