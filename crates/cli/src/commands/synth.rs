//! `synth`: writes a checkpoint of random weights.

use std::{
    fs::File, io::BufReader, ops::ControlFlow, path::Path, process::ExitCode, time::Instant,
};

use anyhow::Context;
use moeflux::tools::synth::{self, FewerRows, Options, Preset};
use moeflux_bench::{table::Table, units};

use crate::{args::SynthArgs, interrupt, out, progress::Ui};

/// Runs `moeflux synth`.
///
/// # Errors
/// The preset or config does not exist, or the folder cannot be written.
pub(crate) fn run(args: &SynthArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let Some(folder) = &args.out else { return list() };
    let config = match (&args.preset, &args.config) {
        (Some(preset), _) => Preset::by_name(preset)?.config(),
        (None, Some(path)) => read_config(path)?,
        // The parser requires one of the two beside a folder.
        (None, None) => serde_json::Value::Null,
    };
    let options = Options::new(config)
        .layers(args.layers.map(Into::into))
        .seed(args.seed)
        .skew(args.skew)
        .ngram_rows(args.ngram_rows)
        .head(args.head);
    let since = Instant::now();
    let summary = {
        let bar = ui.bytes("writing");
        let armed = interrupt::arm();
        let progress = |done, total| {
            bar.bytes(done, total);
            match armed.flag().is_cancelled() {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        };
        let written = match args.gguf {
            Some(recipe) => synth::write_gguf(&options, recipe, folder, progress),
            None => synth::write(&options, folder, progress),
        };
        match written {
            // Partial output has been deleted.
            Err(moeflux::Error::Cancelled) => return Ok(ExitCode::from(interrupt::exit_code())),
            other => other?,
        }
    };
    let seconds = since.elapsed().as_secs_f64();
    ui.line(format_args!(
        "{} in {} and {} written to {} in {}, {}/s",
        units::disk(summary.bytes as f64),
        units::plural(summary.tensors as u64, "tensor"),
        units::plural(summary.shards as u64, "file"),
        folder.display(),
        units::time(seconds),
        units::disk(summary.bytes as f64 / seconds)
    ));
    if let Some(FewerRows { rows, published }) = summary.fewer_rows {
        ui.line(format_args!(
            "the table of n-gram embeddings has {rows} rows, the published one {published}; \
             --ngram-rows N writes others"
        ));
    }
    Ok(ExitCode::SUCCESS)
}

/// Lists the presets.
fn list() -> anyhow::Result<ExitCode> {
    let mut table = Table::new(1);
    table.head(["preset", "parameters", "per token", "on disk"]);
    for preset in synth::presets() {
        let billions = |n: f64| units::count((n * 1e9) as u64);
        let size = preset.description.rsplit("; ").next().unwrap_or_default();
        let sizes = [billions(preset.sizes.parameters), billions(preset.sizes.active)];
        table.row([preset.name].into_iter().chain(sizes.iter().map(|s| &**s)).chain([size]));
    }
    out::write(format_args!(
        "{table}\n`moeflux synth PRESET --out DIR` writes one, with --layers N only N layers.\n\
         `moeflux synth --help` describes them.\n"
    ))?;
    Ok(ExitCode::SUCCESS)
}

fn read_config(path: &Path) -> anyhow::Result<serde_json::Value> {
    let file = File::open(path).with_context(|| format!("{}: cannot be opened", path.display()))?;
    serde_json::from_reader(BufReader::new(file))
        .with_context(|| format!("{}: this is not JSON", path.display()))
}
