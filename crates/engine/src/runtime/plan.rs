//! Memory plan: accounts for every byte within a budget before anything is allocated.

use crate::{
    base::{
        error::{Error, PlanError},
        setters::setters,
        system::{SystemMemory, page_align, physical_cores},
    },
    checkpoint::{Checkpoint, MatrixSource, READ_THREADS},
    experts::{
        cache::BOOKKEEPING_BYTES,
        division::ExpertTimes,
        io::{Access, PageCache, ReadOptions, reader_memory},
        placement::{ExpertsOnHost, Placement},
        probe::FilePages,
        slot_classes::{SlotClasses, split},
    },
    model::blueprint::{Blueprint, MixerBlueprint},
    runtime::{
        forward::{TOP_CANDIDATES, host_values, logit_rows},
        host_experts::HostExpertsShape,
        layer::{Mla, MoeState, SCRATCH_BUFFERS, Scratch},
        pools::{LineName, Pool, PoolLine},
    },
};
use moeflux_compute::{BankPlace, Device, KvFormat, ScratchShape, StateShape, cpu_scratch_bytes};

/// Default positions per session.
pub const DEFAULT_CONTEXT: usize = 8192;

/// Default tokens per prefill chunk. A constant, independent of the budget.
pub const DEFAULT_CHUNK: usize = 512;

/// Default tokens per prefill chunk on a card with its own memory: it has room for more rows, which
/// raises the rows per expert.
pub const CARD_CHUNK: usize = 2048;

/// Minimum host slots beside a card's own: half of them wait to be copied while the others are
/// read.
const MIN_HOST_SLOTS: usize = 2 * READ_THREADS;

/// Share of the files in the page cache from which on first reads are buffered, too.
const WARM_SHARE: f64 = 0.5;

/// Reserve for the allocator, page tables, and code that has not run yet.
const PROCESS_RESERVE: u64 = 12 << 20;

/// Default reserve of a device's own memory for other programs, in addition to a tenth of it.
const DEVICE_RESERVE: u64 = 512 << 20;

/// Bytes of lexers and parsers of grammars, and of the trie per token of the vocabulary.
const GRAMMAR_BYTES: u64 = 16 << 20;
const GRAMMAR_TOKEN_BYTES: u64 = 200;

/// Variation of the process size at planning time between runs; an advised budget includes it.
const PROCESS_VARIATION: u64 = 1 << 20;

/// Default budget as a share of the memory that the process may use: 3 / 4.
const SAFE_SHARE: (u64, u64) = (3, 4);

/// Default share of the prefix cache in the memory that everything else leaves: 1 / 16.
const PREFIX_CACHE_SHARE: u64 = 16;

/// Share of the floor from which on fewer threads are advised: 1 / 8.
const THREADS_SHARE: u64 = 8;

/// Smallest chunk when halving it to suit a device.
const MIN_CHUNK: usize = 64;

/// Smallest context when shrinking it to the budget; below, planning fails.
const MIN_CONTEXT: usize = 256;

