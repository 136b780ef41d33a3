//! `moeflux bench`: measures a model and saves the report.

use std::process::ExitCode;

use moeflux::{base::Readers, experts::correct_disk_speed, model::blueprint::Blueprint};
use moeflux_bench::{
    comparison::{Comparison, SavedRun},
    deprecated_keys, plot,
    speed::{
        self, BenchSetting, ContradictingReads, DiskProbe, DraftRequest, ReportTexts, SpeedBench,
        SpeedReport, SpeedRequest,
    },
    units,
};
use serde_json::{Value, json};

use super::sweep;
use crate::{
    args::{BenchArgs, EngineArgs, FigureArgs},
    atomic_file, folders, interrupt,
    load::{self, Needs},
    out,
    progress::Ui,
    wrong_use::WrongUse,
};

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
    if args.tokens == 0 && !args.sessions.is_empty() {
        let problem = "--sessions measures decoding, but --tokens 0 leaves nothing to decode";
        return Err(WrongUse(problem.into()).into());
    }
    let settings = settings(args, contexts);
    if let Some(budget) = args.only_budget {
        measure(args, settings, Some(budget), ui, &mut |report| out::json(report))?;
        return Ok(ExitCode::SUCCESS);
    }
    let FigureArgs { json, csv, tolerance, .. } = args.figures;
    // A file that cannot be compared with is reported before measuring.
    let before = args.figures.compare.as_deref().map(|path| {
        let saved = SavedRun::load(path)?;
        speed::saved_rows(&saved)?;
        anyhow::Ok(saved)
    });
    let before = before.transpose()?;
    // Files are written before printing, as stdout may be closed.
    let (mut measured, mut failed, mut written) = (Value::Null, None, Ok(()));
    let mut printed = Ok(());
    // Armed until all is printed: the signal that ended a budget's process may arrive here late.
    let armed = (!args.budgets.is_empty()).then(interrupt::arm);
    if let Some(armed) = &armed {
        (measured, failed) = sweep::run(&args.budgets, armed, ui)?;
        deprecated_keys::add(&mut measured);
        written = write_files(args, &measured);
        if !json && !csv {
            printed = out::write(speed::tables(&speed::rows(&measured)?));
        }
    } else {
        measure(args, settings, None, ui, &mut |report| {
            measured = serde_json::to_value(report)?;
            deprecated_keys::add(&mut measured);
            written = write_files(args, &measured);
            printed = if json || csv { Ok(()) } else { out::write(report) };
            Ok(())
        })?;
    }
    let rows = speed::rows(&measured)?;
    if json {
        printed = out::json(&measured);
    } else if csv {
        printed = out::exact(speed::csv(&rows));
    }
    speed::inversions(&rows).iter().for_each(|note| ui.note(note));
    written.and(failed.map_or(Ok(()), Err)).and(printed)?;
    let compared = before.as_ref().map(|saved| speed::compare(&measured, saved, tolerance));
    finish(&args.figures, compared.transpose()?, ui)
}

fn settings(args: &BenchArgs, contexts: &[usize]) -> Vec<BenchSetting> {
    let sessions: Vec<Option<usize>> = match args.sessions.as_slice() {
        [] => vec![None],
        several => several.iter().map(|n| Some(n.get())).collect(),
    };
    let setting = |prompt: usize| {
        sessions.iter().map(move |sessions| BenchSetting { prompt, sessions: *sessions })
    };
    contexts.iter().flat_map(|prompt| setting(*prompt)).collect()
}

/// Writes the files of --save and --plot.
fn write_files(args: &BenchArgs, measured: &Value) -> anyhow::Result<()> {
    save(&args.figures, measured)?;
    let Some(path) = &args.plot else { return Ok(()) };
    let chart = speed::chart(&speed::rows(measured)?, measured["model"].as_str().unwrap_or(""));
    atomic_file::write(path, Readers::Umask, plot::svg(&chart)?.as_bytes())
}

/// Writes the file of --save.
fn save(args: &FigureArgs, measured: &Value) -> anyhow::Result<()> {
    let Some(path) = &args.save else { return Ok(()) };
    atomic_file::write(path, Readers::Umask, &serde_json::to_vec_pretty(measured)?)
}

