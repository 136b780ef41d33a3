//! Prediction of decode speed over memory budgets: which budget is worth having.

use std::fmt;

use anyhow::ensure;
use moeflux::{
    MemoryPlan, MemoryRequest,
    base::SystemMemory,
    experts::{DiskSpeed, PolicyKind, Trace},
    model::blueprint::Blueprint,
    runtime::{Pool, PrefixDivision},
    tools::{Planner, RooflineLimits, TokenCosts},
};
use serde::Serialize;

use crate::{
    describe,
    plot::{Chart, ChartSeries},
    table::Table,
    units,
};

/// Beyond the budget that is worth having, doubling it gains less than this factor.
const WORTH: f64 = 1.25;

/// Predictions for a range of budgets. Sizes are bytes; docs/bench.md describes the fields.
#[derive(Debug, Serialize)]
pub struct BudgetReport {
    model: String,
    /// Position of the token whose time is predicted.
    context: usize,
    disk_bytes_per_second: f64,
    disk: Option<DiskSpeed>,
    memory_bytes_per_second: f64,
    /// Share of the memory bandwidth that compute reaches: 1, or a measured value.
    computing_share: f64,
    /// Source of the hit rates.
    hit_rates: &'static str,
    /// Smallest budget with a memory plan.
    floor: u64,
    /// Budget that holds all experts.
    everything: u64,
    /// Memory that this machine can provide now.
    available: u64,
    worth_having: Option<u64>,
    why: String,
    budgets: Vec<BudgetRow>,
}

/// Prediction for one budget.
#[derive(Clone, Debug, Serialize)]
pub struct BudgetRow {
    budget: u64,
    slots: usize,
    hit_rate: f64,
    missed_bytes_per_token: f64,
    tokens_per_second: f64,
    /// With perfect prefetching.
    ideal_tokens_per_second: f64,
    /// Speedup from doubling the budget, up to the one that holds all experts.
    doubling_gives: f64,
    bound_by: BudgetBound,
    /// Plan of a server, if there is one in this budget.
    serving: Option<ServingRow>,
}

/// Slots and prefix cache of a server.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ServingRow {
    pub(crate) slots: usize,
    /// Bytes for states of earlier prompts.
    pub(crate) prefix_memory: u64,
    /// Predicted savings by which both were divided; null where all experts have slots, or where
    /// one of both was requested.
    pub(crate) division: Option<PrefixDivision>,
}

