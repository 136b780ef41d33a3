//! States on the card: what they hold, and who shares it.
//!
//! Kernels see keys and values through one binding, so those of a state lie in one piece of memory: of all places the keys,
//! then of all places the values. A piece has room for what has been written and, where all of a step have it, some more; a write
//! beyond it goes on in a larger one. Forks share a piece until one of them is written, which goes on in a copy. Copies are recorded among the
//! ops, so each sees what it is to see. A step that is recorded ahead holds on to pieces: none is exchanged beneath it.
//!
//! What is held counts a piece that has been exchanged no more, while its memory is free once the copy is done: the host
//! waits for copies where they come to many bytes.

use std::{mem, ops::Range, sync::Arc};

use crate::gpu::{
    GpuDevice, Memory,
    memory::{Store, up},
    record,
};
use crate::{Error, KV_BLOCK, KvFormat, Span, State, StateShape, op_check::stale};

/// Places that a state of keys and values has room for at first.
const FIRST_PLACES: usize = 4 * KV_BLOCK;
/// Bytes that are saved or loaded at a time.
const AT_ONCE: usize = 16 << 20;

/// Memory with room for keys and values of some places.
#[derive(Clone, Debug)]
struct Piece {
    memory: Arc<Memory>,
    room: usize,
    /// Number at which values begin.
    values: u32,
}

/// Keys and values of one layer of one session.
#[derive(Clone, Debug)]
pub(in crate::gpu) struct KeyValue {
    shape: StateShape,
    positions: usize,
    /// Bytes of a place's keys and of its values.
    bytes: [usize; 2],
    piece: Option<Piece>,
    /// Places from the first on that somebody may read.
    used: usize,
}

impl KeyValue {
    /// Bytes of a piece: its keys, then the values from a multiple of what pieces begin at.
    fn piece_bytes(&self, room: usize) -> u64 {
        let [keys, values] = self.bytes.map(|bytes| (bytes as u64).saturating_mul(room as u64));
        size(up(keys).saturating_add(values))
    }

    /// The places that have room in a piece of the state's own.
    fn own_room(&self) -> usize {
        self.piece
            .as_ref()
            .filter(|piece| Arc::strong_count(&piece.memory) == 1)
            .map_or(0, |piece| piece.room)
    }

    /// The room of the piece that it needs for the places before `end`, and the bytes more that are held then; `None` where it
    /// has it. As growing is copying, ample room is for half as many places again.
    fn growth(&self, end: usize, ample: bool) -> Option<(usize, u64)> {
        let own = self.own_room();
        if own >= end {
            return None;
        }
        let room = if ample { end.max(own / 2 * 3).max(FIRST_PLACES) } else { end };
        let room = room.next_multiple_of(KV_BLOCK).min(self.positions);
        let former = if own == 0 { 0 } else { self.piece_bytes(own) };
        Some((room, self.piece_bytes(room) - former))
    }

    /// The end of the places in use once those of some rows are; zero without rows.
    fn end(&self, position: usize, rows: usize) -> usize {
        match rows {
            0 => 0,
            _ => position.saturating_add(rows).min(self.positions).max(self.used),
        }
    }
}

/// A recurrent state. What is committed others may share.
#[derive(Debug)]
pub(in crate::gpu) struct Recurrent {
    len: usize,
    pub(in crate::gpu) committed: Arc<Memory>,
    /// What ops write; there from the first of them on.
    pub(in crate::gpu) next: Option<Arc<Memory>>,
    pub(in crate::gpu) written: bool,
}

impl Recurrent {
    /// Whether what is committed is the state's own.
    pub(in crate::gpu) fn is_own(&self) -> bool {
        Arc::strong_count(&self.committed) == 1
    }

    /// Exchanges what is committed and what is next.
    pub(in crate::gpu) fn swap(&mut self) {
        if let Some(next) = &mut self.next {
            mem::swap(&mut self.committed, next);
        }
    }
}

#[derive(Debug)]
pub(in crate::gpu) enum GpuState {
    KeyValue(KeyValue),
    Recurrent(Recurrent),
}

