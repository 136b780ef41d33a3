//! The files that experts are read from, in every copy of the model: the lowest layer of a reader.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use moeflux_compute::Bytes;

use super::{
    mirrors,
    open_file::{self, HANDLES},
    options::{MAX_ALIGN, PageCache},
    sharing::Copies,
    transfer::Alignment,
};
use crate::{
    base::{error::Error, stats::MAX_COPIES},
    checkpoint::{DataFile, read_at},
};

/// Where a read goes.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub(super) copy: usize,
    pub(super) file: usize,
    /// Through the page cache, whatever others do.
    pub(super) buffered: bool,
    /// Who reads.
    pub(super) lane: usize,
}

/// Something that pieces are read from.
pub(super) trait Disk: Send + Sync {
    /// Copies of the model, some of which may lack files.
    fn copies(&self) -> usize;

    /// The copies that lack a file; never all.
    fn lacking(&self, file: usize) -> Copies;

    /// A file of a copy, for messages.
    fn path(&self, copy: usize, file: usize) -> &Path;

    /// What reads of the file must be aligned to; `None` if they need not be.
    fn alignment(&self, copy: usize, file: usize) -> Option<Alignment>;

    /// Reads some bytes; none is the end of the file.
    fn read_at(&self, place: Place, offset: u64, buf: &mut [u8]) -> io::Result<usize>;
}

/// Files of checkpoints.
pub(super) struct Files {
    /// By copy and file.
    copies: Vec<Vec<Option<Handles>>>,
    own: Arc<Vec<DataFile>>,
    /// By file: the copy that `own` has it of.
    homes: Vec<usize>,
    mirrors: Vec<Vec<Option<DataFile>>>,
}

/// A file as experts are read from it, by the way that reads go if nobody asks for another one. Empty for what lies in the
/// binary.
struct Handles {
    files: Vec<File>,
    alignment: Option<Alignment>,
    /// For reads through the page cache where those of `files` are direct: some if they are common.
    buffered: Vec<File>,
}

impl Files {
    /// Opens the files once more, and those of the same names in other folders: for direct access, buffered
    /// access or both, as `pages` asks for.
    pub(super) fn open(
        own: Arc<Vec<DataFile>>,
        folders: &[PathBuf],
        pages: PageCache,
    ) -> Result<Self, Error> {
        if folders.len() >= MAX_COPIES {
            return Err(Error::Input(format!("a model has at most {} mirrors", MAX_COPIES - 1)));
        }
        let homes = own.iter().map(|file| mirrors::home(file, folders)).collect();
        let mirrors = mirrors::open(&own, folders)?;
        let mut files = Self { copies: Vec::new(), own, homes, mirrors };
        let copies = (0..=folders.len()).map(|copy| {
            let sources = (0..files.own.len()).map(|file| files.source(copy, file));
            sources.map(|source| source.map(|s| Handles::open(s, pages)).transpose()).collect()
        });
        files.copies = copies.collect::<Result<_, Error>>()?;
        Ok(files)
    }

    /// A file of a copy, if that has it.
    fn source(&self, copy: usize, file: usize) -> Option<&DataFile> {
        match copy.checked_sub(1) {
            _ if self.homes[file] == copy => Some(&self.own[file]),
            None => None,
            Some(mirror) => self.mirrors[mirror][file].as_ref(),
        }
    }

    /// The open file, if it is one.
    pub(super) fn file(&self, place: Place) -> Option<&File> {
        let handles = self.copies[place.copy][place.file].as_ref()?;
        let Handles { files, alignment, buffered } = handles;
        let through_cache = place.buffered && alignment.is_some();
        let files = if through_cache { buffered } else { files };
        let own = files.get(place.lane % files.len().max(1));
        own.or_else(|| self.source(place.copy, place.file)?.file().filter(|_| through_cache))
    }

    /// How many files are read directly, and how many there are.
    pub(super) fn direct(&self) -> (usize, usize) {
        let all = || self.copies.iter().flatten().flatten();
        (all().filter(|h| h.alignment.is_some()).count(), all().count())
    }

    /// Whether some of it lies in the binary.
    pub(super) fn in_binary(&self) -> bool {
        self.copies.iter().flatten().flatten().any(|h| h.files.is_empty())
    }
}

impl Disk for Files {
    fn copies(&self) -> usize {
        self.copies.len()
    }

    fn lacking(&self, file: usize) -> Copies {
        let lacks = |copy: &usize| self.copies[*copy][file].is_none();
        (0..self.copies.len()).filter(lacks).fold(0, |all, copy| all | 1 << copy)
    }

    fn path(&self, copy: usize, file: usize) -> &Path {
        self.source(copy, file).unwrap_or(&self.own[file]).path()
    }

    fn alignment(&self, copy: usize, file: usize) -> Option<Alignment> {
        self.copies[copy][file].as_ref()?.alignment
    }

    fn read_at(&self, place: Place, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        match self.file(place) {
            Some(file) => read_at(file, buf, offset),
            None => self
                .source(place.copy, place.file)
                .unwrap_or(&self.own[place.file])
                .read_at(buf, offset),
        }
    }
}

impl Handles {
    fn open(source: &DataFile, pages: PageCache) -> Result<Self, Error> {
        if source.file().is_none() {
            return Ok(Self { files: Vec::new(), alignment: None, buffered: Vec::new() });
        }
        let random = || {
            let files: io::Result<Vec<_>> =
                (0..HANDLES).map(|_| open_file::random(source.path())).collect();
            files.map_err(Error::file(source.path(), "cannot open the file"))
        };
        let direct =
            if pages == PageCache::Everything { None } else { Self::direct(source.path()) };
        let Some((files, alignment)) = direct else {
            return Ok(Self { files: random()?, alignment: None, buffered: Vec::new() });
        };
        let buffered = if pages == PageCache::ReadAgain { random()? } else { Vec::new() };
        Ok(Self { files, alignment: Some(alignment), buffered })
    }

    /// Direct access, if the file system has it and a read of the first block works.
    fn direct(path: &Path) -> Option<(Vec<File>, Alignment)> {
        let opened =
            (0..HANDLES).map(|_| open_file::direct(path)).collect::<io::Result<Option<Vec<_>>>>();
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
