//! Benchmark of a model: settings, steps and comparison.

use std::time::Instant;

use anyhow::{bail, ensure};
use moeflux::{
    Checkpoint, Engine,
    base::SystemMemory,
    experts::{FilePages, PageCache, probe_disk, probe_memory},
    model::blueprint::Blueprint,
    runtime::{CancelToken, KvFormat},
    tools::{RooflineLimits, TokenCosts},
};
use serde_json::Value;

use super::{
    drafts::{DraftFigures, DraftRequest},
    measure::{RepeatHooks, RepeatMeasurement, RooflineModel, TokenFeed, repeat},
    report::{KernelProfile, MachineFigures, SpeedReport, TouchedMemory},
    rows::{self, rows, saved_rows},
    setting::BenchSetting,
    summary::{ContextSummary, SummaryScale},
};
use crate::{
    comparison::{self, Comparison, SavedRun},
    describe,
};

/// Request for a benchmark of one memory budget.
#[derive(Clone, Debug)]
pub struct SpeedRequest {
    /// Settings, measured one after another within one memory plan.
    pub settings: Vec<BenchSetting>,
    /// Tokens that are decoded.
    pub tokens: usize,
    /// Repeats of each setting.
    pub repeats: usize,
    /// Drop the model's files from the page cache before each repeat.
    pub cold: bool,
    /// Threads of the memory probe; `None` for one per physical core.
    pub threads: Option<usize>,
    /// Format of the KV cache on the CPU.
    pub kv_format: KvFormat,
}

/// Callbacks while steps run.
pub struct StepHooks<'a> {
    /// Cancels the step in flight when set.
    pub cancel: Option<&'a CancelToken>,
    /// Receives the fraction that is done.
    pub progress: &'a mut dyn FnMut(f64),
}

/// Texts of a report that the caller knows.
#[derive(Clone, Debug)]
pub struct ReportTexts {
    /// Model: its folder or name.
    pub model: String,
    /// Options of the run, for comparisons.
    pub options: Value,
}

/// A benchmark of one memory budget. The caller opens the engine after [`SpeedBench::new`], then
/// calls [`start`](Self::start), [`warm_up`](Self::warm_up), [`touch`](Self::touch),
/// [`measure`](Self::measure), [`profile`](Self::profile) and [`report`](Self::report).
pub struct SpeedBench {
    request: SpeedRequest,
    positions: usize,
    costs: TokenCosts,
    scale: SummaryScale,
    machine: MachineFigures,
    pages: FilePages,
    opened: Instant,
    load_seconds: f64,
    /// Whether all reads came from the disk, not from the page cache.
    from_disk: bool,
    repeats: Vec<RepeatMeasurement>,
    kernels: Vec<KernelProfile>,
    drafts: Option<DraftFigures>,
}

/// Longest context that a request needs, prompt and answer.
pub fn needed_context(settings: &[BenchSetting], tokens: usize) -> usize {
    settings.iter().map(|s| s.prompt).max().map_or(0, |longest| longest.saturating_add(tokens))
}

/// Checks that `needed` tokens fit a context, and the positions of the model.
///
/// # Errors
/// They do not.
pub fn check_context(needed: usize, context: usize, positions: usize) -> anyhow::Result<()> {
    let advice = match needed > positions {
        true => format!("the model has {positions} positions"),
        false => format!("give --ctx {needed}"),
    };
    ensure!(
        needed <= context,
        "prompt and answer have {needed} tokens together, more than the context of {context}: {advice}"
    );
    Ok(())
}

/// How the peak bandwidth of the disk is found.
#[derive(Clone, Copy, Debug)]
pub struct DiskProbe<'a> {
    /// Folder of earlier measurements.
    pub folder: Option<&'a std::path::Path>,
    /// Measure again even if an earlier measurement exists.
    pub again: bool,
}

/// Reads of a run that were faster than the disk's remembered peak.
#[derive(Clone, Copy, Debug)]
pub struct ContradictingReads {
    /// Bandwidth of the reads.
    pub bytes_per_second: f64,
    /// The remembered peak, in bytes per second.
    pub remembered: f64,
}

impl SpeedBench {
    /// Probes disk and memory, and drops the page cache if asked to. To be called before the model
    /// is loaded: the memory of the probes is free again then.
    ///
    /// # Errors
    /// A probe fails.
    pub fn new(
        request: SpeedRequest,
        checkpoint: &Checkpoint,
        blueprint: &Blueprint,
        disk: DiskProbe<'_>,
    ) -> anyhow::Result<Self> {
        let costs = TokenCosts::new(blueprint, request.kv_format);
        // The probe may use no more memory than the smallest plan holds.
        let dense: u64 = blueprint.matrices().map(|m| m.file_bytes() as u64).sum();
        let working_set = costs.bytes().min(dense);
        let disk = probe_disk(checkpoint, blueprint.slot_bytes(), disk.folder, disk.again)?;
        let memory = probe_memory(working_set, request.threads)?;
        let expert = blueprint.experts_bytes() as f64 / blueprint.experts().max(1) as f64;
        let scale = SummaryScale {
            expert,
            disk: disk.as_ref().map(|d| d.ceiling()),
            dense: costs.dense_bytes() as f64,
            moe_layers: blueprint.layers.iter().filter(|layer| layer.moe().is_some()).count(),
        };
        let pages = FilePages::for_checkpoint(checkpoint);
        if request.cold {
            // Files in the page cache would change how they are read. A failure is reported when
            // the first repeat starts.
            let _ = pages.forget();
        }
        Ok(Self {
            positions: blueprint.max_positions,
            costs,
            scale,
            machine: MachineFigures {
                disk,
                memory,
                touched: None,
                cached_before: None,
                cached_after: None,
                cold: request.cold,
            },
            pages,
            opened: Instant::now(),
            load_seconds: 0.0,
            from_disk: false,
            repeats: Vec::new(),
            kernels: Vec::new(),
            drafts: None,
            request,
        })
    }

