//! Fill in the middle: prompts whose answer is the text between a prefix and a suffix.

use moeflux::text::Text;

use crate::{ask::RawPrompt, error::ApiError};

/// Marks before the prefix, the suffix and the middle, in the spellings of tokenizers.
/// The prefix comes first.
const SPELLINGS: [[&str; 3]; 4] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
];

/// Further tokens at which the middle ends: the start of another file.
const ENDS: [&str; 4] = ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>"];

/// Tokens of a model for this.
#[derive(Clone, Debug)]
pub(crate) struct FimTokens {
    marks: [u32; 3],
    /// Tokens that end the middle, besides the model's own.
    pub(crate) ends: Vec<u32>,
}

impl FimTokens {
    /// The tokens, if the model has them.
    pub(crate) fn of(text: &Text) -> Option<Self> {
        let tokenizer = text.tokenizer();
        let id = |token: &&str| tokenizer.token_to_id(token);
        let marks = SPELLINGS.iter().find_map(|marks| {
            let [prefix, suffix, middle] = marks.each_ref().map(id);
            Some([prefix?, suffix?, middle?])
        })?;
        let ends = marks.into_iter().chain(ENDS.iter().filter_map(id)).collect();
        Some(Self { marks, ends })
    }

    /// The tokens.
    ///
    /// # Errors
    /// The model has none; the error names the field `suffix`.
    pub(crate) fn required(text: &Text) -> Result<Self, ApiError> {
        let message = "suffix: this model has no tokens that fill in the middle of a text";
        Self::of(text).ok_or_else(|| ApiError::invalid("suffix", message))
    }

    /// Prompt for the text between `prefix` and `suffix`.
    ///
    /// # Errors
    /// The tokenizer cannot represent a text, or it is too long.
    pub(crate) fn prompt(
        &self,
        text: &Text,
        prefix: &str,
        suffix: &str,
    ) -> Result<RawPrompt, ApiError> {
        let [before_prefix, before_suffix, before_middle] = self.marks;
        let mut tokens = text.start_tokens()?;
        tokens.push(before_prefix);
        tokens.extend(text.encode_continuation(prefix)?);
        tokens.push(before_suffix);
        tokens.extend(text.encode_continuation(suffix)?);
        tokens.push(before_middle);
        Ok(RawPrompt::Tokens(tokens))
    }
}
