//! Replay of a recorded run against cache policies and sizes: hit rates and bytes read.

use std::{fmt::Write, thread};

use anyhow::anyhow;
use moeflux::{
    experts::{PolicyKind, Trace, TraceHeader},
    tools::{Replayed, ReplayedSteps},
};
use serde::Serialize;

use crate::{
    invalid_request::InvalidRequest,
    plot::{Chart, ChartSeries},
    table::Table,
    units,
};

/// Default numbers of slots, in thousandths of all experts.
const SHARES: [usize; 12] = [10, 25, 50, 100, 150, 250, 350, 500, 650, 750, 900, 1000];

/// Name of Belady's optimum in reports.
const OPTIMUM: &str = "optimum";

/// Results of a replay.
#[derive(Debug, Serialize)]
pub struct ReplayReport<'a> {
    trace: &'a TraceHeader,
    steps: usize,
    tokens: u64,
    /// The file ends within a step, which is left out.
    is_cut: bool,
    /// Experts of the model.
    experts: usize,
    /// Most distinct experts of one layer in one step.
    largest_need: usize,
    replayed: Vec<ReplayRow>,
    #[serde(skip)]
    sizes: Vec<usize>,
}

/// One policy with one number of slots.
#[derive(Debug, Serialize)]
struct ReplayRow {
    policy: &'static str,
    slots: usize,
    /// Bytes of all slots.
    slot_bytes: u64,
    prefill: ReplayCost,
    decode: ReplayCost,
}

#[derive(Debug, Serialize)]
struct ReplayCost {
    #[serde(flatten)]
    steps: ReplayedSteps,
    hit_rate: f64,
    bytes_per_token: f64,
}

impl ReplayCost {
    fn new(steps: ReplayedSteps) -> Self {
        Self { steps, hit_rate: steps.hit_rate(), bytes_per_token: steps.bytes_per_token() }
    }
}

/// Sizes and policies to replay.
#[derive(Clone, Copy, Debug)]
pub struct ReplayRequest<'a> {
    /// Numbers of slots.
    pub slots: &'a [usize],
    /// Memory budgets in bytes, used if `slots` is empty. With both empty, a default range.
    pub budgets: &'a [u64],
    /// Policies; empty for all.
    pub policies: &'a [PolicyKind],
}

impl<'a> ReplayReport<'a> {
    /// Replays a trace.
    ///
    /// # Errors
    /// A size is too small or too large ([`InvalidRequest`]).
    pub fn new(trace: &'a Trace, request: ReplayRequest<'_>) -> anyhow::Result<Self> {
        let sizes = sizes(request, trace.header())?;
        let policies =
            if request.policies.is_empty() { &PolicyKind::ALL[..] } else { request.policies };
        Ok(Self {
            trace: trace.header(),
            steps: trace.steps(),
            tokens: trace.tokens(),
            is_cut: trace.is_cut(),
            experts: trace.header().experts(),
            largest_need: trace.largest_need(),
            replayed: replay(trace, policies, &sizes)?,
            sizes,
        })
    }

    /// Tables of hit rates and of bytes read per token.
    ///
    /// # Errors
    /// Formatting fails.
    pub fn text(&self) -> Result<String, std::fmt::Error> {
        ReplayView::new(self).text()
    }

    /// Chart of hit rates over the size of the slots.
    pub fn chart(&self) -> Chart {
        ReplayView::new(self).chart()
    }

    /// Comma-separated values with a header.
    ///
    /// # Errors
    /// Formatting fails.
    pub fn csv(&self) -> Result<String, std::fmt::Error> {
        csv(&self.replayed)
    }
}

/// Numbers of slots to replay, ascending.
fn sizes(request: ReplayRequest<'_>, header: &TraceHeader) -> Result<Vec<usize>, InvalidRequest> {
    let all = header.experts();
    let least = header.layers.iter().map(|l| l.k).max().unwrap_or(1);
    let mut sizes: Vec<usize> = if !request.slots.is_empty() {
        request.slots.to_vec()
    } else if !request.budgets.is_empty() {
        let floor = header.fixed.saturating_add(header.slot.saturating_mul(least as u64));
        if let Some(budget) = request.budgets.iter().find(|budget| **budget < floor) {
            let problem = format!(
                "a budget of {} is below the floor of {} that the recorded run had",
                units::memory(*budget),
                units::memory(floor)
            );
            return Err(InvalidRequest(problem));
        }
        let slots = |budget: &u64| (budget - header.fixed) / header.slot.max(1);
        request.budgets.iter().map(|budget| slots(budget).min(all as u64) as usize).collect()
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
        return Err(InvalidRequest(problem));
    }
    sizes.sort_unstable();
    sizes.dedup();
    Ok(sizes)
}

