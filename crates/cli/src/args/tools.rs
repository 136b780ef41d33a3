//! Arguments of the tools.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::Args;
use clap_complete::Shell;
use moeflux::{experts::PolicyKind, tools::synth};

use super::{
    engine::EngineArgs,
    model::{ModelArgs, TokenizerArgs},
    values::{parse_size, path, preset, within},
};

const INSPECT_EXAMPLES: &str = "\
Examples:
  moeflux inspect --model DIR
  moeflux inspect --model DIR --memory 8GiB --ctx 32768
  moeflux inspect --preset qwen3.5-397b-a17b --memory 24GiB
  moeflux inspect --model DIR --json | jq .sizes";

/// Show the contents of a checkpoint and the memory plan for a budget
///
/// Reads headers only, whatever the size of the files. A budget that is too small is reported in
/// place of a plan and is not an error.
#[derive(Debug, Args)]
#[command(after_help = INSPECT_EXAMPLES)]
pub(crate) struct InspectArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Plan for a synthetic checkpoint of this preset, without any file
    #[arg(long, value_name = "NAME", conflicts_with = "model",
        value_parser = preset())]
    pub(crate) preset: Option<String>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

const LOGITS_EXAMPLES: &str = "\
Examples:
  echo '[1, 2, 3]' | moeflux logits --tokens - --out a.safetensors --trace
  moeflux logits --tokens ids.json --memory 4GiB --compare a.safetensors
  moeflux logits --tokens ids.json --exact --compare mlx.safetensors --tolerance 1e-3
  moeflux logits --out a.safetensors --compare b.safetensors    # two files, no model

Exit codes: 0 no difference beyond the tolerance, 1 differences, 2 wrong use.";

