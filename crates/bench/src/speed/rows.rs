//! Flat rows, one per budget, context and phase: for CSV, tables, plots and comparisons. They come
//! from a new report or a saved one.

use std::fmt::Write;

use anyhow::Context;
use serde::Deserialize;
use serde_json::Value;

use super::summary::{BatchedSteps, ContextSummary, PhaseSummary, RooflineReached};
use crate::{
    comparison::{self, ComparedSpeed, Comparison, SavedRun},
    plot::{Chart, ChartSeries},
    table::Table,
    units,
};

/// Prefill or decode in one budget at one context.
#[derive(Debug)]
pub struct SpeedRow {
    pub(super) budget: u64,
    pub(super) slots: usize,
    pub(super) phase: &'static str,
    pub(super) context: usize,
    pub(super) together: Option<BatchedSteps>,
    pub(super) summary: PhaseSummary,
}

/// The part of a report that rows are made of.
#[derive(Deserialize)]
struct SavedReport {
    plan: SavedPlan,
    contexts: Vec<ContextSummary>,
}

#[derive(Deserialize)]
struct SavedPlan {
    budget: u64,
    device_budget: Option<u64>,
    slots: usize,
}

impl SpeedRow {
    fn sessions(&self) -> Option<usize> {
        self.together.map(|together| together.sessions)
    }

    /// `decode`, or `decode of 8` for eight sessions.
    pub(super) fn name(&self) -> String {
        self.sessions().map_or_else(|| self.phase.to_owned(), |n| format!("{} of {n}", self.phase))
    }

    /// Batched decode, if the row has it.
    fn decode_of(&self) -> Option<BatchedSteps> {
        self.together.filter(|_| self.phase == "decode")
    }

    /// Roofline of the row.
    pub(super) fn roof(&self) -> Option<RooflineReached> {
        self.summary.roofline(self.decode_of())
    }
}

