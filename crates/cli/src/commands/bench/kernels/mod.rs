//! `bench kernels`: each op by itself, in every format.

mod activations;
mod cases;
mod formats;
mod lab;
mod mixers;
mod products;
mod report;

use std::{process::ExitCode, time::Duration};

use anyhow::Context;
use moeflux::{Devices, probe_memory};
use moeflux_compute::{CpuPeak, DeviceOptions, Isa, open};
use serde_json::{Value, json};

use super::{Compared, compare, finish, save, system};
use crate::{
    WrongUse,
    args::{ComputeArgs, KernelsArgs},
    out,
    progress::Ui,
};
use cases::Case;
use lab::{CYCLE, Lab};
use report::{Peaks, Report};

/// How long a figure is measured at least.
const PATIENCE: Duration = Duration::from_millis(150);
const QUICK: Duration = Duration::from_millis(30);

/// Runs `moeflux bench kernels`.
///
/// # Errors
/// There is no such device, op or format, an op fails, or a file cannot be read or written.
pub(crate) fn run(args: &KernelsArgs, ui: Ui) -> anyhow::Result<ExitCode> {
    let cases = chosen(args)?;
    let before = args.figures.compare.as_deref().map(|path| {
        let saved = compare::load(path)?;
        report::speeds(&saved).with_context(|| path.display().to_string())?;
        anyhow::Ok(saved)
    });
    let before = before.transpose()?;
    let mut options = device(&args.compute);
    let is_cpu = options.name.as_deref() == Some("cpu");
    // Measured before and after: what else the machine does would make the peak lower than it is.
    let first = is_cpu.then(|| processor(&mut options, ui)).transpose()?;
    let card = match is_cpu {
        true => None,
        false => open(&options)?.read_speed()?,
    };
    let patience = if args.quick { QUICK } else { PATIENCE };
    let (mut name, mut figures) = (String::new(), Vec::new());
    {
        let bar = ui.share("measuring");
        for (i, case) in cases.iter().enumerate() {
            // Devices keep weights for good: each case has one of its own.
            let device = open(&options)?;
            name = device.describe();
            let mut lab = Lab::new(device, patience, case.format);
            (case.measure)(&mut lab).with_context(|| case.name())?;
            figures.extend(lab.figures);
            bar.share((i + 1) as f64 / cases.len() as f64);
        }
    }
    let peaks = match first {
        Some(first) => first.or_better(processor(&mut options, ui)?),
        None => Peaks::seen(card, &figures),
    };
    let report = Report {
        version: env!("CARGO_PKG_VERSION"),
        system: system(),
        device: name,
        options: json!({
            "threads": args.compute.threads,
            "exact": args.compute.exact,
            "kv": args.compute.kv_format().name(),
            "isa": args.compute.isa,
            "quick": args.quick,
        }),
        figures: figures.into_iter().map(|f| f.against(&peaks, options.exact)).collect(),
        peaks,
    };
    let measured = serde_json::to_value(&report)?;
    let kept = save(&args.figures, &measured);
    let printed = if args.figures.json {
        out::json(&measured)
    } else if args.figures.csv {
        out::write(report.csv())
    } else {
        out::write(&report)
    };
    kept.and(printed)?;
    let compared = |before: &Value| {
        let (now, then) = (report::speeds(&measured)?, report::speeds(before)?);
        let head = ["shape", "format", "rows", "time", "before"];
        let (text, right) = compare::speeds((3, &head), &now, &then, args.figures.tolerance)?;
        let mut differences =
            compare::differences(&["version", "system", "device"], &measured, before);
        let rates = [&measured["peaks"]["memory"], &before["peaks"]["memory"]];
        differences.extend(compare::different_rate("memory gives", rates, args.figures.tolerance));
        anyhow::Ok(Compared { differences, text, right })
    };
    finish(&args.figures, before.as_ref().map(compared).transpose()?, ui)
}

/// The cases that were asked for.
fn chosen(args: &KernelsArgs) -> anyhow::Result<Vec<Case>> {
    let mut all = cases::all();
    let mut ops: Vec<&str> = all.iter().map(|c| c.op).collect();
    ops.dedup();
    let is_op = |name: &String| ops.iter().any(|op| op.eq_ignore_ascii_case(name));
    if let Some(unknown) = args.only.iter().find(|name| !is_op(name)) {
        let names: Vec<String> = ops.iter().map(|op| op.to_lowercase()).collect();
        return Err(WrongUse(format!(
            "there is no op {unknown:?} to measure: choose {}",
            names.join(", ")
        ))
        .into());
    }
    if let Some(unknown) =
        args.format.iter().find(|name| !formats::ALL.iter().any(|f| formats::is(*f, name)))
    {
        let names: Vec<String> = formats::ALL.iter().map(|f| formats::name(*f)).collect();
        return Err(WrongUse(format!(
            "there is no weight format that begins like {unknown:?}: there are {}",
            names.join(", ")
        ))
        .into());
    }
    if !args.only.is_empty() {
        all.retain(|case| args.only.iter().any(|name| case.op.eq_ignore_ascii_case(name)));
    }
    if !args.format.is_empty() {
        all.retain(|case| {
            case.format.is_some_and(|f| args.format.iter().any(|name| formats::is(f, name)))
        });
    } else if args.quick {
        all.retain(|case| case.format.is_none_or(|f| formats::USUAL.contains(&f)));
    }
    if all.is_empty() {
        return Err(WrongUse("these ops are not measured in these formats".into()).into());
    }
    Ok(all)
}

/// What to open: where nobody chose, the adapter that is preferred, or else the processor.
fn device(args: &ComputeArgs) -> DeviceOptions {
    let mut options = args.options();
    if args.device == "auto" {
        let preferred = Devices::now().preferred;
        options.name = Some(preferred.map_or("cpu".to_owned(), |index| format!("gpu:{index}")));
    }
    options
}

/// What the processor gives at best to the threads that compute: one per physical core, unless another number was chosen.
fn processor(options: &mut DeviceOptions, ui: Ui) -> anyhow::Result<Peaks> {
    let _bar = ui.share("measuring the machine");
    let memory = probe_memory(CYCLE as u64, options.threads)?;
    options.threads = Some(memory.threads);
    let isa = options.isa.as_deref().map_or_else(|| Ok(Isa::detect()), Isa::by_name)?;
    Ok(Peaks::measured(memory.bytes_per_second, CpuPeak::measure(isa, memory.threads)?))
}
