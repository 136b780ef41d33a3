//! From options to an opened model.

use std::path::{Path, PathBuf};

use anyhow::Context;
use moeflux::{
    Access, Blueprint, Checkpoint, ChosenDevice, DeviceOptions, Engine, EngineOptions, KvFormat,
    MemoryPlan, MemoryRequest, PrefetchMode, ReadOptions, ReaderKind, synth,
};

use crate::{
    WrongUse,
    args::{ComputeArgs, EngineArgs, Io, MemoryArgs, ModelArgs, ReadArgs, ReaderName, When},
    folders,
    progress::Ui,
    units,
};

/// What a command needs beside what its options say.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Needs {
    /// Positions that are known to be needed.
    pub(crate) positions: Option<usize>,
    /// Whether points of sessions are kept beside the sessions.
    pub(crate) marks: bool,
    /// Sessions that live at the same time, if there are several.
    pub(crate) sessions: Option<usize>,
}

impl MemoryArgs {
    /// What a plan is asked for by a command that goes forward only.
    fn request(&self) -> MemoryRequest {
        MemoryRequest {
            budget: self.memory,
            device_budget: self.gpu_memory,
            context: self.ctx.map(Into::into),
            chunk: self.chunk.map(Into::into),
            slots: self.slots.map(Into::into),
            state: self.state_memory,
            marks: Some(0),
            ..MemoryRequest::default()
        }
    }
}

impl EngineArgs {
    /// What the plan for a checkpoint is asked for by such a command, with the memory of what would read it.
    pub(crate) fn request(&self, checkpoint: &Checkpoint, blueprint: &Blueprint) -> MemoryRequest {
        self.memory.request().with_reader(checkpoint, blueprint, &self.reads.options())
    }
}

impl ComputeArgs {
    pub(crate) fn options(&self) -> DeviceOptions {
        DeviceOptions {
            name: Some(self.device.clone()),
            threads: self.threads.map(Into::into),
            exact: self.exact,
            kv_format: self.kv,
            isa: self.isa.clone(),
        }
    }

    /// What the processor keeps keys and values as with these options.
    pub(crate) fn kv_format(&self) -> KvFormat {
        let exact = self.exact || self.device == "reference";
        self.kv.unwrap_or(if exact { KvFormat::F32 } else { KvFormat::F16 })
    }
}

impl From<When> for PrefetchMode {
    fn from(when: When) -> Self {
        match when {
            When::Auto => PrefetchMode::Auto,
            When::On => PrefetchMode::On,
            When::Off => PrefetchMode::Off,
        }
    }
}

impl ReadArgs {
    pub(crate) fn options(&self) -> ReadOptions {
        ReadOptions {
            kind: match self.reader {
                ReaderName::Auto => ReaderKind::Auto,
                ReaderName::Uring => ReaderKind::Uring,
                ReaderName::Threads => ReaderKind::Threads,
            },
            access: match self.io {
                Io::Auto => Access::Auto,
                Io::Direct => Access::Direct,
                Io::Buffered => Access::Buffered,
            },
            ..ReadOptions::default()
        }
    }

    /// Whether the user chose something.
    fn is_chosen(&self) -> bool {
        self.reader != ReaderName::Auto || self.io != Io::Auto || !self.mirror.is_empty()
    }
}

/// Opens the checkpoint that was asked for, or the one in the box.
///
/// # Errors
/// It cannot be opened.
pub(crate) fn checkpoint(
    args: &ModelArgs,
    mirrors: &[PathBuf],
    ui: Ui,
) -> anyhow::Result<Checkpoint> {
    checkpoint_in(args.model.as_deref(), mirrors, ui)
}

/// Opens the checkpoint in a folder and its mirrors, or the one in the box.
///
/// # Errors
/// It cannot be opened.
pub(crate) fn checkpoint_in(
    folder: Option<&Path>,
    mirrors: &[PathBuf],
    ui: Ui,
) -> anyhow::Result<Checkpoint> {
    match folder {
        Some(folder) => Ok(Checkpoint::open_with(folder, mirrors)?),
        None if !mirrors.is_empty() => {
            Err(WrongUse("the built-in model has no mirrors: give --model too".into()).into())
        }
        None => built_in(folders::cache().as_deref(), ui),
    }
}

