//! The command line: every option with its help.

mod bench;
mod keep;

use std::{num::NonZeroUsize, path::PathBuf};

use clap::{
    Args, Parser, Subcommand, ValueEnum,
    builder::{PossibleValuesParser, TypedValueParser},
};
use clap_complete::Shell;
use moeflux::{KvFormat, PolicyKind, synth};

pub(crate) use bench::{BenchArgs, BenchCommand, FiguresArgs, KernelsArgs, PlanArgs};
pub(crate) use keep::KeepArgs;

use crate::units::parse_size;

const EXAMPLES: &str = "\
Examples:
  moeflux run \"Tell me the fable of The Fox and the Crow.\"
  moeflux run --model ~/models/Qwen3.5-397B-A17B-4bit --memory 8GiB \"Why is the sky blue?\"
  moeflux chat --model ~/models/Qwen3-30B-A3B-4bit
  moeflux inspect --model ~/models/Qwen3-30B-A3B-4bit --memory 6GiB

Without --model, the commands use tales-18m, a small model that is carried in the program
and knows some 300 fables by heart.

Exit codes: 0 done, 1 failed, 2 wrong use, 130 ended by Ctrl-C before there was a result.";

/// Runs Mixture-of-Experts language models that are larger than memory
///
/// The dense weights of a model stay in memory; its experts are read from disk as they are needed, into as many
/// slots as the memory budget allows. Checkpoints are read as they are published: a folder in the format of mlx-lm,
/// or an unquantised one from the Hub.
#[derive(Debug, Parser)]
#[command(name = "moeflux", version, max_term_width = 110, after_help = EXAMPLES)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
    /// Say nothing on stderr but errors: no progress, no notes, no closing line
    #[arg(short, long, global = true, display_order = 900)]
    pub(crate) quiet: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Chat(ChatArgs),
    Inspect(InspectArgs),
    Logits(LogitsArgs),
    Perplexity(PerplexityArgs),
    Bench(Box<BenchArgs>),
    Plan(PlanArgs),
    Replay(ReplayArgs),
    Devices(DevicesArgs),
    Pack(PackArgs),
    Synth(SynthArgs),
    Completions(CompletionsArgs),
}

const MODEL: &str = "Model and memory";
const COMPUTE: &str = "Computing";
const READING: &str = "Reading experts";
const ANSWER: &str = "Answer";
const SAMPLING: &str = "Sampling (by default as the model's generation_config.json says)";

/// Which model.
#[derive(Clone, Debug, Args)]
pub(crate) struct ModelArgs {
    /// Folder of the model [default: the built-in tales-18m]
    ///
    /// A folder with config.json, tokenizer.json and model.safetensors (or shards with their index), as
    /// downloaded from the Hub. The built-in model is unpacked once into the user's cache folder.
    #[arg(short, long, value_name = "DIR", env = "MOEFLUX_MODEL", hide_env_values = true, help_heading = MODEL)]
    pub(crate) model: Option<PathBuf>,
}

