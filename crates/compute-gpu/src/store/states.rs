//! Per-sequence states on the card: KV cache and recurrent states, shared by forks.
//!
//! States are ranges of arenas, so that a kernel can address the states of all sequences of a step
//! in one binding. Kernels of one sequence bind its range. An arena has the memory that the limit
//! leaves, or as much as a binding can have. On a card that shares the host's memory, the first
//! arena holds the states of all sessions, and each further arena has twice the bytes of the one
//! before. States of one layer are in one arena as far as it has room. Ranges are reused first fit,
//! so fragments may make arenas exceed the limit.
//!
//! Kernels bind the KV cache of a state whole, so it is one allocation: the keys of all positions,
//! then their values. Where the limit has room for all positions of all sessions, it has their
//! capacity from the start: growth would copy it, and delay all sessions of the step. Otherwise it
//! has capacity for the positions written so far and, if memory allows it for all states of a step,
//! for some more; a write beyond moves the cache to a larger allocation. Forks share an allocation
//! until one of them is written. It gets a copy, or the others get a copy of just their
//! positions, at the other end of an arena. Copies are recorded among the ops, so that each op sees
//! the right contents. A step that is recorded ahead refers to allocations: none is replaced while
//! it exists.

use std::{cmp::Reverse, collections::BinaryHeap, mem, ops::Range, sync::Arc};

use moeflux_ops::{
    Commit, DeviceId, Error, KV_BLOCK, KvFormat, Span, State, StateShape, seam::stale,
};

use super::{
    arenas::{ArenaEnd, StateArena},
    buffer::{ALIGN, DeviceBuffer, align_up},
    store::Store,
};

/// Minimum bytes of an arena without a limit.
const MIN_ARENA: u64 = 1 << 20;
/// Share of all arenas that another one has at least, where fragments leave no range for a state
/// within the limit: a dispatch serves only sequences in the same arenas.
const ARENA_SHARE: u64 = 8;

/// Minimum capacity in positions of a KV cache that grows.
const MIN_KV_CAPACITY: usize = 4 * KV_BLOCK;

/// Memory for the KV cache of some positions.
#[derive(Clone, Debug)]
pub(crate) struct KvAllocation {
    pub(crate) buffer: Arc<DeviceBuffer>,
    /// Capacity in positions.
    pub(crate) capacity: usize,
    /// Offset of the values, in elements of the KV format.
    pub(crate) values: u32,
    /// Whether no state has had its memory before, which is zero.
    pub(crate) is_zero: bool,
}

/// KV cache of one layer of one sequence.
#[derive(Clone, Debug)]
pub(crate) struct GpuKvState {
    shape: StateShape,
    /// Layer of the model, if it is known.
    layer: Option<usize>,
    /// Length of the ring buffer.
    pub(crate) positions: usize,
    /// Bytes of the keys and of the values of a position.
    pub(crate) row_bytes: [usize; 2],
    pub(crate) allocation: Option<KvAllocation>,
    /// Number of positions, from the first, that may be read.
    pub(crate) used: usize,
}

/// Capacity that a KV cache gets when it grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KvCapacity {
    /// All positions.
    Whole,
    /// At least half more than before, as each growth copies the cache.
    Ample,
    /// The written positions.
    Exact,
}

/// Allocation that a write to a KV cache needs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvGrowth {
    /// New capacity in positions.
    pub(crate) capacity: usize,
    /// Bytes held in addition.
    pub(crate) added_bytes: u64,
    /// Positions to copy, if the forks that share the cache get the new allocation.
    pub(crate) of_forks: Option<usize>,
}

impl GpuKvState {
    /// Bytes of an allocation: keys, then values from an aligned offset.
    pub(crate) fn allocation_bytes(&self, capacity: usize) -> u64 {
        let [keys, values] =
            self.row_bytes.map(|bytes| (bytes as u64).saturating_mul(capacity as u64));
        buffer_bytes(align_up(keys).saturating_add(values))
    }

    /// Whether it has this allocation.
    fn shares(&self, other: &KvAllocation) -> bool {
        self.allocation.as_ref().is_some_and(|own| Arc::ptr_eq(&own.buffer, &other.buffer))
    }

