//! The header of a snapshot: writing it, reading it, and believing none of it unchecked.

use serde::{Deserialize, Serialize};

use crate::{
    base::error::{Error, SnapshotProblem},
    checkpoint::{
        DataFile, ModelId,
        frame::{ALIGN, Frame, FrameError},
        packed::Digests,
    },
};

/// Headers beyond 16 MiB are refused; thousands of layers have less.
pub(super) const FRAME: Frame = Frame { magic: *b"MOEFLUXS", version: 1, max_header: 16 << 20 };
/// Most tokens, most experts that are hot, and most entries of a vocabulary: what is read into memory at once stays
/// small, even of a file that is huge and empty.
const MAX_COUNT: u64 = 1 << 26;
/// Most bytes of a text.
pub(super) const MAX_TEXT: usize = 256;

/// What a state of a layer is, and how much of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StateShape {
    /// The layer's number.
    pub(crate) layer: usize,
    /// Which of its states: 0 or 1.
    pub(crate) which: u8,
    /// How many places are saved; of what is expected, the most that there may be.
    pub(crate) places: u64,
    /// Bytes of a place.
    pub(crate) place_bytes: u64,
    /// What a place holds and in which order; compared, never parsed.
    pub(crate) shape: String,
}

/// What the file says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    pub(crate) model: ModelId,
    /// The name of the model's folder, for messages.
    pub(crate) name: String,
    /// The session's format of keys and values: "f32", "f16", "q8".
    pub(crate) keys: String,
    /// The format that they have in the file, where it is another one, of fewer bits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) stored: Option<String>,
    /// Whether they have lost something of what was computed, here or before.
    pub(crate) lossy: bool,
    /// Whether the exact path computed it.
    pub(crate) exact: bool,
    /// Entries of the vocabulary.
    pub(crate) vocab: u64,
    /// How many tokens.
    pub(crate) tokens: u64,
    /// Positions that were ever written, those of tokens that were taken back among them; as many as tokens, or more.
    pub(crate) written: u64,
    /// Whether there are logits.
    pub(crate) logits: bool,
    /// How many experts are hot.
    pub(crate) hot: u64,
    /// By layer, and then by which.
    pub(crate) states: Vec<StateShape>,
    /// One for each section.
    pub(crate) digests: Digests,
}

/// A part of the file behind the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Section {
    /// First byte in the file.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

impl Section {
    /// The tokens.
    pub(super) const TOKENS: usize = 0;
    /// The logits.
    pub(super) const LOGITS: usize = 1;
    /// The hot experts.
    pub(super) const HOT: usize = 2;
    /// The first state.
    pub(super) const STATES: usize = 3;

    pub(super) fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// The place behind `end` where a section may begin.
pub(super) fn aligned(end: u64) -> u64 {
    end.next_multiple_of(ALIGN)
}

fn damaged(what: impl Into<String>) -> SnapshotProblem {
    SnapshotProblem::Damaged { what: what.into() }
}

impl Header {
    /// The start of the file, up to where the sections begin. Its length does not depend on the digests.
    pub(super) fn encode(&self) -> Result<Vec<u8>, Error> {
        FRAME.encode(self).map_err(|e| {
            Error::Input(format!(
                "the header of a saved session cannot be written: {e}; please report this"
            ))
        })
    }

    /// Reads the header and says where the sections lie, all of them inside of the file, which ends with the last one.
    ///
    /// # Errors
    /// The file cannot be read, is of another kind or version, is cut short, or contradicts itself.
    pub(super) fn read(source: &DataFile) -> Result<(Self, Vec<Section>), Error> {
        let path = source.path();
        let bad = |problem| Err(Error::snapshot(path, problem));
        let unreadable = Error::file(path, "cannot read the header of the saved session");
        let (len, known) = (source.len(), FRAME.version);
        let (header, end) = match FRAME.read::<Self>(source) {
            Ok(read) => read,
            Err(FrameError::Unreadable(e)) => return Err(unreadable(e)),
            Err(FrameError::Foreign) => return bad(SnapshotProblem::NotASnapshot),
            Err(FrameError::Version(found)) if found > known => {
                return bad(SnapshotProblem::FutureVersion { found, known });
            }
            Err(FrameError::Version(_) | FrameError::Claims { .. }) => {
                return bad(damaged("its first bytes"));
            }
            Err(FrameError::Short) => return bad(SnapshotProblem::Truncated),
            Err(FrameError::Damaged) => return bad(damaged("its header")),
            Err(FrameError::Header(e)) => return bad(damaged(format!("its header: {e}"))),
        };
        if let Err(what) = header.check() {
            return bad(damaged(format!("its header: {what}")));
        }
        let Some(sections) = header.sections(aligned(end)) else {
            return bad(damaged("its header: it asks for more bytes than can be counted"));
        };
        match sections.last().map_or(0, Section::end) {
            end if end > len => return bad(SnapshotProblem::Truncated),
            end if end < len => return bad(damaged("bytes behind its end")),
            _ => {}
        }
        let mut padding = vec![0; (sections[0].offset - end) as usize];
        source.read_exact_at(&mut padding, end).map_err(unreadable)?;
        if padding.iter().any(|byte| *byte != 0) {
            return bad(damaged("what fills up its header"));
        }
        Ok((header, sections))
    }

    /// That its numbers and texts can be those of a session.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.written < self.tokens {
            return Err(format!(
                "{} positions were written for {} tokens",
                self.written, self.tokens
            ));
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
            .chain([&self.name, &self.keys])
            .chain(&self.stored);
        if let Some(text) = texts.into_iter().find(|text| text.len() > MAX_TEXT) {
            return Err(format!("a text of {} bytes is too long", text.len()));
        }
        let place = |s: &StateShape| (s.layer, s.which);
        if self.states.iter().any(|s| s.which > 1)
            || self.states.windows(2).any(|pair| place(&pair[0]) >= place(&pair[1]))
        {
            return Err("its states are not those of layers in their order".into());
        }
        match (self.digests.0.len(), Section::STATES + self.states.len()) {
            (digests, sections) if digests != sections => {
                Err(format!("it has {digests} digests for {sections} sections"))
            }
            _ => Ok(()),
        }
    }

    /// Where the sections lie in a file where the first one begins at `data`; `None` if beyond all numbers.
    pub(super) fn sections(&self, data: u64) -> Option<Vec<Section>> {
        let logits = if self.logits { self.vocab.checked_mul(4)? } else { 0 };
        let first = [Some(self.tokens.checked_mul(4)?), Some(logits), self.hot.checked_mul(8)];
        let states = self.states.iter().map(|s| s.places.checked_mul(s.place_bytes));
        let mut next = data;
        let place = |bytes: Option<u64>| {
            let section = Section { offset: next, bytes: bytes? };
            next = next.checked_add(section.bytes)?.checked_next_multiple_of(ALIGN)?;
            Some(section)
        };
        first.into_iter().chain(states).map(place).collect()
    }

    /// What a section is, for messages.
    pub(super) fn what(&self, section: usize) -> String {
        match section {
            Section::TOKENS => "its tokens".into(),
            Section::LOGITS => "its logits".into(),
            Section::HOT => "its hot experts".into(),
            _ => match self.states.get(section - Section::STATES) {
                Some(s) => format!("state {} of layer {}", s.which, s.layer),
                None => "its end".into(),
            },
        }
    }
}
