//! Benchmark of ops: selection, measurement and comparison.

use std::time::Duration;

use anyhow::Context;
use moeflux::{experts::probe_memory, runtime::Devices};
use moeflux_bench::{
    InvalidRequest,
    comparison::{self, ComparedSpeed, Comparison, SavedRun},
    version,
};
use moeflux_compute::{CpuPeak, DeviceOptions, Isa, KvFormat, open};
use serde_json::{Value, json};

use super::{
    cases::{self, KernelCase},
    formats,
    op_bench::{CYCLE, OpBench, OpTiming},
    report::{self, KernelReport, Peaks},
};

/// The command of this benchmark, before its options.
const COMMAND: &str = "cargo run --release -p moeflux-bench --example kernels --";

/// Minimum measuring time of a figure.
const MIN_TIME: Duration = Duration::from_millis(150);
const QUICK_MIN_TIME: Duration = Duration::from_millis(30);

/// Selection of benchmarks.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KernelRequest<'a> {
    /// Names of ops, in any case; empty for all.
    pub(crate) ops: &'a [String],
    /// Prefixes of weight formats; empty for all.
    pub(crate) formats: &'a [String],
    /// Only the common formats, and less time per figure.
    pub(crate) quick: bool,
}

/// Benchmarks of ops: [`probe`](Self::probe), [`run`](Self::run), `probe` again, then
/// [`report`](Self::report).
pub(crate) struct KernelBench {
    cases: Vec<KernelCase>,
    quick: bool,
    options: DeviceOptions,
    /// Options as they were asked for, as part of the report.
    asked: Value,
    /// Peaks of the CPU: the better of the probes before and after the benchmarks.
    cpu_peaks: Option<Peaks>,
    /// Read bandwidth of a GPU.
    gpu_memory: Option<f64>,
    device: String,
    timings: Vec<OpTiming>,
}

impl KernelBench {
    /// Selects benchmarks.
    ///
    /// # Errors
    /// An op or a format is unknown, or the ops do not exist in the formats.
    pub(crate) fn new(request: KernelRequest<'_>) -> Result<Self, InvalidRequest> {
        Ok(Self {
            cases: select(request)?,
            quick: request.quick,
            options: DeviceOptions::default(),
            asked: Value::Null,
            cpu_peaks: None,
            gpu_memory: None,
            device: String::new(),
            timings: Vec::new(),
        })
    }

    /// Sets the device and the format of its KV cache. The name `auto` selects the preferred
    /// adapter, else the CPU.
    pub(crate) fn on(mut self, options: DeviceOptions, kv_format: KvFormat) -> Self {
        self.asked = json!({
            "threads": options.threads,
            "exact": options.exact,
            "kv": kv_format.name(),
            "isa": options.isa,
            "quick": self.quick,
        });
        self.options = options;
        if self.options.name.as_deref() == Some("auto") {
            let preferred = Devices::now().preferred;
            let name = preferred.map_or("cpu".to_owned(), |index| format!("gpu:{index}"));
            self.options.name = Some(name);
        }
        self
    }

    fn is_cpu(&self) -> bool {
        self.options.name.as_deref() == Some("cpu")
    }

    /// Measures the peaks of the device. On a CPU it is called before and after the benchmarks, as
    /// other load on the machine would lower a single measurement.
    ///
    /// # Errors
    /// The device cannot be opened or fails.
    pub(crate) fn probe(&mut self) -> anyhow::Result<()> {
        if self.is_cpu() {
            let peaks = cpu_peaks(&mut self.options)?;
            self.cpu_peaks = Some(match self.cpu_peaks {
                Some(earlier) => earlier.max(peaks),
                None => peaks,
            });
        } else if self.timings.is_empty() {
            self.gpu_memory = open(&self.options)?.read_speed()?;
        }
        Ok(())
    }

    /// Runs all benchmarks; `progress` gets the fraction that is done.
    ///
    /// # Errors
    /// The device cannot be opened, or an op fails.
    pub(crate) fn run(&mut self, progress: &mut dyn FnMut(f64)) -> anyhow::Result<()> {
        let min_time = if self.quick { QUICK_MIN_TIME } else { MIN_TIME };
        for (i, case) in self.cases.iter().enumerate() {
            // Devices never free weights, so each case opens its own.
            let device = open(&self.options)?;
            self.device = device.describe();
            let mut bench = OpBench::new(device, min_time, case.format);
            (case.measure)(&mut bench).with_context(|| case.name())?;
            self.timings.extend(bench.timings);
            progress((i + 1) as f64 / self.cases.len() as f64);
        }
        Ok(())
    }

