//! One file per command.

mod answer;
mod bench;
mod chat;
mod devices;
mod inspect;
mod logits;
mod pack;
mod perplexity;
mod persist;
mod plan;
mod replay;
mod run;
mod synth;

use std::{io::Read, path::Path, process::ExitCode};

use anyhow::Context;
use clap::CommandFactory;

use crate::{
    args::{Cli, Command},
    interrupt, out,
    progress::Ui,
};

/// Runs a command.
///
/// # Errors
/// The command failed.
pub(crate) fn run(cli: Cli) -> anyhow::Result<ExitCode> {
    interrupt::install().context("cannot take over Ctrl-C")?;
    let ui = Ui::new(cli.quiet);
    match cli.command {
        Command::Run(args) => run::run(&args, ui),
        Command::Chat(args) => chat::run(&args, ui),
        Command::Perplexity(args) => perplexity::run(&args, ui),
        Command::Inspect(args) => inspect::run(&args, ui),
        Command::Logits(args) => logits::run(&args, ui),
        Command::Bench(args) => bench::run(&args, ui),
        Command::Replay(args) => replay::run(&args, ui),
        Command::Plan(args) => plan::run(&args, ui),
        Command::Devices(args) => devices::run(&args),
        Command::Pack(args) => pack::run(&args, ui),
        Command::Synth(args) => synth::run(&args, ui),
        Command::Completions(args) => {
            let mut script = Vec::new();
            clap_complete::generate(args.shell, &mut Cli::command(), "moeflux", &mut script);
            out::write(String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Contents of a file; `-` is stdin.
fn read_text(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return read_stdin();
    }
    std::fs::read_to_string(path).with_context(|| format!("{}: cannot be read", path.display()))
}

fn read_stdin() -> anyhow::Result<String> {
    let mut text = String::new();
    std::io::stdin().lock().read_to_string(&mut text).context("standard input cannot be read")?;
    Ok(text)
}
