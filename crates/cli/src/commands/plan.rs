//! `plan`: which budget is worth having.

use std::{fmt, process::ExitCode};

use anyhow::ensure;
use moeflux::{
    Blueprint, Checkpoint, DeviceOptions, DiskSpeed, MemoryPlan, MemoryRequest, Planner,
    PolicyKind, SystemMemory, Trace, probe_disk, probe_memory,
};
use serde::Serialize;

use super::bench::{computing_share, disk_words};
use crate::{
    WrongUse,
    args::PlanArgs,
    folders, load,
    out::{self, Table},
    plot::{self, Chart, Series},
    progress::Ui,
    roof::{Costs, Limits},
    units,
};

/// From the budget that is worth having on, twice as much gives less than this factor.
const WORTH: f64 = 1.25;

/// The fields are described in docs/bench.md. Sizes are bytes.
#[derive(Serialize)]
struct Report {
    model: String,
    /// Tokens before the one whose time is predicted.
    context: usize,
    disk_bytes_per_second: f64,
    disk: Option<DiskSpeed>,
    memory_bytes_per_second: f64,
    /// What of it computing reaches: 1, or what was measured.
    computing_share: f64,
    /// Where hit rates are from.
    hit_rates: &'static str,
    /// The smallest budget that can be planned.
    floor: u64,
    /// The budget that holds everything.
    everything: u64,
    /// What this machine can give now.
    available: u64,
    worth_having: Option<u64>,
    why: String,
    budgets: Vec<Row>,
}