/// Prints a comparison with a saved run. The exit code is 1 if something is slower.
fn finish(args: &FigureArgs, compared: Option<Comparison>, ui: Ui) -> anyhow::Result<ExitCode> {
    let Some(Comparison { differences, mut text, passed }) = compared else {
        return Ok(ExitCode::SUCCESS);
    };
    for difference in differences {
        text += &format!("not the same: {difference}\n");
    }
    // With --json or --csv, stdout has nothing else.
    if args.json || args.csv {
        ui.line(text.trim_end());
    } else {
        out::write(format_args!("\n{text}"))?;
    }
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Measures one memory budget and passes the report to `then`.
fn measure(
    args: &BenchArgs,
    settings: Vec<BenchSetting>,
    budget: Option<u64>,
    ui: Ui,
    then: &mut dyn FnMut(&SpeedReport<'_>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut engine_args = args.engine.clone();
    engine_args.memory.memory = budget.or(engine_args.memory.memory);
    let checkpoint = load::checkpoint(&engine_args.model, &engine_args.reads.mirror, ui)?;
    let blueprint = Blueprint::for_checkpoint(&checkpoint)?;
    // An answer with drafts has a token more, the first one.
    let drafted = usize::from(engine_args.draft().max() > 0);
    let needed = speed::needed_context(&settings, args.tokens.saturating_add(drafted));
    let positions = blueprint.max_positions;
    speed::check_context(needed, engine_args.memory.ctx.map_or(positions, Into::into), positions)?;
    let needs = Needs {
        positions: (needed > moeflux::runtime::DEFAULT_CONTEXT).then_some(needed),
        sessions: settings.iter().filter_map(|s| s.sessions).max(),
        ignores_uses: !args.use_counts,
        ..Needs::default()
    };
    let request = SpeedRequest {
        settings,
        tokens: args.tokens,
        repeats: args.repeat.get(),
        cold: args.cold,
        threads: engine_args.compute.threads.map(Into::into),
        kv_format: engine_args.compute.kv_format(),
    };
    let mut bench = {
        let _bar = ui.share("measuring the disk");
        let folder = folders::probes();
        let disk = DiskProbe { folder: folder.as_deref(), again: args.probe };
        SpeedBench::new(request, &checkpoint, &blueprint, disk)?
    };
    let engine = load::engine_from(checkpoint, &engine_args, needs, ui)?;
    bench.start(&engine)?;
    engine.record_routing(args.trace.trace.as_deref())?;
    if engine.device().graphics {
        let (_bar, armed) = (ui.share("warming up"), interrupt::arm());
        bench.warm_up(&engine, Some(armed.flag()))?;
    }
    if !args.fresh {
        let bar = ui.bytes("touching the memory of slots");
        bench.touch(&engine, &mut |done, total| bar.bytes(done, total))?;
    }
    {
        let (bar, armed) = (ui.share("measuring"), interrupt::arm());
        let hooks = speed::StepHooks {
            cancel: Some(armed.flag()),
            progress: &mut |share| bar.share(share),
        };
        bench.measure(&engine, hooks, &mut |note| {
            bar.clear();
            ui.note(note);
        })?;
    }
    let mode = engine_args.draft();
    if mode.max() > 0 && args.tokens > 0 {
        let (_bar, armed) = (ui.share("measuring drafts"), interrupt::arm());
        let request = DraftRequest { mode, acceptance: args.accept };
        bench.measure_drafts(&engine, request, Some(armed.flag()))?;
    }
    if args.profile {
        bench.profile(&engine, Some(interrupt::arm().flag()))?;
    }
    let model = match &args.engine.model.model {
        Some(folder) => folder.display().to_string(),
        None => "built-in tales-18m".to_owned(),
    };
    let contradicting = bench.contradicting_reads();
    let result = then(&bench.report(&engine, ReportTexts { model, options: options(args) }));
    if let Some(reads) = contradicting {
        // The probe's memory is not in the plan of the model.
        drop(engine);
        correct_disk(args, reads, ui)?;
    }
    result
}

/// Measures the disk anew, as a run was faster than its remembered peak.
fn correct_disk(args: &BenchArgs, reads: ContradictingReads, ui: Ui) -> anyhow::Result<()> {
    let EngineArgs { model, reads: read_args, .. } = &args.engine;
    let checkpoint = load::checkpoint(model, &read_args.mirror, ui)?;
    let block = Blueprint::for_checkpoint(&checkpoint)?.slot_bytes();
    let speed = {
        let _bar = ui.share("measuring the disk");
        let folder = folders::probes();
        correct_disk_speed(&checkpoint, block, folder.as_deref(), reads.bytes_per_second)?
    };
    let now = speed.map_or_else(String::new, |speed| {
        format!(
            "; measured anew, it is {}, which `moeflux plan` uses",
            units::speed(speed.ceiling())
        )
    });
    ui.note(format_args!(
        "experts were read at {}, faster than the disk's remembered peak of {}{now}",
        units::speed(reads.bytes_per_second),
        units::speed(reads.remembered)
    ));
    Ok(())
}

/// Options that must be equal for runs to be comparable. Budgets and contexts are compared one by
/// one.
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