impl ServingRow {
    pub(crate) fn new(plan: &MemoryPlan) -> Self {
        let division = plan.prefix_division().copied();
        Self { slots: plan.slots(), prefix_memory: plan.prefix_bytes(), division }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum BudgetBound {
    Disk,
    Memory,
}

/// Position of the predicted token by default.
const CONTEXT: usize = 1024;

/// Request for predictions.
pub struct BudgetRequest<'a> {
    /// Name of the model in the report.
    pub model: String,
    /// Budgets in bytes; empty for a range from the floor to all experts in memory.
    pub budgets: &'a [u64],
    /// Position of the predicted token; by default 1024, or the model's last one.
    pub context: Option<usize>,
    /// Bandwidth of the disk.
    pub disk: DiskBandwidth,
    /// Memory bandwidth in bytes per second.
    pub memory_bytes_per_second: f64,
    /// Share of the memory bandwidth that compute reaches.
    pub computing_share: f64,
    /// Recorded routing; without it, routing is taken as uniform.
    pub trace: Option<&'a Trace>,
    /// Eviction policy.
    pub policy: PolicyKind,
    /// Memory request of each plan, without the budget.
    pub memory: MemoryRequest,
    /// The same for a server, whose prefix cache shares memory with slots.
    pub serving: Option<ServingRequest>,
}

/// Memory request of a server.
#[derive(Clone, Copy, Debug)]
pub struct ServingRequest {
    /// The request, without the budget and without the bytes of the server.
    pub memory: MemoryRequest,
    /// Bytes that a server holds beside its engine, by its budget.
    pub reserved: fn(u64) -> u64,
}

impl ServingRequest {
    /// Memory request of a server with a budget.
    pub fn with_budget(&self, budget: u64) -> MemoryRequest {
        self.memory.budget(budget).reserved((self.reserved)(budget))
    }
}

/// Bandwidth of the disk that experts are read from.
#[derive(Clone, Debug)]
pub struct DiskBandwidth {
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// The measurement, if it was measured.
    pub measured: Option<DiskSpeed>,
}

/// Position of the predicted token, checked against the model.
///
/// # Errors
/// The model has fewer positions.
pub fn context(asked: Option<usize>, blueprint: &Blueprint) -> anyhow::Result<usize> {
    let positions = blueprint.max_positions;
    let context = asked.unwrap_or(CONTEXT.min(positions.saturating_sub(1)));
    ensure!(
        context < positions,
        "a token after {context} others was asked for, but the model has {positions} positions: lower --context"
    );
    Ok(context)
}

impl BudgetReport {
    /// Predicts each budget.
    ///
    /// # Errors
    /// The trace is of another model, or a budget has no memory plan.
    pub fn new(
        request: &BudgetRequest<'_>,
        planner: &Planner<'_>,
        blueprint: &Blueprint,
        costs: &TokenCosts,
    ) -> anyhow::Result<Self> {
        let context = context(request.context, blueprint)?;
        let disk = request.disk.bytes_per_second;
        let plan = |budget: u64| planner.plan(&request.memory.budget(budget));
        let planned = |budget| Ok(plan(budget)?.dense_pools().iter().map(Pool::total).sum());
        let BudgetBounds { floor, everything } = bounds(&planned)?;
        let memory = request.memory_bytes_per_second;
        let limits = RooflineLimits { memory: memory * request.computing_share, disk };
        let predict = |plan: &MemoryPlan| {
            let hit_rate = hit_rate(plan, blueprint.experts(), request.trace, request.policy);
            (hit_rate, costs.expected(limits, context, |_| hit_rate))
        };
        let mut budgets = Vec::new();
        for budget in ladder(request.budgets, floor, everything) {
            let planned = plan(budget)?;
            let (hit_rate, least) = predict(&planned);
            let doubled = predict(&plan(budget.saturating_mul(2).min(everything.max(budget)))?).1;
            let serving = request.serving.map(|serving| planner.plan(&serving.with_budget(budget)));
            budgets.push(BudgetRow {
                budget,
                serving: serving.and_then(Result::ok).as_ref().map(ServingRow::new),
                slots: planned.slots(),
                hit_rate,
                missed_bytes_per_token: least.read * disk,
                tokens_per_second: 1.0 / least.streamed,
                ideal_tokens_per_second: 1.0 / least.ideal(),
                doubling_gives: least.streamed / doubled.streamed,
                bound_by: match least.read > least.compute {
                    true => BudgetBound::Disk,
                    false => BudgetBound::Memory,
                },
            });
        }
        let system = SystemMemory::now();
        let available = system.available + system.resident;
        let (worth_having, why) = worth(&budgets, available);
        Ok(Self {
            model: request.model.clone(),
            context,
            disk_bytes_per_second: disk,
            disk: request.disk.measured.clone(),
            memory_bytes_per_second: memory,
            computing_share: request.computing_share,
            hit_rates: if request.trace.is_some() { "trace" } else { "uniform routing" },
            floor,
            everything,
            available,
            worth_having,
            why,
            budgets,
        })
    }

    /// Budgets and predicted tokens per second, in the order of the request.
    pub fn predictions(&self) -> impl Iterator<Item = (u64, f64)> {
        self.budgets.iter().map(|row| (row.budget, row.tokens_per_second))
    }

    /// Smallest budget with a memory plan, in bytes.
    pub fn floor(&self) -> u64 {
        self.floor
    }

    /// Budget that holds all experts, in bytes.
    pub fn everything(&self) -> u64 {
        self.everything
    }

