//! Text files of a checkpoint, as far as the crate's features read them.

use moeflux_base::{Error, TextFiles};
use moeflux_model::blueprint::Blueprint;
use moeflux_sampling::EndTokens;

use crate::text::{Text, end_tokens};

/// End tokens of a model; with the feature `text` also its tokenizer and chat template.
pub(crate) struct ModelText {
    end_tokens: EndTokens,
    text: Option<Text>,
}

impl ModelText {
    /// Reads a checkpoint's text files. Without a tokenizer there are no end tokens.
    pub(crate) fn for_checkpoint(files: &dyn TextFiles, model: &Blueprint) -> Result<Self, Error> {
        let mut text = Text::for_checkpoint(files, model.vocab)?;
        if let Some(text) = &mut text {
            text.set_image_token(model.images.map(|images| images.placeholder));
        }
        Ok(Self { end_tokens: end_tokens(text.as_ref(), files)?, text })
    }

    /// Refuses prompts of more than `context` tokens.
    pub(crate) fn limit_prompts(&mut self, context: usize) {
        if let Some(text) = &mut self.text {
            text.limit_prompts(context);
        }
    }

    /// Gives grammars these bytes of the memory plan.
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
    pub(crate) fn text(&self) -> Option<&Text> {
        self.text.as_ref()
    }
}
