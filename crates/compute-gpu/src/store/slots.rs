//! Expert slots: banks of slots, and the tables that map expert ids to slots.

use moeflux_ops::{Bank, BankPlace, Bytes, DeviceId, Error, Slot, SlotTable, seam::stale};

use super::{
    buffer::{DeviceBuffer, align_up, write_padded},
    store::Store,
};
use crate::card::native::Sharing;

/// Host side of a slot in a bank that the host writes.
struct HostSlot {
    /// `None` while the memory is taken out to be filled.
    bytes: Option<Bytes>,
    /// Address of the memory, to recognise it when it is put back.
    address: usize,
}

/// Array of slots of one size.
struct GpuBank {
    /// Buffer that kernels read; `None` if the card cannot read host memory in place.
    buffer: Option<DeviceBuffer>,
    /// Bytes of a slot, as requested.
    bytes: usize,
    /// Bytes from one slot to the next, aligned.
    stride: usize,
    count: usize,
    /// Slots that the host fills; empty for [`BankPlace::Card`].
    host_slots: Vec<HostSlot>,
}

impl GpuBank {
    /// Byte offset of a slot.
    const fn offset(&self, slot: Slot) -> u64 {
        slot.index as u64 * self.stride as u64
    }

    /// Whether the memory of a slot is taken out to be filled.
    fn is_taken(&self, slot: Slot) -> bool {
        self.host_slots.get(slot.index as usize).is_some_and(|slot| slot.bytes.is_none())
    }
}

/// Bank of experts without a slot.
pub(crate) const NO_BANK: u32 = u32::MAX;

/// Slots of a layer's experts by id. On the card an entry has two words: bank and byte offset.
pub(crate) struct GpuSlotTable {
    pub(crate) slots: Vec<Option<Slot>>,
    pub(crate) buffer: DeviceBuffer,
    /// Indices of the slots' banks, sorted, without duplicates.
    pub(crate) banks: Vec<u16>,
    /// Tables with other slots of the host, which are read before, to measure a slower bus.
    pub(crate) other_slots: Vec<DeviceBuffer>,
}

impl GpuSlotTable {
    /// Whether all experts have slots in one bank.
    pub(crate) fn is_of_one_bank(&self) -> bool {
        self.banks.len() == 1 && self.slots.iter().all(Option::is_some)
    }
}

/// All banks and slot tables.
pub(super) struct SlotBanks {
    /// Device of the handles.
    device: DeviceId,
    banks: Vec<GpuBank>,
    /// `None` for released ones.
    tables: Vec<Option<GpuSlotTable>>,
    sharing: Sharing,
    /// How often experts in host memory are read.
    host_reads: usize,
}

impl SlotBanks {
    pub(super) const fn new(device: DeviceId, sharing: Sharing) -> Self {
        Self { device, banks: Vec::new(), tables: Vec::new(), sharing, host_reads: 1 }
    }

    fn bank(&self, slot: Slot) -> Result<&GpuBank, Error> {
        let bank = self.banks.get(slot.bank.index_on(self.device)?);
        bank.filter(|bank| (slot.index as usize) < bank.count).ok_or_else(|| stale("slot"))
    }

    fn host_slot(&mut self, slot: Slot) -> Result<&mut HostSlot, Error> {
        self.bank(slot)?;
        let slots =
            self.banks.get_mut(usize::from(slot.bank.index)).map(|bank| &mut bank.host_slots);
        slots
            .and_then(|slots| slots.get_mut(slot.index as usize))
            .ok_or_else(|| Error::Device("a slot on the card, which only a copy fills".into()))
    }

    /// Bytes of a slot that kernels can read now.
    pub(super) fn readable_bytes(&self, slot: Slot) -> Result<usize, Error> {
        let bank = self.bank(slot)?;
        if bank.is_taken(slot) {
            return Err(Error::Device("a slot was used while it was being filled".into()));
        }
        if bank.buffer.is_none() {
            return Err(Error::Device("a slot that this GPU cannot read: copy it first".into()));
        }
        Ok(bank.bytes)
    }
}

impl Store {
    /// How the host writes slots.
    pub(crate) const fn sharing(&self) -> Sharing {
        self.slots.sharing
    }

    #[cfg(test)]
    pub(super) fn set_sharing(&mut self, sharing: Sharing) {
        self.slots.sharing = sharing;
    }