    /// Chart of predicted tokens per second over budgets.
    pub fn chart(&self) -> Chart {
        let over = |figure: &dyn Fn(&BudgetRow) -> f64| {
            self.budgets
                .iter()
                .map(|r| (r.budget as f64 / (1u64 << 30) as f64, figure(r)))
                .collect()
        };
        Chart {
            title: format!("decode, predicted, {}", self.model),
            x_label: "memory budget in GiB".into(),
            y_label: "tokens per second".into(),
            log_x: true,
            series: vec![
                ChartSeries { name: "at best".into(), points: over(&|r| r.tokens_per_second) },
                ChartSeries {
                    name: "perfect lookahead".into(),
                    points: over(&|r| r.ideal_tokens_per_second),
                },
            ],
        }
    }
}

/// Checks that a trace has the layers and experts of the model.
///
/// # Errors
/// It has not.
pub fn check_trace(trace: &Trace, blueprint: &Blueprint) -> anyhow::Result<()> {
    let traced = trace.header().layers.iter().map(|l| (l.layer, l.experts, l.k));
    let here = blueprint.moe_layers().map(|(i, m)| (i, m.experts.count, m.router.top_k));
    ensure!(
        traced.eq(here),
        "the trace is of {}, whose layers or experts are others than this model's",
        trace.header().model
    );
    Ok(())
}

/// Expected share of needed experts that are in a slot.
fn hit_rate(plan: &MemoryPlan, experts: usize, trace: Option<&Trace>, policy: PolicyKind) -> f64 {
    let slots = plan.slots();
    match trace {
        _ if slots >= experts => 1.0,
        Some(trace) => trace.hit_rate(policy, slots),
        // With LRU-like policies and uniform routing, all other experts of a token are used before
        // one is needed again, so fewer slots than the working set never hit. Counts of uses (LFU)
        // persist longer.
        None if policy != PolicyKind::Lfu && slots < plan.working_set => 0.0,
        None => slots as f64 / experts as f64,
    }
}

/// Range of useful budgets.
#[derive(Debug, PartialEq)]
struct BudgetBounds {
    floor: u64,
    everything: u64,
}

/// Smallest budget with a memory plan, in whole MiB, and the budget that holds all experts.
/// `planned` returns the planned bytes for a budget.
fn bounds(planned: &dyn Fn(u64) -> Result<u64, moeflux::Error>) -> anyhow::Result<BudgetBounds> {
    const MIB: u64 = 1 << 20;
    let everything = planned(1 << 52)?.div_ceil(MIB);
    let (mut below, mut floor) = (0, everything);
    while floor - below > 1 {
        let middle = below + (floor - below) / 2;
        match planned(middle * MIB) {
            Ok(_) => floor = middle,
            Err(_) => below = middle,
        }
    }
    // The program's memory may grow by a page or two between plans.
    let floor = (floor + 1).min(everything) * MIB;
    Ok(BudgetBounds { floor, everything: everything * MIB })
}

/// Budgets that are predicted by default.
fn ladder(asked: &[u64], floor: u64, everything: u64) -> Vec<u64> {
    if !asked.is_empty() {
        return asked.to_vec();
    }
    // Sizes of 1, 1.5, 2, 3, 4, 6, 8 and so on, as machines have them.
    let round = (20..52).flat_map(|power| [1u64 << power, 3 << (power - 1)]);
    let mut between: Vec<u64> =
        round.filter(|b| *b > floor + floor / 8 && *b < everything - everything / 8).collect();
    if between.len() < 3 {
        let step = (everything - floor) / 4;
        between = (1..4).map(|i| (floor + i * step) >> 20 << 20).filter(|b| *b > floor).collect();
    }
    [floor].into_iter().chain(between).chain((everything > floor).then_some(everything)).collect()
}

/// Smallest budget beyond which doubling never gains [`WORTH`] times the speed, and the reason.
/// Only budgets within `available` count, unless there is none.
fn worth(rows: &[BudgetRow], available: u64) -> (Option<u64>, String) {
    let within = rows.iter().filter(|r| r.budget <= available).count();
    let rows = if within == 0 { rows } else { &rows[..within] };
    let Some(most) = rows.last() else { return (None, "no budget was planned".to_owned()) };
    // Largest budget of at most twice the size.
    let doubled = |i: usize| {
        rows.iter().rfind(|r| r.budget <= rows[i].budget.saturating_mul(2)).unwrap_or(most)
    };
    let gives = |i: usize| doubled(i).tokens_per_second / rows[i].tokens_per_second;
    let pays = (0..rows.len()).rev().find(|i| gives(*i) >= WORTH);
    let at = pays.map_or(0, |i| i + 1).min(rows.len() - 1);
    let row = &rows[at];
    let (budget, speed) = (units::memory(row.budget), units::rate(row.tokens_per_second));
    let mut why = match row.budget == most.budget {
        true => format!("{budget}, for {speed}: up to there, more memory pays"),
        false => format!(
            "{budget}, for {speed}: {} would give {} times as much",
            units::memory(doubled(at).budget),
            units::figure(gives(at))
        ),
    };
    if row.budget == most.budget && most.doubling_gives >= WORTH {
        why += &format!(
            "; twice as much would give {} times the speed, but this machine can give {}",
            units::figure(most.doubling_gives),
            units::memory(available)
        );
    }
    (Some(row.budget), why)
}

impl fmt::Display for BudgetReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}; decode after {} tokens", self.model, self.context)?;
        match &self.disk {
            Some(disk) => write!(f, "disk {}", describe::disk_speed(disk))?,
            None => write!(f, "disk {}", units::speed(self.disk_bytes_per_second))?,
        }
        write!(f, "; memory {}", units::speed(self.memory_bytes_per_second))?;
        if self.computing_share < 1.0 {
            write!(
                f,
                ", of which computing was measured to reach {}",
                units::percent(self.computing_share)
            )?;
        }
        let hits = match self.hit_rates {
            "trace" => "hit rates as the trace has them",
            _ => {
                "hit rates as if all experts were equally popular: a trained model's are better, --trace knows"
            }
        };
        writeln!(f, "\n{hits}\n")?;
        let mut table = Table::new(0);
        table.head([
            "budget",
            "slots",
            "hit rate",
            "missed per token",
            "tok/s",
            "doubling gives",
            "bound by",
            "",
        ]);
        for row in &self.budgets {
            table.row([
                units::memory(row.budget),
                row.slots.to_string(),
                units::percent(row.hit_rate),
                units::disk(row.missed_bytes_per_token),
                units::bare_rate(row.tokens_per_second),
                format!("{} x", units::figure(row.doubling_gives)),
                match row.bound_by {
                    BudgetBound::Disk => "disk".to_owned(),
                    BudgetBound::Memory => "memory".to_owned(),
                },
                match (Some(row.budget) == self.worth_having, row.budget > self.available) {
                    (true, _) => "worth having".to_owned(),
                    (_, true) => "more than there is".to_owned(),
                    _ => String::new(),
                },
            ]);
        }
        writeln!(f, "{table}\nworth having: {}", self.why)?;
        self.write_serving(f)
    }
}

