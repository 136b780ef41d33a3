//! A snapshot as it is read.

use std::{
    fs::{self, File},
    hash::Hasher,
    io,
    path::Path,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
};

use moeflux_base::{Error, SnapshotProblem, seam::IO_STACK};
use moeflux_model::{
    checkpoint::ModelId,
    seam::{DataFile, digest},
};
use twox_hash::XxHash3_64;

use super::snapshot_header::{SavedState, Section, SnapshotHeader, aligned};
use crate::session::prefix_key::PrefixKey;

/// Bytes that a thread reads at once.
const READ_BYTES: usize = 256 << 10;
/// Maximum threads that verify one file.
const MAX_THREADS: usize = 8;

/// Requirements on a snapshot that an engine can restore.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotRequirements {
    pub(crate) model: ModelId,
    /// Identity of the model in its files, which an entry of a prefix cache must have.
    pub(crate) files: Option<ModelId>,
    /// Element format of the session's KV cache.
    pub(crate) kv_format: String,
    /// Element format of the KV cache in the file, if different.
    pub(crate) stored: Option<String>,
    pub(crate) exact: bool,
    /// Number of the division of experts between a card and the host's processor.
    pub(crate) experts: Option<String>,
    /// Whether an entry of a prefix cache must have that division.
    pub(crate) needs_division: bool,
    /// Vocabulary size.
    pub(crate) vocab: usize,
    /// Maximum tokens of a session.
    pub(crate) context: usize,
    /// All states with their maximum number of entries, ordered by `layer`, then `index`.
    pub(crate) states: Vec<SavedState>,
}

/// An open snapshot. Header and tokens are verified, the rest is not yet.
#[derive(Debug)]
pub(crate) struct Snapshot {
    source: DataFile,
    header: SnapshotHeader,
    sections: Vec<Section>,
    tokens: Vec<u32>,
}

impl Snapshot {
    /// Opens a file and reads its header and tokens.
    ///
    /// # Errors
    /// The file cannot be read, is not a snapshot, has another version, is truncated, or has a
    /// damaged header or tokens.
    pub(crate) fn open(path: &Path) -> Result<Self, Error> {
        let cannot = || Error::file(path, "cannot open the saved session; is the path right?");
        let none = || Error::snapshot(path, SnapshotProblem::NotASnapshot);
        // Opening a pipe or a device could block.
        if !fs::metadata(path).map_err(cannot())?.is_file() {
            return Err(none());
        }
        let file = File::open(path).map_err(cannot())?;
        let source = DataFile::from_open(path, file).map_err(cannot())?.ok_or_else(none)?;
        let (header, sections) = SnapshotHeader::read(&source)?;
        let mut snapshot = Self { source, header, sections, tokens: Vec::new() };
        let vocab = snapshot.header.vocab;
        snapshot.tokens = snapshot.section(Section::TOKENS, u32::from_le_bytes)?;
        if let Some(token) = snapshot.tokens.iter().find(|token| u64::from(**token) >= vocab) {
            return Err(snapshot.damaged(format!("token {token} of a vocabulary of {vocab}")));
        }
        Ok(snapshot)
    }

    /// Path of the file.
    pub(crate) fn path(&self) -> &Path {
        self.source.path()
    }