    /// Sets how often experts in host memory are read.
    pub(crate) fn set_host_reads(&mut self, reads: usize) {
        self.slots.host_reads = reads.max(1);
    }

    /// Number of slots of the host that are read for each that is needed.
    pub(crate) fn host_reads(&self) -> usize {
        self.slots.host_reads
    }

    /// A slot that is read before `slot`, to measure a slower bus: some shifts further in its bank.
    /// The same slot on the card.
    pub(crate) fn other_slot(&self, slot: Slot, shift: usize) -> Result<Slot, Error> {
        let bank = self.slots.bank(slot)?;
        let shift = if bank.host_slots.is_empty() { 0 } else { shift * bank.count };
        let index = (slot.index as usize + shift / self.slots.host_reads) % bank.count;
        Ok(Slot { index: index as u32, ..slot })
    }

    /// Whether the host writes the slots of a bank.
    pub(crate) fn is_on_host(&self, bank: u16) -> bool {
        let bank = self.slots.banks.get(usize::from(bank));
        bank.is_some_and(|bank| !bank.host_slots.is_empty())
    }

    /// Maximum number of slots of `bytes` in a bank.
    pub(crate) fn bank_slots(&self, bytes: usize) -> usize {
        (self.max_bytes / align_up(bytes.max(1) as u64)) as usize
    }

    /// Allocates a bank.
    pub(crate) fn bank(
        &mut self,
        count: usize,
        bytes: usize,
        place: BankPlace,
    ) -> Result<Bank, Error> {
        let stride = align_up(bytes.max(1) as u64);
        let handle = Bank::new(self.id, self.slots.banks.len())?;
        let total = stride.checked_mul(count.max(1) as u64);
        let total = total
            .filter(|total| *total <= self.max_bytes)
            .ok_or_else(|| Error::Shape(format!("{count} slots are too many for a bank")))?;
        let sharing = self.slots.sharing;
        let (buffer, slices) = match place {
            BankPlace::Card => (Some(self.allocate("slots of experts", total)?), Vec::new()),
            BankPlace::Host if sharing == Sharing::Refused => {
                (None, (0..count).map(|_| Bytes::zeroed(bytes)).collect::<Result<_, _>>()?)
            }
            BankPlace::Host => {
                let (raw, mapping) = sharing.buffer(&self.device, total)?;
                (Some(self.register(raw)), mapping.split(count, stride as usize, bytes))
            }
        };
        let host_slots = slices.into_iter().map(|bytes| {
            let address = bytes.as_ptr() as usize;
            HostSlot { bytes: Some(bytes), address }
        });
        self.slots.banks.push(GpuBank {
            buffer,
            bytes,
            stride: stride as usize,
            count,
            host_slots: host_slots.collect(),
        });
        Ok(handle)
    }

    /// Moves the memory of a host slot out, to be filled.
    pub(crate) fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error> {
        let bytes = self.slots.host_slot(slot)?.bytes.take();
        bytes.ok_or_else(|| Error::Device("a slot that is being filled already".into()))
    }

    /// Puts the memory of a host slot back.
    pub(crate) fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error> {
        let slot = self.slots.host_slot(slot)?;
        if slot.bytes.is_some() || bytes.as_ptr() as usize != slot.address {
            return Err(Error::Device("a slot was given memory of another slot".into()));
        }
        slot.bytes = Some(bytes);
        Ok(())
    }

