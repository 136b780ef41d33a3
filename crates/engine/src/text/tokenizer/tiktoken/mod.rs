//! Checkpoints with `tiktoken.model` instead of `tokenizer.json`: Kimi and Moonlight.

#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    path::Path,
    str,
};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{
    AddedToken, SplitDelimiterBehavior,
    models::bpe::{BPE, Merges, Vocab},
    pre_tokenizers::{
        PreTokenizerWrapper,
        byte_level::ByteLevel,
        sequence::Sequence,
        split::{Split, SplitPattern},
    },
};

use super::{Tokenizer, decoder::byte_of};
use crate::base::error::Error;

/// The class in tokenizer_config.json whose Python code has [`KIMI_WORDS`].
const KIMI_CLASS: &str = "TikTokenTokenizer";

/// How text is cut into words before byte pair encoding: `pat_str` of Kimi's `tokenization_kimi.py`. It is in no file
/// that is data.
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

/// Ids that follow the ranks: `num_reserved_special_tokens` of `tokenization_kimi.py`. Those that tokenizer_config.json
/// does not name are called `<|reserved_token_163589|>`, by their id.
const SPECIAL_TOKENS: usize = 256;

/// Files with more ranks, or longer tokens, are refused: no vocabulary comes near, and joining costs the square of
/// a token's length.
const MAX_RANKS: usize = 1 << 20;
const LONGEST_TOKEN: usize = 512;

/// What matters here of a `tokenizer_config.json`.
#[derive(Deserialize)]
struct Config {
    tokenizer_class: Option<String>,
    #[serde(default)]
    added_tokens_decoder: BTreeMap<u32, Named>,
    #[serde(default)]
    auto_map: Value,
}

impl Config {
    /// The tokenizer's class, or the one that `auto_map` names with its file: `tokenization_kimi.TikTokenTokenizer`.
    fn class(&self) -> Option<&str> {
        let mapped = || self.auto_map.get("AutoTokenizer")?.get(0)?.as_str()?.rsplit('.').next();
        self.tokenizer_class.as_deref().or_else(mapped)
    }
}

#[derive(Deserialize)]
struct Named {
    content: String,
    #[serde(default)]
    special: bool,
}

impl Tokenizer {
    /// Reads the contents of a `tiktoken.model`, one `base64 rank` a line, with the special tokens that the
    /// `tokenizer_config.json` names; the paths are for error messages.
    ///
    /// Texts become the ids that Kimi's own Python gives, with one exception: that code first cuts a text after
    /// 400,000 characters, and runs without (or of nothing but) white space after 25,000. Here they stay whole.
    ///
    /// # Errors
    /// [`Error::Text`] when the file is damaged (the line is named), or its tokenizer is not Kimi's.
    pub fn from_tiktoken(
        (ranks, path): (&[u8], &Path),
        (tokenizer_config_json, config_path): (&[u8], &Path),
    ) -> Result<Tokenizer, Error> {
        let problem = |problem: String| Error::Text { path: path.to_path_buf(), problem };
        let config_problem =
            |problem: String| Error::Text { path: config_path.to_path_buf(), problem };
        let config: Config = serde_json::from_slice(tokenizer_config_json)
            .map_err(|e| config_problem(format!("it does not name the special tokens: {e}")))?;
        // A config that names no class says nothing against the only one that is known.
        if let Some(class) = config.class().filter(|class| *class != KIMI_CLASS) {
            return Err(config_problem(format!(
                "its tokenizer_class is {class:?}; how a tiktoken.model cuts text into words is said in Python only, and \
                 known here for {KIMI_CLASS:?} (Kimi). A tokenizer.json beside it is read instead"
            )));
        }
        let tokens = read_ranks(ranks).map_err(problem)?;
        let added =
            added_tokens(config.added_tokens_decoder, tokens.len()).map_err(config_problem)?;
        let vocab_size = tokens.len() + added.len();

        let mut inner = tokenizers::Tokenizer::new(bpe(&tokens).map_err(problem)?);
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
                    "added_tokens_decoder has the token {:?} for {id}, but there is another of this name",
                    token.content
                )));
            }
        }
        Ok(Tokenizer::assemble(inner, vocab_size, path))
    }
}