/// Write the logits of given tokens, and compare them with another file
///
/// FILE.safetensors gets `logits` f32 [n, vocab]; with --trace also `hidden.L` f32 [n, hidden], the
/// output of decoder layer L (of all residual streams, if there are several), and `experts.L` i32
/// [n, k], the chosen experts of each MoE layer in rank order. The file depends on these values
/// only, so equal logits give equal bytes.
///
/// --compare goes through layers and rows in the order of computation and prints the first
/// difference: chosen experts (as sets), hidden states, logits.
#[derive(Debug, Args)]
#[command(after_help = LOGITS_EXAMPLES)]
pub(crate) struct LogitsArgs {
    /// Token ids: a file with a JSON array of numbers; `-` is stdin
    #[arg(long, value_parser = path(), value_name = "FILE.json", required_unless_present_all = ["out", "compare"])]
    pub(crate) tokens: Option<PathBuf>,
    /// Prefill the first N tokens, decode the others one by one [default: prefill all]
    #[arg(long, value_name = "N", requires = "tokens")]
    pub(crate) prefill: Option<usize>,
    /// Image of the tokens, which have one placeholder for each; repeatable
    ///
    /// The file also gets the `tokens` as expanded, i32 [tokens], and their `position_ids`, i32 [3,
    /// tokens]: time, row and column. --prefill counts the tokens as given.
    #[arg(long, value_parser = path(), value_name = "FILE", requires = "tokens")]
    pub(crate) image: Vec<PathBuf>,
    /// File to write; without --tokens, the file to compare
    #[arg(long, value_parser = path(), value_name = "FILE.safetensors", required_unless_present = "compare")]
    pub(crate) out: Option<PathBuf>,
    /// Also write hidden states and chosen experts of every layer
    #[arg(long, requires = "tokens")]
    pub(crate) trace: bool,
    /// File to compare with
    #[arg(long, value_parser = path(), value_name = "OTHER.safetensors")]
    pub(crate) compare: Option<PathBuf>,
    /// Largest |a - b| that is accepted, relative to the root mean square of the other tensor
    #[arg(long, value_name = "T", default_value = "0", value_parser = within(0.0, f32::MAX), requires = "compare")]
    pub(crate) tolerance: f32,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

const TOKENIZE_EXAMPLES: &str = "\
Examples:
  moeflux tokenize --model DIR \"Why is the sky blue?\"
  moeflux tokenize --model DIR --ids - < text.txt > tokens.json
  moeflux logits --model DIR --tokens tokens.json --out logits.safetensors";

/// Print the tokens of a text
///
/// A line for each token: its id and its text as a JSON string. Loads the tokenizer alone, not the
/// weights. Marks such as <|im_start|> are special tokens, as in a rendered chat template.
#[derive(Debug, Args)]
#[command(after_help = TOKENIZE_EXAMPLES)]
pub(crate) struct TokenizeArgs {
    /// The text; `-` is stdin
    pub(crate) text: String,
    /// Print a JSON array of ids on one line, as `logits --tokens` takes it
    #[arg(long)]
    pub(crate) ids: bool,
    /// Add no tokens that the tokenizer puts around a text
    #[arg(long)]
    pub(crate) plain: bool,
    /// Image of the text, which has one placeholder for each, as in a rendered chat template;
    /// repeatable
    #[arg(long, value_parser = path(), value_name = "FILE")]
    pub(crate) image: Vec<PathBuf>,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
}

const VISION_EXAMPLES: &str = "\
Examples:
  moeflux vision --model DIR --image screenshot.png --processor-only
  moeflux vision --model DIR --image a.jpg --out a.safetensors";

/// Show an image as a model sees it: its size, patches and tokens, and the tower's rows
///
/// PNG, JPEG, GIF, WebP, BMP and TIFF, told apart by their bytes. FILE.safetensors gets
/// `decoded_rgb` u8 [height, width, 3], upright and on white, `pixel_values` f32 [patches, values]
/// and `grid_thw` i32 [3]: frames, rows and columns of patches. With the vision tower also `embeds`
/// f32 [tokens, hidden], the rows that replace placeholders, and `deepstack.I` of the same shape,
/// the rows that are added after decoder layer I.
#[derive(Debug, Args)]
#[command(after_help = VISION_EXAMPLES)]
pub(crate) struct VisionArgs {
    /// Folder of the model, or its name ORG/NAME on the Hub
    #[arg(short, long, value_parser = path(), value_name = "MODEL", env = "MOEFLUX_MODEL", hide_env_values = true)]
    pub(crate) model: PathBuf,
    /// Download a model that is not in the cache without asking
    #[arg(long)]
    pub(crate) yes: bool,
    /// The image
    #[arg(long, value_parser = path(), value_name = "FILE")]
    pub(crate) image: PathBuf,
    /// Stop before the vision tower: needs config.json and the processor's file, no weights
    #[arg(long)]
    pub(crate) processor_only: bool,
    /// Device of the vision tower: cpu, gpu or gpu:N
    #[arg(long, value_name = "NAME", default_value = "cpu", conflicts_with = "processor_only")]
    pub(crate) device: String,
    /// Compute in f32 throughout
    #[arg(long, conflicts_with = "processor_only")]
    pub(crate) exact: bool,
    /// Worker threads [default: one per physical core]
    #[arg(short, long, value_name = "N", conflicts_with = "processor_only")]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Lower the maximum size of an image to N tokens [default: the model's]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) image_max_tokens: Option<u32>,
    /// File to write
    #[arg(long, value_parser = path(), value_name = "FILE.safetensors")]
    pub(crate) out: Option<PathBuf>,
}

const PERPLEXITY_EXAMPLES: &str = "\
Examples:
  moeflux perplexity --model DIR wiki.test.raw --ctx 2048
  moeflux perplexity fables.txt --json | jq .perplexity";

/// Measure how well the model predicts a text
///
/// The text is split into windows of --ctx tokens. Each window starts with an empty context; every
/// token but its first is predicted from those before it.
#[derive(Debug, Args)]
#[command(after_help = PERPLEXITY_EXAMPLES)]
pub(crate) struct PerplexityArgs {
    /// The text: a file in UTF-8; `-` is stdin
    #[arg(value_parser = path(), value_name = "FILE", required_unless_present = "text")]
    pub(crate) file: Option<PathBuf>,
    /// The same as FILE
    #[arg(long, value_parser = path(), value_name = "FILE", conflicts_with = "file")]
    pub(crate) text: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

const REPLAY_EXAMPLES: &str = "\
Examples:
  moeflux run --trace fox.trace \"Tell me the fable of The Fox and the Crow.\"
  moeflux replay fox.trace
  moeflux replay fox.trace --slots 100,200,400 --csv
  moeflux replay fox.trace --budgets 4GiB,8GiB,12GiB --plot fox.svg";

/// Simulate the expert cache for a recorded run, by size and policy
///
/// Replays a file that --trace wrote with every eviction policy, and with Belady's optimum, which
/// knows the future. It prints hit rates and bytes missed per token. The cache starts empty. No
/// model is needed.
///
/// Decode steps are shown if there are any; --json and --csv include prefill.
#[derive(Debug, Args)]
#[command(after_help = REPLAY_EXAMPLES)]
pub(crate) struct ReplayArgs {
    /// File that --trace wrote
    #[arg(value_parser = path(), value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Numbers of slots [default: from one layer's need to all experts]
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    pub(crate) slots: Vec<NonZeroUsize>,
    /// Memory budgets, including what the recorded run held beside its slots
    #[arg(long, value_name = "SIZE,SIZE,...", value_delimiter = ',', value_parser = parse_size, conflicts_with = "slots")]
    pub(crate) budgets: Vec<u64>,
    /// Only these policies [default: all]
    #[arg(long, value_name = "NAME,NAME,...", value_delimiter = ',')]
    pub(crate) policy: Vec<PolicyKind>,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print comma-separated values
    #[arg(long, conflicts_with = "json")]
    pub(crate) csv: bool,
    /// Also plot hit rates over size
    #[arg(long, value_parser = path(), value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
}

const DEVICES_EXAMPLES: &str = "\
Examples:
  moeflux devices
  moeflux devices --json | jq '.adapters[].name'";

/// List the devices: the processor and the graphics adapters
#[derive(Debug, Args)]
#[command(after_help = DEVICES_EXAMPLES)]
pub(crate) struct DevicesArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

const PACK_EXAMPLES: &str = "\
Examples:
  moeflux pack --model ~/models/Qwen3-30B-A3B-4bit --out /fast/qwen3-30b
  moeflux run --model /fast/qwen3-30b --memory 6GiB \"Why is the sky blue?\"
  moeflux pack --verify /fast/qwen3-30b
  moeflux pack --verify /fast/qwen3-30b --model ~/models/Qwen3-30B-A3B-4bit

Exit codes: 0 right, 1 failed or something is damaged, 2 wrong use, 130 interrupted; what was packed
stays, and the same command resumes.";

/// Pack a model so that each expert is one aligned record, or verify a packed copy
///
/// The copy is a folder for --model like any other. It gives bit-identical answers, does not need
/// the original, and takes as much space. Each expert is one read instead of up to a dozen, and its
/// digest is checked on every read: damage is an error, never a wrong answer.
///
/// Files have names ending in .partial while they are written. After Ctrl-C, a full disk or a
/// crash, the same command resumes, after verifying the written parts.
#[derive(Debug, Args)]
#[command(after_help = PACK_EXAMPLES)]
pub(crate) struct PackArgs {
    /// Folder of the model to pack [default: the built-in tales-18m]
    ///
    /// With --verify, the folder to compare with, byte for byte.
    #[arg(short, long, value_parser = path(), value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// Folder to write; created if missing, and must contain no other files
    #[arg(short, long, value_parser = path(), value_name = "DIR", required_unless_present = "verify")]
    pub(crate) out: Option<PathBuf>,
    /// Read a packed folder again and list damage
    #[arg(long, value_parser = path(), value_name = "DIR", conflicts_with = "out")]
    pub(crate) verify: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) tokenizer: TokenizerArgs,
}

/// List of presets, and examples.
fn synth_help() -> String {
    // "Name: layers, experts, size": the preset is called like the model.
    let short =
        |description: &'static str| description.split_once(": ").map_or(description, |(_, d)| d);
    let width = synth::presets().iter().map(|p| p.name.len()).max().unwrap_or(0);
    let presets: String = synth::presets()
        .iter()
        .map(|p| format!("  {:<width$} {}\n", p.name, short(p.description)))
        .collect();
    format!(
        "Presets:\n{presets}\nExamples:\n  moeflux synth qwen3-30b-a3b --out /data/random-30b\n  \
         moeflux synth qwen3.5-397b-a17b --layers 4 --skew 1 --out /data/random-397b\n  \
         moeflux synth --config DIR/config.json --out /data/random"
    )
}

/// Write a checkpoint of random weights with the shapes of a published model
///
/// For tests and benchmarks: weights quantized as mlx-lm publishes them, and a small working
/// tokenizer. Weights are streamed, so any model size needs little memory. Files have names ending
/// in .partial while they are written; after an error nothing is left.
///
/// Without arguments, lists the presets.
#[derive(Debug, Args)]
#[command(after_help = synth_help())]
pub(crate) struct SynthArgs {
    /// Model whose shapes are used
    #[arg(group = "shapes", requires = "out", value_parser = preset(), hide_possible_values = true)]
    pub(crate) preset: Option<String>,
    /// config.json to take the shapes from
    #[arg(long, group = "shapes", requires = "out", value_parser = path(), value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Folder to write; created if missing, and must be empty
    #[arg(short, long, requires = "shapes", value_parser = path(), value_name = "DIR")]
    pub(crate) out: Option<PathBuf>,
    /// Only the first N layers
    #[arg(long, requires = "out", value_name = "N")]
    pub(crate) layers: Option<NonZeroUsize>,
    /// Seed of the weights; the same seed writes the same bytes
    #[arg(long, requires = "out", value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
    /// At most N rows of n-gram embeddings [default: 1000000]; the published table has 51 GB
    #[arg(long, requires = "out", value_name = "N")]
    pub(crate) ngram_rows: Option<u64>,
    /// Write a GGUF file with blocks of TYPE (q8_0, q4_k_m, iq2_xxs), not safetensors
    #[arg(long, requires = "out", value_name = "TYPE")]
    pub(crate) gguf: Option<synth::GgufRecipe>,
    /// With the head for multi-token prediction, which exports leave out
    #[arg(long, requires = "out", conflicts_with = "gguf")]
    pub(crate) head: bool,
    /// Skew of routing: 0 uniform, 1 like a trained model
    #[arg(long, requires = "out", value_name = "Z", default_value_t = 0.0, long_help = synth::SKEW_HELP.replace('\n', " "))]
    pub(crate) skew: f64,
}

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  moeflux completions bash > ~/.local/share/bash-completion/completions/moeflux
  moeflux completions zsh > ~/.zfunc/_moeflux
  moeflux completions fish > ~/.config/fish/completions/moeflux.fish";

/// Print a shell completion script
#[derive(Debug, Args)]
#[command(after_help = COMPLETIONS_EXAMPLES)]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: Shell,
}

const MAN_EXAMPLES: &str = "\
Examples:
  moeflux man ~/.local/share/man/man1 && man moeflux-run";

/// Write manual pages
///
/// A page for the program and one for each command: moeflux.1, moeflux-run.1, and the others.
#[derive(Debug, Args)]
#[command(after_help = MAN_EXAMPLES)]
pub(crate) struct ManArgs {
    /// Folder to write to; created if missing
    #[arg(value_parser = path(), value_name = "DIR")]
    pub(crate) dir: PathBuf,
}
