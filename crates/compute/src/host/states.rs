//! States in host memory: keys and values in pages, recurrent numbers, and who shares what.

use std::{mem, ops::Range, sync::Arc};

use super::{Numbers, narrow};
use crate::{Error, KV_BLOCK, KvFormat, Span, State, StateShape, matrix::Bytes, op_check::stale};

/// Bytes of a piece of memory with what its mapping is rounded up to.
fn mapped(bytes: usize) -> u64 {
    bytes.next_multiple_of(4096) as u64
}

/// The memory of states. What one lets go the next one takes.
#[derive(Debug, Default)]
struct Pool {
    free: Vec<Bytes>,
    /// Bytes that are let go and not taken.
    idle: u64,
    held: u64,
    limit: Option<u64>,
}

impl Pool {
    /// `len` bytes; those of a former state may not be zero.
    fn take(&mut self, len: usize) -> Result<Bytes, Error> {
        let bytes = mapped(len);
        if let Some(limit) = self.limit
            && self.held + bytes > limit
        {
            return Err(Error::StatesFull { bytes, held: self.held, limit });
        }
        let memory = match self.free.iter().position(|free| free.len() == len) {
            Some(i) => {
                self.idle -= bytes;
                self.free.swap_remove(i)
            }
            None => {
                if self.limit.is_some_and(|limit| self.held + self.idle + bytes > limit) {
                    self.free.clear();
                    self.idle = 0;
                }
                Bytes::zeroed(len)?
            }
        };
        self.held += bytes;
        Ok(memory)
    }

    fn give(&mut self, memory: Bytes) {
        if memory.is_empty() {
            return;
        }
        let bytes = mapped(memory.len());
        self.held -= bytes;
        // Without a limit nobody has planned for what lies idle.
        if self.limit.is_some() {
            self.idle += bytes;
            self.free.push(memory);
        }
    }

    /// Gives back what nobody else shares.
    fn give_shared(&mut self, memory: Arc<Bytes>) {
        if let Some(memory) = Arc::into_inner(memory) {
            self.give(memory);
        }
    }
}

/// One of the two kinds of vectors of a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Key,
    Value,
}

/// Keys and values of one layer of one session, in pages of [`KV_BLOCK`] positions. A page has the keys head by head, then
/// the values, so that what a head reads of it lies in one piece.
#[derive(Debug)]
pub(crate) struct KeyValue {
    pub(crate) kv_heads: usize,
    pub(crate) key_width: usize,
    pub(crate) value_width: usize,
    pub(crate) positions: usize,
    pub(crate) format: KvFormat,
    pages: Vec<Option<Arc<Bytes>>>,
}

impl KeyValue {
    const fn shape(&self) -> StateShape {
        let &Self { kv_heads, key_width, value_width, positions, .. } = self;
        StateShape::KeyValue { kv_heads, key_width, value_width, positions }
    }

    /// Positions of a page.
    fn of_page(&self) -> usize {
        KV_BLOCK.min(self.positions)
    }

    fn page_bytes(&self) -> usize {
        self.shape().place_bytes(self.format) * self.of_page()
    }

    pub(crate) fn width(&self, kind: Kind) -> usize {
        match kind {
            Kind::Key => self.key_width,
            Kind::Value => self.value_width,
        }
    }

    /// Bytes of a vector.
    pub(crate) fn bytes(&self, kind: Kind) -> usize {
        self.format.bytes(self.width(kind))
    }

    /// The page of a place, and where in it the vector of a head begins.
    fn at(&self, kind: Kind, place: usize, head: usize) -> (usize, usize) {
        let of_page = self.of_page();
        let values = match kind {
            Kind::Key => 0,
            Kind::Value => self.kv_heads * of_page * self.bytes(Kind::Key),
        };
        (place / of_page, values + (head * of_page + place % of_page) * self.bytes(kind))
    }

    /// The vectors of a head from a position on, up to the end of the position's page.
    pub(crate) fn vectors(
        &self,
        kind: Kind,
        position: usize,
        head: usize,
    ) -> impl ExactSizeIterator<Item = &[u8]> {
        self.piece(kind, position, head).chunks_exact(self.bytes(kind).max(1))
    }

