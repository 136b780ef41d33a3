//! Questions to the file system.

use std::path::Path;

/// Bytes that are free on the disk of a folder, if the system says so.
#[cfg(unix)]
pub(crate) fn free_space(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

/// Bytes that are free on the disk of a folder, if the system says so.
#[cfg(not(unix))]
pub(crate) fn free_space(_folder: &Path) -> Option<u64> {
    None
}
