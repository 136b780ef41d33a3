//! Memory plan: accounts for every byte within a budget before anything is allocated.

use std::ops::Range;

use moeflux_base::{
    Error, PlanError, SystemMemory,
    seam::{page_align, physical_cores},
};
use moeflux_compute::{BankPlace, Device, KvFormat, ScratchShape, StateShape, cpu_scratch_bytes};
use moeflux_model::{
    blueprint::{Blueprint, MixerBlueprint, SubBlockInput},
    checkpoint::Checkpoint,
    seam::READ_THREADS,
};

use super::{
    host_experts::HostExpertsShape,
    plan_basis::{PlanBasis, divide, matrix_bytes},
    prefix_share::{LEAST_SHARE, PrefixDivision, PrefixShare, index_bytes},
    slot_counts::SlotCounts,
    step_images::StepImages,
};
use crate::{
    experts::{
        cache::BOOKKEEPING_BYTES,
        division::ExpertTimes,
        io::{Access, PageCache},
        placement::{ExpertsOnHost, Placement},
        probe::FilePages,
        row_store::RowStore,
        slot_classes::{SlotClass, SlotClasses},
    },
    runtime::{
        kept_rows::drafter_values,
        layer::{Mla, MoeState, SCRATCH_BUFFERS, Scratch},
        logits_request::{TOP_CANDIDATES, host_values, logit_rows},
        pools::{LineName, Pool, PoolLine},
    },
};

pub use super::memory_request::{ImageMemory, MemoryRequest};

/// Default positions per session.
pub const DEFAULT_CONTEXT: usize = 8192;

/// Default tokens per prefill chunk. A constant, independent of the budget.
pub const DEFAULT_CHUNK: usize = 512;

/// Default tokens per prefill chunk on a card with its own memory: it has room for more rows, which
/// raises the rows per expert.
pub const CARD_CHUNK: usize = 2048;

/// Minimum host slots beside a card's own: half of them wait to be copied while the others are
/// read.
pub(super) const MIN_HOST_SLOTS: usize = 2 * READ_THREADS;

/// Values that a device carries from card to card at a time.
const CARRIED_VALUES: usize = 1 << 20;

/// Share of the files in the page cache from which on first reads are buffered, too.
const WARM_SHARE: f64 = 0.5;

/// Reserve for the allocator, page tables, and code that has not run yet.
pub(super) const PROCESS_RESERVE: u64 = 12 << 20;

/// Default reserve of a device's own memory for other programs, in addition to a tenth of it.
pub(super) const DEVICE_RESERVE: u64 = 512 << 20;

/// Bytes of lexers and parsers of grammars, and of the trie per token of the vocabulary.
const GRAMMAR_BYTES: u64 = 16 << 20;
const GRAMMAR_TOKEN_BYTES: u64 = 200;

/// Variation of the process size at planning time between runs; an advised budget includes it.
pub(super) const PROCESS_VARIATION: u64 = 1 << 20;

/// Default budget as a share of the memory that the process may use: 3 / 4.
const SAFE_SHARE: (u64, u64) = (3, 4);

/// Smallest chunk when halving it to suit a device.
pub(super) const MIN_CHUNK: usize = 64;

/// Smallest context when shrinking it to the budget; below, planning fails.
pub(super) const MIN_CONTEXT: usize = 256;

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
    /// Maximum drafted tokens of a session in a step.
    pub drafts: usize,
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
    /// How experts without a place on a card are computed.
    experts_on_host: ExpertsOnHost,
    /// Places of experts beside a card, if they are fixed.
    placement: Option<Placement>,
    /// Measured times by which experts in host memory are divided.
    expert_times: Option<ExpertTimes>,
    /// Whether they are divided as recorded.
    follows_recorded: bool,
    /// By layer: its card.
    card_of_layer: Vec<usize>,
    /// By card: states of all sessions.
    states: Vec<u64>,
    /// By pool that holds dense weights: experts per token of its layers.
    working_sets: Vec<usize>,
    /// Savings by which slots and prefix cache were divided, if they were.
    prefix_division: Option<PrefixDivision>,
}

