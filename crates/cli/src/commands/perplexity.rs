//! `perplexity`: how well a model predicts a text.

use std::{path::Path, process::ExitCode, time::Instant};

use anyhow::Context;
use moeflux::{
    StepControl,
    base::{Stats, SystemMemory},
    tools::Perplexity,
};
use moeflux_bench::{deprecated_keys, describe, units};
use serde::Serialize;

use crate::{args::PerplexityArgs, interrupt, load, out, progress::Ui};

/// JSON output of `--json`.
#[derive(Serialize)]
struct PerplexityReport<'a> {
    #[serde(flatten)]
    perplexity: Perplexity,
    /// Tokens per window.
    context: usize,
    seconds: f64,
    tokens_per_second: f64,
    stats: Stats,
    hit_rate: f64,
    peak_memory: u64,
    device: &'a str,
    device_choice: &'a str,
}

/// Runs `moeflux perplexity`.
///
/// # Errors
/// The text cannot be read, or the model cannot be loaded or run.
pub(crate) fn run(args: &PerplexityArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    // The parser requires one of the two.
    let path = args.file.as_deref().or(args.text.as_deref()).unwrap_or(Path::new("-"));
    let text = super::text::read_text(path)?;
    let engine = load::engine(&args.engine, load::Needs::default(), ui)?;
    let mut session = engine.session()?;
    let since = Instant::now();
    let perplexity = {
        let armed = interrupt::arm();
        let bar = ui.share(&format!("predicting {} of text", units::disk(text.len() as f64)));
        let mut progress = |share: f64| bar.share(share);
        let mut control = StepControl::default().cancel(armed.flag()).progress(&mut progress);
        let measured = moeflux::tools::text_perplexity(&mut session, &text, &mut control);
        measured.with_context(|| path.display().to_string())?
    };
    let device = engine.device();
    let (seconds, stats, plan) = (since.elapsed().as_secs_f64(), session.stats(), engine.plan());
    let report = PerplexityReport {
        perplexity,
        context: plan.context,
        seconds,
        tokens_per_second: stats.tokens as f64 / seconds,
        hit_rate: stats.hit_rate(),
        stats,
        peak_memory: SystemMemory::now().peak,
        device: &device.name,
        device_choice: &device.reason,
    };
    if args.json {
        let mut json = serde_json::to_value(&report)?;
        deprecated_keys::add(&mut json);
        out::json(&json)?;
    } else {
        let predicted = units::plural(perplexity.tokens as u64, "predicted token");
        out::line(format_args!(
            "perplexity {:.4}; mean negative log-likelihood {:.5}; {predicted} in windows of {}",
            perplexity.perplexity, perplexity.nll, plan.context
        ))?;
    }
    ui.line(format_args!(
        "{}; {} read per token; hit rate {}; {}; {}",
        units::rate(report.tokens_per_second),
        units::disk(stats.bytes_read as f64 / stats.tokens.max(1) as f64),
        units::percent(report.hit_rate),
        describe::peak_memory(&plan, report.peak_memory),
        describe::device(device, stats.dispatches)
    ));
    Ok(ExitCode::SUCCESS)
}