/// Limits and sizes that the plan has to respect.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct MemoryRequest {
    /// Bytes of host memory; by default a safe share of what the process may use.
    pub budget: Option<u64>,
    /// Bytes of the device's own memory; by default 90 % of it less 512 MiB. If the system does not
    /// report its size, the same as `budget`. Ignored for devices without memory of their own.
    pub device_budget: Option<u64>,
    /// Positions per session; by default the smaller of the model's and [`DEFAULT_CONTEXT`], shrunk
    /// to fit.
    pub context: Option<usize>,
    /// Tokens per prefill chunk; by default [`DEFAULT_CHUNK`], or [`CARD_CHUNK`] on a card with its
    /// own memory, halved until the scratch fits the buffers that a GPU's kernels can bind.
    pub chunk: Option<usize>,
    /// Concurrent sessions; by default one.
    pub sessions: Option<usize>,
    /// Bytes for the states of all sessions; by default enough for the full context of each. With
    /// less, contexts may exceed the memory: pages are allocated when written, and a step fails if
    /// none is left.
    pub state: Option<u64>,
    /// Bytes for states in the prefix cache; by default those of one session, or a sixteenth of
    /// what the dense weights leave, whichever is less.
    pub marks: Option<u64>,
    /// Exact number of slots, instead of as many as the budget holds.
    pub slots: Option<usize>,
    /// Exact number of host slots beside a card's own, instead of as many as are useful and
    /// `budget` holds.
    pub host_slots: Option<usize>,
    /// How experts that have no place on a card are computed. Ignored for devices without memory of
    /// their own.
    pub experts_on_host: ExpertsOnHost,
    /// Times of experts, where [`ExpertsOnHost::Auto`] divides them; by default measured when the
    /// model is opened. With the times of another engine the division is the same, and so are bits.
    pub expert_times: Option<ExpertTimes>,
    /// Threads of the host's processor, where it computes experts beside a card; by default one per
    /// physical core.
    pub host_threads: Option<usize>,
    /// Bytes of the expert reader: stacks and bounce buffers; by default those of the default
    /// options.
    pub reader: Option<u64>,
    /// Bytes that the program holds beside the engine, such as buffers of a server; by default
    /// none.
    pub reserved: Option<u64>,
    /// Whether answers may be constrained by grammars, whose memory is then a line of the plan. A
    /// budget without room for it has no such line. Default: no.
    pub grammars: bool,
}

setters!(MemoryRequest {
    budget: impl Into<Option<u64>>,
    device_budget: impl Into<Option<u64>>,
    context: impl Into<Option<usize>>,
    chunk: impl Into<Option<usize>>,
    sessions: impl Into<Option<usize>>,
    state: impl Into<Option<u64>>,
    marks: impl Into<Option<u64>>,
    slots: impl Into<Option<usize>>,
    host_slots: impl Into<Option<usize>>,
    experts_on_host: ExpertsOnHost,
    expert_times: impl Into<Option<ExpertTimes>>,
    host_threads: impl Into<Option<usize>>,
    reader: impl Into<Option<u64>>,
    reserved: impl Into<Option<u64>>,
    grammars: bool,
});

impl MemoryRequest {
    /// Sets the memory of the reader that [`Engine::open`](crate::Engine::open) creates for a
    /// checkpoint and its mirrors with these options, unless it is set already.
    #[must_use]
    pub fn with_reader(
        self,
        checkpoint: &Checkpoint,
        blueprint: &Blueprint,
        reads: &ReadOptions,
    ) -> Self {
        let folders = 1 + checkpoint.mirrors().len();
        Self {
            reader: self.reader.or_else(|| Some(reader_memory(reads, blueprint, folders))),
            ..self
        }
    }
}

/// Planned memory: pools in order of speed, each with a budget and named lines. All sizes are
/// bytes.
///
/// Process and staging are in the host's pool. Dense weights, states and scratch are in the fastest
/// pool: the device's own memory if it has some, else host memory. Each pool has slots.
///
/// On a device with its own memory, experts reach its slots through host slots. If every expert has
/// a slot on the card, the host needs only staging slots. Otherwise the host has as many slots as
/// its budget holds. If both tiers together have a slot for every expert, and the device reads host
/// memory in place, every expert has a fixed slot; if not, both tiers are caches in front of the
/// disk.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    /// The card's own memory, if it has some, then host memory; never empty.
    pools: Vec<Pool>,
    /// Whether every expert has a slot, so that none is read from disk after loading.
    pub holds_all: bool,
    /// Maximum concurrent sessions.
    pub sessions: usize,
    /// Positions per session.
    pub context: usize,
    /// Whether the default context was shrunk to the budget.
    pub context_shrunk: bool,
    /// Tokens per prefill chunk.
    pub chunk: usize,
    /// Experts per token: MoE layers times k. With fewer slots the cache cannot hit.
    pub working_set: usize,
    /// Sizes of slots.
    slot_classes: SlotClasses,
    /// Places of experts beside a card, if the host computes any.
    placement: Option<Placement>,
    /// Measured times by which experts in host memory are divided.
    expert_times: Option<ExpertTimes>,
}

