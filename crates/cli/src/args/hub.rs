//! Arguments of `pull`, `list`, `show` and `rm`.

use std::num::NonZeroUsize;

use clap::Args;
use moeflux_hub::ModelName;

const PULL_EXAMPLES: &str = "\
Examples:
  moeflux pull mlx-community/Qwen3-30B-A3B-4bit
  moeflux pull unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M
  moeflux pull openai/gpt-oss-20b@main
  moeflux pull https://huggingface.co/openai/gpt-oss-20b
  moeflux run --model mlx-community/Qwen3-30B-A3B-4bit \"Why is the sky blue?\"

Environment: HF_TOKEN for private models and those with a licence to accept, HF_HOME for the folder,
HF_ENDPOINT for another server, HF_HUB_OFFLINE=1 for none, HTTPS_PROXY, HTTP_PROXY, ALL_PROXY and
NO_PROXY, SSL_CERT_FILE.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted; the same command resumes.";

/// Download a model from the Hugging Face Hub
///
/// Into the cache that the Hub's tools share: each finds the files that another has fetched.
/// Only the files that the model needs are fetched, in ranges over several connections. After
/// any break the same command resumes. Sizes and digests are checked.
///
/// Prints the folder or GGUF file, which --model takes as well as the name.
#[derive(Debug, Args)]
#[command(after_help = PULL_EXAMPLES)]
pub(crate) struct PullArgs {
    /// ORG/NAME; of a repository with several GGUF files ORG/NAME:Q4_K_M, or ORG/NAME:FILE.gguf
    ///
    /// Also ORG/NAME@REVISION, hf.co/ORG/NAME:Q4_K_M, or the address of the model's page, of its
    /// branch or of its file, as copied from a browser.
    #[arg(value_name = "MODEL", value_parser = str::parse::<ModelName>)]
    pub(crate) model: ModelName,
    /// Branch, tag or commit, as ORG/NAME@REVISION [default: main]
    #[arg(long, value_name = "REVISION")]
    pub(crate) revision: Option<String>,
    /// Only files whose paths match, such as '*.json'; may be repeated
    #[arg(long, value_name = "PATTERN")]
    pub(crate) include: Vec<String>,
    /// Connections at once [default: 8]
    #[arg(long, value_name = "N")]
    pub(crate) connections: Option<NonZeroUsize>,
}

const LIST_EXAMPLES: &str = "\
Examples:
  moeflux list
  moeflux list --json | jq '.[].name'";

/// List the models in the cache of the Hub's tools
#[derive(Debug, Args)]
#[command(after_help = LIST_EXAMPLES)]
pub(crate) struct ListArgs {
    /// Print a JSON array
    #[arg(long)]
    pub(crate) json: bool,
}

const SHOW_EXAMPLES: &str = "\
Examples:
  moeflux show mlx-community/Qwen3-30B-A3B-4bit";

/// Show a model of the cache: its folder, commit and files
#[derive(Debug, Args)]
#[command(after_help = SHOW_EXAMPLES)]
pub(crate) struct ShowArgs {
    /// ORG/NAME
    #[arg(value_name = "MODEL", value_parser = str::parse::<ModelName>)]
    pub(crate) model: ModelName,
    /// Branch, tag or commit, as ORG/NAME@REVISION [default: main]
    #[arg(long, value_name = "REVISION")]
    pub(crate) revision: Option<String>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

const RM_EXAMPLES: &str = "\
Examples:
  moeflux rm mlx-community/Qwen3-30B-A3B-4bit";

/// Remove a model from the cache, with all its revisions and what was begun
#[derive(Debug, Args)]
#[command(after_help = RM_EXAMPLES)]
pub(crate) struct RmArgs {
    /// ORG/NAME
    #[arg(value_name = "MODEL", value_parser = str::parse::<ModelName>)]
    pub(crate) model: ModelName,
    /// Do not ask
    #[arg(short, long)]
    pub(crate) yes: bool,
}
