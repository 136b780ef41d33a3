//! Runs the command of the arguments.

use std::process::ExitCode;

use anyhow::Context;
use clap::CommandFactory;

use super::{
    bench, chat, devices, doctor, hub, inspect, logits, man, pack, perplexity, plan, replay, serve,
    synth, tokenize, vision,
};
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
    interrupt::install().context("cannot take over signals")?;
    let ui = Ui::new(cli.quiet);
    match cli.command {
        Command::Run(args) => super::run::run(&args, ui),
        Command::Chat(args) => chat::run(&args, ui),
        Command::Serve(args) => serve::run(&args, ui),
        Command::Perplexity(args) => perplexity::run(&args, ui),
        Command::Inspect(args) => inspect::run(&args, ui),
        Command::Logits(args) => logits::run(&args, ui),
        Command::Bench(args) => bench::run(&args, ui),
        Command::Replay(args) => replay::run(&args, ui),
        Command::Plan(args) => plan::run(&args, ui),
        Command::Devices(args) => devices::run(&args),
        Command::Doctor(args) => doctor::run(&args, ui),
        Command::Pack(args) => pack::run(&args, ui),
        Command::Synth(args) => synth::run(&args, ui),
        Command::Tokenize(args) => tokenize::run(&args, ui),
        Command::Vision(args) => vision::run(&args, ui),
        Command::Pull(args) => hub::pull(&args, ui),
        Command::List(args) => hub::list(&args, ui),
        Command::Show(args) => hub::show(&args),
        Command::Rm(args) => hub::rm(&args, ui),
        Command::Completions(args) => {
            let mut script = Vec::new();
            clap_complete::generate(args.shell, &mut Cli::command(), "moeflux", &mut script);
            out::exact(String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Man(args) => man::run(&args),
    }
}