    /// Capacity of the allocation if no fork shares it, else 0.
    fn exclusive_capacity(&self) -> usize {
        self.allocation
            .as_ref()
            .filter(|allocation| Arc::strong_count(&allocation.buffer) == 1)
            .map_or(0, |allocation| allocation.capacity)
    }

    /// Growth needed to write the positions before `end`; `None` if they fit.
    fn growth(&self, end: usize, capacity: KvCapacity) -> Option<KvGrowth> {
        let current = self.exclusive_capacity();
        if current >= end {
            return None;
        }
        let capacity = match capacity {
            KvCapacity::Whole => self.positions,
            KvCapacity::Ample => end.max(current / 2 * 3).max(MIN_KV_CAPACITY),
            KvCapacity::Exact => end,
        };
        let capacity = capacity.next_multiple_of(KV_BLOCK).min(self.positions);
        let freed = if current == 0 { 0 } else { self.allocation_bytes(current) };
        let added_bytes = self.allocation_bytes(capacity) - freed;
        Some(KvGrowth { capacity, added_bytes, of_forks: None })
    }

    /// End of the used positions after a write of `rows` rows; 0 without rows.
    pub(crate) fn end_after(&self, position: usize, rows: usize) -> usize {
        match rows {
            0 => 0,
            _ => position.saturating_add(rows).min(self.positions).max(self.used),
        }
    }
}

/// Recurrent state. Forks may share the committed contents.
#[derive(Debug)]
pub(crate) struct GpuRecurrentState {
    len: usize,
    /// Layer of the model, if it is known.
    layer: Option<usize>,
    pub(crate) committed: Arc<DeviceBuffer>,
    /// Contents after each part of a step's span; allocated by the first write.
    pub(crate) next: Vec<Arc<DeviceBuffer>>,
    /// Parts that were written since the last commit.
    pub(crate) written: usize,
}

impl GpuRecurrentState {
    /// Whether no fork shares the committed contents.
    pub(crate) fn is_exclusive(&self) -> bool {
        Arc::strong_count(&self.committed) == 1
    }

    /// Swaps committed contents and those after a part.
    pub(crate) fn swap(&mut self, part: usize) {
        if let Some(next) = self.next.get_mut(part) {
            mem::swap(&mut self.committed, next);
        }
    }

    /// Takes contents out that forks share.
    pub(crate) fn take_shared(&mut self, part: usize) -> Option<Arc<DeviceBuffer>> {
        let is_shared = self.next.get(part).is_some_and(|next| Arc::strong_count(next) > 1);
        is_shared.then(|| self.next.swap_remove(part))
    }
}

/// Recurrent state that a recorded step reads as an outcome of the current step leaves it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AdvancedState {
    pub(crate) state: State,
    /// Parts of the current step that the outcome keeps.
    pub(crate) parts: usize,
    /// Parts that the recorded step writes.
    pub(crate) written: usize,
    /// Parts that a commit has kept.
    pub(crate) committed: Option<usize>,
}

/// End of the positions of a KV cache that a recorded step writes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KvEnd {
    pub(crate) state: State,
    pub(crate) end: usize,
}

/// State on the card.
#[derive(Debug)]
pub(crate) enum GpuState {
    Kv(GpuKvState),
    Recurrent(GpuRecurrentState),
}

/// All states, by handle, and their memory accounting.
#[derive(Debug)]
pub(crate) struct GpuStates {
    /// Device of the handles.
    device: DeviceId,
    pub(crate) kv_format: KvFormat,
    all: Vec<Option<GpuState>>,
    /// Indices without a state, the lowest first.
    vacant: BinaryHeap<Reverse<usize>>,
    /// Bytes held by all states; shared allocations count once.
    pub(crate) held: u64,
    /// Upper bound of `held`.
    pub(crate) limit: Option<u64>,
    /// Whether the limit has room for whole KV caches of all sessions.
    pub(crate) reserves_whole: bool,
    /// Bytes of the states of all sessions, if they are known.
    pub(crate) expected: Option<u64>,
    /// Capacity of KV caches that grow, the same for all states of a step.
    capacity: KvCapacity,
    /// Ids of freed ranges whose bind groups are still cached.
    freed: Vec<u32>,
    arenas: Vec<StateArena>,
    /// Arena of the states of each layer.
    layer_arenas: Vec<Option<usize>>,
}

