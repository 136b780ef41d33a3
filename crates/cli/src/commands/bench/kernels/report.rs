//! What was measured, against what is possible.

use std::fmt::{self, Write};

use anyhow::Context;
use moeflux_compute::CpuPeak;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{super::compare::Speed, lab::Figure};
use crate::{out::Table, units};

/// What the device gives at best.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Peaks {
    /// Bytes per second that are read from memory.
    memory: f64,
    /// Operations per second with f32.
    f32: f64,
    /// With dot products of bytes, where there are such.
    bytes: Option<f64>,
    /// Whether operations were measured by themselves; else theirs are the best that any op reached.
    measured: bool,
}

impl Peaks {
    pub(super) fn measured(memory: f64, cpu: CpuPeak) -> Self {
        Self { memory, f32: cpu.f32, bytes: cpu.int8, measured: true }
    }

    /// The better of two measurements.
    pub(super) fn or_better(self, other: Self) -> Self {
        let bytes = self.bytes.zip(other.bytes).map(|(a, b)| a.max(b));
        Self { memory: self.memory.max(other.memory), f32: self.f32.max(other.f32), bytes, ..self }
    }

    /// The best of what was measured, of a device that may read so many bytes per second.
    pub(super) fn seen(memory: Option<f64>, figures: &[Figure]) -> Self {
        let best = |of: &dyn Fn(&Figure) -> f64| {
            figures.iter().filter(|f| f.work.walks).map(|f| of(f) / f.seconds).fold(0.0, f64::max)
        };
        Self {
            memory: memory.unwrap_or_else(|| best(&|f| f.work.bytes)),
            f32: best(&|f| f.work.operations),
            bytes: None,
            measured: false,
        }
    }
}

/// One figure as it is printed and saved; the fields are described in docs/bench.md.
#[derive(Serialize, Deserialize)]
pub(super) struct Row {
    op: String,
    shape: String,
    format: Option<String>,
    rows: usize,
    seconds: f64,
    bytes_per_second: f64,
    operations_per_second: f64,
    bound_by: Option<BoundBy>,
    share: Option<f64>,
}

/// What takes longer at its best.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum BoundBy {
    Memory,
    Arithmetic,
}

impl Figure {
    /// The figure as a share of what is possible.
    pub(super) fn against(self, peaks: &Peaks, exact: bool) -> Row {
        let Figure { work, format, seconds } = self;
        let cpu = CpuPeak { f32: peaks.f32, int8: peaks.bytes };
        let peak = work.weights.map_or(cpu.f32, |shape| cpu.for_shape(shape, exact));
        let share = |each: f64, best: f64| if best > 0.0 { each / best / seconds } else { 0.0 };
        let (memory, arithmetic) = (share(work.bytes, peaks.memory), share(work.operations, peak));
        let bound_by = if memory >= arithmetic { BoundBy::Memory } else { BoundBy::Arithmetic };
        Row {
            op: work.op.to_owned(),
            shape: work.shape,
            format,
            rows: work.rows,
            seconds,
            bytes_per_second: work.bytes / seconds,
            operations_per_second: work.operations / seconds,
            bound_by: work.walks.then_some(bound_by),
            share: work.walks.then_some(memory.max(arithmetic)),
        }
    }
}

impl Row {
    const fn bound_by(&self) -> &'static str {
        match self.bound_by {
            Some(BoundBy::Memory) => "memory",
            Some(BoundBy::Arithmetic) => "arithmetic",
            None => "",
        }
    }

    fn rate(&self) -> String {
        match self.bound_by {
            Some(BoundBy::Arithmetic) => operations(self.operations_per_second),
            _ => units::speed(self.bytes_per_second),
        }
    }

    /// What it is a figure of.
    fn cells(&self) -> [String; 4] {
        let format = self.format.clone().unwrap_or_else(|| "-".into());
        [self.op.clone(), self.shape.clone(), format, self.rows.to_string()]
    }
}

/// `310 GFLOP/s`, whether floats are multiplied or bytes.
fn operations(per_second: f64) -> String {
    let digits = if per_second < 9.95e9 { 1 } else { 0 };
    format!("{:.digits$} GFLOP/s", per_second / 1e9)
}

/// The fields are described in docs/bench.md.
#[derive(Serialize)]
pub(super) struct Report {
    pub(super) version: &'static str,
    pub(super) system: String,
    pub(super) device: String,
    pub(super) options: Value,
    pub(super) peaks: Peaks,
    pub(super) figures: Vec<Row>,
}

