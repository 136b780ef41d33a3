//! Engine: a loaded model. Opens the device, the expert cache and the reader of a checkpoint within
//! a memory plan.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use moeflux_base::{Error, setters};
use moeflux_compute::{BankPlace, Commit, Device, DeviceOptions, KernelTime, KvFormat};
use moeflux_model::{
    blueprint::Blueprint,
    checkpoint::{Checkpoint, MatrixSource, ModelId},
    seam::{LayerState, ReadAhead, blank_weights, check_tails, config_notes},
};
use moeflux_sampling::EndTokens;

#[cfg(feature = "vision")]
use crate::vision::{EngineImages, ImageEncoder, ImageOptions};
use crate::{
    experts::{
        cache::{CacheTiers, ExpertCache, SlotAccess},
        counters::ExpertCounters,
        expert_plan::ExpertPlan,
        io::{PageCache, ReadOptions, ReaderKind},
        placement_options::PlacementOptions,
        policy::PolicyKind,
        prefetch::PrefetchMode,
        probe::{MemorySpeed, read_once},
        row_batches::RowBatches,
        row_store::RowStore,
        source::ExpertSource,
        stats::{LayerStats, ReadCounters},
        tier::{Tier, TierSize},
        trace::{TraceHeader, TraceRecorder},
        use_counts::{UseCounts, UseHistory},
        use_window::UseWindow,
    },
    runtime::{
        control::CancelToken,
        device::{ChosenDevice, DeviceRequest, OpenedDevice, WrapDevice, open_device},
        draft_head::DraftLimits,
        expert_placing::ExpertPlacing,
        forward::{Model, StepSize},
        host_experts::HostExperts,
        layer::Loader,
        model_text::ModelText,
        non_finite::NonFiniteSearch,
        plan::{MemoryPlan, MemoryRequest, scratch_shape},
        pools::LineName,
        prefill_cost::PrefillCost,
    },
    session::{
        drafts::{self, DraftMode, SharedTimes, StepTime},
        model_files::{ModelIdentity, ModelOrigin, ReopenArgs, ReopenedFiles, WrapReader},
        plan_correction::PlanCorrection,
        prefix_cache::PrefixCache,
        prefix_costs::PrefixCosts,
        timeline::RewindLimits,
        use_keeper::UseKeeper,
    },
    text::{MISSING, Text},
};

/// Progress callback of [`Engine::open`] and [`Engine::touch_slots`]: bytes done, total bytes.
pub type OpenProgress<'a> = dyn FnMut(u64, u64) + 'a;

/// Options of [`Engine::open`].
#[derive(Default)]
#[non_exhaustive]
pub struct EngineOptions {
    /// Memory budget, context length and prefill chunk.
    pub memory: MemoryRequest,
    /// Device, threads and exactness. Besides the names of devices, `auto` selects the faster
    /// device for the model, and `gpu` selects the best adapter.
    pub device: DeviceOptions,
    /// Uses of earlier runs and a recorded division, which experts beside a card are placed by.
    pub placement: PlacementOptions,
    /// Eviction policy of the expert cache.
    pub policy: PolicyKind,
    /// How experts are read: backend, queue depth, page cache.
    pub reads: ReadOptions,
    /// Prefetch of experts before their layer's router has run. Does not change results.
    pub prefetch: PrefetchMode,
    /// Drafts of answers, unless a request says otherwise. With [`DraftMode::Off`] no request has
    /// drafts, as states have no memory for them.
    pub draft: DraftMode,
    /// How images are read, by a model with a vision tower. By default none are.
    #[cfg(feature = "vision")]
    pub images: Option<ImageOptions>,
    /// Ends [`Engine::open`] at its next weight.
    pub cancel: Option<Arc<CancelToken>>,
    /// Wraps the readers of experts and of rows of tables.
    pub wrap_reader: Option<WrapReader>,
    /// Wraps the compute device.
    pub wrap_device: Option<WrapDevice>,
}

