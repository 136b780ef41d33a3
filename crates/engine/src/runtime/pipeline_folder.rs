//! Folder of compiled GPU kernels.

use std::{
    fs::{self, File},
    io::{self, Read, Write},
    path::PathBuf,
};

use moeflux_base::{AtomicFile, Readers, create_private_folder};
use moeflux_compute::PipelineStore;

/// Compiled GPU kernels in files of a folder, one per kind of card, for
/// [`DeviceOptions::pipelines`](crate::runtime::DeviceOptions).
///
/// The folder and its files can be deleted at any time. Of processes that save at the same time the
/// last one wins; the others' kernels are compiled again. Without access to the folder nothing is
/// kept, and nothing is reported.
#[derive(Clone, Debug)]
pub struct PipelineFolder(PathBuf);

impl PipelineFolder {
    /// A folder, which is created when kernels are saved.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self(folder.into())
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.join(name).with_extension("pipelines")
    }

    fn write(&self, name: &str, contents: &[u8]) -> io::Result<()> {
        create_private_folder(&self.0)?;
        let path = self.file(name);
        if fs::metadata(&path).is_ok_and(|file| !is_private(&file)) {
            // A replaced file would keep its permissions.
            fs::remove_file(&path)?;
        }
        let file = AtomicFile::create(&path, Readers::Owner)?;
        file.file().write_all(contents)?;
        file.finish()
    }
}

/// Whether only the user can have written a file: drivers execute its contents.
#[cfg(unix)]
fn is_private(file: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;

    file.uid() == rustix::process::geteuid().as_raw() && file.mode() & 0o022 == 0
}

/// Whether only the user can have written a file. On Windows the folders of users are private.
#[cfg(not(unix))]
fn is_private(_: &fs::Metadata) -> bool {
    true
}

impl PipelineStore for PipelineFolder {
    fn load(&self, name: &str, limit: usize) -> Option<Vec<u8>> {
        let path = self.file(name);
        // Opening a pipe would block.
        let meta = fs::metadata(&path).ok().filter(|meta| meta.is_file() && is_private(meta))?;
        let len = usize::try_from(meta.len()).ok().filter(|len| *len <= limit)?;
        let mut contents = Vec::with_capacity(len);
        File::open(path).ok()?.take(len as u64).read_to_end(&mut contents).ok()?;
        Some(contents)
    }

    fn save(&self, name: &str, contents: &[u8]) {
        // The next process compiles the kernels again.
        let _ = self.write(name, contents);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const NAME: &str = "vulkan_1_2";

    #[test]
    fn contents_are_found_by_the_next_process() {
        let root = tempfile::tempdir().unwrap();
        let folder = PipelineFolder::new(root.path().join("a/b"));
        assert_eq!(folder.load(NAME, 100), None);
        folder.save(NAME, b"first");
        folder.save(NAME, b"second");
        folder.save("vulkan_1_3", b"other");
        let next = PipelineFolder::new(root.path().join("a/b"));
        assert_eq!(next.load(NAME, 6).as_deref(), Some(&b"second"[..]));
        assert_eq!(next.load(NAME, 5), None, "more than the limit");
        assert_eq!(fs::read_dir(root.path().join("a/b")).unwrap().count(), 2);
    }

    #[test]
    fn a_folder_that_cannot_be_written_keeps_nothing() {
        let root = tempfile::tempdir().unwrap();
        let file = root.path().join("file");
        fs::write(&file, "").unwrap();
        let folder = PipelineFolder::new(&file);
        folder.save(NAME, b"kernels");
        assert_eq!(folder.load(NAME, 100), None);
    }

    #[test]
    fn of_two_writers_one_wins_and_readers_see_whole_contents() {
        let root = tempfile::tempdir().unwrap();
        let folder = PipelineFolder::new(root.path());
        let contents = |byte: u8| vec![byte; 100_000];
        folder.save(NAME, &contents(0));
        thread::scope(|scope| {
            let writers = [1, 2].map(|byte| {
                let folder = &folder;
                scope.spawn(move || (0..10).for_each(|_| folder.save(NAME, &contents(byte))))
            });
            while !writers.iter().all(thread::ScopedJoinHandle::is_finished) {
                let found = folder.load(NAME, 200_000).unwrap();
                assert_eq!(found, contents(found[0]));
            }
        });
        let last = folder.load(NAME, 200_000).unwrap()[0];
        assert!([1, 2].contains(&last));
        assert_eq!(fs::read_dir(root.path()).unwrap().count(), 1, "temporary files are gone");
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_others_can_write_is_ignored_and_replaced() {
        use std::os::unix::fs::PermissionsExt;

        let root = tempfile::tempdir().unwrap();
        let folder = PipelineFolder::new(root.path());
        folder.save(NAME, b"kernels");
        let path = folder.file(NAME);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
        assert_eq!(folder.load(NAME, 100), None);
        folder.save(NAME, b"kernels");
        assert_eq!(folder.load(NAME, 100).as_deref(), Some(&b"kernels"[..]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
