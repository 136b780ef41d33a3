//! Long texts in pieces: the library needs 100 bytes and more for each byte of a text.

use std::ops::ControlFlow;

use serde_json::Value;
use tokenizers::{
    AddedVocabulary, Model as _, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer as _,
};

use super::{decoder::byte_for_char, model::TokenModel, tokenizer::Inner};

/// Bytes of a piece, where the text can be cut.
const WINDOW: usize = 32 << 10;
/// Bytes of a window after a cut, so that the words before it do not depend on later text.
const MARGIN: usize = 2 << 10;
/// Places that are tried in a window.
const TRIES: usize = 8;

/// Word of a pre-tokenized text.
#[derive(Debug, PartialEq)]
struct Word {
    text: String,
    /// Token of the added vocabulary.
    added: Option<u32>,
    /// First byte in the text.
    start: usize,
}

impl Word {
    fn same(&self, other: &Word) -> bool {
        self.text == other.text && self.added == other.added
    }
}

/// Cut of a text in two.
struct Cut {
    /// End of the first part.
    end: usize,
    /// Start of the second one: `end`, or after a space that the tokenizer puts before every text.
    next: usize,
}

/// Cuts texts into words and tokens, with the added tokens that count in them.
pub(super) struct Splitter<'a> {
    tokenizer: &'a Inner,
    added: &'a AddedVocabulary,
}

impl<'a> Splitter<'a> {
    /// All added tokens count.
    pub(super) fn new(tokenizer: &'a Inner) -> Self {
        Self { tokenizer, added: tokenizer.get_added_vocabulary() }
    }

    /// Other added tokens count.
    pub(super) fn with_added(tokenizer: &'a Inner, added: &'a AddedVocabulary) -> Self {
        Self { tokenizer, added }
    }

    /// Words and added tokens.
    fn split(&self, text: &str) -> tokenizers::Result<PreTokenizedString> {
        let mut words = self.added.extract_and_normalize(self.tokenizer.get_normalizer(), text);
        if let Some(cutter) = self.tokenizer.get_pre_tokenizer() {
            cutter.pre_tokenize(&mut words)?;
        }
        Ok(words)
    }

    /// Token ids.
    pub(super) fn ids(&self, text: &str) -> tokenizers::Result<Vec<u32>> {
        let mut words = self.split(text)?;
        self.tokenizer.get_model().tokenize_in_pretokenized(&mut words, None)?;
        Ok(words.into_encoding(None, 0, OffsetType::None)?.get_ids().to_vec())
    }
}

/// Gives the ids of `text` to `take` in order, in pieces, as long as it goes on. Special tokens
/// around the text are not added.
///
/// A text is cut where its words and tokens are those of both parts: where the pre-tokenizer cuts,
/// or, if it does not, between characters that no token joins.
///
/// # Errors
/// Those of the library.
pub(super) fn encode(
    splitter: &Splitter<'_>,
    text: &str,
    take: &mut dyn FnMut(&[u32]) -> ControlFlow<()>,
) -> tokenizers::Result<ControlFlow<()>> {
    let mut ids = |text: &str| -> tokenizers::Result<_> { Ok(take(&splitter.ids(text)?)) };
    let (mut rest, mut window) = (text, WINDOW);
    while rest.len() > 2 * window {
        match find_cut(splitter, &rest[..rest.floor_char_boundary(window)])? {
            Some(Cut { end, next }) => {
                if ids(&rest[..end])?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
                (rest, window) = (&rest[next..], WINDOW);
            }
            None => window *= 2,
        }
    }
    ids(rest)
}

fn find_cut(splitter: &Splitter<'_>, window: &str) -> tokenizers::Result<Option<Cut>> {
    let whole = words(splitter, window)?;
    let most = window.len().saturating_sub(MARGIN);
    let word_starts = whole.iter().rev().map(|word| word.start);
    let spaces = window.char_indices().rev().filter(|(_, c)| *c == ' ').map(|(start, _)| start);
    let fits = |start: &usize| (1..=most).contains(start) && window.is_char_boundary(*start);
    for end in word_starts.filter(fits).take(TRIES).chain(spaces.filter(fits).take(TRIES)) {
        let first = words(splitter, &window[..end])?;
        let after_space = window[end..].starts_with(' ').then_some(end + 1);
        for next in [Some(end), after_space].into_iter().flatten() {
            let second = words(splitter, &window[next..])?;
            if is_whole(splitter.tokenizer.get_model(), &whole, [&first, &second]) {
                return Ok(Some(Cut { end, next }));
            }
        }
    }
    Ok(None)
}

