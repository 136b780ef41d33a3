//! Measuring and predicting.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::Args;

use super::{EngineArgs, TraceArgs};
use crate::units::{parse_percent, parse_size};

const BENCH_EXAMPLES: &str = "\
Examples:
  moeflux bench
  moeflux bench --model DIR --memory 8GiB --prompt 512 --tokens 64 --repeat 5
  moeflux bench --model DIR --prompt 0 --tokens 128 --json
  moeflux bench --model DIR --context 0,2048,8192 --plot context.svg
  moeflux bench --model DIR --budgets 4GiB,8GiB,12GiB --cold --plot budgets.svg
  moeflux bench --model DIR --save before.json; moeflux bench --model DIR --compare before.json

Exit codes: 0 done, 1 failed, or with --compare something is slower, 2 wrong use.";

/// Measure speed
///
/// Feeds random tokens (always the same ones): a prompt at once, then tokens one by one. Every repeat has a new
/// session and other tokens; the slots stay as the repeat before left them.
///
/// Measured is what an answer waits for: after the prompt and after each token the next one is chosen, greedily, though the
/// token that is fed next is the random one.
///
/// The result is held against what the machine gives at best. The roof is the speed at which each layer's misses are read as
/// fast as the disk can, while all that does not need them is computed as fast as memory can be read. The disk's best is
/// measured once, in about 1.5 seconds, and remembered; that of the memory each time.
#[derive(Debug, Args)]
#[command(after_help = BENCH_EXAMPLES)]
pub(crate) struct BenchArgs {
    /// Tokens of the prompt
    #[arg(short, long, value_name = "N", default_value_t = 128)]
    pub(crate) prompt: usize,
    /// Tokens that are decoded one by one
    #[arg(short = 'n', long, value_name = "N", default_value_t = 32)]
    pub(crate) tokens: usize,
    /// How often
    #[arg(short, long, value_name = "R", default_value = "3")]
    pub(crate) repeat: NonZeroUsize,
    /// Instead of one prompt, prompts of these lengths, such as 0,2048,8192
    #[arg(long, value_name = "N,...", value_delimiter = ',', conflicts_with = "prompt")]
    pub(crate) context: Vec<usize>,
    /// Instead of one budget, these, such as 4GiB,8GiB: each in a process of its own
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_size, conflicts_with = "trace")]
    pub(crate) budgets: Vec<u64>,
    /// Make the system forget the model's files before each repeat
    ///
    /// So that what is read comes from the disk. Where the system cannot do it, that is said.
    #[arg(long)]
    pub(crate) cold: bool,
    /// Measure the disk's best anew, even if it is remembered
    #[arg(long)]
    pub(crate) probe: bool,
    /// Also measure each kernel of a GPU, in one more run
    #[arg(long)]
    pub(crate) profile: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print a table for spreadsheets
    #[arg(long, conflicts_with = "json")]
    pub(crate) csv: bool,
    /// Plot tokens per second, over budgets if there are several, else over contexts
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    /// Also write what --json prints to a file
    #[arg(long, value_name = "FILE.json")]
    pub(crate) save: Option<PathBuf>,
    /// Compare with what --save wrote
    #[arg(long, value_name = "FILE.json")]
    pub(crate) compare: Option<PathBuf>,
    /// With --compare: what is so much slower fails
    #[arg(long, value_name = "PERCENT", default_value = "10%", value_parser = parse_percent, requires = "compare")]
    pub(crate) tolerance: f64,
    /// Measure one budget and print JSON, whatever else is asked for: how several are measured.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, hide = true)]
    pub(crate) only_budget: Option<u64>,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}
