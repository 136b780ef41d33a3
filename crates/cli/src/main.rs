//! The command `moeflux`.

mod counted_alloc;

use std::{env, process::ExitCode};

use moeflux_cli::Invocation;

fn main() -> ExitCode {
    let program = env::current_exe().map(|path| vec![path.into()]).unwrap_or_default();
    moeflux_cli::run(Invocation { program, args: env::args_os().skip(1).collect() })
}
