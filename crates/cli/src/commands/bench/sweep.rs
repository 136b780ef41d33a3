//! Several budgets, each in a process of its own: what one leaves in the allocator's hands, another would pay for.

use std::{
    ffi::OsString,
    process::{Command, Stdio},
};

use anyhow::{Context, anyhow};
use serde_json::Value;

use crate::{interrupt, out::Table, progress::Ui, units};

use super::rows::Row;

/// The report of each budget whose run did not fail, and what is wrong with the others.
///
/// # Errors
/// All runs failed; they have said why.
pub(super) fn run(
    budgets: &[u64],
    armed: &interrupt::Armed,
    ui: Ui,
) -> anyhow::Result<(Value, Option<anyhow::Error>)> {
    let program = std::env::current_exe()
        .context("cannot find the program itself, to run it for each budget")?;
    // A terminal's Ctrl-C ends the run that goes on; what others measured is shown.
    let (mut reports, mut failed) = (Vec::with_capacity(budgets.len()), None);
    for budget in budgets {
        ui.line(format_args!("measuring in {}", units::memory(*budget)));
        let mut args: Vec<OsString> = std::env::args_os().skip(1).collect();
        args.extend(["--only-budget".into(), format!("{budget}B").into()]);
        let run = Command::new(&program)
            .args(args)
            .stdin(Stdio::null())
            .stderr(Stdio::inherit())
            .output();
        let run = run.with_context(|| format!("{}: cannot be started", program.display()))?;
        match run.status.code() {
            Some(0) => {
                let report = serde_json::from_slice(&run.stdout);
                reports.push(report.context("a run's report cannot be understood")?);
            }
            // What others measure took its time: it is shown.
            _ => {
                failed = Some(anyhow!(
                    "the run in {} failed; what it said is above",
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

/// One line per budget, context and phase.
pub(super) fn table(rows: &[Row]) -> Table {
    let mut table = Table::new(1);
    table.row([
        "", "budget", "slots", "context", "tok/s", "min", "max", "missed", "hit rate", "stalled",
        "roof", "of it",
    ]);
    for row in rows {
        let (s, rate) = (&row.summary, units::bare_rate);
        let roof = |of: &dyn Fn((f64, f64)) -> String| row.roof().map_or_else(|| "-".into(), of);
        table.row([
            row.name(),
            units::memory(row.budget),
            row.slots.to_string(),
            row.context.to_string(),
            rate(s.tokens_per_second.median),
            rate(s.tokens_per_second.min),
            rate(s.tokens_per_second.max),
            units::disk(s.missed_bytes_per_token),
            units::percent(s.hit_rate),
            units::percent(s.stalled),
            roof(&|(roof, _)| rate(roof)),
            roof(&|(_, share)| units::percent(share)),
        ]);
    }
    table
}
