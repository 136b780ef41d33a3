//! Text files of a checkpoint, as far as the crate's features read them.

#[cfg(not(feature = "text"))]
use crate::text::sampling::GenerationConfig;
#[cfg(feature = "text")]
use crate::text::text::Text;
use crate::{
    base::{error::Error, text_files::TextFiles},
    text::sampling::EndTokens,
};

/// End tokens of a model; with the feature `text` also its tokenizer and chat template.
pub(crate) struct ModelText {
    end_tokens: EndTokens,
    #[cfg(feature = "text")]
    text: Option<Text>,
}

impl ModelText {
    /// Reads a checkpoint's text files. Without a tokenizer there are no end tokens. `vocab` is the
    /// vocabulary size of the model.
    #[cfg(feature = "text")]
    pub(crate) fn for_checkpoint(checkpoint: &dyn TextFiles, vocab: usize) -> Result<Self, Error> {
        let text = Text::for_checkpoint(checkpoint, vocab)?;
        let end_tokens = text.as_ref().map(|text| text.end().clone()).unwrap_or_default();
        Ok(Self { end_tokens, text })
    }

    /// Reads the ids of the end tokens that a checkpoint's JSON files name. Without a tokenizer
    /// there are none, as with the feature `text`.
    #[cfg(not(feature = "text"))]
    pub(crate) fn for_checkpoint(checkpoint: &dyn TextFiles, _vocab: usize) -> Result<Self, Error> {
        let has_tiktoken = checkpoint.text_file("tiktoken.model").is_some();
        if checkpoint.tokenizer().is_none() && !has_tiktoken {
            return Ok(Self { end_tokens: EndTokens::default() });
        }
        let generation = GenerationConfig::for_checkpoint(checkpoint)?;
        let config = checkpoint.text_file("config.json").unwrap_or_default();
        Ok(Self { end_tokens: EndTokens::new(&generation, &config, &[], |_| true)? })
    }

    /// Refuses prompts of more than `context` tokens.
    #[cfg_attr(not(feature = "text"), allow(unused_variables, clippy::unused_self))]
    pub(crate) fn limit_prompts(&mut self, context: usize) {
        #[cfg(feature = "text")]
        if let Some(text) = &mut self.text {
            text.limit_prompts(context);
        }
    }

    /// Gives grammars these bytes of the memory plan.
    #[cfg(feature = "grammar")]
    pub(crate) fn set_grammar_room(&mut self, bytes: u64) {
        if let Some(text) = &mut self.text {
            text.set_grammar_room(bytes);
        }
    }

    /// Tokens that end an answer.
    pub(crate) fn end_tokens(&self) -> &EndTokens {
        &self.end_tokens
    }

    /// Tokenizer and chat template; `None` without a tokenizer.
    #[cfg(feature = "text")]
    pub(crate) fn text(&self) -> Option<&Text> {
        self.text.as_ref()
    }
}
