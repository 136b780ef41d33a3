//! What devices that compute on the host share: buffers, weights, slots and states in ordinary memory.

use half::{f16, slice::HalfFloatSliceExt};

use crate::{
    Buffer, Error, ExpertUse, Matrix, Scalar, Slot, SlotTable, State, StateShape, View, Weight,
    matrix::{Bytes, MatrixShape},
    op_check::{Holdings, stale},
};

/// Numbers in page-aligned anonymous memory: untouched pages cost address space only.
#[derive(Debug, Default)]
pub(crate) struct Numbers(Bytes);

impl Numbers {
    pub(crate) fn zeroed(len: usize) -> Result<Self, Error> {
        let bytes = len.checked_mul(4).ok_or_else(|| Error::Shape(format!("{len} numbers are too many")))?;
        Ok(Self(Bytes::zeroed(bytes)?))
    }
}

impl std::ops::Deref for Numbers {
    type Target = [f32];
    fn deref(&self) -> &[f32] {
        // Pages are aligned; only no memory at all is not.
        bytemuck::try_cast_slice(&self.0).unwrap_or(&[])
    }
}

impl std::ops::DerefMut for Numbers {
    fn deref_mut(&mut self) -> &mut [f32] {
        bytemuck::try_cast_slice_mut(&mut self.0).unwrap_or(&mut [])
    }
}

/// The largest f16: what is beyond it ends there.
const LARGEST: f32 = 65_504.0;

/// Numbers of keys or values, as f32 or as f16.
#[derive(Debug)]
pub(crate) struct Kept {
    scalar: Scalar,
    bytes: Bytes,
}

impl Default for Kept {
    fn default() -> Self {
        Self { scalar: Scalar::F32, bytes: Bytes::default() }
    }
}

impl Kept {
    fn zeroed(scalar: Scalar, len: usize) -> Result<Self, Error> {
        let bytes = len.checked_mul(scalar.bytes());
        let bytes = bytes.ok_or_else(|| Error::Shape(format!("{len} numbers are too many")))?;
        Ok(Self { scalar, bytes: Bytes::zeroed(bytes)? })
    }

    pub(crate) fn scalar(&self) -> Scalar {
        self.scalar
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The numbers, if they are f32.
    pub(crate) fn numbers(&self) -> &[f32] {
        bytemuck::try_cast_slice(&self.bytes).unwrap_or(&[])
    }

    /// Writes numbers from number `at` on; f16 are rounded to nearest even.
    pub(crate) fn write(&mut self, at: usize, from: &[f32]) {
        let size = self.scalar.bytes();
        let to = &mut self.bytes[at * size..][..from.len() * size];
        if self.scalar == Scalar::F32 {
            to.copy_from_slice(bytemuck::cast_slice(from));
            return;
        }
        for (to, from) in to.chunks_mut(64 * size).zip(from.chunks(64)) {
            let (mut held, mut halves) = ([0.0; 64], [f16::ZERO; 64]);
            held.iter_mut().zip(from).for_each(|(held, x)| *held = x.clamp(-LARGEST, LARGEST));
            halves.convert_from_f32_slice(&held);
            to.copy_from_slice(&bytemuck::cast_slice(&halves)[..to.len()]);
        }
    }
}

/// Keys and values of one layer of one session: `positions * kv_heads` vectors each, in the order that the device likes.
#[derive(Debug, Default)]
pub(crate) struct KeyValue {
    pub(crate) kv_heads: usize,
    pub(crate) key_width: usize,
    pub(crate) value_width: usize,
    pub(crate) positions: usize,
    pub(crate) keys: Kept,
    pub(crate) values: Kept,
}

/// A recurrent state: the committed numbers and those that the running step writes.
#[derive(Debug, Default)]
pub(crate) struct Recurrent {
    pub(crate) committed: Numbers,
    pub(crate) next: Numbers,
    written: bool,
}

#[derive(Debug)]
pub(crate) enum HostState {
    KeyValue(KeyValue),
    Recurrent(Recurrent),
}

struct Bank {
    bytes: usize,
    slots: Vec<Option<Bytes>>,
}

/// Everything that lies in host memory, by handle.
#[derive(Default)]
pub(crate) struct Host {
    buffers: Vec<Numbers>,
    weights: Vec<(MatrixShape, Bytes)>,
    banks: Vec<Bank>,
    tables: Vec<Vec<Slot>>,
    states: Vec<Option<HostState>>,
    free_states: Vec<u32>,
    /// Whether keys and values are f16.
    half_states: bool,
}

impl Host {
    pub(crate) fn new(half_states: bool) -> Self {
        Self { half_states, ..Self::default() }
    }

