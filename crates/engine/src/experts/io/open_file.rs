//! Opening a file past the page cache, or without read-ahead, as each system has it.

use std::{fs::File, io, path::Path};

use super::transfer::Alignment;

/// Handles of one file. Windows lets one read at a time through a handle; elsewhere all share one.
pub(super) const HANDLES: usize = if cfg!(windows) { 8 } else { 1 };

#[cfg(not(target_os = "linux"))]
use super::options::MAX_ALIGN;

/// For direct reads; `None` where the file system has none.
#[cfg(target_os = "linux")]
pub(crate) fn direct(path: &Path) -> io::Result<Option<(File, Alignment)>> {
    use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, open, statx};

    let file = match open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(rustix::io::Errno::INVAL) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    // What a page is aligned to does for every disk; one that says more gets smaller blocks.
    let page = Alignment { file: 4096, memory: 4096 };
    let alignment = match statx(&file, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN) {
        Ok(told) if StatxFlags::from_bits_retain(told.stx_mask).contains(StatxFlags::DIOALIGN) => {
            match (told.stx_dio_offset_align, told.stx_dio_mem_align) {
                (0, _) | (_, 0) => return Ok(None),
                (file, memory) => Alignment { file: file as usize, memory: memory as usize },
            }
        }
        _ => page,
    };
    Ok(Some((file, alignment)))
}

/// For direct reads.
#[cfg(target_vendor = "apple")]
pub(crate) fn direct(path: &Path) -> io::Result<Option<(File, Alignment)>> {
    let file = random(path)?;
    rustix::fs::fcntl_nocache(&file, true)?;
    Ok(Some((file, Alignment { file: MAX_ALIGN, memory: MAX_ALIGN })))
}

/// For direct reads.
#[cfg(windows)]
pub(crate) fn direct(path: &Path) -> io::Result<Option<(File, Alignment)>> {
    const FILE_FLAG_NO_BUFFERING: u32 = 0x2000_0000;
    let file = with_flags(path, FILE_FLAG_NO_BUFFERING)?;
    Ok(Some((file, Alignment { file: MAX_ALIGN, memory: MAX_ALIGN })))
}

/// For reads at random places through the page cache: reading ahead would read what nobody wants.
#[cfg(target_os = "linux")]
pub(crate) fn random(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    // Advice that is not taken costs speed only.
    let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random);
    Ok(file)
}

/// For reads at random places through the page cache: reading ahead would read what nobody wants.
#[cfg(target_vendor = "apple")]
pub(crate) fn random(path: &Path) -> io::Result<File> {
    use std::os::fd::AsRawFd;

    let file = File::open(path)?;
    // SAFETY: the call reads nothing of ours, and the file is open. Advice that is not taken costs speed only.
    let _ = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_RDAHEAD, 0) };
    Ok(file)
}

/// For reads at random places through the page cache.
#[cfg(windows)]
pub(crate) fn random(path: &Path) -> io::Result<File> {
    const FILE_FLAG_RANDOM_ACCESS: u32 = 0x1000_0000;
    with_flags(path, FILE_FLAG_RANDOM_ACCESS)
}

#[cfg(windows)]
fn with_flags(path: &Path, flags: u32) -> io::Result<File> {
    use std::os::windows::fs::OpenOptionsExt;
    std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path)
}
