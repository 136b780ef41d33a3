//! Pack writer: writes pieces into `.partial` files, with a journal for resuming.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read},
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use moeflux_base::{
    Error, ToolError,
    seam::{SystemDisk, WriteTarget, gb, is_system_entry, sync_folder},
};
use moeflux_model::{
    checkpoint::Checkpoint,
    seam::{DENSE, DataFile, EXPERTS, JOURNAL, PackedPart},
};

use super::{
    pack_job::{PackJob, file_name},
    workers::{for_each_piece, piece_digest},
};

/// Result of a packing run.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PackReport {
    /// Experts of all layers.
    pub experts: usize,
    /// Bytes of all files of the packed folder.
    pub bytes: u64,
    /// Bytes reused from an earlier run, after verification.
    pub reused: u64,
}

/// Writes a packed copy of `source` into the folder `out`, creating it if needed. Pieces that an
/// earlier run wrote are verified by digest and reused.
///
/// `progress` receives the bytes done and the total bytes; `Break` cancels. A cancelled or failed
/// run leaves `.partial` files that the same call resumes. Files are renamed once all of them are
/// complete and synced, `config.json` last.
///
/// # Errors
/// The source is packed, has no experts, cannot be read or is not supported; `out` contains other
/// files; the disk is too full; cancelled.
pub fn pack(
    source: &Checkpoint,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<PackReport, Error> {
    pack_to(&SystemDisk, source, out, progress)
}

pub(super) fn pack_to<T: WriteTarget>(
    target: &T,
    source: &Checkpoint,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64) -> ControlFlow<()>,
) -> Result<PackReport, Error> {
    let mut job = PackJob::new(source)?;
    let places = job.places();
    let small: u64 = job.header.files.iter().map(|f| f.bytes).sum();
    let journal_bytes = (places.len() as u64 + 1) * PackJournal::LINE;
    let bytes = job.header.dense.bytes + job.experts_bytes() + small;
    let folder = PackFolder { target, path: out, needed: bytes + journal_bytes };

    let created = folder.open()?;
    let begun = !out.join(JOURNAL).exists();
    let opened = PackJournal::open(&folder, job.key()?, places.len());
    let (journal, known) = opened.inspect_err(|_| folder.remove_if_created(created))?;
    let there = places
        .iter()
        .zip(&known)
        .filter(|(_, known)| known.is_some())
        .map(|(p, _)| p.padded_bytes)
        .sum();
    if let Err(error) = folder.check_free_space(there) {
        // The journal of an earlier run stays: it identifies what that run left.
        if begun {
            // Some file systems of Windows keep the name of an open file, and its folder with it.
            drop(journal);
            let _ = fs::remove_file(out.join(JOURNAL));
            folder.remove_if_created(created);
        }
        return Err(error);
    }
    let dense = folder.part(DENSE, job.header.dense.bytes)?;
    let experts = folder.part(EXPERTS, job.experts_bytes())?;
    let file = |piece| if matches!(piece, PackedPart::Dense(_)) { &dense } else { &experts };

    let (mut done, mut reused) = (0, 0);
    let total = places.iter().map(|p| p.padded_bytes).sum();
    let mut header = job.header.clone();
    for_each_piece(
        &places,
        |i, place, buffers| {
            let buf = buffers.single(place.padded_bytes)?;
            let part = file(place.part);
            if let Some(digest) = known[i] {
                let there = &mut buf[..place.bytes as usize];
                if part.source.read_exact_at(there, place.offset).is_ok()
                    && piece_digest(place, there) == digest
                {
                    return Ok((digest, true));
                }
            }
            job.read_piece(place, buf)?;
            buf[place.bytes as usize..].fill(0);
            let digest = piece_digest(place, buf);
            let written = target.write_at(&part.file, buf, place.offset);
            written
                .and_then(|()| journal.write(target, i, digest))
                .map_err(|e| folder.write_error(file_name(place.part), e))?;
            Ok((digest, false))
        },
        |i, (digest, was_there)| {
            *header.digest(places[i].part) = digest;
            done += places[i].padded_bytes;
            reused += if was_there { places[i].padded_bytes } else { 0 };
            progress(done, total)
        },
    )?;
    job.header = header;

    let start = job.header.encode()?;
    for (name, part) in [(DENSE, &dense), (EXPERTS, &experts)] {
        let begin = if name == EXPERTS { &start[..] } else { &[] };
        // The header declares the records valid, so they are synced first.
        let written = target.sync(&part.file).and_then(|()| target.write_at(&part.file, begin, 0));
        written.and_then(|()| target.sync(&part.file)).map_err(|e| folder.write_error(name, e))?;
    }
    drop((dense, experts));
    for (name, contents) in job.small_files() {
        folder.small(name, contents)?;
    }
    folder.complete(job.small_files().map(|(name, _)| name))?;
    drop(journal);
    // The folder is complete; a leftover journal does no harm.
    let _ = fs::remove_file(out.join(JOURNAL));
    Ok(PackReport { experts: job.header.layers.iter().map(|l| l.experts).sum(), bytes, reused })
}