impl GpuStates {
    pub(super) const fn new(device: DeviceId, kv_format: KvFormat) -> Self {
        Self {
            device,
            kv_format,
            all: Vec::new(),
            vacant: BinaryHeap::new(),
            held: 0,
            limit: None,
            reserves_whole: false,
            expected: None,
            capacity: KvCapacity::Ample,
            freed: Vec::new(),
            arenas: Vec::new(),
            layer_arenas: Vec::new(),
        }
    }

    fn index(&self, state: State) -> Result<usize, Error> {
        state.0.index_on(self.device, "state")
    }

    pub(crate) fn get(&self, state: State) -> Result<&GpuState, Error> {
        self.all.get(self.index(state)?).and_then(Option::as_ref).ok_or_else(|| stale("state"))
    }

    fn get_mut(&mut self, state: State) -> Result<&mut GpuState, Error> {
        let index = self.index(state)?;
        self.all.get_mut(index).and_then(Option::as_mut).ok_or_else(|| stale("state"))
    }

    pub(crate) fn kv(&self, state: State) -> Result<&GpuKvState, Error> {
        match self.get(state)? {
            GpuState::Kv(kv) => Ok(kv),
            GpuState::Recurrent(_) => Err(stale("KV cache")),
        }
    }

    pub(crate) fn kv_mut(&mut self, state: State) -> Result<&mut GpuKvState, Error> {
        match self.get_mut(state)? {
            GpuState::Kv(kv) => Ok(kv),
            GpuState::Recurrent(_) => Err(stale("KV cache")),
        }
    }

    pub(crate) fn recurrent(&mut self, state: State) -> Result<&mut GpuRecurrentState, Error> {
        match self.get_mut(state)? {
            GpuState::Recurrent(recurrent) => Ok(recurrent),
            GpuState::Kv(_) => Err(stale("recurrent state")),
        }
    }

    pub(crate) fn shape(&self, state: State) -> Result<StateShape, Error> {
        Ok(match self.get(state)? {
            GpuState::Kv(kv) => kv.shape,
            GpuState::Recurrent(recurrent) => StateShape::Recurrent { len: recurrent.len },
        })
    }

    /// Checks a range of saved positions against a state and the length of their bytes. Returns the
    /// bytes of a position.
    pub(crate) fn position_bytes(
        &self,
        state: State,
        positions: &Range<usize>,
        len: usize,
    ) -> Result<usize, Error> {
        self.shape(state)?.check_entries(self.kv_format, positions, len)
    }

    fn add(&mut self, state: GpuState) -> State {
        let index = match self.vacant.pop() {
            Some(Reverse(index)) => index,
            None => {
                self.all.push(None);
                self.all.len() - 1
            }
        };
        self.all[index] = Some(state);
        State(self.device.handle(index))
    }

    fn fits(&self, bytes: u64) -> bool {
        self.limit.is_none_or(|limit| self.held.saturating_add(bytes) <= limit)
    }

    /// Growth before a write of the positions before `end` to a KV cache; `None` if they fit.
    pub(crate) fn growth(&self, kv: &GpuKvState, end: usize) -> Option<KvGrowth> {
        let growth = self.growth_to(kv, end, self.capacity)?;
        if self.fits(growth.added_bytes) {
            return Some(growth);
        }
        kv.growth(end, KvCapacity::Exact)
    }

    fn growth_to(&self, kv: &GpuKvState, end: usize, capacity: KvCapacity) -> Option<KvGrowth> {
        match &kv.allocation {
            Some(shared)
                if capacity == KvCapacity::Whole
                    && Arc::strong_count(&shared.buffer) > 1
                    && shared.capacity >= end =>
            {
                // Forks count as long as they share it, this one among them.
                let forks = self.all.iter().flatten().filter_map(|state| match state {
                    GpuState::Kv(fork) if fork.shares(shared) && !std::ptr::eq(fork, kv) => {
                        Some(fork.used)
                    }
                    _ => None,
                });
                let used = forks.max().unwrap_or(0);
                let capacity = used.next_multiple_of(KV_BLOCK).min(kv.positions);
                let added_bytes = kv.allocation_bytes(capacity);
                Some(KvGrowth { capacity, added_bytes, of_forks: Some(used) })
            }
            _ => kv.growth(end, capacity),
        }
    }

