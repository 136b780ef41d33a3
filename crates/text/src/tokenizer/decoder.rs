//! Incremental detokenization: text pieces of whole characters from one token at a time.

use std::{mem, str};

use moeflux_base::Error;

use super::tokenizer::Tokenizer;

/// Maximum number of tokens of an incomplete piece of text before it is emitted as is. No character
/// has that many.
pub(super) const MAX_PENDING: usize = 16;

/// Incremental decoder from tokens to text, see [`Tokenizer::decoder`].
///
/// The concatenated output of all pushes and of [`finish`](Decoder::finish) equals
/// [`Tokenizer::decode`] of all ids. Partial characters are held back, and no U+FFFD is emitted for
/// a character that may still be completed. The cost per token does not depend on the number of
/// previous tokens.
///
/// One exception: tokenizers with byte fallback (`<0xE4>` tokens) drop a whole run of such tokens
/// if any part of it is invalid UTF-8. Emitted text cannot be taken back, so the valid part of such
/// a run stays.
#[derive(Clone, Debug)]
pub struct Decoder {
    tokenizer: Tokenizer,
    keep_special: bool,
    pub(super) pending: PendingText,
    out: String,
}

/// Input that has not been emitted yet.
#[derive(Clone, Debug)]
pub(super) enum PendingText {
    /// Byte-level vocabularies: the start of a character, at most 3 bytes between tokens.
    Bytes(Vec<u8>),
    /// All others. A token's text depends on its neighbours (spaces between words, byte fallback),
    /// so the last tokens are decoded together. Text beyond that of the first `shown_ids` is new.
    Tokens { ids: Vec<u32>, shown_ids: usize, shown: String },
}

impl Decoder {
    pub(super) fn new(tokenizer: Tokenizer) -> Decoder {
        let pending = match tokenizer.is_byte_level() {
            true => PendingText::Bytes(Vec::new()),
            false => PendingText::Tokens { ids: Vec::new(), shown_ids: 0, shown: String::new() },
        };
        Decoder { tokenizer, keep_special: false, pending, out: String::new() }
    }

    /// Includes special tokens in the text.
    #[must_use]
    pub fn keep_special(mut self) -> Decoder {
        self.keep_special = true;
        self
    }

    /// Takes the next token and returns the newly completed text, which may be empty.
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer's decoder fails.
    pub fn push(&mut self, id: u32) -> Result<&str, Error> {
        self.out.clear();
        if !self.keep_special && self.tokenizer.is_special(id) {
            return Ok(&self.out);
        }
        let Some(piece) = self.tokenizer.piece(id) else { return Ok(&self.out) };
        match &mut self.pending {
            PendingText::Bytes(bytes) => {
                push_bytes(&piece, bytes);
                take_complete(bytes, &mut self.out);
            }
            PendingText::Tokens { ids, .. } => {
                ids.push(id);
                self.take_tokens(false)?;
            }
        }
        Ok(&self.out)
    }

    /// Returns the remaining text, with U+FFFD for an incomplete character, and resets the decoder.
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer's decoder fails.
    pub fn finish(&mut self) -> Result<&str, Error> {
        self.out.clear();
        match &mut self.pending {
            PendingText::Bytes(bytes) => {
                self.out.push_str(&String::from_utf8_lossy(&mem::take(bytes)))
            }
            PendingText::Tokens { .. } => self.take_tokens(true)?,
        }
        self.pending = Decoder::new(self.tokenizer.clone()).pending;
        Ok(&self.out)
    }

    /// Moves the text of complete characters to `out`; with `all`, the rest too.
    fn take_tokens(&mut self, all: bool) -> Result<(), Error> {
        let PendingText::Tokens { ids, shown_ids, shown } = &mut self.pending else {
            return Ok(());
        };
        let text = self.tokenizer.decode(ids, false)?;
        let complete = text.len() > shown.len() && !text.ends_with(char::REPLACEMENT_CHARACTER);
        if !(complete || all || ids.len() - *shown_ids >= MAX_PENDING) {
            return Ok(());
        }
        match text.strip_prefix(shown.as_str()) {
            Some(new) => self.out.push_str(new),
            // Invalid byte-fallback run: skip as many characters as were emitted.
            None => self.out.extend(text.chars().skip(shown.chars().count())),
        }
        ids.drain(..*shown_ids);
        *shown_ids = ids.len();
        *shown = self.tokenizer.decode(ids, false)?;
        Ok(())
    }
}

/// Appends the bytes of a byte-level token. Other tokens (added ones in plain text) are appended as
/// they are.
fn push_bytes(piece: &str, bytes: &mut Vec<u8>) {
    let before = bytes.len();
    for c in piece.chars() {
        let Some(byte) = byte_for_char(c) else {
            bytes.truncate(before);
            bytes.extend_from_slice(piece.as_bytes());
            return;
        };
        bytes.push(byte);
    }
}

/// Bytes of a byte-level token.
pub(super) fn piece_bytes(piece: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_bytes(piece, &mut bytes);
    bytes
}

/// Bytes of a token of a vocabulary with byte fallback and a mark for spaces, as in SentencePiece.
pub(super) fn fallback_bytes(piece: &str) -> Vec<u8> {
    let hex = piece.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => vec![byte],
        None => piece.replace('\u{2581}', " ").into_bytes(),
    }
}

/// Byte of a character in GPT-2's byte-level alphabet: printable Latin-1 maps to itself, the other
/// 68 bytes to U+0100 and following.
pub(super) fn byte_for_char(c: char) -> Option<u8> {
    let byte = match u32::from(c) {
        c @ (0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF) => c,
        c @ 0x100..=0x120 => c - 0x100,
        c @ 0x121..=0x142 => c - 0x121 + 0x7F,
        0x143 => 0xAD,
        _ => return None,
    };
    u8::try_from(byte).ok()
}

/// Moves text from `bytes` to `out` like `String::from_utf8_lossy`, but keeps an incomplete
/// character at the end.
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