    /// What keys and values are kept as.
    pub(crate) fn keys(&self) -> Scalar {
        if self.half_states { Scalar::F16 } else { Scalar::F32 }
    }

    pub(crate) fn buffer(&mut self, len: usize) -> Result<Buffer, Error> {
        self.buffers.push(Numbers::zeroed(len)?);
        Ok(Buffer(self.buffers.len() as u32 - 1))
    }

    pub(crate) fn add_weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error> {
        shape.view(&bytes)?;
        self.weights.push((shape, bytes));
        Ok(Weight(self.weights.len() as u32 - 1))
    }

    pub(crate) fn weight(&self, weight: Weight) -> Result<Matrix<'_>, Error> {
        let (shape, bytes) = self.weights.get(weight.0 as usize).ok_or_else(|| stale("weight"))?;
        shape.view(bytes)
    }

    pub(crate) fn bank(&mut self, count: usize, bytes: usize) -> Result<u16, Error> {
        let slots = (0..count).map(|_| Bytes::zeroed(bytes).map(Some)).collect::<Result<_, _>>()?;
        self.banks.push(Bank { bytes, slots });
        u16::try_from(self.banks.len() - 1).map_err(|_| Error::Shape("more than 65536 banks of slots".into()))
    }

    pub(crate) fn slot_table(&mut self, slots: &[Slot]) -> Result<SlotTable, Error> {
        self.tables.push(slots.to_vec());
        Ok(SlotTable(self.tables.len() as u32 - 1))
    }

    /// The uses that a router's ids stand for, those of one slot together.
    pub(crate) fn routed(&self, ids: View, table: SlotTable, to: &mut Vec<ExpertUse>) -> Result<(), Error> {
        let (all, slots) = (self.get(&ids)?, self.table(table)?);
        to.clear();
        for row in 0..ids.rows {
            for rank in 0..ids.width {
                let id = all[ids.at(row, 0) + rank];
                let Some(slot) = slots.get(id as usize).filter(|_| id >= 0.0) else {
                    return Err(Error::Shape(format!("Experts: expert {id} of {}", slots.len())));
                };
                to.push(ExpertUse { slot: *slot, row, part: row * ids.width + rank });
            }
        }
        to.sort_unstable_by_key(|u| (u.slot, u.part));
        Ok(())
    }

    fn slot_mut(&mut self, slot: Slot) -> Result<(&mut Option<Bytes>, usize), Error> {
        let bank = self.banks.get_mut(slot.bank as usize).ok_or_else(|| stale("slot"))?;
        Ok((bank.slots.get_mut(slot.index as usize).ok_or_else(|| stale("slot"))?, bank.bytes))
    }

    pub(crate) fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error> {
        self.slot_mut(slot)?
            .0
            .take()
            .ok_or_else(|| Error::Device("a slot that is being filled already".into()))
    }

    pub(crate) fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error> {
        let (place, len) = self.slot_mut(slot)?;
        if bytes.len() != len || place.is_some() {
            return Err(Error::Device("a slot was given memory that is not its own".into()));
        }
        *place = Some(bytes);
        Ok(())
    }

    pub(crate) fn copy_slot(&mut self, from: Slot, to: Slot) -> Result<(), Error> {
        if self.slot(from)?.len() != self.slot(to)?.len() || from.bank == to.bank {
            return Err(Error::Device("a slot was copied to one of another size or of the same bank".into()));
        }
        let mut bytes = self.take_slot(to)?;
        bytes.copy_from_slice(self.slot(from)?);
        self.put_slot(to, bytes)
    }

