//! Something that bytes can be read from at any place: a file, or a part of the binary.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use crate::base::error::Error;

/// A file of a checkpoint. Reads are positional, so that many threads share one handle.
#[derive(Debug)]
pub(crate) struct Source {
    path: PathBuf,
    len: u64,
    data: Data,
}

#[derive(Debug)]
enum Data {
    File(File),
    Binary(&'static [u8]),
}

impl Source {
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let doing = "cannot open the file; is the download complete?";
        let file = File::open(path).map_err(Error::file(path, doing))?;
        let source = Self::of(path, file).map_err(Error::file(path, doing))?;
        source.ok_or_else(|| Error::Checkpoint {
            path: path.into(),
            problem: "this is not a file".into(),
        })
    }

    /// A file that is open; `None` if it is a folder or the like.
    pub(crate) fn of(path: &Path, file: File) -> io::Result<Option<Self>> {
        let meta = file.metadata()?;
        Ok(meta.is_file().then(|| Self {
            path: path.into(),
            len: meta.len(),
            data: Data::File(file),
        }))
    }

    pub(crate) fn binary(name: &str, bytes: &'static [u8]) -> Self {
        Self {
            path: format!("(in the binary)/{name}").into(),
            len: bytes.len() as u64,
            data: Data::Binary(bytes),
        }
    }

    /// A file that is only planned: it has a length, and reading it fails.
    pub(crate) fn planned(name: &str, len: u64) -> Self {
        Self { path: name.into(), len, data: Data::Binary(&[]) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes, as of when it was opened.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// The file, unless it lies in the binary.
    pub(crate) fn file(&self) -> Option<&File> {
        match &self.data {
            Data::File(file) => Some(file),
            Data::Binary(_) => None,
        }
    }

    /// Reads some bytes from `offset`; none is the end.
    pub(crate) fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        match &self.data {
            Data::File(file) => read_at(file, buf, offset),
            Data::Binary(bytes) => {
                let from =
                    usize::try_from(offset).map_or(bytes.len(), |from| from.min(bytes.len()));
                let some = buf.len().min(bytes.len() - from);
                buf[..some].copy_from_slice(&bytes[from..from + some]);
                Ok(some)
            }
        }
    }

    /// Fills `buf` from `offset`; short reads are continued, the end of the file is an error.
    pub(crate) fn read_exact_at(&self, mut buf: &mut [u8], mut offset: u64) -> io::Result<()> {
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

    /// The whole contents, at most `limit` bytes.
    pub(crate) fn read_all(&self, limit: u64) -> Result<Vec<u8>, Error> {
        if self.len > limit {
            let problem = format!("{} bytes; files of this kind have at most {limit}", self.len);
            return Err(Error::Checkpoint { path: self.path.clone(), problem });
        }
        let mut bytes = vec![0; self.len as usize];
        self.read_exact_at(&mut bytes, 0)
            .map_err(Error::file(&self.path, "cannot read the file"))?;
        Ok(bytes)
    }
}

/// Reads some bytes from `offset`; none is the end.
pub(crate) fn read_at(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_at(file, buf, offset);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_read(file, buf, offset);
}
