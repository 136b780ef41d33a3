//! States in host memory: paged KV caches and recurrent states, shared copy on write.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    mem,
    ops::Range,
    sync::Arc,
};

use moeflux_base::KvFormat;

use super::{kv_formats::encode_kv, values::HostValues};
use crate::{
    device::Commit,
    error::Error,
    handle::{DeviceId, State},
    matrix::Bytes,
    op_check::stale,
    operands::Span,
    state::{KV_BLOCK, StateShape},
};

/// Bytes of a mapping: `bytes` rounded up to whole pages of 4096.
fn mapped(bytes: usize) -> u64 {
    bytes.next_multiple_of(4096) as u64
}

/// Allocator of state memory, with a free list and a limit.
#[derive(Debug, Default)]
struct PagePool {
    /// Memory without a state, by its length.
    free: BTreeMap<usize, Vec<Bytes>>,
    /// Bytes in `free`.
    idle: u64,
    /// Bytes in use.
    held: u64,
    limit: Option<u64>,
}

impl PagePool {
    /// Allocates `len` bytes. Reused memory is not zeroed.
    fn take(&mut self, len: usize) -> Result<Bytes, Error> {
        let bytes = mapped(len);
        if let Some(limit) = self.limit
            && self.held + bytes > limit
        {
            return Err(Error::StatesFull { bytes, held: self.held, limit });
        }
        let memory = match self.free.get_mut(&len).and_then(Vec::pop) {
            Some(memory) => {
                self.idle -= bytes;
                memory
            }
            None => {
                self.trim(bytes);
                Bytes::zeroed(len)?
            }
        };
        self.held += bytes;
        Ok(memory)
    }

    /// Unmaps idle memory until `bytes` more fit the limit.
    fn trim(&mut self, bytes: u64) {
        let most = self.limit.map_or(u64::MAX, |limit| limit.saturating_sub(self.held + bytes));
        while self.idle > most
            && let Some(mut largest) = self.free.last_entry()
        {
            match largest.get_mut().pop() {
                Some(memory) => self.idle -= mapped(memory.len()),
                None => {
                    largest.remove();
                }
            }
        }
    }

    fn release(&mut self, memory: Bytes) {
        if memory.is_empty() {
            return;
        }
        let bytes = mapped(memory.len());
        self.held -= bytes;
        // Without a limit, the memory plan does not count idle memory: it is unmapped.
        if self.limit.is_some() {
            self.idle += bytes;
            self.free.entry(memory.len()).or_default().push(memory);
        }
    }

    /// Releases memory unless another state shares it.
    fn release_shared(&mut self, memory: Arc<Bytes>) {
        if let Some(memory) = Arc::into_inner(memory) {
            self.release(memory);
        }
    }
}

/// Key or value vector of a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvKind {
    /// The key.
    Key,
    /// The value.
    Value,
}

/// KV cache of one layer of one sequence, in pages of [`KV_BLOCK`] positions.
///
/// A page is `[kv_heads, positions, key_width]`, then `[kv_heads, positions, value_width]`: the
/// keys of one head in a page are contiguous, and so are its values.
#[derive(Debug)]
pub struct HostKvCache {
    /// Heads of keys and values.
    pub kv_heads: usize,
    /// Elements of a head of a key.
    pub key_width: usize,
    /// Elements of a head of a value.
    pub value_width: usize,
    pub(crate) positions: usize,
    /// Format of the elements.
    pub format: KvFormat,
    pages: Vec<Option<Arc<Bytes>>>,
}

impl HostKvCache {
    const fn shape(&self) -> StateShape {
        let &Self { kv_heads, key_width, value_width, positions, .. } = self;
        StateShape::KeyValue { kv_heads, key_width, value_width, positions }
    }

    /// Positions per page.
    fn page_positions(&self) -> usize {
        KV_BLOCK.min(self.positions)
    }

    fn page_bytes(&self) -> usize {
        self.shape().entry_bytes(self.format) * self.page_positions()
    }