    pub(crate) fn slot(&self, slot: Slot) -> Result<&[u8], Error> {
        let bank = self.banks.get(slot.bank as usize).ok_or_else(|| stale("slot"))?;
        let slot = bank.slots.get(slot.index as usize).ok_or_else(|| stale("slot"))?;
        slot.as_deref().ok_or_else(|| Error::Device("a slot was used while it was being filled".into()))
    }

    pub(crate) fn state(&mut self, shape: StateShape) -> Result<State, Error> {
        let state = match shape {
            StateShape::KeyValue { kv_heads, key_width, value_width, positions } => {
                let len = |width: usize| {
                    kv_heads
                        .checked_mul(width)
                        .and_then(|n| n.checked_mul(positions))
                        .ok_or_else(|| Error::Shape(format!("a state of {positions} positions is too large")))
                };
                HostState::KeyValue(KeyValue {
                    kv_heads,
                    key_width,
                    value_width,
                    positions,
                    keys: Kept::zeroed(self.keys(), len(key_width)?)?,
                    values: Kept::zeroed(self.keys(), len(value_width)?)?,
                })
            }
            StateShape::Recurrent { len } => HostState::Recurrent(Recurrent {
                committed: Numbers::zeroed(len)?,
                next: Numbers::zeroed(len)?,
                written: false,
            }),
        };
        if let Some(i) = self.free_states.pop() {
            self.states[i as usize] = Some(state);
            return Ok(State(i));
        }
        self.states.push(Some(state));
        Ok(State(self.states.len() as u32 - 1))
    }

    pub(crate) fn drop_state(&mut self, state: State) {
        if let Some(place) = self.states.get_mut(state.0 as usize)
            && place.take().is_some()
        {
            self.free_states.push(state.0);
        }
    }

    fn state_ref(&self, state: State) -> Result<&HostState, Error> {
        self.states.get(state.0 as usize).and_then(Option::as_ref).ok_or_else(|| stale("state"))
    }

    fn state_mut(&mut self, state: State) -> Result<&mut HostState, Error> {
        self.states.get_mut(state.0 as usize).and_then(Option::as_mut).ok_or_else(|| stale("state"))
    }

    pub(crate) fn reset(&mut self, state: State) -> Result<(), Error> {
        match self.state_mut(state)? {
            // Only committed positions are ever read, so stale keys and values need no zeroing.
            HostState::KeyValue(_) => {}
            HostState::Recurrent(r) => {
                r.committed.fill(0.0);
                r.written = false;
            }
        }
        Ok(())
    }

    pub(crate) fn commit(&mut self, state: State) -> Result<(), Error> {
        if let HostState::Recurrent(r) = self.state_mut(state)?
            && std::mem::take(&mut r.written)
        {
            std::mem::swap(&mut r.committed, &mut r.next);
        }
        Ok(())
    }

    /// Moves a state of keys and values out while an op writes it; [`Host::put_key_value`] puts it back.
    pub(crate) fn take_key_value(&mut self, state: State) -> Result<KeyValue, Error> {
        match self.state_mut(state)? {
            HostState::KeyValue(kv) => Ok(std::mem::take(kv)),
            HostState::Recurrent(_) => {
                Err(Error::Shape("a recurrent state where keys and values belong".into()))
            }
        }
    }

    pub(crate) fn put_key_value(&mut self, state: State, kv: KeyValue) -> Result<(), Error> {
        *self.state_mut(state)? = HostState::KeyValue(kv);
        Ok(())
    }

    /// Moves a recurrent state out while an op reads its committed and writes its next numbers.
    pub(crate) fn take_recurrent(&mut self, state: State) -> Result<Recurrent, Error> {
        match self.state_mut(state)? {
            HostState::Recurrent(r) => Ok(std::mem::take(r)),
            HostState::KeyValue(_) => {
                Err(Error::Shape("keys and values where a recurrent state belongs".into()))
            }
        }
    }

