//! One file per command.

mod answer;
mod bench;
mod chat;
mod devices;
mod doctor;
mod hub;
mod inspect;
mod logits;
mod man;
mod pack;
mod perplexity;
mod persist;
mod plan;
mod replay;
mod run;
mod serve;
mod synth;
mod tokenize;

use std::{io::Read, path::Path, process::ExitCode};

use anyhow::{Context, bail};
use clap::CommandFactory;

pub(crate) use persist::release_session;

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
        Command::Run(args) => run::run(&args, ui),
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

/// Contents of a file; `-` is stdin.
fn read_text(path: &Path) -> anyhow::Result<String> {
    if path == Path::new("-") {
        return read_stdin();
    }
    let bytes = std::fs::read(path);
    decode(
        bytes.with_context(|| format!("{}: cannot be read", path.display()))?,
        &path.display().to_string(),
    )
}

fn read_stdin() -> anyhow::Result<String> {
    let mut bytes = Vec::new();
    std::io::stdin().lock().read_to_end(&mut bytes).context("standard input cannot be read")?;
    decode(bytes, "standard input")
}

/// Text of `source`, without a byte order mark.
///
/// # Errors
/// It is not UTF-8; the message says where.
fn decode(bytes: Vec<u8>, source: &str) -> anyhow::Result<String> {
    match String::from_utf8(bytes) {
        Ok(mut text) => {
            if text.starts_with('\u{feff}') {
                text.drain(..'\u{feff}'.len_utf8());
            }
            Ok(text)
        }
        Err(error) => {
            let at = error.utf8_error().valid_up_to();
            let bytes = error.as_bytes();
            let line = 1 + bytes[..at].iter().filter(|byte| **byte == b'\n').count();
            let is_utf16 = bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff");
            bail!(
                "{source} is not UTF-8 text: byte 0x{:02x} at offset {at}, in line {line}; convert \
                 it first, as with `iconv -f {} -t utf-8`",
                bytes.get(at).copied().unwrap_or_default(),
                if is_utf16 { "utf-16" } else { "latin1" }
            )
        }
    }
}