setters!(EngineOptions {
    memory: MemoryRequest,
    device: DeviceOptions,
    placement: PlacementOptions,
    policy: PolicyKind,
    reads: ReadOptions,
    prefetch: PrefetchMode,
    draft: DraftMode,
    cancel: Arc<CancelToken>,
    wrap_reader: WrapReader,
    wrap_device: WrapDevice,
});

#[cfg(feature = "vision")]
setters!(EngineOptions { images: impl Into<Option<ImageOptions>> });

impl EngineOptions {
    /// Options for files that are still arriving: every read waits for the network, so no guess is
    /// worth one, and none is too slow.
    fn for_arriving(mut self) -> Self {
        self.prefetch = PrefetchMode::Off;
        self.reads.kind = ReaderKind::Threads;
        self.reads.timeout = Some(ARRIVAL_TIMEOUT);
        self
    }
}

/// Timeout of a read whose bytes are still arriving. The download itself notices a server that has
/// fallen silent.
const ARRIVAL_TIMEOUT: Duration = Duration::from_secs(24 * 3600);

/// Bytes of experts from which on kernels compile while they are loaded. Fewer are loaded before
/// most kernels are compiled, and kernels that the prompt does not need would delay the others.
const COMPILE_AHEAD_BYTES: u64 = 1 << 30;

/// Bytes of the prefix cache on the host beside cards that the reserve of the process has room for.
const MIN_INDEX: u64 = 1 << 20;

/// A loaded model. A handle: clones share the model, and threads use it one at a time.
#[derive(Clone)]
pub struct Engine {
    shared: Arc<EngineShared>,
}

struct EngineShared {
    folder: PathBuf,
    blueprint: Blueprint,
    /// Replaced between answers.
    plan: RwLock<Arc<MemoryPlan>>,
    text: ModelText,
    device: ChosenDevice,
    origin: Arc<ModelOrigin>,
    kv_format: KvFormat,
    exact: bool,
    reads: String,
    notes: Vec<String>,
    expert_counters: Arc<ExpertCounters>,
    /// Keeps uses of experts over all runs, if they are kept.
    _uses: Option<UseKeeper>,
    draft: DraftMode,
    #[cfg(feature = "vision")]
    images: Option<ImageEncoder>,
    step_times: Arc<Mutex<SharedTimes>>,
    runtime: Arc<Mutex<Runtime>>,
    /// Live sessions.
    sessions: AtomicUsize,
}

/// State that steps mutate: device, expert cache, sequence states. Guarded by the engine's lock.
pub(crate) struct Runtime {
    pub(crate) device: Box<dyn Device>,
    pub(crate) cache: ExpertCache,
    /// The processor as a second device for experts, beside a card.
    pub(crate) host: Option<HostExperts>,
    /// When a step ran last, or the model was loaded.
    pub(crate) last_step: Instant,
    /// Recent uses of experts, where those on the card are exchanged by them.
    pub(crate) window: Option<UseWindow>,
    /// Uses by which the division of experts is corrected between answers, unless it is fixed.
    pub(super) correction: Option<PlanCorrection>,
    /// How often it was corrected.
    pub(super) corrections: u64,
    /// Rows of tables on disk.
    pub(crate) row_store: Option<RowStore>,
    pub(crate) model: Model,
    /// Arguments to reopen the model's files after a read error.
    reopen: ReopenArgs,
    /// Limits on truncating sessions.
    pub(crate) rewind: RewindLimits,
    /// Shapes of all states of a session, in layer order.
    pub(crate) layer_states: Vec<Vec<LayerState>>,
    pub(crate) draft_limits: DraftLimits,
    pub(crate) free_kept_rows: Vec<usize>,
    /// Cached prefixes for later prompts.
    pub(crate) prefix_cache: PrefixCache,
    /// Maximum bytes of sequence states; without cards, and of the prefix cache beside its states.
    pub(crate) state_limit: u64,
    /// Maximum bytes of the prefix cache on the host, where its states are on cards.
    pub(crate) index_limit: Option<u64>,
    /// Commits of the last step. Kept to reuse the allocation.
    pub(crate) step_commits: Vec<Commit>,
}

