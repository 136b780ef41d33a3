//! Transfer of one read from a file to a slot, directly or through an aligned bounce buffer.
//!
//! A [`ReadRange`] points to memory that its request owns. The read queue creates all ranges: no
//! two reads in flight share a byte, and the memory, taken from its device and not touched
//! otherwise, lives until all of them have ended.

use std::{io, slice, sync::Arc};

use moeflux_base::Error;
use moeflux_compute::Bytes;

use crate::experts::source::ExpertSource;

/// Address in a request's memory or in a bounce buffer.
#[derive(Clone, Copy)]
pub(super) struct BufferPtr(*mut u8);

// SAFETY: an address is valid on every thread. Each dereference below states why it is exclusive.
unsafe impl Send for BufferPtr {}

impl BufferPtr {
    /// Start of a buffer. It stays valid when `bytes` is moved.
    pub(super) fn new(bytes: &mut Bytes) -> Self {
        Self(bytes.as_mut_ptr())
    }

    pub(super) fn add(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    fn is_multiple_of(self, align: usize) -> bool {
        self.0.addr().is_multiple_of(align)
    }
}

/// Alignment that direct reads of a file need, in bytes; powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Of file offsets and lengths.
    pub(super) file: usize,
    /// Of memory addresses.
    pub(super) memory: usize,
}

/// Finishing of an expert that has been read completely: digest, and memory's layout.
pub(super) struct FinishExpert {
    /// Names the request.
    pub(super) slot: usize,
    pub(super) layer: usize,
    pub(super) expert: usize,
    pub(super) memory: BufferPtr,
    /// Bytes of the request's memory.
    pub(super) bytes: usize,
    pub(super) source: Arc<ExpertSource>,
}

impl FinishExpert {
    /// # Errors
    /// The bytes differ from the packed ones.
    pub(super) fn run(&self) -> Result<(), Error> {
        // SAFETY: the read queue creates this when no read writes to the request's memory any
        // more, keeps the request until `end_finish`, and does not touch its memory until then.
        let slot = unsafe { slice::from_raw_parts_mut(self.memory.0, self.bytes) };
        self.source.finish(self.layer, self.expert, slot)
    }
}

/// Byte range of a file and its destination in a slot.
#[derive(Clone, Copy)]
pub(super) struct ReadRange {
    /// Names the request.
    pub(super) slot: usize,
    pub(super) file: usize,
    pub(super) offset: u64,
    pub(super) bytes: usize,
    pub(super) dst: BufferPtr,
    /// Bytes from `dst` on that no other range uses: at least `bytes`.
    pub(super) capacity: usize,
}

/// A read in progress.
pub(super) struct Transfer {
    range: ReadRange,
    /// File offset of the buffer's first byte.
    offset: u64,
    /// Bytes of the buffer before the range, for alignment.
    skip: usize,
    /// Bytes to request, a multiple of `align`.
    len: usize,
    align: usize,
    received: usize,
    buf: BufferPtr,
}

impl Transfer {
    /// Reads directly to the destination if the alignment allows that, else through `bounce`.
    pub(super) fn new(range: ReadRange, align: Option<Alignment>, bounce: &mut Bytes) -> Self {
        let plain = Self {
            offset: range.offset,
            skip: 0,
            len: range.bytes,
            align: 1,
            received: 0,
            buf: range.dst,
            range,
        };
        let Some(Alignment { file: align, memory }) = align else { return plain };
        let skip = (range.offset % align as u64) as usize;
        let len = (skip + range.bytes).next_multiple_of(align);
        let aligned = Self { offset: range.offset - skip as u64, skip, len, align, ..plain };
        if skip == 0 && len <= range.capacity && range.dst.is_multiple_of(memory) {
            return aligned;
        }
        match len <= bounce.len() {
            true => Self { buf: BufferPtr::new(bounce), ..aligned },
            false => plain,
        }
    }

    /// Whether offsets and lengths are aligned, so that the read can bypass the page cache.
    pub(super) fn is_aligned(&self) -> bool {
        self.align > 1
    }

    /// File offset and destination of the next read.
    pub(super) fn next(&mut self) -> (u64, &mut [u8]) {
        let dst = self.buf.add(self.received);
        // SAFETY: the bytes are in the bounce buffer, which only this transfer uses and which has
        // at least `len` bytes, or in the range's own part of a request's memory, which lives until
        // the read has ended.
        let buf = unsafe { slice::from_raw_parts_mut(dst.0, self.len - self.received) };
        (self.offset + self.received as u64, buf)
    }

    /// Counts the bytes of a read. Returns whether the range is complete.
    pub(super) fn advance(&mut self, bytes: usize) -> io::Result<bool> {
        let before = self.received;
        self.received += bytes.min(self.len - before);
        if self.received >= self.skip + self.range.bytes {
            return Ok(true);
        }
        // The next read has to start at a block boundary, too.
        self.received -= self.received % self.align;
        match self.received > before {
            true => Ok(false),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Copies a complete range from the bounce buffer, if it is there, to its destination.
    pub(super) fn finish(&self) {
        if self.buf.0 == self.range.dst.0 {
            return;
        }
        // SAFETY: the bounce buffer holds `skip + bytes` received bytes. The destination is the
        // range's own part of a request's memory, and no bounce buffer overlaps a slot.
        unsafe {
            let src = self.buf.add(self.skip).0.cast_const();
            src.copy_to_nonoverlapping(self.range.dst.0, self.range.bytes);
        }
    }
}