impl Report {
    pub(super) fn csv(&self) -> String {
        let mut out = String::from(
            "op,shape,format,rows,seconds,bytes_per_second,operations_per_second,bound_by,share\n",
        );
        for row in &self.figures {
            let format = row.format.as_deref().unwrap_or("");
            let share = row.share.map_or_else(String::new, |share| format!("{share:.4}"));
            // Shapes have commas.
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

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let peaks = &self.peaks;
        let seen = if peaks.measured { "" } else { " was the most that was seen" };
        let bytes = peaks
            .bytes
            .map_or_else(String::new, |bytes| format!(", {} of bytes", operations(bytes)));
        writeln!(f, "{}", self.device)?;
        // Nothing that has a share was seen where only activations were.
        if peaks.memory > 0.0 {
            write!(f, "at best: {} from memory", units::speed(peaks.memory))?;
            match peaks.f32 > 0.0 {
                true => writeln!(f, ", {} of f32{bytes}{seen}", operations(peaks.f32))?,
                false => writeln!(f)?,
            }
        }
        writeln!(f)?;
        let mut table = Table::new(3);
        table.row(["", "shape", "format", "rows", "time", "rate", "of the best"]);
        for row in &self.figures {
            let share = row.share.map_or_else(|| "-".into(), units::percent);
            table.row(row.cells().into_iter().chain([units::time(row.seconds), row.rate(), share]));
        }
        write!(f, "{table}")
    }
}

/// What is compared of a report.
///
/// # Errors
/// It is no report of this command.
pub(super) fn speeds(report: &Value) -> anyhow::Result<Vec<Speed>> {
    let foreign = "this is not what `moeflux bench kernels --save` writes";
    let rows = Vec::<Row>::deserialize(&report["figures"]).context(foreign)?;
    let speed = |row: Row| {
        let cells = row.cells();
        Speed {
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

    use super::{super::lab::Work, *};

    fn figure(bytes: f64, operations: f64, walks: bool) -> Figure {
        let weights = Some(MatrixShape { rows: 64, cols: 64, format: Format::MXFP4 });
        let work = Work {
            op: "MatMul",
            shape: "64 x 64".into(),
            rows: 1,
            bytes,
            operations,
            walks,
            weights,
        };
        Figure { work, format: None, seconds: 2.0 }
    }

    #[test]
    fn a_share_is_of_what_takes_longer_at_its_best() {
        let peaks = Peaks::measured(10.0, CpuPeak { f32: 20.0, int8: Some(80.0) });
        let row = figure(10.0, 40.0, true).against(&peaks, false);
        assert_eq!(
            (row.bound_by, row.share, row.bytes_per_second),
            (Some(BoundBy::Memory), Some(0.5), 5.0)
        );
        let row = figure(10.0, 40.0, true).against(&peaks, true);
        assert_eq!((row.bound_by, row.share), (Some(BoundBy::Arithmetic), Some(1.0)));
        let row = figure(10.0, 40.0, false).against(&peaks, false);
        assert_eq!((row.bound_by(), row.share), ("", None));
    }

    #[test]
    fn without_peaks_the_best_that_was_seen_is_the_best() {
        let figures = [figure(10.0, 1.0, true), figure(1.0, 40.0, true), figure(1e9, 1e9, false)];
        let peaks = Peaks::seen(None, &figures);
        assert_eq!((peaks.memory, peaks.f32, peaks.measured), (5.0, 20.0, false));
        let shares = figures.map(|f| f.against(&peaks, false).share);
        assert_eq!(shares, [Some(1.0), Some(1.0), None]);
        let peaks = Peaks::seen(Some(50.0), &[figure(10.0, 1.0, true)]);
        assert_eq!(figure(10.0, 1.0, true).against(&peaks, true).share, Some(1.0));
        assert_eq!((peaks.memory, peaks.f32), (50.0, 0.5));
        assert_eq!(figure(0.0, 0.0, true).against(&Peaks::seen(None, &[]), false).share, Some(0.0));
    }

    #[test]
    fn rates_are_shown_with_the_digits_that_matter() {
        assert_eq!([2.34e9, 3.1e11].map(operations), ["2.3 GFLOP/s", "310 GFLOP/s"]);
    }
}
