//! Fill in the middle: prompts whose answer is the text between a prefix and a suffix.

use moeflux::text::Text;

use super::ask::RawPrompt;
use crate::transport::error::ApiError;

/// Marks before the prefix, the suffix and the middle, in the spellings of tokenizers.
/// The prefix comes first.
const SPELLINGS: [[&str; 3]; 4] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    ["<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"],
];

/// Marks before the names of a repository and of a file, in the spellings of tokenizers.
const FILES: [[&str; 2]; 2] = [["<|repo_name|>", "<|file_sep|>"], ["<reponame>", "<file_sep>"]];

/// Names that a request does not give.
const REPOSITORY: &str = "myproject\n";
const FILE: &str = "filename\n";
const EXTRA_FILE: &str = "tmp";

/// Text before another one, for tokenizers without a mark before the name of a file.
const BEFORE_EXTRA: &str = "\n\n--- snippet ---\n\n";

/// Further tokens at which the middle ends: the start of another file.
const ENDS: [&str; 4] = ["<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>"];

/// Tokens of a model for this.
#[derive(Clone, Debug)]
pub(crate) struct FimTokens {
    marks: [u32; 3],
    /// Marks before the names of a repository and of a file, if there are any.
    files: Option<[u32; 2]>,
    /// Tokens that end the middle, besides the model's own.
    pub(crate) ends: Vec<u32>,
}

/// Texts around an answer, and others as its context.
#[derive(Debug, Default)]
pub(crate) struct InfillTexts {
    pub(crate) prefix: String,
    pub(crate) suffix: String,
    /// Start of the answer.
    pub(crate) middle: String,
    pub(crate) extra: Vec<ExtraText>,
}

/// Text of another file.
#[derive(Debug)]
pub(crate) struct ExtraText {
    pub(crate) name: Option<String>,
    pub(crate) text: String,
}

/// Most tokens of a prompt, and of the texts around its answer, of which the suffix has a quarter.
#[derive(Clone, Copy, Debug)]
pub(crate) struct InfillLengths {
    pub(crate) around: usize,
    pub(crate) all: usize,
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
        let files = FILES.iter().find_map(|marks| {
            let [repository, file] = marks.each_ref().map(id);
            Some([repository?, file?])
        });
        Some(Self { marks, files, ends })
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

    /// Prompt for the text between a prefix and a suffix, as llama.cpp's server makes it: other
    /// texts first, then the texts around the answer. Their far ends are cut off.
    ///
    /// # Errors
    /// The tokenizer cannot represent a text.
    pub(crate) fn infill(
        &self,
        text: &Text,
        texts: &InfillTexts,
        lengths: InfillLengths,
    ) -> Result<RawPrompt, ApiError> {
        let [before_prefix, before_suffix, before_middle] = self.marks;
        let encode = |content: &str| text.tokenizer().encode(content, false);
        let (prefix, suffix) = (encode(&texts.prefix)?, encode(&texts.suffix)?);
        let middle = encode(&texts.middle)?;
        let quarter = lengths.around / 4;
        let prefix = &prefix[prefix.len().saturating_sub(3 * quarter)..];
        let suffix = &suffix[..suffix.len().min(quarter.saturating_sub(middle.len() + 2))];
        let start = text.start_tokens()?;
        let mut around = vec![before_prefix];
        around.extend_from_slice(prefix);
        around.extend_from_slice(&middle);
        around.push(before_suffix);
        around.extend_from_slice(suffix);
        around.push(before_middle);
        let extra = self.extra(text, &texts.extra)?;
        let room = lengths.all.saturating_sub(start.len() + around.len());
        let extra = &extra[extra.len().saturating_sub(room)..];
        Ok(RawPrompt::Tokens([&start, extra, &around].concat()))
    }

    /// Tokens of the texts of other files, up to the one with the answer.
    fn extra(&self, text: &Text, extra: &[ExtraText]) -> Result<Vec<u32>, ApiError> {
        let encode = |content: &str| text.tokenizer().encode(content, false);
        let mut tokens = Vec::new();
        if let Some([repository, _]) = self.files {
            tokens.push(repository);
            tokens.extend(encode(REPOSITORY)?);
        }
        for ExtraText { name, text } in extra {
            match self.files {
                Some([_, file]) => {
                    let name = name.as_deref().unwrap_or(EXTRA_FILE);
                    tokens.push(file);
                    tokens.extend(encode(&format!("{name}\n"))?);
                }
                None => tokens.extend(encode(BEFORE_EXTRA)?),
            }
            tokens.extend(encode(text)?);
        }
        if let Some([_, file]) = self.files {
            tokens.push(file);
            tokens.extend(encode(FILE)?);
        }
        Ok(tokens)
    }
}
