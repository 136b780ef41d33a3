//! A file that another process downloads, as one sees it that reads it at once.
//!
//! The process that holds the lock of contents, their *owner*, records which blocks are there. A
//! *guest* reads these from the owner's file and writes nothing into it. Blocks that its readers
//! want earlier are fetched into a file that only the guest has.

use std::{
    fs::{File, OpenOptions},
    io,
    ops::Range,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    blocks::{BLOCK, BlockSet, Blocks},
    error::HubError,
    partial_file::{bytes_path, read_at, recorded},
};

/// Time between two looks at the record of an owner.
pub(crate) const LOOK_PERIOD: Duration = Duration::from_millis(150);

/// Bytes and blocks of an owner's file, and of the guest's own.
#[derive(Debug)]
pub(crate) struct GuestFile {
    /// Bytes of the owner, which stay valid when the file is complete.
    bytes: Arc<File>,
    /// Blocks that are in either file.
    blocks: Blocks,
    own: OwnBlocks,
    /// Time of the last look at the owner's record; `None` while a connection looks.
    looked: Option<Instant>,
}

/// Blocks that a guest has fetched as the owner did not have them.
#[derive(Clone, Debug)]
pub(crate) struct OwnBlocks {
    bytes: Arc<File>,
    pub(crate) blocks: BlockSet,
}

/// Part of a range that is in one file.
#[derive(Debug)]
pub(crate) struct Piece {
    pub(crate) len: usize,
    /// The guest's own file, if it is there.
    pub(crate) own: Option<Arc<File>>,
}

impl GuestFile {
    /// Opens the files of contents, given the path of the complete file. `None` if it is not this
    /// program that downloads them.
    ///
    /// # Errors
    /// The guest's own file cannot be made.
    pub(crate) fn open(blob: &Path, size: u64) -> Result<Option<Self>, HubError> {
        // A download by the Hub's other tools leaves older bytes of this program as they are.
        if blob.with_extension("incomplete").exists() {
            return Ok(None);
        }
        let part = bytes_path(blob);
        let Ok(bytes) = File::open(&part) else { return Ok(None) };
        let Some(present) = recorded(blob, size) else { return Ok(None) };
        if is_same(&bytes, &part) != Some(true) {
            return Ok(None);
        }
        let own = OwnBlocks { bytes: Arc::new(private_file(blob)?), blocks: BlockSet::empty(size) };
        let blocks = Blocks::new(size, present);
        Ok(Some(Self { bytes: Arc::new(bytes), blocks, own, looked: Some(Instant::now()) }))
    }

    /// Bytes of the owner.
    pub(crate) fn bytes(&self) -> &Arc<File> {
        &self.bytes
    }

    /// Blocks that are in either file.
    pub(crate) fn blocks(&self) -> &Blocks {
        &self.blocks
    }

    /// The blocks, to claim some.
    pub(crate) fn blocks_mut(&mut self) -> &mut Blocks {
        &mut self.blocks
    }

    /// Blocks of the guest alone.
    pub(crate) fn own(&self) -> &OwnBlocks {
        &self.own
    }

    /// Target of what the guest fetches.
    pub(crate) fn own_bytes(&self) -> &Arc<File> {
        &self.own.bytes
    }

    /// Marks the blocks within a range of bytes as present in the guest's own file, but for those
    /// of the owner: all readers get the same bytes. Returns the bytes that are new.
    pub(crate) fn add(&mut self, range: &Range<u64>) -> u64 {
        self.blocks.add(range, |block| self.own.blocks.insert(block))
    }

    /// Whether it is time to look at the owner's record. The caller then does so.
    pub(crate) fn begin_look(&mut self) -> bool {
        let is_due = self.looked.is_some_and(|looked| looked.elapsed() >= LOOK_PERIOD);
        if is_due {
            self.looked = None;
        }
        is_due
    }

    /// Takes over the blocks of the owner's record. Returns the bytes that are new; `None` if it is
    /// the record of other bytes.
    pub(crate) fn end_look(&mut self, record: Option<&BlockSet>) -> Option<u64> {
        self.looked = Some(Instant::now());
        let Some(record) = record else { return Some(0) };
        // A record loses no blocks.
        let is_kept = self.blocks.present().without(record).all(|block| self.own.blocks.has(block));
        is_kept.then(|| self.blocks.add_all(record))
    }

    /// Lets new connections fetch and look, once all others have ended.
    pub(crate) fn restart(&mut self) {
        self.blocks.unclaim();
        self.looked = Some(Instant::now());
    }

