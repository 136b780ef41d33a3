//! Kernel timings as shares of the device's peak, and their table, CSV and comparison.

use std::fmt::{self, Write};

use moeflux_bench::{comparison::ComparedSpeed, table::Table, units};
use moeflux_compute::CpuPeak;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::op_bench::OpTiming;

/// Peak rates of a device.
#[derive(Clone, Copy, Debug, Serialize)]
pub(crate) struct Peaks {
    /// Memory bandwidth in bytes per second.
    memory: f64,
    /// f32 operations per second.
    f32: f64,
    /// int8 dot-product operations per second, where the device has them.
    bytes: Option<f64>,
    /// Whether peaks were measured separately; otherwise arithmetic peaks are the best of the timed
    /// ops.
    measured: bool,
}

impl Peaks {
    pub(super) fn measured(memory: f64, cpu: CpuPeak) -> Self {
        Self { memory, f32: cpu.f32, bytes: cpu.int8, measured: true }
    }

    /// Component-wise maximum of two measurements.
    pub(super) fn max(self, other: Self) -> Self {
        let bytes = self.bytes.zip(other.bytes).map(|(a, b)| a.max(b));
        Self { memory: self.memory.max(other.memory), f32: self.f32.max(other.f32), bytes, ..self }
    }

    /// Peaks from the best timed op, and a bandwidth if the device reports one.
    pub(super) fn best_seen(memory: Option<f64>, figures: &[OpTiming]) -> Self {
        let best = |quantity: &dyn Fn(&OpTiming) -> f64| {
            figures
                .iter()
                .filter(|f| f.work.streamed)
                .map(|f| quantity(f) / f.seconds)
                .fold(0.0, f64::max)
        };
        Self {
            memory: memory.unwrap_or_else(|| best(&|f| f.work.bytes)),
            f32: best(&|f| f.work.operations),
            bytes: None,
            measured: false,
        }
    }
}

/// One timing as printed and saved. docs/bench.md describes the fields.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct KernelFigure {
    op: String,
    shape: String,
    format: Option<String>,
    rows: usize,
    seconds: f64,
    bytes_per_second: f64,
    operations_per_second: f64,
    bound_by: Option<KernelBound>,
    share: Option<f64>,
}

/// The resource that bounds an op by the roofline model.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum KernelBound {
    /// Memory bandwidth.
    Memory,
    /// Arithmetic throughput.
    Arithmetic,
}

impl OpTiming {
    /// Rates of the timing, and its share of the roofline.
    pub(super) fn relative_to(self, peaks: &Peaks, exact: bool) -> KernelFigure {
        let OpTiming { work, format, seconds } = self;
        let cpu = CpuPeak { f32: peaks.f32, int8: peaks.bytes };
        let peak = work.weights.map_or(cpu.f32, |shape| cpu.for_shape(shape, exact));
        let share = |work: f64, best: f64| if best > 0.0 { work / best / seconds } else { 0.0 };
        let (memory, arithmetic) = (share(work.bytes, peaks.memory), share(work.operations, peak));
        let bound_by =
            if memory >= arithmetic { KernelBound::Memory } else { KernelBound::Arithmetic };
        KernelFigure {
            op: work.op.to_owned(),
            shape: work.shape,
            format,
            rows: work.rows,
            seconds,
            bytes_per_second: work.bytes / seconds,
            operations_per_second: work.operations / seconds,
            bound_by: work.streamed.then_some(bound_by),
            share: work.streamed.then_some(memory.max(arithmetic)),
        }
    }
}

impl KernelFigure {
    const fn bound_by(&self) -> &'static str {
        match self.bound_by {
            Some(KernelBound::Memory) => "memory",
            Some(KernelBound::Arithmetic) => "arithmetic",
            None => "",
        }
    }

    fn rate(&self) -> String {
        match self.bound_by {
            Some(KernelBound::Arithmetic) => operations(self.operations_per_second),
            _ => units::speed(self.bytes_per_second),
        }
    }

    /// Columns that identify the figure: op, shape, format, rows.
    fn cells(&self) -> [String; 4] {
        let format = self.format.clone().unwrap_or_else(|| "-".into());
        [self.op.clone(), self.shape.clone(), format, self.rows.to_string()]
    }
}

/// Formats operations per second: `310 GFLOP/s`, for f32 and int8 alike.
fn operations(per_second: f64) -> String {
    format!("{} GFLOP/s", units::figure(per_second / 1e9))
}

/// Figures of all kernels. docs/bench.md describes the fields.
#[derive(Debug, Serialize)]
pub(crate) struct KernelReport {
    pub(super) version: &'static str,
    pub(super) system: String,
    pub(super) device: String,
    pub(super) options: Value,
    pub(super) peaks: Peaks,
    pub(super) figures: Vec<KernelFigure>,
}

