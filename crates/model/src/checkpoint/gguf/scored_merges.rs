//! Merges of SentencePiece's BPE, which publishes a score for each token instead.

use std::{cmp::Reverse, collections::HashMap};

use moeflux_base::Error;

use super::{
    super::data_file::DataFile,
    metadata::Metadata,
    text::{BYTE, CONTROL, UNKNOWN, USER_DEFINED, key},
};

/// A token that two others make.
struct ScoredMerge {
    score: f32,
    id: u32,
    /// Bytes of the left token.
    left: u32,
}

/// Tokens as they are read, in flat memory.
#[derive(Default)]
struct TokenTexts {
    text: String,
    /// End of each token in `text`.
    ends: Vec<usize>,
}

impl TokenTexts {
    fn get(&self, id: u32) -> &str {
        let id = id as usize;
        let start = id.checked_sub(1).map_or(0, |before| self.ends[before]);
        &self.text[start..self.ends[id]]
    }
}

/// Calls `each` with the two tokens of every merge, by rank: the highest score first.
///
/// SentencePiece joins the neighbours whose token has the highest score, the leftmost of equal
/// ones. Every pair of tokens that spells a token is a merge of its rank. Of several pairs that
/// spell one token, the longest left one comes first, as in transformers.
///
/// # Errors
/// Tokens or their scores are missing, or differ in number.
pub(super) fn each_scored_merge(
    metadata: &Metadata,
    files: &[DataFile],
    mut each: impl FnMut(&str, &str) -> Result<(), String>,
) -> Result<(), Error> {
    let (tokens, scores) = (key("tokens"), key("scores"));
    let mut texts = TokenTexts::default();
    let found = metadata.each_text(files, &tokens, |token| {
        texts.text.push_str(token);
        texts.ends.push(texts.text.len());
        Ok(())
    })?;
    found.ok_or_else(|| metadata.missing(&tokens))?;
    let values = metadata.floats(files, &scores)?.ok_or_else(|| metadata.missing(&scores))?;
    if values.len() != texts.ends.len() {
        let problem = format!("has {} values for {} tokens", values.len(), texts.ends.len());
        return Err(metadata.problem(&scores, &problem));
    }
    let kinds = metadata.integers(files, &key("token_type"))?.unwrap_or_default();
    let is_text = |id: &u32| {
        let kind = kinds.get(*id as usize);
        !kind.is_some_and(|kind| [UNKNOWN, CONTROL, USER_DEFINED, BYTE].contains(kind))
    };
    let ids = || (0..values.len() as u32).filter(is_text);
    let known: HashMap<&str, u32> = ids().map(|id| (texts.get(id), id)).collect();
    let mut merges = Vec::new();
    for id in ids() {
        let token = texts.get(id);
        for (at, _) in token.char_indices().skip(1) {
            let (left, right) = token.split_at(at);
            if known.contains_key(left) && known.contains_key(right) {
                merges.push(ScoredMerge { score: values[id as usize], id, left: at as u32 });
            }
        }
    }
    merges.sort_unstable_by(|a, b| {
        let place = |merge: &ScoredMerge| (merge.id, Reverse(merge.left));
        b.score.total_cmp(&a.score).then_with(|| place(a).cmp(&place(b)))
    });
    for ScoredMerge { id, left, .. } in merges {
        let (left, right) = texts.get(id).split_at(left as usize);
        each(left, right).map_err(|problem| metadata.problem(&tokens, &problem))?;
    }
    Ok(())
}