impl BudgetReport {
    /// How a server divides each budget between slots and prefix cache.
    fn write_serving(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows =
            || self.budgets.iter().filter_map(|row| Some((row.budget, row.serving.as_ref()?)));
        if rows().next().is_none() {
            return Ok(());
        }
        writeln!(f, "\nserve shares memory between slots and states of earlier prompts\n")?;
        let mut table = Table::new(0);
        table.head(["budget", "slots", "prefix cache", "a GiB of slots", "a GiB of states"]);
        for (budget, serving) in rows() {
            let saved = |seconds: fn(&PrefixDivision) -> f64| match &serving.division {
                Some(division) => format!("saves {} a turn", units::time(seconds(division))),
                None => "-".to_owned(),
            };
            table.row([
                units::memory(budget),
                serving.slots.to_string(),
                units::memory(serving.prefix_memory),
                saved(|division| division.slot_seconds_per_gib),
                saved(|division| division.prefix_seconds_per_gib),
            ]);
        }
        write!(f, "{table}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Budgets of 4, 8, 16 GiB and so on, with these speeds.
    fn rows(speeds: &[f64]) -> Vec<BudgetRow> {
        let row = |(i, speed): (usize, &f64)| BudgetRow {
            budget: (4 << i) * GIB,
            slots: 100,
            hit_rate: 0.5,
            missed_bytes_per_token: 1e8,
            tokens_per_second: *speed,
            ideal_tokens_per_second: 9.0,
            doubling_gives: 1.0,
            bound_by: BudgetBound::Disk,
            serving: None,
        };
        speeds.iter().enumerate().map(row).collect()
    }

    #[test]
    fn worth_having_is_where_doubling_stops_to_pay() {
        // Flat, then steep, then flat.
        let flat = rows(&[1.0, 1.1, 3.0, 3.3, 3.6]);
        let (budget, why) = worth(&flat, 1024 * GIB);
        assert_eq!(
            (budget, why.as_str()),
            (Some(16 * GIB), "16 GiB, for 3.00 tok/s: 32 GiB would give 1.10 times as much")
        );
        // Budgets beyond the machine's memory are not advised.
        let (budget, why) = worth(&flat, 12 * GIB);
        assert_eq!(budget, Some(4 * GIB));
        assert!(why.contains("8 GiB would give 1.10 times"), "{why}");
        // Doubling would gain, but exceeds the machine's memory.
        let mut steep = rows(&[1.0, 2.0, 4.0]);
        steep[1].doubling_gives = 2.0;
        let (budget, why) = worth(&steep, 12 * GIB);
        assert_eq!(budget, Some(8 * GIB));
        assert!(why.contains("this machine can give 12 GiB"), "{why}");
        assert_eq!(worth(&steep, GIB).0, Some(16 * GIB));
        assert_eq!(worth(&[], GIB).0, None);
    }

    #[test]
    fn bounds_are_found_where_plans_begin_and_end() {
        let found = |floor: u64, total: u64| {
            bounds(&move |budget: u64| match budget {
                b if b < floor => Err(moeflux::Error::from(moeflux::base::PlanError::BelowFloor {
                    name: "a budget",
                    budget,
                    floor,
                    parts: String::new(),
                    advice: String::new(),
                })),
                _ => Ok(total.min(budget)),
            })
            .unwrap()
        };
        let bounds = |floor, everything| BudgetBounds { floor, everything };
        assert_eq!(found(100 << 20, 4 << 30), bounds(101 << 20, 4 << 30));
        assert_eq!(found((100 << 20) + 1, (4 << 30) - 7), bounds(102 << 20, 4 << 30));
        // The floor holds all experts.
        assert_eq!(found(64 << 20, 64 << 20), bounds(64 << 20, 64 << 20));
    }
}
