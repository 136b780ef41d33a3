//! Splitting of a request into reads.

use moeflux_model::checkpoint::Segment;

use super::read_queue::PendingRequest;
use crate::experts::io::{options::MAX_ALIGN, transfer::ReadRange};

/// Position up to which a request has been split into reads.
#[derive(Clone, Copy, Default)]
pub(super) struct SplitCursor {
    pub(super) segment: usize,
    /// Offset in the segment.
    pub(super) within: usize,
    /// Offset in the slot.
    pub(super) slot_offset: usize,
}

/// Splits the next read off a request of these segments: contiguous bytes of one file, about
/// `max_bytes` at most, ending at a block boundary.
pub(super) fn split(
    pending: &mut PendingRequest,
    all: impl Iterator<Item = Segment> + Clone,
    max_bytes: usize,
) -> Option<ReadRange> {
    let SplitCursor { segment, within, slot_offset } = pending.cursor;
    let mut segments = all.clone().skip(segment).peekable();
    let first = *segments.peek()?;
    let (offset, mut run) = (first.offset + within as u64, 0);
    let mut skip = within;
    for next in segments {
        if next.file != first.file || next.offset + skip as u64 != offset + run as u64 {
            break;
        }
        run += next.bytes - skip;
        skip = 0;
    }
    let run = run.min(pending.bytes - slot_offset);
    let block = MAX_ALIGN as u64;
    let even = offset + run.div_ceil(run.div_ceil(max_bytes).max(1)) as u64;
    let bytes = ((even.next_multiple_of(block) - offset) as usize).min(run);
    let is_last = slot_offset + bytes == pending.bytes;
    let capacity = if is_last { pending.request.bytes.len() - slot_offset } else { bytes };
    let range = ReadRange {
        slot: pending.request.slot,
        file: first.file as usize,
        offset,
        bytes,
        dst: pending.memory.add(slot_offset),
        capacity,
    };
    let mut cursor =
        SplitCursor { segment, within: within + bytes, slot_offset: slot_offset + bytes };
    for next in all.skip(segment) {
        if cursor.within < next.bytes {
            break;
        }
        cursor.within -= next.bytes;
        cursor.segment += 1;
    }
    pending.cursor = cursor;
    Some(range)
}