impl MemoryPlan {
    /// Use of the page cache for `access`. [`Access::Auto`] decides by the memory that the plan
    /// leaves: if every expert has a slot, it caches all files for the next start, else the experts
    /// without a slot.
    pub fn page_cache(
        &self,
        access: Access,
        checkpoint: &Checkpoint,
        blueprint: &Blueprint,
    ) -> PageCache {
        match access {
            Access::Direct => return PageCache::Nothing,
            Access::Buffered => return PageCache::Everything,
            Access::Auto => {}
        }
        let wanted = match self.holds_all {
            true => checkpoint.total_bytes(),
            // Any copy may be read, and each has its own pages.
            false => blueprint
                .experts_bytes()
                .saturating_sub(self.host().bytes(LineName::Slots))
                .saturating_mul(1 + checkpoint.mirrors().len() as u64),
        };
        if !self.leaves_room_for(wanted, &SystemMemory::now()) {
            return PageCache::Nothing;
        }
        let files = FilePages::for_checkpoint(checkpoint);
        let is_warm = || files.cached().is_some_and(|share| share >= WARM_SHARE);
        if self.holds_all || files.is_empty() || is_warm() {
            PageCache::Everything
        } else {
            PageCache::ReadAgain
        }
    }

    /// Plans what is not allocated yet. Everything else, such as tokenizer and device, counts as
    /// the process. Without room for both, grammars have no memory, and the model runs.
    pub(crate) fn new(
        blueprint: &Blueprint,
        request: &MemoryRequest,
        device: &dyn Device,
    ) -> Result<Self, Error> {
        match Self::with_all(blueprint, request, device) {
            Err(_) if request.grammars => {
                Self::with_all(blueprint, &request.grammars(false), device)
            }
            planned => planned,
        }
    }

    /// Plans slots by the sizes of experts, or of one size where a budget is so small that those of
    /// a layer would not fit.
    fn with_all(
        blueprint: &Blueprint,
        request: &MemoryRequest,
        device: &dyn Device,
    ) -> Result<Self, Error> {
        let by_size = SlotClasses::by_size(blueprint);
        if by_size.iter().len() > 1
            && let Ok(plan) = Self::with_slots(blueprint, request, device, by_size)
            && plan.pools.iter().all(|pool| plan.slot_classes.hold_a_layer(&pool.slots_by_size()))
        {
            return Ok(plan);
        }
        Self::with_slots(blueprint, request, device, SlotClasses::single(blueprint))
    }

