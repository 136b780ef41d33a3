//! `replay`: what a cache would have read of a recorded run.

use std::{fmt::Write, process::ExitCode, thread};

use anyhow::anyhow;
use moeflux::{PolicyKind, Replayed, ReplayedSteps, Trace, TraceHeader};
use serde::Serialize;

use crate::{
    WrongUse,
    args::ReplayArgs,
    out::{self, Table},
    plot::{self, Chart, Series},
    progress::Ui,
    units,
};

/// Shares of all experts that are tried where nobody names sizes, in thousandths.
const SHARES: [usize; 12] = [10, 25, 50, 100, 150, 250, 350, 500, 650, 750, 900, 1000];

/// The name of the best that could be done.
const OPTIMUM: &str = "optimum";

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    trace: &'a TraceHeader,
    steps: usize,
    tokens: u64,
    /// The file ends within a step, which is left out.
    is_cut: bool,
    /// All experts of the model.
    experts: usize,
    /// The most experts that one layer of one step needs.
    largest_need: usize,
    replayed: Vec<Row>,
}

/// One policy with so many slots.
#[derive(Serialize)]
struct Row {
    policy: &'static str,
    slots: usize,
    /// Bytes of the slots.
    slot_bytes: u64,
    prefill: Cost,
    decode: Cost,
}

#[derive(Serialize)]
struct Cost {
    #[serde(flatten)]
    steps: ReplayedSteps,
    hit_rate: f64,
    bytes_per_token: f64,
}

impl Cost {
    fn of(steps: ReplayedSteps) -> Self {
        Self { steps, hit_rate: steps.hit_rate(), bytes_per_token: steps.bytes_per_token() }
    }
}

/// Runs `moeflux replay`.
///
/// # Errors
/// The file is not a routing trace, sizes make no sense, or the plot cannot be written.
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
    let sizes = sizes(args, trace.header())?;
    let policies = if args.policy.is_empty() { &PolicyKind::ALL[..] } else { &args.policy };
    let report = Report {
        trace: trace.header(),
        steps: trace.steps(),
        tokens: trace.tokens(),
        is_cut: trace.is_cut(),
        experts: trace.header().experts(),
        largest_need: trace.largest_need(),
        replayed: replay(&trace, policies, &sizes)?,
    };
    let view = View::of(&report, &sizes);
    if let Some(path) = &args.plot {
        plot::write(&view.chart(), path)?;
    }
    match (args.json, args.csv) {
        (true, _) => out::json(&report)?,
        (_, true) => out::write(csv(&report.replayed)?)?,
        _ => out::write(view.text()?)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The numbers of slots to try, ascending.
fn sizes(args: &ReplayArgs, header: &TraceHeader) -> anyhow::Result<Vec<usize>> {
    let all = header.experts();
    let least = header.layers.iter().map(|l| l.k).max().unwrap_or(1);
    let mut sizes: Vec<usize> = if !args.slots.is_empty() {
        args.slots.iter().map(|n| usize::from(*n)).collect()
    } else if !args.budgets.is_empty() {
        let floor = header.fixed.saturating_add(header.slot.saturating_mul(least as u64));
        if let Some(budget) = args.budgets.iter().find(|budget| **budget < floor) {
            let problem = format!(
                "a budget of {} is below the floor of {} that the recorded run had",
                units::memory(*budget),
                units::memory(floor)
            );
            return Err(WrongUse(problem).into());
        }
        let slots = |budget: &u64| (budget - header.fixed) / header.slot.max(1);
        args.budgets.iter().map(|budget| slots(budget).min(all as u64) as usize).collect()
    } else {
        [least]
            .into_iter()
            .chain(SHARES.map(|share| all * share / 1000))
            .filter(|n| *n >= least)
            .collect()
    };
    if let Some(slots) = sizes.iter().find(|slots| **slots < least || **slots > all) {
        let problem = format!(
            "{slots} slots make no sense: a layer needs {least}, and there are {all} experts"
        );
        return Err(WrongUse(problem).into());
    }
    sizes.sort_unstable();
    sizes.dedup();
    Ok(sizes)
}

/// All policies, and the optimum behind them, with each number of slots: a thread for each policy.
fn replay(trace: &Trace, policies: &[PolicyKind], sizes: &[usize]) -> anyhow::Result<Vec<Row>> {
    let slot = trace.header().slot;
    let of_policy = &|policy: Option<PolicyKind>| -> Vec<Row> {
        let run = |slots: &usize| {
            let Replayed { prefill, decode } = match policy {
                Some(policy) => trace.replay(policy, *slots),
                None => trace.replay_optimum(*slots),
            };
            Row {
                policy: policy.map_or(OPTIMUM, PolicyKind::name),
                slots: *slots,
                slot_bytes: slot.saturating_mul(*slots as u64),
                prefill: Cost::of(prefill),
                decode: Cost::of(decode),
            }
        };
        sizes.iter().map(run).collect()
    };
    let policies = policies.iter().copied().map(Some).chain([None]);
    thread::scope(|scope| {
        let running: Vec<_> =
            policies.map(|policy| scope.spawn(move || of_policy(policy))).collect();
        let mut rows = Vec::new();
        for thread in running {
            rows.extend(thread.join().map_err(|_| anyhow!("replaying the trace failed"))?);
        }
        Ok(rows)
    })
}

fn csv(rows: &[Row]) -> Result<String, std::fmt::Error> {
    let mut text = String::from(
        "policy,slots,slot_bytes,phase,tokens,needed,hits,bytes_missed,hit_rate,bytes_per_token\n",
    );
    for row in rows {
        for (phase, cost) in [("prefill", &row.prefill), ("decode", &row.decode)] {
            let ReplayedSteps { tokens, needed, hits, bytes_missed } = cost.steps;
            let Row { policy, slots, slot_bytes, .. } = row;
            let Cost { hit_rate, bytes_per_token, .. } = cost;
            writeln!(
                text,
                "{policy},{slots},{slot_bytes},{phase},{tokens},{needed},{hits},{bytes_missed},{hit_rate},{bytes_per_token}"
            )?;
        }
    }
    Ok(text)
}

/// What people see of a report: decode, or prefill if there is nothing else.
struct View<'a> {
    report: &'a Report<'a>,
    sizes: &'a [usize],
    phase: &'static str,
    cost: fn(&Row) -> &Cost,
}

