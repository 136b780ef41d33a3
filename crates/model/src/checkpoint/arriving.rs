//! Files whose bytes are still on their way to the disk, such as those of a download.

use std::{fmt, io, ops::Range, path::PathBuf, sync::Arc};

use super::{data_file::DataFile, folder::Checkpoint};

/// Bytes of a file that arrive while it is read.
pub trait ArrivingBytes: fmt::Debug + Send + Sync {
    /// Waits until the bytes at `offset` have arrived, and reads up to `buf.len()` of them; 0 at
    /// the end of the file. Bytes that are waited for are fetched before all others.
    ///
    /// # Errors
    /// The bytes cannot be fetched or read.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Whether the whole file is there and has the digest of its publisher, if that is known.
    ///
    /// # Errors
    /// It has another digest: bytes that were read are wrong.
    fn check(&self) -> io::Result<bool>;

    /// Asks for ranges that will be read soon, in this order. They are fetched before the rest of
    /// the file, and after bytes on which a read waits.
    fn expect(&self, ranges: &[Range<u64>]) {
        let _ = ranges;
    }
}

/// A file of tensors whose bytes arrive while it is read.
#[derive(Clone, Debug)]
pub struct ArrivingFile {
    /// Path of the file once it is complete.
    pub path: PathBuf,
    /// Length of the complete file in bytes.
    pub len: u64,
    /// Its bytes.
    pub bytes: Arc<dyn ArrivingBytes>,
}

impl Checkpoint {
    /// Files that are not complete.
    pub fn arriving(&self) -> Vec<ArrivingFile> {
        self.files.iter().filter_map(DataFile::as_arriving).collect()
    }
}