/// All states, by handle.
#[derive(Debug)]
pub(in crate::gpu) struct States {
    /// What keys and values are kept as.
    pub(in crate::gpu) keys: KvFormat,
    all: Vec<Option<GpuState>>,
    pub(in crate::gpu) held: u64,
    pub(in crate::gpu) limit: Option<u64>,
    /// Whether states that grow take ample room: all of a step do, or none does.
    ample: bool,
    /// Numbers of memories that are gone.
    gone: Vec<u32>,
}

impl States {
    pub(in crate::gpu) const fn new(keys: KvFormat) -> Self {
        Self { keys, all: Vec::new(), held: 0, limit: None, ample: true, gone: Vec::new() }
    }

    pub(in crate::gpu) fn get(&self, state: State) -> Result<&GpuState, Error> {
        self.all.get(state.0 as usize).and_then(Option::as_ref).ok_or_else(|| stale("state"))
    }

    pub(in crate::gpu) fn get_mut(&mut self, state: State) -> Result<&mut GpuState, Error> {
        self.all.get_mut(state.0 as usize).and_then(Option::as_mut).ok_or_else(|| stale("state"))
    }

    fn key_value(&mut self, state: State) -> Result<&mut KeyValue, Error> {
        match self.get_mut(state)? {
            GpuState::KeyValue(kv) => Ok(kv),
            GpuState::Recurrent(_) => Err(stale("state of keys and values")),
        }
    }

    pub(in crate::gpu) fn recurrent(&mut self, state: State) -> Result<&mut Recurrent, Error> {
        match self.get_mut(state)? {
            GpuState::Recurrent(recurrent) => Ok(recurrent),
            GpuState::KeyValue(_) => Err(stale("recurrent state")),
        }
    }

    pub(in crate::gpu) fn shape(&self, state: State) -> Result<StateShape, Error> {
        Ok(match self.get(state)? {
            GpuState::KeyValue(kv) => kv.shape,
            GpuState::Recurrent(recurrent) => StateShape::Recurrent { len: recurrent.len },
        })
    }

    fn add(&mut self, state: GpuState) -> State {
        match self.all.iter().position(Option::is_none) {
            Some(i) => {
                self.all[i] = Some(state);
                State(i as u32)
            }
            None => {
                self.all.push(Some(state));
                State(self.all.len() as u32 - 1)
            }
        }
    }

    fn fits(&self, bytes: u64) -> bool {
        self.limit.is_none_or(|limit| self.held.saturating_add(bytes) <= limit)
    }

    /// The room of the piece that a state takes for the places before `end`, and the bytes more that are held then; `None`
    /// where it has it.
    fn growth(&self, kv: &KeyValue, end: usize) -> Option<(usize, u64)> {
        let ample = kv.growth(end, true).filter(|(_, bytes)| self.ample && self.fits(*bytes));
        ample.or_else(|| kv.growth(end, false))
    }

    /// Bytes that ops on rows of states take. It is decided for all of them together whether that is ample room: else those that
    /// grow first would leave too little to the others.
    pub(in crate::gpu) fn need(
        &mut self,
        spans: &mut dyn Iterator<Item = Span>,
    ) -> Result<u64, Error> {
        let (mut exact, mut ample) = (0u64, 0u64);
        for Span { state, position, rows } in spans {
            let bytes = match self.get(state)? {
                GpuState::KeyValue(kv) => {
                    let end = kv.end(position, rows);
                    [false, true].map(|ample| kv.growth(end, ample).map_or(0, |(_, bytes)| bytes))
                }
                GpuState::Recurrent(Recurrent { len, next: None, .. }) => {
                    [size(recurrent_bytes(*len)); 2]
                }
                GpuState::Recurrent(_) => [0; 2],
            };
            exact = exact.saturating_add(bytes[0]);
            ample = ample.saturating_add(bytes[1]);
        }
        self.ample = self.fits(ample);
        Ok(if self.ample { ample } else { exact })
    }

