//! What devices that compute on the host share: buffers, weights, slots and states in ordinary memory.

mod keys;
mod states;

use crate::{
    Buffer, Error, ExpertUse, KvFormat, Matrix, Slot, SlotTable, State, StateShape, View, Weight,
    matrix::{Bytes, MatrixShape},
    op_check::{Holdings, stale},
};
pub(crate) use keys::{narrow, widen_q8};
pub(crate) use states::{KeyValue, Kind, Recurrent, States};

/// Numbers in page-aligned anonymous memory: untouched pages cost address space only.
#[derive(Debug, Default)]
pub(crate) struct Numbers(Bytes);

impl Numbers {
    pub(crate) fn zeroed(len: usize) -> Result<Self, Error> {
        let bytes = len
            .checked_mul(4)
            .ok_or_else(|| Error::Shape(format!("{len} numbers are too many")))?;
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
    /// What ops remember.
    pub(crate) states: States,
}

impl Host {
    /// Keys and values are kept in a format.
    pub(crate) fn new(keys: KvFormat) -> Self {
        Self { states: States::new(keys), ..Self::default() }
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
        u16::try_from(self.banks.len() - 1)
            .map_err(|_| Error::Shape("more than 65536 banks of slots".into()))
    }

    pub(crate) fn slot_table(&mut self, slots: &[Slot]) -> Result<SlotTable, Error> {
        self.tables.push(slots.to_vec());
        Ok(SlotTable(self.tables.len() as u32 - 1))
    }

    /// The uses that a router's ids stand for, those of one slot together.
    pub(crate) fn routed(
        &self,
        ids: View,
        table: SlotTable,
        to: &mut Vec<ExpertUse>,
    ) -> Result<(), Error> {
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
            return Err(Error::Device(
                "a slot was copied to one of another size or of the same bank".into(),
            ));
        }
        let mut bytes = self.take_slot(to)?;
        bytes.copy_from_slice(self.slot(from)?);
        self.put_slot(to, bytes)
    }

    pub(crate) fn slot(&self, slot: Slot) -> Result<&[u8], Error> {
        let bank = self.banks.get(slot.bank as usize).ok_or_else(|| stale("slot"))?;
        let slot = bank.slots.get(slot.index as usize).ok_or_else(|| stale("slot"))?;
        slot.as_deref()
            .ok_or_else(|| Error::Device("a slot was used while it was being filled".into()))
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
        let numbers =
            self.buffers.get_mut(view.buffer.0 as usize).ok_or_else(|| stale("buffer"))?;
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
        self.states.shape(state)
    }
}

fn check(view: &View, len: usize) -> Result<(), Error> {
    if !view.lies_in(len) {
        return Err(Error::Shape(format!("a view beyond its buffer of {len} numbers: {view:?}")));
    }
    Ok(())
}
