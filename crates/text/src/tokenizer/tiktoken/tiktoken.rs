//! Reads a vocabulary of tiktoken.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    str,
};

use moeflux_base::{Error, TextFile};
use serde::Deserialize;
use serde_json::Value;
use tokenizers::{
    AddedToken, SplitDelimiterBehavior,
    pre_tokenizers::{
        PreTokenizerWrapper,
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

use super::super::{
    byte_pairs::{BytePairSettings, BytePairs, MergeList, TokenList},
    decoder::byte_for_char,
    model::TokenModel,
    tokenizer::{Inner, Tokenizer},
};

/// Class in tokenizer_config.json whose Python code contains [`KIMI_WORDS`].
const KIMI_CLASS: &str = "TikTokenTokenizer";

/// Pre-tokenizer pattern of words before byte pair encoding: `pat_str` of Kimi's
/// `tokenization_kimi.py`. No data file contains it.
const KIMI_WORDS: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}",
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"|\s*[\r\n]+",
    r"|\s+(?!\S)",
    r"|\s+",
);

/// Number of ids after the ranks: `num_reserved_special_tokens` of `tokenization_kimi.py`. Tokens
/// that tokenizer_config.json does not name are called `<|reserved_token_163589|>`, by their id.
const SPECIAL_TOKENS: usize = 256;

/// Maximum number of ranks, far above any known vocabulary.
const MAX_RANKS: usize = 1 << 20;
/// Maximum length of a token in bytes. The cost of merging grows with its square.
const MAX_TOKEN_BYTES: usize = 512;

/// The used keys of `tokenizer_config.json`.
#[derive(Deserialize)]
struct TiktokenConfig {
    tokenizer_class: Option<String>,
    #[serde(default)]
    added_tokens_decoder: BTreeMap<u32, NamedToken>,
    #[serde(default)]
    auto_map: Value,
}

impl TiktokenConfig {
    /// Class of the tokenizer, or the class in `auto_map`: `tokenization_kimi.TikTokenTokenizer`.
    fn class(&self) -> Option<&str> {
        let mapped = || self.auto_map.get("AutoTokenizer")?.get(0)?.as_str()?.rsplit('.').next();
        self.tokenizer_class.as_deref().or_else(mapped)
    }
}

#[derive(Deserialize)]
struct NamedToken {
    content: String,
    #[serde(default)]
    special: bool,
}

impl Tokenizer {
    /// Reads a `tiktoken.model`, one `base64 rank` per line, with the special tokens of a
    /// `tokenizer_config.json`.
    ///
    /// Ids equal those of Kimi's Python code, with one exception. That code first splits texts
    /// after 400,000 characters, and runs without white space (or only of it) after 25,000. Here
    /// they are not split.
    ///
    /// # Errors
    /// [`Error::Text`] if the file is damaged (with the line), or its tokenizer is not Kimi's.
    pub fn from_tiktoken(
        ranks: &TextFile<'_>,
        tokenizer_config: &TextFile<'_>,
    ) -> Result<Tokenizer, Error> {
        let TextFile { bytes: ranks, path } = ranks;
        let problem = |problem: String| Error::Text { path: path.clone(), problem };
        let config_problem =
            |problem: String| Error::Text { path: tokenizer_config.path.clone(), problem };
        let config: TiktokenConfig = serde_json::from_slice(tokenizer_config.bytes)
            .map_err(|e| config_problem(format!("it does not name the special tokens: {e}")))?;
        // Without a class, the only known one is assumed.
        if let Some(class) = config.class().filter(|class| *class != KIMI_CLASS) {
            return Err(config_problem(format!(
                "its tokenizer_class is {class:?}; how a tiktoken.model cuts text into words is said in Python only, and \
                 known here for {KIMI_CLASS:?} (Kimi). A tokenizer.json beside it is read instead"
            )));
        }
        let tokens = read_ranks(ranks).map_err(problem)?;
        let added =
            added_tokens(config.added_tokens_decoder, tokens.len()).map_err(config_problem)?;

        let mut inner = Inner::new(TokenModel::Bpe(bpe(&tokens).map_err(problem)?));
        let unexpected = |e: tokenizers::Error| problem(format!("cannot be used: {e}"));
        let words = SplitPattern::Regex(KIMI_WORDS.into());
        inner.with_pre_tokenizer(Some(Sequence::new(vec![
            PreTokenizerWrapper::Split(
                Split::new(words, SplitDelimiterBehavior::Isolated, false).map_err(unexpected)?,
            ),
            PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, true, false)),
        ])));
        inner.with_decoder(Some(ByteLevel::default()));
        inner.add_tokens(added.iter().cloned()).map_err(unexpected)?;
        for (id, token) in (0..).skip(tokens.len()).zip(&added) {
            if inner.token_to_id(&token.content) != Some(id) {
                return Err(config_problem(format!(
                    "added_tokens_decoder has the token {:?} for {id}, but another token has the \
                     same name",
                    token.content
                )));
            }
        }
        Tokenizer::assemble(inner, path).map_err(problem)
    }
}