    pub(in crate::gpu) fn fork(&mut self, state: State, places: usize) -> Result<State, Error> {
        let fork = match self.get(state)? {
            GpuState::KeyValue(kv) => {
                let used = kv.used.min(places);
                let piece = kv.piece.clone().filter(|_| used > 0);
                GpuState::KeyValue(KeyValue { piece, used, ..*kv })
            }
            GpuState::Recurrent(Recurrent { len, committed, .. }) => {
                GpuState::Recurrent(Recurrent {
                    len: *len,
                    committed: Arc::clone(committed),
                    next: None,
                    written: false,
                })
            }
        };
        Ok(self.add(fork))
    }

    /// A piece has no part that could be given back; it is all let go where nothing is left.
    pub(in crate::gpu) fn cut(&mut self, state: State, places: usize) -> Result<(), Error> {
        if let GpuState::KeyValue(kv) = self.get_mut(state)? {
            kv.used = kv.used.min(places);
            let piece = kv.piece.take_if(|_| kv.used == 0);
            self.let_go(piece.map(|piece| piece.memory));
        }
        Ok(())
    }

    pub(in crate::gpu) fn drop(&mut self, state: State) {
        match self.all.get_mut(state.0 as usize).and_then(Option::take) {
            Some(GpuState::KeyValue(kv)) => self.let_go(kv.piece.map(|piece| piece.memory)),
            Some(GpuState::Recurrent(recurrent)) => {
                self.let_go([recurrent.committed].into_iter().chain(recurrent.next));
            }
            None => {}
        }
    }

    pub(in crate::gpu) fn commit(&mut self, state: State) -> Result<(), Error> {
        if let GpuState::Recurrent(recurrent) = self.get_mut(state)?
            && mem::take(&mut recurrent.written)
        {
            recurrent.swap();
            // What was committed before, where others keep it.
            let kept = recurrent.next.take_if(|next| Arc::strong_count(next) > 1);
            self.let_go(kept);
        }
        Ok(())
    }

    /// Gives up memories, of which those that nobody shares are gone.
    fn let_go(&mut self, memories: impl IntoIterator<Item = Arc<Memory>>) {
        for memory in memories.into_iter().filter_map(Arc::into_inner) {
            self.held -= memory.raw.size();
            self.gone.push(memory.id);
        }
    }
}

/// Bytes of the numbers of a recurrent state, or more than any memory has.
fn recurrent_bytes(len: usize) -> u64 {
    (len as u64).saturating_mul(4).min(1 << 60)
}

/// Bytes of a buffer that is to hold so many.
fn size(bytes: u64) -> u64 {
    up(bytes.max(1))
}

impl Store {
    pub(in crate::gpu) fn state_bytes(&self, shape: StateShape) -> u64 {
        match shape {
            StateShape::KeyValue { .. } => {
                self.fresh(shape).map_or(u64::MAX / 2, |kv| kv.piece_bytes(kv.positions))
            }
            StateShape::Recurrent { len } => 2 * size(recurrent_bytes(len)),
        }
    }

    /// A state of keys and values that holds nothing; none where such a one is too large.
    fn fresh(&self, shape: StateShape) -> Option<KeyValue> {
        let StateShape::KeyValue { kv_heads, key_width, value_width, positions } = shape else {
            return None;
        };
        let keys = self.states.keys;
        let of = |width| keys.bytes(width).checked_mul(kv_heads);
        let bytes = [of(key_width)?, of(value_width)?];
        let small = |bytes: &usize| bytes.checked_mul(positions).is_some_and(|all| all < 1 << 40);
        bytes.iter().all(small).then_some(KeyValue {
            shape,
            positions,
            bytes,
            piece: None,
            used: 0,
        })
    }

    pub(in crate::gpu) fn state(&mut self, shape: StateShape) -> Result<State, Error> {
        let state = match shape {
            StateShape::KeyValue { positions, .. } => {
                let Some(kv) = self.fresh(shape) else {
                    return Err(Error::Shape(format!(
                        "a state of {positions} positions is too large"
                    )));
                };
                self.check_seen("keys and values", kv.piece_bytes(positions))?;
                GpuState::KeyValue(kv)
            }
            StateShape::Recurrent { len } => {
                let committed = Arc::new(self.recurrent_memory(len)?);
                GpuState::Recurrent(Recurrent { len, committed, next: None, written: false })
            }
        };
        Ok(self.states.add(state))
    }