/// Whether the words of both parts are those of the whole.
fn is_whole(model: &TokenModel, whole: &[Word], [first, second]: [&[Word]; 2]) -> bool {
    let equal =
        |a: &[Word], b: &[Word]| a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.same(b));
    let Some((before, after)) = whole.split_at_checked(first.len()) else { return false };
    if equal(before, first) {
        return equal(after, second);
    }
    // The word at the cut goes on behind it.
    let (Some((joined, before)), Some((left, first)), Some((right, second))) =
        (before.split_last(), first.split_last(), second.split_first())
    else {
        return false;
    };
    let continues = || {
        let is_joined = joined.text.strip_prefix(&left.text) == Some(&right.text);
        let border = left.text.chars().next_back().zip(right.text.chars().next());
        is_joined && border.is_some_and(|(left, right)| !model.joins(left, right))
    };
    [joined, left, right].iter().all(|word| word.added.is_none())
        && equal(before, first)
        && equal(after, second)
        && continues()
}

/// Words of a text.
fn words(splitter: &Splitter<'_>, text: &str) -> tokenizers::Result<Vec<Word>> {
    let words = splitter.split(text)?;
    let splits = words.get_splits(OffsetReferential::Original, OffsetType::Byte);
    Ok(splits
        .into_iter()
        .map(|(text, (start, _), tokens)| Word {
            text: text.to_owned(),
            added: tokens.as_ref().and_then(|tokens| tokens.first()).map(|token| token.id),
            start,
        })
        .collect())
}

/// Maximum bytes of a text that become one token; `None` without a bound.
pub(super) fn longest(tokenizer: &Inner) -> Option<usize> {
    let TokenModel::Bpe(bpe) = tokenizer.get_model() else { return None };
    // The library cannot say what a part does: its JSON can.
    let normalizer = serde_json::to_value(tokenizer.get_normalizer()).ok()?;
    let cutter = serde_json::to_value(tokenizer.get_pre_tokenizer()).ok()?;
    let shrinks = shrinks(&normalizer)?;
    let cutters = match cutter.get("pretokenizers").and_then(Value::as_array) {
        Some(parts) => parts.as_slice(),
        None => std::slice::from_ref(&cutter),
    };
    let kind = |part: &'_ Value| part.get("type").and_then(Value::as_str).map(str::to_owned);
    let removes = |part: &Value| match kind(part).as_deref() {
        None => !part.is_null(),
        Some("Split") => part.get("behavior").is_none_or(|behavior| behavior == "Removed"),
        Some(kind) => !matches!(kind, "ByteLevel" | "Digits" | "Metaspace"),
    };
    if cutters.iter().any(removes) {
        return None;
    }
    let is_byte_level = cutters.iter().any(|part| kind(part).as_deref() == Some("ByteLevel"));
    let letters = || ('\0'..='\u{143}').filter(|c| byte_for_char(*c).is_some());
    let has = |c: char| bpe.token_to_id(c.encode_utf8(&mut [0; 4])).is_some();
    let covers_all = if is_byte_level { letters().all(has) } else { bpe.covers_all() };
    if !covers_all {
        return None;
    }
    // In byte-level vocabularies a character is a byte.
    let len = |token: &str| if is_byte_level { token.chars().count() } else { token.len() };
    let longest = bpe.tokens().map(|(token, _)| len(token)).max()?.saturating_mul(shrinks);
    let mut added = tokenizer.get_added_vocabulary().get_added_tokens_decoder().values();
    added.try_fold(longest, |longest, token| {
        // Such a token takes the white space around it.
        let is_bounded = !token.lstrip && !token.rstrip;
        is_bounded.then(|| longest.max(token.content.len().saturating_mul(shrinks)))
    })
}

/// Maximum factor by which a normalizer shortens a text; `None` without a bound.
fn shrinks(normalizer: &Value) -> Option<usize> {
    let len = |text: &Value| text.as_str().map(str::len);
    match normalizer.get("type").and_then(Value::as_str) {
        None => normalizer.is_null().then_some(1),
        Some("Prepend") => Some(1),
        // Canonical composition makes three characters one, which has a third of their bytes.
        Some("NFC") => Some(4),
        Some("Replace") => {
            let pattern = len(normalizer.get("pattern")?.get("String")?)?;
            let content = len(normalizer.get("content")?).filter(|content| *content > 0)?;
            Some(pattern.div_ceil(content).max(1))
        }
        Some("Sequence") => {
            let mut parts = normalizer.get("normalizers")?.as_array()?.iter();
            parts.try_fold(1usize, |product, part| product.checked_mul(shrinks(part)?))
        }
        Some(_) => None,
    }
}
