//! Activation arena: all buffers of f32 activations in one buffer of the card.
//!
//! Every kernel sees all activations through one binding, whichever buffers an op reads and writes.

use moeflux_ops::{
    Buffer, Error, View,
    seam::{GRIDS, HandleTable, stale},
};

use super::{
    super::card::STORAGE,
    buffer::{DeviceBuffer, align_up, write_padded},
    store::Store,
};

/// Initial length of the arena in f32 values.
const INITIAL_LEN: u64 = 1 << 18;

/// Handle of the buffer for intermediate results inside an op.
pub(crate) const OP_BUFFER: Buffer = Buffer::INTERNAL;

/// Suballocation of the arena, in f32 values.
#[derive(Clone, Copy, Debug, Default)]
struct ArenaRegion {
    first: u64,
    len: usize,
}

/// One buffer of the card with all activations. Lengths are in f32 values.
pub(super) struct ActivationArena {
    buffer: DeviceBuffer,
    len: u64,
    used: u64,
    /// By [`Buffer`].
    regions: Vec<ArenaRegion>,
    /// Region of [`OP_BUFFER`].
    op_region: ArenaRegion,
}

impl ActivationArena {
    /// The codebooks of block types are its first words, as every kernel sees them there.
    pub(super) fn new(device: &wgpu::Device, queue: &wgpu::Queue, id: u32) -> Self {
        let raw = device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("activations"),
            size: INITIAL_LEN * 4,
            usage: STORAGE,
            mapped_at_creation: false,
        });
        write_padded(queue, &raw, 0, GRIDS);
        Self {
            buffer: DeviceBuffer::whole(id, raw, INITIAL_LEN * 4),
            len: INITIAL_LEN,
            used: align_up(GRIDS.len() as u64) / 4,
            regions: Vec::new(),
            op_region: ArenaRegion::default(),
        }
    }
}

impl Store {
    /// The buffer with all activations.
    pub(crate) const fn activations(&self) -> &DeviceBuffer {
        &self.activations.buffer
    }

    /// Allocates a zeroed buffer of `len` f32 values. Also returns the id of the arena that it
    /// replaced, whose bind groups are stale.
    pub(crate) fn buffer(&mut self, len: usize) -> Result<(Buffer, Option<u32>), Error> {
        let (region, replaced) = self.allocate_region(len)?;
        self.activations.regions.push(region);
        Ok((Buffer(self.id.handle(self.activations.regions.len() - 1)), replaced))
    }

    /// Length of [`OP_BUFFER`] in f32 values.
    pub(crate) const fn op_buffer_len(&self) -> usize {
        self.activations.op_region.len
    }

    /// Reallocates [`OP_BUFFER`] with at least `len` f32 values. Returns the id of the arena that
    /// it replaced, whose bind groups are stale.
    pub(crate) fn grow_op_buffer(&mut self, len: usize) -> Result<Option<u32>, Error> {
        // At least doubled, as the old region is not reused.
        let len = len.max(self.activations.op_region.len * 2);
        let (region, replaced) = self.allocate_region(len)?;
        self.activations.op_region = region;
        Ok(replaced)
    }

    /// Allocates a region, in a larger copy of the arena if needed. Also returns the id of a
    /// replaced arena.
    fn allocate_region(&mut self, len: usize) -> Result<(ArenaRegion, Option<u32>), Error> {
        let first = self.activations.used;
        let end = (len as u64).checked_mul(4).map(|bytes| first + align_up(bytes) / 4);
        let end =
            end.ok_or_else(|| Error::Shape(format!("a buffer of {len} values is too large")))?;
        let mut replaced = None;
        if end > self.activations.len {
            let max = self.max_bytes / 4;
            if end > max {
                return Err(Error::Shape(format!(
                    "activations of {} bytes, where this GPU's kernels bind at most {}: lower --chunk",
                    end * 4,
                    max * 4
                )));
            }
            let larger = (self.activations.len * 2).max(end).min(max);
            let new = self.allocate("activations", larger * 4)?;
            let mut encoder = self.device.create_command_encoder(&Default::default());
            let old_bytes = self.activations.len * 4;
            let old = &self.activations.buffer.raw;
            encoder.copy_buffer_to_buffer(old, 0, &new.raw, 0, old_bytes);
            self.queue.submit([encoder.finish()]);
            replaced = Some(std::mem::replace(&mut self.activations.buffer, new).id);
            self.activations.len = larger;
        }
        self.activations.used = end;
        Ok((ArenaRegion { first, len }, replaced))
    }

    /// Offset of a view in the activations, in f32 values. The check of the op has seen that the
    /// view is inside its buffer.
    pub(crate) fn view_offset(&self, view: &View) -> Result<u32, Error> {
        Ok(self.buffer_offset(view.buffer)? + view.offset as u32)
    }

    /// Offset in the activations, in bytes, of `len` values that fill a view without gaps.
    pub(crate) fn dense_offset(&self, view: &View, len: usize) -> Result<u64, Error> {
        view.check_dense(len)?;
        let buffer = self.buffer_len(view.buffer)?;
        if !view.is_within(buffer) {
            return Err(Error::Shape(format!("{view:?} of a buffer of {buffer} values")));
        }
        Ok(u64::from(self.view_offset(view)?) * 4)
    }

    /// Offset of a buffer in the activations, in f32 values.
    pub(crate) fn buffer_offset(&self, buffer: Buffer) -> Result<u32, Error> {
        if buffer == OP_BUFFER {
            return Ok(self.activations.op_region.first as u32);
        }
        Ok(self.region(buffer)?.first as u32)
    }

    fn region(&self, buffer: Buffer) -> Result<&ArenaRegion, Error> {
        let index = buffer.0.index_on(self.id, "buffer")?;
        self.activations.regions.get(index).ok_or_else(|| stale("buffer"))
    }

    /// Length of a buffer in f32 values.
    pub(super) fn region_len(&self, buffer: Buffer) -> Result<usize, Error> {
        Ok(self.region(buffer)?.len)
    }

    /// Offset of an optional buffer; 0 for `None`.
    pub(crate) fn optional_offset(&self, buffer: Option<Buffer>) -> Result<u32, Error> {
        buffer.map_or(Ok(0), |buffer| self.buffer_offset(buffer))
    }
}