    /// Zeroed memory of states.
    fn state_memory(&mut self, what: &str, bytes: u64) -> Result<Memory, Error> {
        let memory = self.allocate(what, bytes)?;
        self.states.held += memory.raw.size();
        Ok(memory)
    }

    fn check_limit(&self, bytes: u64) -> Result<(), Error> {
        let States { held, limit, .. } = self.states;
        match limit {
            Some(limit) if !self.states.fits(bytes) => {
                Err(Error::StatesFull { bytes, held, limit })
            }
            _ => Ok(()),
        }
    }

    fn recurrent_memory(&mut self, len: usize) -> Result<Memory, Error> {
        let bytes = recurrent_bytes(len);
        self.check_limit(size(bytes))?;
        self.state_memory("a recurrent state", bytes)
    }

    /// A recurrent state that is going to be written: it has both of its memories.
    pub(in crate::gpu) fn writable(&mut self, state: State) -> Result<&mut Recurrent, Error> {
        let recurrent = self.states.recurrent(state)?;
        if recurrent.next.is_none() {
            let len = recurrent.len;
            let next = Arc::new(self.recurrent_memory(len)?);
            self.states.recurrent(state)?.next = Some(next);
        }
        self.states.recurrent(state)
    }
}

impl GpuDevice {
    /// Memory, the number at which values begin, and positions of a state of keys and values that has been written.
    pub(in crate::gpu) fn piece(&self, state: State) -> Result<(Memory, u32, usize), Error> {
        match self.store.states.get(state)? {
            GpuState::KeyValue(KeyValue { piece: Some(piece), positions, .. }) => {
                Ok((Memory::clone(&piece.memory), piece.values, *positions))
            }
            _ => Err(stale("state")),
        }
    }

    /// Forgets a step that is recorded ahead before states change, and ends the open pass.
    pub(in crate::gpu) fn before_change(&mut self) -> Result<(), Error> {
        if let Some(recording) = &mut self.recording {
            recording.spoiled = true;
            return Err(Error::Device("a step that has not begun cannot change states".into()));
        }
        self.discard()?;
        self.settle()?;
        self.end_pass();
        Ok(())
    }

    /// Forgets what was bound to memories of states that are gone.
    pub(in crate::gpu) fn forget_states(&mut self) {
        let gone = mem::take(&mut self.store.states.gone);
        self.forget(gone);
    }

    /// Records a copy among the ops, of as many bytes rounded up to whole words.
    fn copy(&mut self, (from, at): (&Memory, u64), (to, there): (&Memory, u64), bytes: u64) {
        self.end_pass();
        let encoder = record::encoder(&mut self.encoder, &self.opened.device);
        encoder.copy_buffer_to_buffer(&from.raw, at, &to.raw, there, bytes.next_multiple_of(4));
    }

    /// Sees to it that a state has a piece of its own with room for rows that are going to be written.
    pub(in crate::gpu) fn own(
        &mut self,
        state: State,
        position: usize,
        rows: usize,
    ) -> Result<(), Error> {
        let store = &mut self.store;
        let GpuState::KeyValue(kv) = store.states.get(state)? else {
            return Err(stale("state of keys and values"));
        };
        let end = kv.end(position, rows);
        if let Some((room, more)) = store.states.growth(kv, end) {
            if let Some(recording) = &mut self.recording {
                recording.spoiled = true;
                return Err(Error::Device(
                    "a step that has not begun cannot exchange memory".into(),
                ));
            }
            let former = kv.clone();
            let [keys, values] = former.bytes.map(|bytes| bytes as u64);
            store.check_limit(more)?;
            let memory = Arc::new(store.state_memory("keys and values", former.piece_bytes(room))?);
            let number = store.states.keys.bytes(1) as u64;
            let begin = up(keys * room as u64);
            let piece = Piece { memory, room, values: (begin / number) as u32 };
            if let Some(old) = &former.piece {
                let used = former.used as u64;
                self.copy((&old.memory, 0), (&piece.memory, 0), keys * used);
                let values_of_old = u64::from(old.values) * number;
                self.copy((&old.memory, values_of_old), (&piece.memory, begin), values * used);
            }
            self.store.states.key_value(state)?.piece = Some(piece);
            if let Some(old) = former.piece {
                let bytes = old.memory.raw.size() as usize;
                self.store.states.let_go([old.memory]);
                self.forget_states();
                // What is exchanged is not to pile up until all ops are recorded.
                self.hand_over();
                self.send(bytes)?;
            }
        }
        let kv = self.store.states.key_value(state)?;
        kv.used = kv.used.max(end);
        Ok(())
    }

