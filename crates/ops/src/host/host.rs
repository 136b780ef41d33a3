//! Buffers and banks in the host's memory by their handles.

use moeflux_base::KvFormat;

use super::{states::HostStates, values::HostValues};
use crate::{
    error::Error,
    handle::{Bank, Buffer, DeviceId, Slot, SlotTable, State, Weight},
    matrix::{Bytes, Matrix, MatrixShape},
    op_check::{HandleTable, stale},
    operands::{ExpertUse, View},
    state::StateShape,
};

/// A bank of slots. The memory of a slot is absent while a reader fills it.
struct HostBank {
    slot_bytes: usize,
    slots: Vec<Option<Bytes>>,
}

/// All objects in host memory, by handle.
pub struct Host {
    id: DeviceId,
    buffers: Vec<HostValues>,
    weights: Vec<(MatrixShape, Bytes)>,
    banks: Vec<HostBank>,
    tables: Vec<Vec<Option<Slot>>>,
    /// KV caches and recurrent states.
    pub states: HostStates,
}

impl Host {
    /// Creates a memory without objects, whose handles carry `id`.
    #[inline]
    pub fn new(id: DeviceId, kv_format: KvFormat) -> Self {
        Self {
            id,
            buffers: Vec::new(),
            weights: Vec::new(),
            banks: Vec::new(),
            tables: Vec::new(),
            states: HostStates::new(id, kv_format),
        }
    }

    /// Id that handles of these objects carry.
    #[inline]
    pub const fn id(&self) -> DeviceId {
        self.id
    }

    /// Allocates a zeroed buffer: see [`Device::buffer`](crate::Device::buffer).
    #[inline]
    pub fn buffer(&mut self, len: usize) -> Result<Buffer, Error> {
        self.buffers.push(HostValues::zeroed(len)?);
        Ok(Buffer(self.id.handle(self.buffers.len() - 1)))
    }

    /// Keeps a matrix whose bytes have the layout of `shape`.
    #[inline]
    pub fn add_weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error> {
        shape.view(&bytes)?;
        self.weights.push((shape, bytes));
        Ok(Weight(self.id.handle(self.weights.len() - 1)))
    }

