//! Common start of moeflux's own files: magic, version and a JSON header, protected by a digest.

use std::io;

use serde::{Serialize, de::DeserializeOwned};
use twox_hash::XxHash3_64;

use super::data_file::DataFile;

/// Alignment of the data after the header, in bytes.
pub const ALIGN: u64 = 4096;

/// XXH3 digest of 64 bits, seed 0.
pub fn digest(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// A file type with this frame.
#[doc(hidden)]
pub struct Frame {
    pub magic: [u8; 8],
    /// Version that is written.
    pub version: u32,
    /// Oldest version that is read.
    pub oldest: u32,
    /// Maximum size of the JSON header in bytes.
    pub max_header: u64,
}

/// Reason why a file's frame is rejected.
#[derive(Debug)]
pub enum FrameError {
    /// Failure of a read.
    Unreadable(io::Error),
    /// Wrong magic: another type of file.
    Foreign,
    /// Unknown version, with its number.
    Version(u32),
    /// Implausible header size in bytes, or wrong alignment.
    Claims {
        /// Claimed bytes of the header.
        json: u64,
        /// Claimed alignment.
        align: u64,
    },
    /// The file ends within its header.
    Short,
    /// Digest mismatch.
    Damaged,
    /// Invalid JSON header.
    Header(serde_json::Error),
}

impl Frame {
    /// Bytes before the header.
    pub const PREFIX: u64 = 32;
    /// Bytes of the prefix that the digest covers.
    const SIGNED: usize = 24;

    /// Encodes prefix and header, zero-padded to a multiple of [`ALIGN`].
    ///
    /// # Errors
    /// The header cannot be serialized as JSON.
    pub fn encode(&self, header: &impl Serialize) -> serde_json::Result<Vec<u8>> {
        let json = serde_json::to_vec(header)?;
        let mut all = Vec::with_capacity(Self::PREFIX as usize + json.len() + ALIGN as usize);
        all.extend(self.magic);
        all.extend(self.version.to_le_bytes());
        all.extend((ALIGN as u32).to_le_bytes());
        all.extend((json.len() as u64).to_le_bytes());
        let signed = digest(&[&all, &json[..]].concat());
        all.extend(signed.to_le_bytes());
        all.extend(json);
        all.resize(all.len().next_multiple_of(ALIGN as usize), 0);
        Ok(all)
    }

    /// Reads and verifies the header. Returns it with the offset of its end.
    ///
    /// # Errors
    /// See [`FrameError`].
    pub fn read<H: DeserializeOwned>(&self, file: &DataFile) -> Result<(H, u64), FrameError> {
        let read = |buf: &mut [u8], offset| {
            file.read_exact_at(buf, offset).map_err(FrameError::Unreadable)
        };
        let len = file.len();
        let mut prefix = [0; Self::PREFIX as usize];
        let there = len.min(Self::PREFIX) as usize;
        read(&mut prefix[..there], 0)?;
        if there < self.magic.len() || prefix[..self.magic.len()] != self.magic {
            return Err(FrameError::Foreign);
        }
        if there < prefix.len() {
            return Err(FrameError::Short);
        }
        let number = |at: usize, bytes: usize| {
            prefix[at..at + bytes].iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte))
        };
        let (version, align, json) = (number(8, 4) as u32, number(12, 4), number(16, 8));
        if !(self.oldest..=self.version).contains(&version) {
            return Err(FrameError::Version(version));
        }
        if align != ALIGN || json > self.max_header {
            return Err(FrameError::Claims { json, align });
        }
        if json > len - Self::PREFIX {
            return Err(FrameError::Short);
        }
        let mut signed = vec![0; Self::SIGNED + json as usize];
        let (head, text) = signed.split_at_mut(Self::SIGNED);
        head.copy_from_slice(&prefix[..Self::SIGNED]);
        read(text, Self::PREFIX)?;
        if digest(&signed) != number(Self::SIGNED, 8) {
            return Err(FrameError::Damaged);
        }
        let header = serde_json::from_slice(&signed[Self::SIGNED..]).map_err(FrameError::Header)?;
        Ok((header, Self::PREFIX + json))
    }
}