    /// The piece of memory in which they lie one behind the other.
    pub(crate) fn piece(&self, kind: Kind, position: usize, head: usize) -> &[u8] {
        let place = position % self.positions;
        let (page, at) = self.at(kind, place, head);
        let len = (self.of_page() - place % self.of_page()) * self.bytes(kind);
        // Ops begin by making sure that there are the pages of all positions before their last.
        self.pages[page].as_ref().map_or(&[][..], |page| &page[at..at + len])
    }

    /// The vector of a position and a head.
    pub(crate) fn vector(&self, kind: Kind, position: usize, head: usize) -> &[u8] {
        self.vectors(kind, position, head).next().unwrap_or(&[])
    }

    /// Writes the vector of a position, whose page is the state's own, and a head.
    pub(crate) fn write(&mut self, kind: Kind, position: usize, head: usize, from: &[f32]) {
        let (page, at) = self.at(kind, position % self.positions, head);
        let (format, bytes) = (self.format, self.bytes(kind));
        if let Some(page) = self.pages[page].as_mut().and_then(Arc::get_mut) {
            narrow(format, from, &mut page[at..at + bytes]);
        }
    }

    /// Pages that rows at positions touch: those that lie before them, and those that they write.
    fn touched(
        &self,
        position: usize,
        rows: usize,
    ) -> (Range<usize>, impl Fn(usize) -> bool + use<>) {
        let (positions, of_page) = (self.positions, self.of_page());
        let end = position.saturating_add(rows);
        let first = if rows >= positions { 0 } else { position % positions.max(1) };
        let last = first + rows.min(positions);
        let written = move |page: usize| {
            let begin = page * of_page;
            let in_part = |part: &Range<usize>| part.start < begin + of_page && begin < part.end;
            // The rows, and what of them goes on at the beginning.
            in_part(&(first..last)) || in_part(&(0..last.saturating_sub(positions)))
        };
        (0..end.min(positions).div_ceil(of_page.max(1)), written)
    }

    /// Bytes to be taken before rows can be written.
    fn need(&self, position: usize, rows: usize) -> u64 {
        let (pages, written) = self.touched(position, rows);
        let missing = pages.filter(|i| match &self.pages[*i] {
            None => true,
            Some(page) => written(*i) && Arc::strong_count(page) > 1,
        });
        missing.count() as u64 * mapped(self.page_bytes())
    }

    /// Makes the pages that rows are written to the state's own, and sees to it that there are those before.
    fn own(&mut self, pool: &mut Pool, position: usize, rows: usize) -> Result<(), Error> {
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
                    let mut own = pool.take(len)?;
                    own.copy_from_slice(page);
                    pool.give_shared(mem::replace(page, Arc::new(own)));
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Lets go of all pages from a place on.
    fn cut(&mut self, pool: &mut Pool, places: usize) {
        let first = places.div_ceil(self.of_page().max(1)).min(self.pages.len());
        for page in self.pages[first..].iter_mut().filter_map(Option::take) {
            pool.give_shared(page);
        }
    }

    /// The pieces of a place: keys of all heads, then values, each with its page and where it begins there.
    fn pieces(&self, place: usize) -> impl Iterator<Item = (usize, Range<usize>)> {
        [Kind::Key, Kind::Value].into_iter().flat_map(move |kind| {
            (0..self.kv_heads).map(move |head| {
                let (page, at) = self.at(kind, place, head);
                (page, at..at + self.bytes(kind))
            })
        })
    }
}

/// A recurrent state: the committed numbers, which others may share, and those that the running step writes.
#[derive(Debug, Default)]
pub(crate) struct Recurrent {
    pub(crate) committed: Arc<Numbers>,
    pub(crate) next: Numbers,
    written: bool,
}

#[derive(Debug)]
enum HostState {
    KeyValue(KeyValue),
    Recurrent(Recurrent),
    /// Moved out while an op writes it.
    Busy,
}

/// All states, by handle.
#[derive(Debug)]
pub(crate) struct States {
    keys: KvFormat,
    all: Vec<Option<HostState>>,
    free: Vec<u32>,
    pool: Pool,
}

impl Default for States {
    fn default() -> Self {
        Self::new(KvFormat::F32)
    }
}

impl States {
    pub(crate) fn new(keys: KvFormat) -> Self {
        Self { keys, all: Vec::new(), free: Vec::new(), pool: Pool::default() }
    }

