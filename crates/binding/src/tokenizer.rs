//! Tokenizers and chat templates: text to tokens and back.

use std::sync::Arc;

use moeflux::{Message, model::blueprint::Blueprint, text::Text};

use crate::{
    fault::Fault, model::checkpoint, open_options::OpenOptions, request_options::RequestOptions,
    wait::Work,
};

/// Tokenizer and chat template of a model whose weights are not loaded. Clones share it.
#[derive(Clone)]
pub struct Tokenizer {
    text: Arc<Text>,
    vocab: usize,
}

impl Tokenizer {
    /// Opens the files of a model that are its text.
    ///
    /// # Errors
    /// The model is not there, or has no tokenizer.
    pub fn open(path: &str, options: &OpenOptions) -> Result<Self, Fault> {
        let checkpoint = checkpoint(path, options, &Work::default())?;
        let vocab = Blueprint::for_checkpoint(&checkpoint)?.vocab;
        let text = Text::for_checkpoint(&checkpoint, vocab)?;
        let missing = || Fault::Invalid(format!("{path}: the model has no tokenizer"));
        Ok(Self { text: Arc::new(text.ok_or_else(missing)?), vocab })
    }

    /// Tokenizer and chat template.
    pub fn text(&self) -> &Text {
        &self.text
    }

    /// Tokens of the model's vocabulary.
    pub fn vocab(&self) -> usize {
        self.vocab
    }
}

/// Tokens of a text, with the tokens that the model's texts begin with.
///
/// # Errors
/// The tokenizer fails.
pub fn encode(text: &Text, content: &str, add_start: bool) -> Result<Vec<u32>, Fault> {
    Ok(match add_start {
        true => text.encode(content)?,
        false => text.encode_continuation(content)?,
    })
}

/// Text of tokens.
///
/// # Errors
/// A token is not in the vocabulary.
pub fn decode(text: &Text, tokens: &[u32], skip_special: bool) -> Result<String, Fault> {
    Ok(text.tokenizer().decode(tokens, skip_special)?)
}

/// Bytes of a token.
///
/// # Errors
/// There is no such token.
pub fn token_bytes(text: &Text, token: u32) -> Result<Vec<u8>, Fault> {
    let bytes = text.tokenizer().token_bytes(token);
    bytes.ok_or_else(|| Fault::Invalid(format!("the vocabulary has no token {token}")))
}

/// Tokens of a conversation, and the ends of its messages.
///
/// # Errors
/// The chat template fails.
pub fn chat_tokens(
    text: &Text,
    messages: &[Message],
    options: &RequestOptions,
) -> Result<(Vec<u32>, Vec<usize>), Fault> {
    let prompt = text.prompt(messages, &options.chat())?;
    Ok((prompt.tokens, prompt.ends))
}
