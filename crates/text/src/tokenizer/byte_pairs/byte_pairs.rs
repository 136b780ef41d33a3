//! Byte-pair encoding.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    fmt,
    path::{Path, PathBuf},
};

use tokenizers::{Model, Token, models::bpe::BpeTrainer};

use super::{
    merge_table::{MergeList, MergeTable},
    token_table::{TokenList, TokenTable},
};

/// Settings of a BPE model, as `tokenizer.json` has them.
#[derive(Clone, Debug, Default, serde::Deserialize)]
pub(crate) struct BytePairSettings {
    unk_token: Option<String>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
}

impl BytePairSettings {
    /// Uses a token that equals a word, whether merges reach it or not.
    pub(crate) fn ignoring_merges() -> Self {
        Self { ignore_merges: Some(true), ..Self::default() }
    }
}

/// BPE model: vocabulary and merges.
pub(crate) struct BytePairs {
    tokens: TokenTable,
    merges: MergeTable,
    settings: BytePairSettings,
    unknown: Option<u32>,
}

impl fmt::Debug for BytePairs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BytePairs").field("tokens", &self.tokens.len()).finish_non_exhaustive()
    }
}

/// Token of a word while it is merged. A list, linked by index.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    /// Bytes of the word; 0 once it is part of the symbol before.
    len: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

impl BytePairs {
    /// # Errors
    /// Vocabulary and merges contradict each other.
    pub(crate) fn new(
        tokens: TokenList,
        merges: MergeList,
        mut settings: BytePairSettings,
    ) -> Result<Self, String> {
        let tokens = TokenTable::new(tokens)?;
        let prefix = settings.continuing_subword_prefix.get_or_insert_default();
        let merges = MergeTable::new(merges, &tokens, prefix)?;
        let unknown = settings.unk_token.as_deref().and_then(|token| tokens.id(token));
        Ok(Self { tokens, merges, settings, unknown })
    }

    /// Largest id plus one.
    pub(crate) fn rows(&self) -> usize {
        self.tokens.rows()
    }

    /// Tokens and ids in the order of the ids.
    pub(crate) fn tokens(&self) -> impl Iterator<Item = (&str, u32)> {
        self.tokens.iter()
    }

    /// Whether every text becomes tokens that cover all of it.
    pub(crate) fn covers_all(&self) -> bool {
        self.settings.byte_fallback == Some(true)
            && (0..=u8::MAX).all(|byte| self.byte_token(byte).is_some())
    }

    /// Whether `left` and `right` may be in one token. If not, no merge crosses the border between
    /// them in a longer text.
    pub(crate) fn joins(&self, left: char, right: char) -> bool {
        let BytePairSettings { continuing_subword_prefix, end_of_word_suffix, .. } = &self.settings;
        if continuing_subword_prefix.as_ref().is_some_and(|prefix| !prefix.is_empty())
            || end_of_word_suffix.is_some()
        {
            return true;
        }
        // Unknown neighbours may become one token.
        let known = |c: char| self.tokens.id(c.encode_utf8(&mut [0; 4])).is_some();
        let pair = String::from_iter([left, right]);
        !(known(left) && known(right)) || self.tokens.iter().any(|(token, _)| token.contains(&pair))
    }

    fn byte_token(&self, byte: u8) -> Option<u32> {
        self.tokens.id(&format!("<{byte:#04X}>"))
    }