    /// Checks the memory plan of the engine against the request.
    ///
    /// # Errors
    /// The plan's context is too short, or a step has room for fewer rows than sessions.
    pub fn start(&mut self, engine: &Engine) -> anyhow::Result<()> {
        let plan = engine.plan();
        // The plan may have shrunk the context to fit the budget.
        let needed = needed_context(&self.request.settings, self.request.tokens);
        check_context(needed, plan.context, self.positions)?;
        let most = self.request.settings.iter().filter_map(|s| s.sessions).max();
        if let Some(most) = most.filter(|most| *most > plan.chunk) {
            let chunk = plan.chunk;
            bail!(
                "a step of {most} sessions has {most} tokens, and the plan has room for {chunk}: give --chunk {most}"
            );
        }
        self.load_seconds = self.opened.elapsed().as_secs_f64();
        Ok(())
    }

    /// Runs each setting briefly, so that a GPU's kernels are compiled before measuring.
    ///
    /// # Errors
    /// A step fails or is cancelled.
    pub fn warm_up(&self, engine: &Engine, cancel: Option<&CancelToken>) -> anyhow::Result<()> {
        for setting in &self.request.settings {
            let answer = self.request.tokens.min(4);
            let feed = TokenFeed { setting: *setting, answer, seed: 0 };
            let (progress, prompted) = (&mut |_| {}, &mut || Ok(()));
            repeat(feed, engine, None, RepeatHooks { cancel, progress, prompted })?;
        }
        Ok(())
    }

    /// Touches the memory of all slots, so that the system allocates it before measuring.
    /// `progress` gets the bytes done and in total.
    ///
    /// # Errors
    /// The engine fails.
    pub fn touch(
        &mut self,
        engine: &Engine,
        progress: &mut dyn FnMut(u64, u64),
    ) -> anyhow::Result<()> {
        let since = Instant::now();
        let bytes = engine.touch_slots(progress)?;
        self.machine.touched =
            Some(TouchedMemory { bytes, seconds: since.elapsed().as_secs_f64() });
        Ok(())
    }

    /// Runs all repeats of all settings. `note` receives warnings.
    ///
    /// # Errors
    /// A step fails or is cancelled.
    pub fn measure(
        &mut self,
        engine: &Engine,
        hooks: StepHooks<'_>,
        note: &mut dyn FnMut(&str),
    ) -> anyhow::Result<()> {
        let StepHooks { cancel, progress } = hooks;
        // The roofline is for host memory; a GPU has its own.
        let disk = self.machine.disk.as_ref().map_or(f64::INFINITY, |d| d.ceiling());
        let limits = RooflineLimits { memory: self.machine.memory.bytes_per_second, disk };
        let threads = self.machine.memory.threads;
        let roofline = (!engine.device().graphics).then_some(RooflineModel {
            costs: &self.costs,
            limits,
            threads,
        });
        let n = self.request.repeats;
        let total = n as f64 * self.request.settings.len() as f64;
        for setting in &self.request.settings {
            for seed in 0..n as u64 {
                if self.machine.cold {
                    match self.pages.forget() {
                        Ok(()) => engine.forget_reads(),
                        Err(why) => {
                            self.machine.cold = false;
                            note(&format!("reads may come from the page cache: {why}"));
                        }
                    }
                }
                self.machine.cached_before =
                    self.machine.cached_before.or_else(|| self.pages.cached());
                let feed = TokenFeed { setting: *setting, answer: self.request.tokens, seed };
                let done = self.repeats.len() as f64;
                let mut within = |share| progress((done + share) / total);
                let hooks = RepeatHooks { cancel, progress: &mut within, prompted: &mut || Ok(()) };
                self.repeats.push(repeat(feed, engine, roofline, hooks)?);
            }
        }
        self.machine.cached_after = self.pages.cached();
        let is_direct = self.machine.disk.as_ref().is_some_and(|disk| disk.direct);
        self.from_disk = is_direct && engine.page_cache() == PageCache::Nothing;
        Ok(())
    }

