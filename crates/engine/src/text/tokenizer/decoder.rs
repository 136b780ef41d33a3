use std::{mem, str};

use super::Tokenizer;
use crate::base::error::Error;

/// Tokens of an incomplete piece of text after which it is shown as it is: no character has that many.
pub(super) const MAX_WAITING: usize = 16;

/// Turns tokens into text as they come: made by [`Tokenizer::decoder`].
///
/// All that was pushed, concatenated, plus [`finish`](Decoder::finish), is what [`Tokenizer::decode`] makes of the
/// ids at once. No half character and no U+FFFD for one that may still be completed is ever given out. The cost of a
/// token does not depend on how many came before.
///
/// The one exception: tokenizers with byte fallback (`<0xE4>` tokens) drop a whole run of such tokens when any part of
/// it is no UTF-8. What was given out cannot be taken back, so here the valid part of such a run stays.
#[derive(Clone, Debug)]
pub struct Decoder {
    tokenizer: Tokenizer,
    keep_special: bool,
    pub(super) waiting: Waiting,
    out: String,
}

/// What has come but may not be shown yet.
#[derive(Clone, Debug)]
pub(super) enum Waiting {
    /// Byte-level vocabularies: the beginning of a character, at most 3 bytes between tokens.
    Bytes(Vec<u8>),
    /// All others: a token's text depends on its neighbours (spaces between words, byte fallback), so the last tokens
    /// are decoded together, and what comes on top of the text of the first `shown_ids` is new.
    Tokens { ids: Vec<u32>, shown_ids: usize, shown: String },
}

impl Decoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Decoder {
        let waiting = match tokenizer.is_byte_level() {
            true => Waiting::Bytes(Vec::new()),
            false => Waiting::Tokens { ids: Vec::new(), shown_ids: 0, shown: String::new() },
        };
        Decoder { tokenizer, keep_special: false, waiting, out: String::new() }
    }

    /// Shows special tokens too.
    #[must_use]
    pub fn keep_special(mut self) -> Decoder {
        self.keep_special = true;
        self
    }

    /// Takes the next token and returns the text that is complete now, often none.
    ///
    /// # Errors
    /// [`Error::Text`] when the tokenizer's own decoder fails.
    pub fn push(&mut self, id: u32) -> Result<&str, Error> {
        self.out.clear();
        if !self.keep_special && self.tokenizer.is_special(id) {
            return Ok(&self.out);
        }
        let Some(piece) = self.tokenizer.piece(id) else { return Ok(&self.out) };
        match &mut self.waiting {
            Waiting::Bytes(bytes) => {
                push_bytes(&piece, bytes);
                take_complete(bytes, &mut self.out);
            }
            Waiting::Tokens { ids, .. } => {
                ids.push(id);
                self.take_tokens(false)?;
            }
        }
        Ok(&self.out)
    }

    /// Returns what is left, with U+FFFD for what stayed incomplete, and starts over.
    ///
    /// # Errors
    /// [`Error::Text`] when the tokenizer's own decoder fails.
    pub fn finish(&mut self) -> Result<&str, Error> {
        self.out.clear();
        match &mut self.waiting {
            Waiting::Bytes(bytes) => self.out.push_str(&String::from_utf8_lossy(&mem::take(bytes))),
            Waiting::Tokens { .. } => self.take_tokens(true)?,
        }
        self.waiting = Decoder::new(self.tokenizer.clone()).waiting;
        Ok(&self.out)
    }

    fn take_tokens(&mut self, all: bool) -> Result<(), Error> {
        let Waiting::Tokens { ids, shown_ids, shown } = &mut self.waiting else { return Ok(()) };
        let text = self.tokenizer.decode(ids, false)?;
        let complete = text.len() > shown.len() && !text.ends_with(char::REPLACEMENT_CHARACTER);
        if !(complete || all || ids.len() - *shown_ids >= MAX_WAITING) {
            return Ok(());
        }
        match text.strip_prefix(shown.as_str()) {
            Some(new) => self.out.push_str(new),
            // A broken byte-fallback run: as many characters as were shown are gone for good.
            None => self.out.extend(text.chars().skip(shown.chars().count())),
        }
        ids.drain(..*shown_ids);
        *shown_ids = ids.len();
        *shown = self.tokenizer.decode(ids, false)?;
        Ok(())
    }
}

/// Appends the bytes that a byte-level token stands for; a token that is no such spelling (an added token in plain
/// text) stands for itself.
fn push_bytes(piece: &str, bytes: &mut Vec<u8>) {
    let before = bytes.len();
    for c in piece.chars() {
        let Some(byte) = byte_of(c) else {
            bytes.truncate(before);
            bytes.extend_from_slice(piece.as_bytes());
            return;
        };
        bytes.push(byte);
    }
}

/// GPT-2's spelling of bytes: printable Latin-1 stands for itself, the other 68 bytes follow from U+0100 on.
pub(super) fn byte_of(c: char) -> Option<u8> {
    let byte = match u32::from(c) {
        c @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => c,
        c @ 0x100..=0x120 => c - 0x100,
        c @ 0x121..=0x142 => c - 0x121 + 0x7F,
        0x143 => 0xAD,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Moves text from `bytes` to `out` as `String::from_utf8_lossy` would, but leaves the beginning of a character at the
/// end where it is.
fn take_complete(bytes: &mut Vec<u8>, out: &mut String) {
    let mut left = 0;
    let mut chunks = bytes.utf8_chunks().peekable();
    while let Some(chunk) = chunks.next() {
        out.push_str(chunk.valid());
        let invalid = chunk.invalid();
        let unfinished = |bytes| str::from_utf8(bytes).is_err_and(|e| e.error_len().is_none());
        if chunks.peek().is_none() && unfinished(invalid) {
            left = invalid.len();
        } else if !invalid.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
        }
    }
    bytes.drain(..bytes.len() - left);
}