    /// Replaces the allocation of a KV cache, or that of the forks that share it.
    pub(crate) fn replace_kv(
        &mut self,
        state: State,
        new: KvAllocation,
        of_forks: bool,
    ) -> Result<(), Error> {
        let Some(old) = self.kv(state)?.allocation.clone().filter(|_| of_forks) else {
            let old = self.kv_mut(state)?.allocation.replace(new);
            self.release(old.map(|old| old.buffer));
            return Ok(());
        };
        let index = self.index(state)?;
        for (i, fork) in self.all.iter_mut().enumerate() {
            if let Some(GpuState::Kv(fork)) = fork
                && i != index
                && fork.shares(&old)
            {
                fork.allocation = Some(new.clone());
            }
        }
        Ok(())
    }

    /// Bytes that ops on these spans will allocate. Decides for all of them together whether growth
    /// is ample: otherwise the states that grow first would leave too little for the others.
    pub(crate) fn need(&mut self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error> {
        const CAPACITIES: [KvCapacity; 3] =
            [KvCapacity::Whole, KvCapacity::Ample, KvCapacity::Exact];
        let mut all = [0u64; CAPACITIES.len()];
        // Shared allocations of which a span has taken the forks away.
        let mut unshared: Vec<*const DeviceBuffer> = Vec::new();
        for span in spans {
            let bytes = match self.get(span.state)? {
                GpuState::Kv(kv) => {
                    let end = kv.end_after(span.position, span.rows);
                    let shared = kv.allocation.as_ref().map(|shared| Arc::as_ptr(&shared.buffer));
                    let is_first = shared.is_none_or(|shared| !unshared.contains(&shared));
                    let growth = CAPACITIES.map(|capacity| match is_first {
                        true => self.growth_to(kv, end, capacity),
                        false => kv.growth(end, capacity),
                    });
                    if growth[0].is_some_and(|growth| growth.of_forks.is_some()) {
                        unshared.extend(shared);
                    }
                    growth.map(|growth| growth.map_or(0, |growth| growth.added_bytes))
                }
                GpuState::Recurrent(GpuRecurrentState { len, next, .. }) => {
                    let missing = span.parts().count().saturating_sub(next.len()) as u64;
                    [missing * buffer_bytes(recurrent_bytes(*len)); CAPACITIES.len()]
                }
            };
            all.iter_mut().zip(bytes).for_each(|(all, bytes)| *all = all.saturating_add(bytes));
        }
        let [_, _, exact] = all;
        let fits = |(capacity, bytes): &(KvCapacity, u64)| {
            (*capacity != KvCapacity::Whole || self.reserves_whole) && self.fits(*bytes)
        };
        let chosen = CAPACITIES.into_iter().zip(all).find(fits);
        let (capacity, bytes) = chosen.unwrap_or((KvCapacity::Exact, exact));
        self.capacity = capacity;
        Ok(bytes)
    }

    /// Forks a state. A KV cache keeps the positions before `positions`.
    pub(crate) fn fork(&mut self, state: State, positions: usize) -> Result<State, Error> {
        let fork = match self.get(state)? {
            GpuState::Kv(kv) => {
                let used = kv.used.min(positions);
                let allocation = kv.allocation.clone().filter(|_| used > 0);
                GpuState::Kv(GpuKvState { allocation, used, ..*kv })
            }
            GpuState::Recurrent(GpuRecurrentState { len, layer, committed, .. }) => {
                GpuState::Recurrent(GpuRecurrentState {
                    len: *len,
                    layer: *layer,
                    committed: Arc::clone(committed),
                    next: Vec::new(),
                    written: 0,
                })
            }
        };
        Ok(self.add(fork))
    }

    /// Truncates a KV cache. Its allocation is released only when no position is left.
    pub(crate) fn truncate(&mut self, state: State, positions: usize) -> Result<(), Error> {
        if let GpuState::Kv(kv) = self.get_mut(state)? {
            kv.used = kv.used.min(positions);
            let allocation = kv.allocation.take_if(|_| kv.used == 0);
            self.release(allocation.map(|allocation| allocation.buffer));
        }
        Ok(())
    }

    pub(crate) fn drop(&mut self, state: State) {
        let Ok(index) = self.index(state) else { return };
        let dropped = self.all.get_mut(index).and_then(Option::take);
        if dropped.is_some() {
            self.vacant.push(Reverse(index));
        }
        match dropped {
            Some(GpuState::Kv(kv)) => {
                self.release(kv.allocation.map(|allocation| allocation.buffer));
            }
            Some(GpuState::Recurrent(recurrent)) => {
                self.release([recurrent.committed].into_iter().chain(recurrent.next));
            }
            None => {}
        }
    }

    /// Makes the contents of a recurrent state after some parts of the span the committed ones, if
    /// ops wrote them.
    pub(crate) fn commit(&mut self, state: State, parts: usize) -> Result<(), Error> {
        if let GpuState::Recurrent(recurrent) = self.get_mut(state)?
            && let Some(last) = parts.min(mem::take(&mut recurrent.written)).checked_sub(1)
        {
            recurrent.swap(last);
            // `next` now has the old contents; forks that share them keep the buffer.
            let shared = recurrent.take_shared(last);
            self.release(shared);
        }
        Ok(())
    }

    /// Makes contents of recurrent states the committed ones that a commit of `outcome` will make
    /// so. Returns the recurrent states of it. `None`, without a change, if one was not written or
    /// is shared with a fork.
    pub(crate) fn advance(
        &mut self,
        outcome: &[Commit],
    ) -> Result<Option<Vec<AdvancedState>>, Error> {
        let mut advanced = Vec::with_capacity(outcome.len());
        for commit in outcome {
            let (state, parts) = (commit.span.state, commit.kept_parts());
            match self.get(state)? {
                GpuState::Recurrent(r) if (1..=r.written).contains(&parts) && r.is_exclusive() => {
                    advanced.push(AdvancedState { state, parts, written: 0, committed: None });
                }
                GpuState::Recurrent(_) => return Ok(None),
                GpuState::Kv(_) => {}
            }
        }
        self.exchange(&mut advanced)?;
        Ok(Some(advanced))
    }

    /// Reverts [`GpuStates::advance`]. `advanced` keeps what ops have written in between.
    pub(crate) fn retreat(&mut self, advanced: &mut [AdvancedState]) -> Result<(), Error> {
        self.exchange(advanced)
    }

    fn exchange(&mut self, advanced: &mut [AdvancedState]) -> Result<(), Error> {
        advanced.iter_mut().try_for_each(|AdvancedState { state, parts, written, .. }| {
            let state = self.recurrent(*state)?;
            state.swap(*parts - 1);
            mem::swap(&mut state.written, written);
            Ok(())
        })
    }

    /// Marks what the ops of a recorded step write, as it is submitted: parts of recurrent states,
    /// and KV caches up to some positions.
    pub(crate) fn mark_written(
        &mut self,
        advanced: &[AdvancedState],
        kv_ends: &[KvEnd],
    ) -> Result<(), Error> {
        for AdvancedState { state, written, .. } in advanced {
            self.recurrent(*state)?.written = *written;
        }
        for KvEnd { state, end } in kv_ends {
            let kv = self.kv_mut(*state)?;
            kv.used = kv.used.max(*end);
        }
        Ok(())
    }

    /// Releases references to buffers; those without other references are freed.
    pub(crate) fn release(&mut self, buffers: impl IntoIterator<Item = Arc<DeviceBuffer>>) {
        for buffer in buffers.into_iter().filter_map(Arc::into_inner) {
            self.held -= buffer.size;
            self.freed.push(buffer.id);
            let arena = self.arenas.iter_mut().find(|arena| arena.buffer.raw == buffer.raw);
            if let Some(arena) = arena {
                arena.give(buffer.start..buffer.start + buffer.size);
            }
        }
    }

    /// The arena of a range.
    pub(crate) fn arena(&self, range: &DeviceBuffer) -> Option<&DeviceBuffer> {
        let mut arenas = self.arenas.iter().map(|arena| &arena.buffer);
        arenas.find(|buffer| buffer.raw == range.raw)
    }

    /// Takes `bytes` of an arena, that of the layer if it has room. `id` is that of the range.
    /// Returns whether its memory is zero.
    fn take(
        &mut self,
        id: u32,
        bytes: u64,
        end: ArenaEnd,
        layer: Option<usize>,
    ) -> Option<(DeviceBuffer, bool)> {
        let of_layer = layer.and_then(|layer| self.arena_of_layer(layer));
        let others = (0..self.arenas.len()).filter(|i| Some(*i) != of_layer);
        of_layer.into_iter().chain(others).find_map(|i| {
            let arena = self.arenas.get_mut(i)?;
            let (start, is_zero) = arena.take(bytes, end)?;
            let raw = arena.buffer.raw.clone();
            Some((DeviceBuffer { id, raw, start, size: bytes }, is_zero))
        })
    }

    /// Arena of the states of a layer: the one with the fewest layers for its size, if it had none.
    fn arena_of_layer(&mut self, layer: usize) -> Option<usize> {
        if self.layer_arenas.len() <= layer {
            self.layer_arenas.resize(layer + 1, None);
        }
        if self.layer_arenas[layer].is_none() {
            let layers = |i: usize| self.layer_arenas.iter().filter(|a| **a == Some(i)).count();
            let bytes_each = |i: &usize| self.arenas[*i].buffer.size / (layers(*i) as u64 + 1);
            self.layer_arenas[layer] = (0..self.arenas.len()).max_by_key(bytes_each);
        }
        self.layer_arenas[layer]
    }

    /// Takes the ids of freed buffers, whose bind groups are stale.
    pub(crate) fn take_freed(&mut self) -> Vec<u32> {
        mem::take(&mut self.freed)
    }
}

/// Bytes of a recurrent state of `len` f32 values, capped above any real memory size.
fn recurrent_bytes(len: usize) -> u64 {
    (len as u64).saturating_mul(4).min(1 << 60)
}

/// Bytes of the buffer that is allocated for `bytes`.
fn buffer_bytes(bytes: u64) -> u64 {
    align_up(bytes.max(1))
}

impl Store {
    /// Bytes that a state holds once all of it is written.
    pub(crate) fn state_bytes(&self, shape: StateShape) -> u64 {
        match shape {
            StateShape::KeyValue { .. } => {
                self.empty_kv(shape).map_or(u64::MAX / 2, |kv| kv.allocation_bytes(kv.positions))
            }
            StateShape::Recurrent { len } => 2 * buffer_bytes(recurrent_bytes(len)),
        }
    }