    /// Symbols of a word before any merge.
    fn symbols(&self, word: &str) -> Result<Vec<Symbol>, String> {
        let settings = &self.settings;
        let mut symbols = Symbols(Vec::with_capacity(word.len()));
        let mut unknown: Option<(u32, usize)> = None;
        let mut spelled = String::new();
        for (start, c) in word.char_indices() {
            let len = c.len_utf8();
            spelled.clear();
            if let Some(prefix) = settings.continuing_subword_prefix.as_ref().filter(|_| start > 0)
            {
                spelled.push_str(prefix);
            }
            spelled.push(c);
            let is_last = start + len == word.len();
            if let Some(suffix) = settings.end_of_word_suffix.as_ref().filter(|_| is_last) {
                spelled.push_str(suffix);
            }
            if let Some(id) = self.tokens.id(&spelled) {
                symbols.extend(unknown.take());
                symbols.push((id, len));
                continue;
            }
            if settings.byte_fallback == Some(true) {
                let bytes = spelled.bytes().map(|byte| self.byte_token(byte));
                if let Some(ids) = bytes.collect::<Option<Vec<u32>>>() {
                    symbols.extend(ids.into_iter().map(|id| (id, 1)));
                    continue;
                }
            }
            let Some(name) = &settings.unk_token else { continue };
            unknown = match unknown {
                Some((id, before)) if settings.fuse_unk == Some(true) => Some((id, before + len)),
                before => {
                    symbols.extend(before);
                    let id = self.unknown;
                    let missing = || format!("the unk_token {name:?} is not in the vocabulary");
                    Some((id.ok_or_else(missing)?, len))
                }
            };
        }
        symbols.extend(unknown);
        Ok(symbols.0)
    }

    /// Merges neighbours, lowest rank first, then leftmost.
    fn merge(&self, symbols: &mut Vec<Symbol>) {
        // Rank, position of the left symbol, merged id.
        let candidate = |symbols: &[Symbol], left: usize| {
            let right = symbols[left].next?;
            let merged = self.merges.get(symbols[left].id, symbols[right].id)?;
            Some(Reverse((merged.rank, left, merged.id)))
        };
        let mut queue: BinaryHeap<_> =
            (0..symbols.len()).filter_map(|left| candidate(symbols, left)).collect();
        while let Some(Reverse((_, left, id))) = queue.pop() {
            let Symbol { id: left_id, len, next: Some(right), .. } = symbols[left] else {
                continue;
            };
            let current = self.merges.get(left_id, symbols[right].id);
            // The symbols of an entry may be merged already.
            if len == 0 || current.is_none_or(|merged| merged.id != id) {
                continue;
            }
            let Symbol { len: right_len, next, .. } = symbols[right];
            symbols[right].len = 0;
            symbols[left] = Symbol { id, len: len + right_len, next, ..symbols[left] };
            if let Some(next) = next {
                symbols[next].prev = Some(left);
            }
            let before = symbols[left].prev.and_then(|prev| candidate(symbols, prev));
            queue.extend(before);
            queue.extend(candidate(symbols, left));
        }
        symbols.retain(|symbol| symbol.len > 0);
    }
}

/// Symbols of a word in order.
struct Symbols(Vec<Symbol>);

impl Symbols {
    fn push(&mut self, (id, len): (u32, usize)) {
        let index = self.0.len();
        let prev = index.checked_sub(1);
        if let Some(last) = self.0.last_mut() {
            last.next = Some(index);
        }
        self.0.push(Symbol { id, len, prev, next: None });
    }

    fn extend(&mut self, more: impl IntoIterator<Item = (u32, usize)>) {
        more.into_iter().for_each(|symbol| self.push(symbol));
    }
}

impl Model for BytePairs {
    type Trainer = BpeTrainer;

    /// Tokens of a word, by id alone: their texts are empty.
    fn tokenize(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        let token = |id, start, end| Token::new(id, String::new(), (start, end));
        if word.is_empty() {
            return Ok(Vec::new());
        }
        if self.settings.ignore_merges == Some(true)
            && let Some(id) = self.tokens.id(word)
        {
            return Ok(vec![token(id, 0, word.len())]);
        }
        let mut symbols = self.symbols(word)?;
        self.merge(&mut symbols);
        let mut end = 0;
        let tokens = symbols.iter().map(|symbol| {
            let start = end;
            end += symbol.len;
            token(symbol.id, start, end)
        });
        Ok(tokens.collect())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.tokens.id(token)
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        self.tokens.token(id).map(str::to_owned)
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        self.tokens.iter().map(|(token, id)| (token.to_owned(), id)).collect()
    }

    fn get_vocab_size(&self) -> usize {
        self.tokens.len()
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("this model is only read".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}
