//! The vocabulary of a tokenizer as a trie of bytes.

use std::sync::Arc;

use llguidance::toktrie::{INVALID_TOKEN, TokRxInfo, TokTrie};

use crate::tokenizer::{TokenText, Tokenizer};

/// Longest token in bytes that a grammar may use.
const MAX_TOKEN: usize = 1024;

/// Tokens as bytes, and marks by their text.
#[derive(Clone)]
pub(super) struct GrammarVocabulary {
    pub(super) trie: Arc<TokTrie>,
    /// Marks that are tokens, longer ones first.
    marks: Arc<[VocabularyMark]>,
    /// Tokens that are one or two line ends.
    pub(super) line_ends: Arc<[u32]>,
}

/// A mark that is one token.
struct VocabularyMark {
    text: String,
    token: u32,
}

/// Part of a text: characters, or a mark that is a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SpelledPart<'a> {
    Text(&'a str),
    Token(u32),
}

impl GrammarVocabulary {
    /// The tokens of a tokenizer. Marks are no text: only a grammar that names them allows them.
    pub(super) fn new(tokenizer: &Tokenizer) -> Self {
        let count = u32::try_from(tokenizer.vocab_size()).unwrap_or(u32::MAX);
        let (mut words, mut marks, mut line_ends) = (Vec::new(), Vec::new(), Vec::new());
        for token in 0..count {
            let bytes = match tokenizer.token_text(token) {
                Some(TokenText::Mark(text)) => {
                    let bytes = [&[TokTrie::SPECIAL_TOKEN_MARKER], text.as_bytes()].concat();
                    if !text.is_empty() {
                        marks.push(VocabularyMark { text, token });
                    }
                    bytes
                }
                Some(TokenText::Bytes(bytes)) => {
                    if matches!(bytes.as_slice(), b"\n" | b"\n\n") {
                        line_ends.push(token);
                    }
                    // Bytes that no text has stand for marks in the trie.
                    if bytes.contains(&TokTrie::SPECIAL_TOKEN_MARKER) { Vec::new() } else { bytes }
                }
                None => Vec::new(),
            };
            words.push(if bytes.len() > MAX_TOKEN { Vec::new() } else { bytes });
        }
        marks.sort_by_key(|mark| std::cmp::Reverse(mark.text.len()));
        let trie = TokTrie::from(&TokRxInfo::new(count, INVALID_TOKEN), &words);
        Self { trie: Arc::new(trie), marks: marks.into(), line_ends: line_ends.into() }
    }

    /// The token that is this mark.
    pub(super) fn mark(&self, text: &str) -> Option<u32> {
        self.marks.iter().find(|mark| mark.text == text).map(|mark| mark.token)
    }

    /// A text as characters and marks.
    pub(super) fn spell<'a>(&self, mut text: &'a str) -> Vec<SpelledPart<'a>> {
        let mut parts = Vec::new();
        while !text.is_empty() {
            let found = self.marks.iter().filter_map(|mark| Some((text.find(&mark.text)?, mark)));
            // Of marks at one place the longest counts.
            match found.min_by_key(|(start, mark)| (*start, std::cmp::Reverse(mark.text.len()))) {
                Some((start, mark)) => {
                    if start > 0 {
                        parts.push(SpelledPart::Text(&text[..start]));
                    }
                    parts.push(SpelledPart::Token(mark.token));
                    text = &text[start + mark.text.len()..];
                }
                None => {
                    parts.push(SpelledPart::Text(text));
                    text = "";
                }
            }
        }
        parts
    }

    /// Bytes of a token; those of its text if it is a mark.
    pub(super) fn bytes(&self, token: u32) -> &[u8] {
        if token as usize >= self.trie.vocab_size() {
            return &[];
        }
        let bytes = self.trie.token(token);
        bytes.strip_prefix(&[TokTrie::SPECIAL_TOKEN_MARKER]).unwrap_or(bytes)
    }
}
