//! Buffers of the device by their handles.

use moeflux_ops::{
    Buffer, DeviceId, Error, HandOverShape, KvFormat, MatrixShape, Slot, SlotTable, State,
    StateShape, Weight, seam::HandleTable,
};

use super::{
    super::card::{Card, HostExchange, STORAGE, device_buffer, native::Sharing},
    buffer::{ALIGN, DeviceBuffer, align_up},
    buffers::ActivationArena,
    slots::SlotBanks,
    states::GpuStates,
    weights::WeightArenas,
};
use crate::card::adapter::is_unified;

/// All memory of the device, by handle.
pub(crate) struct Store {
    /// Id that handles carry.
    pub(super) id: DeviceId,
    pub(super) device: wgpu::Device,
    pub(super) queue: wgpu::Queue,
    /// Bytes of the largest buffer that a kernel can bind whole.
    pub(super) max_bytes: u64,
    next_id: u32,
    pub(super) activations: ActivationArena,
    pub(super) weights: WeightArenas,
    pub(super) slots: SlotBanks,
    pub(crate) states: GpuStates,
    /// Scratch that the kernels of one op share, and its length in f32 values.
    scratch: Option<(DeviceBuffer, u64)>,
}

/// Values that card and host share.
pub(crate) struct SharedValues {
    pub(crate) buffer: DeviceBuffer,
    pub(crate) memory: HostExchange,
}

/// Memory of hand-overs: ids and inputs for the host, and its results.
pub(crate) struct ExchangeMemory {
    pub(crate) inputs: SharedValues,
    pub(crate) results: SharedValues,
}

impl Store {
    pub(crate) fn new(card: &Card, id: DeviceId, kv_format: KvFormat) -> Self {
        let max_binding = card.limits.max_storage_buffer_binding_size & !(ALIGN - 1);
        let sharing = Sharing::detect(&card.device, is_unified(&card.adapter));
        Self {
            id,
            device: card.device.clone(),
            queue: card.queue.clone(),
            max_bytes: max_binding.min(card.limits.max_buffer_size),
            next_id: 1,
            activations: ActivationArena::new(&card.device, &card.queue, 0),
            weights: WeightArenas::default(),
            slots: SlotBanks::new(id, sharing),
            states: GpuStates::new(id, kv_format),
            scratch: None,
        }
    }

    /// Allocates memory that card and host share for hand-overs. `None` where the driver has none.
    ///
    /// Inputs are in host memory, if it can be imported: the host reads mapped memory of a card
    /// slowly. Results are in memory of the card: it may read host memory from a cache that writes
    /// of the host during a submission do not reach.
    pub(crate) fn exchange(
        &mut self,
        shape: HandOverShape,
    ) -> Result<Option<ExchangeMemory>, Error> {
        let HandOverShape { ids, input, results } = shape;
        let [inputs, results] = [ids + input, results]
            .map(|values| align_up((values * size_of::<f32>()).max(1) as u64).max(ALIGN));
        self.check_bindable("values for the host", inputs)?;
        self.check_bindable("results of the host", results)?;
        let Some(results) = device_buffer(&self.device, results)? else { return Ok(None) };
        let inputs = [Sharing::Imported, Sharing::Mapped]
            .into_iter()
            .find_map(|sharing| sharing.buffer(&self.device, inputs).ok());
        let Some(inputs) = inputs else { return Ok(None) };
        let [inputs, results] = [inputs, results].map(|(raw, mapping)| SharedValues {
            buffer: self.register(raw),
            memory: HostExchange::new(mapping),
        });
        Ok(Some(ExchangeMemory { inputs, results }))
    }

    /// Allocates a buffer that kernels can bind whole.
    ///
    /// # Errors
    /// [`Error::Shape`] above the binding limit; [`Error::Memory`] if the card is out of memory.
    pub(crate) fn allocate(&mut self, label: &str, bytes: u64) -> Result<DeviceBuffer, Error> {
        let size = align_up(bytes.max(ALIGN));
        self.check_bindable(label, bytes)?;
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let raw = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(label),
            size,
            usage: STORAGE,
            mapped_at_creation: false,
        });
        if let Some(error) = pollster::block_on(scope.pop()) {
            let source = std::io::Error::other(format!(
                "the GPU has no memory for {label}: {error}; end other programs that use it, or lower its memory budget"
            ));
            return Err(Error::Memory { bytes: size, source });
        }
        Ok(self.register(raw))
    }

    pub(super) fn take_id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id - 1
    }

    /// Gives a new buffer its id.
    pub(super) fn register(&mut self, raw: wgpu::Buffer) -> DeviceBuffer {
        let size = raw.size();
        DeviceBuffer::whole(self.take_id(), raw, size)
    }

    /// Checks that a kernel can bind a buffer of `bytes` whole.
    pub(super) fn check_bindable(&self, label: &str, bytes: u64) -> Result<(), Error> {
        match self.max_bytes {
            max if align_up(bytes) > max => Err(Error::Shape(format!(
                "{label} of {bytes} bytes, where this GPU's kernels bind at most {max}"
            ))),
            _ => Ok(()),
        }
    }

    /// Id that handles of these objects carry.
    pub(crate) const fn id(&self) -> DeviceId {
        self.id
    }

    /// Bytes of the largest buffer that a kernel can bind whole.
    pub(crate) const fn max_bytes(&self) -> u64 {
        self.max_bytes
    }

    /// Whether a kernel can bind a buffer of `words` 32-bit words whole.
    pub(crate) const fn can_bind(&self, words: usize) -> bool {
        (words as u64).saturating_mul(4) <= self.max_bytes
    }

    /// Scratch of at least `len` f32 values, valid until the op is encoded. Also returns the id of
    /// the buffer that it replaced, whose bind groups are stale.
    pub(crate) fn scratch(&mut self, len: u64) -> Result<(DeviceBuffer, Option<u32>), Error> {
        if let Some((buffer, available)) = &self.scratch
            && *available >= len
        {
            return Ok((buffer.clone(), None));
        }
        let buffer = self.allocate("scratch of an op", len * 4)?;
        let old = self.scratch.replace((buffer.clone(), len));
        Ok((buffer, old.map(|(old, _)| old.id)))
    }
}

impl HandleTable for Store {
    fn buffer_len(&self, buffer: Buffer) -> Result<usize, Error> {
        self.region_len(buffer)
    }

    fn matrix_shape(&self, weight: Weight) -> Result<MatrixShape, Error> {
        Ok(self.matrix(weight)?.shape)
    }

    fn slot_bytes(&self, slot: Slot) -> Result<usize, Error> {
        self.slots.readable_bytes(slot)
    }

    fn table(&self, table: SlotTable) -> Result<&[Option<Slot>], Error> {
        Ok(&self.gpu_table(table)?.slots)
    }

    fn state_shape(&self, state: State) -> Result<StateShape, Error> {
        self.states.shape(state)
    }
}

#[cfg(test)]
pub(crate) mod tests;