impl<'a> View<'a> {
    fn of(report: &'a Report<'a>, sizes: &'a [usize]) -> Self {
        match report.replayed.iter().any(|row| row.decode.steps.tokens > 0) {
            true => Self { report, sizes, phase: "decode", cost: |row| &row.decode },
            false => Self { report, sizes, phase: "prefill", cost: |row| &row.prefill },
        }
    }

    /// The rows of each policy: as many as there are sizes.
    fn by_policy(&self) -> impl Iterator<Item = &'a [Row]> {
        self.report.replayed.chunks(self.sizes.len())
    }

    fn table(&self, of: &dyn Fn(&Cost) -> String) -> Table {
        let mut table = Table::new(0);
        let names = self.by_policy().filter_map(|rows| rows.first()).map(|row| row.policy);
        table.row(["slots", "of all", "memory"].into_iter().chain(names));
        for (i, slots) in self.sizes.iter().enumerate() {
            let share = *slots as f64 / self.report.experts as f64;
            let memory = units::memory(self.report.trace.slot.saturating_mul(*slots as u64));
            let cells =
                self.by_policy().filter_map(|rows| rows.get(i)).map(|row| of((self.cost)(row)));
            table.row([slots.to_string(), units::percent(share), memory].into_iter().chain(cells));
        }
        table
    }

    fn text(&self) -> Result<String, std::fmt::Error> {
        let Report { trace, steps, tokens, experts, .. } = self.report;
        let mut text = String::new();
        writeln!(
            text,
            "{} ({}): {} in {}, {} in {}\n",
            trace.model,
            trace.model_type,
            units::plural(*experts as u64, "expert"),
            units::plural(trace.layers.len() as u64, "layer"),
            units::plural(*tokens, "token"),
            units::plural(*steps as u64, "step"),
        )?;
        writeln!(text, "hit rate of {}", self.phase)?;
        writeln!(text, "{}", self.table(&|cost| units::percent(cost.hit_rate)))?;
        writeln!(text, "read per token of {}", self.phase)?;
        write!(text, "{}", self.table(&|cost| units::disk(cost.bytes_per_token)))?;
        Ok(text)
    }

    fn chart(&self) -> Chart {
        let point = |row: &Row| {
            (row.slot_bytes as f64 / f64::from(1 << 30), 100.0 * (self.cost)(row).hit_rate)
        };
        let series = |rows: &[Row]| {
            Some(Series {
                name: rows.first()?.policy.into(),
                points: rows.iter().map(point).collect(),
            })
        };
        Chart {
            title: format!("Hit rate of {}, {}", self.phase, self.report.trace.model),
            x_label: "slots, GiB".into(),
            y_label: "hit rate, %".into(),
            log_x: false,
            series: self.by_policy().filter_map(series).collect(),
        }
    }
}
