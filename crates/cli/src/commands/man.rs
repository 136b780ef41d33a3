//! `moeflux man`: manual pages, from the same definitions as the help.

use std::{fs, path::Path, process::ExitCode};

use anyhow::Context;
use clap::CommandFactory;
use clap_mangen::Man;

use crate::args::{Cli, ManArgs};

/// Writes a page for the program and one for each command.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn run(args: &ManArgs) -> anyhow::Result<ExitCode> {
    let mut program = Cli::command().disable_help_subcommand(true);
    program.build();
    fs::create_dir_all(&args.dir)
        .and_then(|()| write_pages(&program, &args.dir))
        .with_context(|| format!("{}: cannot write manual pages", args.dir.display()))?;
    Ok(ExitCode::SUCCESS)
}

/// Writes the page of a command, and those of its subcommands.
fn write_pages(command: &clap::Command, dir: &Path) -> std::io::Result<()> {
    Man::new(command.clone())
        .source(concat!("moeflux ", env!("CARGO_PKG_VERSION")))
        .manual("moeflux")
        .generate_to(dir)?;
    command.get_subcommands().filter(|c| !c.is_hide_set()).try_for_each(|c| write_pages(c, dir))
}
