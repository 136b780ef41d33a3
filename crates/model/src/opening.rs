//! Opening of checkpoints, whose metadata in GGUF the families convert.

use std::path::Path;

use moeflux_base::Error;

use crate::{
    checkpoint::{Checkpoint, CheckpointOptions},
    families::convert_gguf,
};

impl Checkpoint {
    /// Opens a model's folder as it was published, or a GGUF file.
    ///
    /// # Errors
    /// The folder or one of its files is missing, cannot be read, or contradicts itself.
    pub fn open(folder: &Path) -> Result<Self, Error> {
        Self::open_with(folder, &CheckpointOptions::default())
    }

    /// Opens a model's folder or a GGUF file with options.
    ///
    /// A repository in the Hub's cache stands for its snapshot. A GGUF file stands for all parts of
    /// its model, and a folder without config or safetensors for its only model in GGUF.
    ///
    /// # Errors
    /// As [`Checkpoint::open`]; a mirror cannot be opened or has none of the model's files; bytes
    /// that are arriving cannot be fetched; a pre-tokenizer is unknown, or the model has none.
    pub fn open_with(folder: &Path, options: &CheckpointOptions) -> Result<Self, Error> {
        let opened = Self::open_model(folder, options, convert_gguf)?;
        match &options.drafter {
            Some(drafter) => opened.with_drafter(Self::open(drafter)?),
            None => Ok(opened),
        }
    }
}