impl MemoryPlan {
    /// Use of the page cache for `access`. [`Access::Auto`] decides by the memory that the plan
    /// leaves: if every expert has a slot, it caches all files but tables of rows for the next
    /// start, else the experts without a slot.
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
        let wanted = self.cached_bytes(checkpoint, blueprint);
        if !self.leaves_room_for(wanted, &SystemMemory::now()) {
            return PageCache::Nothing;
        }
        let files = FilePages::without_tables(checkpoint, blueprint);
        let is_warm = || files.cached().is_some_and(|share| share >= WARM_SHARE);
        if self.holds_all || files.is_empty() || is_warm() {
            PageCache::Everything
        } else {
            PageCache::ReadAgain
        }
    }

    /// Bytes of the files that the page cache should hold. Tables do not count, as few rows of
    /// them are read.
    fn cached_bytes(&self, checkpoint: &Checkpoint, blueprint: &Blueprint) -> u64 {
        match self.holds_all {
            true => checkpoint.total_bytes().saturating_sub(blueprint.row_tables_bytes()),
            // Any copy may be read, and each has its own pages.
            false => blueprint
                .experts_bytes()
                .saturating_sub(self.host().bytes(LineName::Slots))
                .saturating_mul(1 + checkpoint.mirrors().len() as u64),
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
        let basis = PlanBasis::new(blueprint, request, device)?;
        let by_size = SlotClasses::by_size(blueprint, &basis.card_of_layer);
        let single = SlotClasses::single(blueprint, &basis.card_of_layer);
        if by_size.iter().len() > single.iter().len()
            && let Ok(plan) = Self::with_slots(&basis, by_size)
            && plan.holds_layers()
        {
            return Ok(plan);
        }
        Self::with_slots(&basis, single)
    }

    /// Whether the slots of each pool hold the experts that a token needs of any of its layers.
    fn holds_layers(&self) -> bool {
        let cards = self.cards().len();
        self.pools.iter().enumerate().all(|(i, pool)| {
            let of_pool = |class: &SlotClass| cards < 2 || i >= cards || class.card == i;
            self.slot_classes.hold_layers(&pool.slots_by_size(), of_pool)
        })
    }

    fn with_slots(basis: &PlanBasis<'_>, classes: SlotClasses) -> Result<Self, Error> {
        let &PlanBasis { blueprint, request, device, memory, .. } = basis;
        let &PlanBasis { budget, sessions, wanted, .. } = basis;
        let has_cards = !basis.card_budgets.is_empty();
        let slot = classes.largest();
        if slot > 0 && device.bank_slots(slot as usize) == 0 {
            return Err(PlanError::ExpertTooLarge { bytes: slot }.into());
        }
        let of_pools = basis.cards_of_pools();
        let dense = |cards: &Range<usize>| -> u64 {
            cards.clone().map(|card| basis.dense(card, &classes)).sum()
        };
        let plan = |context: usize| -> Result<Self, Error> {
            let rows = basis.chunk.min(context);
            let states = basis.states(context, rows);
            let staging = staging_bytes(blueprint, rows, sessions, memory.is_some());
            let mut host = Pool::new(BankPlace::Host, budget);
            host.push(LineName::Process, basis.process);
            host.push(LineName::Staging, staging + carried_bytes(blueprint, rows, basis.cards));
            let of_tables = RowStore::bytes(blueprint, rows);
            if of_tables > 0 {
                host.push(LineName::Rows, page_align(of_tables));
            }
            if let Some(reserved) = request.reserved {
                host.push(LineName::Reserved, reserved);
            }
            if request.grammars {
                host.push(LineName::Grammars, grammar_bytes(blueprint.vocab));
            }
            let ImageMemory { host: on_host, card: on_card, .. } = request.images;
            let on_host = on_host.saturating_add(request.images.rows(context));
            if on_host > 0 {
                host.push(LineName::Images, page_align(on_host));
            }
            let own = basis.card_budgets.iter().map(|own| Pool::new(BankPlace::Card, *own));
            let mut pools: Vec<Pool> = own.chain([host]).collect();
            if on_card > 0 {
                // A device that shares the host's memory is in its pool.
                pools[0].push(LineName::Images, page_align(on_card));
            }
            for (pool, cards) in pools.iter_mut().zip(&of_pools) {
                let state = states[cards.clone()].iter().copied().fold(0, u64::saturating_add);
                let scratch = cards.clone().try_fold(0, |sum: u64, card| -> Result<_, Error> {
                    Ok(sum.saturating_add(basis.scratch(card, rows, context)?))
                });
                pool.push(LineName::Dense, dense(cards));
                pool.push(LineName::State, state);
                pool.push(LineName::Marks, 0);
                pool.push(LineName::Scratch, scratch?);
            }
            let slots = |bytes| PoolLine { name: LineName::Slots, each: bytes, count: 0 };
            let slots = || classes.iter().map(|class| slots(class.bytes));
            pools.iter_mut().for_each(|pool| pool.lines.extend(slots()));
            Ok(Self {
                pools,
                holds_all: false,
                sessions,
                drafts: basis.request.drafts,
                context,
                context_shrunk: context < wanted,
                chunk: rows,
                working_set: blueprint.experts_per_token(),
                slot_classes: classes.clone(),
                experts_on_host: ExpertsOnHost::Read,
                placement: None,
                expert_times: None,
                follows_recorded: false,
                card_of_layer: basis.card_of_layer.clone(),
                states,
                working_sets: of_pools.iter().map(|cards| basis.working_set(cards)).collect(),
                prefix_division: None,
            })
        };
        let experts = classes.experts();
        // By pool: experts of its layers by class.
        let shares: Vec<Vec<usize>> = match of_pools.len() {
            1 => vec![experts.clone()],
            pools => (0..pools).map(|card| classes.experts_of(card)).collect(),
        };
        let slots_in = |pool: &Pool, shares: &Vec<usize>| {
            classes.slots_up_to(shares.iter().sum(), pool.room(), shares)
        };
        let mut best = plan(wanted)?;
        if request.context.is_none() {
            // Unless all experts fit, state and scratch take at most a quarter of what the dense
            // weights leave.
            let is_crowded = |(pool, shares): (&Pool, &Vec<usize>)| {
                let dense = pool.bytes(LineName::Dense);
                let loaded = pool.bytes(LineName::Process).saturating_add(dense);
                let left = pool.budget.saturating_sub(loaded);
                let (state, scratch) = (pool.bytes(LineName::State), pool.bytes(LineName::Scratch));
                slots_in(pool, shares) < shares.iter().sum()
                    && state.saturating_add(scratch) > left / 4
            };
            while best.dense_pools().iter().zip(&shares).any(is_crowded)
                && best.context / 2 >= MIN_CONTEXT.min(wanted)
            {
                best = plan(best.context / 2)?;
            }
        }
        let state = |pool: &Pool| pool.bytes(LineName::State);
        let states: Vec<u64> = best.dense_pools().iter().map(state).collect();
        let asked = request.marks.map(|marks| match states.len() {
            1 => vec![marks],
            _ => divide(marks, &states),
        });
        let marks = match asked {
            Some(asked) => asked,
            None => {
                let share = PrefixShare::new(basis, &best, &classes, &shares);
                best.prefix_division = share.division;
                share.bytes
            }
        };
        for (pool, bytes) in best.dense_pools_mut().iter_mut().zip(marks) {
            pool.set_bytes(LineName::Marks, bytes);
        }
        let mut counts = SlotCounts::new(basis, &classes, &best, shares);
        let in_place = memory.is_none_or(|m| m.in_place);
        // Experts that the host computes need no card that reads them.
        let computes =
            has_cards && request.experts_on_host != ExpertsOnHost::Read && counts.lacks_experts();
        let stays_on_host = in_place || computes;
        if computes {
            let max_rows = Placement::max_rows(in_place, best.chunk);
            let shape = HostExpertsShape::new(blueprint, max_rows);
            let threads = request.host_threads.unwrap_or_else(physical_cores);
            let scratch = cpu_scratch_bytes(shape.scratch(), threads);
            let scratch = scratch.map_err(Error::at(|| "planning memory"))?;
            best.host_mut().insert(LineName::Scratch, scratch + shape.bytes());
        }
        if has_cards {
            let least = counts.least_on_host();
            best.host_mut().set_slots(&least);
            if best.host().total() > budget {
                return Err(best.host_too_small(request).into());
            }
            let index = index_bytes(best.bytes(LineName::Marks), best.host());
            if index > 0 {
                best.host_mut().insert(LineName::PrefixIndex, index);
            }
            let on_host = counts.on_host(best.host().room(), &least, stays_on_host)?;
            best.host_mut().set_slots(&on_host);
            if stays_on_host {
                counts.found_on_host = on_host;
            }
        }
        best.holds_all = counts.holds_all();
        for (i, pool) in best.dense_pools().iter().enumerate() {
            // If every expert has a fixed slot, a layer needs no separate slots on the card.
            let need = if best.holds_all { 0 } else { counts.needs[i] };
            if counts.most[i] < need || pool.fixed() > pool.budget {
                // On a device in host memory, each thread has scratch that does not depend
                // on rows.
                let threads = match memory {
                    None => device.scratch_bytes(scratch_shape(blueprint, 1, device.kv_format())),
                    Some(_) => Ok(0),
                };
                return Err(best.too_small(i, need, request, threads.unwrap_or(0)).into());
            }
        }
        counts.check(best.holds_all)?;
        let on_card = counts.on_cards();
        for (pool, slots) in best.dense_pools_mut().iter_mut().zip(&on_card) {
            pool.set_slots(slots);
        }
        if computes {
            best.experts_on_host = request.experts_on_host;
        }
        // Otherwise the card is a cache of all experts.
        if computes || has_cards && in_place && best.holds_all && counts.lacks_experts() {
            best.place_experts(blueprint, in_place, None, None);
        }
        Ok(best)
    }

    /// Bytes of the prefix cache and of marks, in all pools.
    pub fn prefix_bytes(&self) -> u64 {
        self.bytes(LineName::Marks)
    }

    /// Predicted savings by which slots and the states of the prefix cache were divided. `None`
    /// where all experts have slots, or one of both sizes was requested.
    pub fn prefix_division(&self) -> Option<&PrefixDivision> {
        self.prefix_division.as_ref()
    }

    /// Places of experts beside a card, unless it is a cache of all experts.
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

    pub(crate) fn set_placement(&mut self, placement: Placement) {
        self.placement = Some(placement);
    }

    pub(crate) fn set_expert_times(&mut self, times: ExpertTimes) {
        self.expert_times = Some(times);
    }

    /// Number of the division of experts between card and processor. Answers are the same bit for
    /// bit with the same number. `None` if the processor computes none.
    pub fn experts_number(&self) -> Option<String> {
        self.placement.as_ref().and_then(Placement::number)
    }

    /// How experts without a place on a card are computed; [`ExpertsOnHost::Read`] if there are
    /// none.
    pub fn experts_on_host(&self) -> ExpertsOnHost {
        self.experts_on_host
    }

    /// Whether experts are divided as recorded.
    pub(crate) fn follows_recorded(&self) -> bool {
        self.follows_recorded
    }

    pub(super) fn set_follows_recorded(&mut self) {
        self.follows_recorded = true;
    }

    /// Number of experts that the host computes in steps of few rows.
    pub fn computed_on_host(&self) -> usize {
        self.placement.as_ref().map_or(0, Placement::computed)
    }

    /// Pools in order of speed: the card's own memory, if it has some, then host memory. Of several
    /// cards, that of each in their order.
    pub fn pools(&self) -> &[Pool] {
        &self.pools
    }

    /// The fastest pool, of the first card: holds dense weights, state, scratch and as many slots
    /// as fit.
    pub fn fastest(&self) -> &Pool {
        &self.pools[0]
    }

    /// Pools that hold dense weights, states, scratch and as many slots as fit: that of each card,
    /// or of the host if the device has no separate memory.
    pub fn dense_pools(&self) -> &[Pool] {
        &self.pools[..self.cards().len().max(1)]
    }

    fn dense_pools_mut(&mut self) -> &mut [Pool] {
        let count = self.cards().len().max(1);
        &mut self.pools[..count]
    }

    /// The own memory of each card; empty if the device has none.
    pub fn cards(&self) -> &[Pool] {
        match self.card() {
            Some(_) => &self.pools[..self.pools.len() - 1],
            None => &[],
        }
    }

    /// Number of slots in the fastest memory, of all cards together.
    pub fn slots(&self) -> usize {
        self.dense_pools().iter().map(Pool::slots).sum()
    }

    /// Bytes of the memory of these slots without them, of all cards together.
    pub fn fixed_bytes(&self) -> u64 {
        self.dense_pools().iter().map(Pool::fixed).fold(0, u64::saturating_add)
    }

    /// Number of slots in the fastest memory by their size.
    pub(crate) fn slots_by_class(&self) -> Vec<usize> {
        let of_pools: Vec<_> = self.dense_pools().iter().map(Pool::slots_by_size).collect();
        (0..self.slot_classes.iter().len()).map(|i| of_pools.iter().map(|p| p[i]).sum()).collect()
    }

    /// By class: slots in host memory.
    pub(crate) fn host_slots_by_class(&self) -> Vec<usize> {
        self.host().slots_by_size()
    }

    /// By layer: its card; zeros for a device that is a single card.
    pub fn card_of_layer(&self) -> &[usize] {
        &self.card_of_layer
    }

    /// By card: bytes of states, those of the prefix cache and of marks included.
    pub(crate) fn state_limits(&self) -> Vec<u64> {
        let of_pool =
            |pool: &Pool| pool.bytes(LineName::State).saturating_add(pool.bytes(LineName::Marks));
        match self.dense_pools() {
            // Cards in host memory.
            [pool] => divide(of_pool(pool), &self.states),
            pools => pools.iter().map(of_pool).collect(),
        }
    }

    /// The card's own memory, if it has some; that of the first card of several.
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

    /// Whether host memory has room for `files` bytes of page cache beside the plan. Where no
    /// expert is read again, states of the prefix cache may take the place of files.
    pub(crate) fn leaves_room_for(&self, files: u64, system: &SystemMemory) -> bool {
        let states = if self.holds_all { self.host().bytes(LineName::Marks) } else { 0 };
        (self.host().total() - states).saturating_add(files)
            <= system.resident.saturating_add(system.available)
    }

    /// Budget, of the fastest pool or of each of several cards, with a slot for each expert of a
    /// token's working set, for a requested context of this size. Without a requested context, a
    /// larger budget may enlarge the default context first.
    pub fn budget_for_token(&self) -> u64 {
        let pools = self.dense_pools().iter().zip(&self.working_sets);
        let budget = |(pool, working_set): (&Pool, &usize)| {
            let slots = self.slot_bytes().saturating_mul(*working_set as u64);
            // The prefix cache takes its share of the same memory as the slots.
            let planned = pool.bytes(LineName::Marks);
            let marks = match planned {
                0 => 0,
                _ => page_align(slots / (LEAST_SHARE - 1) + 1)
                    .min(pool.bytes(LineName::State) / self.sessions as u64)
                    .max(planned),
            };
            (pool.fixed() - planned)
                .saturating_add(marks)
                .saturating_add(slots)
                .saturating_add(PROCESS_VARIATION)
        };
        pools.map(budget).max().unwrap_or(0)
    }

    /// Bytes of states, by card, as [`StateStore::states_held`](moeflux_compute::StateStore) counts
    /// them on several cards: those of the fullest one, scaled to the limit of all.
    pub(crate) fn state_need(&self, of_cards: &[u64]) -> u64 {
        let limits = self.state_limits();
        let of_all = limits.iter().copied().fold(0, u64::saturating_add);
        let scaled = limits.iter().zip(of_cards).map(|(limit, bytes)| {
            let scaled = u128::from(*bytes) * u128::from(of_all) / u128::from((*limit).max(1));
            u64::try_from(scaled).unwrap_or(u64::MAX)
        });
        match of_cards {
            [bytes] => *bytes,
            _ => scaled.max().unwrap_or(0),
        }
    }

    /// Bytes of resident weights on a single card, including fused shared experts in slots.
    pub(crate) fn dense_bytes(blueprint: &Blueprint) -> u64 {
        let classes = SlotClasses::by_size(blueprint, &[]);
        let matrices: u64 = blueprint.matrices().map(matrix_bytes).sum();
        let in_slots = blueprint.moe_layers().filter_map(|(_, moe)| moe.fused_shared()).flatten();
        let slots: u64 = classes.iter().map(|class| class.bytes * class.shared as u64).sum();
        matrices + vector_bytes(blueprint) + slots - in_slots.map(matrix_bytes).sum::<u64>()
    }
}

