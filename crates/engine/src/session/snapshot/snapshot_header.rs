//! Header of a snapshot: encoding, decoding, and validation of every field.

use moeflux_base::{Error, SnapshotProblem};
use moeflux_model::{
    checkpoint::ModelId,
    seam::{ALIGN, DataFile, Digests, Frame, FrameError, MAX_STATES},
};
use serde::{Deserialize, Serialize};

use crate::runtime::contents::ContentDigest;

/// Headers over 16 MiB are refused; thousands of layers need less.
pub(super) const FRAME: Frame =
    Frame { magic: *b"MOEFLUXS", version: 3, oldest: 2, max_header: 16 << 20 };
/// Maximum count of tokens, hot experts and vocabulary entries. Bounds the memory of one read, even
/// from a huge sparse file.
const MAX_COUNT: u64 = 1 << 26;
/// Maximum side of an image in tokens.
const MAX_SIDE: usize = 1 << 16;
/// Maximum bytes of a string.
pub(super) const MAX_STRING_BYTES: usize = 256;

/// Shape and size of one layer state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SavedState {
    /// Layer index.
    pub(crate) layer: usize,
    /// Index among the layer's states: 0 or 1.
    #[serde(rename = "which")]
    pub(crate) index: u8,
    /// Number of saved entries; in an expectation, the maximum.
    #[serde(rename = "places")]
    pub(crate) entries: u64,
    /// Bytes per entry.
    #[serde(rename = "place_bytes")]
    pub(crate) entry_bytes: u64,
    /// Contents and layout of an entry; compared, never parsed.
    pub(crate) shape: String,
}

/// Header fields, as stored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SnapshotHeader {
    pub(crate) model: ModelId,
    /// Identity of the model in its files, of an entry of a prefix cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) files: Option<ModelId>,
    /// Name of the model's folder, for messages.
    pub(crate) name: String,
    /// Element format of the session's KV cache: "f32", "f16", "q8".
    #[serde(rename = "keys")]
    pub(crate) kv_format: String,
    /// Element format of the KV cache in the file, if it is a smaller one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stored: Option<String>,
    /// Whether precision was lost, in this file or before.
    pub(crate) lossy: bool,
    /// Whether it was computed on the exact path.
    pub(crate) exact: bool,
    /// Number of the division of experts between a card and the host's processor, if they divided
    /// any. Another division rounds differently.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) experts: Option<String>,
    /// The same in files of earlier versions: by layer, the first expert that the host computed.
    #[serde(default, skip_serializing)]
    pub(crate) computed_on_host: Vec<u32>,
    /// Vocabulary size.
    pub(crate) vocab: u64,
    /// Number of tokens.
    pub(crate) tokens: u64,
    /// Contents that token ids do not tell, ascending by place. Version 2 has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) contents: Vec<ContentDigest>,
    /// Number of positions ever written, truncated tokens included; at least `tokens`.
    pub(crate) written: u64,
    /// Whether logits are stored.
    pub(crate) logits: bool,
    /// Number of hot experts.
    pub(crate) hot: u64,
    /// Ordered by `layer`, then `index`.
    pub(crate) states: Vec<SavedState>,
    /// One per section.
    pub(crate) digests: Digests,
}

/// A section of the file, after the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Section {
    /// Offset in the file, in bytes.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Section {
    /// Index of the tokens.
    pub(super) const TOKENS: usize = 0;
    /// Index of the logits.
    pub(super) const LOGITS: usize = 1;
    /// Index of the hot experts.
    pub(super) const HOT: usize = 2;
    /// Index of the first state.
    pub(super) const STATES: usize = 3;

    pub(super) fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// Offset of the next section after `end`.
pub(super) fn aligned(end: u64) -> u64 {
    end.next_multiple_of(ALIGN)
}

fn damaged(what: impl Into<String>) -> SnapshotProblem {
    SnapshotProblem::Damaged { what: what.into() }
}

impl SnapshotHeader {
    /// Whether experts were divided otherwise than by the division with this number.
    pub(crate) fn has_other_placement(&self, own: Option<&str>) -> bool {
        self.experts.as_deref() != own || !self.computed_on_host.is_empty()
    }

    /// Encodes the start of the file, up to the first section. Its length does not depend on the
    /// digests.
    pub(super) fn encode(&self) -> Result<Vec<u8>, Error> {
        FRAME.encode(self).map_err(|e| {
            Error::internal(format!(
                "the header of a saved session cannot be written: {e}; please report this"
            ))
        })
    }

