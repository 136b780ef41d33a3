//! One line per budget, context and phase: for spreadsheets, plots and comparisons, of what was measured now or saved before.

use std::{fmt::Write, path::Path};

use anyhow::Context;
use serde::Deserialize;
use serde_json::Value;

use super::{
    compare::{self, Speed},
    summary::{AtContext, Summary, Together},
};
use crate::{
    plot::{Chart, Series},
    units,
};

/// Prefill or decode in one budget at one context.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) budget: u64,
    pub(super) slots: usize,
    pub(super) phase: &'static str,
    pub(super) context: usize,
    pub(super) together: Option<Together>,
    pub(super) summary: Summary,
}

/// Of a report, what rows are made of.
#[derive(Deserialize)]
struct Run {
    plan: Plan,
    contexts: Vec<AtContext>,
}

#[derive(Deserialize)]
struct Plan {
    budget: u64,
    device_budget: Option<u64>,
    slots: usize,
}

impl Row {
    fn sessions(&self) -> Option<usize> {
        self.together.map(|together| together.sessions)
    }

    /// `decode`, or `decode of 8` sessions.
    pub(super) fn name(&self) -> String {
        self.sessions().map_or_else(|| self.phase.to_owned(), |n| format!("{} of {n}", self.phase))
    }

    /// Tokens per second, and what was reached of them.
    pub(super) fn roof(&self) -> Option<(f64, f64)> {
        self.summary.roof_of(self.together)
    }
}

/// The rows of a report, of one budget or several.
///
/// # Errors
/// It is no report.
pub(super) fn rows(report: &Value) -> anyhow::Result<Vec<Row>> {
    let runs = match report.get("budgets").and_then(Value::as_array) {
        Some(runs) => runs.iter().collect(),
        None => vec![report],
    };
    let mut rows = Vec::new();
    for run in runs {
        let run =
            Run::deserialize(run).context("this is not what `moeflux bench --save` writes")?;
        for at in run.contexts {
            for (phase, summary) in [("prefill", at.prefill), ("decode", at.decode)] {
                rows.extend(summary.map(|summary| Row {
                    budget: run.plan.device_budget.unwrap_or(run.plan.budget),
                    slots: run.plan.slots,
                    phase,
                    context: at.context,
                    together: at.together,
                    summary,
                }));
            }
        }
    }
    Ok(rows)
}

/// Of the speed at which memory can be read, what computing reached when decoding in a saved run.
///
/// # Errors
/// The file cannot be read, is no report, or has no decode on a processor.
pub(crate) fn computing_share(path: &Path) -> anyhow::Result<f64> {
    let rows = rows(&compare::load(path)?).with_context(|| path.display().to_string())?;
    let shares = rows.iter().filter(|r| r.phase == "decode");
    let shares = shares
        .filter_map(|r| Some(r.summary.roof?.compute_ms / r.summary.time.compute.ms_per_token));
    // The run with the least misses disturbs computing least.
    shares
        .filter(|s| s.is_finite() && *s > 0.0)
        .reduce(f64::max)
        .with_context(|| format!("{}: there is no decode on a processor in it", path.display()))
}

