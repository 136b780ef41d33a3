//! Engine: a loaded model. Opens the device, the expert cache and the reader of a checkpoint within
//! a memory plan.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use moeflux_base::{Error, setters};
use moeflux_compute::{BankPlace, Commit, Device, DeviceOptions, KernelTime, KvFormat};
use moeflux_model::{
    blueprint::Blueprint,
    checkpoint::{Checkpoint, CheckpointOptions, MatrixSource, ModelId, RopeScaling},
    seam::{LayerState, ReadAhead, blank_weights, check_tails, untied_head},
};
use moeflux_sampling::EndTokens;

use crate::{
    experts::{
        cache::{CacheTiers, ExpertCache, SlotAccess},
        counters::ExpertCounters,
        io::{PageCache, ReadOptions, Reader, ReaderKind, open as open_reader, open_rows},
        placement::ExpertsOnHost,
        policy::PolicyKind,
        prefetch::PrefetchMode,
        probe::{MemorySpeed, read_once},
        row_batches::RowBatches,
        row_store::{ReopenedRows, RowStore},
        source::ExpertSource,
        stats::{LayerStats, ReadCounters},
        tier::{Tier, TierSize},
        trace::{TraceHeader, TraceRecorder},
    },
    runtime::{
        device::{ChosenDevice, OpenedDevice, WrapDevice, open_device},
        draft_head::DraftLimits,
        expert_probe::{ProbeSlots, measure},
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
        file_watch::FileWatch,
        prefix_cache::PrefixCache,
        prefix_costs::PrefixCosts,
        timeline::RewindLimits,
    },
    text::{MISSING, Text},
};

/// Wraps each reader of experts or of rows of tables that is opened. For tests that shuffle, delay
/// or fail reads.
pub type WrapReader = Box<dyn Fn(Box<dyn Reader>) -> Box<dyn Reader> + Send>;

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
    /// Eviction policy of the expert cache.
    pub policy: PolicyKind,
    /// How experts are read: backend, queue depth, page cache.
    pub reads: ReadOptions,
    /// Prefetch of experts before their layer's router has run. Does not change results.
    pub prefetch: PrefetchMode,
    /// Drafts of answers, unless a request says otherwise. With [`DraftMode::Off`] no request has
    /// drafts, as states have no memory for them.
    pub draft: DraftMode,
    /// Wraps the readers of experts and of rows of tables.
    pub wrap_reader: Option<WrapReader>,
    /// Wraps the compute device.
    pub wrap_device: Option<WrapDevice>,
}

setters!(EngineOptions {
    memory: MemoryRequest,
    device: DeviceOptions,
    policy: PolicyKind,
    reads: ReadOptions,
    prefetch: PrefetchMode,
    draft: DraftMode,
    wrap_reader: WrapReader,
    wrap_device: WrapDevice,
});

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
    plan: MemoryPlan,
    text: ModelText,
    device: ChosenDevice,
    origin: Arc<ModelOrigin>,
    kv_format: KvFormat,
    exact: bool,
    reads: String,
    notes: Vec<String>,
    expert_counters: Arc<ExpertCounters>,
    draft: DraftMode,
    step_times: Arc<Mutex<SharedTimes>>,
    runtime: Mutex<Runtime>,
    /// Live sessions.
    sessions: AtomicUsize,
}