    fn with_slots(
        blueprint: &Blueprint,
        request: &MemoryRequest,
        device: &dyn Device,
        classes: SlotClasses,
    ) -> Result<Self, Error> {
        let system = SystemMemory::now();
        let budget = host_budget(request, &system);
        let memory = device.memory();
        let card_budget = memory.filter(|m| !m.unified).map(|m| {
            let safe = |total: u64| (total / 10 * 9).saturating_sub(DEVICE_RESERVE);
            request.device_budget.unwrap_or_else(|| m.total.map_or(budget, safe))
        });
        if let (Some(budget), Some(total)) = (card_budget, memory.and_then(|m| m.total))
            && budget > total
        {
            return Err(PlanError::DeviceBudget { budget, total }.into());
        }
        let default_chunk = if card_budget.is_some() { CARD_CHUNK } else { DEFAULT_CHUNK };
        let mut chunk = request.chunk.unwrap_or(default_chunk);
        let sessions = request.sessions.unwrap_or(1);
        if chunk == 0 || request.context == Some(0) || sessions == 0 {
            return Err(PlanError::Empty.into());
        }
        if let Some(context) = request.context
            && context > blueprint.max_positions
        {
            let positions = blueprint.max_positions;
            return Err(PlanError::ContextTooLong { context, positions }.into());
        }
        let wanted = request.context.unwrap_or(DEFAULT_CONTEXT.min(blueprint.original_positions()));
        let scratch = |rows: usize, context: usize| -> Result<u64, Error> {
            let device_bytes =
                device.scratch_bytes(scratch_shape(blueprint, rows, device.kv_format()));
            let device_bytes = device_bytes.map_err(Error::at(|| "planning memory"))?;
            Ok(scratch_bytes(blueprint, rows, context, sessions) + device_bytes)
        };
        if let (None, Some(most)) = (request.chunk, device.buffers_limit()) {
            let vectors = vector_bytes(blueprint);
            while chunk > MIN_CHUNK && vectors + scratch(chunk.min(wanted), wanted)? > most {
                chunk /= 2;
            }
        }
        let process = system.resident
            + PROCESS_RESERVE
            + request
                .reader
                .unwrap_or_else(|| reader_memory(&ReadOptions::default(), blueprint, 1))
            + device.driver_bytes();
        let dense = Self::dense_bytes(blueprint, &classes);
        let slot = classes.largest();
        if slot > 0 && device.bank_slots(slot as usize) == 0 {
            return Err(PlanError::ExpertTooLarge { bytes: slot }.into());
        }
        let working_set = blueprint.experts_per_token();
        let plan = |context: usize| -> Result<Self, Error> {
            let rows = chunk.min(context);
            let scratch = scratch(rows, context)?;
            let states = blueprint.layers.iter().flat_map(|l| l.states(context, rows));
            let state =
                states.map(|s| page_align(device.state_bytes(s))).fold(0, u64::saturating_add);
            let state = state.saturating_mul(sessions as u64);
            let state = request.state.map_or(state, |most| state.min(page_align(most)));
            let staging = staging_bytes(blueprint, rows, sessions, memory.is_some());
            let mut host = Pool::new(BankPlace::Host, budget);
            host.push(LineName::Process, process);
            host.push(LineName::Staging, staging);
            if let Some(reserved) = request.reserved {
                host.push(LineName::Reserved, reserved);
            }
            if request.grammars {
                host.push(LineName::Grammars, grammar_bytes(blueprint.vocab));
            }
            let mut pools = vec![host];
            if let Some(budget) = card_budget {
                pools.insert(0, Pool::new(BankPlace::Card, budget));
            }
            let fastest = &mut pools[0];
            fastest.push(LineName::Dense, dense);
            fastest.push(LineName::State, state);
            fastest.push(LineName::Marks, 0);
            fastest.push(LineName::Scratch, scratch);
            let slots = |bytes| PoolLine { name: LineName::Slots, each: bytes, count: 0 };
            let slots = || classes.iter().map(|class| slots(class.bytes));
            pools.iter_mut().for_each(|pool| pool.lines.extend(slots()));
            Ok(Self {
                pools,
                holds_all: false,
                sessions,
                context,
                context_shrunk: context < wanted,
                chunk: rows,
                working_set,
                slot_classes: classes.clone(),
                placement: None,
                expert_times: None,
            })
        };
        let experts = classes.experts();
        let (need, all) = (blueprint.max_top_k(), blueprint.experts());
        let mut best = plan(wanted)?;
        if request.context.is_none() {
            // Unless all experts fit, state and scratch take at most a quarter of what the dense
            // weights leave.
            let pool = best.fastest();
            let loaded = pool.bytes(LineName::Process).saturating_add(dense);
            let left = pool.budget.saturating_sub(loaded);
            let is_crowded = |pool: &Pool| {
                let (state, scratch) = (pool.bytes(LineName::State), pool.bytes(LineName::Scratch));
                let slots = classes.slots_within(pool.room(), &experts);
                slots < all && state.saturating_add(scratch) > left / 4
            };
            while is_crowded(best.fastest()) && best.context / 2 >= MIN_CONTEXT.min(wanted) {
                best = plan(best.context / 2)?;
            }
        }
        let marks = request.marks.unwrap_or_else(|| {
            let share = page_align(best.fastest().room() / PREFIX_CACHE_SHARE);
            share.min(best.bytes(LineName::State) / sessions as u64)
        });
        best.fastest_mut().set_bytes(LineName::Marks, marks);
        let most = classes.slots_within(best.fastest().room(), &experts);
        let (slots, in_place) = (request.slots.unwrap_or(most), memory.is_none_or(|m| m.in_place));
        // Experts that the host computes need no card that reads them.
        let computes = card_budget.is_some()
            && request.experts_on_host != ExpertsOnHost::Read
            && slots.min(most) < all;
        let stays_on_host = in_place || computes;
        let mut found_on_host = 0;
        if computes {
            let max_rows = Placement::max_rows(in_place, best.chunk);
            let shape = HostExpertsShape::new(blueprint, max_rows);
            let threads = request.host_threads.unwrap_or_else(physical_cores);
            let scratch = cpu_scratch_bytes(shape.scratch(), threads);
            let scratch = scratch.map_err(Error::at(|| "planning memory"))?;
            best.host_mut().insert(LineName::Scratch, scratch + shape.bytes());
        }
        if card_budget.is_some() {
            let least = MIN_HOST_SLOTS.min(all);
            best.host_mut().set_slots(&split(least, &experts));
            if best.host().total() > budget {
                return Err(best.host_too_small(request).into());
            }
            let on_card = split(slots.min(all), &experts);
            let missing: Vec<_> =
                experts.iter().zip(on_card).map(|(all, card)| all - card).collect();
            let shares = if missing.iter().sum::<usize>() == 0 { &experts } else { &missing };
            let most_on_host = classes.slots_within(best.host().room(), shares);
            let on_host = match request.host_slots {
                Some(asked) if asked == 0 || asked > most_on_host => {
                    return Err(PlanError::HostSlots { asked, most: most_on_host }.into());
                }
                Some(asked) => asked,
                None => host_slots(all - slots.min(all), least, most_on_host, stays_on_host),
            };
            best.host_mut().set_slots(&split(on_host, shares));
            found_on_host = if stays_on_host { on_host } else { 0 };
        }
        best.holds_all = slots.min(most) + found_on_host >= all;
        // If every expert has a fixed slot, a layer needs no separate slots on the card.
        let need = if best.holds_all { 0 } else { need };
        if most < need || best.fastest().fixed() > best.fastest().budget {
            // On a device in host memory, each thread has scratch that does not depend
            // on rows.
            let threads = match memory {
                None => device.scratch_bytes(scratch_shape(blueprint, 1, device.kv_format())),
                Some(_) => Ok(0),
            };
            return Err(best.too_small(need, request, threads.unwrap_or(0)).into());
        }
        if slots < need || slots > most {
            return Err(PlanError::Slots { asked: slots, need, most, all }.into());
        }
        let on_card = split(slots, &experts);
        if computes {
            let counts = blueprint.layers.iter().map(|l| l.moe().map_or(0, |m| m.experts.count));
            let layers = counts.zip(best.slot_classes.of_layers().iter().copied());
            best.placement = Some(Placement::new(layers, &on_card, in_place));
        }
        best.fastest_mut().set_slots(&on_card);
        Ok(best)
    }