    /// Size of the file in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.source.len()
    }

    pub(crate) fn header(&self) -> &SnapshotHeader {
        &self.header
    }

    /// Contents of the sequence. Tokens are below the header's `vocab`.
    pub(crate) fn key(&self) -> PrefixKey<'_> {
        PrefixKey { tokens: &self.tokens, contents: &self.header.contents }
    }

    /// Reads the logits after the last token, `vocab` values, if stored.
    ///
    /// # Errors
    /// The logits cannot be read, or are damaged.
    pub(crate) fn logits(&self) -> Result<Option<Vec<f32>>, Error> {
        self.header.logits.then(|| self.section(Section::LOGITS, f32::from_le_bytes)).transpose()
    }

    /// Reads the hot experts as (layer, expert). Not checked against the model.
    ///
    /// # Errors
    /// The list cannot be read, or is damaged.
    pub(crate) fn hot(&self) -> Result<Vec<(u32, u32)>, Error> {
        let both = self.section(Section::HOT, u32::from_le_bytes)?;
        Ok(both.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    }

    /// Fills `buf` with bytes of the state `header().states[i]` from `offset`. Only valid after
    /// [`Snapshot::verify`].
    ///
    /// # Errors
    /// The range is out of bounds, or cannot be read.
    pub(crate) fn read_state(&self, i: usize, offset: u64, buf: &mut [u8]) -> Result<(), Error> {
        let section = i.checked_add(Section::STATES).and_then(|i| self.sections.get(i));
        let end = offset.checked_add(buf.len() as u64);
        match section.filter(|s| end.is_some_and(|end| end <= s.bytes)) {
            Some(section) => self
                .source
                .read_exact_at(buf, section.offset + offset)
                .map_err(|e| self.read_error(e)),
            None => Err(Error::internal(format!(
                "{}: {} bytes at {offset} are beyond state {i}; please report this",
                self.path().display(),
                buf.len()
            ))),
        }
    }

    /// Checks that the model, the settings and the shapes of the states match.
    ///
    /// # Errors
    /// [`SnapshotProblem::OtherModel`] or [`SnapshotProblem::OtherSettings`].
    pub(crate) fn fits(&self, expected: &SnapshotRequirements) -> Result<(), Error> {
        let h = &self.header;
        if h.model != expected.model || h.files.is_some() && h.files != expected.files {
            let problem = SnapshotProblem::OtherModel { of: h.name.clone() };
            return Err(Error::snapshot(self.path(), problem));
        }
        let path = |exact| if exact { "with --exact" } else { "without --exact" };
        let tokens = self.tokens.len();
        let other = if h.kv_format != expected.kv_format {
            format!(
                "its KV cache is {:?}, that of this session {:?}",
                h.kv_format, expected.kv_format
            )
        } else if h.stored != expected.stored {
            let stored =
                |stored: &Option<String>| stored.clone().unwrap_or_else(|| h.kv_format.clone());
            let [theirs, ours] = [&h.stored, &expected.stored].map(stored);
            format!("its KV cache was saved as {theirs:?}, {ours:?} is expected")
        } else if h.exact != expected.exact {
            format!("it was saved {}, this session runs {}", path(h.exact), path(expected.exact))
        } else if expected.needs_division
            && h.files.is_some()
            && h.has_other_placement(expected.experts.as_deref())
        {
            let plan = |number: &Option<String>| number.clone().unwrap_or_else(|| "none".into());
            let [own, expected] = [&h.experts, &expected.experts].map(plan);
            format!("its experts were divided by plan {own}, expected plan {expected}")
        } else if h.vocab != expected.vocab as u64 {
            format!("it has a vocabulary of {}, this session one of {}", h.vocab, expected.vocab)
        } else if tokens > expected.context {
            format!("it has {tokens} tokens, the context of this session is {}", expected.context)
        } else if let Some(other) = other_state(&h.states, &expected.states) {
            other
        } else {
            return Ok(());
        };
        Err(Error::snapshot(self.path(), SnapshotProblem::OtherSettings(other)))
    }

    /// Reads the whole file and compares the digests, on several threads.
    ///
    /// # Errors
    /// The file cannot be read, or is damaged: reports the first damaged section.
    pub(crate) fn verify(&self) -> Result<(), Error> {
        let next = AtomicUsize::new(0);
        let first = Mutex::new(None);
        let work = || {
            let mut buf = vec![0; READ_BYTES];
            loop {
                let i = next.fetch_add(1, Ordering::Relaxed);
                let Some(section) = self.sections.get(i) else { break };
                if let Err(error) = self.verify_section(i, *section, &mut buf) {
                    let mut first = first.lock().unwrap_or_else(PoisonError::into_inner);
                    if first.as_ref().is_none_or(|(other, _)| i < *other) {
                        *first = Some((i, error));
                    }
                    // Later sections need no check.
                    next.store(self.sections.len(), Ordering::Relaxed);
                }
            }
        };
        let more = thread::available_parallelism()
            .map_or(1, usize::from)
            .min(MAX_THREADS)
            .min(self.sections.len());
        thread::scope(|scope| {
            for _ in 1..more {
                let thread = thread::Builder::new().name("snapshot".into()).stack_size(IO_STACK);
                // If no thread can be started, this one does all the work.
                let _ = thread.spawn_scoped(scope, work);
            }
            work();
        });
        match first.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, error)) => Err(error),
            None => Ok(()),
        }
    }

    /// Verifies the digest of a section and that its padding is zero.
    fn verify_section(&self, i: usize, section: Section, buf: &mut [u8]) -> Result<(), Error> {
        let mut hash = XxHash3_64::new();
        self.read_range(section.offset..section.end(), buf, |piece| hash.write(piece))?;
        if hash.finish() != self.header.digests.0[i] {
            return Err(self.damaged(self.header.section_name(i)));
        }
        let mut zeros = true;
        if i + 1 < self.sections.len() {
            let padding = section.end()..aligned(section.end());
            self.read_range(padding, buf, |piece| zeros &= piece.iter().all(|byte| *byte == 0))?;
        }
        match zeros {
            true => Ok(()),
            false => Err(self.damaged(format!("the padding of {}", self.header.section_name(i)))),
        }
    }

    fn read_range(
        &self,
        mut range: std::ops::Range<u64>,
        buf: &mut [u8],
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), Error> {
        while !range.is_empty() {
            let piece = &mut buf[..(range.end - range.start).min(READ_BYTES as u64) as usize];
            self.source.read_exact_at(piece, range.start).map_err(|e| self.read_error(e))?;
            take(piece);
            range.start += piece.len() as u64;
        }
        Ok(())
    }

    /// Reads a section of 4-byte values. The header check bounds its length.
    fn section<T>(&self, i: usize, decode: fn([u8; 4]) -> T) -> Result<Vec<T>, Error> {
        let section = self.sections[i];
        let mut bytes = vec![0; section.bytes as usize];
        self.source.read_exact_at(&mut bytes, section.offset).map_err(|e| self.read_error(e))?;
        if digest(&bytes) != self.header.digests.0[i] {
            return Err(self.damaged(self.header.section_name(i)));
        }
        Ok(bytes.as_chunks().0.iter().map(|bytes| decode(*bytes)).collect())
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

/// Describes the first state that differs from the expected one.
fn other_state(saved: &[SavedState], expected: &[SavedState]) -> Option<String> {
    if saved.len() != expected.len() {
        return Some(format!("it has {} states, this session has {}", saved.len(), expected.len()));
    }
    saved.iter().zip(expected).find_map(|(s, e)| {
        let same = (s.layer, s.index, s.entry_bytes, &s.shape)
            == (e.layer, e.index, e.entry_bytes, &e.shape);
        (!same || s.entries > e.entries).then(|| {
            let say = |s: &SavedState| {
                format!(
                    "state {} of layer {} ({:?}, {} entries of {} bytes)",
                    s.index, s.layer, s.shape, s.entries, s.entry_bytes
                )
            };
            format!("it has {}, this session has room for {}", say(s), say(e))
        })
    })
}
#[cfg(test)]
pub(super) mod tests;
