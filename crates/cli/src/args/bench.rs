//! Arguments of benchmarks and predictions.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::Args;

use super::{
    engine::{EngineArgs, TraceArgs},
    values::{parse_percent, parse_share, parse_size, parse_speed, path, preset},
};

const BENCH_EXAMPLES: &str = "\
Examples:
  moeflux bench
  moeflux bench --model DIR --memory 8GiB --prompt 512 --tokens 64 --repeat 5
  moeflux bench --model DIR --prompt 0 --tokens 128 --json
  moeflux bench --model DIR --context 0,2048,8192 --plot context.svg
  moeflux bench --model DIR --budgets 4GiB,8GiB,12GiB --cold --plot budgets.svg
  moeflux bench --model DIR --memory 8GiB --sessions 1,2,4,8 --prompt 64
  moeflux bench --model DIR --draft auto --accept 80%
  moeflux bench --model DIR --save before.json; moeflux bench --model DIR --compare before.json

Exit codes: 0 done, 1 failed, or with --compare something is slower, 2 wrong use.";

/// Benchmark a model
///
/// Feeds fixed random tokens: prefill of a prompt, then decode token by token. Each repeat has a
/// new session and other tokens; expert slots keep their contents between repeats.
///
/// Times include greedy sampling of each next token, as a user waits for it, though the token that
/// is fed next is the random one.
///
/// Results are held against a roofline of the machine: each layer's misses are read at the disk's
/// peak, while everything else is computed at the speed of reading memory. The disk is measured
/// once, in about 1.5 seconds, and remembered; memory is measured each time.
#[derive(Debug, Args)]
#[command(after_help = BENCH_EXAMPLES)]
pub(crate) struct BenchArgs {
    /// Tokens of the prompt
    #[arg(short, long, value_name = "N", default_value_t = 128)]
    pub(crate) prompt: usize,
    /// Tokens to decode
    #[arg(short = 'n', long, value_name = "N", default_value_t = 32)]
    pub(crate) tokens: usize,
    /// Number of repeats
    #[arg(short, long, value_name = "R", default_value = "3")]
    pub(crate) repeat: NonZeroUsize,
    /// Place experts by the use counts of earlier runs, and add this run's uses to them
    ///
    /// Other commands always do so. Without it, every run has the same placement.
    #[arg(long)]
    pub(crate) use_counts: bool,
    /// Several prompt lengths instead of one, such as 0,2048,8192
    #[arg(long, value_name = "N,...", value_delimiter = ',', conflicts_with = "prompt")]
    pub(crate) context: Vec<usize>,
    /// Decode batches of this many sessions, such as 1,2,4,8: one token of each per step
    ///
    /// All prompts have the same length and different random tokens. They are prefilled together,
    /// as many tokens in a step as the chunk has. Tokens per second are those of all sessions;
    /// experts needed, hit and read are those of a step, each distinct expert counted once. All
    /// batch sizes share one memory plan, that of the largest.
    ///
    /// A step's roofline has the dense weights once, the state of each session, and the distinct
    /// experts of each layer. If 1 is among the sizes, the others are compared with it; on a GPU
    /// the roofline is then the speed at the byte rate of a single session.
    #[arg(long, value_name = "N,...", value_delimiter = ',', conflicts_with = "plot")]
    pub(crate) sessions: Vec<NonZeroUsize>,
    /// Several memory budgets instead of one, such as 4GiB,8GiB: each in its own process
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_size, conflicts_with = "trace")]
    pub(crate) budgets: Vec<u64>,
    /// Drop the model's files from the page cache before each repeat
    ///
    /// All reads then come from the disk. A note says if the system cannot do it.
    #[arg(long)]
    pub(crate) cold: bool,
    /// Do not touch slot memory before measuring: the system allocates it during the first repeat
    ///
    /// As in a first answer. By default all slot memory is written once before measuring, since
    /// allocation happens only once and takes a tenth of a second per GiB on most machines, but
    /// seconds in some virtual ones.
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Measure the disk again, even if its speed is remembered
    #[arg(long)]
    pub(crate) probe: bool,
    /// Also profile the kernels of a GPU, in one more run
    ///
    /// Uses the first --context and the first of --sessions. Decode kernels run after those of the
    /// prompt, at its positions.
    #[arg(long)]
    pub(crate) profile: bool,
    /// With --draft: share of drafts that are right, such as 80% or 0.8
    ///
    /// A script then makes the drafts: the answer that the model gives without drafts. By default
    /// the drafters that --draft names make them.
    #[arg(long, value_name = "SHARE", value_parser = parse_share, requires = "draft")]
    pub(crate) accept: Option<f64>,
    /// Plot tokens per second, over budgets if there are several, else over contexts
    #[arg(long, value_parser = path(), value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) figures: FigureArgs,
    /// Measure one budget and print JSON, overriding other output options: used by --budgets.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, hide = true)]
    pub(crate) only_budget: Option<u64>,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// Output of figures, and comparison with saved ones.