    /// Empty KV cache; `None` if the shape is too large or not a KV cache.
    fn empty_kv(&self, shape: StateShape) -> Option<GpuKvState> {
        let StateShape::KeyValue { kv_heads, key_width, value_width, positions } = shape else {
            return None;
        };
        let format = self.states.kv_format;
        let bytes = |width| format.bytes(width).checked_mul(kv_heads);
        let row_bytes = [bytes(key_width)?, bytes(value_width)?];
        let fits =
            |bytes: &usize| bytes.checked_mul(positions).is_some_and(|total| total < 1 << 40);
        row_bytes.iter().all(fits).then_some(GpuKvState {
            shape,
            layer: None,
            positions,
            row_bytes,
            allocation: None,
            used: 0,
        })
    }

    /// Creates a zeroed state. A KV cache gets memory when it is written.
    pub(crate) fn state(
        &mut self,
        shape: StateShape,
        layer: Option<usize>,
    ) -> Result<State, Error> {
        let state = match shape {
            StateShape::KeyValue { positions, .. } => {
                let Some(kv) = self.empty_kv(shape) else {
                    return Err(Error::Shape(format!(
                        "a state of {positions} positions is too large"
                    )));
                };
                self.check_bindable("KV cache", kv.allocation_bytes(positions))?;
                GpuState::Kv(GpuKvState { layer, ..kv })
            }
            StateShape::Recurrent { len } => {
                let committed = Arc::new(self.allocate_recurrent(len, layer)?);
                GpuState::Recurrent(GpuRecurrentState {
                    len,
                    layer,
                    committed,
                    next: Vec::new(),
                    written: 0,
                })
            }
        };
        Ok(self.states.add(state))
    }