    /// The first bytes of a range that is there.
    pub(crate) fn piece(&self, range: &Range<u64>) -> Piece {
        let is_own = |block| self.own.blocks.has(block);
        let first = range.start / BLOCK;
        let other =
            (first..range.end.div_ceil(BLOCK)).find(|&block| is_own(block) != is_own(first));
        let end = other.map_or(range.end, |block| block * BLOCK);
        let own = is_own(first).then(|| Arc::clone(&self.own.bytes));
        Piece { len: (end - range.start) as usize, own }
    }

    /// Whether the guest has fetched the same bytes as the owner, whose file is complete and has
    /// its digest.
    pub(crate) fn agrees(&self) -> bool {
        self.own.blocks.iter().all(|block| {
            let range = self.blocks.bytes_of(block);
            let [ours, theirs] = [&self.own.bytes, &self.bytes].map(|file| read(file, &range).ok());
            ours.is_some() && ours == theirs
        })
    }
}

impl OwnBlocks {
    /// Bytes of a range that is there.
    ///
    /// # Errors
    /// The disk fails.
    pub(crate) fn read(&self, range: &Range<u64>) -> io::Result<Vec<u8>> {
        read(&self.bytes, range)
    }
}

/// Bytes of a block.
fn read(file: &File, range: &Range<u64>) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    let mut filled = 0;
    while filled < bytes.len() {
        match read_at(file, &mut bytes[filled..], range.start + filled as u64)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => filled += count,
        }
    }
    Ok(bytes)
}

/// Whether a path leads to an open file; `None` if it leads nowhere. Network file systems then read
/// that file from the server again, as its record may name blocks that they have kept as holes.
pub(crate) fn is_same(file: &File, path: &Path) -> Option<bool> {
    let found = File::open(path).ok()?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let (found, file) = (found.metadata().ok()?, file.metadata().ok()?);
        Some((found.dev(), found.ino()) == (file.dev(), file.ino()))
    }
    // Other systems do not say it: the record tells.
    #[cfg(not(unix))]
    {
        let _ = (found, file);
        Some(true)
    }
}

/// Makes a file without a name, which is gone with the process.
fn private_file(blob: &Path) -> Result<File, HubError> {
    let mut number = 0u32;
    loop {
        let path = blob.with_extension(format!("moeflux-guest-{number}"));
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path);
        match file {
            Ok(file) => {
                std::fs::remove_file(&path).map_err(HubError::file(&path, "removing"))?;
                return Ok(file);
            }
            // Another guest is about to remove it.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => number += 1,
            Err(error) => return Err(HubError::file(path, "creating")(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::partial_file::PartialFile;

    #[test]
    fn each_block_is_read_from_one_file() {
        let size = 9 * BLOCK + 7;
        let folder = tempfile::tempdir().unwrap();
        let blob = folder.path().join("tag");
        assert!(GuestFile::open(&blob, size).unwrap().is_none());
        let mut owner = PartialFile::open(&blob, size).unwrap();
        owner.add(&(0..3 * BLOCK));
        owner.begin_record_now().unwrap().write().unwrap();
        assert!(GuestFile::open(&blob, size + 1).unwrap().is_none());
        let mut guest = GuestFile::open(&blob, size).unwrap().unwrap();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2);
        // The third block is the owner's, and stays so.
        assert_eq!(guest.add(&(2 * BLOCK..5 * BLOCK)), 2 * BLOCK);
        let piece = guest.piece(&(BLOCK + 1..4 * BLOCK));
        assert!(piece.own.is_none() && piece.len as u64 == 2 * BLOCK - 1);
        let piece = guest.piece(&(3 * BLOCK..4 * BLOCK + 5));
        assert!(piece.own.is_some() && piece.len as u64 == BLOCK + 5);
        // The guest's stay the guest's.
        owner.add(&(3 * BLOCK..6 * BLOCK));
        assert_eq!(guest.end_look(Some(owner.blocks().present())), Some(BLOCK));
        assert!(guest.piece(&(4 * BLOCK..5 * BLOCK)).own.is_some());
        assert!(guest.piece(&(5 * BLOCK..6 * BLOCK)).own.is_none());
        assert_eq!(guest.blocks_mut().claim(&(0..size), u64::MAX), Some(6 * BLOCK..size));
        // A record that loses blocks belongs to another download.
        assert_eq!(guest.end_look(Some(&BlockSet::empty(size))), None);
    }
}
