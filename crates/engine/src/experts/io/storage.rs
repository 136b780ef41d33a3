//! Storage layer of a reader: the files that hold experts, in every copy of the model.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use moeflux_base::{Error, OpenError, seam::OpenFiles};
use moeflux_compute::Bytes;
use moeflux_model::seam::{DataFile, read_at};

use super::{
    file::{self, HANDLES},
    load_balance::CopyMask,
    mirrors,
    options::{MAX_ALIGN, PageCache},
    transfer::Alignment,
};
use crate::experts::stats::MAX_COPIES;

/// File of one copy, and how a read accesses it.
#[derive(Clone, Copy)]
pub(super) struct FileAccess {
    pub(super) copy: usize,
    pub(super) file: usize,
    /// Reads through the page cache even where the file is open for direct reads.
    pub(super) buffered: bool,
    /// Selects the file handle where one serves a single read at a time.
    pub(super) io_slot: usize,
}

/// Files of all copies of a model; tests replace it.
pub(super) trait Storage: Send + Sync {
    /// Number of copies. A mirror may lack files.
    fn copies(&self) -> usize;

    /// Copies that lack a file; never all of them.
    fn lacking(&self, file: usize) -> CopyMask;

    /// Path of a copy's file, for messages.
    fn path(&self, copy: usize, file: usize) -> &Path;

    /// Alignment of reads; `None` for buffered files.
    fn alignment(&self, copy: usize, file: usize) -> Option<Alignment>;

    /// Reads up to `buf.len()` bytes; zero at the end of the file.
    fn read_at(&self, access: FileAccess, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
}

/// Files of a checkpoint and of its mirrors.
pub(super) struct ModelStorage {
    /// By copy and file.
    copies: Vec<Vec<Option<FileHandles>>>,
    own: Arc<Vec<DataFile>>,
    /// By file: the copy whose folder has the file in `own`.
    homes: Vec<usize>,
    mirrors: Vec<Vec<Option<DataFile>>>,
    /// As requested, or [`PageCache::Everything`] if `lacks_handles`.
    pages: PageCache,
    /// Whether direct reads would need more open files than the process may have.
    lacks_handles: bool,
}

/// Handles of one file, beside that of the checkpoint. Empty for files that are embedded in the
/// binary or arriving.
#[derive(Default)]
struct FileHandles {
    direct: Vec<File>,
    /// Set if there are direct handles.
    alignment: Option<Alignment>,
    /// Handles for buffered reads where one serves a single read at a time. Otherwise there are
    /// none, and these reads use the checkpoint's handle, so that no file is open twice for them.
    buffered: Vec<File>,
}

impl ModelStorage {
    /// Opens the files, and those of the same names in `folders`, for direct or buffered reads or
    /// both, as `pages` requires. Where the limit on open files has no room for direct handles, all
    /// reads are buffered.
    pub(super) fn open(
        own: Arc<Vec<DataFile>>,
        folders: &[PathBuf],
        pages: PageCache,
    ) -> Result<Self, Error> {
        if folders.len() >= MAX_COPIES {
            return Err(OpenError::TooManyMirrors { most: MAX_COPIES - 1 }.into());
        }
        let homes = own.iter().map(|file| mirrors::home_copy(file, folders)).collect();
        let mirrors = mirrors::open(&own, folders)?;
        let mut storage =
            Self { copies: Vec::new(), own, homes, mirrors, pages, lacks_handles: false };
        let files = (0..=folders.len())
            .flat_map(|copy| (0..storage.own.len()).map(move |file| (copy, file)))
            .filter(|(copy, file)| storage.source(*copy, *file).is_some())
            .count();
        let more = (files * HANDLES) as u64;
        storage.lacks_handles = pages != PageCache::Everything
            && OpenFiles::now().is_some_and(|now| !now.have_room_for(more));
        if storage.lacks_handles {
            storage.pages = PageCache::Everything;
        }
        let pages = storage.pages;
        let copies = (0..=folders.len()).map(|copy| {
            let sources = (0..storage.own.len()).map(|file| storage.source(copy, file));
            sources.map(|source| source.map(|s| FileHandles::open(s, pages)).transpose()).collect()
        });
        storage.copies = copies.collect::<Result<_, Error>>()?;
        Ok(storage)
    }

    /// File of a copy; `None` if the copy lacks it.
    fn source(&self, copy: usize, file: usize) -> Option<&DataFile> {
        match copy.checked_sub(1) {
            _ if self.homes[file] == copy => Some(&self.own[file]),
            None => None,
            Some(mirror) => self.mirrors[mirror][file].as_ref(),
        }
    }

