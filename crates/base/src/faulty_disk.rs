//! File writes through a trait, so that tests can inject a full or faulty disk.

use std::{fs::File, io, path::Path};

use crate::system::free_space;

/// Destination of file writes: [`SystemDisk`], or a full disk in tests.
pub trait WriteTarget: Sync {
    /// Free bytes of the file system that holds `folder`; `None` if unknown.
    fn free(&self, folder: &Path) -> Option<u64>;
    /// Writes all of `bytes` at `offset`.
    fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Returns once data and metadata of the file are on the disk (`fsync`).
    fn sync(&self, file: &File) -> io::Result<()>;
}

/// The operating system's file I/O.
pub struct SystemDisk;

impl WriteTarget for SystemDisk {
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

/// Writes all of `bytes` at `offset`, without moving a shared file cursor.
#[cfg(unix)]
pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, offset)
}

/// Writes all of `bytes` at `offset`.
#[cfg(windows)]
pub fn write_all_at(file: &File, mut bytes: &[u8], mut offset: u64) -> io::Result<()> {
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

/// Syncs the directory entries of a folder. Best effort: not every system supports it.
pub fn sync_folder(folder: &Path) {
    let _ = File::open(folder).and_then(|folder| folder.sync_all());
}

/// Human-readable size in decimal KB, MB or GB.
pub fn gb(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} KB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}
