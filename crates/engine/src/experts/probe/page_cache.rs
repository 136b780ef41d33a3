//! Page cache probe: the share of a model's files that the system holds in memory.

use std::{ops::Range, path::PathBuf};

use moeflux_base::{Error, ToolError};
use moeflux_model::{blueprint::Blueprint, checkpoint::Checkpoint};

/// Files of a checkpoint in the system's page cache.
#[derive(Clone, Debug)]
pub struct FilePages {
    files: Vec<PagedFile>,
}

/// A file, and the ranges of it that do not count, in ascending order.
#[derive(Clone, Debug)]
struct PagedFile {
    path: PathBuf,
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "only Linux counts pages"))]
    uncounted: Vec<Range<u64>>,
}

impl FilePages {
    /// Files of `checkpoint`; none for a model embedded in the binary.
    pub fn for_checkpoint(checkpoint: &Checkpoint) -> Self {
        let paths = checkpoint.files().iter().map(|f| f.path().to_owned());
        let files = paths.map(|path| PagedFile { path, uncounted: Vec::new() });
        Self { files: files.filter(|file| file.path.is_file()).collect() }
    }

    /// Files of `checkpoint` without tables of rows, of which few rows are ever read.
    pub(crate) fn without_tables(checkpoint: &Checkpoint, blueprint: &Blueprint) -> Self {
        let shards = || blueprint.memories().flat_map(|(_, memory)| &memory.table.shards);
        let files = checkpoint.files().iter().enumerate().map(|(i, file)| {
            let ranges = shards().flat_map(|shard| shard.ranges());
            let own = ranges.filter(|range| range.file == i).map(|range| range.bytes);
            let mut uncounted: Vec<_> = own.collect();
            uncounted.sort_by_key(|range| range.start);
            PagedFile { path: file.path().to_owned(), uncounted }
        });
        Self { files: files.filter(|file| file.path.is_file()).collect() }
    }

    /// Whether there is no file.
    pub(crate) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Share of the files in the page cache, estimated from a sample. `None` if the system does not
    /// report it, or there is no file.
    pub fn cached(&self) -> Option<f64> {
        os::cached(&self.files)
    }

    /// Drops the files' pages from the page cache, so that the next reads reach the disk. Mapped
    /// pages stay.
    ///
    /// # Errors
    /// The system has no call for it, a file cannot be opened, or there is none.
    pub fn forget(&self) -> Result<(), Error> {
        if self.is_empty() {
            return Err(ToolError::NoFiles.into());
        }
        os::forget(self.files.iter().map(|file| &*file.path))
    }
}

#[cfg(target_os = "linux")]
mod os {
    use std::{fs::File, io::IoSliceMut, ops::Range, os::fd::AsFd, path::Path};

    use rustix::{
        fs::{Advice, fadvise},
        io::{Errno, ReadWriteFlags, preadv2},
    };

    use super::{super::random_offsets::RandomOffsets, PagedFile};
    use moeflux_base::Error;

    /// Number of sampled offsets.
    const SAMPLE: u64 = 256;

    /// Ranges of a file of `len` bytes without those of `uncounted`.
    pub(super) fn counted(len: u64, uncounted: &[Range<u64>]) -> impl Iterator<Item = Range<u64>> {
        let ends = uncounted.iter().map(move |range| range.start.min(len)).chain([len]);
        let starts = [0].into_iter().chain(uncounted.iter().map(|range| range.end));
        starts.zip(ends).map(|(start, end)| start..end).filter(|range| !range.is_empty())
    }

