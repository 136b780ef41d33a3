//! Data files with positional reads: on disk, embedded in the binary, in memory, or still arriving.

use std::{
    borrow::Cow,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

use moeflux_base::Error;

use super::{
    arriving::{ArrivingBytes, ArrivingFile},
    foreign,
};

/// U+FEFF in UTF-8.
const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];

/// An opened file. Reads are positional, so threads share one handle.
#[derive(Debug)]
pub struct DataFile {
    path: PathBuf,
    len: u64,
    /// Time of modification when the file was opened, of a file on disk.
    modified: Option<SystemTime>,
    storage: DataStorage,
    /// Whether a file of this name in a mirror is a copy of it.
    has_mirrors: bool,
}

/// Length and time of modification of a file when it was opened. Other contents have another stamp,
/// unless the time is set back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileStamp {
    pub(crate) len: u64,
    pub(crate) modified: Option<SystemTime>,
}

#[derive(Debug)]
enum DataStorage {
    Disk(File),
    Memory(Cow<'static, [u8]>),
    Arriving(Arc<dyn ArrivingBytes>),
}

#[doc(hidden)]
impl DataFile {
    /// Opens a regular file for reading.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let doing = "cannot open the file";
        let open = || {
            // Opening a pipe would wait for its writer.
            match fs::metadata(path)?.is_file() {
                true => Self::from_open(path, File::open(path)?),
                false => Ok(None),
            }
        };
        let file = open().map_err(|e| match e.kind() {
            // Its folder lists it: in the Hub's cache, files are links.
            io::ErrorKind::NotFound if path.is_symlink() => {
                let doing = "the file that this link names is missing: download it again";
                Error::file(path, doing)(e)
            }
            _ => Error::file(path, doing)(e),
        })?;
        file.ok_or_else(|| Error::Checkpoint {
            path: path.into(),
            problem: "this is not a file, but a folder, a pipe or a device".into(),
        })
    }

    /// Wraps an open file; `None` if it is not a regular file.
    pub fn from_open(path: &Path, file: File) -> io::Result<Option<Self>> {
        let meta = file.metadata()?;
        Ok(meta.is_file().then(|| Self {
            path: path.into(),
            len: meta.len(),
            modified: meta.modified().ok(),
            storage: DataStorage::Disk(file),
            has_mirrors: true,
        }))
    }

    /// A file that is not complete: reads wait for their bytes.
    pub(crate) fn arriving(file: &ArrivingFile) -> Self {
        let storage = DataStorage::Arriving(Arc::clone(&file.bytes));
        let (path, len) = (file.path.clone(), file.len);
        Self { path, len, modified: None, storage, has_mirrors: true }
    }

    /// A file that is not complete; `None` for others.
    pub(crate) fn as_arriving(&self) -> Option<ArrivingFile> {
        let DataStorage::Arriving(bytes) = &self.storage else { return None };
        Some(ArrivingFile { path: self.path.clone(), len: self.len, bytes: Arc::clone(bytes) })
    }

    /// A file embedded in the binary.
    pub fn embedded(name: &str, bytes: &'static [u8]) -> Self {
        Self {
            path: format!("(in the binary)/{name}").into(),
            len: bytes.len() as u64,
            modified: None,
            storage: DataStorage::Memory(bytes.into()),
            has_mirrors: true,
        }
    }

    /// Contents that were made from the file at `path`.
    pub fn made(path: &Path, bytes: Vec<u8>) -> Self {
        let (path, len) = (path.into(), bytes.len() as u64);
        let storage = DataStorage::Memory(bytes.into());
        Self { path, len, modified: None, storage, has_mirrors: true }
    }

    /// A file that does not exist yet: it has a length, and reading it fails.
    pub fn planned(name: &str, len: u64) -> Self {
        let storage = DataStorage::Memory(Cow::Borrowed(&[]));
        Self { path: name.into(), len, modified: None, storage, has_mirrors: true }
    }

    /// The same file, of which mirrors have no copies.
    pub(crate) fn without_mirrors(self) -> Self {
        Self { has_mirrors: false, ..self }
    }

    /// Whether a file of this name in a mirror is a copy of it.
    pub fn has_mirrors(&self) -> bool {
        self.has_mirrors
    }