    /// Source and destination of a slot copy.
    ///
    /// # Errors
    /// The slots differ in size, are in one bank, are taken out, or the destination has no buffer.
    pub(crate) fn slot_copy(&self, src: Slot, dst: Slot) -> Result<SlotCopy<'_>, Error> {
        let (src_bank, dst_bank) = (self.slots.bank(src)?, self.slots.bank(dst)?);
        if src_bank.bytes != dst_bank.bytes || src.bank == dst.bank {
            return Err(Error::Device(
                "a slot was copied to one of another size or of the same bank".into(),
            ));
        }
        let Some(dst_buffer) = &dst_bank.buffer else {
            return Err(Error::Device("a slot was copied to where this GPU cannot write".into()));
        };
        if src_bank.is_taken(src) || dst_bank.is_taken(dst) {
            return Err(Error::Device("a slot was copied while it was being filled".into()));
        }
        let host = src_bank.host_slots.get(src.index as usize).and_then(|slot| slot.bytes.as_ref());
        let src = match (&src_bank.buffer, host) {
            (Some(buffer), _) => SlotSource::Card { buffer, offset: src_bank.offset(src) },
            (None, Some(bytes)) => SlotSource::Host(bytes),
            (None, None) => return Err(stale("slot")),
        };
        Ok(SlotCopy { src, dst: dst_buffer, offset: dst_bank.offset(dst), bytes: src_bank.bytes })
    }

    /// Uploads a table of slots.
    pub(crate) fn slot_table(&mut self, slots: &[Option<Slot>]) -> Result<SlotTable, Error> {
        let mut banks = Vec::new();
        for slot in slots.iter().flatten() {
            self.slots.readable_bytes(*slot)?;
            banks.push(slot.bank.index);
        }
        banks.sort_unstable();
        banks.dedup();
        let buffer = self.table_buffer(slots, 0)?;
        let reads = 1..self.slots.host_reads;
        let other_slots = reads.map(|i| self.table_buffer(slots, i)).collect::<Result<_, _>>()?;
        let table = Some(GpuSlotTable { slots: slots.to_vec(), buffer, banks, other_slots });
        let tables = &mut self.slots.tables;
        let index = tables.iter().position(Option::is_none).unwrap_or(tables.len());
        match tables.get_mut(index) {
            Some(released) => *released = table,
            None => tables.push(table),
        }
        Ok(SlotTable(self.id.handle(index)))
    }

    /// Uploads the words of a table, with each slot of the host in place of another one, which is
    /// some `shift`s further in its bank.
    fn table_buffer(
        &mut self,
        slots: &[Option<Slot>],
        shift: usize,
    ) -> Result<DeviceBuffer, Error> {
        let mut words = Vec::with_capacity(slots.len() * 2);
        for slot in slots {
            let Some(slot) = slot else {
                words.extend([NO_BANK, 0]);
                continue;
            };
            let read = self.other_slot(*slot, shift)?;
            words.extend([u32::from(slot.bank.index), self.slot_offset(read)]);
        }
        let buffer = self.allocate("a table of slots", words.len() as u64 * 4)?;
        write_padded(&self.queue, &buffer.raw, 0, bytemuck::cast_slice(&words));
        Ok(buffer)
    }

    /// Releases a table of slots; its place is taken by another one. Returns the ids of its
    /// buffers.
    pub(crate) fn release_table(&mut self, table: SlotTable) -> Vec<u32> {
        let index = table.0.index_on(self.id, "slot table").ok();
        let released = index.and_then(|index| self.slots.tables.get_mut(index)?.take());
        let buffers =
            released.into_iter().flat_map(|GpuSlotTable { buffer, other_slots, .. }| {
                std::iter::once(buffer.id).chain(other_slots.into_iter().map(|buffer| buffer.id))
            });
        buffers.collect()
    }

    /// Table of slots by handle.
    pub(crate) fn gpu_table(&self, table: SlotTable) -> Result<&GpuSlotTable, Error> {
        let index = table.0.index_on(self.id, "slot table")?;
        let table = self.slots.tables.get(index).and_then(Option::as_ref);
        table.ok_or_else(|| stale("slot table"))
    }

    /// Byte offset of a slot in its bank.
    pub(crate) fn slot_offset(&self, slot: Slot) -> u32 {
        self.slots.banks[usize::from(slot.bank.index)].offset(slot) as u32
    }

    /// Buffer of the bank with this index, which kernels read.
    pub(crate) fn bank_buffer(&self, bank: u16) -> Result<DeviceBuffer, Error> {
        let buffer = self.slots.banks.get(bank as usize).and_then(|bank| bank.buffer.clone());
        buffer.ok_or_else(|| stale("bank"))
    }
}

/// Contents of the source slot of a copy.
pub(crate) enum SlotSource<'a> {
    /// Buffer that the card reads, and the byte offset of the slot.
    Card { buffer: &'a DeviceBuffer, offset: u64 },
    /// Host memory that the card cannot read.
    Host(&'a Bytes),
}

/// Copy of one slot to another.
pub(crate) struct SlotCopy<'a> {
    pub(crate) src: SlotSource<'a>,
    pub(crate) dst: &'a DeviceBuffer,
    /// Byte offset in `dst`.
    pub(crate) offset: u64,
    pub(crate) bytes: usize,
}
