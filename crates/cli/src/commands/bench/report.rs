//! What is printed of one budget.

use std::fmt;

use moeflux::{DiskSpeed, LayerStats, MemoryPlan, MemorySpeed};
use serde::Serialize;

use super::{
    measure::Repeat,
    summary::{AtContext, Summary},
};
use crate::{load, out::Table, units};

/// The fields are described in docs/bench.md.
#[derive(Serialize)]
pub(super) struct Report<'a> {
    pub(super) version: &'static str,
    pub(super) system: String,
    /// What was asked for.
    pub(super) options: serde_json::Value,
    pub(super) model: String,
    pub(super) device: &'a str,
    pub(super) device_choice: &'a str,
    /// Kernels that the adapter was given by all repeats together.
    pub(super) dispatches: u64,
    #[serde(skip)]
    pub(super) on: String,
    pub(super) load_seconds: f64,
    /// How experts are read.
    pub(super) reader: String,
    pub(super) machine: Machine,
    /// Those of the first of `contexts`.
    pub(super) prefill: Option<Summary>,
    pub(super) decode: Option<Summary>,
    pub(super) contexts: Vec<AtContext>,
    pub(super) peak_memory: u64,
    pub(super) plan: &'a MemoryPlan,
    pub(super) layers: Vec<LayerStats>,
    pub(super) repeats: Vec<Repeat>,
    pub(super) kernels: Vec<KernelShare>,
}

/// What the machine gives at best, and what the system held of the model's files.
#[derive(Serialize)]
pub(super) struct Machine {
    pub(super) disk: Option<DiskSpeed>,
    pub(super) memory: MemorySpeed,
    /// The memory of slots, written to before anything was measured; `None` if that was not wanted.
    pub(super) touched: Option<Touched>,
    /// Shares of the files in the page cache.
    pub(super) cached_before: Option<f64>,
    pub(super) cached_after: Option<f64>,
    /// Whether the files' pages were dropped before each repeat.
    pub(super) cold: bool,
}

/// Memory that the system was made to hand out.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Touched {
    pub(super) bytes: u64,
    pub(super) seconds: f64,
}

impl Touched {
    /// Bytes per second, if it took long enough for anyone to care.
    fn slow(&self) -> Option<f64> {
        (self.seconds >= 1.0).then(|| self.bytes as f64 / self.seconds)
    }
}

/// What one kernel of a GPU takes.
#[derive(Serialize)]
pub(super) struct KernelShare {
    pub(super) phase: &'static str,
    pub(super) kernel: &'static str,
    pub(super) dispatches_per_token: f64,
    pub(super) microseconds_per_token: f64,
    pub(super) microseconds_each: f64,
}

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.plan;
        let reader = if self.reader.is_empty() {
            String::new()
        } else {
            format!("; reads by {}", self.reader)
        };
        writeln!(f, "{}; {}{reader}; loaded in {:.2} s", self.model, self.on, self.load_seconds)?;
        writeln!(
            f,
            "budget {}, {}{}, chunks of {} tokens; {}\n",
            units::memory(plan.slots_limit()),
            units::plural(plan.slots as u64, "slot"),
            match plan.host_slots {
                0 => String::new(),
                host => format!(" and {host} on the host, of {}", units::memory(plan.budget)),
            },
            plan.chunk,
            units::plural((self.repeats.len() / self.contexts.len().max(1)) as u64, "repeat")
        )?;
        write!(f, "{}", self.speeds())?;
        let together = self.contexts.iter().any(|at| at.together.is_some());
        if together {
            write!(f, "\n{}", self.steps())?;
        }
        if together || self.all().any(|(_, s)| s.misses_per_token > 0.0 || s.bytes_per_token > 0.0)
        {
            write!(f, "\n{}", self.reads())?;
        }
        write!(f, "\n{}", self.times())?;
        writeln!(f, "\n{}", self.machine)?;
        for (name, summary) in self.all() {
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
        if let Some(decode) = self.decode.as_ref().filter(|d| d.dispatches_per_token > 0.0) {
            writeln!(
                f,
                "decode: {:.0} dispatches and {:.0} waits per token; the host waits for the GPU {} of the time",
                decode.dispatches_per_token,
                decode.waits_per_token,
                units::percent(decode.waited)
            )?;
        }
        if !self.kernels.is_empty() {
            write!(f, "\n{}", self.of_kernels())?;
        }
        writeln!(f, "\n{}", load::peak(plan, self.peak_memory))
    }
}