    /// Places of experts beside a card, if the host computes any.
    pub(crate) fn placement(&self) -> Option<&Placement> {
        self.placement.as_ref()
    }

    pub(crate) fn placement_mut(&mut self) -> Option<&mut Placement> {
        self.placement.as_mut()
    }

    /// Measured times by which experts in host memory are divided, if they are.
    pub fn expert_times(&self) -> Option<&ExpertTimes> {
        self.expert_times.as_ref()
    }

    pub(crate) fn set_expert_times(&mut self, times: ExpertTimes) {
        self.expert_times = Some(times);
    }

    /// By layer: the first expert that the host computes; empty if it computes none.
    pub(crate) fn first_computed_on_host(&self) -> Vec<u32> {
        let placement = self.placement.as_ref().filter(|placement| placement.computed() > 0);
        placement.map_or_else(Vec::new, Placement::first_computed)
    }

    /// Number of experts that the host computes in steps of few rows.
    pub fn computed_on_host(&self) -> usize {
        self.placement.as_ref().map_or(0, Placement::computed)
    }

    /// Pools in order of speed: the card's own memory, if it has some, then host memory.
    pub fn pools(&self) -> &[Pool] {
        &self.pools
    }

    /// The fastest pool: holds dense weights, state, scratch and as many slots as fit.
    pub fn fastest(&self) -> &Pool {
        &self.pools[0]
    }

