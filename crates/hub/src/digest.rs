//! Digests by which the Hub names contents.

use std::{fmt::Write, fs::File, io, io::Read, path::Path};

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// Bytes read at once.
const BUFFER: usize = 1 << 20;

/// Digest of a file's contents, in hexadecimal digits as the server gives it.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Digest {
    /// SHA-256 of the bytes: large files.
    Sha256(String),
    /// Hash of a git blob, a SHA-1: small files.
    GitBlob(String),
}

impl Digest {
    /// Digest of an entity tag, if it is one.
    pub(crate) fn from_tag(tag: &str) -> Option<Self> {
        let is_hex = tag.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        match tag.len() {
            64 if is_hex => Some(Self::Sha256(tag.to_owned())),
            40 if is_hex => Some(Self::GitBlob(tag.to_owned())),
            _ => None,
        }
    }

    /// Name of the algorithm.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::GitBlob(_) => "git hash",
        }
    }

    /// Hexadecimal digits.
    pub(crate) fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::GitBlob(hex) => hex,
        }
    }

    /// Digest of the same kind of a file's `size` bytes. `on_read` gets the bytes of each read and
    /// says whether to go on.
    pub(crate) fn compute(
        &self,
        path: &Path,
        size: u64,
        mut on_read: impl FnMut(u64) -> bool,
    ) -> io::Result<Option<String>> {
        let mut file = File::open(path)?;
        let mut buffer = vec![0; BUFFER];
        let mut read_all = |update: &mut dyn FnMut(&[u8])| -> io::Result<bool> {
            loop {
                let count = file.read(&mut buffer)?;
                if count == 0 {
                    return Ok(true);
                }
                update(&buffer[..count]);
                if !on_read(count as u64) {
                    return Ok(false);
                }
            }
        };
        let bytes: Vec<u8> = match self {
            Self::Sha256(_) => {
                let mut hash = Sha256::new();
                if !read_all(&mut |bytes| hash.update(bytes))? {
                    return Ok(None);
                }
                hash.finalize().to_vec()
            }
            Self::GitBlob(_) => {
                let mut hash = Sha1::new();
                hash.update(format!("blob {size}\0"));
                if !read_all(&mut |bytes| hash.update(bytes))? {
                    return Ok(None);
                }
                hash.finalize().to_vec()
            }
        };
        Ok(Some(hex(&bytes)))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_those_of_git_and_sha256sum() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, "hello\n").unwrap();
        // `git hash-object` and `sha256sum` of the same bytes.
        let git = "ce013625030ba8dba906f756967f9e9ca394464a";
        let sha = "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03";
        for tag in [git, sha] {
            let digest = Digest::from_tag(tag).unwrap();
            assert_eq!(digest.compute(&path, 6, |_| true).unwrap().as_deref(), Some(tag));
        }
        assert_eq!(Digest::from_tag("5891B5"), None);
        assert_eq!(Digest::from_tag(&git.to_uppercase()), None);
    }
}
