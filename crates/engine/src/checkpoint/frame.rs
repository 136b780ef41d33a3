//! What files of moeflux's own begin with: which kind they are, their version, and a header in JSON, with a digest of all that.

use std::io;

use serde::{Serialize, de::DeserializeOwned};
use twox_hash::XxHash3_64;

use super::Source;

/// What follows a header begins at multiples of it, and so does each part of that.
pub(crate) const ALIGN: u64 = 4096;

/// XXH3, 64 bits.
pub(crate) fn digest(bytes: &[u8]) -> u64 {
    XxHash3_64::oneshot(bytes)
}

/// A kind of file.
pub(crate) struct Frame {
    pub(crate) magic: [u8; 8],
    /// The version that is written, and the only one that is read.
    pub(crate) version: u32,
    /// Bytes of a header at most: what is read into memory at once.
    pub(crate) most: u64,
}

/// Why the start of a file is not that of its kind.
#[derive(Debug)]
pub(crate) enum Unframed {
    Unreadable(io::Error),
    /// It is of another kind.
    Foreign,
    /// Its version.
    Version(u32),
    /// Its header cannot have so many bytes, nor what follows begin at multiples of this.
    Claims {
        json: u64,
        align: u64,
    },
    /// It ends before its header does.
    Short,
    /// The digest is another one.
    Damaged,
    /// The header is not that of its kind.
    Header(serde_json::Error),
}

impl Frame {
    /// Bytes before the header.
    pub(crate) const PREFIX: u64 = 32;
    /// Bytes of these that the digest is of.
    const SIGNED: usize = 24;

    /// The start of a file, up to where other things begin: zeros fill it up to a multiple of [`ALIGN`].
    ///
    /// # Errors
    /// The header is not to be written as JSON.
    pub(crate) fn encode(&self, header: &impl Serialize) -> serde_json::Result<Vec<u8>> {
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

    /// The header, and where it ends.
    ///
    /// # Errors
    /// As [`Unframed`] says.
    pub(crate) fn read<H: DeserializeOwned>(&self, source: &Source) -> Result<(H, u64), Unframed> {
        let read = |buf: &mut [u8], at| source.read_exact_at(buf, at).map_err(Unframed::Unreadable);
        let len = source.len();
        let mut prefix = [0; Self::PREFIX as usize];
        let there = len.min(Self::PREFIX) as usize;
        read(&mut prefix[..there], 0)?;
        if there < self.magic.len() || prefix[..self.magic.len()] != self.magic {
            return Err(Unframed::Foreign);
        }
        if there < prefix.len() {
            return Err(Unframed::Short);
        }
        let number = |at: usize, bytes: usize| {
            prefix[at..at + bytes].iter().rev().fold(0u64, |n, byte| n << 8 | u64::from(*byte))
        };
        let (version, align, json) = (number(8, 4) as u32, number(12, 4), number(16, 8));
        if version != self.version {
            return Err(Unframed::Version(version));
        }
        if align != ALIGN || json > self.most {
            return Err(Unframed::Claims { json, align });
        }
        if json > len - Self::PREFIX {
            return Err(Unframed::Short);
        }
        let mut signed = vec![0; Self::SIGNED + json as usize];
        let (head, text) = signed.split_at_mut(Self::SIGNED);
        head.copy_from_slice(&prefix[..Self::SIGNED]);
        read(text, Self::PREFIX)?;
        if digest(&signed) != number(Self::SIGNED, 8) {
            return Err(Unframed::Damaged);
        }
        let header = serde_json::from_slice(&signed[Self::SIGNED..]).map_err(Unframed::Header)?;
        Ok((header, Self::PREFIX + json))
    }
}