/// Rows of a report, of one budget or several.
///
/// # Errors
/// The value is not a report.
pub fn rows(report: &Value) -> anyhow::Result<Vec<SpeedRow>> {
    let runs = match report.get("budgets").and_then(Value::as_array) {
        Some(runs) => runs.iter().collect(),
        None => vec![report],
    };
    let mut rows = Vec::new();
    for run in runs {
        let run = SavedReport::deserialize(run)?;
        for at in run.contexts {
            for (phase, summary) in [("prefill", at.prefill), ("decode", at.decode)] {
                rows.extend(summary.map(|summary| SpeedRow {
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

/// Rows of a saved report.
///
/// # Errors
/// It is not a report.
pub fn saved_rows(saved: &SavedRun) -> anyhow::Result<Vec<SpeedRow>> {
    saved.read("moeflux bench", rows)
}

/// Share of the memory bandwidth that compute reached in the decode of a saved run.
///
/// # Errors
/// The run is not a report, or has no decode on a CPU.
pub fn computing_share(saved: &SavedRun) -> anyhow::Result<f64> {
    let rows = saved_rows(saved)?;
    let shares = rows.iter().filter(|r| r.phase == "decode");
    let shares = shares
        .filter_map(|r| Some(r.summary.roof?.compute_ms / r.summary.time.compute.ms_per_token));
    // Reads disturb compute: the run with the fewest misses counts.
    shares
        .filter(|s| s.is_finite() && *s > 0.0)
        .reduce(f64::max)
        .with_context(|| format!("{}: it has no decode on a CPU", saved.path.display()))
}

/// Comma-separated values with a header; cells without a measurement are empty.
pub fn csv(rows: &[SpeedRow]) -> String {
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
            row.roof().map(|r| r.tokens_per_second),
            row.roof().map(|r| r.share),
            s.roof.map(|r| r.ideal_tokens_per_second),
        ];
        let together = row.decode_of();
        let batched = [
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
        for cell in batched {
            let _ = write!(out, ",{}", or_empty(cell));
        }
        out.push('\n');
    }
    out
}

/// Tables of speeds and of reads, with one line per budget, context and phase.
pub fn tables(rows: &[SpeedRow]) -> String {
    let (mut speeds, mut reads) = (Table::new(1), Table::new(1));
    speeds.head(["", "budget", "slots", "context", "tok/s", "min", "max", "roof", "of it"]);
    reads.head(["", "budget", "context", "missed", "hit rate", "stalled"]);
    for row in rows {
        let (s, rate) = (&row.summary, units::bare_rate);
        let roof = |figure: &dyn Fn(RooflineReached) -> String| {
            row.roof().map_or_else(|| "-".into(), figure)
        };
        let (budget, context) = (units::memory(row.budget), row.context.to_string());
        speeds.row([
            row.name(),
            budget.clone(),
            row.slots.to_string(),
            context.clone(),
            rate(s.tokens_per_second.median),
            rate(s.tokens_per_second.min),
            rate(s.tokens_per_second.max),
            roof(&|r| rate(r.tokens_per_second)),
            roof(&|r| units::percent(r.share)),
        ]);
        reads.row([
            row.name(),
            budget,
            context,
            units::disk(s.missed_bytes_per_token),
            units::percent(s.hit_rate),
            units::percent(s.stalled),
        ]);
    }
    format!("{speeds}\n{reads}")
}

/// Chart of tokens per second over budgets if there are several, else over contexts. It shows
/// decode if that was measured.
pub fn chart(rows: &[SpeedRow], model: &str) -> Chart {
    let phase = if rows.iter().any(|r| r.phase == "decode") { "decode" } else { "prefill" };
    let rows: Vec<&SpeedRow> = rows.iter().filter(|r| r.phase == phase).collect();
    let distinct = |key: &dyn Fn(&SpeedRow) -> u64| {
        let mut all: Vec<u64> = rows.iter().map(|r| key(r)).collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    let (budgets, contexts) = (distinct(&|r| r.budget), distinct(&|r| r.context as u64));
    let over_budgets = budgets.len() > 1;
    let lines = if over_budgets { &contexts } else { &budgets };
    let mut series = Vec::new();
    for which in lines {
        let on_line = || {
            let key = |r: &&&SpeedRow| if over_budgets { r.context as u64 } else { r.budget };
            rows.iter().filter(move |r| key(r) == *which)
        };
        let x = |r: &SpeedRow| {
            if over_budgets { r.budget as f64 / (1u64 << 30) as f64 } else { r.context as f64 }
        };
        let suffix = match lines.len() {
            1 => String::new(),
            _ => format!(" after {which}"),
        };
        let points = on_line().map(|r| (x(r), r.summary.tokens_per_second.median));
        series.push(ChartSeries { name: format!("measured{suffix}"), points: points.collect() });
        let roof = on_line().filter_map(|r| Some((x(r), r.summary.roof?.tokens_per_second)));
        let points: Vec<_> = roof.collect();
        if !points.is_empty() {
            series.push(ChartSeries { name: format!("roof{suffix}"), points });
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

/// Speeds of rows for a comparison. A budget that the machine chose may differ a little between
/// runs, so it is part of the key only if `by_budget` is set.
pub(super) fn speeds(rows: &[SpeedRow], by_budget: bool) -> Vec<ComparedSpeed> {
    let speed = |row: &SpeedRow| {
        let budget = units::memory(row.budget);
        let rate = row.summary.tokens_per_second.median;
        ComparedSpeed {
            key: format!("{} {} {}", row.name(), row.context, if by_budget { &budget } else { "" }),
            cells: vec![row.name(), budget, row.context.to_string()],
            rate,
            shown: units::bare_rate(rate),
        }
    };
    rows.iter().map(speed).collect()
}

/// Compares rows; a speed below `1 - tolerance` of the earlier one fails.
///
/// # Errors
/// The rows have nothing in common.
pub(super) fn compare(
    now: &[SpeedRow],
    before: &[SpeedRow],
    tolerance: f64,
) -> anyhow::Result<Comparison> {
    let several = |rows: &[SpeedRow]| rows.iter().any(|r| r.budget != rows[0].budget);
    let by_budget = several(now) || several(before);
    let head = comparison::Head { left: 1, columns: &["budget", "context", "tok/s", "before"] };
    comparison::speeds(head, &speeds(now, by_budget), &speeds(before, by_budget), tolerance)
}

/// Notes on budgets that are more than 5 % slower than a smaller one.
pub fn inversions(rows: &[SpeedRow]) -> Vec<String> {
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

    fn sweep(speeds: &[(u64, f64)]) -> Vec<SpeedRow> {
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
            let Comparison { text, passed, .. } =
                compare(&sweep(now), &sweep(before), 0.1).unwrap();
            (text, passed)
        };
        assert!(compare(&[(4, 0.91)], &[(4, 1.0)]).1);
        let (table, right) = compare(&[(4, 0.89), (8, 3.0)], &[(4, 1.0), (8, 2.0)]);
        assert!(!right && table.contains("0.89  slower") && table.contains("1.50\n"), "{table}");
        // A single budget, chosen by the machine, need not be equal; several budgets, chosen by
        // the user, must be.
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
