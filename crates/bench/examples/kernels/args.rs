//! Command line of the benchmark.

use std::{env, ffi::OsString, num::NonZeroUsize, path::PathBuf, sync::Arc};

use clap::{
    Arg, Args, CommandFactory, FromArgMatches, Parser,
    builder::{PossibleValuesParser, Resettable, TypedValueParser},
};
use moeflux::runtime::{DeviceOptions, KvFormat, PipelineFolder, PipelineStore};

const COMPUTE: &str = "Computing";

const EXAMPLES: &str = "\
Examples:
  cargo run --release -p moeflux-bench --example kernels
  cargo run --release -p moeflux-bench --example kernels -- --quick --threads 1
  cargo run --release -p moeflux-bench --example kernels -- --only matmul,experts \\
      --format affine4,mxfp4
  cargo run --release -p moeflux-bench --example kernels -- --device gpu --csv
  cargo run --release -p moeflux-bench --example kernels -- --save before.json
  cargo run --release -p moeflux-bench --example kernels -- --compare before.json

Exit codes: 0 done, 1 failed, or with --compare something is slower, 2 wrong use.";

/// Benchmark single ops in every weight format
///
/// Needs no model: weights are random, in shapes of Qwen3-30B-A3B and, for ops it lacks, of other
/// models. Runs cycle through more weights than caches hold, so that a single row of activations
/// reads them from memory.
///
/// Rates are GB/s for ops bound by memory and GFLOP/s for ops bound by arithmetic, with the share
/// of the device's roofline. On a CPU both peaks are measured separately, with the same threads. On
/// a GPU the memory peak is the rate of a simple copy kernel, the arithmetic peak the rate of the
/// best op measured. Ops on few activations run from caches and have no share.
///
/// Takes one to two minutes and up to 700 MB of memory. --device auto is the adapter that `moeflux
/// devices` prefers, else the processor.
#[derive(Debug, Parser)]
#[command(name = "kernels", max_term_width = 110, after_help = EXAMPLES)]
pub(crate) struct KernelsArgs {
    /// Only these ops, such as matmul,experts
    #[arg(long, value_name = "OP,...", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// Only weight formats with these prefixes, such as affine4,mxfp4 or affine4/64
    #[arg(long, value_name = "FORMAT,...", value_delimiter = ',')]
    pub(crate) format: Vec<String>,
    /// The four most common formats, and less time per figure
    #[arg(long)]
    pub(crate) quick: bool,
    #[command(flatten)]
    pub(crate) figures: FigureArgs,
    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
    /// Print nothing on stderr but errors: no progress, notes or statistics
    #[arg(short = 'q', long, display_order = 900)]
    pub(crate) quiet: bool,
}

/// Output of figures, and comparison with saved ones.
#[derive(Debug, Args)]
pub(crate) struct FigureArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Print comma-separated values
    #[arg(long, conflicts_with = "json")]
    pub(crate) csv: bool,
    /// Also write the JSON of --json to a file
    #[arg(long, value_name = "FILE.json")]
    pub(crate) save: Option<PathBuf>,
    /// Compare with a file of --save; the exit code is 1 if something is slower
    ///
    /// Prints the figures that both runs have, with the ratio of the speeds, and other differences:
    /// machine, model, options.
    #[arg(long, value_name = "FILE.json")]
    pub(crate) compare: Option<PathBuf>,
    /// With --compare: how much slower a figure may be
    #[arg(long, value_name = "PERCENT", default_value = "10%", value_parser = percent, requires = "compare")]
    pub(crate) tolerance: f64,
}

