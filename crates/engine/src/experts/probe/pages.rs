//! What the system keeps of a model's files in memory.

use std::path::PathBuf;

use crate::{base::error::Error, checkpoint::Checkpoint};

/// The files of a checkpoint, as the page cache sees them.
#[derive(Clone, Debug)]
pub struct FilePages {
    paths: Vec<PathBuf>,
}

impl FilePages {
    /// Those of `checkpoint`; the model in the binary has none.
    pub fn of(checkpoint: &Checkpoint) -> Self {
        let paths = checkpoint.files().iter().map(|f| f.path().to_owned()).filter(|p| p.is_file());
        Self { paths: paths.collect() }
    }

    /// Whether there is no file.
    pub(crate) fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// The share of the files that the page cache holds, from a sample. `None` where the system does not tell, or there is
    /// no file.
    pub fn cached(&self) -> Option<f64> {
        os::cached(&self.paths)
    }

    /// Makes the system forget the files' pages, so that the next reads are the disk's. Pages that somebody maps stay.
    ///
    /// # Errors
    /// The system has no way to do so, a file cannot be opened, or there is none.
    pub fn forget(&self) -> Result<(), Error> {
        if self.is_empty() {
            let why = "the model is read from the program itself, so there are no files whose pages could be dropped";
            return Err(Error::Input(why.into()));
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

    use super::super::Random;
    use crate::base::error::Error;

    /// How many places are looked at.
    const SAMPLE: u64 = 256;

    pub(super) fn cached(paths: &[PathBuf]) -> Option<f64> {
        let files: Vec<(File, u64)> = paths
            .iter()
            .filter_map(|p| {
                let file = File::open(p).ok()?;
                // What is looked at shall not bring its neighbours in.
                fadvise(&file, 0, None, Advice::Random).ok()?;
                let len = file.metadata().ok()?.len();
                Some((file, len))
            })
            .collect();
        let total: u64 = files.iter().map(|f| f.1).sum();
        if total == 0 {
            return None;
        }
        let (mut random, mut found) = (Random::new(), 0);
        for i in 0..SAMPLE {
            // Spread evenly, each somewhere in its stretch.
            let mut at = ((i as f64 + random.below(1 << 20) as f64 / (1 << 20) as f64)
                / SAMPLE as f64
                * total as f64) as u64;
            let (file, _) = files.iter().find(|(_, len)| {
                let here = at < *len;
                at -= if here { 0 } else { *len };
                here
            })?;
            match preadv2(
                file.as_fd(),
                &mut [IoSliceMut::new(&mut [0])],
                at,
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
        // Pages that are not yet written would stay.
        file.sync_data()?;
        Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
    }
}

#[cfg(not(target_os = "linux"))]
mod os {
    use std::path::PathBuf;

    use crate::base::error::Error;

    pub(super) fn cached(_: &[PathBuf]) -> Option<f64> {
        None
    }

    pub(super) fn forget(_: &[PathBuf]) -> Result<(), Error> {
        Err(Error::Input(
            "this system has no way to drop a file's pages from its cache: --cold needs Linux"
                .into(),
        ))
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn pages_are_counted_and_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, vec![1; 1 << 20]).unwrap();
        let pages = FilePages { paths: vec![path] };
        // Where a file system does not tell, there is nothing to test.
        let Some(cached) = pages.cached() else { return };
        assert_eq!(cached, 1.0);
        pages.forget().unwrap();
        assert!(pages.cached().unwrap() <= cached);
        assert!(FilePages { paths: vec![] }.forget().is_err());
        assert_eq!(FilePages { paths: vec![] }.cached(), None);
    }
}