/// Replays all policies, then the optimum, with each number of slots; one thread per policy.
fn replay(
    trace: &Trace,
    policies: &[PolicyKind],
    sizes: &[usize],
) -> anyhow::Result<Vec<ReplayRow>> {
    let slot = trace.header().slot;
    let replay_policy = &|policy: Option<PolicyKind>| -> Vec<ReplayRow> {
        let run = |slots: &usize| {
            let Replayed { prefill, decode } = match policy {
                Some(policy) => trace.replay(policy, *slots),
                None => trace.replay_optimum(*slots),
            };
            ReplayRow {
                policy: policy.map_or(OPTIMUM, PolicyKind::name),
                slots: *slots,
                slot_bytes: slot.saturating_mul(*slots as u64),
                prefill: ReplayCost::new(prefill),
                decode: ReplayCost::new(decode),
            }
        };
        sizes.iter().map(run).collect()
    };
    let policies = policies.iter().copied().map(Some).chain([None]);
    thread::scope(|scope| {
        let running: Vec<_> =
            policies.map(|policy| scope.spawn(move || replay_policy(policy))).collect();
        let mut rows = Vec::new();
        for thread in running {
            rows.extend(thread.join().map_err(|_| anyhow!("replaying the trace failed"))?);
        }
        Ok(rows)
    })
}

fn csv(rows: &[ReplayRow]) -> Result<String, std::fmt::Error> {
    let mut text = String::from(
        "policy,slots,slot_bytes,phase,tokens,needed,hits,bytes_missed,hit_rate,bytes_per_token\n",
    );
    for row in rows {
        for (phase, cost) in [("prefill", &row.prefill), ("decode", &row.decode)] {
            let ReplayedSteps { tokens, needed, hits, bytes_missed } = cost.steps;
            let ReplayRow { policy, slots, slot_bytes, .. } = row;
            let ReplayCost { hit_rate, bytes_per_token, .. } = cost;
            writeln!(
                text,
                "{policy},{slots},{slot_bytes},{phase},{tokens},{needed},{hits},{bytes_missed},{hit_rate},{bytes_per_token}"
            )?;
        }
    }
    Ok(text)
}

/// A report as text: decode, or prefill if the run has no decode.
struct ReplayView<'a> {
    report: &'a ReplayReport<'a>,
    phase: &'static str,
    cost: fn(&ReplayRow) -> &ReplayCost,
}

impl<'a> ReplayView<'a> {
    fn new(report: &'a ReplayReport<'a>) -> Self {
        match report.replayed.iter().any(|row| row.decode.steps.tokens > 0) {
            true => Self { report, phase: "decode", cost: |row| &row.decode },
            false => Self { report, phase: "prefill", cost: |row| &row.prefill },
        }
    }

    /// Rows of each policy, one per number of slots.
    fn by_policy(&self) -> impl Iterator<Item = &'a [ReplayRow]> {
        self.report.replayed.chunks(self.report.sizes.len())
    }

    fn table(&self, figure: &dyn Fn(&ReplayCost) -> String) -> Table {
        let mut table = Table::new(0);
        let names = self.by_policy().filter_map(|rows| rows.first()).map(|row| row.policy);
        table.head(["slots", "of all", "memory"].into_iter().chain(names));
        for (i, slots) in self.report.sizes.iter().enumerate() {
            let share = *slots as f64 / self.report.experts as f64;
            let memory = units::memory(self.report.trace.slot.saturating_mul(*slots as u64));
            let cells =
                self.by_policy().filter_map(|rows| rows.get(i)).map(|row| figure((self.cost)(row)));
            table.row([slots.to_string(), units::percent(share), memory].into_iter().chain(cells));
        }
        table
    }

    fn text(&self) -> Result<String, std::fmt::Error> {
        let ReplayReport { trace, steps, tokens, experts, .. } = self.report;
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
        let point = |row: &ReplayRow| {
            (row.slot_bytes as f64 / f64::from(1 << 30), 100.0 * (self.cost)(row).hit_rate)
        };
        let series = |rows: &[ReplayRow]| {
            Some(ChartSeries {
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