/// Device and numeric formats.
#[derive(Debug, Args)]
pub(crate) struct ComputeArgs {
    /// Worker threads [default: one per physical core]
    #[arg(short, long, value_name = "N", env = "MOEFLUX_THREADS", hide_env_values = true, help_heading = COMPUTE)]
    threads: Option<NonZeroUsize>,
    /// Compute in f32 throughout: slower, and bit-identical for every --chunk
    #[arg(long, help_heading = COMPUTE)]
    exact: bool,
    /// Format of the KV cache: f16, f32 or q8 [default: f16, with --exact f32]
    ///
    /// The KV cache is most of the memory of a long context, and most of what each of its tokens
    /// reads. q8 takes slightly more than half the memory of f16 and changes answers slightly; f32
    /// takes twice as much and is lossless. --exact requires f32.
    #[arg(long, value_name = "FORMAT", value_parser = kv_format(), hide_possible_values = true, help_heading = COMPUTE)]
    kv: Option<KvFormat>,
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
    device: String,
    /// Instruction set, instead of the best one: generic, avx2, avxvnni, avx512, avx512vbmi, neon
    #[arg(long, value_name = "NAME", hide = true, help_heading = COMPUTE)]
    isa: Option<String>,
}

impl ComputeArgs {
    pub(crate) fn options(&self) -> DeviceOptions {
        DeviceOptions::default()
            .name(self.device.clone())
            .threads(self.threads.map(Into::into))
            .exact(self.exact)
            .kv_format(self.kv)
            .isa(self.isa.clone())
            .pipelines(pipelines())
    }

    /// Format of the KV cache on the CPU.
    pub(crate) fn kv_format(&self) -> KvFormat {
        let exact = self.exact || self.device == "reference";
        self.kv.unwrap_or(if exact { KvFormat::F32 } else { KvFormat::F16 })
    }
}

/// Parses the command line, the program's name first. Empty environment variables count as none.
///
/// # Errors
/// The arguments are wrong, or ask for help.
pub(crate) fn parse<T: Into<OsString> + Clone>(
    args: impl IntoIterator<Item = T>,
) -> Result<KernelsArgs, clap::Error> {
    let is_empty =
        |arg: &Arg| arg.get_env().and_then(env::var_os).is_some_and(|value| value.is_empty());
    let command = KernelsArgs::command()
        .mut_args(|arg| if is_empty(&arg) { arg.env(Resettable::Reset) } else { arg });
    KernelsArgs::from_arg_matches(&command.try_get_matches_from(args)?)
}

/// Compiled GPU kernels, in the folder where `moeflux` keeps them.
fn pipelines() -> Option<Arc<dyn PipelineStore>> {
    // The XDG specification says to ignore relative paths.
    let absolute = |name: &str| env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let below_home = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
    let base = absolute("XDG_CACHE_HOME").or_else(|| match cfg!(windows) {
        true => absolute("LOCALAPPDATA"),
        false => env::home_dir().filter(|h| h.is_absolute()).map(|home| home.join(below_home)),
    });
    Some(Arc::new(PipelineFolder::new(base?.join("moeflux/pipelines"))))
}

/// Parses `10%` or `10` as 0.1.
fn percent(text: &str) -> Result<f64, String> {
    let number: Option<f64> = text.trim().trim_end_matches('%').trim_end().parse().ok();
    let number = number.filter(|n| (0.0..=100.0).contains(n));
    number
        .map(|n| n / 100.0)
        .ok_or_else(|| "write a percentage from 0 to 100, such as 10%".to_owned())
}

/// Parser of KV cache formats.
fn kv_format() -> impl TypedValueParser<Value = KvFormat> {
    PossibleValuesParser::new(KvFormat::ALL.map(KvFormat::name))
        .try_map(|name| KvFormat::by_name(&name))
}

/// Parses the name of a device, or of several cards with commas.
fn device(text: &str) -> Result<String, String> {
    let is_number = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
    let is_card = |name: &str| name.trim().strip_prefix("gpu:").is_some_and(is_number);
    let known = ["auto", "cpu", "gpu", "reference"].contains(&text);
    match known || text.split(',').all(is_card) {
        true => Ok(text.to_owned()),
        false => {
            Err("choose auto, cpu, gpu, gpu:N, several cards such as gpu:0,gpu:1, or reference"
                .to_owned())
        }
    }
}
