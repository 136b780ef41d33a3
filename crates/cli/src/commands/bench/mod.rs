//! `bench`: speed, and what it could be.

mod compare;
mod kernels;
mod measure;
mod report;
mod rows;
mod summary;
mod sweep;

use std::{process::ExitCode, time::Instant};

use anyhow::{Context, bail};
use moeflux::{Blueprint, Checkpoint, Engine, FilePages, SystemMemory, probe_disk, probe_memory};
use serde_json::{Value, json};

pub(crate) use report::disk_words;
pub(crate) use rows::computing_share;

use crate::{
    WrongUse,
    args::{BenchArgs, BenchCommand, EngineArgs, FiguresArgs},
    aside, folders, interrupt,
    load::{self, Needs},
    out, plot,
    progress::Ui,
    roof::{Costs, Limits},
};
use measure::{Feed, Repeat, Roof, repeat};
use report::{KernelShare, Machine, Report, Touched};
use summary::{AtContext, Scale, Setting};

/// Runs `moeflux bench`.
///
/// # Errors
/// The model cannot be loaded or run, or a file cannot be read or written.
pub(crate) fn run(args: &BenchArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    if let Some(BenchCommand::Kernels(args)) = &args.command {
        return kernels::run(args, ui);
    }
    let contexts = match args.context.as_slice() {
        [] => &[args.prompt],
        contexts => contexts,
    };
    if contexts.iter().any(|c| c.saturating_add(args.tokens) == 0) {
        return Err(WrongUse("a prompt of 0 and --tokens 0 leave nothing to measure".into()).into());
    }
    if args.tokens == 0 && !args.sessions.is_empty() {
        return Err(WrongUse(
            "--sessions measures decoding, of which --tokens 0 leaves nothing".into(),
        )
        .into());
    }
    if let Some(budget) = args.only_budget {
        return one(args, contexts, Some(budget), ui, &mut |report| out::json(report));
    }
    let FiguresArgs { json, csv, .. } = args.figures;
    // What is to be compared with had better be there before anything is measured.
    let before = args.figures.compare.as_deref().map(|path| {
        let saved = compare::load(path)?;
        let rows = rows::rows(&saved).with_context(|| path.display().to_string())?;
        anyhow::Ok((saved, rows))
    });
    let before = before.transpose()?;
    // Files are written first: what is printed may be of no interest to anybody.
    let (mut measured, mut failed, mut kept) = (Value::Null, None, Ok(()));
    let mut printed = Ok(());
    // Until all is shown: what ended a budget's process may reach this one only after that.
    let armed = (!args.budgets.is_empty()).then(interrupt::arm);
    if let Some(armed) = &armed {
        (measured, failed) = sweep::run(&args.budgets, armed, ui)?;
        kept = keep(args, &measured);
        if !json && !csv {
            printed = out::write(sweep::table(&rows::rows(&measured)?));
        }
    } else {
        one(args, contexts, None, ui, &mut |report| {
            measured = serde_json::to_value(report)?;
            kept = keep(args, &measured);
            printed = if json || csv { Ok(()) } else { out::write(report) };
            Ok(())
        })?;
    }
    let rows = rows::rows(&measured)?;
    if json {
        printed = out::json(&measured);
    } else if csv {
        printed = out::write(rows::csv(&rows));
    }
    rows::inversions(&rows).iter().for_each(|note| ui.note(note));
    kept.and(failed.map_or(Ok(()), Err)).and(printed)?;
    let tolerance = args.figures.tolerance;
    let compared = |(saved, before): &(Value, Vec<rows::Row>)| {
        let (text, right) = rows::compare(&rows, before, tolerance)?;
        // Of several budgets the first tells what all have in common.
        let [now, then] = [&measured, saved].map(|run| run.pointer("/budgets/0").unwrap_or(run));
        let names = ["version", "system", "device", "model", "reader"];
        let mut differences = compare::differences(&names, now, then);
        let rates = [now, then].map(|run| &run["machine"]["memory"]["bytes_per_second"]);
        differences.extend(compare::different_rate("memory gives", rates, tolerance));
        anyhow::Ok(Compared { differences, text, right })
    };
    finish(&args.figures, before.as_ref().map(compared).transpose()?, ui)
}

/// Writes the files that were asked for.
fn keep(args: &BenchArgs, measured: &Value) -> anyhow::Result<()> {
    save(&args.figures, measured)?;
    let Some(path) = &args.plot else { return Ok(()) };
    plot::write(
        &rows::chart(&rows::rows(measured)?, measured["model"].as_str().unwrap_or("")),
        path,
    )
}

/// Saves what was measured, for `--compare`.
fn save(args: &FiguresArgs, measured: &Value) -> anyhow::Result<()> {
    let Some(path) = &args.save else { return Ok(()) };
    aside::write(path, &serde_json::to_vec_pretty(measured)?)
}

/// What a comparison with a saved run says.
struct Compared {
    /// What else is not the same.
    differences: Vec<String>,
    text: String,
    /// Whether nothing is slower than it may be.
    right: bool,
}

