//! Benchmark of single ops in every weight format, on a device without a model.
//!
//! `cargo run --release -p moeflux-bench --example kernels -- --help` lists the options.

mod activations;
mod args;
mod cases;
mod formats;
mod kernel_bench;
mod measure;
mod mixers;
mod op_bench;
mod products;
mod report;
#[cfg(test)]
mod tests;

use std::{
    io::{self, IsTerminal},
    process::ExitCode,
};

use measure::Streams;

fn main() -> ExitCode {
    let args = args::parse(std::env::args_os()).unwrap_or_else(|error| error.exit());
    let (mut out, mut err) = (io::stdout().lock(), io::stderr());
    let shows_progress = !args.quiet && err.is_terminal();
    measure::run(&args, &mut Streams { out: &mut out, err: &mut err, shows_progress }).into()
}
