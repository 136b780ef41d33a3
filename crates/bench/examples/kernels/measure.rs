//! A run of the benchmark: measures, prints, saves and compares.

use std::{
    fmt, fs,
    io::{self, Write},
    path::Path,
};

use anyhow::Context;
use moeflux::base::{AtomicFile, Readers};
use moeflux_bench::{
    InvalidRequest,
    comparison::{Comparison, SavedRun},
};

use super::{
    args::{FigureArgs, KernelsArgs},
    kernel_bench::{self, KernelBench, KernelRequest},
};

/// Exit code of a failure, and of a comparison with something slower.
const FAILED: u8 = 1;
/// Exit code of wrong use, as the parser of arguments has it.
const WRONG_USE: u8 = 2;

/// Standard output and standard error.
pub(crate) struct Streams<'a> {
    pub(crate) out: &'a mut dyn Write,
    pub(crate) err: &'a mut dyn Write,
    /// Whether `err` is a terminal that shows progress.
    pub(crate) shows_progress: bool,
}

impl Streams<'_> {
    fn print(&mut self, text: impl fmt::Display) -> anyhow::Result<()> {
        let printed = self.out.write_all(text.to_string().as_bytes());
        printed.and_then(|()| self.out.flush()).context("cannot write to standard output")
    }

    /// Replaces the line of progress. A closed stderr is ignored.
    fn progress(&mut self, text: impl fmt::Display) {
        if self.shows_progress {
            // Spaces clear the earlier line, also on consoles without escape sequences.
            let line = format!("\r{:<25}\r", text.to_string());
            let _ = self.err.write_all(line.as_bytes()).and_then(|()| self.err.flush());
        }
    }
}

/// Runs the benchmark and returns the exit code. Errors are printed.
pub(crate) fn run(args: &KernelsArgs, streams: &mut Streams<'_>) -> u8 {
    let done = measured(args, streams);
    streams.progress("");
    match done {
        Ok(passed) => u8::from(!passed) * FAILED,
        Err(error) => failed(&error, streams.err),
    }
}

/// Prints an error and returns the exit code.
fn failed(error: &anyhow::Error, err: &mut dyn Write) -> u8 {
    let is_closed = |error: &io::Error| error.kind() == io::ErrorKind::BrokenPipe;
    if error.downcast_ref().is_some_and(is_closed) {
        return 0;
    }
    let mut printed = format!("error: {error}\n");
    for cause in error.chain().skip(1).map(ToString::to_string) {
        // Most messages already end with their cause.
        if !printed.contains(&cause) {
            printed += &format!("  because: {cause}\n");
        }
    }
    let is_wrong_use = error.is::<InvalidRequest>();
    if is_wrong_use {
        printed += "\nFor more information, try '--help'.\n";
    }
    let _ = err.write_all(printed.as_bytes());
    if is_wrong_use { WRONG_USE } else { FAILED }
}

/// Measures, and returns whether nothing is slower than in the run that is compared with.
fn measured(args: &KernelsArgs, streams: &mut Streams<'_>) -> anyhow::Result<bool> {
    let request = KernelRequest { ops: &args.only, formats: &args.format, quick: args.quick };
    let bench = KernelBench::new(request)?;
    // A file that cannot be compared with is reported before measuring.
    let before = args.figures.compare.as_deref().map(|path| {
        let saved = SavedRun::load(path)?;
        kernel_bench::check(&saved)?;
        anyhow::Ok(saved)
    });
    let before = before.transpose()?;
    let mut bench = bench.on(args.compute.options(), args.compute.kv_format());
    streams.progress("measuring the machine");
    bench.probe()?;
    bench.run(&mut |share| {
        streams.progress(format_args!("measuring, {:.0} % done", share * 100.0));
    })?;
    streams.progress("measuring the machine");
    bench.probe()?;
    streams.progress("");
    let report = bench.report();
    let measured = serde_json::to_value(&report)?;
    // The file is written before printing, as stdout may be closed.
    let written = match &args.figures.save {
        Some(path) => save(path, &serde_json::to_vec_pretty(&measured)?),
        None => Ok(()),
    };
    let printed = if args.figures.json {
        streams.print(serde_json::to_string_pretty(&measured)? + "\n")
    } else if args.figures.csv {
        streams.print(report.csv())
    } else {
        streams.print(&report)
    };
    written.and(printed)?;
    let Some(saved) = &before else { return Ok(true) };
    let compared = kernel_bench::compare(&measured, saved, args.figures.tolerance)?;
    print_comparison(compared, args, streams)
}

/// Prints a comparison with a saved run, and returns whether nothing is slower.
fn print_comparison(
    compared: Comparison,
    args: &KernelsArgs,
    streams: &mut Streams<'_>,
) -> anyhow::Result<bool> {
    let Comparison { differences, mut text, passed } = compared;
    for difference in differences {
        text += &format!("not the same: {difference}\n");
    }
    let FigureArgs { json, csv, .. } = args.figures;
    if !json && !csv {
        streams.print(format_args!("\n{text}"))?;
    } else if !args.quiet {
        // With --json or --csv, stdout has nothing else.
        let _ = streams.err.write_all(text.as_bytes());
    }
    Ok(passed)
}

/// Replaces a file: an older one stays until the new one is on disk. A target that is not a file,
/// such as a terminal or a pipe, is written to directly.
fn save(target: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let is_special = fs::metadata(target).is_ok_and(|meta| !meta.is_file() && !meta.is_dir());
    let write = || -> io::Result<()> {
        if is_special {
            return fs::write(target, bytes);
        }
        let file = AtomicFile::create(target, Readers::Umask)?;
        file.file().write_all(bytes)?;
        file.finish()
    };
    write().with_context(|| format!("{}: cannot be written", target.display()))
}