/// Comma-separated values with a head; what was not measured is empty.
pub(super) fn csv(rows: &[Row]) -> String {
    let mut out = String::from(
        "budget,slots,phase,context,tokens,tokens_per_second,min,max,hit_rate,needed_bytes_per_token,\
         missed_bytes_per_token,bytes_per_token,file_bytes_per_token,disk_bytes_per_second,disk_share,compute_ms,stalled_ms,other_ms,\
         token_ms_p99,roof_tokens_per_second,roof_share,ideal_tokens_per_second,sessions,step_ms,experts_per_layer,\
         weight_bytes_per_step,times_one\n",
    );
    for row in rows {
        let (s, speed) = (&row.summary, &row.summary.tokens_per_second);
        let or_empty = |number: Option<f64>| number.map_or_else(String::new, |n| format!("{n:.6}"));
        let cells = [
            Some(speed.median),
            Some(speed.min),
            Some(speed.max),
            Some(s.hit_rate),
            Some(s.needed_bytes_per_token),
            Some(s.missed_bytes_per_token),
            Some(s.bytes_per_token),
            Some(s.file_bytes_per_token),
            s.disk_bytes_per_second,
            s.disk_share,
            Some(s.time.compute.ms_per_token),
            Some(s.time.stalled.ms_per_token),
            Some(s.time.other.ms_per_token),
            s.token_ms.map(|t| t.p99),
            row.roof().map(|(roof, _)| roof),
            row.roof().map(|(_, share)| share),
            s.roof.map(|r| r.ideal_tokens_per_second),
        ];
        let together = row.together;
        let of_steps = [
            s.token_ms.filter(|_| together.is_some()).map(|t| t.median),
            together.map(|t| t.experts_per_layer),
            together.map(|t| t.bytes_per_step),
            together.and_then(|t| t.against_one).map(|a| a.times),
        ];
        let _ =
            write!(out, "{},{},{},{},{}", row.budget, row.slots, row.phase, row.context, s.tokens);
        for cell in cells {
            let _ = write!(out, ",{}", or_empty(cell));
        }
        let _ = write!(out, ",{}", row.sessions().map_or_else(String::new, |n| n.to_string()));
        for cell in of_steps {
            let _ = write!(out, ",{}", or_empty(cell));
        }
        out.push('\n');
    }
    out
}

