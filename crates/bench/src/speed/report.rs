//! SpeedReport of one memory budget, as JSON and as text.

use std::{fmt, sync::Arc};

use moeflux::{
    MemoryPlan,
    base::LayerStats,
    experts::{DiskSpeed, MemorySpeed},
};
use serde::Serialize;

use super::{
    drafts::DraftFigures,
    measure::RepeatMeasurement,
    summary::{ContextSummary, PhaseSummary},
};
use crate::{describe, table::Table, units};

/// Figures of one memory budget. docs/bench.md describes the fields.
#[derive(Debug, Serialize)]
pub struct SpeedReport<'a> {
    pub(super) version: &'static str,
    pub(super) system: String,
    /// Options of the run.
    pub(super) options: serde_json::Value,
    pub(super) model: String,
    pub(super) device: &'a str,
    pub(super) device_choice: &'a str,
    /// GPU dispatches of all repeats together.
    pub(super) dispatches: u64,
    #[serde(skip)]
    pub(super) on: String,
    pub(super) load_seconds: f64,
    /// How experts are read.
    pub(super) reader: String,
    pub(super) machine: MachineFigures,
    /// Summary of the first entry of `contexts`; so is `decode`.
    pub(super) prefill: Option<PhaseSummary>,
    pub(super) decode: Option<PhaseSummary>,
    pub(super) contexts: Vec<ContextSummary>,
    pub(super) peak_memory: u64,
    pub(super) plan: Arc<MemoryPlan>,
    pub(super) layers: Vec<LayerStats>,
    pub(super) repeats: Vec<RepeatMeasurement>,
    pub(super) kernels: Vec<KernelProfile>,
    /// Answers with drafts, if they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) drafts: Option<DraftFigures>,
}

/// Peak bandwidths of the machine, and the state of the page cache.
#[derive(Debug, Serialize)]
pub struct MachineFigures {
    pub(super) disk: Option<DiskSpeed>,
    pub(super) memory: MemorySpeed,
    /// Slot memory that was touched before measuring; `None` with `--fresh`.
    pub(super) touched: Option<TouchedMemory>,
    /// Shares of the model's files in the page cache.
    pub(super) cached_before: Option<f64>,
    pub(super) cached_after: Option<f64>,
    /// Whether the page cache was dropped before each repeat.
    pub(super) cold: bool,
}

/// Memory that the system was made to allocate.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct TouchedMemory {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
}

impl TouchedMemory {
    /// Bytes per second, if it took a second or more.
    fn slow(&self) -> Option<f64> {
        (self.seconds >= 1.0).then(|| self.bytes as f64 / self.seconds)
    }
}

/// Profile of one GPU kernel.
#[derive(Debug, Serialize)]
pub struct KernelProfile {
    pub(super) phase: &'static str,
    pub(super) kernel: &'static str,
    pub(super) dispatches_per_token: f64,
    pub(super) microseconds_per_token: f64,
    pub(super) microseconds_each: f64,
}