    /// What keys and values are kept as.
    pub(crate) fn keys(&self) -> KvFormat {
        self.keys
    }

    pub(crate) fn limit(&mut self, bytes: u64) {
        self.pool.limit = Some(bytes);
    }

    pub(crate) fn held(&self) -> u64 {
        self.pool.held
    }

    /// Bytes of a state that is full.
    pub(crate) fn bytes(&self, shape: StateShape) -> u64 {
        match shape {
            StateShape::KeyValue { positions, .. } => {
                let of_page = KV_BLOCK.min(positions).max(1);
                let page = shape.place_bytes(self.keys).saturating_mul(of_page);
                (page.saturating_add(4095) as u64 / 4096 * 4096)
                    .saturating_mul(positions.div_ceil(of_page) as u64)
            }
            // What is committed, and what the step at hand writes.
            StateShape::Recurrent { len } => (len as u64 * 4).next_multiple_of(4096) * 2,
        }
    }

    fn add(&mut self, state: HostState) -> State {
        if let Some(i) = self.free.pop() {
            self.all[i as usize] = Some(state);
            return State(i);
        }
        self.all.push(Some(state));
        State(self.all.len() as u32 - 1)
    }

    pub(crate) fn make(&mut self, shape: StateShape) -> Result<State, Error> {
        let state = match shape {
            StateShape::KeyValue { kv_heads, key_width, value_width, positions } => {
                let limit = isize::MAX as usize / 2;
                if shape
                    .place_bytes(self.keys)
                    .checked_mul(positions)
                    .is_none_or(|bytes| bytes > limit)
                {
                    return Err(Error::Shape(format!(
                        "a state of {positions} positions is too large"
                    )));
                }
                let pages = vec![None; positions.div_ceil(KV_BLOCK.min(positions).max(1))];
                let format = self.keys;
                HostState::KeyValue(KeyValue {
                    kv_heads,
                    key_width,
                    value_width,
                    positions,
                    format,
                    pages,
                })
            }
            StateShape::Recurrent { len } => {
                let committed = Arc::new(self.zeros(len)?);
                HostState::Recurrent(Recurrent { committed, ..Recurrent::default() })
            }
        };
        Ok(self.add(state))
    }

    /// Numbers of a recurrent state; those of a former one may not be zero.
    fn numbers(&mut self, len: usize) -> Result<Numbers, Error> {
        let bytes = len
            .checked_mul(4)
            .ok_or_else(|| Error::Shape(format!("{len} numbers are too many")))?;
        Ok(Numbers(self.pool.take(bytes)?))
    }

    fn zeros(&mut self, len: usize) -> Result<Numbers, Error> {
        let mut numbers = self.numbers(len)?;
        numbers.fill(0.0);
        Ok(numbers)
    }

    fn get(&self, state: State) -> Result<&HostState, Error> {
        self.all.get(state.0 as usize).and_then(Option::as_ref).ok_or_else(|| stale("state"))
    }

    fn get_mut(&mut self, state: State) -> Result<&mut HostState, Error> {
        self.all.get_mut(state.0 as usize).and_then(Option::as_mut).ok_or_else(|| stale("state"))
    }

    pub(crate) fn shape(&self, state: State) -> Result<StateShape, Error> {
        match self.get(state)? {
            HostState::KeyValue(kv) => Ok(kv.shape()),
            HostState::Recurrent(r) => Ok(StateShape::Recurrent { len: r.committed.len() }),
            HostState::Busy => Err(stale("state")),
        }
    }