    /// Sees to it that what is committed in a recurrent state is its own.
    fn own_committed(&mut self, state: State) -> Result<Memory, Error> {
        if !self.store.states.recurrent(state)?.is_own() {
            let recurrent = self.store.writable(state)?;
            recurrent.swap();
            let (own, next) = (Memory::clone(&recurrent.committed), recurrent.next.take());
            if let Some(shared) = next {
                self.copy((&shared, 0), (&own, 0), own.raw.size());
                self.store.states.let_go([shared]);
            }
        }
        let recurrent = self.store.states.recurrent(state)?;
        recurrent.written = false;
        Ok(Memory::clone(&recurrent.committed))
    }

    pub(in crate::gpu) fn fork(&mut self, state: State, places: usize) -> Result<State, Error> {
        self.before_change()?;
        self.store.states.fork(state, places)
    }

    pub(in crate::gpu) fn cut(&mut self, state: State, places: usize) -> Result<(), Error> {
        self.before_change()?;
        self.store.states.cut(state, places)?;
        self.forget_states();
        Ok(())
    }

    pub(in crate::gpu) fn drop_of(&mut self, state: State) {
        // What waits and fails has nobody to tell; the next op of its session will.
        let _ = self.before_change();
        self.hand_over();
        self.store.states.drop(state);
        self.forget_states();
    }

    /// See [`Device::commit`](crate::Device::commit).
    pub(in crate::gpu) fn commit_all(&mut self, states: &[State]) -> Result<(), Error> {
        // What may fail comes before anything is changed.
        states.iter().try_for_each(|state| self.store.states.get(*state).map(drop))?;
        self.settle()?;
        for state in states {
            if !self.accepts(*state) {
                self.store.states.commit(*state)?;
            }
        }
        self.forget_states();
        Ok(())
    }

    pub(in crate::gpu) fn zero(&mut self, state: State) -> Result<(), Error> {
        // Only committed positions are ever read, so stale keys and values need no zeroing.
        self.cut(state, 0)?;
        if let GpuState::Recurrent(_) = self.store.states.get(state)? {
            let committed = self.own_committed(state)?;
            let encoder = record::encoder(&mut self.encoder, &self.opened.device);
            encoder.clear_buffer(&committed.raw, 0, None);
        }
        Ok(())
    }

    /// See [`Device::save_state`](crate::Device::save_state).
    pub(in crate::gpu) fn save(
        &mut self,
        state: State,
        places: Range<usize>,
        out: &mut [u8],
    ) -> Result<(), Error> {
        let of_place = self.store.states.shape(state)?.check_places(
            self.store.states.keys,
            &places,
            out.len(),
        )?;
        self.before_change()?;
        let (kv, piece) = match self.store.states.get(state)? {
            GpuState::Recurrent(recurrent) => {
                let committed = Memory::clone(&recurrent.committed);
                let pieces = out.chunks_mut(AT_ONCE);
                return pieces
                    .zip((places.start * 4..).step_by(AT_ONCE))
                    .try_for_each(|(out, at)| self.read_bytes(&committed, at, out));
            }
            GpuState::KeyValue(kv) => (kv.clone(), kv.piece.clone()),
        };
        // What was never written is zero.
        let written = places.end.min(kv.used).saturating_sub(places.start) * of_place;
        let (out, rest) = out.split_at_mut(written);
        rest.fill(0);
        let Some(piece) = piece else { return Ok(()) };
        let begin = piece.values as usize * self.store.states.keys.bytes(1);
        let step = (AT_ONCE / of_place.max(1)).max(1);
        let [keys, values] = kv.bytes;
        let mut parts = [Vec::new(), Vec::new()];
        for (out, first) in
            out.chunks_mut(step * of_place.max(1)).zip((places.start..).step_by(step))
        {
            let n = out.len() / of_place.max(1);
            for (part, (bytes, begin)) in parts.iter_mut().zip([(keys, 0), (values, begin)]) {
                part.resize(n * bytes, 0);
                self.read_bytes(&piece.memory, begin + first * bytes, part)?;
            }
            for (i, out) in out.chunks_exact_mut(of_place.max(1)).enumerate() {
                let (k, v) = out.split_at_mut(keys);
                k.copy_from_slice(&parts[0][i * keys..][..keys]);
                v.copy_from_slice(&parts[1][i * values..][..values]);
            }
        }
        Ok(())
    }

