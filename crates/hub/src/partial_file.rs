//! A file that is being downloaded: its bytes, and which blocks of it are there.
//!
//! Both are files of the cache: `TAG.moeflux-part` has the bytes at their places, and
//! `TAG.moeflux-blocks` a bit for each block. Bits are written every second or so, after the bytes
//! of their blocks are durable. A process that is killed loses the blocks since then, and after a
//! power failure no bit stands for bytes that were lost.

use std::{
    fs::{self, File, OpenOptions},
    io,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    blocks::{BlockSet, Blocks},
    error::HubError,
};

/// Ending of the file of the bytes.
pub(crate) const PART: &str = "moeflux-part";

/// First line of a file of blocks: the format's version and the block size.
const HEADER: &[u8] = b"moeflux blocks 2 4096\n";

/// Time after which blocks are written to the record: making bytes durable takes long.
const RECORD_PERIOD: Duration = Duration::from_secs(1);

/// Bytes after which they are, on a fast network.
const RECORD_BYTES: u64 = 256 << 20;

/// Bytes and blocks of one file.
#[derive(Debug)]
pub(crate) struct PartialFile {
    bytes_path: PathBuf,
    blocks_path: PathBuf,
    bytes: Arc<File>,
    blocks: Blocks,
    unrecorded: Unrecorded,
}

/// Blocks that are present and not in the record.
#[derive(Debug)]
struct Unrecorded {
    /// Range that has all of them.
    blocks: Range<u64>,
    bytes: u64,
    /// Time of the last record.
    since: Instant,
    /// Whether a record is being written.
    is_written: bool,
}

impl Default for Unrecorded {
    fn default() -> Self {
        Self { blocks: 0..0, bytes: 0, since: Instant::now(), is_written: false }
    }
}

/// Part of the record of blocks, to be written once their bytes are durable.
#[derive(Debug)]
pub(crate) struct BlockRecord {
    bytes: Arc<File>,
    bytes_path: PathBuf,
    blocks_path: PathBuf,
    offset: u64,
    bits: Vec<u8>,
}

impl BlockRecord {
    /// Makes the bytes durable, then writes the blocks. Takes long on a slow disk.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn write(self) -> Result<(), HubError> {
        self.bytes.sync_data().map_err(HubError::file(&self.bytes_path, "writing"))?;
        // Not kept open: a model may have hundreds of files.
        let blocks = OpenOptions::new().write(true).open(&self.blocks_path);
        match blocks.and_then(|blocks| write_at(&blocks, &self.bits, self.offset)) {
            // The file was completed meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            written => written.map_err(HubError::file(&self.blocks_path, "writing")),
        }
    }
}

impl PartialFile {
    /// Opens or makes the files of contents, given the path of the complete file.
    ///
    /// # Errors
    /// A file cannot be made, read or sized.
    pub(crate) fn open(blob: &Path, size: u64) -> Result<Self, HubError> {
        let [bytes_path, blocks_path] = paths(blob);
        let present = match recorded(blob, size) {
            Some(present) => present,
            None => {
                let empty = BlockSet::empty(size);
                fs::write(&blocks_path, [HEADER, empty.bits()].concat())
                    .map_err(HubError::file(&blocks_path, "writing"))?;
                empty
            }
        };
        let mut options = OpenOptions::new();
        let bytes = options.read(true).write(true).create(true).truncate(false).open(&bytes_path);
        let bytes = bytes.map_err(HubError::file(&bytes_path, "opening"))?;
        bytes.set_len(size).map_err(HubError::file(&bytes_path, "sizing"))?;
        Ok(Self {
            bytes_path,
            blocks_path,
            bytes: Arc::new(bytes),
            blocks: Blocks::new(size, present),
            unrecorded: Unrecorded::default(),
        })
    }

    /// The blocks, of which [`PartialFile::add`] adds some.
    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// The blocks, to claim some.
    pub(crate) fn blocks_mut(&mut self) -> &mut Blocks {
        &mut self.blocks
    }

    /// Path of the bytes.
    pub(crate) fn path(&self) -> &Path {
        &self.bytes_path
    }

