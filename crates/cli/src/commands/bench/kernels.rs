//! `bench kernels`: speed of single ops.

use std::process::ExitCode;

use moeflux_bench::{
    comparison::SavedRun,
    kernels::{self, KernelBench, KernelRequest},
};

use super::speed::{finish, save};
use crate::{args::KernelsArgs, out, progress::Ui};

/// Runs `moeflux bench kernels`.
///
/// # Errors
/// The device, an op or a format does not exist, an op fails, or a file cannot be read or written.
pub(super) fn run(args: &KernelsArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let request = KernelRequest { ops: &args.only, formats: &args.format, quick: args.quick };
    let bench = KernelBench::new(request)?;
    let before = args.figures.compare.as_deref().map(|path| {
        let saved = SavedRun::load(path)?;
        kernels::check(&saved)?;
        anyhow::Ok(saved)
    });
    let before = before.transpose()?;
    let mut bench = bench.on(args.compute.options(), args.compute.kv_format());
    let probe = |bench: &mut KernelBench| {
        let _bar = ui.share("measuring the machine");
        bench.probe()
    };
    probe(&mut bench)?;
    {
        let bar = ui.share("measuring");
        bench.run(&mut |share| bar.share(share))?;
    }
    probe(&mut bench)?;
    let report = bench.report();
    let measured = serde_json::to_value(&report)?;
    let written = save(&args.figures, &measured);
    let printed = if args.figures.json {
        out::json(&measured)
    } else if args.figures.csv {
        out::exact(report.csv())
    } else {
        out::write(&report)
    };
    written.and(printed)?;
    let tolerance = args.figures.tolerance;
    let compared = before.as_ref().map(|saved| kernels::compare(&measured, saved, tolerance));
    finish(&args.figures, compared.transpose()?, ui)
}
