//! Benchmark over several budgets, each in its own process, as memory that the allocator keeps from
//! one run would burden the next.

use std::{
    ffi::OsString,
    process::{Command, Stdio},
};

use anyhow::{Context, anyhow};
use moeflux_bench::units;
use serde_json::Value;

use crate::{interrupt, invocation::Invocation, progress::Ui};

/// Reports of the budgets whose runs succeeded, and the last failure.
///
/// # Errors
/// All runs failed; each has printed why.
pub(super) fn run(
    budgets: &[u64],
    armed: &interrupt::Armed,
    ui: Ui,
) -> anyhow::Result<(Value, Option<anyhow::Error>)> {
    let Invocation { program, args } = Invocation::current();
    let (program, before) = program
        .split_first()
        .context("cannot find the program itself, to run it for each budget")?;
    // Ctrl-C in a terminal interrupts the child that runs; earlier results are still shown.
    let (mut reports, mut failed) = (Vec::with_capacity(budgets.len()), None);
    for budget in budgets {
        ui.line(format_args!("measuring in {}", units::memory(*budget)));
        let mut args: Vec<OsString> = before.iter().chain(args).cloned().collect();
        args.extend(["--only-budget".into(), format!("{budget}B").into()]);
        let run =
            Command::new(program).args(args).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
        let run =
            run.with_context(|| format!("{}: cannot be started", program.to_string_lossy()))?;
        match run.status.code() {
            Some(0) => {
                let report = serde_json::from_slice(&run.stdout);
                reports.push(report.context("the report of a run is not valid JSON")?);
            }
            // Results of other budgets took time to measure and are still shown.
            _ => {
                failed = Some(anyhow!(
                    "the run in {} failed; its error is above",
                    units::memory(*budget)
                ))
            }
        }
        if armed.flag().is_cancelled() || interrupt::ended(run.status) {
            failed = Some(moeflux::Error::Cancelled.into());
            break;
        }
    }
    if reports.is_empty() {
        return Err(failed.unwrap_or_else(|| anyhow!("no budget was given")));
    }
    let model = reports.first().and_then(|r: &Value| r.get("model").cloned()).unwrap_or_default();
    Ok((serde_json::json!({ "model": model, "budgets": reports }), failed))
}
