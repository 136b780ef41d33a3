//! Tokenizer and chat template of a model whose weights are not loaded.

use std::sync::Arc;

use moeflux::{model::blueprint::Blueprint, text::Text};

use crate::{fault::Fault, model::checkpoint, open_options::OpenOptions, wait::Work};

/// Tokenizer and chat template of a model. Clones share it.
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
