//! Opens checkpoints and engines from arguments.

use std::path::{Path, PathBuf};

use anyhow::Context;
use moeflux::{
    Checkpoint, Engine, EngineOptions, MemoryPlan, MemoryRequest,
    checkpoint::CheckpointOptions,
    experts::{Access, PrefetchMode, ReadOptions, ReaderKind},
    model::blueprint::Blueprint,
    runtime::{DeviceOptions, KvFormat},
    session::DraftMode,
    text::Text,
    tools::synth,
    vision::ImageOptions,
};
use moeflux_bench::{describe, units};

use crate::{
    args::{
        AutoSwitch, ComputeArgs, EngineArgs, HostExpertsArg, ImageArgs, IoMode, MemoryArgs,
        ModelArgs, ReadArgs, ReaderChoice, TokenizerArgs, TowerPlace,
    },
    folders,
    hub::{self, Located, ModelDownload},
    progress::Ui,
    wrong_use::WrongUse,
};

/// Requirements of a command beyond its options.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Needs {
    /// Positions that are known to be needed.
    pub(crate) positions: Option<usize>,
    /// Whether marks of sessions are needed.
    pub(crate) marks: bool,
    /// Number of concurrent sessions, if several.
    pub(crate) sessions: Option<usize>,
    /// Bytes that the command holds beside the engine.
    pub(crate) reserved: Option<u64>,
    /// Whether answers may be constrained by grammars.
    pub(crate) grammars: bool,
    /// How images are read, if any are.
    pub(crate) images: Option<ImageArgs>,
    /// Whether a session is saved, for which all weights must have arrived.
    pub(crate) saves: bool,
    /// Whether uses of experts in other runs are left out, so that runs are alike.
    pub(crate) ignores_uses: bool,
}

impl Needs {
    /// Adds the memory of a download.
    pub(crate) fn hold(&mut self, download: Option<&ModelDownload>) {
        if let Some(download) = download {
            self.reserved = Some(self.reserved.unwrap_or(0).saturating_add(download.memory()));
        }
    }
}

impl MemoryArgs {
    /// Memory request of a command that never goes back in a session, unless it is asked for.
    pub(crate) fn request(&self) -> MemoryRequest {
        MemoryRequest::default()
            .budget(self.memory)
            .card_budgets(self.gpu_memory)
            .experts_on_host(self.experts_on_host.clone().unwrap_or_default().how)
            .context(self.ctx.map(Into::into))
            .chunk(self.chunk.map(Into::into))
            .slots(self.slots.map(Into::into))
            .state(self.state_memory)
            .marks(self.prefix_memory.unwrap_or(0))
    }
}

impl EngineArgs {
    /// Memory request for a checkpoint, including its readers' memory.
    pub(crate) fn request(&self, checkpoint: &Checkpoint, blueprint: &Blueprint) -> MemoryRequest {
        self.memory.request().with_reader(checkpoint, blueprint, &self.reads.options())
    }
}

impl ComputeArgs {
    pub(crate) fn options(&self) -> DeviceOptions {
        DeviceOptions::default()
            .name(self.device.clone())
            .threads(self.threads.map(Into::into))
            .exact(self.exact)
            .kv_format(self.kv)
            .isa(self.isa.clone())
            .host_reads(self.bus_reads.map(Into::into))
            .pipelines(folders::pipelines())
    }

    /// How images are read, if they are.
    fn images(&self, images: ImageArgs) -> Option<ImageOptions> {
        let mut device = self.options().host_reads(None);
        // It is the device of the text.
        device.name = None;
        let options = ImageOptions::default()
            .device(device)
            .max_tokens(images.image_max_tokens)
            .row_bytes(images.image_memory)
            .resident(images.vision == TowerPlace::Resident);
        (images.vision != TowerPlace::Off).then_some(options)
    }

    /// Format of the KV cache on the CPU.
    pub(crate) fn kv_format(&self) -> KvFormat {
        let exact = self.exact || self.device == "reference";
        self.kv.unwrap_or(if exact { KvFormat::F32 } else { KvFormat::F16 })
    }
}

impl From<AutoSwitch> for PrefetchMode {
    fn from(switch: AutoSwitch) -> Self {
        match switch {
            AutoSwitch::Auto => PrefetchMode::Auto,
            AutoSwitch::On => PrefetchMode::On,
            AutoSwitch::Off => PrefetchMode::Off,
        }
    }
}

impl ReadArgs {
    pub(crate) fn options(&self) -> ReadOptions {
        ReadOptions::default()
            .kind(match self.reader {
                ReaderChoice::Auto => ReaderKind::Auto,
                ReaderChoice::Uring => ReaderKind::Uring,
                ReaderChoice::Threads => ReaderKind::Threads,
            })
            .access(match self.io {
                IoMode::Auto => Access::Auto,
                IoMode::Direct => Access::Direct,
                IoMode::Buffered => Access::Buffered,
            })
    }

    /// Whether any reading option was given.
    fn any_given(&self) -> bool {
        self.reader != ReaderChoice::Auto || self.io != IoMode::Auto || !self.mirror.is_empty()
    }
}

