//! One piece on its way from a file to a slot: where it lies, and how aligned blocks around it become it.
//!
//! A piece names memory that its job owns. The board makes all pieces: no two that are under way share a byte, and the
//! memory lives, moved out of its device and untouched, until all have landed.

use std::{io, slice, sync::Arc};

use moeflux_compute::Bytes;

use crate::{base::error::Error, experts::source::ExpertSource};

/// A place in a job's memory.
#[derive(Clone, Copy)]
pub(super) struct Address(*mut u8);

// SAFETY: a place in memory is as good on one thread as on another; what is done there is said below.
unsafe impl Send for Address {}

impl Address {
    /// The start of memory that stays where it is when `bytes` is moved.
    pub(super) fn of(bytes: &mut Bytes) -> Self {
        Self(bytes.as_mut_ptr())
    }

    pub(super) fn plus(self, bytes: usize) -> Self {
        Self(self.0.wrapping_add(bytes))
    }

    fn is_multiple_of(self, align: usize) -> bool {
        self.0.addr().is_multiple_of(align)
    }
}

/// What direct reads of a file ask for; all are powers of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Alignment {
    /// Of places in the file, and of lengths.
    pub(super) file: usize,
    /// Of memory.
    pub(super) memory: usize,
}

/// An expert whose pieces have all landed, to be compared with its digest.
pub(super) struct Check {
    /// The job.
    pub(super) slot: usize,
    pub(super) layer: usize,
    pub(super) expert: usize,
    pub(super) memory: Address,
    /// Bytes of the expert.
    pub(super) bytes: usize,
    pub(super) source: Arc<ExpertSource>,
}

impl Check {
    /// # Errors
    /// The bytes are others than those that were packed.
    pub(super) fn run(&self) -> Result<(), Error> {
        // SAFETY: the board gives one check for a job when nothing writes to its memory any more, and keeps both until the
        // check is over.
        let read = unsafe { slice::from_raw_parts(self.memory.0, self.bytes) };
        self.source.verify(self.layer, self.expert, read)
    }
}

/// A stretch of a file and where it goes.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// The job.
    pub(super) slot: usize,
    pub(super) file: usize,
    pub(super) offset: u64,
    /// Bytes that are wanted.
    pub(super) bytes: usize,
    pub(super) to: Address,
    /// Bytes from `to` on that belong to no other piece: at least `bytes`.
    pub(super) room: usize,
}

/// A piece that is being read.
pub(super) struct Transfer {
    piece: Piece,
    /// Where the buffer's first byte lies in the file.
    from: u64,
    /// Bytes of the buffer before the piece.
    skip: usize,
    /// Bytes to ask for, whole blocks of `align` in all.
    span: usize,
    align: usize,
    done: usize,
    into: Address,
}

impl Transfer {
    /// Reads straight to where the piece goes if the alignment allows, else by way of `bounce`.
    pub(super) fn new(piece: Piece, align: Option<Alignment>, bounce: &mut Bytes) -> Self {
        let plain = Self {
            from: piece.offset,
            skip: 0,
            span: piece.bytes,
            align: 1,
            done: 0,
            into: piece.to,
            piece,
        };
        let Some(Alignment { file: align, memory }) = align else { return plain };
        let skip = (piece.offset % align as u64) as usize;
        let span = (skip + piece.bytes).next_multiple_of(align);
        let aligned = Self { from: piece.offset - skip as u64, skip, span, align, ..plain };
        if skip == 0 && span <= piece.room && piece.to.is_multiple_of(memory) {
            return aligned;
        }
        match span <= bounce.len() {
            true => Self { into: Address::of(bounce), ..aligned },
            false => plain,
        }
    }

    /// Whether the bytes pass the page cache by: places and lengths are aligned.
    pub(super) fn is_aligned(&self) -> bool {
        self.align > 1
    }

    /// Where to read next, and into what.
    pub(super) fn next(&mut self) -> (u64, &mut [u8]) {
        let at = self.into.plus(self.done);
        // SAFETY: the place is in the bounce buffer, which only this transfer uses and which `span` fits in, or in the
        // piece's own room in memory that lives until it lands.
        let buf = unsafe { slice::from_raw_parts_mut(at.0, self.span - self.done) };
        (self.from + self.done as u64, buf)
    }

    /// Takes note of what a read gave; whether all is there.
    pub(super) fn got(&mut self, bytes: usize) -> io::Result<bool> {
        let before = self.done;
        self.done += bytes.min(self.span - before);
        if self.done >= self.skip + self.piece.bytes {
            return Ok(true);
        }
        // A read that goes on begins at a block, too.
        self.done -= self.done % self.align;
        match self.done > before {
            true => Ok(false),
            false => Err(io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// All is read: puts it where it goes.
    pub(super) fn finish(&self) {
        if self.into.0 == self.piece.to.0 {
            return;
        }
        // SAFETY: the bytes were read into the bounce buffer, which is as long; they go to the piece's own room, and a
        // buffer of a lane is no part of a slot.
        unsafe {
            let from = self.into.plus(self.skip).0.cast_const();
            from.copy_to_nonoverlapping(self.piece.to.0, self.piece.bytes);
        }
    }
}
