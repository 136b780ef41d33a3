//! Snapshot writer: writes a temporary file that replaces the target once all of it is on disk.

use std::{
    hash::Hasher,
    io,
    path::{Path, PathBuf},
};

use moeflux_base::{
    AtomicFile, Error, Readers, SnapshotProblem,
    seam::{SystemDisk, WriteTarget, gb},
};
use moeflux_model::{checkpoint::ModelId, seam::Digests};
use twox_hash::XxHash3_64;

use super::snapshot_header::{MAX_STRING_BYTES, SavedState, Section, SnapshotHeader};
use crate::session::prefix_key::PrefixKey;

/// Contents of a snapshot, except the bytes of the states.
#[derive(Clone, Debug)]
pub(crate) struct SnapshotContents<'a> {
    pub(crate) model: ModelId,
    /// Identity of the model in its files, of an entry of a prefix cache.
    pub(crate) files: Option<ModelId>,
    /// Name of the model's folder, for messages; truncated if too long.
    pub(crate) name: &'a str,
    /// Element format of the session's KV cache: "f32", "f16", "q8".
    pub(crate) kv_format: &'a str,
    /// Element format of the KV cache in the file, if different.
    pub(crate) stored: Option<&'a str>,
    /// Whether precision was lost.
    pub(crate) lossy: bool,
    pub(crate) exact: bool,
    /// Number of the division of experts between a card and the host's processor, if they divide
    /// any.
    pub(crate) experts: Option<String>,
    /// Vocabulary size.
    pub(crate) vocab: usize,
    /// Number of positions ever written.
    pub(crate) written: u64,
    pub(crate) key: PrefixKey<'a>,
    /// Logits after the last token, `vocab` values.
    pub(crate) logits: Option<&'a [f32]>,
    /// Pairs of layer and expert.
    pub(crate) hot: &'a [(u32, u32)],
    /// Ordered by `layer`, then `index`.
    pub(crate) states: Vec<SavedState>,
}

impl SnapshotContents<'_> {
    /// Size of the file in bytes.
    ///
    /// # Errors
    /// The contents are not valid.
    pub(crate) fn bytes(&self) -> Result<u64, Error> {
        sections(&self.header()?).map(|sections| end(&sections))
    }

    /// The header, with zeros for digests.
    fn header(&self) -> Result<SnapshotHeader, Error> {
        let header = SnapshotHeader {
            model: self.model,
            files: self.files,
            name: self.name.chars().take(MAX_STRING_BYTES / 4).collect(),
            kv_format: self.kv_format.into(),
            stored: self.stored.map(Into::into),
            lossy: self.lossy,
            exact: self.exact,
            experts: self.experts.clone(),
            computed_on_host: Vec::new(),
            vocab: self.vocab as u64,
            tokens: self.key.len() as u64,
            contents: self.key.contents.to_vec(),
            written: self.written,
            logits: self.logits.is_some(),
            hot: self.hot.len() as u64,
            digests: Digests(vec![0; Section::STATES + self.states.len()]),
            states: self.states.clone(),
        };
        let logits = self.logits.is_none_or(|logits| logits.len() == self.vocab);
        if !logits || self.key.tokens.iter().any(|token| *token as usize >= self.vocab) {
            return Err(unwritable("its tokens and logits are not of its vocabulary"));
        }
        header.validate().map_err(|problem| unwritable(&problem))?;
        Ok(header)
    }
}

fn sections(header: &SnapshotHeader) -> Result<Vec<Section>, Error> {
    let sections = header.sections(header.encode()?.len() as u64);
    sections.ok_or_else(|| unwritable("it has more bytes than can be counted"))
}

/// End of the last section.
fn end(sections: &[Section]) -> u64 {
    sections.last().map_or(0, Section::end)
}

fn unwritable(problem: &str) -> Error {
    Error::internal(format!("the session cannot be saved: {problem}; please report this"))
}

/// A snapshot being written. If dropped before [`Self::finish`], an older file stays unchanged.
pub(crate) struct SnapshotWriter<T: WriteTarget = SystemDisk> {
    target: T,
    path: PathBuf,
    temporary: AtomicFile,
    header: SnapshotHeader,
    sections: Vec<Section>,
    /// Current section, and the bytes of it that are written.
    section: usize,
    done: u64,
    /// Hash of those bytes.
    hash: XxHash3_64,
}

