//! Measuring and predicting.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::{Args, Subcommand, builder::PossibleValuesParser};
use moeflux::synth;

use super::{ComputeArgs, EngineArgs, TraceArgs};
use crate::units::{parse_percent, parse_size, parse_speed};

const BENCH_EXAMPLES: &str = "\
Examples:
  moeflux bench
  moeflux bench --model DIR --memory 8GiB --prompt 512 --tokens 64 --repeat 5
  moeflux bench --model DIR --prompt 0 --tokens 128 --json
  moeflux bench --model DIR --context 0,2048,8192 --plot context.svg
  moeflux bench --model DIR --budgets 4GiB,8GiB,12GiB --cold --plot budgets.svg
  moeflux bench --model DIR --memory 8GiB --sessions 1,2,4,8 --prompt 64
  moeflux bench --model DIR --save before.json; moeflux bench --model DIR --compare before.json
  moeflux bench kernels

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
#[command(after_help = BENCH_EXAMPLES, args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: Option<BenchCommand>,
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
    /// Decode in so many sessions together, such as 1,2,4,8: one token of each per step
    ///
    /// Each session has a prompt of its own, of the length of all others, and its own random tokens. Only the steps are measured:
    /// tokens per second are those of all sessions, and what is needed, hit and read is that of a step, of which each expert
    /// counts once for all. All numbers of sessions are measured within one memory plan, that of most.
    ///
    /// A step's roof is made like that of a token: it needs the dense weights once, the state of each session, and of each layer
    /// the experts that any of its sessions chose once. If 1 is among them, the others are compared with it; an adapter's roof is
    /// then the speed if a step took its bytes at the rate at which one session gets through its own.
    #[arg(long, value_name = "N,...", value_delimiter = ',', conflicts_with = "plot")]
    pub(crate) sessions: Vec<NonZeroUsize>,
    /// Instead of one budget, these, such as 4GiB,8GiB: each in a process of its own
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_size, conflicts_with = "trace")]
    pub(crate) budgets: Vec<u64>,
    /// Make the system forget the model's files before each repeat
    ///
    /// So that what is read comes from the disk. Where the system cannot do it, that is said.
    #[arg(long)]
    pub(crate) cold: bool,
    /// Leave the memory of slots untouched: the system hands it out while the first repeat runs
    ///
    /// As in a first answer. Otherwise all of it is written to before anything is measured, as it happens once only, and how long it
    /// takes is the system's doing: a tenth of a second per GiB on most machines, some seconds in some virtual ones.
    #[arg(long)]
    pub(crate) fresh: bool,
    /// Measure the disk's best anew, even if it is remembered
    #[arg(long)]
    pub(crate) probe: bool,
    /// Also measure each kernel of a GPU, in one more run
    ///
    /// Of the first --context and the first number of --sessions, if several are given. Kernels of the answer come after those of its
    /// prompt, whose positions they meet.
    #[arg(long)]
    pub(crate) profile: bool,
    /// Plot tokens per second, over budgets if there are several, else over contexts
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) figures: FiguresArgs,
    /// Measure one budget and print JSON, whatever else is asked for: how several are measured.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, hide = true)]
    pub(crate) only_budget: Option<u64>,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// What becomes of what was measured.
#[derive(Clone, Debug, Args)]
pub(crate) struct FiguresArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print a table for spreadsheets
    #[arg(long, conflicts_with = "json")]
    pub(crate) csv: bool,
    /// Also write what --json prints to a file
    #[arg(long, value_name = "FILE.json")]
    pub(crate) save: Option<PathBuf>,
    /// Compare with what --save wrote; the exit code is 1 if something is slower
    ///
    /// Prints what was measured both now and then, with the ratio of the speeds, and what else differs: the machine, the
    /// model, options. What was measured only once is left out.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) compare: Option<PathBuf>,
    /// With --compare: what is so much slower fails
    #[arg(long, value_name = "PERCENT", default_value = "10%", value_parser = parse_percent, requires = "compare")]
    pub(crate) tolerance: f64,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    Kernels(KernelsArgs),
}