/// A file being written, and readable for pieces of an earlier run.
struct PartialFile {
    file: File,
    source: DataFile,
}

/// The folder being written.
struct PackFolder<'a, T> {
    target: &'a T,
    path: &'a Path,
    /// Bytes that all files need.
    needed: u64,
}

impl<T: WriteTarget> PackFolder<'_, T> {
    /// Creates the folder, or checks that it contains nothing but an earlier run of `pack`. Returns
    /// whether it was created.
    fn open(&self) -> Result<bool, Error> {
        let path = self.path;
        let refuse = |problem: &str| {
            Err(ToolError::OutputFolder { path: path.into(), problem: problem.into() }.into())
        };
        if !path.exists() {
            fs::create_dir_all(path).map_err(Error::file(path, "cannot make the folder"))?;
            return Ok(true);
        }
        let entries = fs::read_dir(path).map_err(Error::file(path, "cannot read the folder"))?;
        let names: Vec<_> = entries
            .flatten()
            .map(|e| e.file_name())
            .filter(|name| !is_system_entry(name))
            .collect();
        let has = |name: &str| names.iter().any(|n| n == name);
        if has("config.json") {
            return refuse("the folder holds a model; choose another one");
        }
        if !names.is_empty() && !has(JOURNAL) {
            return refuse("the folder holds files; empty it or choose another one");
        }
        Ok(false)
    }

    /// Removes the folder if this run created it.
    fn remove_if_created(&self, created: bool) {
        if created {
            let _ = fs::remove_dir(self.path);
        }
    }

    fn partial(&self, name: &str) -> PathBuf {
        self.path.join(format!("{name}.partial"))
    }

    /// Checks the free space for what is not written yet; `there` bytes are.
    fn check_free_space(&self, there: u64) -> Result<(), Error> {
        let missing = self.needed.saturating_sub(there);
        match self.target.free(self.path).filter(|free| *free < missing) {
            Some(free) => {
                let doing = format!(
                    "cannot pack here: {} are needed, {} are free, {} too few; make room or choose another disk",
                    gb(missing),
                    gb(free),
                    gb(missing - free)
                );
                Err(Error::file(self.path, doing)(io::ErrorKind::StorageFull.into()))
            }
            None => Ok(()),
        }
    }

    /// Opens a file of `bytes` bytes for its pieces.
    fn part(&self, name: &str, bytes: u64) -> Result<PartialFile, Error> {
        let (path, named) = (self.partial(name), self.path.join(name));
        if named.exists() {
            // An earlier run ended while files were being renamed.
            fs::rename(&named, &path).map_err(Error::file(&named, "cannot rename the file"))?;
        }
        let open = || {
            let file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)?;
            file.set_len(bytes)?;
            Ok(file)
        };
        let file = open().map_err(|e| self.write_error(name, e))?;
        Ok(PartialFile { file, source: DataFile::open(&path)? })
    }

    fn small(&self, name: &str, contents: &[u8]) -> Result<(), Error> {
        let write = || {
            let file = File::create(self.partial(name))?;
            self.target.write_at(&file, contents, 0)?;
            self.target.sync(&file)
        };
        write().map_err(|e| self.write_error(name, e))
    }

    fn write_error(&self, name: &str, source: io::Error) -> Error {
        let doing = match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                let free = self.target.free(self.path);
                let free =
                    free.map_or(String::new(), |free| format!(", {} are free now", gb(free)));
                format!(
                    "the disk is full: all files need {}{free}; make room and give the same command again to resume",
                    gb(self.needed)
                )
            }
            _ => "cannot write the file; give the same command again to resume".into(),
        };
        Error::file(self.partial(name), doing)(source)
    }

    /// Renames all files, `config.json` last: a folder without it is not a model.
    fn complete(&self, small: impl Iterator<Item = &'static str>) -> Result<(), Error> {
        let config = "config.json";
        let names = [DENSE, EXPERTS]
            .into_iter()
            .chain(small.filter(|name| *name != config))
            .chain([config]);
        for name in names {
            let path = self.path.join(name);
            fs::rename(self.partial(name), &path)
                .map_err(Error::file(path, "cannot rename the file"))?;
        }
        sync_folder(self.path);
        Ok(())
    }
}