    /// Bytes that ops on rows of states will take.
    pub(crate) fn need(&self, spans: &mut dyn Iterator<Item = Span>) -> Result<u64, Error> {
        let mut needed = 0;
        for Span { state, position, rows } in spans {
            needed += match self.get(state)? {
                HostState::KeyValue(kv) => kv.need(position, rows),
                HostState::Recurrent(r) if r.next.is_empty() => mapped(r.committed.len() * 4),
                HostState::Recurrent(_) => 0,
                HostState::Busy => return Err(stale("state")),
            };
        }
        Ok(needed)
    }

    pub(crate) fn fork(&mut self, state: State, places: usize) -> Result<State, Error> {
        let fork = match self.get(state)? {
            HostState::KeyValue(kv) => {
                let kept = places.div_ceil(kv.of_page().max(1));
                let pages =
                    kv.pages.iter().enumerate().map(|(i, page)| page.clone().filter(|_| i < kept));
                HostState::KeyValue(KeyValue { pages: pages.collect(), ..*kv })
            }
            HostState::Recurrent(r) => HostState::Recurrent(Recurrent {
                committed: Arc::clone(&r.committed),
                ..Recurrent::default()
            }),
            HostState::Busy => return Err(stale("state")),
        };
        Ok(self.add(fork))
    }

    pub(crate) fn drop_state(&mut self, state: State) {
        let Some(gone) = self.all.get_mut(state.0 as usize).and_then(Option::take) else { return };
        self.free.push(state.0);
        match gone {
            HostState::KeyValue(mut kv) => kv.cut(&mut self.pool, 0),
            HostState::Recurrent(Recurrent { committed, next, .. }) => {
                self.pool.give(next.0);
                if let Some(numbers) = Arc::into_inner(committed) {
                    self.pool.give(numbers.0);
                }
            }
            HostState::Busy => {}
        }
    }

    pub(crate) fn reset(&mut self, state: State) -> Result<(), Error> {
        self.cut(state, 0)?;
        if let StateShape::Recurrent { .. } = self.shape(state)? {
            let mut r = self.take_recurrent(state)?;
            if Arc::get_mut(&mut r.committed).is_none() {
                r.committed = Arc::new(mem::take(&mut r.next));
            }
            if let Some(numbers) = Arc::get_mut(&mut r.committed) {
                numbers.fill(0.0);
            }
            r.written = false;
            *self.get_mut(state)? = HostState::Recurrent(r);
        }
        Ok(())
    }

    pub(crate) fn cut(&mut self, state: State, places: usize) -> Result<(), Error> {
        let slot = self.all.get_mut(state.0 as usize).and_then(Option::as_mut);
        if let HostState::KeyValue(kv) = slot.ok_or_else(|| stale("state"))? {
            kv.cut(&mut self.pool, places);
        }
        Ok(())
    }

    pub(crate) fn commit(&mut self, states: &[State]) -> Result<(), Error> {
        // Each is there, or none is changed.
        states.iter().try_for_each(|state| self.get(*state).map(drop))?;
        for state in states {
            if let HostState::Recurrent(r) = self.get_mut(*state)?
                && mem::take(&mut r.written)
            {
                match Arc::get_mut(&mut r.committed) {
                    Some(committed) => mem::swap(committed, &mut r.next),
                    // Somebody keeps what was committed before.
                    None => r.committed = Arc::new(mem::take(&mut r.next)),
                }
            }
        }
        Ok(())
    }

    /// Moves a state of keys and values out while an op writes rows of it; [`States::put_key_value`] puts it back.
    pub(crate) fn take_key_value(
        &mut self,
        state: State,
        position: usize,
        rows: usize,
    ) -> Result<KeyValue, Error> {
        let slot = self.all.get_mut(state.0 as usize).and_then(Option::as_mut);
        let slot = slot.ok_or_else(|| stale("state"))?;
        let HostState::KeyValue(kv) = slot else {
            return Err(Error::Shape("a recurrent state where keys and values belong".into()));
        };
        kv.own(&mut self.pool, position, rows)?;
        match mem::replace(slot, HostState::Busy) {
            HostState::KeyValue(kv) => Ok(kv),
            _ => Err(stale("state")),
        }
    }