    /// Puts a recurrent state back whose next numbers have been written.
    pub(crate) fn put_recurrent(&mut self, state: State, mut r: Recurrent) -> Result<(), Error> {
        r.written = true;
        *self.state_mut(state)? = HostState::Recurrent(r);
        Ok(())
    }

    /// The numbers of a buffer, all of them.
    pub(crate) fn all(&self, buffer: Buffer) -> Result<&[f32], Error> {
        self.buffers.get(buffer.0 as usize).map(|n| &**n).ok_or_else(|| stale("buffer"))
    }

    /// The buffer of a view, once the view is known to lie inside it.
    pub(crate) fn get(&self, view: &View) -> Result<&[f32], Error> {
        let all = self.all(view.buffer)?;
        check(view, all.len())?;
        Ok(all)
    }

    /// Moves a view's buffer out, so that it can be written while others are read; [`Host::put`] puts it back.
    pub(crate) fn take(&mut self, view: &View) -> Result<Numbers, Error> {
        let numbers = self.buffers.get_mut(view.buffer.0 as usize).ok_or_else(|| stale("buffer"))?;
        check(view, numbers.len())?;
        Ok(std::mem::take(numbers))
    }

    pub(crate) fn put(&mut self, view: &View, numbers: Numbers) {
        if let Some(place) = self.buffers.get_mut(view.buffer.0 as usize) {
            *place = numbers;
        }
    }

    /// Runs `f` with a view's buffer moved out, and puts it back whatever `f` returns.
    pub(crate) fn with<T>(
        &mut self,
        view: &View,
        f: impl FnOnce(&mut Self, &mut [f32]) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut numbers = self.take(view)?;
        let result = f(self, &mut numbers);
        self.put(view, numbers);
        result
    }

    pub(crate) fn write(&mut self, buffer: Buffer, numbers: &[f32]) -> Result<(), Error> {
        let view = View::rows(buffer, 1, numbers.len());
        let mut all = self.take(&view)?;
        all[..numbers.len()].copy_from_slice(numbers);
        self.put(&view, all);
        Ok(())
    }

    pub(crate) fn read(&self, view: View, out: &mut [f32]) -> Result<(), Error> {
        let from = self.get(&view)?;
        let len = view.rows.checked_mul(view.heads).and_then(|n| n.checked_mul(view.width));
        if len != Some(out.len()) {
            return Err(Error::Shape(format!("{view:?} read into {} numbers", out.len())));
        }
        for (i, to) in out.chunks_exact_mut(view.width.max(1)).enumerate() {
            let at = view.at(i / view.heads, i % view.heads);
            to.copy_from_slice(&from[at..at + view.width]);
        }
        Ok(())
    }
}

impl Holdings for Host {
    fn numbers(&self, buffer: Buffer) -> Result<usize, Error> {
        Ok(self.all(buffer)?.len())
    }

    fn matrix_shape(&self, weight: Weight) -> Result<MatrixShape, Error> {
        Ok(self.weight(weight)?.shape)
    }

    fn slot_bytes(&self, slot: Slot) -> Result<usize, Error> {
        Ok(self.slot(slot)?.len())
    }

    fn table(&self, table: SlotTable) -> Result<&[Slot], Error> {
        self.tables.get(table.0 as usize).map(Vec::as_slice).ok_or_else(|| stale("slot table"))
    }

    fn state_shape(&self, state: State) -> Result<StateShape, Error> {
        Ok(match self.state_ref(state)? {
            HostState::KeyValue(KeyValue { kv_heads, key_width, value_width, positions, .. }) => {
                StateShape::KeyValue {
                    kv_heads: *kv_heads,
                    key_width: *key_width,
                    value_width: *value_width,
                    positions: *positions,
                }
            }
            HostState::Recurrent(r) => StateShape::Recurrent { len: r.committed.len() },
        })
    }
}

fn check(view: &View, len: usize) -> Result<(), Error> {
    if !view.lies_in(len) {
        return Err(Error::Shape(format!("a view beyond its buffer of {len} numbers: {view:?}")));
    }
    Ok(())
}
