//! Every parser of a file that may come from a stranger, behind one function: for fuzzing and for
//! the test of its corpus.

use std::{fs, io, path::Path};

use crate::{
    base::error::Error, checkpoint::Checkpoint, experts::trace::Trace, model::blueprint::Blueprint,
    session::snapshot::Snapshot,
};

#[cfg(feature = "text")]
use crate::{
    base::text_files::TextFile,
    text::{
        chat::{ChatOptions, ChatTemplate, Message},
        sampling::GenerationConfig,
        tokenizer::{Tokenizer, TokenizerConfig},
    },
};

/// Parser of one kind of file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Parser {
    /// `config.json`, up to the blueprint.
    Config,
    /// `model.safetensors`.
    Safetensors,
    /// A GGUF file, up to the blueprint.
    Gguf,
    /// `model.safetensors.index.json`.
    ShardIndex,
    /// `experts.moeflux`.
    Packed,
    /// `mirrors.txt`.
    Mirrors,
    /// A saved session.
    Snapshot,
    /// A routing trace.
    Trace,
    /// `tokenizer.json`, with a text there and back.
    Tokenizer,
    /// `tiktoken.model`.
    Tiktoken,
    /// `tokenizer_config.json`, with its template.
    TokenizerConfig,
    /// `chat_template.jinja`, with a conversation.
    Template,
    /// `generation_config.json`.
    GenerationConfig,
}

impl Parser {
    /// All parsers. Those of text need the feature `text`.
    pub const ALL: [Self; 13] = [
        Self::Config,
        Self::Safetensors,
        Self::Gguf,
        Self::ShardIndex,
        Self::Packed,
        Self::Mirrors,
        Self::Snapshot,
        Self::Trace,
        Self::Tokenizer,
        Self::Tiktoken,
        Self::TokenizerConfig,
        Self::Template,
        Self::GenerationConfig,
    ];

    /// Name of its fuzzing target and of the folder of its corpus.
    pub fn name(self) -> &'static str {
        match self {
            Self::Config => "config",
            Self::Safetensors => "safetensors",
            Self::Gguf => "gguf",
            Self::ShardIndex => "shard_index",
            Self::Packed => "packed",
            Self::Mirrors => "mirrors",
            Self::Snapshot => "snapshot",
            Self::Trace => "trace",
            Self::Tokenizer => "tokenizer",
            Self::Tiktoken => "tiktoken",
            Self::TokenizerConfig => "tokenizer_config",
            Self::Template => "template",
            Self::GenerationConfig => "generation_config",
        }
    }

    /// Reads `bytes` as a file of this kind. Parsers of files write it to `folder`, their own.
    ///
    /// # Errors
    /// The bytes are not such a file, or the folder cannot be written.
    pub fn read(self, bytes: &[u8], folder: &Path) -> Result<(), Error> {
        let write = |files: &[(&str, &[u8])]| {
            let written: io::Result<()> =
                files.iter().try_for_each(|(name, bytes)| fs::write(folder.join(name), bytes));
            written.map_err(Error::file(folder, "cannot write the file to parse"))
        };
        /// A safetensors file without tensors.
        const EMPTY: &[u8] = b"\x02\0\0\0\0\0\0\0{}";
        let open = || Checkpoint::open(folder);
        match self {
            Self::Config => {
                write(&[("config.json", bytes), ("model.safetensors", EMPTY)])?;
                Blueprint::for_checkpoint(&open()?).map(drop)
            }
            Self::Safetensors => {
                write(&[("config.json", b"{}"), ("model.safetensors", bytes)])?;
                open().map(drop)
            }
            Self::Gguf => {
                write(&[("model.gguf", bytes)])?;
                Blueprint::for_checkpoint(&open()?).map(drop)
            }
            Self::ShardIndex => {
                let index = "model.safetensors.index.json";
                write(&[("config.json", b"{}"), ("model.safetensors", EMPTY), (index, bytes)])?;
                open().map(drop)
            }
            Self::Packed => {
                let dense = ("model.safetensors", EMPTY);
                write(&[("config.json", b"{}"), dense, ("experts.moeflux", bytes)])?;
                open().map(drop)
            }
            Self::Mirrors => {
                let dense = ("model.safetensors", EMPTY);
                write(&[("config.json", b"{}"), dense, ("mirrors.txt", bytes)])?;
                open().map(drop)
            }
            Self::Snapshot => {
                write(&[("session", bytes)])?;
                Snapshot::open(&folder.join("session"))?.verify()
            }
            Self::Trace => {
                write(&[("trace", bytes)])?;
                Trace::open(&folder.join("trace")).map(drop)
            }
            #[cfg(feature = "text")]
            Self::Tokenizer => try_tokenizer(&Tokenizer::from_bytes(bytes, folder)?),
            #[cfg(feature = "text")]
            Self::Tiktoken => {
                let file = |bytes| TextFile { bytes, path: folder.into() };
                try_tokenizer(&Tokenizer::from_tiktoken(&file(bytes), &file(b"{}"))?)
            }
            #[cfg(feature = "text")]
            Self::TokenizerConfig => {
                let config = TokenizerConfig::from_bytes(bytes, folder)?;
                try_template(ChatTemplate::from_files(None, &config)?)
            }
            #[cfg(feature = "text")]
            Self::Template => {
                let file = TextFile { bytes, path: folder.into() };
                try_template(ChatTemplate::from_files(Some(&file), &TokenizerConfig::default())?)
            }
            #[cfg(feature = "text")]
            Self::GenerationConfig => GenerationConfig::from_bytes(bytes, folder).map(drop),
            #[cfg(not(feature = "text"))]
            _ => Ok(()),
        }
    }
}

/// Encodes a text, and decodes it and the first ids token by token.
#[cfg(feature = "text")]
fn try_tokenizer(tokenizer: &Tokenizer) -> Result<(), Error> {
    let ids = tokenizer.encode("Ab ab, é狐 12\n", true)?;
    tokenizer.decode(&ids, false)?;
    let mut decoder = tokenizer.decoder();
    for id in ids.into_iter().chain(0..tokenizer.vocab_size().min(64) as u32) {
        decoder.push(id)?;
    }
    decoder.finish().map(drop)
}

/// Renders a conversation.
#[cfg(feature = "text")]
fn try_template(template: Option<ChatTemplate>) -> Result<(), Error> {
    let messages = [Message::system("s"), Message::user("u"), Message::assistant("a")];
    template
        .map_or(Ok(String::new()), |t| t.render(&messages, true, &ChatOptions::default()))
        .map(drop)
}
