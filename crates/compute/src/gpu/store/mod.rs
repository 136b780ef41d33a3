//! What lies on the card: activations, weights, slots and states.
//!
//! All activations lie in one buffer, so that every kernel sees them through one binding, whatever an op reads and
//! writes. Weights lie in arenas, slots in banks; both are no larger than what a kernel can see at once.

pub(in crate::gpu) mod states;

use crate::{
    BankPlace, Buffer, Error, KvFormat, Slot, SlotTable, State, StateShape, View, Weight,
    matrix::{Bytes, MatrixShape},
    op_check::{Holdings, stale},
};

use crate::gpu::{adapter::Opened, native::Sharing, states::States};

/// Every piece that is allocated begins at a multiple of so many bytes.
const ALIGN: u64 = 256;
/// Bytes of the first arena of weights; later ones double up to [`LARGE_ARENA`].
const SMALL_ARENA: u64 = 8 << 20;
const LARGE_ARENA: u64 = 256 << 20;
/// Numbers of the activations' buffer at first.
const FIRST_ACTIVATIONS: u64 = 1 << 18;

/// The activations that ops keep for themselves, as a buffer.
pub(in crate::gpu) const ROOM: Buffer = Buffer(u32::MAX);

/// A buffer of the card and its number.
#[derive(Clone, Debug)]
pub(in crate::gpu) struct Memory {
    pub(in crate::gpu) id: u32,
    pub(in crate::gpu) raw: wgpu::Buffer,
}

/// Some rows of a matrix of weights that lie in one arena.
#[derive(Clone, Copy, Debug)]
pub(in crate::gpu) struct Piece {
    /// Which arena.
    pub(in crate::gpu) arena: usize,
    /// The first row of the matrix, a multiple of the format's rows of a block.
    pub(in crate::gpu) first: usize,
    /// Its rows.
    pub(in crate::gpu) rows: usize,
    /// Bytes into the arena at which weights, scales and biases begin; multiples of 16.
    pub(in crate::gpu) weights: u32,
    pub(in crate::gpu) scales: u32,
    pub(in crate::gpu) biases: u32,
}

pub(in crate::gpu) struct GpuWeight {
    pub(in crate::gpu) shape: MatrixShape,
    pub(in crate::gpu) pieces: Vec<Piece>,
}

pub(in crate::gpu) struct Bank {
    /// What kernels read; `None` where they cannot read what the host has written.
    memory: Option<Memory>,
    /// Bytes of a slot, as asked for.
    bytes: usize,
    /// Bytes from one slot to the next: a multiple of [`ALIGN`].
    stride: usize,
    count: usize,
    /// The memory of slots that the host fills, and where it lies; without the first while it is out.
    slots: Vec<(Option<Bytes>, usize)>,
}

impl Bank {
    /// Where a slot begins.
    const fn offset(&self, slot: Slot) -> u64 {
        slot.index as u64 * self.stride as u64
    }

    /// Whether somebody is filling a slot.
    fn is_out(&self, slot: Slot) -> bool {
        self.slots.get(slot.index as usize).is_some_and(|(piece, _)| piece.is_none())
    }
}

/// A table of slots, on the host and on the card: two words for each expert, its bank and its byte offset there.
pub(in crate::gpu) struct Table {
    pub(in crate::gpu) slots: Vec<Slot>,
    pub(in crate::gpu) memory: Memory,
    /// The banks that it names.
    pub(in crate::gpu) banks: Vec<u16>,
}

/// Everything on the card, by handle.
pub(in crate::gpu) struct Store {
    device: wgpu::Device,
    queue: wgpu::Queue,
    max_binding: u64,
    max_buffer: u64,
    next_id: u32,
    /// The buffer of all activations.
    pub(in crate::gpu) activations: Memory,
    /// Numbers that it has, and that are taken.
    activations_len: u64,
    activations_used: u64,
    /// First number and length of each buffer.
    buffers: Vec<(u64, usize)>,
    /// First number and length of [`ROOM`].
    room: (u64, usize),
    pub(in crate::gpu) arenas: Vec<Memory>,
    arena_used: u64,
    weights: Vec<GpuWeight>,
    banks: Vec<Bank>,
    tables: Vec<Table>,
    pub(in crate::gpu) states: States,
    /// Numbers that kernels of one op pass on to each other.
    scratch: Option<(Memory, u64)>,
    /// How the host writes slots.
    pub(in crate::gpu) sharing: Sharing,
}

