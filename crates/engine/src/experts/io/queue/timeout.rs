//! Timeouts: a read that hangs is abandoned, and its request continues without it.

use std::{io, time::Instant};

use moeflux_compute::Bytes;

use super::{
    read_queue::{ReadOp, ReadQueue},
    split::SplitCursor,
};
use crate::experts::io::transfer::BufferPtr;

/// Divisor of the timeout that gives a late read its grace period. After the whole process was
/// paused (Ctrl-Z, system sleep) every read in flight is late, and reads that have ended need a
/// moment to be reported.
const GRACE_DIVISOR: u32 = 30;

/// Memory that no request uses any more, but that hung reads may still write to.
pub(super) struct OrphanedBuffer {
    pub(super) _memory: Bytes,
    /// Reads in flight that write to it.
    pub(super) reads: usize,
}

impl ReadQueue {
    /// Abandons reads that exceeded the timeout and the grace period after it. Returns when to
    /// check again.
    ///
    /// Requests of such reads restart on another copy or fail. The memory that a hung read may
    /// still write to stays with the read, and the request gets a new buffer.
    pub(in crate::experts::io) fn expire(&mut self, now: Instant) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        for io_slot in 0..self.in_flight.len() {
            let Some(read) = self.in_flight[io_slot].as_mut().filter(|read| !read.hung) else {
                continue;
            };
            let timeout = self.limits.timeout;
            if read.late.is_none() && read.since + timeout <= now {
                read.late = Some(now);
            }
            let due = read.late.map_or(read.since + timeout, |late| late + timeout / GRACE_DIVISOR);
            if due > now {
                next = Some(next.map_or(due, |next| next.min(due)));
                continue;
            }
            read.hung = true;
            let (op, is_prefetch, orphan) = (read.op, read.is_prefetch, read.orphan);
            self.balancer.hung(op.copy, true);
            self.balancer.failed(op.copy);
            self.count_end(is_prefetch, now);
            if orphan.is_none() {
                self.orphan(op);
            }
        }
        // All I/O slots hang: queued requests would wait forever, so they fail.
        if self.in_flight.iter().all(|read| read.as_ref().is_some_and(|read| read.hung)) {
            while let Some(slot) = self.demand.pop_front().or_else(|| self.prefetch.pop_front()) {
                let range = self.requests[slot]
                    .as_mut()
                    .and_then(|pending| self.source.split(pending, self.limits.read_bytes));
                let op = range.map(|range| ReadOp { range, copy: 0, buffered: false });
                let error = op.map(|op| self.failure(&op, io::ErrorKind::TimedOut.into()));
                if let Some(pending) = &mut self.requests[slot] {
                    pending.error = pending.error.take().or(error);
                }
                self.complete_if_done(slot);
            }
        }
        next
    }

    /// Separates a request from the buffer that a hung read may still write to.
    fn orphan(&mut self, hung: ReadOp) {
        let slot = hung.range.slot;
        self.demand.retain(|s| *s != slot);
        self.prefetch.retain(|s| *s != slot);
        let timed_out = self.failure(&hung, io::ErrorKind::TimedOut.into());
        let Some(pending) = &mut self.requests[slot] else { return };
        let bytes = pending.request.bytes.len();
        let fresh = Bytes::zeroed(bytes).unwrap_or_default();
        let memory = std::mem::replace(&mut pending.request.bytes, fresh);
        pending.memory = BufferPtr::new(&mut pending.request.bytes);
        pending.avoid |= 1 << hung.copy;
        pending.in_flight = 0;
        let orphan = self.orphans.iter().position(Option::is_none).unwrap_or(self.orphans.len());
        let mut reads = 0;
        for read in self.in_flight.iter_mut().flatten() {
            if read.orphan.is_none() && read.op.range.slot == slot {
                read.orphan = Some(orphan);
                reads += 1;
            }
        }
        self.orphans.resize_with(self.orphans.len().max(orphan + 1), || None);
        self.orphans[orphan] = Some(OrphanedBuffer { _memory: memory, reads });
        let avoid = pending.avoid | self.storage.lacking(hung.range.file);
        if pending.error.is_none()
            && pending.request.bytes.len() == bytes
            && self.balancer.pick(bytes, avoid).is_some()
        {
            self.retries += 1;
            pending.cursor = SplitCursor::default();
            let urgency = pending.request.urgency;
            return self.queue(urgency).push_front(slot);
        }
        pending.error = pending.error.take().or(Some(timed_out));
        self.complete_if_done(slot);
    }

    /// Counts the end of a read that wrote to an orphaned buffer, and frees the buffer after the
    /// last one.
    pub(super) fn release_orphan(&mut self, orphan: usize) {
        let entry = &mut self.orphans[orphan];
        if let Some(orphan) = entry {
            orphan.reads -= 1;
            if orphan.reads == 0 {
                *entry = None;
            }
        }
    }
}