/// The tokens by rank. Each rank from 0 on is there once, and so is each single byte: without it, there were texts that
/// cannot be spelt.
fn read_ranks(file: &[u8]) -> Result<Vec<Vec<u8>>, String> {
    let lines = || {
        (1..)
            .zip(file.split(|&byte| byte == b'\n'))
            .filter(|(_, line)| !line.trim_ascii().is_empty())
    };
    let count = lines().count();
    if count > MAX_RANKS {
        return Err(format!("{count} lines; the largest vocabulary that is read has {MAX_RANKS}"));
    }
    let mut tokens = vec![Vec::new(); count];
    for (number, line) in lines() {
        let wrong = |what: &str| {
            let start: String = String::from_utf8_lossy(line).chars().take(40).collect();
            format!("line {number}: {what}: {start:?}; download the file again")
        };
        let (token, rank) =
            split_line(line).ok_or_else(|| wrong("not a token in base64, a space and its rank"))?;
        if token.is_empty() || token.len() > LONGEST_TOKEN {
            return Err(wrong(&format!(
                "a token has 1 to {LONGEST_TOKEN} bytes, this has {}",
                token.len()
            )));
        }
        let place = tokens.get_mut(rank).ok_or_else(|| {
            wrong(&format!(
                "the {count} tokens have the ranks from 0 on without a gap, so {rank} cannot be"
            ))
        })?;
        if !place.is_empty() {
            return Err(wrong(&format!("rank {rank} is there twice")));
        }
        *place = token;
    }
    if let Some(missing) = (0..=255).find(|&byte| !tokens.iter().any(|token| *token == [byte])) {
        return Err(format!(
            "no line is the single byte {missing:#04x}; is the download complete?"
        ));
    }
    Ok(tokens)
}

fn split_line(line: &[u8]) -> Option<(Vec<u8>, usize)> {
    let line = line.trim_ascii();
    let space = line.iter().position(|&byte| byte == b' ')?;
    let rank = str::from_utf8(&line[space + 1..]).ok()?;
    Some((base64(&line[..space])?, rank.parse().ok()?))
}

/// RFC 4648, padded.
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

/// All tokens that follow the `ranks`, in the order of their ids.
fn added_tokens(mut named: BTreeMap<u32, Named>, ranks: usize) -> Result<Vec<AddedToken>, String> {
    let ids = ranks as u32..(ranks + SPECIAL_TOKENS) as u32;
    if let Some(id) = named.keys().find(|id| !ids.contains(id)) {
        return Err(format!(
            "added_tokens_decoder has a token {id}; with the {ranks} tokens of tiktoken.model, they are {} to {}",
            ids.start,
            ids.end - 1
        ));
    }
    ids.map(|id| {
        let reserved = || Named { content: format!("<|reserved_token_{id}|>"), special: true };
        let Named { content, special } = named.remove(&id).unwrap_or_else(reserved);
        match content.is_empty() {
            true => Err(format!("added_tokens_decoder has an empty token {id}")),
            false => Ok(AddedToken::from(content, special).normalized(false)),
        }
    })
    .collect()
}

/// Byte pair encoding that gives what tiktoken gives.
///
/// tiktoken joins any two neighbours that are a token together, lowest rank first, then leftmost. This model joins
/// listed pairs. One pair per token is enough: as long as no join has crossed the borders of a stretch of bytes, the
/// joins inside of it are those that the stretch meets when it is encoded alone, because the lowest and leftmost of all
/// is also the lowest and leftmost there. So the last two parts of a token are always the same two.
///
/// A token that its own encoding never arrives at is only given for a word that is this very token (`ignore_merges`).
fn bpe(tokens: &[Vec<u8>]) -> Result<BPE, String> {
    let letters = byte_letters();
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
    let mut merges = Merges::new();
    for token in tokens {
        if let Some(middle) = last_join(token, &ranks) {
            merges.push((spell(&token[..middle]), spell(&token[middle..])));
        }
    }
    let vocab: Vocab = tokens.iter().map(|token| spell(token)).zip(0..).collect();
    let builder = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(true);
    builder.build().map_err(|e| format!("cannot be used: {e}"))
}

/// Where the two parts meet that byte pair encoding joins last to make `token`. `None` for a single byte, and when it
/// ends with more parts.
fn last_join(token: &[u8], ranks: &HashMap<&[u8], u32>) -> Option<usize> {
    let rank = |from: usize, to: usize| ranks.get(&token[from..to]).copied();
    // Where each part begins, and the rank of that part together with the next one.
    let mut parts: Vec<(usize, Option<u32>)> = (0..token.len())
        .map(|i| (i, (i + 2 <= token.len()).then(|| rank(i, i + 2)).flatten()))
        .collect();
    while parts.len() > 2 {
        let joinable = parts.iter().enumerate().filter_map(|(i, (_, rank))| Some(((*rank)?, i)));
        let (_, i) = joinable.min()?;
        parts.remove(i + 1);
        // Begin of the part after `j`, or the end.
        let after = |j: usize| parts.get(j + 1).map_or(token.len(), |part| part.0);
        let joined =
            |j: usize| (j + 1 < parts.len()).then(|| rank(parts[j].0, after(j + 1))).flatten();
        let (before, here) = (i.checked_sub(1).map(|j| (j, joined(j))), joined(i));
        parts[i].1 = here;
        if let Some((j, rank)) = before {
            parts[j].1 = rank;
        }
    }
    parts.get(1).map(|part| part.0)
}

/// The letter that stands for each byte in byte-level vocabularies.
fn byte_letters() -> [char; 256] {
    let mut letters = ['\0'; 256];
    for letter in '\0'..='\u{143}' {
        if let Some(byte) = byte_of(letter) {
            letters[usize::from(byte)] = letter;
        }
    }
    letters
}