impl Report<'_> {
    /// All stretches with their names.
    fn all(&self) -> impl Iterator<Item = (String, &Summary)> {
        let several = self.contexts.iter().any(|at| at.context != self.contexts[0].context);
        self.contexts.iter().flat_map(move |c| {
            let of = c.together.map_or_else(String::new, |t| format!(" of {}", t.sessions));
            let name = move |phase: &str, at: &str| match several {
                true => format!("{phase}{of} {at}{}", c.context),
                false => format!("{phase}{of}"),
            };
            let prefill = c.prefill.as_ref().map(|s| (name("prefill", ""), s));
            prefill.into_iter().chain(c.decode.as_ref().map(|s| (name("decode", "after "), s)))
        })
    }

    fn speeds(&self) -> Table {
        let mut table = Table::new(1);
        table.row(["", "tokens", "tok/s", "min", "max", "read per token", "hit rate", "stalled"]);
        for (name, s) in self.all() {
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

    /// Those of several sessions.
    fn steps(&self) -> Table {
        let mut table = Table::new(1);
        table.row([
            "sessions in a step",
            "context",
            "step",
            "experts a layer",
            "weights",
            "times one",
            "roof",
            "of it",
        ]);
        for at in &self.contexts {
            let (Some(together), Some(decode)) = (at.together, &at.decode) else { continue };
            let times = together.against_one.map(|a| a.times);
            let roof = decode.roof_of(at.together);
            let or_none = |shown: Option<String>| shown.unwrap_or_else(|| "-".into());
            table.row([
                together.sessions.to_string(),
                at.context.to_string(),
                decode.token_ms.map_or_else(|| "-".into(), |t| format!("{:.2} ms", t.median)),
                format!("{:.1}", together.experts_per_layer),
                units::disk(together.bytes_per_step),
                or_none(times.map(|times| format!("{times:.2}"))),
                or_none(roof.map(|(roof, _)| units::bare_rate(roof))),
                or_none(roof.map(|(_, share)| units::percent(share))),
            ]);
        }
        table
    }

    fn reads(&self) -> Table {
        let mut table = Table::new(1);
        let head = [
            "per token",
            "needed",
            "missed",
            "read",
            "predicted",
            "prefetched",
            "wasted",
            "disk",
            "of its best",
        ];
        table.row(head);
        for (name, s) in self.all() {
            let or_none = |shown: Option<String>| shown.unwrap_or_else(|| "-".into());
            table.row([
                name,
                units::disk(s.needed_bytes_per_token),
                units::disk(s.missed_bytes_per_token),
                units::disk(s.file_bytes_per_token),
                format!("{:.1}", s.predicted_per_token),
                format!("{:.1}", s.prefetched_per_token),
                format!("{:.1}", s.wasted_per_token),
                or_none(s.disk_bytes_per_second.map(units::speed)),
                or_none(s.disk_share.map(units::percent)),
            ]);
        }
        table
    }

    fn times(&self) -> Table {
        let mut table = Table::new(1);
        table.row(["per token", "compute", "", "stalled", "", "other", "", "slowest of 100"]);
        for (name, s) in self.all() {
            let ms = |ms: f64| format!("{ms:.2} ms");
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

    fn of_kernels(&self) -> Table {
        let mut table = Table::new(2);
        table.row(["", "kernel", "per token", "us per token", "us each"]);
        for k in &self.kernels {
            table.row([
                k.phase.to_owned(),
                k.kernel.to_owned(),
                format!("{:.2}", k.dispatches_per_token),
                format!("{:.1}", k.microseconds_per_token),
                format!("{:.1}", k.microseconds_each),
            ]);
        }
        table
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = &self.memory;
        write!(
            f,
            "memory gives {} to {}",
            units::speed(memory.bytes_per_second),
            units::plural(memory.threads as u64, "thread")
        )?;
        if let Some(disk) = &self.disk {
            write!(f, "; the disk {}", disk_words(disk))?;
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

/// `1.18 GB/s in blocks of 2.7 MB, 8 at once (measured 2 days ago)`.
pub(crate) fn disk_words(disk: &DiskSpeed) -> String {
    format!(
        "{} in blocks of {}, {} at once{} (measured {})",
        units::speed(disk.ceiling()),
        units::disk(disk.block as f64),
        disk.best().map_or(0, |b| b.depth),
        if disk.direct {
            ""
        } else {
            ", through the page cache as this file system has no other way"
        },
        units::ago(disk.age())
    )
}
