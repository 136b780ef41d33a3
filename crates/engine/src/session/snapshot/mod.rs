//! Snapshots: a saved point of a session as a file.
//!
//! A snapshot holds one timeline of tokens and what it left in each layer, so that a session can go on from there in another
//! process. Version 1 of the file, all numbers little-endian:
//!
//! | at | what |
//! |---|---|
//! | 0 | `MOEFLUXS` |
//! | 8 | u32: version |
//! | 12 | u32: alignment, 4096 |
//! | 16 | u64: bytes of the header |
//! | 24 | u64: digest of bytes 0 to 24 and of the header |
//! | 32 | the header, JSON: [`Header`] |
//! | next multiple of 4096 | the tokens, u32 each |
//! | next multiple of 4096 | if there are any, the logits after the last token, f32 for each entry of the vocabulary |
//! | next multiple of 4096 | the hot experts, two u32 each: layer and expert |
//! | next multiples of 4096 | the states in the header's order, `places` times `place_bytes` each |
//!
//! and there the file ends. What fills up to a multiple of 4096 is zeros. A digest is XXH3 with 64 bits and seed 0; in the
//! header those of the sections, empty ones included, are one text, 16 hexadecimal digits for each. Where a section lies is
//! computed, not read.
//!
//! A snapshot may come from strangers: every length is checked against the file before it is used, and nothing of it is
//! believed before its digest is. The digests find damage, they do not prove who wrote a file.
//!
//! Files are read, not mapped: pages of a mapping would count as ours beside the memory plan, and one that another process
//! cuts short would end us.

mod folder;
mod header;
mod temporary;
#[cfg(test)]
mod tests;
mod write;

