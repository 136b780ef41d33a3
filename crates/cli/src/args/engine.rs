//! Arguments of all commands that load a model.

use std::{num::NonZeroUsize, path::PathBuf};

use clap::{Args, ValueEnum};
use moeflux::{
    experts::PolicyKind,
    runtime::{CardBudgets, KvFormat},
    session::DraftMode,
};

use super::{
    experts_on_host::HostExpertsArg,
    headings::{COMPUTE, MODEL, READING},
    model::ModelArgs,
    values::{device, kv_format, parse_card_sizes, parse_size, parse_size_or_zero, path},
};

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
    /// measured when the model is opened; read where that gains less than 10 %, and with --exact.
    /// With compute and auto, answers depend by rounding on which experts the processor computes,
    /// so on memory, speeds and the uses of earlier runs. auto:FILE takes the division that an
    /// earlier run has recorded in FILE, and answers as that run did; a missing FILE is written.
    /// compute does not go with --exact. `moeflux plan --device gpu` predicts the three.
    #[arg(long, value_name = "HOW", help_heading = MODEL)]
    pub(crate) experts_on_host: Option<HostExpertsArg>,
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
    /// Drafts of several tokens per step: auto, off, mtp, lookup or 1 to 3 [default: off]
    ///
    /// Drafts are guesses at the next tokens, which one step checks together: where they are right,
    /// an answer gets faster, and it is the same in any case. mtp takes the guesses of the model's
    /// own head for multi-token prediction. lookup guesses what followed the last tokens where they
    /// occurred before, as in an edit of a long file. auto has both. Measurements decide in each
    /// step whether drafts pay. With a number, each step has as many; on a GPU they may then change
    /// answers by rounding, unless with --exact.
    #[arg(long, value_name = "HOW", env = "MOEFLUX_DRAFT", hide_env_values = true, help_heading = COMPUTE)]
    pub(crate) draft: Option<DraftMode>,
    /// Folder of a head for multi-token prediction that was split from the model
    ///
    /// As mlx-vlm writes it (model_type qwen3_5_mtp), for a model whose folder has none: exports
    /// leave the head out. Implies --draft auto. The built-in model has one.
    #[arg(long, value_name = "DIR", value_parser = path(), env = "MOEFLUX_DRAFTER", hide_env_values = true, help_heading = COMPUTE)]
    pub(crate) drafter: Option<PathBuf>,
}

impl EngineArgs {
    /// Drafts of answers.
    pub(crate) fn draft(&self) -> DraftMode {
        let default = if self.drafter.is_some() { DraftMode::Auto } else { DraftMode::default() };
        self.draft.unwrap_or(default)
    }
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
    /// Experts in host memory that a GPU reads for each that it needs, to measure a slower bus
    #[arg(long, value_name = "N", hide = true, help_heading = COMPUTE)]
    pub(crate) bus_reads: Option<NonZeroUsize>,
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
