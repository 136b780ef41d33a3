//! A loaded model, and how one is opened.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use moeflux_compute::{BankPlace, Device, DeviceOptions, KernelTime, KvFormat, State, StateShape};

use crate::{
    base::{
        error::Error,
        stats::{LayerStats, ReadCounters},
    },
    checkpoint::{Checkpoint, ModelId},
    experts::{
        cache::{CacheTiers, ExpertCache, SlotAccess},
        io::{PageCache, ReadOptions, Reader, open as open_reader},
        policy::PolicyKind,
        prefetch::PrefetchMode,
        probe::{MemorySpeed, read_once},
        source::ExpertSource,
        tier::{Tier, TierSize},
        trace::{TraceHeader, TraceRecorder},
    },
    model::blueprint::Blueprint,
    runtime::{
        device::{ChosenDevice, OpenedDevice, WrapDevice, open_device},
        forward::Model,
        layer::Loader,
        plan::{MemoryPlan, MemoryRequest, scratch_shape},
    },
    session::{prefix_cache::PrefixCache, session::Session, timeline::Rewind},
    text::{sampling::EndTokens, text::Text},
};

/// Wraps each reader of experts that is opened: for tests that shuffle, delay or fail reads.
pub type WrapReader = Box<dyn Fn(Box<dyn Reader>) -> Box<dyn Reader> + Send>;

/// How to open an engine.
#[derive(Default)]
pub struct EngineOptions {
    /// Budget, context, chunk.
    pub memory: MemoryRequest,
    /// Device, threads, exactness. Besides the names that a device has, `auto` is the one that is faster for the
    /// model, and `gpu` the best adapter that there is.
    pub device: DeviceOptions,
    /// Which expert gives way when another needs its slot.
    pub policy: PolicyKind,
    /// How experts are read.
    pub reads: ReadOptions,
    /// Whether experts are read before the layer that may need them has chosen. It changes no result.
    pub prefetch: PrefetchMode,
    /// Wraps the reader of experts.
    pub wrap_reader: Option<WrapReader>,
    /// Wraps the device.
    pub wrap_device: Option<WrapDevice>,
}

/// A loaded model. Clones share it; threads take turns.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<Shared>,
}

struct Shared {
    folder: PathBuf,
    blueprint: Blueprint,
    plan: MemoryPlan,
    text: Option<Text>,
    device: ChosenDevice,
    model: ModelId,
    kv_format: KvFormat,
    exact: bool,
    reads: String,
    runtime: Mutex<Runtime>,
    /// Sessions that live now.
    sessions: AtomicUsize,
}

/// What steps change.
pub(crate) struct Runtime {
    pub(crate) device: Box<dyn Device>,
    pub(crate) cache: ExpertCache,
    pub(crate) model: Model,
    /// How experts are found again when their files were lost.
    again: ReopenArgs,
    /// How far sessions can be cut.
    pub(crate) rewind: Rewind,
    /// All states of a session.
    pub(crate) shapes: Vec<StateShape>,
    /// Points of sessions for prompts that begin like them.
    pub(crate) kept: PrefixCache,
    /// Bytes that states may hold.
    pub(crate) state_limit: u64,
    /// The states of the last step, in memory that the next one uses again.
    pub(crate) stepped: Vec<State>,
}

