//! Command line arguments and their help texts.

mod answer;
mod bench;
mod hub;
mod model;
mod persist;
mod serve;
mod values;

use std::{num::NonZeroUsize, path::PathBuf};

use clap::{
    Arg, Args, CommandFactory, FromArgMatches, Parser, Subcommand, ValueEnum, builder::Resettable,
    error::ErrorKind,
};
use clap_complete::Shell;
use moeflux::{
    experts::{ExpertsOnHost, PolicyKind},
    runtime::{CardBudgets, KvFormat},
    tools::synth,
};
use unicode_width::UnicodeWidthStr;

use crate::{defaults::Defaults, progress, wrap};
pub(crate) use answer::{AnswerArgs, CHAT_COMMANDS, ChatArgs, FormArgs, RunArgs, Switch};
pub(crate) use bench::{BenchArgs, BenchCommand, DoctorArgs, FigureArgs, KernelsArgs, PlanArgs};
pub(crate) use hub::{ListArgs, PullArgs, RmArgs, ShowArgs};
pub(crate) use model::{ModelArgs, TokenizerArgs};
pub(crate) use persist::PersistArgs;
pub(crate) use serve::ServeArgs;
use values::{device, kv_format, path, preset, within};
pub(crate) use values::{parse_card_sizes, parse_size, parse_size_or_zero};

const EXAMPLES: &str = "\
Examples:
  moeflux run \"Tell me the fable of The Fox and the Crow.\"
  moeflux run --model ~/models/Qwen3.5-397B-A17B-4bit --memory 8GiB \"Why is the sky blue?\"
  moeflux chat --model mlx-community/Qwen3-30B-A3B-4bit
  moeflux inspect --model ~/models/Qwen3-30B-A3B-4bit --memory 6GiB

Without --model, the commands use tales-18m, a small model inside the program
that knows some 300 fables by heart.

Defaults of options are read from moeflux.toml in ~/.config/moeflux, on Windows in
%LOCALAPPDATA%\\moeflux, or from the file that MOEFLUX_CONFIG names:

  memory = \"8GiB\"      # of all commands with --memory
  [serve]
  port = 9000          # of one

Exit codes: 0 done, 1 failed, 2 wrong use, 130 interrupted before a result.";

/// Runs Mixture-of-Experts language models that are larger than memory
///
/// Dense weights of a model stay in memory. Routed experts are streamed from disk into as many
/// slots as the memory budget allows. Checkpoints are read as they are published: a folder in the
/// format of mlx-lm, or an unquantized one from the Hub.
#[derive(Debug, Parser)]
#[command(name = "moeflux", version, max_term_width = 110, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Print nothing on stderr but errors: no progress, notes or statistics
    #[arg(short, long, global = true, display_order = 900)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Chat(ChatArgs),
    Serve(ServeArgs),
    Pull(PullArgs),
    List(ListArgs),
    Show(ShowArgs),
    Rm(RmArgs),
    Inspect(InspectArgs),
    Tokenize(TokenizeArgs),
    Logits(LogitsArgs),
    Perplexity(PerplexityArgs),
    Bench(Box<BenchArgs>),
    Plan(PlanArgs),
    Replay(ReplayArgs),
    Devices(DevicesArgs),
    Doctor(Box<DoctorArgs>),
    Pack(PackArgs),
    Synth(SynthArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
}

const MODEL: &str = "Model and memory";
const COMPUTE: &str = "Computing";
const READING: &str = "Reading experts";
const ANSWER: &str = "Answer";
const SAMPLING: &str = "Sampling (defaults from the model's generation_config.json)";

/// Parses the command line. Empty environment variables count as none: compose files write them.
pub(crate) fn parse() -> Cli {
    if std::env::args_os().len() <= 1 {
        first_words();
    }
    let wrong = |error: anyhow::Error| -> ! {
        progress::error_line(format_args!("error: {error:#}"));
        std::process::exit(2)
    };
    let mut command = without_empty_variables(Cli::command());
    let defaults = Defaults::read().unwrap_or_else(|error| wrong(error));
    if let Some(defaults) = &defaults {
        command = defaults.apply(command).unwrap_or_else(|error| wrong(error));
    }
    let parsed = command.try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.unwrap_or_else(|error| {
        say(&error);
        let is_value =
            [ErrorKind::ValueValidation, ErrorKind::InvalidValue].contains(&error.kind());
        if let Some(defaults) = defaults.filter(|_| is_value) {
            let path = defaults.path().display();
            progress::error_line(format_args!("\nDefaults of options are read from {path}."));
        }
        std::process::exit(error.exit_code())
    })
}

/// Prints help or an error of the parser, in colours unless lines of an error must be wrapped.
fn say(error: &clap::Error) {
    let text = error.render().to_string();
    let is_wide = |columns| text.lines().any(|line| line.width() > columns);
    match error.use_stderr() && wrap::stderr_columns().is_some_and(is_wide) {
        true => progress::error_line(text.trim_end()),
        false => drop(error.print()),
    }
}