impl fmt::Display for SpeedReport<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = &*self.plan;
        let reader = if self.reader.is_empty() {
            String::new()
        } else {
            format!("; reads by {}", self.reader)
        };
        writeln!(
            f,
            "{}; {}{reader}; loaded in {}",
            self.model,
            self.on,
            units::time(self.load_seconds)
        )?;
        writeln!(
            f,
            "budget {}, {}{}, chunks of {} tokens; {}\n",
            units::memory(plan.dense_pools().iter().map(|pool| pool.budget).sum()),
            units::plural(plan.slots() as u64, "slot"),
            match plan.host() {
                host if plan.card().is_some() && host.slots() > 0 => {
                    format!(" and {} on the host, of {}", host.slots(), units::memory(host.budget))
                }
                _ => String::new(),
            },
            plan.chunk,
            units::plural((self.repeats.len() / self.contexts.len().max(1)) as u64, "repeat")
        )?;
        write!(f, "{}", self.speeds())?;
        if let Some(drafts) = &self.drafts {
            write!(f, "\n{drafts}")?;
        }
        let together = self.contexts.iter().any(|at| at.together.is_some());
        if together {
            write!(f, "\n{}", self.steps())?;
        }
        if together
            || self.phases().any(|(_, s)| s.misses_per_token > 0.0 || s.bytes_per_token > 0.0)
        {
            write!(f, "\n{}", self.reads())?;
        }
        if self.phases().any(|(_, s)| s.predicted_per_token > 0.0) {
            write!(f, "\n{}", self.prefetches())?;
        }
        write!(f, "\n{}", self.times())?;
        writeln!(f, "\n{}", self.machine)?;
        for (name, summary) in self.phases() {
            if let Some(roof) = &summary.roof {
                writeln!(
                    f,
                    "{name}: {} of the roof of {} is reached; with perfect lookahead that is {}{}",
                    units::percent(roof.share),
                    units::rate(roof.tokens_per_second),
                    units::rate(roof.ideal_tokens_per_second),
                    summary.memory_bytes_per_second.map_or_else(String::new, |speed| format!(
                        "; between tokens memory gave {}",
                        units::speed(speed)
                    ))
                )?;
            }
        }
        for (name, s) in self.phases() {
            if let Some(hidden) = s.rows_hidden {
                writeln!(
                    f,
                    "{name}: {} rows of tables and {} per token; {} of the time of their reads \
                     is hidden",
                    units::figure(s.rows_per_token),
                    units::disk(s.row_bytes_per_token),
                    units::percent(hidden)
                )?;
            }
        }
        for (name, s) in self.phases() {
            if let Some(share) = s.card_hit_rate {
                let share = units::percent(share);
                writeln!(f, "{name}: {share} of the experts used were on the card")?;
            }
        }
        if let Some(number) = plan.experts_number() {
            writeln!(f, "experts divided between card and processor by plan {number}")?;
        }
        if let Some(decode) = self.decode.as_ref().filter(|d| d.dispatches_per_token > 0.0) {
            writeln!(
                f,
                "decode: {} dispatches and {} waits per token; the host waits for the GPU {} of the time",
                units::figure(decode.dispatches_per_token),
                units::figure(decode.waits_per_token),
                units::percent(decode.waited)
            )?;
        }
        if !self.kernels.is_empty() {
            write!(f, "\n{}", self.kernel_profile())?;
        }
        writeln!(f, "\n{}", describe::peak_memory(plan, self.peak_memory))
    }
}