/// Tokens by rank. Requires each rank from 0 on exactly once, and a token for each single byte, as
/// otherwise some texts could not be encoded.
fn read_ranks(file: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let lines = || {
        (1..)
            .zip(file.split(|&byte| byte == b'\n'))
            .filter(|(_, line)| !line.trim_ascii().is_empty())
    };
    let count = lines().count();
    if count > MAX_RANKS {
        return Err(format!("{count} lines; the largest supported vocabulary has {MAX_RANKS}"));
    }
    let mut tokens = vec![Vec::new(); count];
    for (number, line) in lines() {
        let bad = |problem: &str| {
            let start: String = String::from_utf8_lossy(line).chars().take(40).collect();
            format!("line {number}: {problem}: {start:?}; download the file again")
        };
        let (token, rank) =
            split_line(line).ok_or_else(|| bad("not a token in base64, a space and its rank"))?;
        if token.is_empty() || token.len() > MAX_TOKEN_BYTES {
            return Err(bad(&format!(
                "a token has 1 to {MAX_TOKEN_BYTES} bytes, this one {}",
                token.len()
            )));
        }
        let entry = tokens.get_mut(rank).ok_or_else(|| {
            bad(&format!("{count} tokens need ranks from 0 on without a gap, {rank} is too large"))
        })?;
        if !entry.is_empty() {
            return Err(bad(&format!("rank {rank} occurs twice")));
        }
        *entry = token;
    }
    if let Some(missing) = (0..=255).find(|&byte| !tokens.iter().any(|token| *token == [byte])) {
        return Err(format!(
            "no line is the single byte {missing:#04x}; is the download complete?"
        ));
    }
    Ok(tokens)
}

/// Token and rank of a line.
fn split_line(line: &[u8]) -> Option<(Vec<u8>, usize)> {
    let line = line.trim_ascii();
    let space = line.iter().position(|&byte| byte == b' ')?;
    let rank = str::from_utf8(&line[space + 1..]).ok()?;
    Some((base64(&line[..space])?, rank.parse().ok()?))
}

