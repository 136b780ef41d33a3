//! Stands for `moeflux-text` in a build without the feature `text`: no text is ever made.

use moeflux_base::{Error, TextFiles};
use moeflux_sampling::{EndTokens, GenerationConfig, StopStrings};

/// Problem of a build without tokenizers.
pub(crate) const MISSING: &str =
    "this build cannot turn text into tokens: build it with the feature text";

/// Tokenizer and chat template, of which there are none.
#[derive(Debug)]
pub enum Text {}

impl Text {
    pub(crate) fn for_checkpoint(_: &dyn TextFiles, _vocab: usize) -> Result<Option<Self>, Error> {
        Ok(None)
    }

    pub(crate) fn limit_prompts(&mut self, _context: usize) {
        match *self {}
    }

    pub(crate) fn set_image_token(&mut self, _id: Option<u32>) {
        match *self {}
    }

    pub(crate) fn set_grammar_room(&mut self, _bytes: u64) {
        match *self {}
    }

    pub(crate) fn parser(&self, _prompt: &[u32], _tools: &ToolSet) -> Result<(), Error> {
        match *self {}
    }
}

/// Tools of an answer, of which there are none.
#[derive(Clone, Debug, Default)]
pub struct ToolSet;

/// Text of an answer, which is never made.
#[derive(Debug)]
pub(crate) struct AnswerText;

impl AnswerText {
    pub(crate) fn new(_parser: (), _stops: StopStrings) -> Self {
        Self
    }

    pub(crate) fn push(&mut self, _token: u32) -> Result<bool, Error> {
        Ok(false)
    }

    pub(crate) fn end_token(&mut self) {}
}

/// End tokens that a checkpoint's JSON files name. Without a tokenizer there are none, as with the
/// feature `text`.
pub(crate) fn end_tokens(_: Option<&Text>, files: &dyn TextFiles) -> Result<EndTokens, Error> {
    if files.tokenizer().is_none() && files.text_file("tiktoken.model").is_none() {
        return Ok(EndTokens::default());
    }
    let generation = GenerationConfig::for_checkpoint(files)?;
    let config = files.text_file("config.json").unwrap_or_default();
    EndTokens::new(&generation, &config, &[], |_| true)
}
