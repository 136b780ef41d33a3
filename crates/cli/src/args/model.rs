//! Arguments that name a model and change how its files are read.

use std::path::PathBuf;

use clap::{Args, builder::NonEmptyStringValueParser};
use moeflux::checkpoint::RopeScaling;

use super::{headings::MODEL, values::path};

/// Model.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArgs {
    /// Folder of the model, or its name ORG/NAME on the Hub [default: the built-in tales-18m]
    ///
    /// A folder with config.json, tokenizer.json and model.safetensors (or shards with their
    /// index), as downloaded from the Hub; or a GGUF file, or any part of a model in several. A
    /// name (ORG/NAME, of GGUF ORG/NAME:Q4_K_M, or as `moeflux pull` takes it) that is not in the
    /// Hub's cache is downloaded once you agree. The built-in model is unpacked once into the
    /// user's cache folder.
    #[arg(short, long, value_parser = path(), value_name = "MODEL", env = "MOEFLUX_MODEL", hide_env_values = true, help_heading = MODEL)]
    pub(crate) model: Option<PathBuf>,
    /// Download a model that is not in the cache without asking
    #[arg(long, help_heading = MODEL)]
    pub(crate) yes: bool,
    /// Scale RoPE for contexts that are longer than the model's: yarn:FACTOR
    ///
    /// The edit of config.json that model cards advise, without editing it. yarn:FACTOR:POSITIONS
    /// also gives the positions that the model was trained for, where the card names fewer than
    /// max_position_embeddings: yarn:4:32768 for Qwen3-30B-A3B. Scaling changes short texts too.
    #[arg(long, value_name = "SCALING", value_parser = str::parse::<RopeScaling>, help_heading = MODEL)]
    pub(crate) rope_scaling: Option<RopeScaling>,
    #[command(flatten)]
    pub(crate) tokenizer: TokenizerArgs,
}

/// Parts of a tokenizer that its model lacks.
#[derive(Clone, Debug, Args)]
pub(crate) struct TokenizerArgs {
    /// Pre-tokenizer of a GGUF file, in place of its tokenizer.ggml.pre
    ///
    /// For a file that names none, `default`, or one that is unknown here, and whose model has the
    /// pre-tokenizer NAME: qwen2, llama-bpe, deepseek-v3 and so on. An unknown NAME lists them all.
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new(), help_heading = MODEL)]
    pub(crate) tokenizer_pre: Option<String>,
}