const KERNELS_EXAMPLES: &str = "\
Examples:
  moeflux bench kernels
  moeflux bench kernels --quick --threads 1
  moeflux bench kernels --only matmul,experts --format affine4,mxfp4
  moeflux bench kernels --device gpu --csv
  moeflux bench kernels --save before.json; moeflux bench kernels --compare before.json

Exit codes: 0 done, 1 failed, or with --compare something is slower, 2 wrong use.";

/// Measure each op by itself, in every weight format
///
/// Needs no model: weights are random, their shapes those of Qwen3-30B-A3B and, for what that has not, of other models. They are
/// walked in a cycle that no cache holds, so that what one row of activations needs comes from memory.
///
/// What moves bytes is given in GB/s, what computes in GFLOP/s, and as the share of what the machine gives at best: whichever of
/// reading memory and multiplying takes longer at its best, over the time it took. Of the processor both are measured by
/// themselves, with the same threads; of an adapter, reading is what a kernel reaches that does little else, and multiplying the
/// best of the ops that were measured. Ops on few activations lie in caches and have no share.
///
/// Takes one to two minutes and up to 700 MB of memory. --device auto is the adapter that `moeflux devices` prefers, or else the
/// processor.
#[derive(Debug, Args)]
#[command(after_help = KERNELS_EXAMPLES)]
pub(crate) struct KernelsArgs {
    /// Only these ops, such as matmul,experts
    #[arg(long, value_name = "OP,...", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// Only ops with weights whose format begins like this, such as affine4,mxfp4 or affine4/64
    #[arg(long, value_name = "FORMAT,...", value_delimiter = ',')]
    pub(crate) format: Vec<String>,
    /// The four most usual formats, and less time for each figure
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) figures: FiguresArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
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
/// From what a token must read, how fast the disk and the memory are, and which share of the experts the slots will hold. It
/// says what is possible at best: each layer's misses are read as fast as the disk can, while all that does not need them is
/// computed as fast as memory can be read. With --measured, computing takes the time that it took.
///
/// Without --trace, routers are taken to choose all experts equally often. Those of trained models have favourites, which a
/// cache keeps, so that they do better than predicted, most of all in small budgets.
///
/// Worth having is the smallest budget from which on, as far as this machine's memory goes, twice as much never gives 1.25 times
/// the speed.
#[derive(Debug, Args)]
#[command(after_help = PLAN_EXAMPLES)]
pub(crate) struct PlanArgs {
    /// Folder of the model; goes before --model
    #[arg(value_name = "MODEL", conflicts_with = "preset")]
    pub(crate) folder: Option<PathBuf>,
    /// Plan for what synth would write for this preset, without any file
    #[arg(long, value_name = "NAME", conflicts_with = "model",
        value_parser = PossibleValuesParser::new(synth::presets().iter().map(|p| p.name)))]
    pub(crate) preset: Option<String>,
    /// These budgets, such as 4GiB,8GiB [default: from the floor to everything in memory]
    #[arg(long, value_name = "SIZE,...", value_delimiter = ',', value_parser = parse_size)]
    pub(crate) budgets: Vec<u64>,
    /// Tokens before the one whose time is predicted [default: 1024, or what the model has room for]
    #[arg(long, value_name = "N")]
    pub(crate) context: Option<usize>,
    /// Take the hit rates from a recorded run
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Take the time of computing from what `moeflux bench --save` wrote for this model
    #[arg(long, value_name = "FILE.json")]
    pub(crate) measured: Option<PathBuf>,
    /// Speed of the disk, such as 3.5GB/s [default: measured]
    #[arg(long, value_name = "SPEED", value_parser = parse_speed, conflicts_with = "probe")]
    pub(crate) disk: Option<f64>,
    /// Speed of reading memory, such as 60GB/s [default: measured]
    #[arg(long, value_name = "SPEED", value_parser = parse_speed)]
    pub(crate) ram: Option<f64>,
    /// Measure the disk anew, even if its speed is remembered
    #[arg(long)]
    pub(crate) probe: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Also plot tokens per second over budgets
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}