pub(in crate::gpu) const STORAGE: wgpu::BufferUsages = wgpu::BufferUsages::STORAGE
    .union(wgpu::BufferUsages::COPY_DST)
    .union(wgpu::BufferUsages::COPY_SRC);

/// The next place where a piece may begin.
pub(in crate::gpu) fn up(n: u64) -> u64 {
    n.div_ceil(ALIGN) * ALIGN
}

impl Store {
    pub(in crate::gpu) fn new(opened: &Opened, keys: KvFormat) -> Result<Self, Error> {
        let limits = opened.device.limits();
        let mut store = Self {
            device: opened.device.clone(),
            queue: opened.queue.clone(),
            max_binding: limits.max_storage_buffer_binding_size & !(ALIGN - 1),
            max_buffer: limits.max_buffer_size,
            next_id: 0,
            activations: Memory {
                id: 0,
                raw: opened.device.create_buffer(&wgpu::BufferDescriptor {
                    label: Some("activations"),
                    size: FIRST_ACTIVATIONS * 4,
                    usage: STORAGE,
                    mapped_at_creation: false,
                }),
            },
            activations_len: FIRST_ACTIVATIONS,
            activations_used: 0,
            buffers: Vec::new(),
            room: (0, 0),
            arenas: Vec::new(),
            arena_used: 0,
            weights: Vec::new(),
            banks: Vec::new(),
            tables: Vec::new(),
            states: States::new(keys),
            scratch: None,
            sharing: Sharing::of(&opened.device, opened.adapter.is_unified()),
        };
        store.next_id = 1;
        Ok(store)
    }