impl SnapshotWriter {
    /// Creates the file and writes everything but the states. Removes what killed writers of the
    /// same file left.
    ///
    /// # Errors
    /// The folder cannot be written, or the disk is too full.
    pub(crate) fn create(path: &Path, contents: &SnapshotContents<'_>) -> Result<Self, Error> {
        Self::create_on(SystemDisk, path, contents)
    }
}

impl<T: WriteTarget> SnapshotWriter<T> {
    pub(super) fn create_on(
        target: T,
        path: &Path,
        contents: &SnapshotContents<'_>,
    ) -> Result<Self, Error> {
        let header = contents.header()?;
        let sections = sections(&header)?;
        if path.is_dir() || path.file_name().is_none() {
            return Err(Error::snapshot(path, SnapshotProblem::IsFolder));
        }
        let cannot =
            || Error::file(path, "cannot write here; give a path in a folder that can be written");
        let temporary = AtomicFile::create(path, Readers::Owner).map_err(cannot())?;
        let mut writer = Self {
            target,
            path: path.into(),
            temporary,
            header,
            sections,
            section: 0,
            done: 0,
            hash: XxHash3_64::new(),
        };
        writer.check_free_space()?;
        writer.temporary.file().set_len(writer.bytes()).map_err(|e| writer.error(e))?;
        let bytes =
            |numbers: &mut dyn Iterator<Item = [u8; 4]>| numbers.flatten().collect::<Vec<_>>();
        writer.write(&bytes(&mut contents.key.tokens.iter().map(|token| token.to_le_bytes())))?;
        let logits = contents.logits.unwrap_or_default();
        writer.write(&bytes(&mut logits.iter().map(|logit| logit.to_le_bytes())))?;
        let hot = contents.hot.iter().flat_map(|(layer, expert)| [*layer, *expert]);
        writer.write(&bytes(&mut hot.map(u32::to_le_bytes)))?;
        Ok(writer)
    }

    fn bytes(&self) -> u64 {
        end(&self.sections)
    }

    /// Writes the next bytes of the states, which are concatenated in order; a piece may end
    /// anywhere.
    ///
    /// # Errors
    /// The disk is full or fails, or all states are written.
    pub(crate) fn write(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        loop {
            let Some(section) = self.sections.get(self.section) else {
                return if bytes.is_empty() {
                    Ok(())
                } else {
                    Err(unwritable("its states are too long"))
                };
            };
            let left = section.bytes - self.done;
            let len = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let (piece, rest) = bytes.split_at(len);
            if !piece.is_empty() {
                let written =
                    self.target.write_at(self.temporary.file(), piece, section.offset + self.done);
                written.map_err(|e| self.error(e))?;
                self.hash.write(piece);
                self.done += len as u64;
                bytes = rest;
            }
            if (len as u64) < left {
                return Ok(());
            }
            self.header.digests.0[self.section] = std::mem::take(&mut self.hash).finish();
            self.section += 1;
            self.done = 0;
        }
    }

    /// Syncs the file to disk and renames it to its target, replacing an existing file.
    ///
    /// # Errors
    /// States are missing, the disk is full or fails, or the target cannot be replaced.
    pub(crate) fn finish(self) -> Result<(), Error> {
        if self.section < self.sections.len() {
            return Err(unwritable(&format!(
                "{} is missing",
                self.header.section_name(self.section)
            )));
        }
        let start = self.header.encode()?;
        let file = self.temporary.file();
        let written = self.target.write_at(file, &start, 0).and_then(|()| self.target.sync(file));
        written.map_err(|e| self.error(e))?;
        let cannot = "cannot replace the file; the previous one is unchanged";
        self.temporary.place().map_err(Error::file(&self.path, cannot))
    }

    fn check_free_space(&self) -> Result<(), Error> {
        let needed = self.bytes();
        match self.target.free(self.temporary.folder()).filter(|free| *free < needed) {
            Some(free) => {
                let doing = format!(
                    "cannot save the session here: {} are needed, {} are free, {} too few; make room or choose another disk",
                    gb(needed),
                    gb(free),
                    gb(needed - free)
                );
                Err(Error::file(&self.path, doing)(io::ErrorKind::StorageFull.into()))
            }
            None => Ok(()),
        }
    }

    fn error(&self, source: io::Error) -> Error {
        let doing = match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => format!(
                "the disk is full: the saved session needs {}; make room and save it again; the \
                 previous file is unchanged",
                gb(self.bytes())
            ),
            _ => "cannot write the saved session; the previous file is unchanged".into(),
        };
        Error::file(&self.path, doing)(source)
    }
}