    /// Handle for an access; `None` for files that are embedded in the binary or arriving.
    pub(super) fn file(&self, access: FileAccess) -> Option<&File> {
        let FileHandles { direct, buffered, .. } =
            self.copies[access.copy][access.file].as_ref()?;
        let through_cache = access.buffered || direct.is_empty();
        let files = if through_cache { buffered } else { direct };
        let own = files.get(access.io_slot % files.len().max(1));
        own.or_else(|| self.source(access.copy, access.file)?.file())
    }

    /// Use of the page cache.
    pub(super) fn pages(&self) -> PageCache {
        self.pages
    }

    /// Whether direct reads would need more open files than the process may have.
    pub(super) fn lacks_handles(&self) -> bool {
        self.lacks_handles
    }

    /// Number of files that are read directly, and of all files.
    pub(super) fn direct(&self) -> (usize, usize) {
        let handles = || self.copies.iter().flatten().flatten();
        (handles().filter(|h| h.alignment.is_some()).count(), handles().count())
    }

    /// Whether some file is on a file system in user space (FUSE, virtiofs). With its `direct_io`,
    /// io_uring reads wrong bytes there.
    #[cfg(target_os = "linux")]
    pub(super) fn is_on_fuse(&self) -> bool {
        /// `FUSE_SUPER_MAGIC` of Linux.
        const FUSE: u64 = 0x6573_5546;
        let files = self.own.iter().chain(self.mirrors.iter().flatten().flatten());
        files.filter_map(DataFile::file).any(|file| {
            rustix::fs::fstatfs(file).is_ok_and(|system| system.f_type as u64 & 0xffff_ffff == FUSE)
        })
    }

    /// Whether the system has all files: none is embedded in the binary or arriving.
    pub(super) fn has_handles(&self) -> bool {
        self.own.iter().all(|file| file.file().is_some())
    }
}

impl Storage for ModelStorage {
    fn copies(&self) -> usize {
        self.copies.len()
    }

    fn lacking(&self, file: usize) -> CopyMask {
        let lacks = |copy: &usize| self.copies[*copy][file].is_none();
        (0..self.copies.len()).filter(lacks).fold(0, |all, copy| all | 1 << copy)
    }

    fn path(&self, copy: usize, file: usize) -> &Path {
        self.source(copy, file).unwrap_or(&self.own[file]).path()
    }

    fn alignment(&self, copy: usize, file: usize) -> Option<Alignment> {
        self.copies[copy][file].as_ref()?.alignment
    }

    fn read_at(&self, access: FileAccess, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        match self.file(access) {
            Some(file) => read_at(file, buf, offset),
            None => self
                .source(access.copy, access.file)
                .unwrap_or(&self.own[access.file])
                .read_at(buf, offset),
        }
    }
}

impl FileHandles {
    fn open(source: &DataFile, pages: PageCache) -> Result<Self, Error> {
        let Some(own) = source.file() else { return Ok(Self::default()) };
        let direct =
            if pages == PageCache::Everything { None } else { Self::direct(source.path()) };
        let (direct, alignment) =
            direct.map_or_else(Default::default, |(files, alignment)| (files, Some(alignment)));
        let is_buffered = pages == PageCache::ReadAgain || direct.is_empty();
        let mut buffered = Vec::new();
        if is_buffered && HANDLES > 1 {
            let files = (0..HANDLES).map(|_| file::open_random(source.path()));
            buffered = files
                .collect::<io::Result<_>>()
                .map_err(Error::file(source.path(), "cannot open the file"))?;
        } else if is_buffered {
            file::expect_random_reads(own);
        }
        Ok(Self { direct, alignment, buffered })
    }

    /// Handles for direct reads, if the file system supports them and a read of the first block
    /// succeeds.
    fn direct(path: &Path) -> Option<(Vec<File>, Alignment)> {
        let opened =
            (0..HANDLES).map(|_| file::open_direct(path)).collect::<io::Result<Option<Vec<_>>>>();
        let opened = opened.ok().flatten()?;
        let alignment = opened.first()?.1;
        let usable = |align: usize| align.is_power_of_two() && align <= MAX_ALIGN;
        let mut block = Bytes::zeroed(MAX_ALIGN).ok()?;
        let works = usable(alignment.file)
            && usable(alignment.memory)
            && opened.iter().all(|(file, _)| read_at(file, &mut block, 0).is_ok());
        works.then(|| (opened.into_iter().map(|(file, _)| file).collect(), alignment))
    }
}
