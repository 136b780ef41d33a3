//! Every parser of a file that may come from a stranger, behind one function: for fuzzing and for
//! the test of its corpus.

use std::{fs, io, path::Path};

use moeflux_base::Error;
use moeflux_model::{blueprint::Blueprint, checkpoint::Checkpoint};

use crate::{
    experts::{ExpertPlan, trace::Trace},
    session::snapshot::Snapshot,
};

pub use super::parser::Parser;
#[cfg(feature = "text")]
use super::text_parsers::text;

#[cfg(feature = "vision")]
fn image(parser: Parser, bytes: &[u8], folder: &Path) -> Result<(), Error> {
    use moeflux_base::TextFile;
    use moeflux_vision::{ImageData, ImageLimits, ImageSize, Processor};

    if parser == Parser::Image {
        // Small enough for a fuzzer that runs many at once.
        let limits = ImageLimits::default().max_pixels(1 << 20).max_alloc(16 << 20);
        return ImageData::decode(bytes, &limits).map(drop);
    }
    // One file stands for both, so that it chooses the family, too.
    let file = TextFile { bytes, path: folder.into() };
    let processor = Processor::from_files(&file, Some(&file))?;
    let size = ImageSize { width: 40, height: 30 };
    let image = ImageData::from_rgb(size, vec![128; 40 * 30 * 3])?;
    processor.with_max_tokens(256).process(&image).map(drop)
}

#[cfg(not(feature = "vision"))]
fn image(_: Parser, _: &[u8], _: &Path) -> Result<(), Error> {
    Ok(())
}

impl Parser {
    /// All parsers. Text parsers need the feature `text`, image parsers `vision`.
    pub const ALL: [Self; 16] = [
        Self::Config,
        Self::Safetensors,
        Self::Gguf,
        Self::ShardIndex,
        Self::Packed,
        Self::Mirrors,
        Self::Snapshot,
        Self::Trace,
        Self::ExpertPlan,
        Self::Tokenizer,
        Self::Tiktoken,
        Self::TokenizerConfig,
        Self::Template,
        Self::GenerationConfig,
        Self::Image,
        Self::ImageProcessor,
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
            Self::ExpertPlan => "expert_plan",
            Self::Tokenizer => "tokenizer",
            Self::Tiktoken => "tiktoken",
            Self::TokenizerConfig => "tokenizer_config",
            Self::Template => "template",
            Self::GenerationConfig => "generation_config",
            Self::Image => "image",
            Self::ImageProcessor => "image_processor",
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
            Self::ExpertPlan => {
                write(&[("plan.json", bytes)])?;
                ExpertPlan::read(&folder.join("plan.json")).map(drop)
            }
            Self::Image | Self::ImageProcessor => image(self, bytes, folder),
            _ => text(self, bytes, folder),
        }
    }
}

#[cfg(not(feature = "text"))]
fn text(_: Parser, _: &[u8], _: &Path) -> Result<(), Error> {
    Ok(())
}