    /// Allocates memory of states, which may have the contents of others. Returns whether it is
    /// zero.
    fn allocate_state(
        &mut self,
        label: &str,
        bytes: u64,
        end: ArenaEnd,
        layer: Option<usize>,
    ) -> Result<(DeviceBuffer, bool), Error> {
        self.check_bindable(label, bytes)?;
        let (id, bytes) = (self.take_id(), buffer_bytes(bytes));
        if self.states.arenas.is_empty() && self.states.reserves_whole {
            // Layers are divided among all arenas.
            let limit = self.states.limit.unwrap_or(0);
            let mut total = 0;
            while total < limit {
                let Ok(arena) = self.allocate_arena(label, bytes) else { break };
                total += arena.size;
                self.states.arenas.push(StateArena::new(arena));
            }
        }
        let range = match self.states.take(id, bytes, end, layer) {
            Some(range) => range,
            None => {
                let arena = StateArena::new(self.allocate_arena(label, bytes)?);
                self.states.arenas.push(arena);
                self.states.take(id, bytes, end, layer).ok_or_else(|| stale("state"))?
            }
        };
        self.states.held += bytes;
        Ok(range)
    }

    /// Allocates an arena with room for `bytes`: with all that the limit leaves, or as much as is
    /// expected; otherwise as large as all arenas together.
    fn allocate_arena(&mut self, label: &str, bytes: u64) -> Result<DeviceBuffer, Error> {
        let total: u64 = self.states.arenas.iter().map(|arena| arena.buffer.size).sum();
        let wanted = match self.states.limit {
            Some(limit) => {
                let expected = self.states.expected.filter(|_| !self.states.reserves_whole);
                limit.saturating_sub(total).min(expected.map_or(u64::MAX, |e| e.max(total)))
            }
            None => total.max(MIN_ARENA),
        };
        let wanted = wanted.max(total / ARENA_SHARE);
        let wanted = (wanted & !(ALIGN - 1)).min(self.max_bytes).max(bytes);
        self.allocate(label, wanted).or_else(|_| self.allocate(label, bytes))
    }