#[derive(Clone, Debug, Args)]
pub(crate) struct FigureArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print comma-separated values
    #[arg(long, conflicts_with = "json")]
    pub(crate) csv: bool,
    /// Also write the JSON of --json to a file
    #[arg(long, value_parser = path(), value_name = "FILE.json")]
    pub(crate) save: Option<PathBuf>,
    /// Compare with a file of --save; the exit code is 1 if something is slower
    ///
    /// Prints the figures that both runs have, with the ratio of the speeds, and other differences:
    /// machine, model, options.
    #[arg(long, value_parser = path(), value_name = "FILE.json")]
    pub(crate) compare: Option<PathBuf>,
    /// With --compare: how much slower a figure may be
    #[arg(long, value_name = "PERCENT", default_value = "10%", value_parser = parse_percent, requires = "compare")]
    pub(crate) tolerance: f64,
}

const PLAN_EXAMPLES: &str = "\
Examples:
  moeflux plan ~/models/Qwen3-30B-A3B-4bit
  moeflux plan DIR --budgets 4GiB,8GiB,12GiB --context 4096
  moeflux plan DIR --trace chat.trace --plot budgets.svg
  moeflux plan --preset qwen3.5-397b-a17b --disk 3.5GB/s --ram 60GB/s

A trace is what `moeflux run --trace FILE` writes.";

/// Predict decode speed for a range of memory budgets
///
/// Computed from the bytes that a token reads, the speeds of disk and memory, and the expected hit
/// rate. It is an upper bound: each layer's misses are read at the disk's peak, while everything
/// else is computed at the speed of reading memory. With --measured, compute takes as long as it
/// did in a benchmark.
///
/// Without --trace, routing is taken as uniform. Trained models prefer some experts, so their hit
/// rates are better, most of all in small budgets.
///
/// The budget worth having is the smallest one beyond which, within this machine's memory, doubling
/// never gives 1.25 times the speed.
#[derive(Debug, Args)]
#[command(after_help = PLAN_EXAMPLES)]
pub(crate) struct PlanArgs {
    /// Folder of the model; overrides --model
    #[arg(value_parser = path(), value_name = "MODEL", conflicts_with = "preset")]
    pub(crate) folder: Option<PathBuf>,
    /// Predict for a synthetic checkpoint of this preset, without any file
    #[arg(long, value_name = "NAME", conflicts_with = "model",
        value_parser = preset())]
    pub(crate) preset: Option<String>,
    /// Budgets to predict, such as 4GiB,8GiB [default: from the floor to all experts in memory]
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_size)]
    pub(crate) budgets: Vec<u64>,
    /// Position of the predicted token [default: 1024, or the model's last one]
    #[arg(long, value_name = "N")]
    pub(crate) context: Option<usize>,
    /// Take hit rates from a recorded run
    #[arg(long, value_parser = path(), value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Take the compute time from a file of `moeflux bench --save` for this model
    #[arg(long, value_parser = path(), value_name = "FILE.json")]
    pub(crate) measured: Option<PathBuf>,
    /// Bandwidth of the disk, such as 3.5GB/s [default: measured]
    #[arg(long, value_name = "SPEED", value_parser = parse_speed, conflicts_with = "probe")]
    pub(crate) disk: Option<f64>,
    /// Bandwidth of memory, such as 60GB/s [default: measured]
    #[arg(long, value_name = "SPEED", value_parser = parse_speed)]
    pub(crate) ram: Option<f64>,
    /// Measure the disk again, even if its speed is remembered
    #[arg(long)]
    pub(crate) probe: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Also plot tokens per second over budgets
    #[arg(long, value_parser = path(), value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

const DOCTOR_EXAMPLES: &str = "\
Examples:
  moeflux doctor
  moeflux doctor --model ~/models/Qwen3-30B-A3B-4bit
  moeflux doctor --model ~/models/Qwen3-30B-A3B-4bit --json";

/// Check this machine: find slow parts, and say how to change them
///
/// Looks at the processor, memory and its limits, huge pages, io_uring, open files, graphics
/// drivers, and the disk of the models. With --model also at the model's files: how fast they are
/// read, and the decode speed that `moeflux plan` predicts for today's memory and for more.
///
/// Exit codes: 0 done, whatever was found; 1 failed; 2 wrong use.
#[derive(Debug, Args)]
#[command(after_help = DOCTOR_EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}