    /// Reads the header and computes the sections. All are inside the file, which ends with the
    /// last one.
    ///
    /// # Errors
    /// The file cannot be read, has another type or version, is truncated, or is inconsistent.
    pub(super) fn read(source: &DataFile) -> Result<(Self, Vec<Section>), Error> {
        let path = source.path();
        let bad = |problem| Err(Error::snapshot(path, problem));
        let unreadable = Error::file(path, "cannot read the header of the saved session");
        let (len, known) = (source.len(), FRAME.version);
        let (header, end) = match FRAME.read::<Self>(source) {
            Ok(read) => read,
            Err(FrameError::Unreadable(e)) => return Err(unreadable(e)),
            Err(FrameError::Foreign) => return bad(SnapshotProblem::NotASnapshot),
            Err(FrameError::Version(found)) => {
                return bad(SnapshotProblem::OtherVersion { found, known });
            }
            Err(FrameError::Claims { .. }) => return bad(damaged("its first bytes")),
            Err(FrameError::Short) => return bad(SnapshotProblem::Truncated),
            Err(FrameError::Damaged) => return bad(damaged("its header")),
            Err(FrameError::Header(e)) => return bad(damaged(format!("its header: {e}"))),
        };
        if let Err(what) = header.validate() {
            return bad(damaged(format!("its header: {what}")));
        }
        let Some(sections) = header.sections(aligned(end)) else {
            return bad(damaged("its header: it asks for more bytes than can be counted"));
        };
        match sections.last().map_or(0, Section::end) {
            end if end > len => return bad(SnapshotProblem::Truncated),
            end if end < len => return bad(damaged("bytes after its end")),
            _ => {}
        }
        let mut padding = vec![0; (sections[0].offset - end) as usize];
        source.read_exact_at(&mut padding, end).map_err(unreadable)?;
        if padding.iter().any(|byte| *byte != 0) {
            return bad(damaged("the padding of its header"));
        }
        Ok((header, sections))
    }

    /// Validates counts and strings.
    pub(super) fn validate(&self) -> Result<(), String> {
        if self.written < self.tokens {
            return Err(format!(
                "{} positions were written for {} tokens",
                self.written, self.tokens
            ));
        }
        let mut grids = self.contents.iter().filter_map(|content| content.grid);
        if let Some(grid) =
            grids.find(|grid| !grid.iter().all(|side| (1..=MAX_SIDE).contains(side)))
        {
            return Err(format!("expected sides of an image from 1 to {MAX_SIDE}, got {grid:?}"));
        }
        let place = |content: &ContentDigest| content.place as u64;
        let ends_before = |content: &ContentDigest, next: &ContentDigest| {
            content.place <= next.place && content.tokens().end <= next.place
        };
        if self.contents.windows(2).any(|pair| !ends_before(&pair[0], &pair[1]))
            || self.contents.last().is_some_and(|content| place(content) >= self.tokens)
        {
            return Err("its contents are not ordered by token".into());
        }
        let counts = [
            ("tokens", self.tokens),
            ("positions", self.written),
            ("hot experts", self.hot),
            ("vocabulary entries", self.vocab),
        ];
        if let Some((what, count)) = counts.into_iter().find(|(_, count)| *count > MAX_COUNT) {
            return Err(format!("{count} {what} are too many"));
        }
        let texts = self
            .states
            .iter()
            .map(|s| &s.shape)
            .chain([&self.name, &self.kv_format])
            .chain(&self.stored);
        if let Some(text) = texts.into_iter().find(|text| text.len() > MAX_STRING_BYTES) {
            return Err(format!("a text of {} bytes is too long", text.len()));
        }
        let place = |s: &SavedState| (s.layer, s.index);
        if self.states.iter().any(|s| usize::from(s.index) >= MAX_STATES)
            || self.states.windows(2).any(|pair| place(&pair[0]) >= place(&pair[1]))
        {
            return Err("its states are not ordered by layer".into());
        }
        match (self.digests.0.len(), Section::STATES + self.states.len()) {
            (digests, sections) if digests != sections => {
                Err(format!("it has {digests} digests for {sections} sections"))
            }
            _ => Ok(()),
        }
    }

    /// Sections of a file whose first section starts at `data`; `None` on overflow.
    pub(super) fn sections(&self, data: u64) -> Option<Vec<Section>> {
        let logits = if self.logits { self.vocab.checked_mul(4)? } else { 0 };
        let first = [Some(self.tokens.checked_mul(4)?), Some(logits), self.hot.checked_mul(8)];
        let states = self.states.iter().map(|s| s.entries.checked_mul(s.entry_bytes));
        let mut next = data;
        let place = |bytes: Option<u64>| {
            let section = Section { offset: next, bytes: bytes? };
            next = next.checked_add(section.bytes)?.checked_next_multiple_of(ALIGN)?;
            Some(section)
        };
        first.into_iter().chain(states).map(place).collect()
    }

    /// Name of a section, for messages.
    pub(super) fn section_name(&self, section: usize) -> String {
        match section {
            Section::TOKENS => "its tokens".into(),
            Section::LOGITS => "its logits".into(),
            Section::HOT => "its hot experts".into(),
            _ => match self.states.get(section - Section::STATES) {
                Some(s) => format!("state {} of layer {}", s.index, s.layer),
                None => "its end".into(),
            },
        }
    }
}
