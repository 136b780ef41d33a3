//! Tokenizer: text to token ids and back.

mod decoder;
#[cfg(test)]
mod tests;
mod tiktoken;
mod tokenizer_config;

use std::{collections::HashSet, path::Path, path::PathBuf, str, sync::Arc};

use serde::Deserialize;
use tokenizers::{DecoderWrapper, Model as _};

pub use decoder::Decoder;
pub use tokenizer_config::{AroundText, TokenizerConfig};

use crate::base::error::Error;

/// Tokenizer of a checkpoint, read from `tokenizer.json` or `tiktoken.model`. Clones share it.
#[derive(Clone, Debug)]
pub struct Tokenizer(Arc<TokenizerInner>);

#[derive(Debug)]
struct TokenizerInner {
    inner: tokenizers::Tokenizer,
    special: HashSet<u32>,
    vocab_size: usize,
    path: PathBuf,
}

/// Checks the JSON syntax of the decoder, as `tokenizers` panics on errors there.
#[derive(Deserialize)]
struct DecoderSyntax {
    #[serde(rename = "decoder", default)]
    _decoder: serde_json::Value,
}

impl Tokenizer {
    /// Reads the contents of a `tokenizer.json`; `path` is for error messages.
    ///
    /// Truncation and padding in the file are training settings and are ignored: prompts are
    /// encoded completely.
    ///
    /// # Errors
    /// [`Error::Text`] if the bytes are not a tokenizer, or it has no tokens.
    pub fn from_bytes(tokenizer_json: &[u8], path: &Path) -> Result<Tokenizer, Error> {
        let problem = |problem: String| Error::Text { path: path.to_path_buf(), problem };
        let unreadable = |e: &dyn std::fmt::Display| {
            problem(format!("not a tokenizer that can be read: {e}; is the download complete?"))
        };
        let json = str::from_utf8(tokenizer_json).map_err(|e| unreadable(&e))?;
        serde_json::from_str::<DecoderSyntax>(json).map_err(|e| unreadable(&e))?;
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
        Tokenizer(Arc::new(TokenizerInner { inner, special, vocab_size, path: path.to_path_buf() }))
    }

    /// Token ids of `text`. Special tokens spelled out in the text become their ids, as chat
    /// templates need. `add_special` also adds the tokens that the tokenizer puts around a text; a
    /// rendered chat template contains them already.
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer cannot represent the text.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>, Error> {
        let encoding = self.0.inner.encode_fast(text, add_special);
        Ok(encoding
            .map_err(|e| self.problem(format!("cannot encode the text: {e}")))?
            .get_ids()
            .to_vec())
    }

    /// Decodes all `ids` at once. Invalid UTF-8 becomes U+FFFD. Ids without a token are skipped, as
    /// the vocabulary of a model is often padded.
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer's decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        let is_text =
            |&id: &u32| !(skip_special && self.is_special(id)) && self.piece(id).is_some();
        let Some(first) = ids.iter().position(is_text) else {
            // Some decoders panic on empty input.
            return Ok(String::new());
        };
        self.0
            .inner
            .decode(&ids[first..], skip_special)
            .map_err(|e| self.problem(format!("cannot decode: {e}")))
    }

    /// Incremental [`Decoder`] that omits special tokens.
    pub fn decoder(&self) -> Decoder {
        Decoder::new(self.clone())
    }

    /// Largest id plus one, added tokens included. The model's vocabulary must be at least this
    /// large.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// Id of a token as spelled in the vocabulary, for example `<|im_end|>`.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.inner.token_to_id(token)
    }

    /// Whether `id` is a special token, such as `<|im_end|>`, which is not part of the text.
    pub fn is_special(&self, id: u32) -> bool {
        self.0.special.contains(&id)
    }

    /// Token as spelled in the vocabulary, the input of the tokenizer's decoder.
    fn piece(&self, id: u32) -> Option<String> {
        let inner = &self.0.inner;
        inner
            .get_added_vocabulary()
            .simple_id_to_token(id)
            .or_else(|| inner.get_model().id_to_token(id))
    }

    /// Whether the vocabulary is byte-level, as in GPT-2.
    fn is_byte_level(&self) -> bool {
        matches!(self.0.inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_)))
    }

    fn problem(&self, problem: String) -> Error {
        Error::Text { path: self.0.path.clone(), problem }
    }
}
