//! `moeflux doctor`: the parts of this machine that slow a model down.

use std::{path::Path, process::ExitCode};

use moeflux::{
    Checkpoint,
    experts::{PolicyKind, probe_disk, probe_memory},
    model::blueprint::Blueprint,
    runtime::{AdapterKind, Devices},
    tools::{Planner, TokenCosts},
};
use moeflux_bench::{
    budget_report::{BudgetReport, BudgetRequest, DiskBandwidth},
    describe,
    table::Table,
    units,
};
use moeflux_hub::Settings;
use serde::Serialize;

use super::{finding::Finding, system};
use crate::{args::DoctorArgs, folders, load, out, progress::Ui};

/// Share of the available memory that is the budget by default.
const DEFAULT_SHARE: f64 = 0.75;

/// Findings of all checks.
#[derive(Serialize)]
struct DoctorReport {
    findings: Vec<Finding>,
}

/// Runs `moeflux doctor`.
///
/// # Errors
/// The model cannot be opened or measured.
pub(crate) fn run(args: &DoctorArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let devices = Devices::now();
    let mut findings = vec![processor(&devices), system::memory(devices.memory)];
    findings.extend(system::huge_pages());
    findings.extend(system::io_uring());
    findings.extend(system::open_files());
    findings.extend(graphics(&devices));
    match &args.engine.model.model {
        Some(_) => {
            let engine = &args.engine;
            let checkpoint = load::checkpoint(&engine.model, &engine.reads.mirror, ui)?;
            findings.extend(system::disk(checkpoint.folder()));
            findings.extend(model(args, &checkpoint, devices.memory.available, ui)?);
        }
        None => {
            if let Ok(settings) = Settings::from_environment() {
                findings.extend(system::disk(&settings.cache));
            }
        }
    }
    let report = DoctorReport { findings };
    match args.json {
        true => out::json(&report)?,
        false => out::write(report)?,
    }
    Ok(ExitCode::SUCCESS)
}

fn processor(devices: &Devices) -> Finding {
    let threads = units::plural(devices.threads as u64, "thread");
    let finding = Finding::new("processor", format!("{}, {threads}", devices.isa));
    match devices.isa {
        "scalar" | "portable" => finding
            .advice("kernels use no vector instructions here: expect a fraction of the speed"),
        _ => finding,
    }
}

/// Findings on graphics cards and their drivers.
fn graphics(devices: &Devices) -> Vec<Finding> {
    let hardware = |kind: &AdapterKind| !matches!(kind, AdapterKind::Software);
    let cards = devices.adapters.iter().filter(|adapter| hardware(&adapter.kind));
    let mut findings: Vec<_> = cards
        .map(|adapter| {
            let name = format!("{}, {}", adapter.name, adapter.driver);
            let finding = Finding::new("graphics", name);
            match &adapter.unusable {
                None => finding,
                Some(reason) => finding.advice(format!("it is not used: {reason}")),
            }
        })
        .collect();
    if findings.is_empty() {
        let finding = Finding::new("graphics", "no card with a Vulkan, Metal or DX12 driver");
        findings.push(match Path::new("/dev/nvidia0").exists() || Path::new("/dev/dri").exists() {
            false => finding,
            true => finding.advice(
                "there is a card: install the Vulkan loader and its driver (Debian, Ubuntu: \
                 libvulkan1 and mesa-vulkan-drivers, or NVIDIA's libnvidia-gl)",
            ),
        });
    }
    findings
}

/// Findings on a model: how fast its files are read, and the predicted speed.
///
/// # Errors
/// A file cannot be read, or no budget has a plan.
fn model(
    args: &DoctorArgs,
    checkpoint: &Checkpoint,
    available: u64,
    ui: Ui,
) -> anyhow::Result<Vec<Finding>> {
    let blueprint = Blueprint::for_checkpoint(checkpoint)?;
    let speed = {
        let _bar = ui.share("measuring the disk");
        probe_disk(checkpoint, blueprint.slot_bytes(), folders::probes().as_deref(), false)?
    };
    let Some(speed) = speed else { return Ok(Vec::new()) };
    let finding = Finding::new("reads", describe::disk_speed(&speed));
    let mut findings = vec![match speed.direct {
        true => finding,
        false => finding.advice("a local file system with direct reads (ext4, xfs) is faster"),
    }];
    let costs = TokenCosts::new(&blueprint, args.engine.compute.kv_format());
    let memory = probe_memory(costs.bytes(), args.engine.compute.threads.map(Into::into))?;
    let device = args.engine.compute.options().name("cpu");
    let planner = Planner::open(checkpoint, &blueprint, &device, None)?;
    let budget = args.engine.memory.memory;
    let budget = budget.unwrap_or((available as f64 * DEFAULT_SHARE) as u64);
    let disk = speed.ceiling();
    let predicted = |budgets: &[u64], bytes_per_second: f64| {
        let request = BudgetRequest {
            model: String::new(),
            budgets,
            context: None,
            disk: DiskBandwidth { bytes_per_second, measured: None },
            memory_bytes_per_second: memory.bytes_per_second,
            computing_share: 1.0,
            trace: None,
            policy: PolicyKind::default(),
            memory: args.engine.request(checkpoint, &blueprint),
            serving: None,
        };
        BudgetReport::new(&request, &planner, &blueprint, &costs)
    };
    let bounds = predicted(&[], disk)?;
    let now = budget.clamp(bounds.floor(), bounds.everything().max(bounds.floor()));
    let doubled = now.saturating_mul(2).min(bounds.everything().max(now));
    let rates = |report: BudgetReport| report.predictions().map(|(_, rate)| rate).collect();
    let rates: Vec<f64> = rates(predicted(&[now, doubled], disk)?);
    let faster = predicted(&[now], 2.0 * disk)?.predictions().map(|(_, rate)| rate).next();
    let (&[today, more], Some(faster)) = (&rates[..], faster) else { return Ok(findings) };
    let mut found = format!("at most {} of decode in {}", units::rate(today), units::memory(now));
    if budget < bounds.floor() {
        found += &format!(", the least budget; {} is too little", units::memory(budget));
    }
    let finding = Finding::new("speed", found);
    findings.push(match now < bounds.everything() {
        false => finding,
        true => finding.advice(format!(
            "{} of memory would give {}, a disk twice as fast {}; `moeflux plan` has all budgets",
            units::memory(doubled),
            units::rate(more),
            units::rate(faster)
        )),
    });
    Ok(findings)
}

impl std::fmt::Display for DoctorReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut table = Table::new(2);
        for Finding { about, found, advice } in &self.findings {
            table.row([*about, found]);
            if let Some(advice) = advice {
                table.row(["", &format!("-> {advice}")]);
            }
        }
        write!(f, "{table}")?;
        match self.findings.iter().filter(|finding| finding.advice.is_some()).count() {
            0 => writeln!(f, "\nnothing to change"),
            count => writeln!(f, "\n{} to look at", units::plural(count as u64, "thing")),
        }
    }
}