/// Opens the requested checkpoint, or the built-in one.
///
/// # Errors
/// It cannot be opened.
pub(crate) fn checkpoint(
    args: &ModelArgs,
    mirrors: &[PathBuf],
    ui: Ui,
) -> anyhow::Result<Checkpoint> {
    let located =
        args.model.as_deref().map(|model| hub::located(model, args.yes, ui)).transpose()?;
    args.scaled(checkpoint_in(located.as_deref(), &args.open_options(mirrors), ui)?)
}

impl ModelArgs {
    fn open_options(&self, mirrors: &[PathBuf]) -> CheckpointOptions {
        self.tokenizer.open_options().mirrors(mirrors.to_vec())
    }

    /// A checkpoint with the RoPE scaling that was asked for.
    fn scaled(&self, mut checkpoint: Checkpoint) -> anyhow::Result<Checkpoint> {
        if let Some(scaling) = self.rope_scaling {
            checkpoint.scale_rope(scaling)?;
        }
        Ok(checkpoint)
    }
}

impl TokenizerArgs {
    /// Options to open a checkpoint with.
    pub(crate) fn open_options(&self) -> CheckpointOptions {
        CheckpointOptions::default().tokenizer_pre(self.tokenizer_pre.clone())
    }
}

/// As [`checkpoint`], but a model of the Hub is opened while it is downloaded. One that has mirrors
/// is downloaded first.
///
/// # Errors
/// As [`checkpoint`].
pub(crate) fn streamed(
    args: &ModelArgs,
    mirrors: &[PathBuf],
    ui: Ui,
) -> anyhow::Result<(Checkpoint, Option<ModelDownload>)> {
    let Some(model) = args.model.as_deref().filter(|_| mirrors.is_empty()) else {
        return Ok((checkpoint(args, mirrors, ui)?, None));
    };
    let Located { path, download } = hub::streamed(model, args.yes, ui)?;
    let arriving = download.as_ref().map(ModelDownload::arriving).unwrap_or_default();
    let checkpoint = Checkpoint::open_with(&path, &args.open_options(&[]).arriving(arriving));
    let checkpoint = ModelDownload::cause(download.as_ref(), checkpoint)?;
    checkpoint.notes().iter().for_each(|note| ui.note(note));
    Ok((args.scaled(checkpoint)?, download))
}

/// Opens a checkpoint with options, or the built-in one.
///
/// # Errors
/// It cannot be opened.
pub(crate) fn checkpoint_in(
    folder: Option<&Path>,
    options: &CheckpointOptions,
    ui: Ui,
) -> anyhow::Result<Checkpoint> {
    match folder {
        Some(folder) => {
            let checkpoint = Checkpoint::open_with(folder, options)?;
            checkpoint.notes().iter().for_each(|note| ui.note(note));
            Ok(checkpoint)
        }
        None if !options.mirrors.is_empty() => {
            Err(WrongUse("the built-in model has no mirrors: give --model too".into()).into())
        }
        None if options.tokenizer_pre.is_some() => {
            let problem = "--tokenizer-pre is for GGUF files: give --model too";
            Err(WrongUse(problem.into()).into())
        }
        None => built_in(folders::cache().as_deref(), ui),
    }
}

/// Synthetic checkpoint of a preset: headers without weights.
///
/// # Errors
/// The preset does not exist.
pub(crate) fn preset(name: &str) -> anyhow::Result<Checkpoint> {
    let options = synth::Options::new(synth::Preset::by_name(name)?.config());
    Ok(synth::plan(&options)?.checkpoint()?)
}

/// Built-in model: from the cache folder if that can be written, else from the program itself.
fn built_in(cache: Option<&Path>, ui: Ui) -> anyhow::Result<Checkpoint> {
    let unpacked = cache.context("this user has no home folder").and_then(|cache| {
        let folder = cache.join(moeflux_tales::FOLDER);
        moeflux::checkpoint::unpack_embedded(&moeflux_tales::FILES, &folder)?;
        Ok(Checkpoint::open(&folder)?)
    });
    unpacked.or_else(|reason| {
        ui.note(format_args!(
            "the built-in model is read from the program itself, as it cannot be unpacked: {reason}"
        ));
        Ok(Checkpoint::embedded(&moeflux_tales::FILES)?)
    })
}

/// A checkpoint with the drafter that was asked for, or with the built-in model's own one.
fn with_drafter(checkpoint: Checkpoint, args: &EngineArgs) -> anyhow::Result<Checkpoint> {
    let is_built_in = args.model.model.is_none() && args.draft() != DraftMode::Off;
    let drafter = match &args.drafter {
        Some(folder) => Checkpoint::open(folder).context("--drafter")?,
        None if is_built_in => {
            let unpacked = folders::cache().context("no cache folder").and_then(|cache| {
                let folder = cache.join(moeflux_tales_head::FOLDER);
                moeflux::checkpoint::unpack_embedded(&moeflux_tales_head::FILES, &folder)?;
                Ok(Checkpoint::open(&folder)?)
            });
            unpacked.or_else(|_| Checkpoint::embedded(&moeflux_tales_head::FILES))?
        }
        None => return Ok(checkpoint),
    };
    Ok(checkpoint.with_drafter(drafter)?)
}

