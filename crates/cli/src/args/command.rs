//! The command line and its commands.

use clap::{
    Arg, CommandFactory, FromArgMatches, Parser, Subcommand, builder::Resettable, error::ErrorKind,
};
use unicode_width::UnicodeWidthStr;

use super::{
    answer::{ChatArgs, RunArgs},
    bench::{BenchArgs, DoctorArgs, PlanArgs},
    hub::{ListArgs, PullArgs, RmArgs, ShowArgs},
    serve::ServeArgs,
    tools::{
        CompletionsArgs, DevicesArgs, InspectArgs, LogitsArgs, ManArgs, PackArgs, PerplexityArgs,
        ReplayArgs, SynthArgs, TokenizeArgs, VisionArgs,
    },
};
use crate::{defaults::Defaults, invocation::Invocation, progress, wrap};

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
    Vision(VisionArgs),
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

/// Parses the command line. Empty environment variables count as none: compose files write them.
pub(crate) fn parse() -> Cli {
    let args = &Invocation::current().args;
    if args.is_empty() {
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
    let words = std::iter::once("moeflux".into()).chain(args.iter().cloned());
    let parsed =
        command.try_get_matches_from(words).and_then(|matches| Cli::from_arg_matches(&matches));
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

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }
}