    /// A buffer of the card that kernels can use whole.
    pub(in crate::gpu) fn allocate(&mut self, what: &str, bytes: u64) -> Result<Memory, Error> {
        let size = up(bytes.max(ALIGN));
        self.check_seen(what, bytes)?;
        let scope = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let raw = self.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some(what),
            size,
            usage: STORAGE,
            mapped_at_creation: false,
        });
        if let Some(error) = pollster::block_on(scope.pop()) {
            let source = std::io::Error::other(format!(
                "the GPU has no room for {what}: {error}; end what else uses it, or plan with less of its memory"
            ));
            return Err(Error::Memory { bytes: size, source });
        }
        self.next_id += 1;
        Ok(Memory { id: self.next_id - 1, raw })
    }

    /// Whether kernels can use a buffer of so many bytes whole.
    pub(in crate::gpu) fn check_seen(&self, what: &str, bytes: u64) -> Result<(), Error> {
        match self.most() {
            most if up(bytes) > most => Err(Error::Shape(format!(
                "{what} of {bytes} bytes, where this GPU's kernels see {most} at once"
            ))),
            _ => Ok(()),
        }
    }

    /// A buffer of numbers, zeroed. The second result is the number of a memory that is gone.
    pub(in crate::gpu) fn buffer(&mut self, len: usize) -> Result<(Buffer, Option<u32>), Error> {
        let (first, gone) = self.region(len)?;
        self.buffers.push((first, len));
        Ok((Buffer(self.buffers.len() as u32 - 1), gone))
    }

    /// Numbers of [`ROOM`].
    pub(in crate::gpu) const fn room(&self) -> usize {
        self.room.1
    }

    /// Makes [`ROOM`] larger. The result is the number of a memory that is gone.
    pub(in crate::gpu) fn make_room(&mut self, numbers: usize) -> Result<Option<u32>, Error> {
        // Twice as much at least, since the former room stays where it is.
        let numbers = numbers.max(self.room.1 * 2);
        let (first, gone) = self.region(numbers)?;
        self.room = (first, numbers);
        Ok(gone)
    }

    /// Numbers among the activations. The second result is the number of a memory that is gone.
    fn region(&mut self, len: usize) -> Result<(u64, Option<u32>), Error> {
        let first = self.activations_used;
        let end = (len as u64).checked_mul(4).map(|bytes| first + up(bytes) / 4);
        let end = end.ok_or_else(|| Error::Shape(format!("{len} numbers are too many")))?;
        let mut gone = None;
        if end > self.activations_len {
            let most = self.most() / 4;
            if end > most {
                return Err(Error::Shape(format!(
                    "intermediate results of {} bytes, where this GPU's kernels see {} at once: lower --chunk",
                    end * 4,
                    most * 4
                )));
            }
            let larger = (self.activations_len * 2).max(end).min(most);
            let new = self.allocate("intermediate results", larger * 4)?;
            let mut encoder = self.device.create_command_encoder(&Default::default());
            encoder.copy_buffer_to_buffer(
                &self.activations.raw,
                0,
                &new.raw,
                0,
                self.activations_len * 4,
            );
            self.queue.submit([encoder.finish()]);
            let old = std::mem::replace(&mut self.activations, new);
            gone = Some(old.id);
            self.activations_len = larger;
        }
        self.activations_used = end;
        Ok((first, gone))
    }

    /// Where a view lies in the activations, in numbers. The op's check has seen that it lies in its buffer.
    pub(in crate::gpu) fn place(&self, view: &View) -> Result<u32, Error> {
        Ok(self.start(view.buffer)? + view.offset as u32)
    }

    /// Where a buffer begins in the activations, in numbers.
    pub(in crate::gpu) fn start(&self, buffer: Buffer) -> Result<u32, Error> {
        if buffer == ROOM {
            return Ok(self.room.0 as u32);
        }
        let (first, _) = self.buffers.get(buffer.0 as usize).ok_or_else(|| stale("buffer"))?;
        Ok(*first as u32)
    }

    /// Takes a matrix of weights, in pieces that each lie in one arena.
    pub(in crate::gpu) fn weight(
        &mut self,
        shape: MatrixShape,
        bytes: &[u8],
    ) -> Result<Weight, Error> {
        let all = shape.view(bytes)?;
        let (format, block) = (shape.format, shape.format.block_rows());
        let mut pieces = Vec::new();
        let mut first = 0;
        while first < shape.rows {
            let mut rows = shape.rows - first;
            let size = |rows: usize| -> Result<u64, Error> {
                let parts = MatrixShape { rows, ..shape }.parts()?;
                Ok([parts.weights, parts.scales, parts.biases].iter().map(|n| up(*n as u64)).sum())
            };
            while size(rows)? > self.max_binding.min(self.max_buffer) {
                if rows <= block {
                    return Err(Error::Shape(format!(
                        "a row of {} is too large for this GPU",
                        shape.cols
                    )));
                }
                rows = (rows / 2).next_multiple_of(block);
            }
            let needed = size(rows)?;
            let room = self.arenas.last().map_or(0, |arena| arena.raw.size() - self.arena_used);
            if needed > room {
                let doubled =
                    self.arenas.last().map_or(SMALL_ARENA, |a| (a.raw.size() * 2).min(LARGE_ARENA));
                let most = self.max_binding.min(self.max_buffer);
                let arena = self.allocate("weights", doubled.max(needed).min(most))?;
                self.arenas.push(arena);
                self.arena_used = 0;
            }
            let arena = self.arenas.len() - 1;
            let mut place = |part: &[u8]| {
                let at = self.arena_used;
                upload(&self.queue, &self.arenas[arena].raw, at, part);
                self.arena_used = up(at + part.len() as u64);
                at as u32
            };
            let (w, s) = (format.row_bytes(shape.cols), format.row_scale_bytes(shape.cols));
            let b = if format.is_affine() { s } else { 0 };
            let blocks = first / block..(first + rows).div_ceil(block);
            pieces.push(Piece {
                arena,
                first,
                rows,
                weights: place(&all.weights[first * w..(first + rows) * w]),
                scales: place(&all.scales[blocks.start * s..blocks.end * s]),
                biases: place(&all.biases[first * b..(first + rows) * b]),
            });
            first += rows;
        }
        self.weights.push(GpuWeight { shape, pieces });
        Ok(Weight(self.weights.len() as u32 - 1))
    }

    pub(in crate::gpu) fn get(&self, weight: Weight) -> Result<&GpuWeight, Error> {
        self.weights.get(weight.0 as usize).ok_or_else(|| stale("weight"))
    }

    pub(in crate::gpu) fn bank_slots(&self, bytes: usize) -> usize {
        (self.most() / up(bytes.max(1) as u64)) as usize
    }

    pub(in crate::gpu) fn bank(
        &mut self,
        count: usize,
        bytes: usize,
        place: BankPlace,
    ) -> Result<u16, Error> {
        let stride = up(bytes.max(1) as u64);
        let number = u16::try_from(self.banks.len())
            .map_err(|_| Error::Shape("more than 65536 banks of slots".into()))?;
        let all = stride.checked_mul(count.max(1) as u64).filter(|all| *all <= self.most());
        let all =
            all.ok_or_else(|| Error::Shape(format!("{count} slots are too many for a bank")))?;
        let (memory, pieces) = match place {
            BankPlace::Card => (Some(self.allocate("slots of experts", all)?), Vec::new()),
            BankPlace::Host if self.sharing == Sharing::Refused => {
                (None, (0..count).map(|_| Bytes::zeroed(bytes)).collect::<Result<_, _>>()?)
            }
            BankPlace::Host => {
                let (raw, shared) = self.sharing.buffer(&self.device, all)?;
                self.next_id += 1;
                let memory = Memory { id: self.next_id - 1, raw };
                (Some(memory), shared.pieces(count, stride as usize, bytes))
            }
        };
        let slots = pieces.into_iter().map(|piece| {
            let at = piece.as_ptr() as usize;
            (Some(piece), at)
        });
        self.banks.push(Bank {
            memory,
            bytes,
            stride: stride as usize,
            count,
            slots: slots.collect(),
        });
        Ok(number)
    }

    /// Bytes of the largest buffer that kernels see.
    pub(in crate::gpu) fn most(&self) -> u64 {
        self.max_binding.min(self.max_buffer)
    }

    fn bank_of(&self, slot: Slot) -> Result<&Bank, Error> {
        let bank =
            self.banks.get(slot.bank as usize).filter(|bank| (slot.index as usize) < bank.count);
        bank.ok_or_else(|| stale("slot"))
    }

    /// The memory of a slot that the host fills, and where it lies.
    fn host_slot(&mut self, slot: Slot) -> Result<&mut (Option<Bytes>, usize), Error> {
        self.bank_of(slot)?;
        let slots = self.banks.get_mut(slot.bank as usize).map(|bank| &mut bank.slots);
        slots
            .and_then(|slots| slots.get_mut(slot.index as usize))
            .ok_or_else(|| Error::Device("a slot on the card, which only a copy fills".into()))
    }

    pub(in crate::gpu) fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error> {
        let (piece, _) = self.host_slot(slot)?;
        piece.take().ok_or_else(|| Error::Device("a slot that is being filled already".into()))
    }

    pub(in crate::gpu) fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error> {
        let (piece, at) = self.host_slot(slot)?;
        if piece.is_some() || bytes.as_ptr() as usize != *at {
            return Err(Error::Device("a slot was given memory that is not its own".into()));
        }
        *piece = Some(bytes);
        Ok(())
    }

    /// Copies a slot by what `encoder` records, or, where the card cannot read it, ahead of what is handed over next. The
    /// result is the number of bytes that have been staged for that.
    pub(in crate::gpu) fn copy_slot(
        &mut self,
        from: Slot,
        to: Slot,
        encoder: &mut wgpu::CommandEncoder,
    ) -> Result<usize, Error> {
        let (source, target) = (self.bank_of(from)?, self.bank_of(to)?);
        if source.bytes != target.bytes || from.bank == to.bank {
            return Err(Error::Device(
                "a slot was copied to one of another size or of the same bank".into(),
            ));
        }
        let Some(onto) = &target.memory else {
            return Err(Error::Device("a slot was copied to where this GPU cannot write".into()));
        };
        if [(source, from), (target, to)].iter().any(|(bank, slot)| bank.is_out(*slot)) {
            return Err(Error::Device("a slot was copied while it was being filled".into()));
        }
        let [first, at] = [(source, from), (target, to)].map(|(bank, slot)| bank.offset(slot));
        match (&source.memory, source.slots.get(from.index as usize)) {
            (Some(memory), _) => {
                // Strides are multiples of more.
                let len = source.bytes.next_multiple_of(4) as u64;
                encoder.copy_buffer_to_buffer(&memory.raw, first, &onto.raw, at, len);
                Ok(0)
            }
            (None, Some((Some(bytes), _))) => {
                upload(&self.queue, &onto.raw, at, bytes);
                Ok(bytes.len())
            }
            (None, _) => Err(stale("slot")),
        }
    }

    pub(in crate::gpu) fn slot_table(&mut self, slots: &[Slot]) -> Result<SlotTable, Error> {
        let mut words = Vec::with_capacity(slots.len() * 2);
        let mut banks = Vec::new();
        for slot in slots {
            self.slot_bytes(*slot)?;
            words.extend([u32::from(slot.bank), self.slot_offset(*slot)]);
            banks.push(slot.bank);
        }
        banks.sort_unstable();
        banks.dedup();
        let memory = self.allocate("a table of slots", words.len() as u64 * 4)?;
        upload(&self.queue, &memory.raw, 0, bytemuck::cast_slice(&words));
        self.tables.push(Table { slots: slots.to_vec(), memory, banks });
        Ok(SlotTable(self.tables.len() as u32 - 1))
    }

    pub(in crate::gpu) fn table_of(&self, table: SlotTable) -> Result<&Table, Error> {
        self.tables.get(table.0 as usize).ok_or_else(|| stale("slot table"))
    }

    /// Byte offset of a slot in its bank.
    pub(in crate::gpu) fn slot_offset(&self, slot: Slot) -> u32 {
        self.banks[slot.bank as usize].offset(slot) as u32
    }

    /// What kernels read of a bank.
    pub(in crate::gpu) fn bank_memory(&self, bank: u16) -> Result<Memory, Error> {
        let memory = self.banks.get(bank as usize).and_then(|bank| bank.memory.clone());
        memory.ok_or_else(|| stale("bank"))
    }

    /// Whether kernels can see so many words at once.
    pub(in crate::gpu) fn sees(&self, words: usize) -> bool {
        (words as u64).saturating_mul(4) <= self.max_binding.min(self.max_buffer)
    }

    /// At least `numbers` numbers that hold until the op is done. The second result is the number of a memory that is
    /// gone.
    pub(in crate::gpu) fn scratch(&mut self, numbers: u64) -> Result<(Memory, Option<u32>), Error> {
        if let Some((memory, len)) = &self.scratch
            && *len >= numbers
        {
            return Ok((memory.clone(), None));
        }
        let memory = self.allocate("scratch of an op", numbers * 4)?;
        let old = self.scratch.replace((memory.clone(), numbers));
        Ok((memory, old.map(|(old, _)| old.id)))
    }
}

