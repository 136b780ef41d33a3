//! Benchmark of a model: prefill and decode speed, held against the roofline of the machine.

mod drafts;
mod measure;
mod report;
mod rows;
mod setting;
mod speed_bench;
mod summary;

pub use drafts::{DraftFigures, DraftRequest};
pub use measure::{PhaseMeasurement, RepeatMeasurement};
pub use report::{KernelProfile, MachineFigures, SpeedReport, TouchedMemory};
pub use rows::{SpeedRow, chart, computing_share, csv, inversions, rows, saved_rows, tables};
pub use setting::BenchSetting;
pub use speed_bench::{
    ContradictingReads, DiskProbe, ReportTexts, SpeedBench, SpeedRequest, StepHooks, check_context,
    compare, needed_context,
};
pub use summary::{ContextSummary, PhaseSummary};