impl KernelReport {
    /// Comma-separated values with a header.
    pub(crate) fn csv(&self) -> String {
        let mut out = String::from(
            "op,shape,format,rows,seconds,bytes_per_second,operations_per_second,bound_by,share\n",
        );
        for row in &self.figures {
            let format = row.format.as_deref().unwrap_or("");
            let share = row.share.map_or_else(String::new, |share| format!("{share:.4}"));
            // Shapes contain commas.
            let _ = writeln!(
                out,
                "{},\"{}\",{format},{},{:.9},{:.0},{:.0},{},{share}",
                row.op,
                row.shape,
                row.rows,
                row.seconds,
                row.bytes_per_second,
                row.operations_per_second,
                row.bound_by()
            );
        }
        out
    }
}

impl fmt::Display for KernelReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peaks = &self.peaks;
        let seen = if peaks.measured { "" } else { " was the best of these ops" };
        let bytes = peaks
            .bytes
            .map_or_else(String::new, |bytes| format!(", {} of bytes", operations(bytes)));
        writeln!(f, "{}", self.device)?;
        // No peak is known if only ops on cached activations ran.
        if peaks.memory > 0.0 {
            write!(f, "at best: {} from memory", units::speed(peaks.memory))?;
            match peaks.f32 > 0.0 {
                true => writeln!(f, ", {} of f32{bytes}{seen}", operations(peaks.f32))?,
                false => writeln!(f)?,
            }
        }
        writeln!(f)?;
        let mut table = Table::new(3);
        table.head(["", "shape", "format", "rows", "time", "rate", "of the best"]);
        for row in &self.figures {
            let share = row.share.map_or_else(|| "-".into(), units::percent);
            table.row(row.cells().into_iter().chain([units::time(row.seconds), row.rate(), share]));
        }
        write!(f, "{table}")
    }
}

/// Speeds of a saved report, for comparison.
///
/// # Errors
/// The value is not a report of this benchmark.
pub(super) fn speeds(report: &Value) -> anyhow::Result<Vec<ComparedSpeed>> {
    let rows = Vec::<KernelFigure>::deserialize(&report["figures"])?;
    let speed = |row: KernelFigure| {
        let cells = row.cells();
        ComparedSpeed {
            key: cells.join(" | "),
            cells: cells.into(),
            rate: 1.0 / row.seconds,
            shown: units::time(row.seconds),
        }
    };
    Ok(rows.into_iter().map(speed).collect())
}

#[cfg(test)]
mod tests {
    use moeflux_compute::{Format, MatrixShape};

    use super::*;
    use crate::op_bench::OpWork;

    fn figure(bytes: f64, operations: f64, streamed: bool) -> OpTiming {
        let weights = Some(MatrixShape { rows: 64, cols: 64, format: Format::MXFP4 });
        let work = OpWork {
            op: "MatMul",
            shape: "64 x 64".into(),
            rows: 1,
            bytes,
            operations,
            streamed,
            weights,
        };
        OpTiming { work, format: None, seconds: 2.0 }
    }

    #[test]
    fn a_share_is_of_what_takes_longer_at_its_best() {
        let peaks = Peaks::measured(10.0, CpuPeak { f32: 20.0, int8: Some(80.0) });
        let row = figure(10.0, 40.0, true).relative_to(&peaks, false);
        assert_eq!(
            (row.bound_by, row.share, row.bytes_per_second),
            (Some(KernelBound::Memory), Some(0.5), 5.0)
        );
        let row = figure(10.0, 40.0, true).relative_to(&peaks, true);
        assert_eq!((row.bound_by, row.share), (Some(KernelBound::Arithmetic), Some(1.0)));
        let row = figure(10.0, 40.0, false).relative_to(&peaks, false);
        assert_eq!((row.bound_by(), row.share), ("", None));
    }

    #[test]
    fn without_peaks_the_best_that_was_seen_is_the_best() {
        let figures = [figure(10.0, 1.0, true), figure(1.0, 40.0, true), figure(1e9, 1e9, false)];
        let peaks = Peaks::best_seen(None, &figures);
        assert_eq!((peaks.memory, peaks.f32, peaks.measured), (5.0, 20.0, false));
        let shares = figures.map(|f| f.relative_to(&peaks, false).share);
        assert_eq!(shares, [Some(1.0), Some(1.0), None]);
        let peaks = Peaks::best_seen(Some(50.0), &[figure(10.0, 1.0, true)]);
        assert_eq!(figure(10.0, 1.0, true).relative_to(&peaks, true).share, Some(1.0));
        assert_eq!((peaks.memory, peaks.f32), (50.0, 0.5));
        assert_eq!(
            figure(0.0, 0.0, true).relative_to(&Peaks::best_seen(None, &[]), false).share,
            Some(0.0)
        );
    }

    #[test]
    fn rates_are_shown_with_the_digits_that_matter() {
        assert_eq!([2.34e9, 3.1e11].map(operations), ["2.34 GFLOP/s", "310 GFLOP/s"]);
    }
}
