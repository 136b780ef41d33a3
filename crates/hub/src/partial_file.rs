//! A file that is being downloaded: its bytes, and which blocks of it are there.
//!
//! Both are files of the cache: `TAG.moeflux-part` has the bytes at their places, and
//! `TAG.moeflux-blocks` a bit for each block. A bit is written after its block, so that a process
//! that is killed loses blocks in flight alone.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    ops::Range,
    path::{Path, PathBuf},
};

use crate::error::HubError;

/// Bytes of a block.
pub(crate) const BLOCK: u64 = 256 << 10;

/// First line of a file of blocks: the format's version and the block size.
const HEADER: &[u8] = b"moeflux blocks 1 262144\n";

/// Bytes and blocks of one file.
#[derive(Debug)]
pub(crate) struct PartialFile {
    size: u64,
    bytes_path: PathBuf,
    blocks_path: PathBuf,
    bytes: File,
    blocks: File,
    /// A bit for each block that is there.
    present: Vec<u8>,
    missing: u64,
}

impl PartialFile {
    /// Opens or makes the files of contents, given the path of the complete file.
    ///
    /// # Errors
    /// A file cannot be made, read or sized.
    pub(crate) fn open(blob: &Path, size: u64) -> Result<Self, HubError> {
        let [bytes_path, blocks_path] = paths(blob);
        let open = |path: &Path| {
            let mut options = OpenOptions::new();
            let file = options.read(true).write(true).create(true).truncate(false).open(path);
            file.map_err(HubError::file(path, "opening"))
        };
        let len = size.div_ceil(BLOCK).div_ceil(8) as usize;
        // Without its bytes, a record of blocks says nothing; another size is another file.
        let has_bytes = fs::metadata(&bytes_path).is_ok_and(|bytes| bytes.len() == size);
        let recorded = match has_bytes {
            true => fs::read(&blocks_path).unwrap_or_default(),
            false => Vec::new(),
        };
        let present = recorded.strip_prefix(HEADER).filter(|present| present.len() == len);
        let present = present.map(<[u8]>::to_vec);
        let (bytes, mut blocks) = (open(&bytes_path)?, open(&blocks_path)?);
        bytes.set_len(size).map_err(HubError::file(&bytes_path, "sizing"))?;
        let present = match present {
            Some(present) => present,
            None => {
                let empty = vec![0; len];
                let written =
                    blocks.set_len(0).and_then(|()| blocks.write_all(&[HEADER, &empty].concat()));
                written.map_err(HubError::file(&blocks_path, "writing"))?;
                empty
            }
        };
        let mut file = Self { size, bytes_path, blocks_path, bytes, blocks, present, missing: 0 };
        let blocks = 0..size.div_ceil(BLOCK);
        file.missing = blocks.filter(|&block| !file.has(block)).map(|b| file.block_len(b)).sum();
        Ok(file)
    }

    /// Bytes that are missing.
    pub(crate) fn missing(&self) -> u64 {
        self.missing
    }

    /// Path of the bytes.
    pub(crate) fn path(&self) -> &Path {
        &self.bytes_path
    }

    /// A handle for writing bytes, from any thread.
    ///
    /// # Errors
    /// The system gives none.
    pub(crate) fn handle(&self) -> Result<File, HubError> {
        self.bytes.try_clone().map_err(HubError::file(&self.bytes_path, "opening"))
    }

    fn has(&self, block: u64) -> bool {
        let byte = self.present.get((block / 8) as usize);
        byte.is_some_and(|byte| byte & (1 << (block % 8)) != 0)
    }

    fn block_len(&self, block: u64) -> u64 {
        BLOCK.min(self.size - block * BLOCK)
    }

    /// Ranges of bytes that are missing, each of whole blocks and `max` bytes at most.
    pub(crate) fn missing_ranges(&self, max: u64) -> Vec<Range<u64>> {
        let mut ranges: Vec<Range<u64>> = Vec::new();
        for block in (0..self.size.div_ceil(BLOCK)).filter(|&block| !self.has(block)) {
            let start = block * BLOCK;
            let end = start + self.block_len(block);
            match ranges.last_mut() {
                Some(last) if last.end == start && end - last.start <= max => last.end = end,
                _ => ranges.push(start..end),
            }
        }
        ranges
    }

