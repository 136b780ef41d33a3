//! Tokens by text and by id, in flat memory.

use std::{collections::hash_map::RandomState, hash::BuildHasher};

/// Ids above the number of tokens by more than this factor are refused, as the table is indexed by
/// id.
const MAX_ID_FACTOR: usize = 4;
/// Largest id of small vocabularies.
const SMALL_ID: usize = 1 << 16;

/// Texts of tokens in the order of a file, with their ids.
#[derive(Default)]
pub(crate) struct TokenList {
    text: String,
    tokens: Vec<ListedToken>,
}

struct ListedToken {
    span: TokenSpan,
    id: u32,
}

/// Bytes of a token in the text of a table.
#[derive(Clone, Copy, Debug)]
struct TokenSpan {
    start: u32,
    len: u32,
}

impl TokenSpan {
    /// An id without a token.
    const NONE: Self = Self { start: u32::MAX, len: 0 };

    fn text(self, text: &str) -> &str {
        text.get(self.start as usize..self.start as usize + self.len as usize).unwrap_or("")
    }
}

impl TokenList {
    /// Appends a token. Of equal texts the last one counts.
    ///
    /// # Errors
    /// The texts have more than 4 GiB.
    pub(crate) fn push(&mut self, token: &str, id: u32) -> Result<(), String> {
        let too_large = || "the tokens have more than 4 GiB".to_owned();
        let end = u32::try_from(self.text.len() + token.len()).map_err(|_| too_large())?;
        let len = token.len() as u32;
        let start = end.checked_sub(len).filter(|_| end < u32::MAX).ok_or_else(too_large)?;
        self.text.push_str(token);
        self.tokens.push(ListedToken { span: TokenSpan { start, len }, id });
        Ok(())
    }

    /// Sets the id of the token that was pushed last.
    pub(crate) fn set_last_id(&mut self, id: u32) {
        if let Some(last) = self.tokens.last_mut() {
            last.id = id;
        }
    }

    /// Bytes of all texts.
    pub(crate) fn bytes(&self) -> usize {
        self.text.len()
    }

    /// Tokens and ids in the order of the file.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, u32)> {
        self.tokens.iter().map(|token| (token.span.text(&self.text), token.id))
    }
}

/// Tokens of a vocabulary. A hash table of ids finds a text, a row per id gives it back: 16 bytes
/// per token and its text.
pub(super) struct TokenTable {
    text: String,
    spans: Vec<TokenSpan>,
    /// Open addressing: id plus one, or 0.
    index: Vec<u32>,
    hasher: RandomState,
    count: usize,
}

impl TokenTable {
    /// # Errors
    /// The ids are not near 0, so that a table by id would be mostly empty.
    pub(super) fn new(list: TokenList) -> Result<Self, String> {
        let TokenList { mut text, tokens } = list;
        text.shrink_to_fit();
        let count = tokens.len();
        let largest = tokens.iter().map(|token| token.id as usize).max();
        let rows = largest.map_or(0, |largest| largest + 1);
        if rows > SMALL_ID.max(count * MAX_ID_FACTOR) {
            return Err(format!("the vocabulary has {count} tokens, and ids up to {}", rows - 1));
        }
        let slots = (2 * count).next_power_of_two().max(2);
        let mut table = Self {
            text,
            spans: vec![TokenSpan::NONE; rows],
            index: vec![0; slots],
            hasher: RandomState::new(),
            count: 0,
        };
        for ListedToken { span, id } in tokens {
            let slot = table.slot(span.text(&table.text));
            if let Some(earlier) = table.index[slot].checked_sub(1) {
                if earlier != id {
                    table.spans[earlier as usize] = TokenSpan::NONE;
                }
            } else {
                table.count += 1;
            }
            table.index[slot] = id + 1;
            table.spans[id as usize] = span;
        }
        Ok(table)
    }

    /// Place of a text in the index: its own, or the first free one. At most half are taken.
    fn slot(&self, token: &str) -> usize {
        let mask = self.index.len() - 1;
        let mut slot = self.hasher.hash_one(token) as usize & mask;
        while let Some(id) = self.index[slot].checked_sub(1) {
            if self.spans[id as usize].text(&self.text) == token {
                break;
            }
            slot = (slot + 1) & mask;
        }
        slot
    }

    pub(super) fn id(&self, token: &str) -> Option<u32> {
        self.index[self.slot(token)].checked_sub(1)
    }

    pub(super) fn token(&self, id: u32) -> Option<&str> {
        let span = *self.spans.get(id as usize)?;
        (span.start != u32::MAX).then(|| span.text(&self.text))
    }

    /// Number of different tokens.
    pub(super) fn len(&self) -> usize {
        self.count
    }

    /// Largest id plus one.
    pub(super) fn rows(&self) -> usize {
        self.spans.len()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&str, u32)> {
        (0..).zip(&self.spans).filter_map(|(id, _)| Some((self.token(id)?, id)))
    }
}
