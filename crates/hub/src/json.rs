//! JSON of the server, read as it arrives into what is needed of it.

use std::io::{self, BufReader, Read};

use serde::de::{DeserializeOwned, Error};

/// Bytes of an answer or of an index, at most.
pub(crate) const MAX_BYTES: u64 = 64 << 20;

/// Files of a list or of an index, at most: the Hub advises fewer.
pub(crate) const MAX_FILES: usize = 100_000;

/// Bytes of a file's name, at most.
const MAX_NAME: usize = 4096;

/// Reads a value. The error of a text beyond [`MAX_BYTES`] is of kind
/// [`io::ErrorKind::FileTooLarge`].
///
/// # Errors
/// The source fails or is too long, or its text is not such a value.
pub(crate) fn read<T: DeserializeOwned>(source: impl Read) -> serde_json::Result<T> {
    serde_json::from_reader(BufReader::new(Bounded { source, count: 0 }))
}

/// Checks the number of files and the length of a name.
///
/// # Errors
/// One is beyond its limit.
pub(crate) fn check_file<E: Error>(count: usize, name: &str) -> Result<(), E> {
    if count > MAX_FILES {
        return Err(E::custom(format_args!("expected at most {MAX_FILES} files, got more")));
    }
    if name.len() > MAX_NAME {
        let len = name.len();
        return Err(E::custom(format_args!(
            "expected names of at most {MAX_NAME} bytes, got one of {len} bytes"
        )));
    }
    Ok(())
}

/// A source that fails after [`MAX_BYTES`].
struct Bounded<R> {
    source: R,
    count: u64,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let count = self.source.read(buf)?;
        self.count += count as u64;
        match self.count <= MAX_BYTES {
            true => Ok(count),
            false => Err(io::ErrorKind::FileTooLarge.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_fails_after_its_last_byte() {
        let mut source = Bounded { source: io::repeat(b' '), count: MAX_BYTES - 1 };
        assert_eq!(source.read(&mut [0]).unwrap(), 1);
        assert_eq!(source.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