    fn fastest_mut(&mut self) -> &mut Pool {
        &mut self.pools[0]
    }

    /// The card's own memory, if it has some.
    pub fn card(&self) -> Option<&Pool> {
        Some(self.fastest()).filter(|pool| pool.place == BankPlace::Card)
    }

    /// Host memory; the fastest pool too, unless the card has its own.
    pub fn host(&self) -> &Pool {
        &self.pools[self.pools.len() - 1]
    }

    fn host_mut(&mut self) -> &mut Pool {
        let host = self.pools.len() - 1;
        &mut self.pools[host]
    }

    /// Bytes of the lines of a name in all pools.
    pub fn bytes(&self, name: LineName) -> u64 {
        self.pools.iter().map(|pool| pool.bytes(name)).fold(0, u64::saturating_add)
    }

    /// Bytes of one slot, in every pool; the mean of all experts where they differ in size.
    pub fn slot_bytes(&self) -> u64 {
        self.slot_classes.mean()
    }

    /// Sizes of slots, in every pool.
    pub(crate) fn slot_classes(&self) -> &SlotClasses {
        &self.slot_classes
    }

    /// Whether host memory has room for `files` bytes of page cache beside the plan.
    pub(crate) fn leaves_room_for(&self, files: u64, system: &SystemMemory) -> bool {
        self.host().total().saturating_add(files)
            <= system.resident.saturating_add(system.available)
    }

    /// Budget, of the fastest pool, with a slot for each expert of a token's working set, for a
    /// requested context of this size. Without a requested context, a larger budget may enlarge the
    /// default context first.
    pub fn budget_for_token(&self) -> u64 {
        let slots = self.slot_bytes().saturating_mul(self.working_set as u64);
        // The prefix cache takes its share of the same memory as the slots.
        let planned = self.bytes(LineName::Marks);
        let marks = match planned {
            0 => 0,
            _ => page_align(slots / (PREFIX_CACHE_SHARE - 1) + 1)
                .min(self.bytes(LineName::State) / self.sessions as u64)
                .max(planned),
        };
        (self.fastest().fixed() - planned)
            .saturating_add(marks)
            .saturating_add(slots)
            .saturating_add(PROCESS_VARIATION)
    }

    /// Advice for a budget below the floor.
    fn advice(&self, given: Option<u64>, option: &str, floor: u64) -> String {
        let mut advice = Vec::new();
        if given.is_none() {
            advice.push("free some memory".to_owned());
        } else {
            advice
                .push(format!("give {option} {}MiB", mib(floor.saturating_add(PROCESS_VARIATION))));
        }
        if self.context > MIN_CONTEXT {
            advice.push("lower --ctx".to_owned());
        }
        if self.chunk > MIN_CHUNK {
            advice.push("lower --chunk".to_owned());
        }
        advice.join(", or ")
    }

    /// The error if the host's share does not fit beside a card with its own memory.
    fn host_too_small(&self, request: &MemoryRequest) -> PlanError {
        let host = self.host();
        let parts = format!(
            " beside the device's own memory: {} for the program, {} for logits and weights on \
             their way, {} for {} experts on theirs",
            mib(host.bytes(LineName::Process) + host.bytes(LineName::Reserved)),
            mib(host.bytes(LineName::Staging)),
            mib(host.bytes(LineName::Slots)),
            host.slots(),
        );
        PlanError::BelowFloor {
            name: "a budget",
            budget: host.budget,
            floor: host.total(),
            parts,
            advice: self.advice(request.budget, "--memory", host.total()),
        }
    }