impl SpeedReport<'_> {
    /// Summaries of all phases with their names.
    fn phases(&self) -> impl Iterator<Item = (String, &PhaseSummary)> {
        let several = self.contexts.iter().any(|at| at.context != self.contexts[0].context);
        self.contexts.iter().flat_map(move |c| {
            let sessions = c.together.map_or_else(String::new, |t| format!(" of {}", t.sessions));
            let name = move |phase: &str, preposition: &str| match several {
                true => format!("{phase}{sessions} {preposition}{}", c.context),
                false => format!("{phase}{sessions}"),
            };
            let prefill = c.prefill.as_ref().map(|s| (name("prefill", ""), s));
            prefill.into_iter().chain(c.decode.as_ref().map(|s| (name("decode", "after "), s)))
        })
    }

    fn speeds(&self) -> Table {
        let mut table = Table::new(1);
        table.head(["", "tokens", "tok/s", "min", "max", "read per token", "hit rate", "stalled"]);
        for (name, s) in self.phases() {
            let speed = units::bare_rate;
            table.row([
                name,
                s.tokens.to_string(),
                speed(s.tokens_per_second.median),
                speed(s.tokens_per_second.min),
                speed(s.tokens_per_second.max),
                units::disk(s.bytes_per_token),
                units::percent(s.hit_rate),
                units::percent(s.stalled),
            ]);
        }
        table
    }

    /// Table of batched decode.
    fn steps(&self) -> Table {
        let mut table = Table::new(1);
        table.head([
            "sessions",
            "context",
            "step",
            "experts a layer",
            "weights",
            "times one",
            "roof",
            "of it",
        ]);
        for context in &self.contexts {
            let (Some(together), Some(decode)) = (context.together, &context.decode) else {
                continue;
            };
            let times = together.against_one.map(|a| a.times);
            let roof = decode.roofline(context.together);
            let or_none = |shown: Option<String>| shown.unwrap_or_else(|| "-".into());
            table.row([
                together.sessions.to_string(),
                context.context.to_string(),
                decode.token_ms.map_or_else(|| "-".into(), |t| ms(t.median)),
                units::figure(together.experts_per_layer),
                units::disk(together.bytes_per_step),
                or_none(times.map(units::figure)),
                or_none(roof.map(|r| units::bare_rate(r.tokens_per_second))),
                or_none(roof.map(|r| units::percent(r.share))),
            ]);
        }
        table
    }

    fn reads(&self) -> Table {
        let mut table = Table::new(1);
        table.head(["per token", "needed", "missed", "read", "disk", "of its best"]);
        for (name, s) in self.phases() {
            let or_none = |shown: Option<String>| shown.unwrap_or_else(|| "-".into());
            table.row([
                name,
                units::disk(s.needed_bytes_per_token),
                units::disk(s.missed_bytes_per_token),
                units::disk(s.file_bytes_per_token),
                or_none(s.disk_bytes_per_second.map(units::speed)),
                or_none(s.disk_share.map(units::percent)),
            ]);
        }
        table
    }

    /// Table of experts that were read before they were asked for.
    fn prefetches(&self) -> Table {
        let mut table = Table::new(1);
        table.head(["experts per token", "predicted", "prefetched", "wasted"]);
        for (name, s) in self.phases() {
            let counts = [s.predicted_per_token, s.prefetched_per_token, s.wasted_per_token];
            table.row([name].into_iter().chain(counts.map(units::figure)));
        }
        table
    }

    fn times(&self) -> Table {
        let mut table = Table::new(1);
        table.head(["per token", "compute", "", "stalled", "", "other", "", "slowest of 100"]);
        for (name, s) in self.phases() {
            let t = &s.time;
            table.row([
                name,
                ms(t.compute.ms_per_token),
                units::percent(t.compute.share),
                ms(t.stalled.ms_per_token),
                units::percent(t.stalled.share),
                ms(t.other.ms_per_token),
                units::percent(t.other.share),
                s.token_ms.map_or_else(|| "-".into(), |t| ms(t.p99)),
            ]);
        }
        table
    }

    fn kernel_profile(&self) -> Table {
        let mut table = Table::new(2);
        table.head(["", "kernel", "per token", "us per token", "us each"]);
        for k in &self.kernels {
            table.row([
                k.phase.to_owned(),
                k.kernel.to_owned(),
                units::figure(k.dispatches_per_token),
                units::figure(k.microseconds_per_token),
                units::figure(k.microseconds_each),
            ]);
        }
        table
    }
}

fn ms(milliseconds: f64) -> String {
    units::time(milliseconds / 1e3)
}

impl fmt::Display for MachineFigures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = &self.memory;
        write!(
            f,
            "memory gives {} to {}",
            units::speed(memory.bytes_per_second),
            units::plural(memory.threads as u64, "thread")
        )?;
        if let Some(disk) = &self.disk {
            write!(f, "; the disk {}", describe::disk_speed(disk))?;
        }
        if let Some((touched, speed)) = self.touched.and_then(|t| Some((t, t.slow()?))) {
            write!(
                f,
                "\nthe system handed out {} for slots at {} before; a first prompt pays for that itself (--fresh)",
                units::memory(touched.bytes),
                units::speed(speed)
            )?;
        }
        if let (Some(before), Some(after)) = (self.cached_before, self.cached_after) {
            let (before, after) = (units::percent(before), units::percent(after));
            write!(f, "\nof the model's files the system held {before} before, {after} after")?;
            write!(
                f,
                "{}",
                if self.cold { "; made to forget them before each repeat" } else { "" }
            )?;
        }
        Ok(())
    }
}
