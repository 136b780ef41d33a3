//! Command line of moeflux: arguments, progress, the terminal. The `moeflux` crate computes,
//! `moeflux-bench` measures.

mod args;
mod atomic_file;
mod commands;
mod folders;
mod interrupt;
mod load;
mod out;
mod progress;
mod tensor_writer;

use std::{fmt, process::ExitCode};

use clap::Parser;
use moeflux_bench::InvalidRequest;

use args::Cli;

fn main() -> ExitCode {
    leave_guarded_panics_to_errors();
    let cli = Cli::parse();
    commands::run(cli).unwrap_or_else(|error| report(&error))
}

/// Prints no message for a library's panic that becomes an error.
fn leave_guarded_panics_to_errors() {
    let print = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        if !moeflux::base::is_panic_guarded() {
            print(panic);
        }
    }));
}

/// Invalid combination of arguments, found after parsing.
#[derive(Debug)]
struct WrongUse(String);

impl fmt::Display for WrongUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUse {}

/// Prints an error and returns the exit code.
fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<out::Closed>() {
        return ExitCode::SUCCESS;
    }
    if matches!(error.downcast_ref(), Some(moeflux::Error::Cancelled)) {
        return ExitCode::from(interrupt::EXIT_CODE);
    }
    let mut printed = format!("error: {error}");
    progress::error_line(&printed);
    for cause in error.chain().skip(1).map(ToString::to_string) {
        // Most messages already end with their cause.
        if !printed.contains(&cause) {
            progress::error_line(format_args!("  because: {cause}"));
            printed += &cause;
        }
    }
    if error.is::<WrongUse>() || error.is::<InvalidRequest>() {
        progress::error_line("\nFor more information, try '--help'.");
        return ExitCode::from(2);
    }
    ExitCode::FAILURE
}
