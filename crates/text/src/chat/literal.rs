//! Literal text: special tokens that users and tools spell stay text.
//!
//! A private character, which no string of the conversation has, is put behind the first character
//! of each special token that a string spells, and of the beginning of one at a string's end. So
//! only the template's own tokens are whole in the rendered text. The tokenizer encodes the parts
//! with that character as literal text, without it.

use std::{borrow::Cow, collections::HashSet};

use serde_json::Value as Json;

use crate::tokenizer::SpecialToken;

/// Marks of thoughts in the content of an answer, which templates cut there.
const THOUGHTS: [&str; 2] = ["<think>", "</think>"];

/// First of the private characters; there are 131,068 of them.
const FIRST_MARK: char = '\u{f0000}';
const LAST_MARK: char = '\u{10fffd}';

/// Special tokens of a tokenizer, to find them in texts.
#[derive(Debug, Default)]
pub(crate) struct ControlTokens {
    /// Longest first.
    tokens: Vec<SpecialToken>,
    /// Their first two bytes.
    pairs: HashSet<[u8; 2]>,
}

/// Place of a special token in a text.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FoundToken<'a> {
    pub(crate) token: &'a SpecialToken,
    pub(crate) start: usize,
}

impl FoundToken<'_> {
    pub(crate) fn end(&self) -> usize {
        self.start + self.token.text.len()
    }
}

impl ControlTokens {
    pub(crate) fn new(mut tokens: Vec<SpecialToken>) -> Self {
        tokens.retain(|token| !token.text.is_empty());
        tokens.sort_by(|a, b| b.text.len().cmp(&a.text.len()).then(a.text.cmp(&b.text)));
        let mut pairs = HashSet::new();
        for token in &tokens {
            match token.text.as_bytes() {
                [first] => pairs.extend((0..=u8::MAX).map(|second| [*first, second])),
                [first, second, ..] => _ = pairs.insert([*first, *second]),
                [] => {}
            }
        }
        Self { tokens, pairs }
    }

    /// The longest special token at each place, from left to right.
    pub(crate) fn find<'a>(&'a self, text: &'a str) -> impl Iterator<Item = FoundToken<'a>> {
        let mut from = 0;
        std::iter::from_fn(move || {
            while let Some(start) = self.candidate(text, from) {
                let rest = &text.as_bytes()[start..];
                let found = self.tokens.iter().find(|t| rest.starts_with(t.text.as_bytes()));
                from = start + found.map_or(1, |token| token.text.len());
                if let Some(token) = found {
                    return Some(FoundToken { token, start });
                }
            }
            None
        })
    }

    /// Next place where a special token may begin.
    fn candidate(&self, text: &str, from: usize) -> Option<usize> {
        let bytes = text.as_bytes().get(from..)?;
        let begins =
            |pair: &[u8]| <[u8; 2]>::try_from(pair).is_ok_and(|pair| self.pairs.contains(&pair));
        let last = bytes.last().filter(|last| self.pairs.iter().any(|[first, _]| first == *last));
        let at = bytes.windows(2).position(begins);
        at.or(last.map(|_| bytes.len() - 1)).map(|i| from + i)
    }

    /// Places in `text` where a special token begins that is not in `except`, overlapping ones too,
    /// and where the text ends within one.
    fn starts(&self, text: &str, except: &[&str]) -> Vec<usize> {
        let mut starts = Vec::new();
        let mut from = 0;
        while let Some(start) = self.candidate(text, from) {
            from = start + 1;
            let rest = &text[start..];
            let begins = |token: &SpecialToken| {
                (rest.starts_with(&*token.text) || token.text.starts_with(rest))
                    && !except.contains(&&*token.text)
            };
            if text.is_char_boundary(start) && self.tokens.iter().any(begins) {
                starts.push(start);
            }
        }
        starts
    }
}

/// Makes strings of a conversation literal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Literal<'a> {
    tokens: Option<&'a ControlTokens>,
    mark: char,
}

impl<'a> Literal<'a> {
    /// Strings as they are.
    pub(crate) const AS_IS: Literal<'static> = Literal { tokens: None, mark: FIRST_MARK };

    /// The private character is one that `strings` do not have; `None` if they have all.
    pub(crate) fn new<'s>(
        tokens: &'a ControlTokens,
        strings: impl Iterator<Item = Cow<'s, str>>,
    ) -> Option<Self> {
        let mut used = HashSet::new();
        for string in strings {
            // Characters of four bytes only.
            if string.bytes().any(|byte| byte >= 0xf3) {
                used.extend(string.chars().filter(|c| *c >= FIRST_MARK));
            }
        }
        let mark = (FIRST_MARK..=LAST_MARK).find(|mark| !used.contains(mark))?;
        Some(Self { tokens: Some(tokens), mark })
    }

    /// The private character.
    pub(crate) fn mark(&self) -> char {
        self.mark
    }

    pub(super) fn text(&self, text: &str) -> String {
        self.marked(text, &[])
    }

    /// Text of an answer, whose thoughts the template may cut.
    pub(super) fn answer(&self, text: &str) -> String {
        self.marked(text, &THOUGHTS)
    }

    fn marked(&self, text: &str, except: &[&str]) -> String {
        let starts = self.tokens.map_or(Vec::new(), |tokens| tokens.starts(text, except));
        let mut marked = String::with_capacity(text.len() + 4 * starts.len());
        let mut from = 0;
        for start in starts {
            let first = text[start..].chars().next().map_or(0, char::len_utf8);
            marked.push_str(&text[from..start + first]);
            marked.push(self.mark);
            from = start + first;
        }
        marked.push_str(&text[from..]);
        marked
    }

    /// All strings of a JSON value.
    pub(super) fn json(&self, value: Json) -> Json {
        match value {
            Json::String(text) => Json::from(self.text(&text)),
            Json::Array(items) => items.into_iter().map(|item| self.json(item)).collect(),
            Json::Object(fields) => {
                fields.into_iter().map(|(key, item)| (self.text(&key), self.json(item))).collect()
            }
            other => other,
        }
    }
}