/// One budget.
#[derive(Clone, Serialize)]
struct Row {
    budget: u64,
    slots: usize,
    hit_rate: f64,
    missed_bytes_per_token: f64,
    tokens_per_second: f64,
    /// With perfect lookahead.
    ideal_tokens_per_second: f64,
    /// What twice the budget gives, at most everything.
    doubling_gives: f64,
    bound_by: Bound,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Bound {
    Disk,
    Memory,
}

/// Tokens before the one whose time is predicted, where nobody says how many.
const CONTEXT: usize = 1024;

/// Runs `moeflux plan`.
///
/// # Errors
/// The checkpoint or the trace cannot be opened, the model has fewer positions, the disk's speed is not known, or no budget can be
/// planned.
pub(crate) fn run(args: &PlanArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let mut model = args.engine.model.clone();
    model.model = args.folder.clone().or(model.model);
    let checkpoint = match &args.preset {
        Some(preset) => load::preset(preset)?,
        None => load::checkpoint(&model, &args.engine.reads.mirror, ui)?,
    };
    let blueprint = Blueprint::for_checkpoint(&checkpoint)?;
    let positions = blueprint.max_positions;
    let context = args.context.unwrap_or(CONTEXT.min(positions.saturating_sub(1)));
    ensure!(
        context < positions,
        "a token behind {context} others was asked for, but the model has {positions} positions: lower --context"
    );
    let costs = Costs::of(&blueprint, args.engine.compute.kv_format());
    let (disk_speed, disk) = disk(args, &checkpoint, blueprint.slot_bytes(), ui)?;
    let memory = match args.ram {
        Some(speed) => speed,
        None => {
            probe_memory(costs.bytes(), args.engine.compute.threads.map(Into::into))?
                .bytes_per_second
        }
    };
    let share = args.measured.as_deref().map(computing_share).transpose()?.unwrap_or(1.0);
    let trace = args.trace.as_deref().map(Trace::open).transpose()?;
    if let Some(trace) = &trace {
        fits(trace, &blueprint)?;
    }
    // Which adapter would compute, and in whose memory slots would lie, is another question.
    let device = DeviceOptions { name: Some("cpu".into()), ..args.engine.compute.options() };
    if args.engine.compute.device.starts_with("gpu") || args.engine.memory.gpu_memory.is_some() {
        ui.note("this predicts for the processor: --device and --gpu-memory have no effect");
    }
    let planner = Planner::open(&checkpoint, &blueprint, &device)?;
    let request = args.engine.request(&checkpoint, &blueprint);
    let plan = |budget: u64| planner.plan(&MemoryRequest { budget: Some(budget), ..request });
    let (floor, everything) = bounds(&plan)?;
    let limits = Limits { memory: memory * share, disk: disk_speed };
    let predict = |plan: &MemoryPlan| {
        let hit = hit_rate(plan, blueprint.experts(), trace.as_ref(), args.engine.memory.policy);
        let least = costs.expected(limits, context, |_| hit);
        (hit, least)
    };
    let mut budgets = Vec::new();
    for budget in ladder(args, floor, everything) {
        let planned = plan(budget)?;
        let (hit_rate, least) = predict(&planned);
        let doubled = predict(&plan(budget.saturating_mul(2).min(everything.max(budget)))?).1;
        budgets.push(Row {
            budget,
            slots: planned.slots,
            hit_rate,
            missed_bytes_per_token: least.read * disk_speed,
            tokens_per_second: 1.0 / least.streamed,
            ideal_tokens_per_second: 1.0 / least.ideal(),
            doubling_gives: least.streamed / doubled.streamed,
            bound_by: if least.read > least.compute { Bound::Disk } else { Bound::Memory },
        });
    }
    let system = SystemMemory::now();
    let available = system.available + system.resident;
    let (worth_having, why) = worth(&budgets, available);
    let report = Report {
        model: match (&args.preset, &model.model) {
            (Some(preset), _) => format!("{preset}, as synth would write it"),
            (None, Some(folder)) => folder.display().to_string(),
            (None, None) => "built-in tales-18m".to_owned(),
        },
        context,
        disk_bytes_per_second: disk_speed,
        disk,
        memory_bytes_per_second: memory,
        computing_share: share,
        hit_rates: if trace.is_some() { "trace" } else { "uniform routing" },
        floor,
        everything,
        available,
        worth_having,
        why,
        budgets,
    };
    if let Some(path) = &args.plot {
        plot::write(&report.chart(), path)?;
    }
    match args.json {
        true => out::json(&report)?,
        false => out::write(&report)?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Bytes per second, and where they were measured.
fn disk(
    args: &PlanArgs,
    checkpoint: &Checkpoint,
    block: usize,
    ui: Ui,
) -> anyhow::Result<(f64, Option<DiskSpeed>)> {
    if let Some(speed) = args.disk {
        return Ok((speed, None));
    }
    let folder = folders::probes();
    let probed = {
        let _bar = ui.share("measuring the disk");
        probe_disk(checkpoint, block, folder.as_deref(), args.probe)?
    };
    // Of a model that is not there, a disk that was measured for another one.
    let found = probed.or_else(|| DiskSpeed::remembered(folder.as_deref()?, block));
    match found {
        Some(speed) => Ok((speed.ceiling(), Some(speed))),
        None => Err(WrongUse(
            "the speed of the disk is not known, as there is no file to measure it with: give --disk 3.5GB/s"
                .into(),
        )
        .into()),
    }
}

/// # Errors
/// The trace is of another model.
fn fits(trace: &Trace, blueprint: &Blueprint) -> anyhow::Result<()> {
    let traced = trace.header().layers.iter().map(|l| (l.layer, l.experts, l.k));
    let here = blueprint.moe_layers().map(|(i, m)| (i, m.experts.count, m.router.top_k));
    ensure!(
        traced.eq(here),
        "the trace is of {}, whose layers or experts are others than this model's",
        trace.header().model
    );
    Ok(())
}

/// The share of needed experts that will be in a slot.
fn hit_rate(plan: &MemoryPlan, experts: usize, trace: Option<&Trace>, policy: PolicyKind) -> f64 {
    match trace {
        _ if plan.slots >= experts => 1.0,
        Some(trace) => trace.hit_rate(policy, plan.slots),
        // Before an expert is needed again, all others of a token were. Counts of uses outlast that.
        None if policy != PolicyKind::Lfu && plan.slots < plan.working_set => 0.0,
        None => plan.slots as f64 / experts as f64,
    }
}

/// The smallest budget that can be planned, in whole MiB, and the one that holds everything.
fn bounds(plan: &dyn Fn(u64) -> Result<MemoryPlan, moeflux::Error>) -> anyhow::Result<(u64, u64)> {
    const MIB: u64 = 1 << 20;
    let everything = plan(1 << 52)?.total().div_ceil(MIB);
    let (mut below, mut floor) = (0, everything);
    while floor - below > 1 {
        let middle = below + (floor - below) / 2;
        match plan(middle * MIB) {
            Ok(_) => floor = middle,
            Err(_) => below = middle,
        }
    }
    // What the program itself holds may grow by a page or two from plan to plan.
    Ok(((floor + 1).min(everything) * MIB, everything * MIB))
}

/// The budgets that are shown.
fn ladder(args: &PlanArgs, floor: u64, everything: u64) -> Vec<u64> {
    if !args.budgets.is_empty() {
        return args.budgets.clone();
    }
    // 1, 1.5, 2, 3, 4, 6, 8: what machines have, and what lies between.
    let round = (20..52).flat_map(|power| [1u64 << power, 3 << (power - 1)]);
    let mut between: Vec<u64> =
        round.filter(|b| *b > floor + floor / 8 && *b < everything - everything / 8).collect();
    if between.len() < 3 {
        let step = (everything - floor) / 4;
        between = (1..4).map(|i| (floor + i * step) >> 20 << 20).filter(|b| *b > floor).collect();
    }
    [floor].into_iter().chain(between).chain((everything > floor).then_some(everything)).collect()
}

/// The smallest budget from which on twice as much never gives [`WORTH`] times the speed, and why. Of budgets that this machine
/// can give, unless it can give none of them.
fn worth(rows: &[Row], available: u64) -> (Option<u64>, String) {
    let within = rows.iter().filter(|r| r.budget <= available).count();
    let rows = if within == 0 { rows } else { &rows[..within] };
    let Some(most) = rows.last() else { return (None, "no budget was planned".to_owned()) };
    // The largest budget that is no more than twice as much.
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
            "{budget}, for {speed}: {} would give {:.2} times as much",
            units::memory(doubled(at).budget),
            gives(at)
        ),
    };
    if row.budget == most.budget && most.doubling_gives >= WORTH {
        why += &format!(
            "; twice as much would give {:.2} times the speed, but this machine can give {}",
            most.doubling_gives,
            units::memory(available)
        );
    }
    (Some(row.budget), why)
}

impl Report {
    fn chart(&self) -> Chart {
        let over = |of: &dyn Fn(&Row) -> f64| {
            self.budgets.iter().map(|r| (r.budget as f64 / (1u64 << 30) as f64, of(r))).collect()
        };
        Chart {
            title: format!("decode, predicted, {}", self.model),
            x_label: "memory budget in GiB".into(),
            y_label: "tokens per second".into(),
            log_x: true,
            series: vec![
                Series { name: "at best".into(), points: over(&|r| r.tokens_per_second) },
                Series {
                    name: "perfect lookahead".into(),
                    points: over(&|r| r.ideal_tokens_per_second),
                },
            ],
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}; decode after {} tokens", self.model, self.context)?;
        match &self.disk {
            Some(disk) => write!(f, "disk {}", disk_words(disk))?,
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
        table.row([
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
                format!("{:.2} x", row.doubling_gives),
                match row.bound_by {
                    Bound::Disk => "disk".to_owned(),
                    Bound::Memory => "memory".to_owned(),
                },
                match (Some(row.budget) == self.worth_having, row.budget > self.available) {
                    (true, _) => "worth having".to_owned(),
                    (_, true) => "more than there is".to_owned(),
                    _ => String::new(),
                },
            ]);
        }
        writeln!(f, "{table}\nworth having: {}", self.why)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// 4, 8, 16 GiB and so on, with these speeds.
    fn rows(speeds: &[f64]) -> Vec<Row> {
        let row = |(i, speed): (usize, &f64)| Row {
            budget: (4 << i) * GIB,
            slots: 100,
            hit_rate: 0.5,
            missed_bytes_per_token: 1e8,
            tokens_per_second: *speed,
            ideal_tokens_per_second: 9.0,
            doubling_gives: 1.0,
            bound_by: Bound::Disk,
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
        // What this machine does not have is no advice.
        let (budget, why) = worth(&flat, 12 * GIB);
        assert_eq!(budget, Some(4 * GIB));
        assert!(why.contains("8 GiB would give 1.10 times"), "{why}");
        // Twice as much would pay, and is not to be had.
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
        let of_all = plan(0);
        let found = |floor: u64, total: u64| {
            bounds(&move |budget: u64| match budget {
                b if b < floor => Err(moeflux::Error::Budget("below the floor".into())),
                _ => Ok(MemoryPlan { dense: total.min(budget), ..of_all }),
            })
            .unwrap()
        };
        assert_eq!(found(100 << 20, 4 << 30), (101 << 20, 4 << 30));
        assert_eq!(found((100 << 20) + 1, (4 << 30) - 7), (102 << 20, 4 << 30));
        // Nothing streams: the floor holds everything.
        assert_eq!(found(64 << 20, 64 << 20), (64 << 20, 64 << 20));
    }

    /// One that holds `dense` bytes and nothing else.
    fn plan(dense: u64) -> MemoryPlan {
        let checkpoint = Checkpoint::embedded().unwrap();
        let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
        let device = DeviceOptions { name: Some("reference".into()), ..DeviceOptions::default() };
        let planner = Planner::open(&checkpoint, &blueprint, &device).unwrap();
        let plan = planner
            .plan(&MemoryRequest { budget: Some(1 << 40), ..MemoryRequest::default() })
            .unwrap();
        MemoryPlan {
            process: 0,
            staging: 0,
            dense,
            state: 0,
            marks: 0,
            scratch: 0,
            slots: 0,
            ..plan
        }
    }
}
