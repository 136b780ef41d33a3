//! Writing to a disk: at any place of a file, and until it is there.

use std::{fs::File, io, path::Path};

use crate::base::system::free_space;

/// What is written to: a disk, or in tests one that is full.
pub(crate) trait Target: Sync {
    /// Bytes that may still be written below a folder that exists, where the system tells.
    fn free(&self, folder: &Path) -> Option<u64>;
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Returns when all bytes of the file have found a place.
    fn sync(&self, file: &File) -> io::Result<()>;
}

pub(crate) struct Disk;

impl Target for Disk {
    fn free(&self, folder: &Path) -> Option<u64> {
        free_space(folder)
    }

    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        write_all_at(file, bytes, offset)
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }
}

#[cfg(unix)]
pub(crate) fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

#[cfg(windows)]
pub(crate) fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
    while !bytes.is_empty() {
        match std::os::windows::fs::FileExt::seek_write(file, bytes, offset) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => {
                bytes = &bytes[n..];
                offset += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Returns when the names in a folder have found a place; not every system has this.
pub(crate) fn sync_folder(folder: &Path) {
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}

/// Bytes for people.
pub(crate) fn gb(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} KB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}
