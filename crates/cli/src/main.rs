//! The command line of moeflux: arguments, progress, the terminal. What is computed, the `moeflux` crate computes.

mod args;
mod aside;
mod commands;
mod folders;
mod interrupt;
mod load;
mod out;
mod plot;
mod progress;
mod roof;
mod tensors;
mod units;

use std::{fmt, process::ExitCode};

use clap::Parser;

use args::Cli;

fn main() -> ExitCode {
    let cli = Cli::parse();
    commands::run(cli).unwrap_or_else(|error| report(&error))
}

/// Something that the arguments rule out, found after they were parsed.
#[derive(Debug)]
struct WrongUse(String);

impl fmt::Display for WrongUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUse {}

/// Says what went wrong and chooses the exit code.
fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<out::Closed>() {
        return ExitCode::SUCCESS;
    }
    if matches!(error.downcast_ref(), Some(moeflux::Error::Cancelled)) {
        return ExitCode::from(interrupt::EXIT_CODE);
    }
    let mut said = format!("error: {error}");
    progress::error_line(&said);
    for cause in error.chain().skip(1).map(ToString::to_string) {
        // Most messages end in their cause already.
        if !said.contains(&cause) {
            progress::error_line(format_args!("  because: {cause}"));
            said += &cause;
        }
    }
    if error.is::<WrongUse>() {
        progress::error_line("\nFor more information, try '--help'.");
        return ExitCode::from(2);
    }
    ExitCode::FAILURE
}