/// Tokens per second over budgets if there are several, else over contexts; of decode, where that was measured.
pub(super) fn chart(rows: &[Row], model: &str) -> Chart {
    let phase = if rows.iter().any(|r| r.phase == "decode") { "decode" } else { "prefill" };
    let rows: Vec<&Row> = rows.iter().filter(|r| r.phase == phase).collect();
    let distinct = |of: &dyn Fn(&Row) -> u64| {
        let mut all: Vec<u64> = rows.iter().map(|r| of(r)).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    let (budgets, contexts) = (distinct(&|r| r.budget), distinct(&|r| r.context as u64));
    let over_budgets = budgets.len() > 1;
    let lines = if over_budgets { &contexts } else { &budgets };
    let mut series = Vec::new();
    for which in lines {
        let of_line = || {
            let of = |r: &&&Row| if over_budgets { r.context as u64 } else { r.budget };
            rows.iter().filter(move |r| of(r) == *which)
        };
        let x = |r: &Row| {
            if over_budgets { r.budget as f64 / (1u64 << 30) as f64 } else { r.context as f64 }
        };
        let at = match lines.len() {
            1 => String::new(),
            _ => format!(" after {which}"),
        };
        let points = of_line().map(|r| (x(r), r.summary.tokens_per_second.median));
        series.push(Series { name: format!("measured{at}"), points: points.collect() });
        let roof = of_line().filter_map(|r| Some((x(r), r.summary.roof?.tokens_per_second)));
        let points: Vec<_> = roof.collect();
        if !points.is_empty() {
            series.push(Series { name: format!("roof{at}"), points });
        }
    }
    Chart {
        title: format!("{phase}, {model}"),
        x_label: if over_budgets { "memory budget in GiB" } else { "tokens of the prompt" }.into(),
        y_label: "tokens per second".into(),
        log_x: false,
        series,
    }
}

/// What is compared of rows. Where there is one budget each, now and before, it may have been left to the machine and differ a
/// little: `named` says whether it must be the same.
pub(super) fn speeds(rows: &[Row], named: bool) -> Vec<Speed> {
    let speed = |row: &Row| {
        let budget = units::memory(row.budget);
        let rate = row.summary.tokens_per_second.median;
        Speed {
            key: format!("{} {} {}", row.name(), row.context, if named { &budget } else { "" }),
            cells: vec![row.name(), budget, row.context.to_string()],
            rate,
            shown: units::bare_rate(rate),
        }
    };
    rows.iter().map(speed).collect()
}

/// What a comparison says, and whether nothing is slower than `1 - tolerance` of what it was.
///
/// # Errors
/// There is nothing to compare.
pub(super) fn compare(
    now: &[Row],
    before: &[Row],
    tolerance: f64,
) -> anyhow::Result<(String, bool)> {
    let several = |rows: &[Row]| rows.iter().any(|r| r.budget != rows[0].budget);
    let named = several(now) || several(before);
    let head = ["budget", "context", "tok/s", "before"];
    compare::speeds((1, &head), &speeds(now, named), &speeds(before, named), tolerance)
}

/// Pairs of budgets of which the smaller is faster by more than 5 %.
pub(super) fn inversions(rows: &[Row]) -> Vec<String> {
    let mut notes = Vec::new();
    for row in rows {
        let speed = row.summary.tokens_per_second.median;
        let best = rows
            .iter()
            .filter(|r| (r.name(), r.context) == (row.name(), row.context) && r.budget < row.budget)
            .max_by(|a, b| {
                a.summary.tokens_per_second.median.total_cmp(&b.summary.tokens_per_second.median)
            });
        if let Some(smaller) = best
            && smaller.summary.tokens_per_second.median > speed * 1.05
        {
            notes.push(format!(
                "{} after {} tokens is slower in {} ({}) than in {} ({}): more memory should not cost speed; other \
                 programs may have disturbed it, so measure again",
                row.name(),
                row.context,
                units::memory(row.budget),
                units::rate(speed),
                units::memory(smaller.budget),
                units::rate(smaller.summary.tokens_per_second.median)
            ));
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn report(budget: u64, decode: f64) -> Value {
        let speed = json!({"median": decode, "min": decode, "max": decode});
        json!({
            "plan": {"budget": budget << 30, "device_budget": null, "slots": budget * 10},
            "contexts": [{"context": 8, "prefill": null, "decode": {"tokens": 2, "tokens_per_second": speed}}],
        })
    }

    fn sweep(speeds: &[(u64, f64)]) -> Vec<Row> {
        let budgets: Vec<Value> = speeds.iter().map(|(b, s)| report(*b, *s)).collect();
        rows(&json!({"budgets": budgets})).unwrap()
    }

    #[test]
    fn rows_are_found_in_reports_of_one_budget_and_of_several() {
        let one = rows(&report(4, 1.5)).unwrap();
        assert_eq!(
            (one.len(), one[0].budget, one[0].context, one[0].phase),
            (1, 4 << 30, 8, "decode")
        );
        assert_eq!(
            sweep(&[(4, 1.0), (8, 2.0)]).iter().map(|r| r.slots).collect::<Vec<_>>(),
            [40, 80]
        );
        assert!(rows(&json!({"text": "something else"})).is_err());
    }

    #[test]
    fn a_comparison_fails_beyond_the_tolerance_only() {
        let compare = |now: &[(u64, f64)], before: &[(u64, f64)]| {
            compare(&sweep(now), &sweep(before), 0.1).unwrap()
        };
        assert!(compare(&[(4, 0.91)], &[(4, 1.0)]).1);
        let (table, right) = compare(&[(4, 0.89), (8, 3.0)], &[(4, 1.0), (8, 2.0)]);
        assert!(!right && table.contains("0.890  slower") && table.contains("1.500\n"), "{table}");
        // A budget that the machine chose need not be the same; budgets that were named must be.
        assert!(compare(&[(5, 1.0)], &[(4, 1.0)]).1);
        assert!(super::compare(&sweep(&[(5, 1.0), (6, 1.0)]), &sweep(&[(4, 1.0)]), 0.1).is_err());
    }

    #[test]
    fn more_memory_that_is_slower_is_noted() {
        assert!(inversions(&sweep(&[(4, 1.0), (8, 0.96), (12, 2.0)])).is_empty());
        let notes = inversions(&sweep(&[(4, 1.0), (8, 0.94), (12, 2.0)]));
        assert!(
            notes.len() == 1 && notes[0].contains("8 GiB (0.94 tok/s) than in 4 GiB"),
            "{notes:?}"
        );
    }

    #[test]
    fn tables_and_plots_hold_every_row() {
        let rows = sweep(&[(4, 1.0), (8, 2.0)]);
        let csv = csv(&rows);
        let columns: Vec<usize> = csv.lines().map(|l| l.split(',').count()).collect();
        assert_eq!(columns, [27; 3], "{csv}");
        let chart = chart(&rows, "x");
        assert_eq!(chart.series.len(), 1);
        assert_eq!(chart.series[0].points, [(4.0, 1.0), (8.0, 2.0)]);
    }
}