/// What synth would write for a preset: headers without weights.
///
/// # Errors
/// There is no such preset.
pub(crate) fn preset(name: &str) -> anyhow::Result<Checkpoint> {
    let options = synth::Options::new(synth::Preset::by_name(name)?.config());
    Ok(Checkpoint::planned(&synth::plan(&options)?)?)
}

/// The built-in model, from the cache folder where that can be written, else from the program itself.
fn built_in(cache: Option<&Path>, ui: Ui) -> anyhow::Result<Checkpoint> {
    let unpacked = cache.context("this user has no home folder").and_then(|cache| {
        let folder = moeflux::unpack_embedded(cache)?;
        Ok(Checkpoint::open(&folder)?)
    });
    unpacked.or_else(|reason| {
        ui.note(format_args!(
            "the built-in model is read from the program itself, as it cannot be unpacked: {reason}"
        ));
        Ok(Checkpoint::embedded()?)
    })
}

/// Loads a model.
///
/// # Errors
/// The model cannot be opened, or the budget is too small.
pub(crate) fn engine(args: &EngineArgs, needs: Needs, ui: Ui) -> anyhow::Result<Engine> {
    engine_of(checkpoint(&args.model, &args.reads.mirror, ui)?, args, needs, ui)
}

/// [`engine`] of a checkpoint that is open.
///
/// # Errors
/// As [`engine`].
pub(crate) fn engine_of(
    checkpoint: Checkpoint,
    args: &EngineArgs,
    needs: Needs,
    ui: Ui,
) -> anyhow::Result<Engine> {
    let mut memory = args.memory.request();
    memory.context = memory.context.or(needs.positions);
    memory.sessions = needs.sessions;
    if needs.marks {
        memory.marks = None;
    }
    let options = EngineOptions {
        memory,
        device: args.compute.options(),
        prefetch: args.reads.prefetch.into(),
        policy: args.memory.policy,
        reads: args.reads.options(),
        ..EngineOptions::default()
    };
    let engine = {
        let bar = ui.bytes("loading");
        Engine::open(checkpoint, options, &mut |done, total| bar.bytes(done, total))?
    };
    if args.reads.is_chosen() {
        ui.note(format_args!("experts are read by {}", engine.reads()));
    }
    for note in plan_notes(engine.plan(), &args.memory) {
        ui.note(note);
    }
    Ok(engine)
}

/// What a user should know of a plan that works, but not well.
pub(crate) fn plan_notes(plan: &MemoryPlan, asked: &MemoryArgs) -> Vec<String> {
    let mut notes = Vec::new();
    if plan.context_shrunk {
        notes.push(format!(
            "the context is shrunk to {} tokens to fit the budget of {}; --ctx N asks for more",
            plan.context,
            units::memory(plan.slots_limit())
        ));
    }
    let slots = plan.slots.max(plan.host_slots);
    if !plan.holds_all && slots < plan.working_set {
        // A context that was shrunk takes its part of what a budget has more.
        let context = plan.context_shrunk.then(|| format!(" with --ctx {}", plan.context));
        notes.push(format!(
            "there are slots for {}, but one token needs {}: nearly every one is read from disk; {} {}MiB{} \
             would hold them",
            units::plural(slots as u64, "expert"),
            plan.working_set,
            if plan.device_budget.is_some() { "--gpu-memory" } else { "--memory" },
            plan.budget_for_token().div_ceil(1 << 20),
            context.unwrap_or_default()
        ));
    }
    if asked.gpu_memory.is_some() && plan.device_budget.is_none() {
        notes.push("--gpu-memory has no effect: what computes has no memory of its own".to_owned());
    }
    notes
}

/// What computed, for closing lines: nobody should mistake a fall back for a result.
pub(crate) fn on(device: &ChosenDevice, dispatches: u64) -> String {
    let ChosenDevice { name, graphics, reason } = device;
    match graphics {
        true => format!("on {name}, {} ({reason})", units::plural(dispatches, "GPU dispatch")),
        false => format!("on {name} ({reason})"),
    }
}

/// Peak memory of the host and, where weights lie on a card, what is planned there.
pub(crate) fn peak(plan: &MemoryPlan, peak: u64) -> String {
    let host = format!("peak memory {} of {}", units::memory(peak), units::memory(plan.budget));
    match plan.device_budget {
        Some(budget) => {
            format!(
                "{host}, on the card {} of {}",
                units::memory(plan.total()),
                units::memory(budget)
            )
        }
        None => host,
    }
}
