//! Reads that hang: their jobs go on without them.

use std::{io, time::Instant};

use moeflux_compute::Bytes;

use super::{
    Board, Order,
    cut::{Cursor, cut},
};
use crate::experts::io::transfer::Address;

/// A read that is late gets this part of the deadline more. After a pause of the whole process (Ctrl-Z, a machine that
/// sleeps) every read under way is late, and those that have ended in the meantime need a moment to say so.
const SECOND_LOOK: u32 = 30;

/// Memory that nobody wants any more, but that reads may yet write to.
pub(super) struct OrphanedBuffer {
    pub(super) _memory: Bytes,
    pub(super) flights: usize,
}

impl Board {
    /// Finds reads that have run into their deadline and, when looked at once more, are still under way; the result is when to
    /// look again. Their jobs start anew on another copy, or fail. The memory that such a read may still write to stays with
    /// it, and the job gets other memory.
    pub(in crate::experts::io) fn expire(&mut self, now: Instant) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        for lane in 0..self.flights.len() {
            let Some(flight) = self.flights[lane].as_mut().filter(|f| !f.hung) else { continue };
            let deadline = self.limits.deadline;
            if flight.late.is_none() && flight.since + deadline <= now {
                flight.late = Some(now);
            }
            let due =
                flight.late.map_or(flight.since + deadline, |late| late + deadline / SECOND_LOOK);
            if due > now {
                next = Some(next.map_or(due, |next| next.min(due)));
                continue;
            }
            flight.hung = true;
            let (order, ahead, grave) = (flight.order, flight.ahead, flight.grave);
            self.sharing.hung(order.copy, true);
            self.sharing.failed(order.copy);
            self.down(ahead, now);
            if grave.is_none() {
                self.bury(order);
            }
        }
        // Nobody is left to read: what waits would wait for ever.
        if self.flights.iter().all(|f| f.as_ref().is_some_and(|f| f.hung)) {
            while let Some(slot) = self.now.pop_front().or_else(|| self.ahead.pop_front()) {
                let piece = self.jobs[slot]
                    .as_mut()
                    .and_then(|job| cut(job, &self.source, self.limits.piece));
                let order = piece.map(|piece| Order { piece, copy: 0, buffered: false });
                let error = order.map(|order| self.failure(&order, io::ErrorKind::TimedOut.into()));
                if let Some(job) = &mut self.jobs[slot] {
                    job.error = job.error.take().or(error);
                }
                self.settle(slot);
            }
        }
        next
    }

    /// Parts a job from the memory that a hung read may write to.
    fn bury(&mut self, hung: Order) {
        let slot = hung.piece.slot;
        self.now.retain(|s| *s != slot);
        self.ahead.retain(|s| *s != slot);
        let timed_out = self.failure(&hung, io::ErrorKind::TimedOut.into());
        let Some(job) = &mut self.jobs[slot] else { return };
        let bytes = job.request.bytes.len();
        let fresh = Bytes::zeroed(bytes).unwrap_or_default();
        let memory = std::mem::replace(&mut job.request.bytes, fresh);
        job.memory = Address::of(&mut job.request.bytes);
        job.avoid |= 1 << hung.copy;
        job.under_way = 0;
        let grave = self.graves.iter().position(Option::is_none).unwrap_or(self.graves.len());
        let mut flights = 0;
        for flight in self.flights.iter_mut().flatten() {
            if flight.grave.is_none() && flight.order.piece.slot == slot {
                flight.grave = Some(grave);
                flights += 1;
            }
        }
        self.graves.resize_with(self.graves.len().max(grave + 1), || None);
        self.graves[grave] = Some(OrphanedBuffer { _memory: memory, flights });
        let avoid = job.avoid | self.disk.lacking(hung.piece.file);
        if job.error.is_none()
            && job.request.bytes.len() == bytes
            && self.sharing.choose(bytes, avoid).is_some()
        {
            self.retries += 1;
            job.cursor = Cursor::default();
            let urgency = job.request.urgency;
            return self.queue(urgency).push_front(slot);
        }
        job.error = job.error.take().or(Some(timed_out));
        self.settle(slot);
    }

    /// One flight less may write to the memory of a grave.
    pub(super) fn visit(&mut self, grave: usize) {
        let place = &mut self.graves[grave];
        if let Some(grave) = place {
            grave.flights -= 1;
            if grave.flights == 0 {
                *place = None;
            }
        }
    }
}