/// Journal of written pieces: a line of 16 hexadecimal digits for the job key, then one per piece
/// with its digest. Lines of unwritten pieces are missing or hold no digits. A piece with a line is
/// reused only if its digest matches.
struct PackJournal {
    file: File,
}

impl PackJournal {
    const LINE: u64 = 17;

    /// Opens or creates the journal of job `key`. Returns it and the digests of pieces already
    /// written.
    fn open<T: WriteTarget>(
        folder: &PackFolder<'_, T>,
        key: u64,
        pieces: usize,
    ) -> Result<(Self, Vec<Option<u64>>), Error> {
        let path = folder.path.join(JOURNAL);
        let cannot = || Error::file(&path, "cannot open the journal");
        let mut options = OpenOptions::new();
        let file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(cannot())?;
        match file.try_lock() {
            Err(TryLockError::WouldBlock) => {
                let problem = "another moeflux is packing into this folder: wait for it".into();
                return Err(Error::Checkpoint { path: folder.path.into(), problem });
            }
            // Some file systems have no locks.
            Ok(()) | Err(TryLockError::Error(_)) => {}
        }
        let mut text = Vec::new();
        (&file).take((pieces as u64 + 1) * Self::LINE).read_to_end(&mut text).map_err(cannot())?;
        let line = |i: usize| {
            let line = text.get(i * Self::LINE as usize..)?.get(..Self::LINE as usize)?;
            let digits = std::str::from_utf8(line).ok()?.strip_suffix('\n')?;
            u64::from_str_radix(digits, 16)
                .ok()
                .filter(|_| digits.bytes().all(|b| b.is_ascii_hexdigit()))
        };
        match line(0) {
            Some(first) if first != key => {
                let problem = "the folder contains a part of another model, of this one before its \
                               files changed, or from another version of moeflux; empty it or \
                               choose another one";
                let path = folder.path.into();
                Err(ToolError::OutputFolder { path, problem: problem.into() }.into())
            }
            Some(_) => Ok((Self { file }, (1..=pieces).map(line).collect())),
            None => {
                let journal = Self { file };
                let begun =
                    journal.file.set_len(0).and_then(|()| journal.line(folder.target, 0, key));
                begun.map_err(|e| folder.write_error("pack", e))?;
                Ok((journal, vec![None; pieces]))
            }
        }
    }

    /// Records a written piece.
    fn write<T: WriteTarget>(&self, target: &T, piece: usize, digest: u64) -> io::Result<()> {
        self.line(target, piece as u64 + 1, digest)
    }

    fn line<T: WriteTarget>(&self, target: &T, line: u64, number: u64) -> io::Result<()> {
        target.write_at(&self.file, format!("{number:016x}\n").as_bytes(), line * Self::LINE)
    }
}