    /// Matrix of a weight.
    #[inline]
    pub fn weight(&self, weight: Weight) -> Result<Matrix<'_>, Error> {
        let index = weight.0.index_on(self.id, "weight")?;
        let (shape, bytes) = self.weights.get(index).ok_or_else(|| stale("weight"))?;
        shape.view(bytes)
    }

    #[inline]
    pub(crate) fn bank(&mut self, count: usize, slot_bytes: usize) -> Result<Bank, Error> {
        let bank = Bank::new(self.id, self.banks.len())?;
        let slots =
            (0..count).map(|_| Bytes::zeroed(slot_bytes).map(Some)).collect::<Result<_, _>>()?;
        self.banks.push(HostBank { slot_bytes, slots });
        Ok(bank)
    }

    #[inline]
    pub(crate) fn slot_table(&mut self, slots: &[Option<Slot>]) -> Result<SlotTable, Error> {
        slots.iter().flatten().try_for_each(|slot| slot.bank.index_on(self.id).map(drop))?;
        self.tables.push(slots.to_vec());
        Ok(SlotTable(self.id.handle(self.tables.len() - 1)))
    }

    /// Resolves a router's ids to uses of experts that have a slot, sorted by slot.
    #[inline]
    pub fn routed(
        &self,
        ids: View,
        table: SlotTable,
        uses: &mut Vec<ExpertUse>,
    ) -> Result<(), Error> {
        let (values, slots) = (self.get(&ids)?, self.table(table)?);
        uses.clear();
        for row in 0..ids.rows {
            for rank in 0..ids.width {
                let id = values[ids.index(row, 0) + rank];
                let Some(slot) = slots.get(id as usize).filter(|_| id >= 0.0) else {
                    return Err(Error::Shape(format!("Experts: expert {id} of {}", slots.len())));
                };
                let out_row = row * ids.width + rank;
                uses.extend(slot.map(|slot| ExpertUse { slot, row, out_row }));
            }
        }
        uses.sort_unstable_by_key(|u| (u.slot, u.out_row));
        Ok(())
    }

    fn bank_of(&self, slot: Slot) -> Result<&HostBank, Error> {
        self.banks.get(slot.bank.index_on(self.id)?).ok_or_else(|| stale("slot"))
    }

    fn slot_mut(&mut self, slot: Slot) -> Result<(&mut Option<Bytes>, usize), Error> {
        let index = slot.bank.index_on(self.id)?;
        let bank = self.banks.get_mut(index).ok_or_else(|| stale("slot"))?;
        let memory = bank.slots.get_mut(slot.index as usize).ok_or_else(|| stale("slot"))?;
        Ok((memory, bank.slot_bytes))
    }

    #[inline]
    pub(crate) fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error> {
        self.slot_mut(slot)?
            .0
            .take()
            .ok_or_else(|| Error::Device("a slot that is being filled already".into()))
    }

    #[inline]
    pub(crate) fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error> {
        let (memory, slot_bytes) = self.slot_mut(slot)?;
        if bytes.len() != slot_bytes || memory.is_some() {
            return Err(Error::Device("a slot was given memory that is not its own".into()));
        }
        *memory = Some(bytes);
        Ok(())
    }

    #[inline]
    pub(crate) fn copy_slot(&mut self, src: Slot, dst: Slot) -> Result<(), Error> {
        if self.slot(src)?.len() != self.slot(dst)?.len() || src.bank == dst.bank {
            return Err(Error::Device(
                "a slot was copied to one of another size or of the same bank".into(),
            ));
        }
        let mut bytes = self.take_slot(dst)?;
        bytes.copy_from_slice(self.slot(src)?);
        self.put_slot(dst, bytes)
    }

    /// Bytes of a slot.
    #[inline]
    pub fn slot(&self, slot: Slot) -> Result<&[u8], Error> {
        let memory = self.bank_of(slot)?.slots.get(slot.index as usize);
        memory
            .ok_or_else(|| stale("slot"))?
            .as_deref()
            .ok_or_else(|| Error::Device("a slot was used while it was being filled".into()))
    }

    /// All values of a buffer.
    #[inline]
    pub fn values(&self, buffer: Buffer) -> Result<&[f32], Error> {
        let index = buffer.0.index_on(self.id, "buffer")?;
        self.buffers.get(index).map(|values| &**values).ok_or_else(|| stale("buffer"))
    }

    /// All values of a view's buffer, after checking that the view is inside it.
    #[inline]
    pub fn get(&self, view: &View) -> Result<&[f32], Error> {
        let values = self.values(view.buffer)?;
        check_bounds(view, values.len())?;
        Ok(values)
    }

    /// Moves a view's buffer out, so that it can be written while other buffers are read.
    /// [`Host::put`] returns it.
    #[inline]
    pub(crate) fn take(&mut self, view: &View) -> Result<HostValues, Error> {
        let index = view.buffer.0.index_on(self.id, "buffer")?;
        let values = self.buffers.get_mut(index).ok_or_else(|| stale("buffer"))?;
        check_bounds(view, values.len())?;
        Ok(std::mem::take(values))
    }

    #[inline]
    pub(crate) fn put(&mut self, view: &View, values: HostValues) {
        if let Ok(index) = view.buffer.0.index_on(self.id, "buffer")
            && let Some(buffer) = self.buffers.get_mut(index)
        {
            *buffer = values;
        }
    }

    /// Runs `f` with a view's buffer moved out, and returns the buffer also after an error.
    #[inline]
    pub fn with<T>(
        &mut self,
        view: &View,
        f: impl FnOnce(&mut Self, &mut [f32]) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut values = self.take(view)?;
        let result = f(self, &mut values);
        self.put(view, values);
        result
    }

    /// Copies values to the start of a buffer.
    #[inline]
    pub fn write(&mut self, buffer: Buffer, src: &[f32]) -> Result<(), Error> {
        self.write_view(View::rows(buffer, 1, src.len()), src)
    }

    /// Copies values to a view without gaps.
    #[inline]
    pub fn write_view(&mut self, view: View, src: &[f32]) -> Result<(), Error> {
        view.check_dense(src.len())?;
        let mut values = self.take(&view)?;
        values[view.offset..][..src.len()].copy_from_slice(src);
        self.put(&view, values);
        Ok(())
    }

    /// Copies a view to `out`, row by row.
    #[inline]
    pub fn read(&self, view: View, out: &mut [f32]) -> Result<(), Error> {
        let values = self.get(&view)?;
        let len = view.rows.checked_mul(view.heads).and_then(|n| n.checked_mul(view.width));
        if len != Some(out.len()) {
            return Err(Error::Shape(format!("{view:?} read into {} values", out.len())));
        }
        for (i, out) in out.chunks_exact_mut(view.width.max(1)).enumerate() {
            let start = view.index(i / view.heads, i % view.heads);
            out.copy_from_slice(&values[start..start + view.width]);
        }
        Ok(())
    }
}

impl HandleTable for Host {
    fn buffer_len(&self, buffer: Buffer) -> Result<usize, Error> {
        Ok(self.values(buffer)?.len())
    }

    fn matrix_shape(&self, weight: Weight) -> Result<MatrixShape, Error> {
        Ok(self.weight(weight)?.shape)
    }

    fn slot_bytes(&self, slot: Slot) -> Result<usize, Error> {
        Ok(self.slot(slot)?.len())
    }

    fn table(&self, table: SlotTable) -> Result<&[Option<Slot>], Error> {
        let index = table.0.index_on(self.id, "slot table")?;
        self.tables.get(index).map(Vec::as_slice).ok_or_else(|| stale("slot table"))
    }

    fn state_shape(&self, state: State) -> Result<StateShape, Error> {
        self.states.shape(state)
    }
}

fn check_bounds(view: &View, len: usize) -> Result<(), Error> {
    if !view.is_within(len) {
        return Err(Error::Shape(format!("a view beyond its buffer of {len} values: {view:?}")));
    }
    Ok(())
}