impl Engine {
    /// Loads the dense weights of a checkpoint and makes the slots for its experts; where the device takes weights into
    /// memory that it manages and the plan has a slot for every expert, loads those too. `progress` gets bytes loaded and
    /// bytes to load.
    ///
    /// # Errors
    /// The checkpoint is not supported or damaged, the budget is too small, or a file cannot be read.
    pub fn open(
        checkpoint: Checkpoint,
        options: EngineOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Self, Error> {
        let blueprint = Blueprint::for_checkpoint(&checkpoint)?;
        let text = Text::for_checkpoint(&checkpoint, blueprint.vocab)?;
        let wrap = options.wrap_device.as_ref();
        let request = options.memory.with_reader(&checkpoint, &blueprint, &options.reads);
        let OpenedDevice { mut device, plan, chosen } =
            open_device(&blueprint, &request, &options.device, wrap)?;
        let pages = plan.page_cache(options.reads.access, &checkpoint, &blueprint);
        let memory = device.memory();
        let load_all = memory.is_some() && plan.holds_all;
        device
            .reserve_scratch(scratch_shape(&blueprint, plan.chunk, device.kv_format()))
            .map_err(Error::at(|| "reserving the device's memory"))?;
        let source = Arc::new(ExpertSource::for_checkpoint(&checkpoint, &blueprint));
        let dense: u64 =
            blueprint.matrices().flat_map(|m| &m.segments).map(|s| s.bytes as u64).sum();
        let total = dense + if load_all { blueprint.experts_bytes() } else { 0 };
        let mut loaded = 0;
        let mut progress = |bytes: u64| {
            loaded += bytes;
            progress(loaded, total);
        };
        let mut loader = Loader {
            checkpoint: &checkpoint,
            device: &mut *device,
            exact: options.device.exact,
            progress: &mut progress,
        };
        let model =
            Model::load(&blueprint, &mut loader, plan.chunk, plan.context, options.prefetch)?;
        let mut tier = |count, shared, place| {
            Tier::new(
                &mut *device,
                &source,
                TierSize { slots: count, shared, slot_bytes: plan.slot as usize },
                place,
                options.policy,
            )
        };
        let shared = blueprint.fused_shared_layers();
        let (host_slots, card, shared) = match plan.device_budget {
            Some(_) => (plan.host_slots, Some(tier(plan.slots, shared, BankPlace::Card)?), 0),
            None => (plan.slots, None, shared),
        };
        let host = tier(host_slots, shared, BankPlace::Host)?;
        let identity = checkpoint.identity()?;
        let again = ReopenArgs {
            folder: checkpoint.folder().into(),
            mirrors: checkpoint.mirrors().into(),
            model: identity,
            reads: options.reads,
            slots: host_slots,
            pages,
            wrap: options.wrap_reader,
        };
        let reader = again.reader(&source)?;
        let reads = reader.describe();
        let access = SlotAccess {
            device_lookup: memory.is_some(),
            host_in_place: memory.is_none_or(|m| m.in_place),
            holds_all: plan.holds_all,
        };
        let mut cache = ExpertCache::new(source, reader, CacheTiers { host, card }, access);
        cache.load_shared(&mut *device, &checkpoint, &blueprint, &mut progress)?;
        if load_all {
            cache.load_all(&mut *device, &mut progress)?;
        }
        let kv_format = device.kv_format();
        let state_limit = plan.state.saturating_add(plan.marks);
        device.limit_states(state_limit);
        let rewind = Rewind::of(&blueprint, &plan);
        let shapes = blueprint
            .layers
            .iter()
            .flat_map(|layer| layer.states(plan.context, plan.chunk))
            .collect();
        let runtime = Runtime {
            device,
            cache,
            model,
            again,
            rewind,
            shapes,
            kept: PrefixCache::default(),
            state_limit,
            stepped: Vec::new(),
        };
        let shared = Shared {
            folder: checkpoint.folder().into(),
            blueprint,
            plan,
            text,
            device: chosen,
            model: identity,
            kv_format,
            exact: options.device.exact,
            reads,
            runtime: Mutex::new(runtime),
            sessions: AtomicUsize::new(0),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// A new timeline.
    ///
    /// # Errors
    /// As many sessions as were planned for are alive, or there is no memory for its state.
    pub fn session(&self) -> Result<Session, Error> {
        let (alive, planned) = (&self.shared.sessions, self.plan().sessions);
        let one_more = |n| (n < planned).then_some(n + 1);
        if alive.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_err() {
            return Err(Error::Budget(format!(
                "the memory plan has room for {planned} session(s) at a time: drop one, or plan for more"
            )));
        }
        Session::new(self.clone()).inspect_err(|_| self.session_ended())
    }

    pub(crate) fn session_ended(&self) {
        self.shared.sessions.fetch_sub(1, Ordering::Relaxed);
    }

    /// What turns text into tokens and back.
    ///
    /// # Errors
    /// The checkpoint has neither `tokenizer.json` nor `tiktoken.model`.
    pub fn text(&self) -> Result<&Text, Error> {
        self.shared.text.as_ref().ok_or_else(|| Error::Text {
            path: self.shared.folder.join("tokenizer.json"),
            problem: "there is no such file, so text cannot be turned into tokens: download it"
                .into(),
        })
    }

    /// The tokens that end an answer. Without a tokenizer nobody knows any.
    pub(crate) fn end(&self) -> EndTokens {
        self.shared.text.as_ref().map(|text| text.end().clone()).unwrap_or_default()
    }

    /// The model as data.
    pub fn blueprint(&self) -> &Blueprint {
        &self.shared.blueprint
    }

    /// Which model it is: the same for every copy of the same weights, packed or not.
    pub fn model(&self) -> ModelId {
        self.shared.model
    }

    /// What keys and values are kept as.
    pub fn kv_format(&self) -> KvFormat {
        self.shared.kv_format
    }

    /// Whether it computes on the exact path.
    pub fn is_exact(&self) -> bool {
        self.shared.exact
    }

    /// The folder of the checkpoint.
    pub fn folder(&self) -> &Path {
        &self.shared.folder
    }

    /// What is held, and why.
    pub fn plan(&self) -> &MemoryPlan {
        &self.shared.plan
    }

    /// What computes, and why that.
    pub fn device(&self) -> &ChosenDevice {
        &self.shared.device
    }

    /// What each layer has asked its experts for, of all sessions together since the engine was opened.
    pub fn layer_stats(&self) -> Vec<LayerStats> {
        self.lock().model.layer_stats().to_vec()
    }

    /// What was read for experts since the engine was opened.
    pub fn read_counters(&self) -> ReadCounters {
        self.lock().cache.read_counters()
    }

    /// Writes to the memory of the slots that hold nothing yet, and returns how many bytes that is. `progress` gets bytes done and
    /// bytes in all.
    ///
    /// Systems hand memory out when it is first written to, and in a virtual machine that can take longer than reading an expert
    /// into it. It has to happen once in any case: here it does before something is measured.
    ///
    /// # Errors
    /// The device failed.
    pub fn touch_slots(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<u64, Error> {
        let mut runtime = self.lock();
        let Runtime { device, cache, .. } = &mut *runtime;
        cache.touch(&mut **device, progress)
    }

    /// Tells that the page cache has been made to forget the model's files ([`FilePages::forget`](crate::FilePages::forget)): what
    /// is read next is read as if it were for the first time.
    pub fn forget_reads(&self) {
        self.lock().cache.forget_reads();
    }

    /// How fast `threads` threads, by default one per physical core, read the memory of slots just now: 128 MiB, all over them, once.
    /// `None` while experts are read, if the slots that are filled are fewer, or if a card computes.
    ///
    /// It takes some milliseconds and no memory. What is computed just before or after it meets the same neighbours, which
    /// [`probe_memory`](crate::probe_memory), long before, may not have.
    ///
    /// # Errors
    /// The device failed, or a thread cannot be started.
    pub fn probe_slots(&self, threads: Option<usize>) -> Result<Option<MemorySpeed>, Error> {
        const BYTES: usize = 128 << 20;
        let slot = self.shared.blueprint.slot_bytes();
        if slot == 0 || self.shared.device.graphics {
            return Ok(None);
        }
        let mut runtime = self.lock();
        let Runtime { device, cache, .. } = &mut *runtime;
        cache
            .with_slots(&mut **device, BYTES.div_ceil(slot), |slots| read_once(slots, threads))?
            .transpose()
    }

    /// How experts are read, in words for users: "io_uring, direct, depth 16".
    pub fn reads(&self) -> &str {
        &self.shared.reads
    }

    /// Turns measuring of a card's kernels on or off; the times since it was last asked.
    ///
    /// # Errors
    /// The device failed.
    pub fn profile(&self, on: bool) -> Result<Vec<KernelTime>, Error> {
        self.lock().device.profile(on).map_err(Error::at(|| "measuring kernels"))
    }

    /// Writes to a file which experts each step needs, from now on; with `None` no longer. See [`crate::Trace`].
    ///
    /// Results stay the same. A device that looks experts up by itself must tell the host which they are, which takes time.
    ///
    /// # Errors
    /// The file cannot be written, or the model has no routed experts. Later a step fails if it cannot be written down.
    pub fn record_routing(&self, file: Option<&Path>) -> Result<(), Error> {
        let Shared { blueprint, plan, folder, .. } = &*self.shared;
        let recorder = file.map(|file| {
            TraceRecorder::create(
                file,
                &TraceHeader::new(blueprint, folder, plan.slot, plan.fixed()),
            )
        });
        let recorder = recorder.transpose()?;
        self.lock().model.set_trace_recorder(recorder);
        Ok(())
    }

    /// Whether another handle is this engine's.
    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Runtime> {
        self.shared.runtime.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How to open the files of experts, and to open them again: a disk that was gone for a while comes back as another one.
struct ReopenArgs {
    folder: PathBuf,
    mirrors: Vec<PathBuf>,
    model: ModelId,
    reads: ReadOptions,
    slots: usize,
    pages: PageCache,
    wrap: Option<WrapReader>,
}

impl ReopenArgs {
    fn reader(&self, source: &Arc<ExpertSource>) -> Result<Box<dyn Reader>, Error> {
        let reader = open_reader(source, &self.reads, self.slots, self.pages)?;
        Ok(match &self.wrap {
            Some(wrap) => wrap(reader),
            None => reader,
        })
    }

    /// The experts' files as they are now, if they are those of the model: every expert where it was.
    fn source(&self, before: &ExpertSource) -> Result<Option<Arc<ExpertSource>>, Error> {
        let checkpoint = Checkpoint::open_with(&self.folder, &self.mirrors)?;
        let now =
            ExpertSource::for_checkpoint(&checkpoint, &Blueprint::for_checkpoint(&checkpoint)?);
        let same = checkpoint.identity()? == self.model && now.layers() == before.layers();
        Ok(same.then(|| Arc::new(now)))
    }
}

impl Runtime {
    /// After a read that failed: opens the experts' files again, if they are there. As long as they are not, what is open stays:
    /// experts in memory need none, and who needs another one is told.
    pub(crate) fn find_files(&mut self) {
        if !self.cache.has_failed_reads() {
            return;
        }
        let found = self.again.source(self.cache.source()).ok().flatten();
        if let Some((source, reader)) = found.and_then(|source| {
            let reader = self.again.reader(&source).ok()?;
            Some((source, reader))
        }) {
            self.cache.replace_reader(&mut *self.device, source, reader);
        }
    }
}