    /// See [`Device::load_state`](crate::Device::load_state).
    pub(in crate::gpu) fn load(
        &mut self,
        state: State,
        places: Range<usize>,
        bytes: &[u8],
    ) -> Result<(), Error> {
        let shape = self.store.states.shape(state)?;
        let of_place = shape.check_places(self.store.states.keys, &places, bytes.len())?.max(1);
        self.before_change()?;
        if let StateShape::Recurrent { .. } = shape {
            let committed = self.own_committed(state)?;
            self.hand_over();
            return bytes
                .chunks(AT_ONCE)
                .zip((places.start * 4..).step_by(AT_ONCE))
                .try_for_each(|(bytes, at)| self.write_bytes(&committed, at, bytes));
        }
        self.own(state, places.start, places.len())?;
        self.hand_over();
        let kv = self.store.states.key_value(state)?.clone();
        let Some(piece) = kv.piece else { return Ok(()) };
        let begin = piece.values as usize * self.store.states.keys.bytes(1);
        let step = (AT_ONCE / of_place).max(1);
        let [keys, values] = kv.bytes;
        let mut part = Vec::new();
        for (bytes, first) in bytes.chunks(step * of_place).zip((places.start..).step_by(step)) {
            for (of_kind, begin) in [(0..keys, 0), (keys..keys + values, begin)] {
                part.clear();
                bytes.chunks_exact(of_place).for_each(|place| part.extend(&place[of_kind.clone()]));
                self.write_bytes(&piece.memory, begin + first * of_kind.len(), &part)?;
            }
        }
        Ok(())
    }

    /// Copies bytes out of a memory once all work is done.
    fn read_bytes(&mut self, from: &Memory, at: usize, to: &mut [u8]) -> Result<(), Error> {
        if to.is_empty() {
            return Ok(());
        }
        let mut words = vec![0; (at % 4 + to.len()).div_ceil(4)];
        self.read_words(&from.raw, at as u64 / 4 * 4, &mut words)?;
        to.copy_from_slice(&bytemuck::cast_slice(&words)[at % 4..][..to.len()]);
        Ok(())
    }

    /// Writes bytes ahead of what is handed over next.
    fn write_bytes(&mut self, to: &Memory, at: usize, bytes: &[u8]) -> Result<(), Error> {
        let Some(last) = bytes.len().checked_sub(1) else { return Ok(()) };
        let (first, end) = (at / 4 * 4, at + bytes.len());
        if first == at && end.is_multiple_of(4) {
            self.opened.queue.write_buffer(&to.raw, at as u64, bytes);
            return self.send(bytes.len());
        }
        // The words at both ends keep what belongs to others.
        let mut words = vec![0; (at % 4 + bytes.len()).div_ceil(4)];
        let other = (at % 4 + last) / 4;
        self.read_words(&to.raw, first as u64, &mut words[..1])?;
        self.read_words(&to.raw, (first + other * 4) as u64, &mut words[other..])?;
        bytemuck::cast_slice_mut(&mut words)[at % 4..][..bytes.len()].copy_from_slice(bytes);
        self.opened.queue.write_buffer(&to.raw, first as u64, bytemuck::cast_slice(&words));
        self.send(bytes.len())
    }
}