    /// The file of the bytes, which stays valid when the file is complete.
    pub(crate) fn bytes(&self) -> &Arc<File> {
        &self.bytes
    }

    /// Marks the blocks within a range of bytes as present. Returns the bytes that are new.
    pub(crate) fn add(&mut self, range: &Range<u64>) -> u64 {
        let blocks = &mut self.unrecorded.blocks;
        let added = self.blocks.add(range, |block| {
            *blocks = match blocks.is_empty() {
                true => block..block + 1,
                false => blocks.start.min(block)..blocks.end.max(block + 1),
            };
        });
        self.unrecorded.bytes += added;
        added
    }

    /// Blocks to write to the record, unless the last time was a moment ago. A call of
    /// [`PartialFile::end_record`] follows.
    pub(crate) fn begin_record(&mut self) -> Option<BlockRecord> {
        let Unrecorded { bytes, since, .. } = self.unrecorded;
        let is_due = since.elapsed() >= RECORD_PERIOD || bytes >= RECORD_BYTES;
        if is_due { self.begin_record_now() } else { None }
    }

    /// As [`PartialFile::begin_record`], whenever the last time was. `None` if there is nothing to
    /// write, or another thread writes.
    pub(crate) fn begin_record_now(&mut self) -> Option<BlockRecord> {
        let blocks = self.unrecorded.blocks.clone();
        if blocks.is_empty() || self.unrecorded.is_written {
            return None;
        }
        self.unrecorded = Unrecorded { is_written: true, ..Unrecorded::default() };
        let bits = (blocks.start / 8) as usize..blocks.end.div_ceil(8) as usize;
        Some(BlockRecord {
            bytes: Arc::clone(&self.bytes),
            bytes_path: self.bytes_path.clone(),
            blocks_path: self.blocks_path.clone(),
            offset: (HEADER.len() + bits.start) as u64,
            bits: self.blocks.present().bits()[bits].to_vec(),
        })
    }

    /// Lets the next record be written.
    pub(crate) fn end_record(&mut self) {
        self.unrecorded.is_written = false;
    }

    /// Makes the bytes durable and gives them their name.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn finish(self, blob: &Path) -> Result<(), HubError> {
        self.bytes.sync_all().map_err(HubError::file(&self.bytes_path, "writing"))?;
        drop(self.bytes);
        fs::rename(&self.bytes_path, blob).map_err(HubError::file(blob, "renaming"))?;
        let _ = fs::remove_file(&self.blocks_path);
        Ok(())
    }

    /// Deletes bytes and record.
    pub(crate) fn delete(self) {
        drop(self.bytes);
        let _ = fs::remove_file(&self.blocks_path);
        let _ = fs::remove_file(&self.bytes_path);
    }
}

/// Bytes that are missing of a file that may have been begun, without opening it for writing.
pub(crate) fn missing(blob: &Path, size: u64) -> u64 {
    recorded(blob, size).map_or(size, |present| Blocks::new(size, present).missing())
}

/// The recorded blocks of contents, given the path of the complete file; `None` if they were not
/// begun.
pub(crate) fn recorded(blob: &Path, size: u64) -> Option<BlockSet> {
    let [bytes, blocks] = paths(blob);
    // Without its bytes, a record of blocks says nothing; another size is another file.
    if fs::metadata(bytes).ok()?.len() != size {
        return None;
    }
    BlockSet::from_bits(fs::read(blocks).ok()?.strip_prefix(HEADER)?, size)
}

/// Path of the bytes of contents that are not complete.
pub(crate) fn bytes_path(blob: &Path) -> PathBuf {
    blob.with_extension(PART)
}

fn paths(blob: &Path) -> [PathBuf; 2] {
    [bytes_path(blob), blob.with_extension("moeflux-blocks")]
}

