//! Text to token ids and back.

mod config;
mod decoder;
#[cfg(test)]
mod tests;
mod tiktoken;

use std::{collections::HashSet, path::Path, path::PathBuf, str, sync::Arc};

use serde::Deserialize;
use tokenizers::{DecoderWrapper, Model as _};

pub use config::TokenizerConfig;
pub use decoder::Decoder;

use crate::base::error::Error;

/// The tokenizer of a checkpoint, read from `tokenizer.json` or `tiktoken.model`. Cloning shares it.
#[derive(Clone, Debug)]
pub struct Tokenizer(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    inner: tokenizers::Tokenizer,
    special: HashSet<u32>,
    vocab_size: usize,
    path: PathBuf,
}

/// Parses as any JSON object does. `tokenizers` panics on wrong syntax inside of a decoder, so that is looked for first.
#[derive(Deserialize)]
struct Syntax {
    #[serde(rename = "decoder", default)]
    _decoder: serde_json::Value,
}

impl Tokenizer {
    /// Reads the contents of a `tokenizer.json`; `path` is for error messages.
    ///
    /// Truncation and padding that the file asks for are training settings and are dropped: a prompt is encoded
    /// whole.
    ///
    /// # Errors
    /// [`Error::Text`] when the bytes are no tokenizer, or one without tokens.
    pub fn from_bytes(tokenizer_json: &[u8], path: &Path) -> Result<Tokenizer, Error> {
        let problem = |problem: String| Error::Text { path: path.to_path_buf(), problem };
        let unreadable = |e: &dyn std::fmt::Display| {
            problem(format!("not a tokenizer that can be read: {e}; is the download complete?"))
        };
        let json = str::from_utf8(tokenizer_json).map_err(|e| unreadable(&e))?;
        serde_json::from_str::<Syntax>(json).map_err(|e| unreadable(&e))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(json).map_err(|e| unreadable(&e))?;
        inner.with_padding(None).with_truncation(None).map_err(|e| unreadable(&e))?;
        let added = inner.get_added_tokens_decoder().into_keys();
        let largest = inner.get_model().get_vocab().into_values().chain(added).max();
        let vocab_size =
            largest.ok_or_else(|| problem("the tokenizer has no tokens".into()))? as usize + 1;
        Ok(Tokenizer::assemble(inner, vocab_size, path))
    }

    fn assemble(inner: tokenizers::Tokenizer, vocab_size: usize, path: &Path) -> Tokenizer {
        let added = inner.get_added_tokens_decoder();
        let special =
            added.into_iter().filter(|(_, token)| token.special).map(|(id, _)| id).collect();
        Tokenizer(Arc::new(Shared { inner, special, vocab_size, path: path.to_path_buf() }))
    }

    /// The token ids of `text`. Special tokens that are written out in the text become their ids, as chat templates
    /// need; `add_special` also adds those that the tokenizer puts around a text by itself (a rendered chat template
    /// has them already).
    ///
    /// # Errors
    /// [`Error::Text`] when the tokenizer cannot represent the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        let encoding = self.0.inner.encode_fast(text, add_special);
        Ok(encoding
            .map_err(|e| self.problem(format!("cannot encode the text: {e}")))?
            .get_ids()
            .to_vec())
    }

    /// The text of `ids`, all at once; bytes that are not UTF-8 become U+FFFD, and an id without a token becomes
    /// nothing (the vocabulary of a model is often padded).
    ///
    /// # Errors
    /// [`Error::Text`] when the tokenizer's own decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        let is_text =
            |&id: &u32| !(skip_special && self.is_special(id)) && self.piece(id).is_some();
        let Some(first) = ids.iter().position(is_text) else {
            // Some decoders panic when given nothing.
            return Ok(String::new());
        };
        self.0
            .inner
            .decode(&ids[first..], skip_special)
            .map_err(|e| self.problem(format!("cannot decode: {e}")))
    }

    /// A [`Decoder`]: text as the tokens come, without special tokens.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(self.clone())
    }

    /// The largest id plus one, added tokens included. A model whose vocabulary is smaller does not belong to this
    /// tokenizer.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// The id of a token as it is written in the vocabulary, for example `<|im_end|>`.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.inner.token_to_id(token)
    }

    /// Whether `id` is a special token (one that is no text, such as `<|im_end|>`).
    pub fn is_special(&self, id: u32) -> bool {
        self.0.special.contains(&id)
    }

    /// The token as the tokenizer's decoder wants it.
    fn piece(&self, id: u32) -> Option<String> {
        let inner = &self.0.inner;
        inner
            .get_added_vocabulary()
            .simple_id_to_token(id)
            .or_else(|| inner.get_model().id_to_token(id))
    }

    /// Whether the tokens are bytes in disguise, as in GPT-2.
    fn is_byte_level(&self) -> bool {
        matches!(self.0.inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_)))
    }

    fn problem(&self, problem: String) -> Error {
        Error::Text { path: self.0.path.clone(), problem }
    }
}