    pub(super) fn cached(files: &[PagedFile]) -> Option<f64> {
        let files: Vec<(File, &[Range<u64>])> = files
            .iter()
            .filter_map(|PagedFile { path, uncounted }| {
                let file = File::open(path).ok()?;
                // Prevents read-ahead around the sampled pages.
                fadvise(&file, 0, None, Advice::Random).ok()?;
                Some((file, &uncounted[..]))
            })
            .collect();
        let mut stretches = Vec::new();
        for (file, uncounted) in &files {
            let len = file.metadata().ok()?.len();
            stretches.extend(counted(len, uncounted).map(|range| (file, range)));
        }
        let total: u64 = stretches.iter().map(|(_, range)| range.end - range.start).sum();
        if total == 0 {
            return None;
        }
        let (mut random, mut found) = (RandomOffsets::new(), 0);
        for i in 0..SAMPLE {
            // Stratified sample: a random offset in each of `SAMPLE` equal stretches.
            let mut offset = ((i as f64 + random.below(1 << 20) as f64 / (1 << 20) as f64)
                / SAMPLE as f64
                * total as f64) as u64;
            let (file, range) = stretches.iter().find(|(_, range)| {
                let len = range.end - range.start;
                let here = offset < len;
                offset -= if here { 0 } else { len };
                here
            })?;
            let offset = range.start + offset;
            match preadv2(
                file.as_fd(),
                &mut [IoSliceMut::new(&mut [0])],
                offset,
                ReadWriteFlags::NOWAIT,
            ) {
                Ok(_) => found += 1,
                Err(Errno::AGAIN) => {}
                Err(_) => return None,
            }
        }
        Some(found as f64 / SAMPLE as f64)
    }

    pub(super) fn forget<'a>(paths: impl Iterator<Item = &'a Path>) -> Result<(), Error> {
        for path in paths {
            drop_pages(path)
                .map_err(Error::file(path, "cannot drop the file's pages from the page cache"))?;
        }
        Ok(())
    }

    fn drop_pages(path: &Path) -> std::io::Result<()> {
        let file = File::open(path)?;
        // Dirty pages would not be dropped.
        file.sync_data()?;
        Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
    }
}

#[cfg(not(target_os = "linux"))]
mod os {
    use std::path::Path;

    use super::PagedFile;
    use moeflux_base::{Error, ToolError};

    pub(super) fn cached(_: &[PagedFile]) -> Option<f64> {
        None
    }

    pub(super) fn forget<'a>(_: impl Iterator<Item = &'a Path>) -> Result<(), Error> {
        Err(ToolError::PagesCannotBeDropped.into())
    }
}

#[cfg(target_os = "linux")]
#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn pages(path: &Path, uncounted: impl IntoIterator<Item = Range<u64>>) -> FilePages {
        let uncounted = uncounted.into_iter().collect();
        FilePages { files: vec![PagedFile { path: path.into(), uncounted }] }
    }

    #[test]
    fn pages_are_counted_and_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let pages = pages(&path, None);
        // Skips file systems that do not report cached pages.
        let Some(cached) = pages.cached() else { return };
        assert_eq!(cached, 1.0);
        pages.forget().unwrap();
        assert!(pages.cached().unwrap() <= cached);
        let none = FilePages { files: vec![] };
        assert!(none.forget().is_err());
        assert_eq!(none.cached(), None);
    }

    #[test]
    fn ranges_of_tables_do_not_count() {
        let counted = |len: u64, ranges: &[Range<u64>]| -> Vec<_> {
            os::counted(len, ranges).map(|range| (range.start, range.end)).collect()
        };
        let tables = [10..20, 20..25, 24..30, 40..60];
        assert_eq!(counted(70, &tables), [(0, 10), (30, 40), (60, 70)]);
        assert_eq!(counted(60, &tables), [(0, 10), (30, 40)]);
        assert_eq!(counted(35, &tables), [(0, 10), (30, 35)], "a file that was cut off");
        assert_eq!(counted(8, &[]), [(0, 8)]);
        let folder = tempfile::tempdir().unwrap();
        let (path, len) = (folder.path().join("a"), 1 << 20);
        std::fs::write(&path, vec![1; len as usize]).unwrap();
        assert_eq!(pages(&path, Some(0..len)).cached(), None);
        let half = pages(&path, Some(0..len / 2)).cached();
        assert!(half.is_none_or(|cached| cached == 1.0), "{half:?}");
    }
}
