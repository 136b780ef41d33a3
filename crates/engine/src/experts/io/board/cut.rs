//! Cutting requests into pieces.

use super::Job;
use crate::experts::{
    io::{options::MAX_ALIGN, transfer::Piece},
    source::ExpertSource,
};

/// Up to where a job has been cut into pieces.
#[derive(Clone, Copy, Default)]
pub(super) struct Cursor {
    pub(super) segment: usize,
    pub(super) within: usize,
    /// Bytes of the slot.
    pub(super) at: usize,
}

/// The next piece of a job: what lies together in one file, up to about `most` bytes, cut where blocks begin.
pub(super) fn cut(job: &mut Job, source: &ExpertSource, most: usize) -> Option<Piece> {
    let experts = source.layer(job.request.layer)?;
    let Cursor { segment, within, at } = job.cursor;
    let mut segments = experts.segments(job.request.expert).skip(segment).peekable();
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
    let run = run.min(job.bytes - at);
    let blocks = MAX_ALIGN as u64;
    let even = offset + run.div_ceil(run.div_ceil(most).max(1)) as u64;
    let bytes = ((even.next_multiple_of(blocks) - offset) as usize).min(run);
    let at_end = at + bytes == job.bytes;
    let room = if at_end { job.request.bytes.len() - at } else { bytes };
    let piece = Piece {
        slot: job.request.slot,
        file: first.file as usize,
        offset,
        bytes,
        to: job.memory.plus(at),
        room,
    };
    let mut cursor = Cursor { segment, within: within + bytes, at: at + bytes };
    for next in experts.segments(job.request.expert).skip(segment) {
        if cursor.within < next.bytes {
            break;
        }
        cursor.within -= next.bytes;
        cursor.segment += 1;
    }
    job.cursor = cursor;
    Some(piece)
}