/// Says what a comparison found.
fn finish(args: &FiguresArgs, compared: Option<Compared>, ui: Ui) -> anyhow::Result<ExitCode> {
    let Some(Compared { differences, text, right }) = compared else {
        return Ok(ExitCode::SUCCESS);
    };
    let mut said = text;
    for difference in differences {
        said += &format!("not the same: {difference}\n");
    }
    // Those who asked for numbers get nothing else.
    if args.json || args.csv {
        ui.line(said.trim_end());
    } else {
        out::write(format_args!("\n{said}"))?;
    }
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The system and the processor's family: `linux x86_64`.
fn system() -> String {
    format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)
}

/// Measures in one budget and hands the report on.
fn one(
    args: &BenchArgs,
    contexts: &[usize],
    budget: Option<u64>,
    ui: Ui,
    then: &mut dyn FnMut(&Report<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<ExitCode> {
    let mut engine_args = args.engine.clone();
    engine_args.memory.memory = budget.or(engine_args.memory.memory);
    let checkpoint = load::checkpoint(&engine_args.model, &engine_args.reads.mirror, ui)?;
    let blueprint = Blueprint::of(&checkpoint)?;
    let needed = contexts.iter().max().map_or(0, |most| most.saturating_add(args.tokens));
    let positions = blueprint.max_positions;
    check_context(needed, engine_args.memory.ctx.map_or(positions, Into::into), positions)?;
    let (costs, scale, mut machine) = machine(args, &checkpoint, &blueprint, ui)?;
    let pages = FilePages::for_checkpoint(&checkpoint);
    if args.cold {
        // Warm files would be read in another way. Why they may still be warm is said when the first repeat begins.
        let _ = pages.forget();
    }
    let since = Instant::now();
    let asked = (needed > moeflux::DEFAULT_CONTEXT).then_some(needed);
    let sessions: Vec<Option<usize>> = match args.sessions.as_slice() {
        [] => vec![None],
        several => several.iter().map(|n| Some(n.get())).collect(),
    };
    let most = sessions.iter().max().copied().flatten();
    let needs = Needs { positions: asked, sessions: most, ..Needs::default() };
    let engine = load::engine_of(checkpoint, &engine_args, needs, ui)?;
    // A budget may have shrunk it.
    check_context(needed, engine.plan().context, positions)?;
    if let Some(most) = most.filter(|most| *most > engine.plan().chunk) {
        let chunk = engine.plan().chunk;
        bail!(
            "a step of {most} sessions has {most} tokens, and the plan has room for {chunk}: give --chunk {most}"
        );
    }
    let settings: Vec<Setting> =
        contexts.iter().flat_map(|c| sessions.iter().map(|n| (*c, *n))).collect();
    engine.record_routing(args.trace.trace.as_deref())?;
    let load_seconds = since.elapsed().as_secs_f64();
    if engine.device().graphics {
        // Kernels are compiled when they are first needed.
        let _bar = ui.share("warming up");
        for (prompt, sessions) in &settings {
            let answer = args.tokens.min(4);
            let feed = Feed { prompt: *prompt, sessions: *sessions, answer, seed: 0 };
            repeat(feed, &engine, None, &mut |_| {}, &mut || Ok(()))?;
        }
    }
    if !args.fresh {
        machine.touched = Some(touch(&engine, ui)?);
    }
    // What an adapter computes is not read from the host's memory.
    let disk = machine.disk.as_ref().map_or(f64::INFINITY, |d| d.ceiling());
    let limits = Limits { memory: machine.memory.bytes_per_second, disk };
    let threads = machine.memory.threads;
    let roof = (!engine.device().graphics).then_some(Roof { costs: &costs, limits, threads });
    let repeats = measure(args, &settings, &engine, (&pages, &mut machine, roof), ui)?;
    let kernels = match args.profile {
        true => profile(settings[0], args.tokens, &engine)?,
        false => Vec::new(),
    };
    let contexts = AtContext::all(&settings, &repeats, scale);
    let device = engine.device();
    let stretches = repeats.iter().flat_map(|r| [&r.prefill, &r.decode]).flatten();
    let dispatches = stretches.map(|m| m.stats.dispatches).sum();
    then(&Report {
        version: env!("CARGO_PKG_VERSION"),
        system: system(),
        options: options(args),
        model: match &args.engine.model.model {
            Some(folder) => folder.display().to_string(),
            None => "built-in tales-18m".to_owned(),
        },
        device: &device.name,
        device_choice: &device.reason,
        dispatches,
        on: load::on(device, dispatches),
        load_seconds,
        reader: engine.reads().to_owned(),
        machine,
        prefill: contexts[0].prefill.clone(),
        decode: contexts[0].decode.clone(),
        contexts,
        peak_memory: SystemMemory::now().peak,
        plan: engine.plan(),
        layers: engine.layer_stats(),
        repeats,
        kernels,
    })?;
    Ok(ExitCode::SUCCESS)
}

/// That the longest prompt and its answer fit a context, of a model of so many positions.
fn check_context(needed: usize, context: usize, positions: usize) -> anyhow::Result<()> {
    let advice = match needed > positions {
        true => format!("the model has {positions} positions"),
        false => format!("give --ctx {needed}"),
    };
    anyhow::ensure!(
        needed <= context,
        "a prompt and an answer of {needed} tokens together, and a context of {context}: {advice}"
    );
    Ok(())
}

/// What a later run must have in common to be comparable; budgets and contexts are compared one by one.
fn options(args: &BenchArgs) -> Value {
    let EngineArgs { memory, reads, compute, .. } = &args.engine;
    json!({
        "tokens": args.tokens,
        "repeats": args.repeat,
        "cold": args.cold,
        "fresh": args.fresh,
        "chunk": memory.chunk,
        "policy": memory.policy.to_string(),
        "prefetch": format!("{:?}", reads.prefetch).to_lowercase(),
        "threads": compute.threads,
        "exact": compute.exact,
        "kv": compute.kv_format().name(),
        "isa": compute.isa,
    })
}

/// What a token costs, and what the machine gives. Measured before the model is loaded: what that takes is free again then.
fn machine(
    args: &BenchArgs,
    checkpoint: &Checkpoint,
    blueprint: &Blueprint,
    ui: Ui,
) -> anyhow::Result<(Costs, Scale, Machine)> {
    let costs = Costs::of(blueprint, args.engine.compute.kv_format());
    // No more than the smallest plan holds.
    let dense: u64 = blueprint.matrices().flat_map(|m| &m.segments).map(|s| s.bytes as u64).sum();
    let working_set = costs.bytes().min(dense);
    let _bar = ui.share("measuring the disk");
    let disk =
        probe_disk(checkpoint, blueprint.slot_bytes(), folders::probes().as_deref(), args.probe)?;
    let memory = probe_memory(working_set, args.engine.compute.threads.map(Into::into))?;
    let expert = blueprint.experts_bytes() as f64 / blueprint.experts().max(1) as f64;
    let scale = Scale {
        expert,
        disk: disk.as_ref().map(|d| d.ceiling()),
        dense: costs.dense() as f64,
        moe_layers: blueprint.layers.iter().filter(|layer| layer.moe().is_some()).count(),
    };
    Ok((
        costs,
        scale,
        Machine {
            disk,
            memory,
            touched: None,
            cached_before: None,
            cached_after: None,
            cold: false,
        },
    ))
}

/// Has the system hand out the memory of all slots.
fn touch(engine: &Engine, ui: Ui) -> anyhow::Result<Touched> {
    let bar = ui.bytes("touching the memory of slots");
    let since = Instant::now();
    let bytes = engine.touch_slots(&mut |done, all| bar.bytes(done, all))?;
    Ok(Touched { bytes, seconds: since.elapsed().as_secs_f64() })
}

/// All repeats of all settings.
fn measure(
    args: &BenchArgs,
    settings: &[Setting],
    engine: &Engine,
    (pages, machine, roof): (&FilePages, &mut Machine, Option<Roof<'_>>),
    ui: Ui,
) -> anyhow::Result<Vec<Repeat>> {
    machine.cold = args.cold;
    let n = args.repeat.get();
    let mut repeats = Vec::new();
    let all = n as f64 * settings.len() as f64;
    let bar = ui.share("measuring");
    for (prompt, sessions) in settings {
        for seed in 0..n as u64 {
            if machine.cold {
                match pages.forget() {
                    Ok(()) => engine.forget_reads(),
                    Err(why) => {
                        machine.cold = false;
                        bar.clear();
                        ui.note(format_args!("reads may come from the page cache: {why}"));
                    }
                }
            }
            machine.cached_before = machine.cached_before.or_else(|| pages.cached());
            let feed = Feed { prompt: *prompt, sessions: *sessions, answer: args.tokens, seed };
            let done = repeats.len() as f64;
            let mut progress = |share| bar.share((done + share) / all);
            repeats.push(repeat(feed, engine, roof, &mut progress, &mut || Ok(()))?);
        }
    }
    machine.cached_after = pages.cached();
    Ok(repeats)
}

/// Times of a GPU's kernels, from one more run of a prompt and, behind it, an answer, of so many sessions.
fn profile(
    (prompt, sessions): (usize, Option<usize>),
    answer: usize,
    engine: &Engine,
) -> anyhow::Result<Vec<KernelShare>> {
    let mut of_prompt = Vec::new();
    engine.profile(true)?;
    let feed = Feed { prompt, sessions, answer, seed: 0 };
    repeat(feed, engine, None, &mut |_| {}, &mut || {
        of_prompt = engine.profile(true)?;
        Ok(())
    })?;
    let of_answer = engine.profile(false)?;
    let mut all = Vec::new();
    for (phase, tokens, kernels) in [("prefill", prompt, of_prompt), ("decode", answer, of_answer)]
    {
        let n = (tokens * sessions.unwrap_or(1)) as f64;
        all.extend(kernels.into_iter().map(|k| KernelShare {
            phase,
            kernel: k.kernel,
            dispatches_per_token: k.dispatches as f64 / n,
            microseconds_per_token: k.seconds * 1e6 / n,
            microseconds_each: k.seconds * 1e6 / k.dispatches as f64,
        }));
    }
    Ok(all)
}