use std::{
    fs::{self, File},
    hash::Hasher,
    io,
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

pub use folder::SnapshotFolder;
pub(crate) use header::{Header, StateShape};
use header::{Section, aligned};
use twox_hash::XxHash3_64;
pub(crate) use write::{Contents, SnapshotWriter};

use crate::{
    base::{
        error::{Error, SnapshotProblem},
        system::IO_STACK as READER_STACK,
    },
    checkpoint::{DataFile, ModelId, digest},
};

/// Bytes that a thread reads at once.
const PIECE: usize = 256 << 10;
/// Most threads that check one file.
const THREADS: usize = 8;

/// What a snapshot must be to go on from here.
#[derive(Clone, Debug)]
pub(crate) struct Expectation {
    pub(crate) model: ModelId,
    /// The session's format of keys and values.
    pub(crate) keys: String,
    /// The one that they have in the file, where it is another one.
    pub(crate) stored: Option<String>,
    pub(crate) exact: bool,
    /// Entries of the vocabulary.
    pub(crate) vocab: usize,
    /// Most tokens of a session.
    pub(crate) context: usize,
    /// All states with the most places that each may have, by layer, and then by which.
    pub(crate) states: Vec<StateShape>,
}

/// A snapshot that is open: its header and its tokens are right, the rest is not looked at yet.
#[derive(Debug)]
pub(crate) struct Snapshot {
    source: DataFile,
    header: Header,
    sections: Vec<Section>,
    tokens: Vec<u32>,
}

impl Snapshot {
    /// Opens a file: reads its header and its tokens.
    ///
    /// # Errors
    /// The file cannot be read, is no snapshot, is of a later version, is cut short, or damaged there.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let cannot = || Error::file(path, "cannot open the saved session; is the path right?");
        let none = || Error::snapshot(path, SnapshotProblem::NotASnapshot);
        // Opening something else than a file may take for ever.
        if !fs::metadata(path).map_err(cannot())?.is_file() {
            return Err(none());
        }
        let file = File::open(path).map_err(cannot())?;
        let source = DataFile::from_open(path, file).map_err(cannot())?.ok_or_else(none)?;
        let (header, sections) = Header::read(&source)?;
        let mut snapshot = Self { source, header, sections, tokens: Vec::new() };
        let vocab = snapshot.header.vocab;
        snapshot.tokens = snapshot.section(Section::TOKENS, u32::from_le_bytes)?;
        if let Some(token) = snapshot.tokens.iter().find(|token| u64::from(**token) >= vocab) {
            return Err(snapshot.damaged(format!("token {token} of a vocabulary of {vocab}")));
        }
        Ok(snapshot)
    }

    /// The file.
    pub(crate) fn path(&self) -> &Path {
        self.source.path()
    }

    /// Bytes of the whole file.
    pub(crate) fn bytes(&self) -> u64 {
        self.source.len()
    }

    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// The tokens, each below the header's `vocab`.
    pub(crate) fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Reads the logits after the last token, `vocab` of them, if they were saved.
    ///
    /// # Errors
    /// They cannot be read, or are damaged.
    pub(crate) fn logits(&self) -> Result<Option<Vec<f32>>, Error> {
        self.header.logits.then(|| self.section(Section::LOGITS, f32::from_le_bytes)).transpose()
    }

    /// Reads the hot experts, each with its layer. Nobody has checked that the model has them.
    ///
    /// # Errors
    /// They cannot be read, or are damaged.
    pub(crate) fn hot(&self) -> Result<Vec<(u32, u32)>, Error> {
        let both = self.section(Section::HOT, u32::from_le_bytes)?;
        Ok(both.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    }

    /// Fills `buf` with bytes of the state `header().states[i]`, from its byte `at`. They are right only if
    /// [`Snapshot::verify`] said so.
    ///
    /// # Errors
    /// There are no such bytes, or they cannot be read.
    pub(crate) fn read_state(&self, i: usize, at: u64, buf: &mut [u8]) -> Result<(), Error> {
        let section = i.checked_add(Section::STATES).and_then(|i| self.sections.get(i));
        let end = at.checked_add(buf.len() as u64);
        match section.filter(|s| end.is_some_and(|end| end <= s.bytes)) {
            Some(section) => {
                self.source.read_exact_at(buf, section.offset + at).map_err(|e| self.read_error(e))
            }
            None => Err(Error::Input(format!(
                "{}: {} bytes at {at} are beyond state {i}; please report this",
                self.path().display(),
                buf.len()
            ))),
        }
    }

    /// That it can be gone on with: same model, same settings, and states that fit.
    ///
    /// # Errors
    /// [`SnapshotProblem::OtherModel`] or [`SnapshotProblem::OtherSettings`].
    pub(crate) fn fits(&self, expected: &Expectation) -> Result<(), Error> {
        let h = &self.header;
        if h.model != expected.model {
            let problem = SnapshotProblem::OtherModel { of: h.name.clone() };
            return Err(Error::snapshot(self.path(), problem));
        }
        let path = |exact| if exact { "with --exact" } else { "without --exact" };
        let tokens = self.tokens.len();
        let other = if h.keys != expected.keys {
            format!(
                "its keys and values are {:?}, those of this session {:?}",
                h.keys, expected.keys
            )
        } else if h.stored != expected.stored {
            let stored = |stored: &Option<String>| stored.clone().unwrap_or_else(|| h.keys.clone());
            let [theirs, ours] = [&h.stored, &expected.stored].map(stored);
            format!("its keys and values were saved as {theirs:?}, where {ours:?} is wanted")
        } else if h.exact != expected.exact {
            format!("it was saved {}, this session runs {}", path(h.exact), path(expected.exact))
        } else if h.vocab != expected.vocab as u64 {
            format!(
                "it is of a vocabulary of {}, this session of one of {}",
                h.vocab, expected.vocab
            )
        } else if tokens > expected.context {
            format!("it has {tokens} tokens, the context of this session is {}", expected.context)
        } else if let Some(other) = other_state(&h.states, &expected.states) {
            other
        } else {
            return Ok(());
        };
        Err(Error::snapshot(self.path(), SnapshotProblem::OtherSettings(other)))
    }

    /// Reads all of it and compares the digests; several threads share the work.
    ///
    /// # Errors
    /// It cannot be read, or is damaged: the first part that is.
    pub(crate) fn verify(&self) -> Result<(), Error> {
        let next = AtomicUsize::new(0);
        let first = Mutex::new(None);
        let work = || {
            let mut buf = vec![0; PIECE];
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(section) = self.sections.get(i) else { break };
                if let Err(error) = self.check(i, *section, &mut buf) {
                    let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
                    if first.as_ref().is_none_or(|(other, _)| i < *other) {
                        *first = Some((i, error));
                    }
                    // What comes later does not matter any more.
                    next.store(self.sections.len(), Ordering::Relaxed);
                }
            }
        };
        let more = thread::available_parallelism()
            .map_or(1, usize::from)
            .min(THREADS)
            .min(self.sections.len());
        thread::scope(|scope| {
            for _ in 1..more {
                let thread =
                    thread::Builder::new().name("snapshot".into()).stack_size(READER_STACK);
                // This thread does what others cannot be started for.
                let _ = thread.spawn_scoped(scope, work);
            }
            work();
        });
        match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    /// That a section is what was written, and that zeros fill it up to the next one.
    fn check(&self, i: usize, section: Section, buf: &mut [u8]) -> Result<(), Error> {
        let mut hash = XxHash3_64::new();
        self.pieces(section.offset..section.end(), buf, |piece| hash.write(piece))?;
        if hash.finish() != self.header.digests.0[i] {
            return Err(self.damaged(self.header.what(i)));
        }
        let mut zeros = true;
        if i + 1 < self.sections.len() {
            let padding = section.end()..aligned(section.end());
            self.pieces(padding, buf, |piece| zeros &= piece.iter().all(|byte| *byte == 0))?;
        }
        match zeros {
            true => Ok(()),
            false => Err(self.damaged(format!("what fills up {}", self.header.what(i)))),
        }
    }

    fn pieces(
        &self,
        mut range: std::ops::Range<u64>,
        buf: &mut [u8],
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), Error> {
        while !range.is_empty() {
            let piece = &mut buf[..(range.end - range.start).min(PIECE as u64) as usize];
            self.source.read_exact_at(piece, range.start).map_err(|e| self.read_error(e))?;
            take(piece);
            range.start += piece.len() as u64;
        }
        Ok(())
    }

    /// Reads a section of numbers, of which the header has checked that they are not too many.
    fn section<T>(&self, i: usize, number: fn([u8; 4]) -> T) -> Result<Vec<T>, Error> {
        let section = self.sections[i];
        let mut bytes = vec![0; section.bytes as usize];
        self.source.read_exact_at(&mut bytes, section.offset).map_err(|e| self.read_error(e))?;
        if digest(&bytes) != self.header.digests.0[i] {
            return Err(self.damaged(self.header.what(i)));
        }
        Ok(bytes.as_chunks().0.iter().map(|four| number(*four)).collect())
    }

    fn damaged(&self, what: impl Into<String>) -> Error {
        Error::snapshot(self.path(), SnapshotProblem::Damaged { what: what.into() })
    }

    fn read_error(&self, error: io::Error) -> Error {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => {
                Error::snapshot(self.path(), SnapshotProblem::Truncated)
            }
            _ => Error::file(
                self.path(),
                "cannot read the saved session; the session is as it was",
            )(error),
        }
    }
}

/// The first state that is not as expected.
fn other_state(saved: &[StateShape], expected: &[StateShape]) -> Option<String> {
    if saved.len() != expected.len() {
        return Some(format!("it has {} states, this session has {}", saved.len(), expected.len()));
    }
    saved.iter().zip(expected).find_map(|(s, e)| {
        let same = (s.layer, s.which, s.place_bytes, &s.shape)
            == (e.layer, e.which, e.place_bytes, &e.shape);
        (!same || s.places > e.places).then(|| {
            let say = |s: &StateShape| {
                format!(
                    "state {} of layer {} ({:?}, {} places of {} bytes)",
                    s.which, s.layer, s.shape, s.places, s.place_bytes
                )
            };
            format!("it has {}, this session has room for {}", say(s), say(e))
        })
    })
}

/// The folder that a file lies in.
fn folder_of(path: &Path) -> PathBuf {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder.into(),
        _ => ".".into(),
    }
}