    /// Bandwidth of the fastest phase's reads, if it contradicts the disk's remembered peak.
    ///
    /// Only reads that the page cache cannot have served count.
    pub fn contradicting_reads(&self) -> Option<ContradictingReads> {
        /// Reads that take less time say little.
        const MIN_SECONDS: f64 = 0.05;
        let phases = self.repeats.iter().flat_map(|r| [&r.prefill, &r.decode]).flatten();
        let read = phases.filter(|phase| phase.disk_seconds >= MIN_SECONDS);
        let fastest = read.map(|p| p.file_bytes as f64 / p.disk_seconds).max_by(f64::total_cmp)?;
        let remembered = self.machine.disk.as_ref().filter(|_| self.from_disk)?;
        remembered.is_contradicted(fastest).then(|| ContradictingReads {
            bytes_per_second: fastest,
            remembered: remembered.ceiling(),
        })
    }

    /// Profiles GPU kernels in one more run of the first setting.
    ///
    /// # Errors
    /// A step fails or is cancelled.
    pub fn profile(&mut self, engine: &Engine, cancel: Option<&CancelToken>) -> anyhow::Result<()> {
        let Some(setting) = self.request.settings.first().copied() else { return Ok(()) };
        let answer = self.request.tokens;
        let mut of_prompt = Vec::new();
        engine.profile(true)?;
        let feed = TokenFeed { setting, answer, seed: 0 };
        let (progress, prompted) = (&mut |_| {}, &mut || {
            of_prompt = engine.profile(true)?;
            Ok(())
        });
        repeat(feed, engine, None, RepeatHooks { cancel, progress, prompted })?;
        let of_answer = engine.profile(false)?;
        for (phase, tokens, kernels) in
            [("prefill", setting.prompt, of_prompt), ("decode", answer, of_answer)]
        {
            let n = (tokens * setting.sessions.unwrap_or(1)) as f64;
            self.kernels.extend(kernels.into_iter().map(|k| KernelProfile {
                phase,
                kernel: k.kernel,
                dispatches_per_token: k.dispatches as f64 / n,
                microseconds_per_token: k.seconds * 1e6 / n,
                microseconds_each: k.seconds * 1e6 / k.dispatches as f64,
            }));
        }
        Ok(())
    }

    /// Measures answers with drafts beside the same answers without: the first setting, once for
    /// each repeat.
    ///
    /// # Errors
    /// A step fails, or is cancelled.
    pub fn measure_drafts(
        &mut self,
        engine: &Engine,
        request: DraftRequest,
        cancel: Option<&CancelToken>,
    ) -> anyhow::Result<()> {
        let Some(setting) = self.request.settings.first().copied() else { return Ok(()) };
        let feed = TokenFeed { setting, answer: self.request.tokens, seed: 0 };
        let repeats = self.request.repeats as u64;
        let figures = DraftFigures::measure(engine, request, feed, repeats, cancel)?;
        self.drafts = Some(figures);
        Ok(())
    }

    /// Summarizes all repeats.
    pub fn report<'a>(self, engine: &'a Engine, texts: ReportTexts) -> SpeedReport<'a> {
        let mut scale = self.scale;
        if let Some(reads) = self.contradicting_reads() {
            scale.disk = Some(reads.bytes_per_second);
        }
        let contexts = ContextSummary::all(&self.request.settings, &self.repeats, scale);
        let device = engine.device();
        let phases = self.repeats.iter().flat_map(|r| [&r.prefill, &r.decode]).flatten();
        let dispatches = phases.map(|m| m.stats.dispatches).sum();
        let first = contexts.first();
        SpeedReport {
            version: crate::version::VERSION,
            system: crate::version::system(),
            options: texts.options,
            model: texts.model,
            device: &device.name,
            device_choice: &device.reason,
            dispatches,
            on: describe::device(device, dispatches),
            load_seconds: self.load_seconds,
            reader: engine.reads().to_owned(),
            machine: self.machine,
            prefill: first.and_then(|c| c.prefill.clone()),
            decode: first.and_then(|c| c.decode.clone()),
            contexts,
            peak_memory: SystemMemory::now().peak,
            plan: engine.plan(),
            layers: engine.layer_stats(),
            repeats: self.repeats,
            kernels: self.kernels,
            drafts: self.drafts,
        }
    }
}

/// Compares a report, of one budget or several, with a saved one.
///
/// # Errors
/// One of them is not a report, or they have no figure in common.
pub fn compare(now: &Value, saved: &SavedRun, tolerance: f64) -> anyhow::Result<Comparison> {
    let mut compared = rows::compare(&rows(now)?, &saved_rows(saved)?, tolerance)?;
    // All budgets of a run have equal settings: the first budget's are compared.
    let [now, before] = [now, &saved.report].map(|run| run.pointer("/budgets/0").unwrap_or(run));
    let names = ["version", "system", "device", "model", "reader"];
    compared.differences = comparison::differences(&names, now, before);
    let rates = [now, before].map(|run| &run["machine"]["memory"]["bytes_per_second"]);
    compared.differences.extend(comparison::different_rate("memory gives", rates, tolerance));
    Ok(compared)
}
