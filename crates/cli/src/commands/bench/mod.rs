//! `bench`: speed, and what it could be.

mod measure;
mod report;
mod rows;
mod summary;
mod sweep;

use std::{process::ExitCode, time::Instant};

use anyhow::Context;
use moeflux::{Blueprint, Checkpoint, Engine, FilePages, SystemMemory, probe_disk, probe_memory};
use serde_json::Value;

pub(crate) use report::disk_words;
pub(crate) use rows::computing_share;

use crate::{
    WrongUse,
    args::BenchArgs,
    folders, load, out, plot,
    progress::Ui,
    roof::{Costs, Limits},
};
use measure::{Feed, Repeat, Roof, repeat};
use report::{KernelShare, Machine, Report};
use summary::{AtContext, Scale};

/// Runs `moeflux bench`.
///
/// # Errors
/// The model cannot be loaded or run, or a file cannot be read or written.
pub(crate) fn run(args: &BenchArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let contexts = match args.context.as_slice() {
        [] => &[args.prompt],
        contexts => contexts,
    };
    if contexts.iter().any(|c| c.saturating_add(args.tokens) == 0) {
        return Err(WrongUse("a prompt of 0 and --tokens 0 leave nothing to measure".into()).into());
    }
    if let Some(budget) = args.only_budget {
        return one(args, contexts, Some(budget), ui, &mut |report| out::json(report));
    }
    // What is to be compared with had better be there before anything is measured.
    let before = args.compare.as_deref().map(rows::load).transpose()?;
    let mut measured = Value::Null;
    if args.budgets.is_empty() {
        one(args, contexts, None, ui, &mut |report| {
            measured = serde_json::to_value(report)?;
            if args.json || args.csv { Ok(()) } else { out::write(report) }
        })?;
    } else {
        measured = sweep::run(&args.budgets, ui)?;
        if !args.json && !args.csv {
            out::write(sweep::table(&rows::rows(&measured)?))?;
        }
    }
    let rows = rows::rows(&measured)?;
    if args.json {
        out::json(&measured)?;
    } else if args.csv {
        out::write(rows::csv(&rows))?;
    }
    rows::inversions(&rows).iter().for_each(|note| ui.note(note));
    if let Some(path) = &args.save {
        std::fs::write(path, serde_json::to_vec_pretty(&measured)?)
            .with_context(|| format!("{}: cannot be written", path.display()))?;
    }
    if let Some(path) = &args.plot {
        plot::write(&rows::chart(&rows, measured["model"].as_str().unwrap_or("")), path)?;
    }
    let Some(before) = before else { return Ok(ExitCode::SUCCESS) };
    let (table, right) = rows::compare(&rows, &before, args.tolerance)?;
    // Those who asked for numbers get nothing else.
    if args.json || args.csv {
        ui.line(table.to_string().trim_end())
    } else {
        out::write(format_args!("\n{table}"))?
    }
    Ok(if right { ExitCode::SUCCESS } else { ExitCode::FAILURE })
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
    let checkpoint = load::checkpoint(&engine_args.model, ui)?;
    let (costs, scale, mut machine) = machine(args, &checkpoint, ui)?;
    let pages = FilePages::of(&checkpoint);
    let since = Instant::now();
    let needed = contexts.iter().max().map_or(0, |most| most.saturating_add(args.tokens));
    let at_least = (needed > moeflux::DEFAULT_CONTEXT).then_some(needed);
    let engine = load::engine_of(checkpoint, &engine_args, at_least, ui)?;
    engine.record_routing(args.trace.trace.as_deref())?;
    let load_seconds = since.elapsed().as_secs_f64();
    if engine.device().graphics {
        // Kernels are compiled when they are first needed.
        let _bar = ui.share("warming up");
        for prompt in contexts {
            repeat(
                Feed { prompt: *prompt, answer: args.tokens.min(4), seed: 0 },
                &engine,
                None,
                &mut |_| {},
            )?;
        }
    }
    // What an adapter computes is not read from the host's memory.
    let disk = machine.disk.as_ref().map_or(f64::INFINITY, |d| d.ceiling());
    let limits = Limits { memory: machine.memory.bytes_per_second, disk };
    let roof = (!engine.device().graphics).then_some((&costs, limits));
    let repeats = measure(args, contexts, &engine, (&pages, &mut machine, roof), ui)?;
    let kernels = match args.profile {
        true => kernels(contexts[0], args.tokens, &engine)?,
        false => Vec::new(),
    };
    let contexts: Vec<_> = contexts.iter().map(|c| AtContext::of(*c, &repeats, scale)).collect();
    let device = engine.device();
    let stretches = repeats.iter().flat_map(|r| [&r.prefill, &r.decode]).flatten();
    let dispatches = stretches.map(|m| m.stats.dispatches).sum();
    then(&Report {
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

/// What a token costs, and what the machine gives. Measured before the model is loaded: what that takes is free again then.
fn machine(args: &BenchArgs, checkpoint: &Checkpoint, ui: Ui) -> anyhow::Result<(Costs, Scale, Machine)> {
    let blueprint = Blueprint::of(checkpoint)?;
    let costs = Costs::of(&blueprint);
    // No more than the smallest plan holds.
    let dense: u64 = blueprint.matrices().flat_map(|m| &m.segments).map(|s| s.bytes as u64).sum();
    let working_set = costs.bytes().min(dense);
    let _bar = ui.share("measuring the disk");
    let disk = probe_disk(checkpoint, blueprint.slot_bytes(), folders::probes().as_deref(), args.probe)?;
    let memory = probe_memory(working_set, args.engine.threads.map(Into::into))?;
    let expert = blueprint.experts_bytes() as f64 / blueprint.experts().max(1) as f64;
    let scale = Scale { expert, disk: disk.as_ref().map(|d| d.ceiling()) };
    Ok((costs, scale, Machine { disk, memory, cached_before: None, cached_after: None, cold: false }))
}

/// All repeats of all contexts.
fn measure(
    args: &BenchArgs,
    contexts: &[usize],
    engine: &Engine,
    (pages, machine, roof): (&FilePages, &mut Machine, Roof<'_>),
    ui: Ui,
) -> anyhow::Result<Vec<Repeat>> {
    machine.cold = args.cold;
    let n = args.repeat.get();
    let mut repeats = Vec::with_capacity(n * contexts.len());
    let bar = ui.share("measuring");
    for prompt in contexts {
        for seed in 0..n as u64 {
            if args.cold
                && machine.cold
                && let Err(why) = pages.forget()
            {
                machine.cold = false;
                bar.clear();
                ui.note(format_args!("reads may come from the page cache: {why}"));
            }
            machine.cached_before = machine.cached_before.or_else(|| pages.cached());
            let feed = Feed { prompt: *prompt, answer: args.tokens, seed };
            let (done, all) = (repeats.len() as f64, (n * contexts.len()) as f64);
            repeats.push(repeat(feed, engine, roof, &mut |share| bar.share((done + share) / all))?);
        }
    }
    machine.cached_after = pages.cached();
    Ok(repeats)
}

/// Times of a GPU's kernels, from one more run.
fn kernels(prompt: usize, answer: usize, engine: &Engine) -> anyhow::Result<Vec<KernelShare>> {
    let mut all = Vec::new();
    for (phase, prompt, answer) in [("prefill", prompt, 0), ("decode", 0, answer)] {
        if prompt + answer == 0 {
            continue;
        }
        engine.profile(true)?;
        repeat(Feed { prompt, answer, seed: 0 }, engine, None, &mut |_| {})?;
        let n = (prompt + answer) as f64;
        all.extend(engine.profile(false)?.into_iter().map(|k| KernelShare {
            phase,
            kernel: k.kernel,
            dispatches_per_token: k.dispatches as f64 / n,
            microseconds_per_token: k.seconds * 1e6 / n,
            microseconds_each: k.seconds * 1e6 / k.dispatches as f64,
        }));
    }
    Ok(all)
}