    /// The error if the fixed part and a layer's slots do not fit. `threads` is the part of the
    /// scratch that does not depend on rows.
    fn too_small(&self, need: usize, request: &MemoryRequest, threads: u64) -> PlanError {
        let pool = self.fastest();
        let slots = need as u64 * pool.slot_bytes();
        let floor = pool.fixed().saturating_add(slots);
        let (name, program, mut advice) = match self.card() {
            Some(_) => (
                "a budget of the device's own memory",
                String::new(),
                self.advice(request.device_budget, "--gpu-memory", floor)
                    + ", or give --device cpu",
            ),
            None => (
                "a budget",
                format!(
                    "{} for the program, {} for logits and reads, ",
                    mib(pool.bytes(LineName::Process) + pool.bytes(LineName::Reserved)),
                    mib(pool.bytes(LineName::Staging))
                ),
                self.advice(request.budget, "--memory", floor),
            ),
        };
        if threads > floor / THREADS_SHARE {
            advice += &format!(", or lower --threads, which hold {} of it", mib(threads));
        }
        let parts = format!(
            ": {program}{} for dense weights, {} for the state of {} positions, {} for \
             intermediate results of {} rows, {} for {need} slots of one layer",
            mib(pool.bytes(LineName::Dense)),
            mib(pool.bytes(LineName::State)),
            self.context,
            mib(pool.bytes(LineName::Scratch)),
            self.chunk,
            mib(slots),
        );
        PlanError::BelowFloor { name, budget: pool.budget, floor, parts, advice }
    }

    /// Bytes of resident weights, including fused shared experts in slots.
    pub(crate) fn dense_bytes(blueprint: &Blueprint, classes: &SlotClasses) -> u64 {
        let matrix = |m: &MatrixSource| page_align(m.memory_bytes() as u64);
        let matrices: u64 = blueprint.matrices().map(matrix).sum();
        let in_slots = blueprint.moe_layers().filter_map(|(_, moe)| moe.fused_shared()).flatten();
        let slots: u64 = classes.iter().map(|class| class.bytes * class.shared as u64).sum();
        matrices + vector_bytes(blueprint) + slots - in_slots.map(matrix).sum::<u64>()
    }
}

/// Limit of the host memory: the requested one, or a safe share of what the process may use.
pub(crate) fn host_budget(request: &MemoryRequest, system: &SystemMemory) -> u64 {
    let may_use = system.resident + system.available;
    request.budget.unwrap_or(may_use / SAFE_SHARE.1 * SAFE_SHARE.0)
}

/// Host slots beside a card that lacks slots for `missing` experts, between `least` and `most`.
fn host_slots(missing: usize, least: usize, most: usize, in_place: bool) -> usize {
    match missing {
        0 => least,
        // Every expert has a fixed slot.
        _ if in_place && missing <= most => missing.max(least),
        _ => most,
    }
}

fn mib(bytes: u64) -> u64 {
    bytes.div_ceil(1 << 20)
}

/// Shape of the device's scratch for steps of up to `rows` rows.
pub(crate) fn scratch_shape(blueprint: &Blueprint, rows: usize, kv: KvFormat) -> ScratchShape {
    let latent_head = blueprint.layers.iter().filter_map(|l| l.mixer()).map(|mixer| match mixer {
        MixerBlueprint::Mla(mla) => Mla::latent_head_width(mla),
        MixerBlueprint::Gqa(_) | MixerBlueprint::DeltaNet(_) => 0,
    });
    let wide_kv = blueprint.layers.iter().flat_map(|l| l.states(1, 1)).map(|shape| match shape {
        StateShape::KeyValue { key_width, value_width, .. } if kv == KvFormat::Q8 => {
            key_width + value_width
        }
        _ => 0,
    });
    ScratchShape {
        rows,
        cols: blueprint.max_inputs(),
        latent_head: latent_head.max().unwrap_or(0),
        wide_kv: wide_kv.max().unwrap_or(0),
    }
}

/// Bytes of the grammars of constrained answers: 64 MiB with 248,320 tokens.
fn grammar_bytes(vocab: usize) -> u64 {
    page_align(GRAMMAR_BYTES + vocab as u64 * GRAMMAR_TOKEN_BYTES)
}