/// Decodes padded base64, RFC 4648.
fn base64(text: &[u8]) -> Option<Vec<u8>> {
    let digits = text.strip_suffix(b"==").or(text.strip_suffix(b"=")).unwrap_or(text);
    if !text.len().is_multiple_of(4) {
        return None;
    }
    let mut bytes = Vec::with_capacity(digits.len() * 3 / 4);
    let (mut rest, mut bits) = (0u32, 0);
    for &digit in digits {
        let value = match digit {
            b'A'..=b'Z' => digit - b'A',
            b'a'..=b'z' => digit - b'a' + 26,
            b'0'..=b'9' => digit - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        rest = rest << 6 | u32::from(value);
        bits += 6;
        if bits >= 8 {
            bits -= 8;
            bytes.push((rest >> bits) as u8);
            rest &= (1 << bits) - 1;
        }
    }
    (rest == 0).then_some(bytes)
}

/// Special tokens after the `ranks` in the order of their ids, reserved ones included.
fn added_tokens(
    mut named: BTreeMap<u32, NamedToken>,
    ranks: usize,
) -> Result<Vec<AddedToken>, String> {
    let ids = ranks as u32..(ranks + SPECIAL_TOKENS) as u32;
    if let Some(id) = named.keys().find(|id| !ids.contains(id)) {
        return Err(format!(
            "added_tokens_decoder has a token {id}; with the {ranks} tokens of tiktoken.model, ids \
             must be {} to {}",
            ids.start,
            ids.end - 1
        ));
    }
    ids.map(|id| {
        let reserved = || NamedToken { content: format!("<|reserved_token_{id}|>"), special: true };
        let NamedToken { content, special } = named.remove(&id).unwrap_or_else(reserved);
        match content.is_empty() {
            true => Err(format!("added_tokens_decoder has an empty token {id}")),
            false => Ok(AddedToken::from(content, special).normalized(false)),
        }
    })
    .collect()
}

/// Byte pair encoding (BPE) with the results of tiktoken.
///
/// tiktoken merges any two neighbours whose concatenation is a token, lowest rank first, then
/// leftmost. This model merges listed pairs. One pair per token is enough: as long as no merge has
/// crossed the borders of a range of bytes, the merges within it equal those of the range encoded
/// alone, as the lowest and leftmost merge overall is also the lowest and leftmost within it. So
/// the last merge of a token always has the same two parts.
///
/// A token that its own encoding does not reach is only used for a word that equals it
/// (`ignore_merges`).
fn bpe(tokens: &[Vec<u8>]) -> Result<BytePairs, String> {
    let letters = byte_chars();
    let spell =
        |token: &[u8]| -> String { token.iter().map(|&byte| letters[usize::from(byte)]).collect() };
    let mut ranks: HashMap<&[u8], u32> = HashMap::with_capacity(tokens.len());
    for (token, rank) in tokens.iter().zip(0..) {
        match ranks.entry(token) {
            Entry::Vacant(entry) => entry.insert(rank),
            Entry::Occupied(first) => {
                return Err(format!(
                    "the ranks {} and {rank} are the same token: download it again",
                    first.get()
                ));
            }
        };
    }
    let (mut listed, mut merges) = (TokenList::default(), MergeList::default());
    for (token, rank) in tokens.iter().zip(0..) {
        listed.push(&spell(token), rank)?;
        if let Some(middle) = last_merge(token, &ranks) {
            merges.push(&spell(&token[..middle]), &spell(&token[middle..]))?;
        }
    }
    drop(ranks);
    BytePairs::new(listed, merges, BytePairSettings::ignoring_merges())
}

/// Split point of the last merge that produces `token`. `None` for a single byte, and for a token
/// that merging does not reach.
fn last_merge(token: &[u8], ranks: &HashMap<&[u8], u32>) -> Option<usize> {
    let rank = |start: usize, end: usize| ranks.get(&token[start..end]).copied();
    // Start of each part, and the rank of the part merged with the next one.
    let mut parts: Vec<(usize, Option<u32>)> = (0..token.len())
        .map(|i| (i, (i + 2 <= token.len()).then(|| rank(i, i + 2)).flatten()))
        .collect();
    while parts.len() > 2 {
        let mergeable = parts.iter().enumerate().filter_map(|(i, (_, rank))| Some(((*rank)?, i)));
        let (_, i) = mergeable.min()?;
        parts.remove(i + 1);
        // End of part `j`.
        let end = |j: usize| parts.get(j + 1).map_or(token.len(), |part| part.0);
        let merged =
            |j: usize| (j + 1 < parts.len()).then(|| rank(parts[j].0, end(j + 1))).flatten();
        let (before, here) = (i.checked_sub(1).map(|j| (j, merged(j))), merged(i));
        parts[i].1 = here;
        if let Some((j, rank)) = before {
            parts[j].1 = rank;
        }
    }
    parts.get(1).map(|part| part.0)
}

/// Character of each byte in byte-level vocabularies.
fn byte_chars() -> [char; 256] {
    let mut chars = ['\0'; 256];
    for c in '\0'..='\u{143}' {
        if let Some(byte) = byte_for_char(c) {
            chars[usize::from(byte)] = c;
        }
    }
    chars
}
#[cfg(test)]
mod tests;