    /// Records that the blocks within a range of bytes are there. Returns the bytes that are new.
    ///
    /// # Errors
    /// The record cannot be written.
    pub(crate) fn record(&mut self, range: &Range<u64>) -> Result<u64, HubError> {
        let first = range.start.div_ceil(BLOCK);
        let end =
            if range.end == self.size { range.end.div_ceil(BLOCK) } else { range.end / BLOCK };
        let mut recorded = 0;
        for block in (first..end).filter(|&block| !self.has(block)).collect::<Vec<_>>() {
            self.present[(block / 8) as usize] |= 1 << (block % 8);
            recorded += self.block_len(block);
        }
        if recorded > 0 {
            let bytes = (first / 8) as usize..end.div_ceil(8) as usize;
            let offset = (HEADER.len() + bytes.start) as u64;
            write_at(&self.blocks, &self.present[bytes], offset)
                .map_err(HubError::file(&self.blocks_path, "writing"))?;
            self.missing -= recorded;
        }
        Ok(recorded)
    }

    /// Makes the bytes durable and gives them their name.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn finish(self, blob: &Path) -> Result<(), HubError> {
        self.bytes.sync_all().map_err(HubError::file(&self.bytes_path, "writing"))?;
        drop(self.bytes);
        fs::rename(&self.bytes_path, blob).map_err(HubError::file(blob, "renaming"))?;
        drop(self.blocks);
        let _ = fs::remove_file(&self.blocks_path);
        Ok(())
    }

    /// Deletes bytes and record.
    pub(crate) fn delete(self) {
        drop((self.bytes, self.blocks));
        let _ = fs::remove_file(&self.blocks_path);
        let _ = fs::remove_file(&self.bytes_path);
    }
}

/// Bytes that are missing of a file that may have been begun, without opening it for writing.
pub(crate) fn missing(blob: &Path, size: u64) -> u64 {
    let [bytes, blocks] = paths(blob);
    if !fs::metadata(bytes).is_ok_and(|bytes| bytes.len() == size) {
        return size;
    }
    let recorded = fs::read(blocks).unwrap_or_default();
    let Some(present) = recorded.strip_prefix(HEADER) else { return size };
    let count: u64 = present.iter().map(|byte| u64::from(byte.count_ones())).sum();
    size.saturating_sub(count * BLOCK)
}

fn paths(blob: &Path) -> [PathBuf; 2] {
    ["moeflux-part", "moeflux-blocks"].map(|extension| blob.with_extension(extension))
}

/// Writes bytes at an offset of a file.
#[cfg(unix)]
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Writes bytes at an offset of a file.
#[cfg(windows)]
pub(crate) fn write_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = std::os::windows::fs::FileExt::seek_write(file, bytes, offset)?;
        if count == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        bytes = &bytes[count..];
        offset += count as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZE: u64 = 10 * BLOCK + 7;

    #[test]
    fn blocks_are_kept_over_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let blob = folder.path().join("tag");
        let mut file = PartialFile::open(&blob, SIZE).unwrap();
        assert_eq!(file.missing(), SIZE);
        assert_eq!(file.missing_ranges(4 * BLOCK).len(), 3);
        // A range counts with its whole blocks, and with the file's end.
        assert_eq!(file.record(&(BLOCK - 1..3 * BLOCK + 5)).unwrap(), 2 * BLOCK);
        assert_eq!(file.record(&(10 * BLOCK..SIZE)).unwrap(), 7);
        assert_eq!(file.record(&(10 * BLOCK..SIZE)).unwrap(), 0);
        drop(file);
        assert_eq!(missing(&blob, SIZE), SIZE - 3 * BLOCK);
        let file = PartialFile::open(&blob, SIZE).unwrap();
        assert_eq!(file.missing(), 8 * BLOCK);
        assert_eq!(file.missing_ranges(u64::MAX), [0..BLOCK, 3 * BLOCK..10 * BLOCK]);
        drop(file);
        // A file of another size begins anew.
        assert_eq!(PartialFile::open(&blob, SIZE + 1).unwrap().missing(), SIZE + 1);
        assert_eq!(PartialFile::open(&blob, 0).unwrap().missing_ranges(1), []);
    }

    #[test]
    fn a_record_without_its_bytes_says_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let blob = folder.path().join("tag");
        let mut file = PartialFile::open(&blob, SIZE).unwrap();
        file.record(&(0..SIZE)).unwrap();
        assert_eq!(file.missing(), 0);
        let path = file.path().to_owned();
        drop(file);
        fs::remove_file(path).unwrap();
        assert_eq!(PartialFile::open(&blob, SIZE).unwrap().missing(), SIZE);
        assert_eq!(missing(&blob, SIZE), SIZE);
    }
}
