//! `plan`: predicted decode speed for a range of memory budgets, or for each way to compute experts
//! in host memory beside a graphics card.

use std::{fmt, process::ExitCode};

use moeflux::{
    Checkpoint,
    base::Readers,
    experts::{DiskSpeed, Trace, probe_disk, probe_memory},
    model::blueprint::Blueprint,
    tools::{Planner, TokenCosts},
};
use moeflux_bench::{
    budget_report::{self, BudgetReport, BudgetRequest, DiskBandwidth, ServingRequest},
    comparison::SavedRun,
    host_report::HostReport,
    plot,
    speed::computing_share,
};
use moeflux_server::reserved_bytes;
use serde::Serialize;

use super::serve::SESSIONS;
use crate::{
    args::{HostExpertsArg, PlanArgs},
    atomic_file, folders, load, out,
    progress::Ui,
    wrong_use::WrongUse,
};

/// Runs `moeflux plan`.
///
/// # Errors
/// The checkpoint or the trace cannot be opened, the model has fewer positions, the disk's
/// bandwidth is unknown, or a budget has no memory plan.
pub(crate) fn run(args: &PlanArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let mut model = args.engine.model.clone();
    model.model = args.folder.clone().or(model.model);
    let checkpoint = match &args.preset {
        Some(preset) => load::preset(preset)?,
        None => load::checkpoint(&model, &args.engine.reads.mirror, ui)?,
    };
    let blueprint = Blueprint::for_checkpoint(&checkpoint)?;
    let context = budget_report::context(args.context, &blueprint)?;
    let name = match (&args.preset, &model.model) {
        (Some(preset), _) => format!("{preset}, as synth would write it"),
        (None, Some(folder)) => folder.display().to_string(),
        (None, None) => "built-in tales-18m".to_owned(),
    };
    let memory = args.engine.request(&checkpoint, &blueprint);
    let memory = memory.sessions(SESSIONS).grammars(true).marks(args.engine.memory.prefix_memory);
    let serving = ServingRequest { memory, reserved: reserved_bytes };
    if args.engine.compute.device.starts_with("gpu") {
        let device = args.engine.compute.options();
        let mut planner = Planner::open(&checkpoint, &blueprint, &device, None)?;
        let request = args.engine.request(&checkpoint, &blueprint);
        let request = request.host_threads(args.engine.compute.threads.map(Into::into));
        let given = args.engine.memory.experts_on_host.as_ref();
        let placement = HostExpertsArg::placement(given)?;
        let model = args.preset.is_none().then(|| checkpoint.identity()).transpose()?;
        if let Some(forecast) = planner.forecast_host(&request, context, &placement, model)? {
            HostExpertsArg::record(given, &placement, forecast.plan.as_ref(), ui)?;
            let report = HostReport::new(name, planner.device(), context, forecast);
            let serving = planner.plan(&serving.with_budget(memory.host_budget()));
            print(&report.with_serving(serving.ok().as_ref()), args.json)?;
            return Ok(ExitCode::SUCCESS);
        }
    }
    let costs = TokenCosts::new(&blueprint, args.engine.compute.kv_format());
    let disk = disk_bandwidth(args, &checkpoint, blueprint.slot_bytes(), ui)?;
    let memory_bytes_per_second = match args.ram {
        Some(speed) => speed,
        None => {
            probe_memory(costs.bytes(), args.engine.compute.threads.map(Into::into))?
                .bytes_per_second
        }
    };
    let measured = args.measured.as_deref().map(|path| computing_share(&SavedRun::load(path)?));
    let computing_share = measured.transpose()?.unwrap_or(1.0);
    let trace = args.trace.as_deref().map(Trace::open).transpose()?;
    if let Some(trace) = &trace {
        budget_report::check_trace(trace, &blueprint)?;
    }
    let device = args.engine.compute.options().name("cpu");
    if args.engine.compute.device.starts_with("gpu") {
        ui.note(
            "this predicts for the processor: the GPU shares or cannot read host memory, or holds every expert",
        );
    } else if args.engine.memory.gpu_memory.is_some() {
        ui.note("this predicts for the processor: --gpu-memory has no effect without --device gpu");
    }
    let planner = Planner::open(&checkpoint, &blueprint, &device, None)?;
    let request = BudgetRequest {
        model: name,
        budgets: &args.budgets,
        context: args.context,
        disk,
        memory_bytes_per_second,
        computing_share,
        trace: trace.as_ref(),
        policy: args.engine.memory.policy,
        memory: args.engine.request(&checkpoint, &blueprint),
        serving: Some(serving),
    };
    let report = BudgetReport::new(&request, &planner, &blueprint, &costs)?;
    if let Some(path) = &args.plot {
        atomic_file::write(path, Readers::Umask, plot::svg(&report.chart())?.as_bytes())?;
    }
    print(&report, args.json)?;
    Ok(ExitCode::SUCCESS)
}

fn print<R: Serialize + fmt::Display>(report: &R, json: bool) -> anyhow::Result<()> {
    match json {
        true => out::json(report),
        false => out::write(report),
    }
}

/// Bandwidth of the disk: given, measured, or remembered.
fn disk_bandwidth(
    args: &PlanArgs,
    checkpoint: &Checkpoint,
    block: usize,
    ui: Ui,
) -> anyhow::Result<DiskBandwidth> {
    if let Some(bytes_per_second) = args.disk {
        return Ok(DiskBandwidth { bytes_per_second, measured: None });
    }
    let folder = folders::probes();
    let probed = {
        let _bar = ui.share("measuring the disk");
        probe_disk(checkpoint, block, folder.as_deref(), args.probe)?
    };
    // A preset has no files to measure; a disk that was measured for another model will do.
    let found = probed.or_else(|| DiskSpeed::remembered(folder.as_deref()?, block));
    match found {
        Some(speed) => {
            Ok(DiskBandwidth { bytes_per_second: speed.ceiling(), measured: Some(speed) })
        }
        None => Err(WrongUse(
            "the speed of the disk is unknown, as there is no file to measure it with: give --disk 3.5GB/s"
                .into(),
        )
        .into()),
    }
}