/// Commands to begin with, for a user who types the program's name alone.
const FIRST_WORDS: &str = "\
moeflux run \"Tell me the fable of The Fox and the Crow.\"      try it: the model is built in
moeflux pull mlx-community/Qwen3-30B-A3B-4bit                 download a model, or use a folder
moeflux chat --model mlx-community/Qwen3-30B-A3B-4bit         talk to it
moeflux serve --model mlx-community/Qwen3-30B-A3B-4bit        use it from your tools
moeflux help                                                  all commands and options";

/// Prints [`FIRST_WORDS`] and ends the program.
fn first_words() -> ! {
    progress::error_line(FIRST_WORDS);
    std::process::exit(2);
}

fn without_empty_variables(command: clap::Command) -> clap::Command {
    let is_empty =
        |arg: &Arg| arg.get_env().and_then(std::env::var_os).is_some_and(|value| value.is_empty());
    command
        .mut_args(|arg| if is_empty(&arg) { arg.env(Resettable::Reset) } else { arg })
        .mut_subcommands(without_empty_variables)
}

/// Memory budgets and what is planned within them.
#[derive(Clone, Debug, Args)]
pub(crate) struct MemoryArgs {
    /// Memory budget, such as 8GiB [default: three quarters of the available memory]
    ///
    /// Includes everything: weights, expert slots, KV cache, the program. 8GiB and 8G are 8 * 2^30
    /// bytes, 8GB is 8 * 10^9. By default three quarters of the memory available to the process,
    /// within the limits of its cgroup.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, env = "MOEFLUX_MEMORY", hide_env_values = true, help_heading = MODEL)]
    pub(crate) memory: Option<u64>,
    /// Memory budget on a discrete GPU [default: nine tenths of its memory, less 512 MiB]
    ///
    /// It holds dense weights, KV cache and expert slots; --memory then sizes a second-level expert
    /// cache in host memory. Of several cards, SIZE is the budget of each; 20GiB,10GiB are the
    /// budgets of the first and the second. Ignored on the CPU and on adapters that share the
    /// host's memory.
    #[arg(long, value_name = "SIZE", value_parser = parse_card_sizes, env = "MOEFLUX_GPU_MEMORY", hide_env_values = true, help_heading = MODEL)]
    pub(crate) gpu_memory: Option<CardBudgets>,
    /// Experts in host memory beside a discrete GPU: read, compute or auto [default: read]
    ///
    /// read: the GPU computes them, and reads them over the bus. compute: the processor computes
    /// them while the GPU computes its own, in steps of few tokens; faster where memory is faster
    /// than the bus. auto: both, as many each as makes them end together, by speeds that are
    /// measured when the model is opened. Each layer has the same share of its experts on the GPU.
    /// With compute and auto, answers depend on that division, by rounding; neither goes with
    /// --exact. `moeflux plan --device gpu` predicts the three.
    #[arg(long, value_name = "HOW", help_heading = MODEL)]
    pub(crate) experts_on_host: Option<ExpertsOnHost>,
    /// Context: maximum tokens of prompt and answer [default: 8192 or the model's]
    ///
    /// By default the smaller of the model's own and 8192, reduced if the budget requires it; a
    /// note says so.
    #[arg(short, long, value_name = "N", help_heading = MODEL)]
    pub(crate) ctx: Option<NonZeroUsize>,
    /// Maximum memory of KV cache and recurrent states [default: that of a full context]
    ///
    /// For a --ctx that exceeds memory: pages are allocated as tokens arrive, and a conversation
    /// that needs more than this ends with an error.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = MODEL)]
    pub(crate) state_memory: Option<u64>,
    /// Memory for states of earlier prompts, or 0 [default: all that slots leave]
    ///
    /// Later prompts go on from these states, in `serve` and `chat`. Where all experts have slots,
    /// they take the rest of the budget; elsewhere they have a part by the predicted time that they
    /// save, which `moeflux plan` prints. On discrete GPUs it is a part of --gpu-memory, of several
    /// of them together.
    #[arg(long, value_name = "SIZE", value_parser = parse_size_or_zero, help_heading = MODEL)]
    pub(crate) prefix_memory: Option<u64>,
    /// Tokens per prefill chunk [default: 512, or 2048 on a discrete GPU]
    #[arg(long, value_name = "N", help_heading = MODEL)]
    pub(crate) chunk: Option<NonZeroUsize>,
    /// Number of expert slots, instead of as many as the budget holds
    #[arg(long, value_name = "N", hide = true, help_heading = MODEL)]
    pub(crate) slots: Option<NonZeroUsize>,
    /// Eviction policy of the expert cache: lfu, lru or s3-fifo
    ///
    /// Changes the number of reads, never the answer. `moeflux replay` compares policies on a
    /// recorded run.
    #[arg(long, value_name = "NAME", default_value_t, help_heading = MODEL)]
    pub(crate) policy: PolicyKind,
}