/// Reads up to `buf.len()` bytes at an offset of a file; 0 at its end.
pub(crate) fn read_at(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    #[cfg(unix)]
    return std::os::unix::fs::FileExt::read_at(file, buf, offset);
    #[cfg(windows)]
    return std::os::windows::fs::FileExt::seek_read(file, buf, offset);
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
    use crate::blocks::BLOCK;

    const SIZE: u64 = 10 * BLOCK + 7;

    #[test]
    fn blocks_are_kept_over_a_restart() {
        let folder = tempfile::tempdir().unwrap();
        let blob = folder.path().join("tag");
        let mut file = PartialFile::open(&blob, SIZE).unwrap();
        assert_eq!(file.blocks().missing(), SIZE);
        // A range counts with its whole blocks, and with the file's end.
        assert_eq!(file.add(&(BLOCK - 1..3 * BLOCK + 5)), 2 * BLOCK);
        assert_eq!(file.add(&(10 * BLOCK..SIZE)), 7);
        assert_eq!(file.add(&(10 * BLOCK..SIZE)), 0);
        // Nothing of it is recorded before the bytes are durable.
        assert!(file.begin_record().is_none());
        assert_eq!(missing(&blob, SIZE), SIZE);
        let record = file.begin_record_now().unwrap();
        assert_eq!(file.add(&(5 * BLOCK..6 * BLOCK)), BLOCK);
        assert!(file.begin_record_now().is_none());
        record.write().unwrap();
        file.end_record();
        file.blocks_mut().unclaim();
        assert_eq!(
            file.blocks_mut().claim(&(2 * BLOCK..6 * BLOCK), u64::MAX),
            Some(3 * BLOCK..5 * BLOCK)
        );
        drop(file);
        assert_eq!(missing(&blob, SIZE), 8 * BLOCK);
        let mut file = PartialFile::open(&blob, SIZE).unwrap();
        assert_eq!(file.blocks().missing(), 8 * BLOCK);
        let whole = 0..SIZE;
        let claims: Vec<_> =
            std::iter::from_fn(|| file.blocks_mut().claim(&whole, u64::MAX)).collect();
        assert_eq!(claims, [0..BLOCK, 3 * BLOCK..10 * BLOCK]);
        drop(file);
        // A file of another size begins anew.
        assert_eq!(PartialFile::open(&blob, SIZE + 1).unwrap().blocks().missing(), SIZE + 1);
        assert_eq!(PartialFile::open(&blob, 0).unwrap().blocks_mut().claim(&(0..1), BLOCK), None);
    }

    #[test]
    fn each_missing_block_is_claimed_once() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = PartialFile::open(&folder.path().join("tag"), SIZE).unwrap();
        // Bytes in the middle of blocks, then what remains of a range around them.
        assert_eq!(
            file.blocks_mut().claim(&(2 * BLOCK + 1..3 * BLOCK + 1), u64::MAX),
            Some(2 * BLOCK..4 * BLOCK)
        );
        let around = BLOCK..6 * BLOCK;
        assert_eq!(file.blocks_mut().claim(&around, u64::MAX), Some(BLOCK..2 * BLOCK));
        assert_eq!(file.blocks_mut().claim(&around, BLOCK), Some(4 * BLOCK..5 * BLOCK));
        assert_eq!(file.blocks_mut().claim(&around, BLOCK), Some(5 * BLOCK..6 * BLOCK));
        assert_eq!(file.blocks_mut().claim(&around, BLOCK), None);
        assert_eq!(
            file.blocks_mut().claim(&(9 * BLOCK..u64::MAX), u64::MAX),
            Some(9 * BLOCK..SIZE)
        );
        // Claimed bytes are not there yet.
        assert!(!file.blocks().has(&(2 * BLOCK..2 * BLOCK + 1)));
        file.add(&(2 * BLOCK..4 * BLOCK));
        assert!(
            file.blocks().has(&(2 * BLOCK..4 * BLOCK))
                && !file.blocks().has(&(2 * BLOCK..4 * BLOCK + 1))
        );
    }

    #[test]
    fn a_record_without_its_bytes_says_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let blob = folder.path().join("tag");
        let mut file = PartialFile::open(&blob, SIZE).unwrap();
        file.add(&(0..SIZE));
        file.begin_record_now().unwrap().write().unwrap();
        assert_eq!(file.blocks().missing(), 0);
        let path = file.path().to_owned();
        drop(file);
        fs::remove_file(path).unwrap();
        assert_eq!(PartialFile::open(&blob, SIZE).unwrap().blocks().missing(), SIZE);
        assert_eq!(missing(&blob, SIZE), SIZE);
    }
}