    /// Whether it has a length and no contents.
    pub(crate) fn is_planned(&self) -> bool {
        matches!(&self.storage, DataStorage::Memory(bytes) if (bytes.len() as u64) < self.len)
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Length in bytes when the file was opened.
    #[allow(clippy::len_without_is_empty, reason = "an empty file is like any other")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Length and time of modification when the file was opened.
    pub(crate) fn stamp(&self) -> FileStamp {
        FileStamp { len: self.len, modified: self.modified }
    }

    /// Whether the file has all its bytes, and they are the ones that were opened.
    ///
    /// # Errors
    /// A file on disk has another length or time of modification than when it was opened; one that
    /// arrives has wrong bytes.
    pub fn check(&self) -> Result<bool, String> {
        match &self.storage {
            DataStorage::Arriving(bytes) => bytes
                .check()
                .map_err(|error| format!("the model was read from wrong bytes: {error}")),
            DataStorage::Disk(file) if self.is_changed(file) => {
                Err("the file was written to while the model is in use: its length or time of \
                     modification is another one; open the model again"
                    .into())
            }
            DataStorage::Disk(_) | DataStorage::Memory(_) => Ok(true),
        }
    }

    fn is_changed(&self, file: &File) -> bool {
        file.metadata().is_ok_and(|meta| {
            self.stamp() != FileStamp { len: meta.len(), modified: meta.modified().ok() }
        })
    }

    /// The operating system's handle; `None` for a file in memory or one that is arriving.
    pub fn file(&self) -> Option<&File> {
        match &self.storage {
            DataStorage::Disk(file) => Some(file),
            DataStorage::Memory(_) | DataStorage::Arriving(_) => None,
        }
    }

    /// Reads up to `buf.len()` bytes at `offset`; 0 at the end of the file.
    pub fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        match &self.storage {
            DataStorage::Disk(file) => read_at(file, buf, offset),
            DataStorage::Memory(bytes) => {
                let start =
                    usize::try_from(offset).map_or(bytes.len(), |start| start.min(bytes.len()));
                let len = buf.len().min(bytes.len() - start);
                buf[..len].copy_from_slice(&bytes[start..start + len]);
                Ok(len)
            }
            DataStorage::Arriving(bytes) => bytes.read_at(buf, offset),
        }
    }

    /// Fills `buf` from `offset`. Short reads are continued; the end of the file is an error.
    pub fn read_exact_at(&self, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !buf.is_empty() {
            match self.read_at(buf, offset) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => {
                    buf = &mut buf[n..];
                    offset += n as u64;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Offset of the first byte after a byte order mark, which some editors add.
    pub(crate) fn text_start(&self) -> u64 {
        let mut start = [0; BYTE_ORDER_MARK.len()];
        match self.read_exact_at(&mut start, 0) {
            Ok(()) if start == BYTE_ORDER_MARK => BYTE_ORDER_MARK.len() as u64,
            // Later reads report an error.
            _ => 0,
        }
    }

    /// Reader from `offset` on.
    pub(crate) fn reader_at(&self, offset: u64) -> DataReader<'_> {
        DataReader { file: self, offset }
    }

    /// Reads the whole file, of at most `limit` bytes.
    pub fn read_all(&self, limit: u64) -> Result<Vec<u8>, Error> {
        if self.len > limit {
            let problem = format!("{} bytes; files of this kind have at most {limit}", self.len);
            return Err(Error::Checkpoint { path: self.path.clone(), problem });
        }
        let mut bytes = vec![0; self.len as usize];
        self.read_exact_at(&mut bytes, 0)
            .map_err(Error::file(&self.path, "cannot read the file"))?;
        match foreign::stand_in(&bytes) {
            Some(problem) => Err(Error::Checkpoint { path: self.path.clone(), problem }),
            None => Ok(bytes),
        }
    }

    /// Checks the start of a file that is read as a stream.
    ///
    /// # Errors
    /// It is the stand-in of a file, such as a pointer of Git LFS; or it cannot be read.
    pub(crate) fn check_start(&self) -> Result<(), Error> {
        let mut start = vec![0; self.len.min(64) as usize];
        self.read_exact_at(&mut start, 0)
            .map_err(Error::file(&self.path, "cannot read the file"))?;
        match foreign::stand_in(&start) {
            Some(problem) => Err(Error::Checkpoint { path: self.path.clone(), problem }),
            None => Ok(()),
        }
    }

    /// As [`Self::read_all`], without a byte order mark at the start, which some editors add.
    pub(crate) fn read_text(&self, limit: u64) -> Result<Vec<u8>, Error> {
        let mut bytes = self.read_all(limit)?;
        if bytes.starts_with(&BYTE_ORDER_MARK) {
            bytes.drain(..BYTE_ORDER_MARK.len());
        }
        Ok(bytes)
    }
}

/// Sequential reader of a file.
pub(crate) struct DataReader<'a> {
    file: &'a DataFile,
    offset: u64,
}

impl io::Read for DataReader<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(buf, self.offset)?;
        self.offset += read as u64;
        Ok(read)
    }
}

/// Reads up to `buf.len()` bytes at `offset`; 0 at the end of the file.
pub fn read_at(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_at(file, buf, offset);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_read(file, buf, offset);
}
