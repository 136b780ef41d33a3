//! Files of a checkpoint that turn text into tokens and back.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

/// Maximum size of `tokenizer.json` in bytes: three times the largest published ones.
pub const MAX_TOKENIZER: u64 = 128 << 20;

/// Contents of a small file of a checkpoint.
#[derive(Clone, Debug, Default)]
pub struct TextFile<'a> {
    /// The whole contents.
    pub bytes: &'a [u8],
    /// The file, for error messages.
    pub path: PathBuf,
}

/// `tokenizer.json`, opened. It is read as a stream: published ones have up to 40 MB.
pub struct TokenizerFile<'a> {
    /// The contents from their start, without a byte order mark.
    pub reader: Box<dyn Read + 'a>,
    /// The file, for error messages.
    pub path: &'a Path,
}

/// A checkpoint's tokenizer, chat template and settings.
pub trait TextFiles {
    /// Returns the model's folder, or the first of its GGUF files, for messages.
    fn folder(&self) -> &Path;

    /// Returns `config.json`, `tiktoken.model`, `tokenizer_config.json`, `special_tokens_map.json`,
    /// `chat_template.jinja`, `chat_template.json` or `generation_config.json`, if it exists.
    fn text_file(&self, name: &str) -> Option<TextFile<'_>>;

    /// Opens `tokenizer.json`, if it exists.
    fn tokenizer(&self) -> Option<TokenizerFile<'_>>;
}