/// Limit of the host memory: the requested one, or a safe share of what the process may use.
pub(crate) fn host_budget(request: &MemoryRequest, system: &SystemMemory) -> u64 {
    let may_use = system.resident + system.available;
    let safe = (may_use / SAFE_SHARE.1 * SAFE_SHARE.0).saturating_sub(request.beside);
    request.budget.unwrap_or(safe)
}

/// Bytes of the process that a budget counts.
pub(crate) fn counted_process(request: &MemoryRequest, system: &SystemMemory) -> u64 {
    system.resident.saturating_sub(request.beside)
}

/// Shape of the device's scratch for steps of up to `rows` rows.
pub(crate) fn scratch_shape(blueprint: &Blueprint, rows: usize, kv: KvFormat) -> ScratchShape {
    let latent_head = blueprint.layers.iter().filter_map(|l| l.mixer()).map(|mixer| match mixer {
        MixerBlueprint::Mla(mla) => Mla::latent_head_width(mla),
        MixerBlueprint::Gqa(_)
        | MixerBlueprint::Compressed(_)
        | MixerBlueprint::DeltaNet(_)
        | MixerBlueprint::Mamba2(_)
        | MixerBlueprint::ShortConv(_) => 0,
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
        segment_head: 0,
    }
}

/// Bytes of the grammars of constrained answers: 64 MiB with 248,320 tokens.
fn grammar_bytes(vocab: usize) -> u64 {
    page_align(GRAMMAR_BYTES + vocab as u64 * GRAMMAR_TOKEN_BYTES)
}

/// Bytes of vectors, of the orders of inputs and of the columns of inputs without a norm.
pub(super) fn vector_bytes(blueprint: &Blueprint) -> u64 {
    let orders = blueprint.matrices().filter_map(|m| m.order.as_ref()).map(|order| order.len());
    let moe_orders = blueprint.moe_layers().filter_map(|(_, moe)| moe.experts.hidden_orders());
    let lens = blueprint.vectors().map(|v| v.len);
    let routes = blueprint.moe_layers().filter_map(|(_, moe)| moe.router.fixed.as_ref());
    let lens = lens.chain(orders).chain(moe_orders.map(<[u16]>::len));
    let lens = lens.chain(routes.map(|routes| routes.ids.len()));
    let inputs = blueprint.layers.iter().flat_map(|l| &l.sub_blocks).map(|part| &part.input);
    let columns = inputs.filter_map(|input| match input {
        SubBlockInput::Bare { hidden } => Some(*hidden),
        _ => None,
    });
    let lens = lens.chain(columns);
    lens.map(|len| page_align(len as u64 * 4)).sum()
}

/// Bytes of scratch buffers, including logits.
pub(super) fn scratch_bytes(
    blueprint: &Blueprint,
    rows: usize,
    context: usize,
    sessions: usize,
) -> u64 {
    let head_rows = logit_rows(rows, sessions);
    let logits = blueprint.vocab as u64 * 4 * head_rows as u64
        + page_align(4 * (head_rows * TOP_CANDIDATES) as u64);
    let buffers = 12 + SCRATCH_BUFFERS + blueprint.memories().count();
    let of_drafter = match blueprint.attached_drafter() {
        Some(_) => drafter_values(blueprint.hidden, sessions).map(|len| len as u64 * 4),
        None => [0; 2],
    };
    let of_drafter: u64 = of_drafter.into_iter().map(page_align).sum();
    let images = page_align(StepImages::bytes(blueprint, rows));
    let scratch = Scratch::bytes(blueprint, rows, context) + buffers as u64 * page_align(1);
    scratch + images + logits + of_drafter
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

/// Host memory in which the residual stream goes from card to card.
fn carried_bytes(blueprint: &Blueprint, rows: usize, cards: usize) -> u64 {
    let width = blueprint.residual();
    let values = (rows * width).min(CARRIED_VALUES.max(width));
    if cards > 1 { page_align(4 * values as u64) } else { 0 }
}

#[cfg(test)]
mod tests {
    use moeflux_compute::{BankPlace, DeviceOptions};

    use super::{ExpertsOnHost, LEAST_SHARE, MemoryPlan, MemoryRequest, page_align};
    use crate::{
        experts::{PlacementOptions, slot_classes::SlotClasses},
        runtime::pools::{LineName, Pool, PoolLine},
    };
    use moeflux_model::{blueprint::Blueprint, checkpoint::Checkpoint};

    #[test]
    fn the_page_cache_need_not_hold_tables() {
        let checkpoint = Checkpoint::open(&moeflux_goldens::golden("qwen4_exp_hub")).unwrap();
        let blueprint = Blueprint::for_checkpoint(&checkpoint).unwrap();
        let device = DeviceOptions::default().name("cpu");
        let plan = |slots: Option<usize>| {
            let request = MemoryRequest::default().slots(slots);
            MemoryPlan::for_checkpoint(
                &checkpoint,
                &blueprint,
                &request,
                &device,
                &PlacementOptions::default(),
            )
            .unwrap()
            .0
        };
        let (all, few) = (plan(None), plan(Some(6)));
        assert!(all.holds_all && !few.holds_all);
        // 2304 rows of 4 numbers in BF16.
        let table = 2304 * 4 * 2;
        assert_eq!(blueprint.row_tables_bytes(), table);
        let bytes = |plan: &MemoryPlan| plan.cached_bytes(&checkpoint, &blueprint);
        assert_eq!(bytes(&all), checkpoint.total_bytes() - table);
        assert_eq!(bytes(&few), blueprint.experts_bytes() * 18 / 24);
    }

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
            drafts: 0,
            context: 256,
            context_shrunk: true,
            chunk: 256,
            working_set: 384,
            slot_classes: SlotClasses::uniform(1, 2_654_208),
            experts_on_host: ExpertsOnHost::Read,
            placement: None,
            expert_times: None,
            follows_recorded: false,
            card_of_layer: vec![0],
            states: vec![64 << 20],
            working_sets: vec![384],
            prefix_division: None,
        };
        for state in [2 << 20, 64 << 20, 1 << 30] {
            plan.dense_pools_mut()[0].set_bytes(LineName::State, state);
            let fixed = plan.fastest().fixed() - plan.bytes(LineName::Marks);
            let left = plan.budget_for_token() - fixed;
            let marks = page_align(left / LEAST_SHARE).min(state / 2);
            let slots = (left - marks) / plan.slot_bytes();
            assert!((384..386).contains(&slots), "{slots} slots with a state of {state}");
        }
    }
}