/// Bytes of vectors, and of the orders of inputs.
fn vector_bytes(blueprint: &Blueprint) -> u64 {
    let orders = blueprint.matrices().filter_map(|m| m.order.as_ref()).map(|order| order.len());
    let moe_orders = blueprint.moe_layers().filter_map(|(_, moe)| moe.experts.hidden_orders());
    let lens = blueprint.vectors().map(|v| v.len);
    let lens = lens.chain(orders).chain(moe_orders.map(<[u16]>::len));
    lens.map(|len| page_align(len as u64 * 4)).sum()
}

/// Bytes of scratch buffers, including logits.
fn scratch_bytes(blueprint: &Blueprint, rows: usize, context: usize, sessions: usize) -> u64 {
    let head_rows = logit_rows(rows, sessions);
    let logits = blueprint.vocab as u64 * 4 * head_rows as u64
        + page_align(4 * (head_rows * TOP_CANDIDATES) as u64);
    Scratch::bytes(blueprint, rows, context) + (8 + SCRATCH_BUFFERS) as u64 * page_align(1) + logits
}

/// Bytes on the host besides process and slots. A device that copies weights holds the largest one
/// twice while loading.
fn staging_bytes(blueprint: &Blueprint, rows: usize, sessions: usize, takes_over: bool) -> u64 {
    // Logits are read back; those of a row are kept by the session, and copied for sampling.
    let values = host_values(logit_rows(rows, sessions), blueprint.vocab, blueprint.hidden);
    let logits = 4 * (values + blueprint.vocab) as u64;
    let queues = (blueprint.experts() * BOOKKEEPING_BYTES) as u64;
    let largest = blueprint
        .matrices()
        .map(|m| m.memory_bytes() as u64)
        .max()
        .filter(|_| takes_over)
        .unwrap_or(0);
    logits + queues + page_align(largest) + MoeState::bytes(blueprint, rows)
}

#[cfg(test)]
mod tests {
    use moeflux_compute::BankPlace;

    use super::{MemoryPlan, PREFIX_CACHE_SHARE, host_slots, page_align};
    use crate::{
        experts::slot_classes::SlotClasses,
        runtime::pools::{LineName, Pool, PoolLine},
    };

    #[test]
    fn a_budget_for_a_token_has_room_for_the_prefix_cache() {
        let mut host = Pool::new(BankPlace::Host, 600 << 20);
        host.push(LineName::Process, 40 << 20);
        host.push(LineName::Staging, 3 << 20);
        host.push(LineName::Dense, 500 << 20);
        host.push(LineName::State, 64 << 20);
        host.push(LineName::Marks, 1 << 20);
        host.push(LineName::Scratch, 9 << 20);
        host.lines.push(PoolLine { name: LineName::Slots, each: 2_654_208, count: 8 });
        let mut plan = MemoryPlan {
            pools: vec![host],
            holds_all: false,
            sessions: 2,
            context: 256,
            context_shrunk: true,
            chunk: 256,
            working_set: 384,
            slot_classes: SlotClasses::uniform(1, 2_654_208),
            placement: None,
            expert_times: None,
        };
        for state in [2 << 20, 64 << 20, 1 << 30] {
            plan.fastest_mut().set_bytes(LineName::State, state);
            let fixed = plan.fastest().fixed() - plan.bytes(LineName::Marks);
            let left = plan.budget_for_token() - fixed;
            let marks = page_align(left / PREFIX_CACHE_SHARE).min(state / 2);
            let slots = (left - marks) / plan.slot_bytes();
            assert!((384..386).contains(&slots), "{slots} slots with a state of {state}");
        }
    }

    #[test]
    fn host_slots_hold_the_experts_that_a_card_lacks() {
        for in_place in [false, true] {
            assert_eq!(host_slots(0, 16, 100, in_place), 16);
            assert_eq!(host_slots(101, 16, 100, in_place), 100);
        }
        assert_eq!([5, 40, 100].map(|missing| host_slots(missing, 16, 100, true)), [16, 40, 100]);
        // A cache takes all slots that fit.
        assert_eq!(host_slots(40, 16, 100, false), 100);
    }
}
