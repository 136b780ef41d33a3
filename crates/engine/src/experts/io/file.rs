//! Opens files for direct reads (bypassing the page cache) or for random reads without read-ahead,
//! per platform.

use std::{fs::File, io, path::Path};

use super::transfer::Alignment;

/// Handles per file. Windows serializes the reads of a handle; elsewhere one handle serves all
/// reads, and buffered ones use that of the checkpoint.
pub(super) const HANDLES: usize = if cfg!(windows) { 8 } else { 1 };

#[cfg(not(target_os = "linux"))]
use super::options::MAX_ALIGN;

/// Opens a file for direct reads; `None` if the file system does not support them.
#[cfg(target_os = "linux")]
pub(crate) fn open_direct(path: &Path) -> io::Result<Option<(File, Alignment)>> {
    use rustix::fs::{AtFlags, Mode, OFlags, StatxFlags, open, statx};

    let file = match open(path, OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECT, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(rustix::io::Errno::INVAL) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    // Page alignment suits every disk. Where statx reports less, that is used.
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

/// Opens a file for direct reads.
#[cfg(target_vendor = "apple")]
pub(crate) fn open_direct(path: &Path) -> io::Result<Option<(File, Alignment)>> {
    let file = open_random(path)?;
    rustix::fs::fcntl_nocache(&file, true)?;
    Ok(Some((file, Alignment { file: MAX_ALIGN, memory: MAX_ALIGN })))
}

/// Opens a file for direct reads.
#[cfg(windows)]
pub(crate) fn open_direct(path: &Path) -> io::Result<Option<(File, Alignment)>> {
    const FILE_FLAG_NO_BUFFERING: u32 = 0x2000_0000;
    let file = with_flags(path, FILE_FLAG_NO_BUFFERING)?;
    Ok(Some((file, Alignment { file: MAX_ALIGN, memory: MAX_ALIGN })))
}

/// Opens a file for buffered reads at random offsets.
pub(crate) fn open_random(path: &Path) -> io::Result<File> {
    #[cfg(unix)]
    let file = File::open(path)?;
    #[cfg(windows)]
    let file = {
        const FILE_FLAG_RANDOM_ACCESS: u32 = 0x1000_0000;
        with_flags(path, FILE_FLAG_RANDOM_ACCESS)?
    };
    expect_random_reads(&file);
    Ok(file)
}

/// Turns read-ahead off, as it would read unneeded bytes. Without the advice reads are slower, but
/// correct. On Windows it is given when a file is opened.
pub(super) fn expect_random_reads(file: &File) {
    #[cfg(target_os = "linux")]
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::Random);
    #[cfg(target_vendor = "apple")]
    {
        use std::os::fd::AsRawFd;

        // SAFETY: `F_RDAHEAD` takes an integer, so the call accesses no memory of the process, and
        // the descriptor is open.
        let _ = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_RDAHEAD, 0) };
    }
    #[cfg(not(unix))]
    let _ = file;
}

#[cfg(windows)]
fn with_flags(path: &Path, flags: u32) -> io::Result<File> {
    use std::os::windows::fs::OpenOptionsExt;
    std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path)
}