    fn check_state_limit(&self, bytes: u64) -> Result<(), Error> {
        let GpuStates { held, limit, .. } = self.states;
        match limit {
            Some(limit) if !self.states.fits(bytes) => {
                Err(Error::StatesFull { bytes, held, limit })
            }
            _ => Ok(()),
        }
    }

    fn allocate_recurrent(
        &mut self,
        len: usize,
        layer: Option<usize>,
    ) -> Result<DeviceBuffer, Error> {
        let bytes = recurrent_bytes(len);
        self.check_state_limit(buffer_bytes(bytes))?;
        let (state, _) = self.allocate_state("a recurrent state", bytes, ArenaEnd::First, layer)?;
        Ok(state)
    }

    /// Allocates a KV cache for the growth of a state, without its contents.
    pub(crate) fn allocate_kv(
        &mut self,
        kv: &GpuKvState,
        growth: KvGrowth,
    ) -> Result<KvAllocation, Error> {
        self.check_state_limit(growth.added_bytes)?;
        let bytes = kv.allocation_bytes(growth.capacity);
        let end = if growth.of_forks.is_some() { ArenaEnd::Last } else { ArenaEnd::First };
        let (buffer, is_zero) = self.allocate_state("KV cache", bytes, end, kv.layer)?;
        let element = self.states.kv_format.bytes(1) as u64;
        let values = (align_up(kv.row_bytes[0] as u64 * growth.capacity as u64) / element) as u32;
        let KvGrowth { capacity, .. } = growth;
        Ok(KvAllocation { buffer: Arc::new(buffer), capacity, values, is_zero })
    }

    /// Recurrent state with memory for the contents after a part.
    pub(crate) fn writable(
        &mut self,
        state: State,
        part: usize,
    ) -> Result<&mut GpuRecurrentState, Error> {
        while self.states.recurrent(state)?.next.len() <= part {
            let &mut GpuRecurrentState { len, layer, .. } = self.states.recurrent(state)?;
            let next = Arc::new(self.allocate_recurrent(len, layer)?);
            self.states.recurrent(state)?.next.push(next);
        }
        self.states.recurrent(state)
    }

    /// Marks the contents of a recurrent state after a part as written. Returns those before it and
    /// those after it.
    pub(crate) fn write_recurrent(
        &mut self,
        state: State,
        part: usize,
    ) -> Result<[DeviceBuffer; 2], Error> {
        let recurrent = self.writable(state, part)?;
        recurrent.written = part + 1;
        let before = part.checked_sub(1).map_or(&recurrent.committed, |i| &recurrent.next[i]);
        Ok([before, &recurrent.next[part]].map(|buffer| DeviceBuffer::clone(buffer)))
    }
}