/// What it may hold.
#[derive(Clone, Debug, Args)]
pub(crate) struct MemoryArgs {
    /// Memory budget, such as 8GiB [default: three quarters of what may be used]
    ///
    /// Everything is held within it: weights, slots for experts, state, the program. 8GiB and 8G are 8 * 2^30
    /// bytes, 8GB is 8 * 10^9. By default three quarters of what the process may use, limits of its cgroup included.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, env = "MOEFLUX_MEMORY", hide_env_values = true, help_heading = MODEL)]
    pub(crate) memory: Option<u64>,
    /// Budget of a graphics card's own memory [default: nine tenths of it, less 512 MiB]
    ///
    /// Dense weights, state and slots then lie there, and --memory pays for slots on the host for what they do not hold.
    /// Without effect where the processor computes, or an adapter that shares the host's memory.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, env = "MOEFLUX_GPU_MEMORY", hide_env_values = true, help_heading = MODEL)]
    pub(crate) gpu_memory: Option<u64>,
    /// Context: most tokens of prompt and answer [default: 8192 or the model's]
    ///
    /// By default the smaller of the model's own and 8192, shrunk where the budget needs it; then a note says so.
    #[arg(short, long, value_name = "N", help_heading = MODEL)]
    pub(crate) ctx: Option<NonZeroUsize>,
    /// Most bytes of what layers remember, instead of as many as a full context takes
    ///
    /// For a --ctx that is longer than memory: pages are taken as tokens come, and a conversation that finds none left ends with
    /// an error.
    #[arg(long, value_name = "SIZE", value_parser = parse_size, help_heading = MODEL)]
    pub(crate) state_memory: Option<u64>,
    /// Tokens of a prompt that are computed together [default: 512, or 2048 on a card with memory of its own]
    #[arg(long, value_name = "N", help_heading = MODEL)]
    pub(crate) chunk: Option<NonZeroUsize>,
    /// Exactly N slots for experts, instead of as many as the budget holds
    #[arg(long, value_name = "N", hide = true, help_heading = MODEL)]
    pub(crate) slots: Option<NonZeroUsize>,
    /// Which expert gives way when another needs its slot: lfu, lru or s3-fifo
    ///
    /// No answer depends on it, only what is read. `moeflux replay` says what each would read.
    #[arg(long, value_name = "NAME", default_value_t, help_heading = MODEL)]
    pub(crate) policy: PolicyKind,
}

/// What is written down of a run.
#[derive(Debug, Args)]
pub(crate) struct TraceArgs {
    /// Write to FILE which experts each step needs, for `moeflux replay`
    ///
    /// Results stay the same. The file grows with each step and is whole up to the last one, however the program ends. It
    /// holds no text and no tokens. A graphics adapter that looks experts up by itself must tell which they are, so that it
    /// is slower while it is traced.
    #[arg(long, value_name = "FILE", help_heading = MODEL)]
    pub(crate) trace: Option<PathBuf>,
}

/// How it is computed.
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

/// On what it is computed.
#[derive(Clone, Debug, Args)]
pub(crate) struct ComputeArgs {
    /// Worker threads [default: one per physical core]
    #[arg(short, long, value_name = "N", env = "MOEFLUX_THREADS", hide_env_values = true, help_heading = COMPUTE)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Compute in f32 throughout: slower, and the same bits for every --chunk
    #[arg(long, help_heading = COMPUTE)]
    pub(crate) exact: bool,
    /// What keys and values are kept as: f16, f32 or q8 [default: f16, with --exact f32]
    ///
    /// They are most of what a long context takes, and most of what each of its tokens reads. q8 takes little more than
    /// half of f16's memory, and answers differ a little; f32 takes twice as much and loses nothing. --exact is f32 always.
    #[arg(long, value_name = "FORMAT", value_parser = kv_format(), hide_possible_values = true, help_heading = COMPUTE)]
    pub(crate) kv: Option<KvFormat>,
    /// What computes: auto, cpu, gpu or gpu:N
    ///
    /// auto takes a graphics adapter whose memory holds the model's dense weights and the experts of one token, or else
    /// the processor, and says why; never one that is software. gpu takes the best adapter, gpu:N the one that
    /// `moeflux devices` lists as N, and fails if there is none. cpu uses the best instructions that the processor has;
    /// reference is the naive and very slow specification that all others are checked against.
    #[arg(long, value_name = "NAME", value_parser = device, default_value = "auto", env = "MOEFLUX_DEVICE",
        hide_env_values = true, help_heading = COMPUTE)]
    pub(crate) device: String,
    /// Instructions to use instead of the best ones: generic, avx2, avxvnni, avx512, avx512vbmi, neon
    #[arg(long, value_name = "NAME", hide = true, help_heading = COMPUTE)]
    pub(crate) isa: Option<String>,
}

/// When something is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum When {
    Auto,
    On,
    Off,
}