/// Copies bytes to a place that is a multiple of 4; what is behind them up to the next such place is undefined.
pub(in crate::gpu) fn upload(queue: &wgpu::Queue, to: &wgpu::Buffer, at: u64, bytes: &[u8]) {
    let whole = bytes.len() & !3;
    queue.write_buffer(to, at, &bytes[..whole]);
    if whole < bytes.len() {
        let mut rest = [0; 4];
        rest[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
        queue.write_buffer(to, at + whole as u64, &rest);
    }
}

impl Holdings for Store {
    fn numbers(&self, buffer: Buffer) -> Result<usize, Error> {
        Ok(self.buffers.get(buffer.0 as usize).ok_or_else(|| stale("buffer"))?.1)
    }

    fn matrix_shape(&self, weight: Weight) -> Result<MatrixShape, Error> {
        Ok(self.get(weight)?.shape)
    }

    fn slot_bytes(&self, slot: Slot) -> Result<usize, Error> {
        let bank = self.bank_of(slot)?;
        if bank.is_out(slot) {
            return Err(Error::Device("a slot was used while it was being filled".into()));
        }
        if bank.memory.is_none() {
            return Err(Error::Device("a slot that this GPU does not see: copy it first".into()));
        }
        Ok(bank.bytes)
    }

    fn table(&self, table: SlotTable) -> Result<&[Slot], Error> {
        Ok(&self.table_of(table)?.slots)
    }

    fn state_shape(&self, state: State) -> Result<StateShape, Error> {
        self.states.shape(state)
    }
}

#[cfg(test)]
mod tests;