    /// Elements of a head of a vector of this kind.
    #[inline]
    pub fn width(&self, kind: KvKind) -> usize {
        match kind {
            KvKind::Key => self.key_width,
            KvKind::Value => self.value_width,
        }
    }

    /// Bytes of one vector.
    #[inline]
    pub fn bytes(&self, kind: KvKind) -> usize {
        self.format.bytes(self.width(kind))
    }

    /// Page of an entry, and byte offset of a head's vector in that page.
    fn locate(&self, kind: KvKind, entry: usize, head: usize) -> (usize, usize) {
        let page_positions = self.page_positions();
        let plane = match kind {
            KvKind::Key => 0,
            KvKind::Value => self.kv_heads * page_positions * self.bytes(KvKind::Key),
        };
        let vector = head * page_positions + entry % page_positions;
        (entry / page_positions, plane + vector * self.bytes(kind))
    }

    /// Vectors of a head from a position to the end of that position's page.
    #[inline]
    pub fn vectors(
        &self,
        kind: KvKind,
        position: usize,
        head: usize,
    ) -> impl ExactSizeIterator<Item = &[u8]> {
        self.contiguous(kind, position, head).chunks_exact(self.bytes(kind).max(1))
    }

    /// Bytes of the same vectors, which are contiguous.
    #[inline]
    pub fn contiguous(&self, kind: KvKind, position: usize, head: usize) -> &[u8] {
        let entry = position % self.positions;
        let (page, start) = self.locate(kind, entry, head);
        let len = (self.page_positions() - entry % self.page_positions()) * self.bytes(kind);
        // Ops allocate the pages of all positions up to their last one first.
        self.pages[page].as_ref().map_or(&[][..], |page| &page[start..start + len])
    }

    /// Vector of a position and a head.
    #[inline]
    pub fn vector(&self, kind: KvKind, position: usize, head: usize) -> &[u8] {
        self.vectors(kind, position, head).next().unwrap_or(&[])
    }

    /// Writes the vector of a position and a head. The position's page must not be shared.
    #[inline]
    pub fn write(&mut self, kind: KvKind, position: usize, head: usize, src: &[f32]) {
        let (page, start) = self.locate(kind, position % self.positions, head);
        let (format, bytes) = (self.format, self.bytes(kind));
        if let Some(page) = self.pages[page].as_mut().and_then(Arc::get_mut) {
            encode_kv(format, src, &mut page[start..start + bytes]);
        }
    }

    /// Pages that must exist for an op that writes `rows` rows from `position` on, none without
    /// rows, and a predicate for the pages that it writes.
    fn touched(
        &self,
        position: usize,
        rows: usize,
    ) -> (Range<usize>, impl Fn(usize) -> bool + use<>) {
        let (positions, page_positions) = (self.positions, self.page_positions());
        let end = if rows == 0 { 0 } else { position.saturating_add(rows) };
        let first = if rows >= positions { 0 } else { position % positions.max(1) };
        let last = first + rows.min(positions);
        let written = move |page: usize| {
            let start = page * page_positions;
            let overlaps =
                |range: &Range<usize>| range.start < start + page_positions && start < range.end;
            // The rows, and those of them that wrap around to the first page.
            overlaps(&(first..last)) || overlaps(&(0..last.saturating_sub(positions)))
        };
        (0..end.min(positions).div_ceil(page_positions.max(1)), written)
    }

    /// Whether the first `len` entries have memory.
    #[inline]
    pub fn has_entries(&self, len: usize) -> bool {
        let pages = len.div_ceil(self.page_positions().max(1));
        self.pages.iter().take(pages).all(Option::is_some)
    }

    /// Bytes to allocate before the rows can be written.
    fn missing_bytes(&self, position: usize, rows: usize) -> u64 {
        let (pages, written) = self.touched(position, rows);
        let missing = pages.filter(|i| match &self.pages[*i] {
            None => true,
            Some(page) => written(*i) && Arc::strong_count(page) > 1,
        });
        missing.count() as u64 * mapped(self.page_bytes())
    }

