//! Log-probabilities in the two forms of OpenAI's API.

use serde::Serialize;
use serde_json::{Map, Value};

use crate::answer::{TokenEntry, TopEntry};

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
    /// Bytes of the token; `null` if it is a part of a character.
    bytes: Option<Vec<u8>>,
}

impl ContentTop {
    fn new(token: String, logprob: f64) -> Self {
        let bytes = (!token.contains(char::REPLACEMENT_CHARACTER)).then(|| token.clone().into());
        Self { token, logprob: logprob.max(NEVER), bytes }
    }
}

impl ContentToken {
    pub(crate) fn new(TokenEntry { text, logprob, top }: TokenEntry) -> Self {
        let entry = |TopEntry { text, logprob }| ContentTop::new(text, logprob);
        Self {
            token: ContentTop::new(text, logprob.unwrap_or_default()),
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
        for TokenEntry { text, logprob, top } in entries {
            logprobs.text_offset.push(*offset);
            *offset += text.chars().count();
            logprobs.token_logprobs.push(logprob.map(|logprob| logprob.max(NEVER)));
            logprobs.top_logprobs.push(logprob.map(|logprob| {
                let mut map = Map::new();
                let chosen = TopEntry { text: text.clone(), logprob };
                for TopEntry { text, logprob } in top.into_iter().chain([chosen]) {
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