/// Text side of a model without its weights; `None` without a tokenizer.
///
/// # Errors
/// A file is not read, or the model is not supported.
pub(crate) fn text(checkpoint: &Checkpoint) -> anyhow::Result<Option<Text>> {
    let model = Blueprint::for_checkpoint(checkpoint)?;
    let mut text = Text::for_checkpoint(checkpoint, model.vocab)?;
    if let Some(text) = &mut text {
        text.set_image_token(model.images.map(|images| images.placeholder));
    }
    Ok(text)
}

/// Loads a model.
///
/// # Errors
/// The model cannot be opened, or the budget is too small.
pub(crate) fn engine(args: &EngineArgs, needs: Needs, ui: Ui) -> anyhow::Result<Engine> {
    engine_from(checkpoint(&args.model, &args.reads.mirror, ui)?, args, needs, ui)
}

/// Loads a model, of the Hub while it is downloaded, unless a session is saved.
///
/// # Errors
/// As [`engine`].
pub(crate) fn streamed_engine(
    args: &EngineArgs,
    mut needs: Needs,
    ui: Ui,
) -> anyhow::Result<(Engine, Option<ModelDownload>)> {
    if needs.saves {
        return Ok((engine(args, needs, ui)?, None));
    }
    let (checkpoint, download) = streamed(&args.model, &args.reads.mirror, ui)?;
    needs.hold(download.as_ref());
    let engine = engine_from(checkpoint, args, needs, ui);
    Ok((ModelDownload::cause(download.as_ref(), engine)?, download))
}

/// Loads a model from an open checkpoint.
///
/// # Errors
/// As [`engine`].
pub(crate) fn engine_from(
    checkpoint: Checkpoint,
    args: &EngineArgs,
    needs: Needs,
    ui: Ui,
) -> anyhow::Result<Engine> {
    let mut memory = args.memory.request();
    memory.context = memory.context.or(needs.positions);
    memory.sessions = needs.sessions;
    memory.reserved = needs.reserved;
    memory.grammars = needs.grammars;
    if needs.marks {
        memory.marks = args.memory.prefix_memory;
    }
    let experts_on_host = args.memory.experts_on_host.as_ref();
    let mut placement = HostExpertsArg::placement(experts_on_host)?;
    placement.use_counts = placement.use_counts.filter(|_| !needs.ignores_uses);
    let options = EngineOptions::default()
        .memory(memory)
        .device(args.compute.options())
        .placement(placement.clone())
        .prefetch(args.reads.prefetch.into())
        .draft(args.draft())
        .policy(args.memory.policy)
        .reads(args.reads.options())
        .images(needs.images.and_then(|images| args.compute.images(images)));
    let checkpoint = with_drafter(checkpoint, args)?;
    let engine = {
        let bar = ui.bytes("loading");
        Engine::open(checkpoint, options, &mut |done, total| bar.bytes(done, total))?
    };
    for note in engine.notes() {
        ui.note(note);
    }
    if args.reads.any_given() {
        ui.note(format_args!("experts are read by {}", engine.reads()));
    }
    for note in plan_notes(&engine.plan(), &args.memory) {
        ui.note(note);
    }
    HostExpertsArg::record(experts_on_host, &placement, engine.expert_plan().as_ref(), ui)?;
    Ok(engine)
}

/// Notes on a plan that works, but not well.
pub(crate) fn plan_notes(plan: &MemoryPlan, asked: &MemoryArgs) -> Vec<String> {
    let mut notes = Vec::new();
    if plan.context_shrunk {
        notes.push(format!(
            "the context is reduced to {} tokens to fit the budget of {}; --ctx N asks for more",
            plan.context,
            units::memory(plan.dense_pools().iter().map(|pool| pool.budget).sum())
        ));
    }
    let slots = plan.slots().max(plan.host().slots());
    if !plan.holds_all && slots < plan.working_set {
        // A reduced context would grow with the budget; the advice keeps it.
        let context = plan.context_shrunk.then(|| format!(" with --ctx {}", plan.context));
        notes.push(format!(
            "there are slots for {}, but one token needs {}: nearly every one is read from disk; {} {}MiB{} \
             would hold them",
            units::plural(slots as u64, "expert"),
            plan.working_set,
            if plan.card().is_some() { "--gpu-memory" } else { "--memory" },
            plan.budget_for_token().div_ceil(1 << 20),
            context.unwrap_or_default()
        ));
    }
    if let Some(times) = plan.expert_times() {
        notes.push(describe::division(plan, times));
    }
    if asked.gpu_memory.is_some() && plan.card().is_none() {
        notes.push(
            "--gpu-memory has no effect: the device that computes has no separate memory"
                .to_owned(),
        );
    }
    notes
}