    /// Allocates missing pages, and copies shared pages that the rows are written to.
    fn make_writable(
        &mut self,
        pool: &mut PagePool,
        position: usize,
        rows: usize,
    ) -> Result<(), Error> {
        let len = self.page_bytes();
        let (pages, written) = self.touched(position, rows);
        for i in pages {
            match &mut self.pages[i] {
                None => {
                    let mut page = pool.take(len)?;
                    if !written(i) {
                        page.fill(0);
                    }
                    self.pages[i] = Some(Arc::new(page));
                }
                Some(page) if written(i) && Arc::strong_count(page) > 1 => {
                    let mut copy = pool.take(len)?;
                    copy.copy_from_slice(page);
                    pool.release_shared(mem::replace(page, Arc::new(copy)));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Frees all pages whose entries are all at `len` or later.
    fn truncate(&mut self, pool: &mut PagePool, len: usize) {
        let first = len.div_ceil(self.page_positions().max(1)).min(self.pages.len());
        for page in self.pages[first..].iter_mut().filter_map(Option::take) {
            pool.release_shared(page);
        }
    }

    /// Page and byte range of each vector of an entry: keys of all heads, then values.
    fn ranges(&self, entry: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        [KvKind::Key, KvKind::Value].into_iter().flat_map(move |kind| {
            (0..self.kv_heads).map(move |head| {
                let (page, start) = self.locate(kind, entry, head);
                (page, start..start + self.bytes(kind))
            })
        })
    }
}

/// Recurrent state: the committed values, which forks may share, and the values after each part of
/// the current step's span.
#[derive(Debug, Default)]
pub struct HostRecurrent {
    committed: Arc<HostValues>,
    /// Values after each part; some may be of earlier steps.
    next: Vec<HostValues>,
    /// Parts that the current step has written.
    written: usize,
}

impl HostRecurrent {
    /// Values before a part of the span, and its values to write.
    #[inline]
    pub fn part(&mut self, index: usize) -> (&[f32], &mut [f32]) {
        let (before, next) = self.next.split_at_mut(index);
        let before = before.last().map_or(&self.committed[..], |values| values);
        (before, next.first_mut().map_or(&mut [], |values| values))
    }
}

#[derive(Debug)]
enum HostState {
    KvCache(HostKvCache),
    Recurrent(HostRecurrent),
    /// Moved out while an op uses it.
    Busy,
}

/// All states of a host device, by handle.
#[derive(Debug)]
pub struct HostStates {
    /// Device of the handles.
    device: DeviceId,
    kv_format: KvFormat,
    states: Vec<Option<HostState>>,
    /// Indices without a state, the lowest first.
    vacant: BinaryHeap<Reverse<usize>>,
    pool: PagePool,
}

impl HostStates {
    #[inline]
    pub(crate) fn new(device: DeviceId, kv_format: KvFormat) -> Self {
        let (states, vacant) = (Vec::new(), BinaryHeap::new());
        Self { device, kv_format, states, vacant, pool: PagePool::default() }
    }

    #[inline]
    pub(crate) fn kv_format(&self) -> KvFormat {
        self.kv_format
    }

    #[inline]
    pub(crate) fn limit(&mut self, bytes: u64) {
        self.pool.limit = Some(bytes);
        self.pool.trim(0);
    }

    #[inline]
    pub(crate) fn held(&self) -> u64 {
        self.pool.held
    }

    /// Bytes of a full state.
    #[inline]
    pub(crate) fn bytes(&self, shape: StateShape) -> u64 {
        match shape {
            StateShape::KeyValue { positions, .. } => {
                let page_positions = KV_BLOCK.min(positions).max(1);
                let page = shape.entry_bytes(self.kv_format).saturating_mul(page_positions);
                (page.saturating_add(4095) as u64 / 4096 * 4096)
                    .saturating_mul(positions.div_ceil(page_positions) as u64)
            }
            // Two buffers: committed and next.
            StateShape::Recurrent { len } => (len as u64 * 4).next_multiple_of(4096) * 2,
        }
    }

    fn add(&mut self, state: HostState) -> State {
        let index = match self.vacant.pop() {
            Some(Reverse(index)) => index,
            None => {
                self.states.push(None);
                self.states.len() - 1
            }
        };
        self.states[index] = Some(state);
        State(self.device.handle(index))
    }

    fn index(&self, state: State) -> Result<usize, Error> {
        state.0.index_on(self.device, "state")
    }

    pub(crate) fn create(&mut self, shape: StateShape) -> Result<State, Error> {
        let state = match shape {
            StateShape::KeyValue { kv_heads, key_width, value_width, positions } => {
                let limit = isize::MAX as usize / 2;
                if shape
                    .entry_bytes(self.kv_format)
                    .checked_mul(positions)
                    .is_none_or(|bytes| bytes > limit)
                {
                    return Err(Error::Shape(format!(
                        "a state of {positions} positions is too large"
                    )));
                }
                let pages = vec![None; positions.div_ceil(KV_BLOCK.min(positions).max(1))];
                let format = self.kv_format;
                HostState::KvCache(HostKvCache {
                    kv_heads,
                    key_width,
                    value_width,
                    positions,
                    format,
                    pages,
                })
            }
            StateShape::Recurrent { len } => {
                let committed = Arc::new(self.take_zeroed(len)?);
                HostState::Recurrent(HostRecurrent { committed, ..HostRecurrent::default() })
            }
        };
        Ok(self.add(state))
    }

    /// Allocates one buffer of a recurrent state. Reused memory is not zeroed.
    fn take_values(&mut self, len: usize) -> Result<HostValues, Error> {
        let bytes =
            len.checked_mul(4).ok_or_else(|| Error::Shape(format!("{len} values are too many")))?;
        Ok(HostValues(self.pool.take(bytes)?))
    }

    fn take_zeroed(&mut self, len: usize) -> Result<HostValues, Error> {
        let mut values = self.take_values(len)?;
        values.fill(0.0);
        Ok(values)
    }

    fn get(&self, state: State) -> Result<&HostState, Error> {
        let index = self.index(state)?;
        self.states.get(index).and_then(Option::as_ref).ok_or_else(|| stale("state"))
    }

    fn get_mut(&mut self, state: State) -> Result<&mut HostState, Error> {
        let index = self.index(state)?;
        self.states.get_mut(index).and_then(Option::as_mut).ok_or_else(|| stale("state"))
    }

    #[inline]
    pub(crate) fn shape(&self, state: State) -> Result<StateShape, Error> {
        match self.get(state)? {
            HostState::KvCache(kv) => Ok(kv.shape()),
            HostState::Recurrent(r) => Ok(StateShape::Recurrent { len: r.committed.len() }),
            HostState::Busy => Err(stale("state")),
        }
    }

    /// Bytes to allocate before ops can run on the rows of `spans`.
    #[inline]
    pub(crate) fn need(&self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error> {
        let mut needed = 0;
        for span in spans {
            needed += match self.get(span.state)? {
                HostState::KvCache(kv) => kv.missing_bytes(span.position, span.rows),
                HostState::Recurrent(r) => {
                    let missing = span.parts().count().saturating_sub(r.next.len());
                    missing as u64 * mapped(r.committed.len() * 4)
                }
                HostState::Busy => return Err(stale("state")),
            };
        }
        Ok(needed)
    }

    #[inline]
    pub(crate) fn fork(&mut self, state: State, len: usize) -> Result<State, Error> {
        let fork = match self.get(state)? {
            HostState::KvCache(kv) => {
                let kept = len.div_ceil(kv.page_positions().max(1));
                let pages =
                    kv.pages.iter().enumerate().map(|(i, page)| page.clone().filter(|_| i < kept));
                HostState::KvCache(HostKvCache { pages: pages.collect(), ..*kv })
            }
            HostState::Recurrent(r) => HostState::Recurrent(HostRecurrent {
                committed: Arc::clone(&r.committed),
                ..HostRecurrent::default()
            }),
            HostState::Busy => return Err(stale("state")),
        };
        Ok(self.add(fork))
    }

    #[inline]
    pub(crate) fn free(&mut self, state: State) {
        let Ok(index) = self.index(state) else { return };
        let Some(freed) = self.states.get_mut(index).and_then(Option::take) else { return };
        self.vacant.push(Reverse(index));
        match freed {
            HostState::KvCache(mut kv) => kv.truncate(&mut self.pool, 0),
            HostState::Recurrent(HostRecurrent { committed, next, .. }) => {
                next.into_iter().for_each(|values| self.pool.release(values.0));
                if let Some(values) = Arc::into_inner(committed) {
                    self.pool.release(values.0);
                }
            }
            HostState::Busy => {}
        }
    }

    #[inline]
    pub(crate) fn reset(&mut self, state: State) -> Result<(), Error> {
        self.truncate(state, 0)?;
        if let StateShape::Recurrent { .. } = self.shape(state)? {
            let mut r = self.take_recurrent(state, 0)?;
            if Arc::get_mut(&mut r.committed).is_none() {
                r.committed = Arc::new(r.next.swap_remove(0));
            }
            if let Some(values) = Arc::get_mut(&mut r.committed) {
                values.fill(0.0);
            }
            r.written = 0;
            *self.get_mut(state)? = HostState::Recurrent(r);
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn truncate(&mut self, state: State, len: usize) -> Result<(), Error> {
        let index = self.index(state)?;
        let slot = self.states.get_mut(index).and_then(Option::as_mut);
        if let HostState::KvCache(kv) = slot.ok_or_else(|| stale("state"))? {
            kv.truncate(&mut self.pool, len);
        }
        Ok(())
    }

    /// See [`StateStore::commit`](crate::StateStore::commit).
    #[inline]
    pub(crate) fn commit(&mut self, commits: &[Commit]) -> Result<(), Error> {
        // All commits are valid, or no state is changed.
        commits.iter().try_for_each(|commit| commit.check(self.shape(commit.span.state)?))?;
        for commit in commits {
            let state = commit.span.state;
            if let HostState::Recurrent(r) = self.get_mut(state)? {
                // An op that has not run leaves the state as it is.
                let parts = commit.kept_parts().min(mem::take(&mut r.written));
                let Some(last) = parts.checked_sub(1) else { continue };
                match Arc::get_mut(&mut r.committed) {
                    Some(committed) => mem::swap(committed, &mut r.next[last]),
                    // A fork shares the previously committed values.
                    None => r.committed = Arc::new(r.next.swap_remove(last)),
                }
            } else if let Some(positions) = commit.kept_positions() {
                self.truncate(state, positions)?;
            }
        }
        Ok(())
    }

    /// Moves a KV cache out while an op writes rows of it. [`HostStates::put_kv`] returns it.
    #[inline]
    pub fn take_kv(
        &mut self,
        state: State,
        position: usize,
        rows: usize,
    ) -> Result<HostKvCache, Error> {
        let index = self.index(state)?;
        let slot = self.states.get_mut(index).and_then(Option::as_mut);
        let slot = slot.ok_or_else(|| stale("state"))?;
        let HostState::KvCache(kv) = slot else {
            return Err(Error::Shape("a recurrent state where a KV cache belongs".into()));
        };
        kv.make_writable(&mut self.pool, position, rows)?;
        match mem::replace(slot, HostState::Busy) {
            HostState::KvCache(kv) => Ok(kv),
            _ => Err(stale("state")),
        }
    }

    /// KV cache of a state.
    #[inline]
    pub fn kv_cache(&self, state: State) -> Result<&HostKvCache, Error> {
        match self.get(state)? {
            HostState::KvCache(kv) => Ok(kv),
            _ => Err(Error::Shape("a recurrent state where a KV cache belongs".into())),
        }
    }

    #[inline]
    pub fn put_kv(&mut self, state: State, kv: HostKvCache) -> Result<(), Error> {
        *self.get_mut(state)? = HostState::KvCache(kv);
        Ok(())
    }

    /// Moves a recurrent state out while an op computes a part of its span, by its index.
    #[inline]
    pub fn take_recurrent(&mut self, state: State, part: usize) -> Result<HostRecurrent, Error> {
        let StateShape::Recurrent { len } = self.shape(state)? else {
            return Err(Error::Shape("a KV cache where a recurrent state belongs".into()));
        };
        while let HostState::Recurrent(r) = self.get(state)?
            && r.next.len() <= part
        {
            let values = self.take_values(len)?;
            if let HostState::Recurrent(r) = self.get_mut(state)? {
                r.next.push(values);
            }
        }
        match mem::replace(self.get_mut(state)?, HostState::Busy) {
            HostState::Recurrent(r) => Ok(r),
            _ => Err(stale("state")),
        }
    }

    /// Returns a recurrent state after the values of a part have been written.
    #[inline]
    pub fn put_recurrent(
        &mut self,
        state: State,
        part: usize,
        mut r: HostRecurrent,
    ) -> Result<(), Error> {
        r.written = part + 1;
        *self.get_mut(state)? = HostState::Recurrent(r);
        Ok(())
    }

    /// See [`StateStore::save_state`](crate::StateStore::save_state).
    pub(crate) fn save(
        &self,
        state: State,
        entries: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let bytes = self.shape(state)?.check_entries(self.kv_format, &entries, out.len())?;
        match self.get(state)? {
            HostState::KvCache(kv) => {
                for (entry, mut out) in entries.zip(out.chunks_exact_mut(bytes.max(1))) {
                    for (page, range) in kv.ranges(entry) {
                        let (dst, rest) = out.split_at_mut(range.len());
                        match &kv.pages[page] {
                            Some(page) => dst.copy_from_slice(&page[range]),
                            None => dst.fill(0),
                        }
                        out = rest;
                    }
                }
                Ok(())
            }
            HostState::Recurrent(r) => {
                out.copy_from_slice(bytemuck::cast_slice(&r.committed[entries]));
                Ok(())
            }
            HostState::Busy => Err(stale("state")),
        }
    }

    /// See [`StateStore::load_state`](crate::StateStore::load_state).
    pub(crate) fn load(
        &mut self,
        state: State,
        entries: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let entry_bytes =
            self.shape(state)?.check_entries(self.kv_format, &entries, bytes.len())?;
        if let StateShape::KeyValue { .. } = self.shape(state)? {
            let mut kv = self.take_kv(state, entries.start, entries.len())?;
            for (entry, mut bytes) in entries.zip(bytes.chunks_exact(entry_bytes.max(1))) {
                let ranges: Vec<_> = kv.ranges(entry).collect();
                for (page, range) in ranges {
                    let (src, rest) = bytes.split_at(range.len());
                    if let Some(page) = kv.pages[page].as_mut().and_then(Arc::get_mut) {
                        page[range].copy_from_slice(src);
                    }
                    bytes = rest;
                }
            }
            return self.put_kv(state, kv);
        }
        let mut r = self.take_recurrent(state, 0)?;
        if Arc::get_mut(&mut r.committed).is_none() {
            let mut copy = r.next.swap_remove(0);
            copy.copy_from_slice(&r.committed);
            r.committed = Arc::new(copy);
        }
        if let Some(committed) = Arc::get_mut(&mut r.committed) {
            let dst: &mut [u8] = bytemuck::cast_slice_mut(&mut committed[entries]);
            dst.copy_from_slice(bytes);
        }
        r.written = 0;
        *self.get_mut(state)? = HostState::Recurrent(r);
        Ok(())
    }
}
