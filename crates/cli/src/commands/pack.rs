//! `pack`: writes and verifies copies of a model with one aligned record per expert.

use std::{ops::ControlFlow, path::Path, process::ExitCode, time::Instant};

use moeflux::{
    Checkpoint,
    tools::{Damage, pack, verify_packed},
};
use moeflux_bench::units;

use crate::{
    args::PackArgs,
    hub, interrupt, load, out,
    progress::{Bar, Ui, error_line},
};

/// Runs `moeflux pack`.
///
/// # Errors
/// The model cannot be opened or packed, or the folder cannot be written.
pub(crate) fn run(args: &PackArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let model = args.model.as_deref().map(|model| hub::located(model, false, ui)).transpose()?;
    match (&args.verify, &args.out) {
        (Some(folder), _) => {
            let options = args.tokenizer.open_options();
            let open = |model| Checkpoint::open_with(model, &options);
            verify(folder, model.as_deref().map(open).transpose()?.as_ref(), ui)
        }
        (None, Some(out)) => {
            let options = args.tokenizer.open_options();
            write(&load::checkpoint_in(model.as_deref(), &options, ui)?, out, ui)
        }
        // The parser requires one of the two.
        (None, None) => Ok(ExitCode::from(2)),
    }
}

/// Callback that shows progress and stops at Ctrl-C.
fn progress_until_interrupt<'a>(
    bar: &'a Bar,
    armed: &'a interrupt::Armed,
) -> impl FnMut(u64, u64) -> ControlFlow<()> + 'a {
    move |done, total| {
        bar.bytes(done, total);
        match armed.flag().is_cancelled() {
            true => ControlFlow::Break(()),
            false => ControlFlow::Continue(()),
        }
    }
}

fn write(checkpoint: &Checkpoint, out: &Path, ui: Ui) -> anyhow::Result<ExitCode> {
    let since = Instant::now();
    let packed = {
        let (bar, armed) = (ui.bytes("packing"), interrupt::arm());
        pack(checkpoint, out, &mut progress_until_interrupt(&bar, &armed))
    };
    let report = match packed {
        Err(moeflux::Error::Cancelled) => {
            error_line(format_args!(
                "interrupted: what was packed stays in {}; the same command goes on from there",
                out.display()
            ));
            return Ok(ExitCode::from(interrupt::exit_code()));
        }
        other => other?,
    };
    let seconds = since.elapsed().as_secs_f64();
    let resumed = match report.reused {
        0 => String::new(),
        kept => format!(", {} of which an earlier run had written", units::disk(kept as f64)),
    };
    ui.line(format_args!(
        "{} packed to {}: {} in {}, {}/s{resumed}",
        units::plural(report.experts as u64, "expert"),
        out.display(),
        units::disk(report.bytes as f64),
        units::time(seconds),
        units::disk(report.bytes as f64 / seconds)
    ));
    Ok(ExitCode::SUCCESS)
}

fn verify(folder: &Path, source: Option<&Checkpoint>, ui: Ui) -> anyhow::Result<ExitCode> {
    let since = Instant::now();
    let report = {
        let (bar, armed) = (ui.bytes("comparing"), interrupt::arm());
        verify_packed(folder, source, &mut progress_until_interrupt(&bar, &armed))?
    };
    for damage in &report.damages {
        out::line(describe(damage))?;
    }
    let seconds = since.elapsed().as_secs_f64();
    let with = if source.is_some() { "in the source" } else { "packed" };
    let read = format!(
        "{} and {} read in {}, {}/s",
        units::plural(report.experts as u64, "expert"),
        units::disk(report.bytes as f64),
        units::time(seconds),
        units::disk(report.bytes as f64 / seconds)
    );
    if report.damages.is_empty() {
        ui.line(format_args!("everything is as it was {with}: {read}"));
        return Ok(ExitCode::SUCCESS);
    }
    ui.line(format_args!("{} not as it was {with}: {read}", pieces(report.damages.len())));
    ui.line("pack the model again into another folder, or copy these files again from where they are whole");
    Ok(ExitCode::FAILURE)
}

fn pieces(n: usize) -> String {
    if n == 1 { "1 piece is".to_owned() } else { format!("{n} pieces are") }
}

/// Description of one damaged part.
fn describe(damage: &Damage) -> String {
    let Damage { path, expert, offset, bytes, problem, .. } = damage;
    let what = match expert {
        Some((layer, expert)) => format!("layer {layer}, expert {expert}: "),
        None => String::new(),
    };
    format!("{}: {what}{bytes} bytes at {offset}: {problem}", path.display())
}
