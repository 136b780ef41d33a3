//! Page cache probe: the share of a model's files that the system holds in memory.

use std::path::PathBuf;

use crate::{
    base::error::{Error, ToolError},
    checkpoint::Checkpoint,
};

/// Files of a checkpoint in the system's page cache.
#[derive(Clone, Debug)]
pub struct FilePages {
    paths: Vec<PathBuf>,
}

impl FilePages {
    /// Files of `checkpoint`; none for a model embedded in the binary.
    pub fn for_checkpoint(checkpoint: &Checkpoint) -> Self {
        let paths = checkpoint.files().iter().map(|f| f.path().to_owned()).filter(|p| p.is_file());
        Self { paths: paths.collect() }
    }

    /// Whether there is no file.
    pub(crate) fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// Share of the files in the page cache, estimated from a sample. `None` if the system does not
    /// report it, or there is no file.
    pub fn cached(&self) -> Option<f64> {
        os::cached(&self.paths)
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
        os::forget(&self.paths)
    }
}

#[cfg(target_os = "linux")]
mod os {
    use std::{
        fs::File,
        io::IoSliceMut,
        os::fd::AsFd,
        path::{Path, PathBuf},
    };

    use rustix::{
        fs::{Advice, fadvise},
        io::{Errno, ReadWriteFlags, preadv2},
    };

    use super::super::RandomOffsets;
    use crate::base::error::Error;

    /// Number of sampled offsets.
    const SAMPLE: u64 = 256;

    pub(super) fn cached(paths: &[PathBuf]) -> Option<f64> {
        let files: Vec<(File, u64)> = paths
            .iter()
            .filter_map(|p| {
                let file = File::open(p).ok()?;
                // Prevents read-ahead around the sampled pages.
                fadvise(&file, 0, None, Advice::Random).ok()?;
                let len = file.metadata().ok()?.len();
                Some((file, len))
            })
            .collect();
        let total: u64 = files.iter().map(|f| f.1).sum();
        if total == 0 {
            return None;
        }
        let (mut random, mut found) = (RandomOffsets::new(), 0);
        for i in 0..SAMPLE {
            // Stratified sample: a random offset in each of `SAMPLE` equal stretches.
            let mut offset = ((i as f64 + random.below(1 << 20) as f64 / (1 << 20) as f64)
                / SAMPLE as f64
                * total as f64) as u64;
            let (file, _) = files.iter().find(|(_, len)| {
                let here = offset < *len;
                offset -= if here { 0 } else { *len };
                here
            })?;
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

    pub(super) fn forget(paths: &[PathBuf]) -> Result<(), Error> {
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
    use std::path::PathBuf;

    use crate::base::error::{Error, ToolError};

    pub(super) fn cached(_: &[PathBuf]) -> Option<f64> {
        None
    }

    pub(super) fn forget(_: &[PathBuf]) -> Result<(), Error> {
        Err(ToolError::PagesCannotBeDropped.into())
    }
}

#[cfg(target_os = "linux")]
#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_counted_and_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let pages = FilePages { paths: vec![path] };
        // Skips file systems that do not report cached pages.
        let Some(cached) = pages.cached() else { return };
        assert_eq!(cached, 1.0);
        pages.forget().unwrap();
        assert!(pages.cached().unwrap() <= cached);
        assert!(FilePages { paths: vec![] }.forget().is_err());
        assert_eq!(FilePages { paths: vec![] }.cached(), None);
    }
}