/// State that steps mutate: device, expert cache, sequence states. Guarded by the engine's lock.
pub(crate) struct Runtime {
    pub(crate) device: Box<dyn Device>,
    pub(crate) cache: ExpertCache,
    /// The processor as a second device for experts, beside a card.
    pub(crate) host: Option<HostExperts>,
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
    /// The checkpoint is not supported or damaged, the budget is too small, or a file cannot be
    /// read.
    pub fn open(
        checkpoint: Checkpoint,
        options: EngineOptions,
        progress: &mut OpenProgress<'_>,
    ) -> Result<Self, Error> {
        let is_arriving = !checkpoint.arriving().is_empty();
        let mut blueprint = Blueprint::for_checkpoint(&checkpoint)?;
        options.draft.attach_head(&checkpoint, &mut blueprint)?;
        checkpoint.expect_dense(&blueprint);
        let options = if is_arriving { options.for_arriving() } else { options };
        let wrap = options.wrap_device.as_ref();
        let memory = options.memory.drafts(options.draft.max());
        let request = memory.with_reader(&checkpoint, &blueprint, &options.reads);
        let open = |model: &_| open_device(&checkpoint, model, &request, &options.device, wrap);
        let mut opened = open(&blueprint);
        // A head is not worth more memory than the budget has.
        if matches!(opened, Err(Error::Plan(_))) && options.draft == DraftMode::Auto {
            blueprint.detach_drafter();
            opened = open(&blueprint);
        }
        let (mut text, OpenedDevice { mut device, mut plan, chosen }) = opened?;
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
        let mut progress = |bytes: u64| {
            loaded += bytes;
            progress(loaded, total);
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
        let origin = Arc::new(ModelOrigin {
            folder: checkpoint.folder().into(),
            options: checkpoint.options(),
            rope_scaling: checkpoint.rope_scaling(),
            identity: OnceLock::new(),
            watch: Mutex::new(FileWatch::new(Arc::clone(checkpoint.files()))),
        });
        // Samples of experts that are still arriving would delay the first token.
        if origin.options.arriving.is_empty() {
            origin.identify(&checkpoint)?;
        }
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
        cache.set_placement(plan.placement().cloned());
        let mut host = HostExperts::with(&mut *device, &plan, &blueprint, options.device.threads)?;
        // A card that cannot read host memory leaves all of these experts to the host.
        if request.experts_on_host == ExpertsOnHost::Auto
            && plan.divides_experts()
            && let Some(processor) = &mut host
        {
            let times = match request.expert_times {
                Some(times) => times,
                None => {
                    let slots = ProbeSlots::of_cache(&cache, &blueprint);
                    measure(&mut *device, processor, &slots, &blueprint)?
                }
            };
            plan.divide_experts(&blueprint, times);
            cache.set_placement(plan.placement().cloned());
            processor.set_placement(&mut *device, plan.placement())?;
        }
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
        if load_all
            && request.expert_times.is_none()
            && let Some(times) = plan.expert_times().copied()
            && let Some(processor) = host.take()
        {
            let corrected = runtime.correct_expert_times(&blueprint, &mut plan, times, processor);
            let (times, mut processor) = corrected?;
            plan.divide_experts(&blueprint, times);
            runtime.cache.set_placement(plan.placement().cloned());
            processor.set_placement(&mut *runtime.device, plan.placement())?;
            host = Some(processor);
        }
        runtime.host = host.filter(|_| plan.computed_on_host() > 0);
        // Fills the page cache, on which the access to experts depends.
        let mut notes = blank_weights(&checkpoint, &blueprint);
        notes.extend(untied_head(&checkpoint, &blueprint));
        let shared = EngineShared {
            folder: checkpoint.folder().into(),
            blueprint,
            plan,
            text,
            device: chosen,
            origin,
            kv_format,
            exact: options.device.exact,
            reads,
            notes,
            expert_counters: Arc::clone(runtime.model.expert_counters()),
            draft: options.draft,
            step_times: Arc::default(),
            runtime: Mutex::new(runtime),
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
        self.shared.origin.identity.get().map(|identity| identity.model)
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

    /// Memory plan: pools of named lines.
    pub fn plan(&self) -> &MemoryPlan {
        &self.shared.plan
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
        let EngineShared { blueprint, plan, folder, .. } = &*self.shared;
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

/// Identities of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModelIdentity {
    pub(crate) model: ModelId,
    /// Identity of the model in these very files.
    pub(crate) files: ModelId,
}

/// Files of a model, and the identity that they had when the model was opened.
struct ModelOrigin {
    folder: PathBuf,
    options: CheckpointOptions,
    rope_scaling: Option<RopeScaling>,
    identity: OnceLock<ModelIdentity>,
    watch: Mutex<FileWatch>,
}

impl ModelOrigin {
    /// The files as they are now.
    fn checkpoint(&self) -> Result<Checkpoint, Error> {
        let mut checkpoint = Checkpoint::open_with(&self.folder, &self.options)?;
        if let Some(scaling) = self.rope_scaling {
            checkpoint.scale_rope(scaling)?;
        }
        Ok(checkpoint)
    }

    fn watch(&self) -> MutexGuard<'_, FileWatch> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn identity(&self) -> Result<ModelIdentity, Error> {
        match self.identity.get() {
            Some(identity) => Ok(*identity),
            None => self.identify(&self.checkpoint()?),
        }
    }

    /// Reads the identity from an opened checkpoint, and keeps it.
    fn identify(&self, checkpoint: &Checkpoint) -> Result<ModelIdentity, Error> {
        let model = checkpoint.identity()?;
        let files = checkpoint.identity_of_files(model);
        Ok(*self.identity.get_or_init(|| ModelIdentity { model, files }))
    }
}

/// Arguments to open the files of experts and of tables, and to reopen them after a disk was
/// detached: it may return as another device.
struct ReopenArgs {
    origin: Arc<ModelOrigin>,
    reads: ReadOptions,
    slots: usize,
    pages: PageCache,
    wrap_reader: Option<WrapReader>,
}

/// Files that were opened again, and their readers.
struct ReopenedFiles {
    source: Arc<ExpertSource>,
    reader: Box<dyn Reader>,
    rows: Option<ReopenedRows>,
    watch: FileWatch,
}

impl ReopenArgs {
    /// Reader of experts.
    fn reader(&self, source: &Arc<ExpertSource>) -> Result<Box<dyn Reader>, Error> {
        let reader = open_reader(source, &self.reads, self.slots, self.pages)?;
        Ok(self.wrap(reader))
    }

    /// Reader of batches of rows, for this number of slots.
    fn row_reader(
        &self,
        batches: &Arc<RowBatches>,
        slots: usize,
    ) -> Result<Box<dyn Reader>, Error> {
        Ok(self.wrap(open_rows(batches, &self.reads, slots, self.pages)?))
    }

    fn wrap(&self, reader: Box<dyn Reader>) -> Box<dyn Reader> {
        match &self.wrap_reader {
            Some(wrap) => wrap(reader),
            None => reader,
        }
    }

    /// The files as they are now. `None` if they belong to another model, or an expert or a row has
    /// moved.
    fn open(
        &self,
        previous: &ExpertSource,
        row_store: Option<&RowStore>,
    ) -> Result<Option<ReopenedFiles>, Error> {
        let checkpoint = self.origin.checkpoint()?;
        let blueprint = Blueprint::for_checkpoint(&checkpoint)?;
        let source = ExpertSource::for_checkpoint(&checkpoint, &blueprint);
        let is_other = match self.origin.identity.get() {
            Some(identity) => checkpoint.identity()? != identity.model,
            None => false,
        };
        if is_other || source.layers() != previous.layers() {
            return Ok(None);
        }
        let open_rows = |batches: &Arc<RowBatches>, slots| self.row_reader(batches, slots);
        let rows = match row_store {
            Some(store) => match store.reopen(&checkpoint, &blueprint, &open_rows)? {
                Some(rows) => Some(rows),
                None => return Ok(None),
            },
            None => None,
        };
        let source = Arc::new(source);
        let watch = FileWatch::new(Arc::clone(checkpoint.files()));
        Ok(Some(ReopenedFiles { reader: self.reader(&source)?, source, rows, watch }))
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
        ahead.lock().compile_ahead(ahead.blueprint(), ahead.plan()).unwrap();
        let kernels = || ahead.lock().device.counters().kernels;
        let compiled = kernels();
        assert!(compiled > 10, "{compiled} kernels");
        assert!(ahead.layer_stats().iter().all(|layer| layer.needed == 0));
        assert_eq!(answer(&ahead), answer(&plain));
        assert_eq!(kernels(), compiled);
    }
}
