//! Files of a model that are overwritten in place while it is in use, or arrive with wrong bytes.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use moeflux_base::Error;
use moeflux_model::seam::DataFile;

/// Time between two looks at the files.
const PERIOD: Duration = Duration::from_secs(1);

/// The open files of a model. Experts that are read from a file with other contents would make
/// another model of it, without an error. A file that another one replaces stays as it was.
pub(super) struct FileWatch {
    files: Arc<Vec<DataFile>>,
    period: Duration,
    last: Instant,
    /// Index of a file with other contents, and its problem.
    changed: Option<(usize, String)>,
}

impl FileWatch {
    pub(super) fn new(files: Arc<Vec<DataFile>>) -> Self {
        Self { files, period: PERIOD, last: Instant::now(), changed: None }
    }

    /// Looks at the files, if the last look was a while ago.
    ///
    /// # Errors
    /// As [`FileWatch::check_now`].
    pub(super) fn check(&mut self) -> Result<(), Error> {
        match self.changed.is_none() && self.last.elapsed() < self.period {
            true => Ok(()),
            false => self.check_now().map(|_| ()),
        }
    }

    /// Looks at the files. Whether all of them have arrived, with their digests.
    ///
    /// # Errors
    /// A file has another length or time of modification than when it was opened, or arrived with
    /// another digest. Later calls return the error again.
    pub(super) fn check_now(&mut self) -> Result<bool, Error> {
        self.last = Instant::now();
        let mut are_complete = true;
        for (index, file) in self.files.iter().enumerate() {
            if self.changed.is_some() {
                break;
            }
            match file.check() {
                Ok(is_complete) => are_complete &= is_complete,
                Err(problem) => self.changed = Some((index, problem)),
            }
        }
        match &self.changed {
            None => Ok(are_complete),
            Some((index, problem)) => {
                let path = self.files[*index].path().into();
                Err(Error::Checkpoint { path, problem: problem.clone() })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_that_is_overwritten_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("model.safetensors");
        fs::write(&path, "weights").unwrap();
        let files = Arc::new(vec![DataFile::made(&path, vec![1]), DataFile::open(&path).unwrap()]);
        let mut watch = FileWatch { period: Duration::ZERO, ..FileWatch::new(files) };
        watch.check().unwrap();
        // Another file of the same name leaves the open one as it was.
        fs::rename(&path, folder.path().join("moved")).unwrap();
        fs::write(&path, "others").unwrap();
        watch.check().unwrap();
        let moved = fs::File::options().write(true).open(folder.path().join("moved")).unwrap();
        let later = moved.metadata().unwrap().modified().unwrap() + Duration::from_secs(1);
        moved.set_modified(later).unwrap();
        let error = watch.check().unwrap_err().to_string();
        assert!(error.contains("model.safetensors") && error.contains("again"), "{error}");
        // It stays one.
        watch.period = Duration::MAX;
        assert!(watch.check().is_err());
    }
}