/// Recording of routing.
#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// Record to FILE which experts each step needs, for `moeflux replay`
    ///
    /// Results do not change. FILE grows with each step and is valid up to the last complete step,
    /// however the program ends. It contains no text and no tokens. A GPU that resolves experts
    /// itself must report them while recording, which makes it slower.
    #[arg(long, value_parser = path(), value_name = "FILE", help_heading = MODEL)]
    pub(crate) trace: Option<PathBuf>,
}

/// Everything that opening an engine takes.
#[derive(Clone, Debug, Args)]
pub(crate) struct EngineArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    #[command(flatten)]
    pub(crate) memory: MemoryArgs,
    #[command(flatten)]
    pub(crate) reads: ReadArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

/// Device and numeric formats.
#[derive(Clone, Debug, Args)]
pub(crate) struct ComputeArgs {
    /// Worker threads [default: one per physical core]
    #[arg(short, long, value_name = "N", env = "MOEFLUX_THREADS", hide_env_values = true, help_heading = COMPUTE)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Compute in f32 throughout: slower, and bit-identical for every --chunk
    #[arg(long, help_heading = COMPUTE)]
    pub(crate) exact: bool,
    /// Format of the KV cache: f16, f32 or q8 [default: f16, with --exact f32]
    ///
    /// The KV cache is most of the memory of a long context, and most of what each of its tokens
    /// reads. q8 takes slightly more than half the memory of f16 and changes answers slightly; f32
    /// takes twice as much and is lossless. --exact requires f32.
    #[arg(long, value_name = "FORMAT", value_parser = kv_format(), hide_possible_values = true, help_heading = COMPUTE)]
    pub(crate) kv: Option<KvFormat>,
    /// Device that computes: auto, cpu, gpu, gpu:N or several cards, gpu:0,gpu:1
    ///
    /// auto takes a GPU whose memory holds the dense weights and the experts of one token, else the
    /// CPU, and reports why; it never takes a software adapter. gpu takes the best adapter, gpu:N
    /// the one that `moeflux devices` lists as N; it fails if there is none. Of several cards, each
    /// computes some of the layers, as many as its memory has room for: gpu:0 the first ones in
    /// gpu:0,gpu:1. cpu uses the best instruction set of the processor; reference is the naive and
    /// very slow implementation that all others are tested against. Kernels that a Vulkan driver
    /// has compiled are kept in the user's cache folder, in moeflux/pipelines, which may be
    /// deleted.
    #[arg(long, value_name = "NAME", value_parser = device, default_value = "auto", env = "MOEFLUX_DEVICE",
        hide_env_values = true, help_heading = COMPUTE)]
    pub(crate) device: String,
    /// Instruction set, instead of the best one: generic, avx2, avxvnni, avx512, avx512vbmi, neon
    #[arg(long, value_name = "NAME", hide = true, help_heading = COMPUTE)]
    pub(crate) isa: Option<String>,
}

/// Automatic, on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum AutoSwitch {
    Auto,
    On,
    Off,
}

/// Reading of experts.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = READING)]
pub(crate) struct ReadArgs {
    /// I/O backend for experts: auto, uring or threads
    ///
    /// auto measures both briefly at startup and takes the faster one. uring is Linux's io_uring;
    /// threads is used where the system forbids it.
    #[arg(long, value_name = "NAME", default_value = "auto", hide_possible_values = true)]
    pub(crate) reader: ReaderChoice,
    /// Page cache use: auto, direct or buffered
    ///
    /// direct bypasses the system's page cache, which is faster if the model exceeds memory;
    /// buffered uses it. auto is direct, unless memory beyond --memory has room for the experts
    /// that get no slot: then repeated reads go through the page cache, and all reads do if it
    /// already holds the files. Reads are buffered on file systems without direct I/O.
    #[arg(long, value_name = "HOW", default_value = "auto", hide_possible_values = true)]
    pub(crate) io: IoMode,
    /// Folder on another disk with copies of some or all weight files; may be repeated
    ///
    /// Reads of experts are distributed over the copies by their speed, and a failing copy is
    /// replaced by the others. Files missing from the model's folder are taken from the mirrors, so
    /// a model can be spread over several disks. Folders listed in mirrors.txt in the model's
    /// folder, one per line, are mirrors too.
    #[arg(long, value_parser = path(), value_name = "DIR")]
    pub(crate) mirror: Vec<PathBuf>,
    /// Prefetch experts predicted for the next layer: auto, on or off
    ///
    /// auto prefetches where predictions are accurate enough, measured per layer. It never changes
    /// results.
    #[arg(
        long,
        value_name = "WHEN",
        default_value = "auto",
        alias = "look-ahead",
        hide_possible_values = true
    )]
    pub(crate) prefetch: AutoSwitch,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReaderChoice {
    Auto,
    Uring,
    Threads,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum IoMode {
    Auto,
    Direct,
    Buffered,
}

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
    #[command(flatten)]
    pub(crate) model: ModelArgs,
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

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
