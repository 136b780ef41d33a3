//! A buffer of the device.

use std::num::NonZeroU64;

/// Alignment in bytes of every suballocation.
pub(super) const ALIGN: u64 = 256;

/// Buffer of the card, or a range of one, and the id by which bind groups are cached.
#[derive(Clone, Debug)]
pub(crate) struct DeviceBuffer {
    pub(crate) id: u32,
    pub(crate) raw: wgpu::Buffer,
    /// Offset of the range in bytes, a multiple of [`ALIGN`].
    pub(crate) start: u64,
    /// Bytes of the range.
    pub(crate) size: u64,
}

impl DeviceBuffer {
    /// A buffer as a whole.
    pub(super) const fn whole(id: u32, raw: wgpu::Buffer, size: u64) -> Self {
        Self { id, raw, start: 0, size }
    }

    /// Binding of the range.
    pub(crate) fn binding(&self) -> wgpu::BindingResource<'_> {
        wgpu::BindingResource::Buffer(wgpu::BufferBinding {
            buffer: &self.raw,
            offset: self.start,
            size: NonZeroU64::new(self.size),
        })
    }
}

/// Rounds up to the alignment of suballocations.
pub(crate) fn align_up(bytes: u64) -> u64 {
    bytes.div_ceil(ALIGN) * ALIGN
}

/// Writes bytes at an offset that is a multiple of 4, before the next submission. Bytes up to the
/// next multiple of 4 become undefined.
pub(crate) fn write_padded(queue: &wgpu::Queue, dst: &wgpu::Buffer, offset: u64, bytes: &[u8]) {
    let whole = bytes.len() & !3;
    queue.write_buffer(dst, offset, &bytes[..whole]);
    if whole < bytes.len() {
        let mut rest = [0; 4];
        rest[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
        queue.write_buffer(dst, offset + whole as u64, &rest);
    }
}
