//! `replay`: cache policies and sizes on a recorded run.

use std::process::ExitCode;

use anyhow::anyhow;
use moeflux::{base::Readers, experts::Trace};
use moeflux_bench::{
    plot,
    replay_report::{ReplayReport, ReplayRequest},
};

use crate::{args::ReplayArgs, atomic_file, out, progress::Ui};

/// Runs `moeflux replay`.
///
/// # Errors
/// The file is not a routing trace, a size is impossible, or the plot cannot be written.
pub(crate) fn run(args: &ReplayArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let trace = Trace::open(&args.file)?;
    if trace.steps() == 0 {
        return Err(anyhow!("{}: the trace has no finished step", args.file.display()));
    }
    if trace.is_cut() {
        ui.note(
            "the trace ends within a step, which is left out: the program was ended while it ran",
        );
    }
    let slots: Vec<usize> = args.slots.iter().map(|n| usize::from(*n)).collect();
    let request = ReplayRequest { slots: &slots, budgets: &args.budgets, policies: &args.policy };
    let report = ReplayReport::new(&trace, request)?;
    if let Some(path) = &args.plot {
        atomic_file::write(path, Readers::Umask, plot::svg(&report.chart())?.as_bytes())?;
    }
    match (args.json, args.csv) {
        (true, _) => out::json(&report)?,
        (_, true) => out::exact(report.csv()?)?,
        _ => out::write(report.text()?)?,
    }
    Ok(ExitCode::SUCCESS)
}