    /// A state of keys and values.
    pub(crate) fn key_value(&self, state: State) -> Result<&KeyValue, Error> {
        match self.get(state)? {
            HostState::KeyValue(kv) => Ok(kv),
            _ => Err(Error::Shape("a recurrent state where keys and values belong".into())),
        }
    }

    pub(crate) fn put_key_value(&mut self, state: State, kv: KeyValue) -> Result<(), Error> {
        *self.get_mut(state)? = HostState::KeyValue(kv);
        Ok(())
    }

    /// Moves a recurrent state out while an op reads its committed and writes its next numbers.
    pub(crate) fn take_recurrent(&mut self, state: State) -> Result<Recurrent, Error> {
        let StateShape::Recurrent { len } = self.shape(state)? else {
            return Err(Error::Shape("keys and values where a recurrent state belongs".into()));
        };
        let lacks = matches!(self.get(state)?, HostState::Recurrent(r) if r.next.is_empty());
        let fresh = if lacks { Some(self.numbers(len)?) } else { None };
        match mem::replace(self.get_mut(state)?, HostState::Busy) {
            HostState::Recurrent(mut r) => {
                if let Some(fresh) = fresh {
                    r.next = fresh;
                }
                Ok(r)
            }
            _ => Err(stale("state")),
        }
    }

    /// Puts a recurrent state back whose next numbers have been written.
    pub(crate) fn put_recurrent(&mut self, state: State, mut r: Recurrent) -> Result<(), Error> {
        r.written = true;
        *self.get_mut(state)? = HostState::Recurrent(r);
        Ok(())
    }

    /// See [`Device::save_state`](crate::Device::save_state).
    pub(crate) fn save(
        &self,
        state: State,
        places: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let bytes = self.shape(state)?.check_places(self.keys, &places, out.len())?;
        match self.get(state)? {
            HostState::KeyValue(kv) => {
                for (place, mut out) in places.zip(out.chunks_exact_mut(bytes.max(1))) {
                    for (page, from) in kv.pieces(place) {
                        let (to, rest) = out.split_at_mut(from.len());
                        match &kv.pages[page] {
                            Some(page) => to.copy_from_slice(&page[from]),
                            None => to.fill(0),
                        }
                        out = rest;
                    }
                }
                Ok(())
            }
            HostState::Recurrent(r) => {
                out.copy_from_slice(bytemuck::cast_slice(&r.committed[places]));
                Ok(())
            }
            HostState::Busy => Err(stale("state")),
        }
    }

    /// See [`Device::load_state`](crate::Device::load_state).
    pub(crate) fn load(
        &mut self,
        state: State,
        places: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let of_place = self.shape(state)?.check_places(self.keys, &places, bytes.len())?;
        if let StateShape::KeyValue { .. } = self.shape(state)? {
            let mut kv = self.take_key_value(state, places.start, places.len())?;
            for (place, mut bytes) in places.zip(bytes.chunks_exact(of_place.max(1))) {
                let pieces: Vec<_> = kv.pieces(place).collect();
                for (page, to) in pieces {
                    let (from, rest) = bytes.split_at(to.len());
                    if let Some(page) = kv.pages[page].as_mut().and_then(Arc::get_mut) {
                        page[to].copy_from_slice(from);
                    }
                    bytes = rest;
                }
            }
            return self.put_key_value(state, kv);
        }
        let mut r = self.take_recurrent(state)?;
        if Arc::get_mut(&mut r.committed).is_none() {
            let mut own = mem::take(&mut r.next);
            own.copy_from_slice(&r.committed);
            r.committed = Arc::new(own);
        }
        if let Some(committed) = Arc::get_mut(&mut r.committed) {
            let to: &mut [u8] = bytemuck::cast_slice_mut(&mut committed[places]);
            to.copy_from_slice(bytes);
        }
        r.written = false;
        *self.get_mut(state)? = HostState::Recurrent(r);
        Ok(())
    }
}
