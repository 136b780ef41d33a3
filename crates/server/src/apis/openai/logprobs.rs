//! Log-probabilities in the two forms of OpenAI's API.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::requests::delta::{TokenEntry, TopEntry};

/// Log-probability of a token that cannot occur: JSON has no infinity.
const NEVER: f64 = -9999.0;

/// Log-probabilities of a chat completion's tokens.
#[derive(Clone, Debug, Serialize)]
pub(super) struct ContentLogprobs {
    content: Vec<ContentToken>,
}

/// Log-probability of a token, and of the most probable ones in its place.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct ContentToken {
    #[serde(flatten)]
    token: ContentTop,
    top_logprobs: Vec<ContentTop>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
struct ContentTop {
    token: String,
    logprob: f64,
    /// Bytes of the token; `null` for an id without a token.
    bytes: Option<Vec<u8>>,
}

impl ContentTop {
    fn new(token: String, bytes: Option<Vec<u8>>, logprob: f64) -> Self {
        Self { token, logprob: logprob.max(NEVER), bytes }
    }
}

impl ContentToken {
    pub(crate) fn new(TokenEntry { text, bytes, logprob, top }: TokenEntry) -> Self {
        let entry = |TopEntry { text, bytes, logprob }| ContentTop::new(text, bytes, logprob);
        Self {
            token: ContentTop::new(text, bytes, logprob.unwrap_or_default()),
            top_logprobs: top.into_iter().map(entry).collect(),
        }
    }
}

impl ContentLogprobs {
    /// Of these tokens; `None` without tokens.
    pub(super) fn new(tokens: Vec<TokenEntry>) -> Option<Self> {
        let is_empty = tokens.is_empty();
        (!is_empty).then(|| Self { content: tokens.into_iter().map(ContentToken::new).collect() })
    }

    /// Appends the next part of an answer.
    pub(super) fn add(whole: &mut Option<Self>, part: Option<Self>) {
        match (whole, part) {
            (Some(whole), Some(part)) => whole.content.extend(part.content),
            (whole @ None, part) => *whole = part,
            (Some(_), None) => {}
        }
    }
}

/// Text of a token in a completion: of a part of a character its bytes, as OpenAI's API spells
/// them, so that different tokens have different texts.
fn spelled(text: String, bytes: Option<&[u8]>) -> String {
    let Some(bytes) = bytes.filter(|bytes| std::str::from_utf8(bytes).is_err()) else {
        return text;
    };
    let hex = bytes.iter().map(|byte| format!("\\x{byte:02x}"));
    ["bytes:".to_owned()].into_iter().chain(hex).collect()
}

/// Log-probabilities of a completion's tokens.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct TextLogprobs {
    tokens: Vec<String>,
    /// `null` for the first token of a prompt.
    token_logprobs: Vec<Option<f64>>,
    /// By the text of the token; the token is among them.
    top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Characters before each token.
    text_offset: Vec<usize>,
}

impl TextLogprobs {
    /// Of these tokens, behind `offset` characters, which are counted on; `None` without tokens.
    pub(super) fn new(entries: Vec<TokenEntry>, offset: &mut usize) -> Option<Self> {
        let mut logprobs = Self::default();
        for TokenEntry { text, bytes, logprob, top } in entries {
            logprobs.text_offset.push(*offset);
            // A character counts with the token in which it begins.
            let begins = |byte: &&u8| !(0x80..0xC0).contains(*byte);
            *offset += bytes.iter().flatten().filter(begins).count();
            let text = spelled(text, bytes.as_deref());
            logprobs.token_logprobs.push(logprob.map(|logprob| logprob.max(NEVER)));
            logprobs.top_logprobs.push(logprob.map(|logprob| {
                let mut map = Map::new();
                let top = top.into_iter().map(|TopEntry { text, bytes, logprob }| {
                    (spelled(text, bytes.as_deref()), logprob)
                });
                for (text, logprob) in top.chain([(text.clone(), logprob)]) {
                    // Of tokens with the same text the first is the most probable one.
                    map.entry(text).or_insert_with(|| Value::from(logprob.max(NEVER)));
                }
                map
            }));
            logprobs.tokens.push(text);
        }
        (!logprobs.tokens.is_empty()).then_some(logprobs)
    }

    /// Appends the next part of an answer.
    pub(super) fn add(whole: &mut Option<Self>, part: Option<Self>) {
        let Some(part) = part else { return };
        let whole = whole.get_or_insert_default();
        whole.tokens.extend(part.tokens);
        whole.token_logprobs.extend(part.token_logprobs);
        whole.top_logprobs.extend(part.top_logprobs);
        whole.text_offset.extend(part.text_offset);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn entry(bytes: &[u8]) -> TokenEntry {
        let text = String::from_utf8_lossy(bytes).into_owned();
        let top = TopEntry { text: text.clone(), bytes: Some(bytes.to_vec()), logprob: -0.5 };
        TokenEntry { text, bytes: Some(bytes.to_vec()), logprob: Some(-0.5), top: vec![top] }
    }

    #[test]
    fn parts_of_a_character_have_their_bytes() {
        let parts = ["A".as_bytes(), b"\xF0\x9F", b"\x98", b"\x80", "é ".as_bytes(), b"B"];
        let content = json!(ContentLogprobs::new(parts.map(entry).to_vec()));
        for (part, token) in parts.iter().zip(content["content"].as_array().unwrap()) {
            assert_eq!(token["bytes"], json!(part));
            assert_eq!(token["top_logprobs"][0]["bytes"], json!(part));
        }
        let text = json!(TextLogprobs::new(parts.map(entry).to_vec(), &mut 3));
        let tokens = ["A", r"bytes:\xf0\x9f", r"bytes:\x98", r"bytes:\x80", "é ", "B"];
        assert_eq!(text["tokens"], json!(tokens));
        assert_eq!(text["text_offset"], json!([3, 4, 5, 5, 5, 7]));
        assert_eq!(text["top_logprobs"][2], json!({r"bytes:\x98": -0.5}));
        let none = TokenEntry { text: String::new(), bytes: None, logprob: None, top: vec![] };
        assert_eq!(json!(ContentToken::new(none))["bytes"], json!(null));
    }
}