impl Engine {
    /// Loads the dense weights of a checkpoint and allocates the expert slots. Also loads all
    /// experts if the device manages its own memory and the plan has a slot for each. `progress`
    /// receives the bytes loaded and the total bytes.
    ///
    /// # Errors
    /// The checkpoint is not supported or damaged, the budget is too small, a file cannot be read,
    /// or `cancel` of the options was set.
    pub fn open(
        checkpoint: impl Into<Arc<Checkpoint>>,
        options: EngineOptions,
        progress: &mut OpenProgress<'_>,
    ) -> Result<Self, Error> {
        Self::open_shared(checkpoint.into(), options, progress)
    }

    fn open_shared(
        checkpoint: Arc<Checkpoint>,
        mut options: EngineOptions,
        progress: &mut OpenProgress<'_>,
    ) -> Result<Self, Error> {
        let is_arriving = !checkpoint.arriving().is_empty();
        let mut blueprint = Blueprint::for_checkpoint(&checkpoint)?;
        options.draft.attach_head(&checkpoint, &mut blueprint)?;
        let mut notes = Vec::new();
        #[cfg(feature = "vision")]
        let images = options.images.take().filter(|_| blueprint.images.is_some());
        #[cfg(feature = "vision")]
        let images = images.map(|options| EngineImages::new(&checkpoint, options));
        checkpoint.expect_dense(&blueprint);
        let mut options = if is_arriving { options.for_arriving() } else { options };
        let wrap = options.wrap_device.as_ref();
        let asked = DeviceRequest::of_text(&options.device, wrap);
        #[cfg(feature = "vision")]
        let plan_images = images.as_ref().map(|images| |device: &str| images.plan(device));
        #[cfg(feature = "vision")]
        let asked = DeviceRequest { images: plan_images.as_ref().map(|plan| plan as _), ..asked };
        let memory = options.memory.drafts(options.draft.max()).on_path(options.device.exact);
        let request = memory.with_reader(&checkpoint, &blueprint, &options.reads);
        let open = |model: &_| open_device(&checkpoint, model, &request, &asked);
        let mut opened = open(&blueprint);
        // A head is not worth more memory than the budget has.
        if matches!(opened, Err(Error::Plan(_))) && options.draft == DraftMode::Auto {
            blueprint.detach_drafter();
            opened = open(&blueprint);
        }
        let (mut text, OpenedDevice { mut device, mut plan, chosen }) = opened?;
        #[cfg(feature = "vision")]
        let images = images.map(|images| images.chosen(chosen.images.as_deref()));
        #[cfg(feature = "vision")]
        let images = images.and_then(|images| match images {
            Ok(images) => images,
            Err(problem) => {
                notes.push(format!("takes no images: {problem}"));
                None
            }
        });
        text.limit_prompts(plan.context);
        text.set_grammar_room(plan.bytes(LineName::Grammars));
        let pages = plan.page_cache(options.reads.access, &checkpoint, &blueprint);
        let memory = device.memory();
        // Experts that are still on their way are loaded when they are routed to.
        let holds_all = plan.holds_all && !is_arriving;
        let load_all = memory.is_some() && holds_all;
        device.split_layers(plan.card_of_layer()).map_err(Error::at(|| "opening the device"))?;
        device
            .reserve_scratch(scratch_shape(&blueprint, plan.chunk, device.kv_format()))
            .map_err(Error::at(|| "reserving the device's memory"))?;
        check_tails(&checkpoint)?;
        let source = Arc::new(ExpertSource::for_checkpoint(&checkpoint, &blueprint));
        let at_end = blueprint.own_layers();
        let tied = blueprint.reads_embed_at_end() && !device.is_same_card(0, at_end);
        let again = tied.then_some(&blueprint.embed);
        let dense = blueprint.matrices().chain(again).map(|m| m.file_bytes() as u64).sum::<u64>();
        let total = dense + if load_all { blueprint.experts_bytes() } else { 0 };
        let mut loaded = 0;
        let cancel = options.cancel.take();
        let mut progress = |bytes: u64| {
            loaded += bytes;
            progress(loaded, total);
            let is_cancelled = cancel.as_ref().is_some_and(|cancel| cancel.is_cancelled());
            if is_cancelled { Err(Error::Cancelled) } else { Ok(()) }
        };
        // The plan has room for the largest matrix on its way to the device.
        let largest = blueprint.matrices().map(MatrixSource::memory_bytes).max().unwrap_or(0);
        let ahead = ReadAhead::new(&checkpoint, blueprint.matrices(), largest);
        let model = std::thread::scope(|scope| {
            let _stop = ahead.start(scope);
            let mut loader = Loader {
                checkpoint: &checkpoint,
                ahead: &ahead,
                device: &mut *device,
                exact: options.device.exact,
                context: plan.context,
                chunk: plan.chunk,
                progress: &mut progress,
                last_order: None,
            };
            Model::load(&blueprint, &mut loader, &plan, options.prefetch)
        })?;
        let mut tier = |place, slots: &[usize], has_shared| {
            let size = TierSize { classes: plan.slot_classes(), slots, has_shared };
            Tier::new(&mut *device, &source, size, place, options.policy)
        };
        // The fastest pool holds the shared experts.
        let card = plan.card().map(|pool| tier(pool.place, &plan.slots_by_class(), true));
        let card = card.transpose()?;
        let host = tier(BankPlace::Host, &plan.host().slots_by_size(), card.is_none())?;
        let origin = Arc::new(ModelOrigin::of(&checkpoint)?);
        let reopen = ReopenArgs {
            origin: Arc::clone(&origin),
            reads: options.reads,
            slots: plan.host().slots(),
            pages,
            wrap_reader: options.wrap_reader,
        };
        let open_rows = |batches: &Arc<RowBatches>, slots| reopen.row_reader(batches, slots);
        let row_store = RowStore::open(&checkpoint, &blueprint, plan.chunk, &open_rows)?;
        let reader = reopen.reader(&source)?;
        let reads = reader.describe();
        let access = SlotAccess {
            device_lookup: memory.is_some(),
            host_in_place: memory.is_none_or(|m| m.in_place),
            holds_all,
        };
        let mut cache = ExpertCache::new(source, reader, CacheTiers { host, card }, access);
        let counted = UseCounts::of_counters(model.expert_counters(), blueprint.own_layers());
        let known = origin.known_identity().map(|identity| identity.model);
        let uses = known.zip(options.placement.use_counts.clone());
        let uses = uses.map(|(model, folder)| UseHistory::open(folder, model, counted, &mut notes));
        let followed = options.placement.followed(request.experts_on_host);
        let placing = ExpertPlacing {
            blueprint: &blueprint,
            request: &request,
            options: &followed,
            model: known,
            uses: uses.as_ref().map(UseHistory::earlier),
            threads: options.device.threads,
        };
        let host = placing.place(&mut *device, &mut plan, &mut cache)?;
        let kv_format = device.kv_format();
        let state_limit = plan.bytes(LineName::State).saturating_add(plan.bytes(LineName::Marks));
        device.limit_card_states(&plan.state_limits());
        let rewind = RewindLimits::new(&blueprint, &plan);
        let layers = blueprint.layers.iter();
        let layer_states: Vec<Vec<LayerState>> =
            layers.map(|layer| layer.layer_states(plan.context, plan.chunk)).collect();
        let shapes = layer_states.iter().flatten().map(|state| state.shape);
        let of_session = shapes.map(|shape| device.state_bytes(shape)).sum::<u64>();
        let of_all = of_session.saturating_mul(plan.sessions as u64);
        // Memory that a GPU shares with the host is taken as tokens arrive.
        let has_room = plan.card().is_some() && of_all <= plan.bytes(LineName::State);
        device.reserve_whole_states(has_room);
        device.expect_states(plan.bytes(LineName::State));
        let prefill = PrefillCost::of_plan(&blueprint, &plan);
        let costs = PrefixCosts::new(prefill, &layer_states, &*device);
        let index = plan.bytes(LineName::PrefixIndex).max(MIN_INDEX);
        let mut runtime = Runtime {
            device,
            cache,
            host: None,
            last_step: Instant::now(),
            window: None,
            correction: None,
            corrections: 0,
            row_store,
            model,
            reopen,
            rewind,
            layer_states,
            draft_limits: DraftLimits::new(&blueprint, &plan),
            free_kept_rows: (0..plan.sessions).collect(),
            prefix_cache: PrefixCache::new(costs),
            state_limit,
            index_limit: plan.card().map(|_| index),
            step_commits: Vec::new(),
        };
        let Runtime { device, cache, .. } = &mut runtime;
        cache.load_shared(&mut **device, &checkpoint, &blueprint, &mut progress)?;
        if load_all {
            if blueprint.experts_bytes() >= COMPILE_AHEAD_BYTES {
                runtime.compile_ahead(&blueprint, &plan)?;
            }
            let Runtime { device, cache, .. } = &mut runtime;
            cache.load_all(&mut **device, &mut progress)?;
        }
        let host = match load_all {
            true => runtime.correct_division(&placing, &mut plan, host)?,
            false => host,
        };
        runtime.host = host.filter(|_| plan.computed_on_host() > 0);
        let is_fixed = plan.follows_recorded() || followed.is_fixed;
        let earlier = uses.as_ref().map(UseHistory::earlier);
        runtime.watch_uses(&blueprint, &plan, earlier, is_fixed);
        let counters = Arc::clone(runtime.model.expert_counters());
        // Fills the page cache, on which the access to experts depends.
        notes.extend(blank_weights(&checkpoint, &blueprint));
        notes.extend(config_notes(&checkpoint, &blueprint));
        let runtime = Arc::new(Mutex::new(runtime));
        // Experts that all have a slot are loaded already.
        let hottest = uses.as_ref().filter(|_| !plan.holds_all);
        let hottest = hottest.map_or_else(Vec::new, |uses| uses.earlier().hottest());
        let use_keeper = uses.and_then(|uses| {
            let runtime = Arc::downgrade(&runtime);
            let warm = move |experts: &[_]| Runtime::warm_while_idle(&runtime, experts);
            UseKeeper::start(uses, Arc::clone(&counters), hottest, Box::new(warm))
        });
        let shared = EngineShared {
            folder: checkpoint.folder().into(),
            blueprint,
            plan: RwLock::new(Arc::new(plan)),
            text,
            device: chosen,
            origin,
            kv_format,
            exact: options.device.exact,
            reads,
            notes,
            expert_counters: counters,
            _uses: use_keeper,
            draft: options.draft,
            #[cfg(feature = "vision")]
            images,
            step_times: Arc::default(),
            runtime,
            sessions: AtomicUsize::new(0),
        };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// Adds file and tensor to an error about NaN or infinity, if a weight holds one.
    pub(crate) fn explain_non_finite(&self, error: Error) -> Error {
        let (source, in_memory) = {
            let cache = &self.lock().cache;
            (Arc::clone(cache.source()), cache.experts_in_memory())
        };
        NonFiniteSearch { blueprint: self.blueprint(), source: &source, in_memory }.explain(error)
    }

    /// Encoder of images; `None` for a model without a vision tower, and unless
    /// [`EngineOptions::images`] asks for one.
    #[cfg(feature = "vision")]
    pub fn images(&self) -> Option<&ImageEncoder> {
        self.shared.images.as_ref()
    }

    /// Use of the system's page cache by expert reads.
    pub fn page_cache(&self) -> PageCache {
        self.lock().reopen.pages
    }

    /// Notes on the model's files for users: weights that were probably never written.
    pub fn notes(&self) -> &[String] {
        &self.shared.notes
    }

    /// Counts a new session; false if all planned ones are alive.
    pub(crate) fn acquire_session(&self) -> bool {
        let planned = self.plan().sessions;
        let one_more = |alive| (alive < planned).then_some(alive + 1);
        self.shared.sessions.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    pub(crate) fn release_session(&self) {
        self.shared.sessions.fetch_sub(1, Ordering::Relaxed);
    }

    /// Tokenizer and chat template.
    ///
    /// # Errors
    /// The checkpoint has neither `tokenizer.json` nor `tiktoken.model`.
    pub fn text(&self) -> Result<&Text, Error> {
        self.shared.text.text().ok_or_else(|| Error::Text {
            path: self.shared.folder.join("tokenizer.json"),
            problem: MISSING.into(),
        })
    }

    /// Tokens that end an answer. Empty without a tokenizer.
    pub fn end_tokens(&self) -> &EndTokens {
        self.shared.text.end_tokens()
    }

    /// The model as data.
    pub fn blueprint(&self) -> &Blueprint {
        &self.shared.blueprint
    }

    /// Identity of the model: the same for every copy of the same weights, packed or not.
    ///
    /// # Errors
    /// The weights that identify it cannot be read. They are read when it is opened, or here if
    /// they were still arriving.
    pub fn model(&self) -> Result<ModelId, Error> {
        Ok(self.identity()?.model)
    }

    /// Identity of the model, if it has been read. Does not wait.
    pub fn known_model(&self) -> Option<ModelId> {
        self.shared.origin.known_identity().map(|identity| identity.model)
    }

    pub(crate) fn identity(&self) -> Result<ModelIdentity, Error> {
        self.shared.origin.identity()
    }

    /// Whether all files of the weights have arrived, with the digests of their publisher.
    ///
    /// # Errors
    /// A file was overwritten in place while the model is in use, or arrived with another digest.
    /// Every step fails then, until the model is opened again.
    pub fn check_files(&self) -> Result<bool, Error> {
        self.shared.origin.watch().check_now()
    }

    /// Element format of the KV cache.
    pub fn kv_format(&self) -> KvFormat {
        self.shared.kv_format
    }

    /// Whether the engine runs the exact path.
    pub fn is_exact(&self) -> bool {
        self.shared.exact
    }

    /// Folder of the checkpoint.
    pub fn folder(&self) -> &Path {
        &self.shared.folder
    }

    /// Memory plan: pools of named lines, and the division of experts.
    pub fn plan(&self) -> Arc<MemoryPlan> {
        Arc::clone(&self.shared.plan.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Corrects the division of experts between a card and the processor by their uses up to now,
    /// if that makes the experts in host memory a tenth faster. Returns whether it did; the plan
    /// has another number then.
    ///
    /// Call it between answers: an answer that goes on after a correction is rounded as no plan
    /// alone rounds it. Sessions keep their state, and their snapshots say that they are of another
    /// division. Takes as long as the card needs to exchange experts, or, mostly, microseconds.
    /// Does nothing on several cards, where experts come from disk, and to a recorded plan, see
    /// [`PlacementOptions`].
    ///
    /// # Errors
    /// The device failed.
    pub fn correct_plan(&self) -> Result<bool, Error> {
        let mut runtime = self.lock();
        let corrected = runtime.correct_plan(self.blueprint(), &self.plan())?;
        let is_corrected = corrected.is_some();
        if let Some(corrected) = corrected {
            let mut plan = self.shared.plan.write().unwrap_or_else(PoisonError::into_inner);
            *plan = Arc::new(corrected);
        }
        Ok(is_corrected)
    }

    /// The division of experts between card and processor, to be recorded for other runs. `None` if
    /// they divide none, or files are still arriving.
    pub fn expert_plan(&self) -> Option<ExpertPlan> {
        self.plan().expert_plan(self.known_model()?)
    }

    /// The device that computes, and the reason for its choice.
    pub fn device(&self) -> &ChosenDevice {
        &self.shared.device
    }

    /// Routing statistics per layer, summed over all sessions since the engine was opened. Waits
    /// for no step.
    pub fn layer_stats(&self) -> Vec<LayerStats> {
        self.shared.expert_counters.stats()
    }

    /// Uses, hits and misses of each expert, summed over all sessions since the engine was opened.
    /// Reading them waits for no step.
    pub fn expert_counters(&self) -> &ExpertCounters {
        &self.shared.expert_counters
    }

    /// Counters of expert reads since the engine was opened.
    pub fn read_counters(&self) -> ReadCounters {
        self.lock().cache.read_counters()
    }

    /// Writes to the memory of all empty slots and returns its bytes. `progress` receives the bytes
    /// done and the total bytes.
    ///
    /// The system commits memory at the first write. In a virtual machine that can take longer than
    /// reading an expert into it. Call this before a measurement to pay that cost in advance.
    ///
    /// # Errors
    /// The device failed.
    pub fn touch_slots(&self, progress: &mut OpenProgress<'_>) -> Result<u64, Error> {
        let mut runtime = self.lock();
        let Runtime { device, cache, .. } = &mut *runtime;
        cache.touch(&mut **device, progress)
    }

    /// Resets the reader's knowledge of cached pages, after the page cache has dropped the model's
    /// files ([`FilePages::forget`](crate::experts::FilePages::forget)).
    pub fn forget_reads(&self) {
        self.lock().cache.forget_reads();
    }

    /// Measures memory bandwidth: `threads` threads (default: one per physical core) read 128 MiB
    /// of slots once. Returns `None` while experts are being read, if fewer slots are filled, or if
    /// a GPU computes.
    ///
    /// Takes some milliseconds and no memory. Right before or after a measurement it sees the same
    /// load on the machine, unlike an earlier [`probe_memory`](crate::experts::probe_memory).
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

    /// How experts are read, for users: "io_uring, direct, depth 16".
    pub fn reads(&self) -> &str {
        &self.shared.reads
    }

    /// Turns profiling of GPU kernels on or off. Returns the times since the last call.
    ///
    /// # Errors
    /// The device failed.
    pub fn profile(&self, on: bool) -> Result<Vec<KernelTime>, Error> {
        self.lock().device.profile(on).map_err(Error::at(|| "measuring kernels"))
    }

    /// Starts to write the experts that each step needs to a file; `None` stops it. See
    /// [`crate::experts::Trace`].
    ///
    /// Results do not change. A device that resolves expert slots on its side must report the
    /// routing to the host, which takes time.
    ///
    /// # Errors
    /// The file cannot be written, or the model has no routed experts. A later step fails if its
    /// record cannot be written.
    pub fn record_routing(&self, file: Option<&Path>) -> Result<(), Error> {
        let (EngineShared { blueprint, folder, .. }, plan) = (&*self.shared, self.plan());
        let recorder = file.map(|file| {
            // The prefix cache could give its memory to slots.
            let fixed = plan.fixed_bytes().saturating_sub(plan.prefix_bytes());
            TraceRecorder::create(
                file,
                &TraceHeader::new(blueprint, folder, plan.slot_bytes(), fixed),
            )
        });
        let recorder = recorder.transpose()?;
        self.lock().model.set_trace_recorder(recorder);
        Ok(())
    }

    /// Drafts of answers whose requests do not say.
    pub(crate) fn draft_mode(&self) -> DraftMode {
        self.shared.draft
    }

    /// Times of steps, by which drafts are chosen.
    pub(crate) fn shared_times(&self) -> &Arc<Mutex<SharedTimes>> {
        &self.shared.step_times
    }

    /// Mean times of decode steps, by their numbers of sequences and drafts, as far as a request
    /// whose drafts are measured has run ([`DraftMode::Auto`]).
    pub fn step_times(&self) -> Vec<StepTime> {
        drafts::lock(&self.shared.step_times).measured()
    }

    /// Whether both handles refer to the same engine.
    pub(crate) fn same_engine(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Runtime> {
        self.shared.runtime.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Runtime {
    /// Starts to compile the kernels of usual steps of one session: a whole chunk, prompts of usual
    /// lengths, and a token after a short and after a long prompt. For an engine whose experts are
    /// about to be loaded, and all of them fit.
    fn compile_ahead(&mut self, blueprint: &Blueprint, plan: &MemoryPlan) -> Result<(), Error> {
        let step = |position, rows| StepSize { position, rows };
        let chunk = plan.chunk;
        let mut steps =
            vec![step(0, chunk), step(0, 256), step(0, 24), step(24, 1), step(chunk, 1)];
        steps.retain(|step| step.rows <= chunk && step.position + step.rows <= plan.context);
        let timeline = self.new_timeline(blueprint, plan)?;
        let Self { device, cache, model, .. } = self;
        let compiled = cache
            .set_placeholder_tables(&mut **device)
            .and_then(|()| model.compile_ahead(&mut **device, cache, &timeline.states, &steps));
        cache.clear_tables();
        self.drop_timeline(timeline);
        compiled
    }

    /// As [`FileWatch::check`].
    pub(crate) fn watch_files(&self) -> Result<(), Error> {
        self.reopen.origin.watch().check()
    }

    /// Reopens the files of experts and of tables after a failed read. If they are missing, the
    /// open ones stay: experts in memory need no file, and any other read reports the error.
    pub(crate) fn reopen_lost_files(&mut self) {
        let rows_failed = self.row_store.as_ref().is_some_and(RowStore::has_failed_reads);
        if !rows_failed && !self.cache.has_failed_reads() {
            return;
        }
        let found = self.reopen.open(self.cache.source(), self.row_store.as_ref());
        let Ok(Some(ReopenedFiles { source, reader, rows, watch })) = found else { return };
        *self.reopen.origin.watch() = watch;
        self.cache.replace_reader(&mut *self.device, source, reader);
        if let (Some(store), Some(rows)) = (&mut self.row_store, rows) {
            store.replace_reader(rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::{control::StepControl, device::Devices};
    use moeflux_sampling::{Sampler, Sampling};

    #[test]
    fn the_first_steps_need_no_kernel_that_was_not_compiled_ahead() {
        let asked = std::env::var("MOEFLUX_TEST_GPU").unwrap_or_else(|_| "gpu".into());
        if asked == "none" || Devices::now().adapters.is_empty() {
            eprintln!("no GPU is tested: there is none");
            return;
        }
        let engine = || {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tales/model");
            let device = DeviceOptions::default().name(asked.clone());
            let options = EngineOptions::default().device(device);
            Engine::open(Checkpoint::open(&folder).unwrap(), options, &mut |_, _| {}).unwrap()
        };
        let answer = |engine: &Engine| {
            let mut session = engine.session().unwrap();
            let mut sampler = Sampler::new(Sampling::greedy(), engine.blueprint().vocab).unwrap();
            let mut next = |tokens: &[u32]| {
                session.next(tokens, &mut sampler, &mut StepControl::default()).unwrap()
            };
            let first = next(&[7; 24]);
            [first, next(&[first])]
        };
        let (ahead, plain) = (engine(), engine());
        ahead.lock().compile_ahead(ahead.blueprint(), &ahead.plan()).unwrap();
        let kernels = || ahead.lock().device.counters().kernels;
        let compiled = kernels();
        assert!(compiled > 10, "{compiled} kernels");
        assert!(ahead.layer_stats().iter().all(|layer| layer.needed == 0));
        assert_eq!(answer(&ahead), answer(&plain));
        assert_eq!(kernels(), compiled);
    }
}