/// How experts are read.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = READING)]
pub(crate) struct ReadArgs {
    /// What reads experts from disk: auto, uring or threads
    ///
    /// auto measures both for a moment at the start and takes the faster one. uring is Linux's io_uring; where the system
    /// forbids it, threads read.
    #[arg(long, value_name = "NAME", default_value = "auto", hide_possible_values = true)]
    pub(crate) reader: ReaderName,
    /// How experts are read: auto, direct or buffered
    ///
    /// direct passes the system's page cache by, which is faster where the model does not fit in memory; buffered uses it. auto is
    /// direct unless memory has room, beside what --memory allows, for the experts that get no slot: then those that are
    /// read again go through the page cache, and all do if it holds the files already. Where a file system has no direct reads, they
    /// are buffered.
    #[arg(long, value_name = "HOW", default_value = "auto", hide_possible_values = true)]
    pub(crate) io: Io,
    /// A folder on another disk with copies of the model's files of tensors, or some of them; may be given several times
    ///
    /// Reads of experts are shared among the copies by their speed, and a copy that fails is replaced by the others. Files that the
    /// model's own folder lacks are taken from the mirrors, so that a model can be spread over disks. Folders that are named in
    /// mirrors.txt in the model's folder, one in a line, are mirrors too.
    #[arg(long, value_name = "DIR")]
    pub(crate) mirror: Vec<PathBuf>,
    /// Read experts before the layer that may need them has chosen: auto, on or off
    ///
    /// auto does it where guesses are good enough, which is measured for each layer. It changes no result.
    #[arg(
        long,
        value_name = "WHEN",
        default_value = "auto",
        alias = "look-ahead",
        hide_possible_values = true
    )]
    pub(crate) prefetch: When,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum ReaderName {
    Auto,
    Uring,
    Threads,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Io {
    Auto,
    Direct,
    Buffered,
}

/// What an answer is like.
#[derive(Debug, Args)]
#[command(next_help_heading = SAMPLING)]
pub(crate) struct AnswerArgs {
    /// 0 always takes the most probable token; higher is more varied
    #[arg(long, value_name = "T", value_parser = within(0.0, f32::MAX), allow_negative_numbers = true)]
    pub(crate) temperature: Option<f32>,
    /// Choose among the K most probable tokens; 0 is all
    #[arg(long, value_name = "K")]
    pub(crate) top_k: Option<usize>,
    /// Choose among the most probable tokens that together reach probability P; 1 is all
    #[arg(long, value_name = "P", value_parser = within(f32::MIN_POSITIVE, 1.0), allow_negative_numbers = true)]
    pub(crate) top_p: Option<f32>,
    /// Choose among tokens at least P times as probable as the most probable one; 0 is all
    #[arg(long, value_name = "P", value_parser = within(0.0, 1.0), allow_negative_numbers = true)]
    pub(crate) min_p: Option<f32>,
    /// Divide the scores of tokens in prompt and answer by R; 1 is off
    #[arg(long, value_name = "R", value_parser = within(f32::MIN_POSITIVE, f32::MAX), allow_negative_numbers = true)]
    pub(crate) repetition_penalty: Option<f32>,
    /// Subtract R from the scores of tokens in the answer; 0 is off
    #[arg(long, value_name = "R", value_parser = within(-2.0, 2.0), allow_negative_numbers = true)]
    pub(crate) presence_penalty: Option<f32>,
    /// Subtract R for each time that a token is in the answer; 0 is off
    #[arg(long, value_name = "R", value_parser = within(-2.0, 2.0), allow_negative_numbers = true)]
    pub(crate) frequency_penalty: Option<f32>,
    /// The same seed gives the same answer [default: another one each time]
    #[arg(long, value_name = "S")]
    pub(crate) seed: Option<u64>,
    /// End the answer before this text; may be given several times
    #[arg(long, value_name = "TEXT", help_heading = ANSWER, value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) stop: Vec<String>,
    /// Most tokens of an answer [default: what the context holds]
    #[arg(short = 'n', long, value_name = "N", help_heading = ANSWER)]
    pub(crate) max_tokens: Option<NonZeroUsize>,
    /// Let the model think before it answers, or not, where its chat template can choose
    #[arg(long, value_name = "on|off", help_heading = ANSWER)]
    pub(crate) thinking: Option<Switch>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

const RUN_EXAMPLES: &str = "\
Examples:
  moeflux run \"Tell me the fable of The Fox and the Crow.\"
  moeflux run --memory 48MiB \"Tell me the story of The Wolf and the Crane.\"
  moeflux run --temperature 0.7 --seed 1 --max-tokens 200 \"Once upon a time\"
  git diff | moeflux run --model DIR --system \"Write a commit message.\" -
  moeflux run --raw --stop . \"The capital of France is\"
  moeflux run --session fox.session \"Tell me the fable of The Fox and the Crow.\"
  moeflux run --session fox.session \"And what became of the Crow?\"
  moeflux run --model DIR --prefix-cache ~/.cache/prompts - < report-and-question.txt
  moeflux run --json --quiet \"Tell me the story of The Wolf and the Crane.\" | jq .statistics

Ctrl-C ends the answer and prints its statistics; the exit code is then 0, or 130 when there
was no answer yet. A second Ctrl-C ends the program at once.";

/// Answer one prompt
///
/// The answer is written to stdout as it is made. On a terminal a progress bar shows loading and prefill; at the
/// end, one line on stderr tells speed, bytes read per token, hit rate and peak memory.
#[derive(Debug, Args)]
#[command(after_help = RUN_EXAMPLES)]
pub(crate) struct RunArgs {
    /// The prompt; `-`, or none when stdin is a pipe or a file, reads it from stdin
    ///
    /// Of what is read from stdin, one line end at the end is dropped.
    #[arg(value_name = "PROMPT | -")]
    pub(crate) prompt: Option<String>,
    /// Give the prompt as it is, without the model's chat template
    #[arg(long)]
    pub(crate) raw: bool,
    /// What the model is told before the prompt
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    pub(crate) system: Option<String>,
    /// Print one JSON object at the end: text, tokens, statistics
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
    #[command(flatten)]
    pub(crate) keep: KeepArgs,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

/// What can be typed in a conversation.
pub(crate) const CHAT_COMMANDS: &str = "  /help           what can be typed
  /reset          forget the conversation, but not the system message
  /system [TEXT]  set or show the system message; - removes it
  /stats          speed, bytes read, hit rate and memory so far
  /save FILE      write the conversation to a file
  /load FILE      go on with a conversation from a file
  /quit           leave; so does Ctrl-D
A line that ends in \\ goes on in the next one. Ctrl-C ends the answer, not the conversation.";

fn chat_help() -> String {
    format!(
        "In the conversation:\n{CHAT_COMMANDS}\n\nExamples:\n  moeflux chat --model DIR --memory 8GiB\n  \
         moeflux chat --model DIR --system \"You are a pirate.\" --temperature 0.8\n  \
         moeflux chat --model DIR --session pirate.session    # goes on where it ended"
    )
}

/// Have a conversation
#[derive(Debug, Args)]
#[command(after_help = chat_help())]
pub(crate) struct ChatArgs {
    /// What the model is told before the conversation
    #[arg(long, value_name = "TEXT")]
    pub(crate) system: Option<String>,
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
    #[command(flatten)]
    pub(crate) keep: KeepArgs,
    #[command(flatten)]
    pub(crate) trace: TraceArgs,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

const INSPECT_EXAMPLES: &str = "\
Examples:
  moeflux inspect --model DIR
  moeflux inspect --model DIR --memory 8GiB --ctx 32768
  moeflux inspect --preset qwen3.5-397b-a17b --memory 24GiB
  moeflux inspect --model DIR --json | jq .sizes";

/// Show what is in a checkpoint, and the memory plan for a budget
///
/// Reads headers only, whatever the size of the files. A budget that is too small is shown as such and is no error.
#[derive(Debug, Args)]
#[command(after_help = INSPECT_EXAMPLES)]
pub(crate) struct InspectArgs {
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    /// Plan for what synth would write for this preset, without any file
    #[arg(long, value_name = "NAME", conflicts_with = "model",
        value_parser = PossibleValuesParser::new(synth::presets().iter().map(|p| p.name)))]
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

/// Write the logits of given tokens, and compare them with others
///
/// FILE.safetensors gets `logits` f32 [n, vocab]; with --trace also `hidden.L` f32 [n, hidden], the output of decoder
/// layer L, and `experts.L` i32 [n, k], the chosen experts of each MoE layer in rank order. The file depends on these
/// numbers only, so the same logits give the same bytes.
///
/// --compare goes through layers and rows in the order of computing and prints where they part: chosen experts (as
/// sets), hidden states, logits.
#[derive(Debug, Args)]
#[command(after_help = LOGITS_EXAMPLES)]
pub(crate) struct LogitsArgs {
    /// Token ids: a file with a JSON array of numbers; `-` is stdin
    #[arg(long, value_name = "FILE.json", required_unless_present_all = ["out", "compare"])]
    pub(crate) tokens: Option<PathBuf>,
    /// Feed the first N tokens at once, the others one by one [default: all at once]
    #[arg(long, value_name = "N", requires = "tokens")]
    pub(crate) prefill: Option<usize>,
    /// The file to write; without --tokens, the file to compare
    #[arg(long, value_name = "FILE.safetensors", required_unless_present = "compare")]
    pub(crate) out: Option<PathBuf>,
    /// Also write hidden states and chosen experts of every layer
    #[arg(long, requires = "tokens")]
    pub(crate) trace: bool,
    /// Compare with this file
    #[arg(long, value_name = "OTHER.safetensors")]
    pub(crate) compare: Option<PathBuf>,
    /// Largest |a - b| that is no difference, in units of the other tensor's root mean square
    #[arg(long, value_name = "T", default_value = "0", value_parser = within(0.0, f32::MAX), requires = "compare")]
    pub(crate) tolerance: f32,
    #[command(flatten)]
    pub(crate) engine: EngineArgs,
}

const PERPLEXITY_EXAMPLES: &str = "\
Examples:
  moeflux perplexity --model DIR --text wiki.test.raw --ctx 2048
  moeflux perplexity --text fables.txt --json | jq .perplexity";

/// Measure how well the model predicts a text
///
/// The text is cut into windows of --ctx tokens; every window starts anew, and each token but its first is predicted
/// from those before it.
#[derive(Debug, Args)]
#[command(after_help = PERPLEXITY_EXAMPLES)]
pub(crate) struct PerplexityArgs {
    /// The text: a file in UTF-8; `-` is stdin
    #[arg(long, value_name = "FILE")]
    pub(crate) text: PathBuf,
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

/// Show what a cache would have read of a recorded run, by size and policy
///
/// Plays a file that --trace wrote against every cache policy, and against the best that could be done by who knows
/// the future (Belady's optimum), and prints the share of needed experts that were in a slot and the bytes missed per
/// token. The cache is empty when the run begins. No model is needed.
///
/// Shown are the steps that decode one token, if there are any; --json and --csv have prefill too.
#[derive(Debug, Args)]
#[command(after_help = REPLAY_EXAMPLES)]
pub(crate) struct ReplayArgs {
    /// The file that --trace wrote
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Numbers of slots [default: from one layer's need to all experts]
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    pub(crate) slots: Vec<NonZeroUsize>,
    /// Memory budgets, with what else the recorded run held beside its slots
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
    /// Also draw hit rate over size
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,
}

const DEVICES_EXAMPLES: &str = "\
Examples:
  moeflux devices
  moeflux devices --json | jq '.adapters[].name'";

/// List what can compute: the processor and the graphics adapters
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

Exit codes: 0 right, 1 failed or something is damaged, 2 wrong use, 130 ended by Ctrl-C; what was
packed until then stays, and the same command goes on from there.";

/// Copy a model so that each expert is one aligned record, or check such a copy
///
/// The copy is a folder like any other, for --model: it gives the same answers to the bit, needs the original no more, and
/// takes as much room. Each expert is read in one piece instead of up to a dozen, and compared with its digest whenever it is
/// read: damage is an error, never a wrong answer.
///
/// While files are written their names end in .partial. A run that ends early, by Ctrl-C, a full disk or a crash, is
/// continued by the same command; what is there is checked first.
#[derive(Debug, Args)]
#[command(after_help = PACK_EXAMPLES)]
pub(crate) struct PackArgs {
    /// Folder of the model to pack [default: the built-in tales-18m]
    ///
    /// With --verify, the folder to compare with, byte for byte.
    #[arg(short, long, value_name = "DIR")]
    pub(crate) model: Option<PathBuf>,
    /// The folder to write; it is made if need be, and must hold no other files
    #[arg(short, long, value_name = "DIR", required_unless_present = "verify")]
    pub(crate) out: Option<PathBuf>,
    /// Read a packed folder again and list what is not as it was packed
    #[arg(long, value_name = "DIR", conflicts_with = "out")]
    pub(crate) verify: Option<PathBuf>,
}

/// The presets that there are, and examples.
fn synth_help() -> String {
    // "Name: layers, experts, size": the preset is called like the model.
    let short =
        |description: &'static str| description.split_once(": ").map_or(description, |(_, d)| d);
    let presets: String = synth::presets()
        .iter()
        .map(|p| format!("  {:<18} {}\n", p.name, short(p.description)))
        .collect();
    format!(
        "Presets:\n{presets}\nExamples:\n  moeflux synth qwen3-30b-a3b --out /data/random-30b\n  \
         moeflux synth qwen3.5-397b-a17b --layers 4 --skew 1 --out /data/random-397b\n  \
         moeflux synth --config DIR/config.json --out /data/random"
    )
}

/// Write a checkpoint of random weights with the shapes of a published model
///
/// For tests and measurements: weights quantised as mlx-lm publishes them, and a small working tokenizer. Written
/// as a stream, so a model of any size needs little memory. While files are written their names end in .partial;
/// after an error nothing is left.
#[derive(Debug, Args)]
#[command(after_help = synth_help())]
pub(crate) struct SynthArgs {
    /// Whose shapes
    #[arg(required_unless_present = "config", conflicts_with = "config",
        value_parser = PossibleValuesParser::new(synth::presets().iter().map(|p| p.name)), hide_possible_values = true)]
    pub(crate) preset: Option<String>,
    /// A config.json to take the shapes from
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// The folder to write; it is made if need be, and must hold no files
    #[arg(short, long, value_name = "DIR")]
    pub(crate) out: PathBuf,
    /// Only the first N layers
    #[arg(long, value_name = "N")]
    pub(crate) layers: Option<NonZeroUsize>,
    /// The same seed writes the same bytes
    #[arg(long, value_name = "S", default_value_t = 0)]
    pub(crate) seed: u64,
    /// How unevenly the routers choose experts: 0 evenly, 1 like a trained model
    #[arg(long, value_name = "Z", default_value_t = 0.0, long_help = synth::SKEW_HELP.replace('\n', " "))]
    pub(crate) skew: f64,
}

const COMPLETIONS_EXAMPLES: &str = "\
Examples:
  moeflux completions bash > ~/.local/share/bash-completion/completions/moeflux
  moeflux completions zsh > ~/.zfunc/_moeflux
  moeflux completions fish > ~/.config/fish/completions/moeflux.fish";

/// Print a script that completes commands and options in a shell
#[derive(Debug, Args)]
#[command(after_help = COMPLETIONS_EXAMPLES)]
pub(crate) struct CompletionsArgs {
    /// The shell
    pub(crate) shell: Shell,
}

/// The name of a format of keys and values.
fn kv_format() -> impl TypedValueParser<Value = KvFormat> {
    PossibleValuesParser::new(KvFormat::ALL.map(KvFormat::name))
        .try_map(|name| KvFormat::by_name(&name))
}

/// The name of a device.
fn device(text: &str) -> Result<String, String> {
    let is_number = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
    let known = ["auto", "cpu", "gpu", "reference"].contains(&text);
    match known || text.strip_prefix("gpu:").is_some_and(is_number) {
        true => Ok(text.to_owned()),
        false => Err("choose auto, cpu, gpu, gpu:N or reference".to_owned()),
    }
}

/// A finite number within bounds.
fn within(low: f32, high: f32) -> impl Fn(&str) -> Result<f32, String> + Clone {
    move |text| {
        let rule = || match (low, high) {
            (0.0, f32::MAX) => "a number of 0 or more".to_owned(),
            (f32::MIN_POSITIVE, f32::MAX) => "a number above 0".to_owned(),
            (f32::MIN_POSITIVE, _) => format!("a number above 0 and up to {high}"),
            _ => format!("a number from {low} to {high}"),
        };
        let number: Option<f32> = text.parse().ok();
        number
            .filter(|n| n.is_finite() && (low..=high).contains(n))
            .ok_or_else(|| format!("it must be {}", rule()))
    }
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