    /// The figures, as shares of the peaks.
    pub(crate) fn report(self) -> KernelReport {
        let peaks =
            self.cpu_peaks.unwrap_or_else(|| Peaks::best_seen(self.gpu_memory, &self.timings));
        let exact = self.options.exact;
        KernelReport {
            version: version::VERSION,
            system: version::system(),
            device: self.device,
            options: self.asked,
            figures: self.timings.into_iter().map(|t| t.relative_to(&peaks, exact)).collect(),
            peaks,
        }
    }
}

/// Compares a report with a saved one; figures slower by more than `tolerance` fail.
///
/// # Errors
/// One of them is no report of this benchmark, or they have no figure in common.
pub(crate) fn compare(now: &Value, saved: &SavedRun, tolerance: f64) -> anyhow::Result<Comparison> {
    let before = saved.report();
    let head =
        comparison::Head { left: 3, columns: &["shape", "format", "rows", "time", "before"] };
    let mut compared =
        comparison::speeds(head, &report::speeds(now)?, &saved_speeds(saved)?, tolerance)?;
    compared.differences = comparison::differences(&["version", "system", "device"], now, before);
    let rates = [&now["peaks"]["memory"], &before["peaks"]["memory"]];
    compared.differences.extend(comparison::different_rate("memory gives", rates, tolerance));
    Ok(compared)
}

/// Checks that a saved run is a report of this benchmark.
///
/// # Errors
/// It is not.
pub(crate) fn check(saved: &SavedRun) -> anyhow::Result<()> {
    saved_speeds(saved).map(|_| ())
}

fn saved_speeds(saved: &SavedRun) -> anyhow::Result<Vec<ComparedSpeed>> {
    saved.read(COMMAND, report::speeds)
}

fn select(request: KernelRequest<'_>) -> Result<Vec<KernelCase>, InvalidRequest> {
    let mut selected = cases::all();
    let mut ops: Vec<&str> = selected.iter().map(|c| c.op).collect();
    ops.dedup();
    let is_op = |name: &String| ops.iter().any(|op| op.eq_ignore_ascii_case(name));
    if let Some(unknown) = request.ops.iter().find(|name| !is_op(name)) {
        let names: Vec<String> = ops.iter().map(|op| op.to_lowercase()).collect();
        return Err(InvalidRequest(format!(
            "there is no op {unknown:?} to measure: choose {}",
            names.join(", ")
        )));
    }
    let is_format = |name: &String| formats::all().iter().any(|f| formats::has_prefix(*f, name));
    if let Some(unknown) = request.formats.iter().find(|name| !is_format(name)) {
        let names: Vec<String> = formats::all().iter().map(|f| f.name()).collect();
        return Err(InvalidRequest(format!(
            "there is no weight format whose name starts with {unknown:?}: choose {}",
            names.join(", ")
        )));
    }
    if !request.ops.is_empty() {
        selected.retain(|case| request.ops.iter().any(|name| case.op.eq_ignore_ascii_case(name)));
    }
    if !request.formats.is_empty() {
        selected.retain(|case| {
            let named = |f| request.formats.iter().any(|name| formats::has_prefix(f, name));
            case.format.is_some_and(named)
        });
    } else if request.quick {
        selected.retain(|case| case.format.is_none_or(|f| formats::COMMON.contains(&f)));
    }
    if selected.is_empty() {
        return Err(InvalidRequest("these ops are not measured in these formats".into()));
    }
    Ok(selected)
}

/// Peaks of the CPU with the threads that compute: one per physical core unless chosen otherwise.
fn cpu_peaks(options: &mut DeviceOptions) -> anyhow::Result<Peaks> {
    let memory = probe_memory(CYCLE as u64, options.threads)?;
    options.threads = Some(memory.threads);
    let isa = options.isa.as_deref().map_or_else(|| Ok(Isa::detect()), Isa::by_name)?;
    Ok(Peaks::measured(memory.bytes_per_second, CpuPeak::measure(isa, memory.threads)?))
}
