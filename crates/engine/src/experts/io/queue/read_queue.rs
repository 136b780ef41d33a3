//! Queue of reads with their urgency and limits.

use std::{
    collections::VecDeque,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use moeflux_base::Error;

use super::{
    super::{
        load_balance::{CopyMask, LoadBalancer},
        options::PageCache,
        reader::{Completion, ReadRequest, Urgency},
        storage::Storage,
        transfer::{BufferPtr, FinishExpert, ReadRange},
    },
    read_source::{ReadSource, RecordBytes},
    split::SplitCursor,
    timeout::OrphanedBuffer,
};
use crate::experts::stats::{MAX_COPIES, ReadCounters};

/// Retries per read without mirrors; with mirrors, one per copy.
const RETRIES: u32 = 2;

/// At most 1 in this many reads in flight is a prefetch, so demand reads find most of the queue
/// depth free.
const PREFETCH_SHARE: usize = 4;

/// One read, as a worker executes it.
#[derive(Clone, Copy)]
pub(in crate::experts::io) struct ReadOp {
    pub(in crate::experts::io) range: ReadRange,
    pub(in crate::experts::io) copy: usize,
    /// Reads through the page cache even where reads are direct: for repeated reads, and as the
    /// last retry.
    pub(in crate::experts::io) buffered: bool,
}

/// A request in progress.
pub(super) struct PendingRequest {
    pub(super) request: ReadRequest,
    pub(super) memory: BufferPtr,
    pub(super) cursor: SplitCursor,
    /// Bytes of the expert in the file.
    pub(super) bytes: usize,
    /// Whether the page cache should hold the expert.
    buffered: bool,
    /// Reads in flight, and a running [`FinishExpert`].
    pub(super) in_flight: usize,
    pub(super) error: Option<Error>,
    /// Copies on which a read hung or whose bytes differed from the digest.
    pub(super) avoid: CopyMask,
    /// First copy to read the expert from alone if its digest differs again.
    next_copy: usize,
}

impl PendingRequest {
    /// Whether all bytes have been read.
    fn is_read(&self) -> bool {
        self.in_flight == 0 && self.cursor.slot_offset == self.bytes && self.error.is_none()
    }
}

/// The worker's next action after a read has ended.
pub(in crate::experts::io) enum ReadOutcome {
    /// Take the next read.
    Done,
    /// Execute this retry.
    Retry(ReadOp),
    /// Run this, then call [`ReadQueue::end_finish`].
    Finish(FinishExpert),
}

pub(super) struct InFlightRead {
    pub(super) op: ReadOp,
    /// Index of the orphaned buffer that it writes to; `None` while its request owns the memory.
    pub(super) orphan: Option<usize>,
    pub(super) since: Instant,
    /// When the timeout was first noticed.
    pub(super) late: Option<Instant>,
    pub(super) is_prefetch: bool,
    pub(super) hung: bool,
    tries: u32,
    /// Copies on which it failed.
    failed: CopyMask,
}

/// Limits of a read queue.
#[derive(Clone, Copy)]
pub(in crate::experts::io) struct QueueLimits {
    /// Slots of the cache, each with at most one request.
    pub(in crate::experts::io) slots: usize,
    pub(in crate::experts::io) io_slots: usize,
    /// Reads in flight, at most `io_slots`.
    pub(in crate::experts::io) depth: usize,
    pub(in crate::experts::io) pages: PageCache,
    /// Maximum bytes of one read.
    pub(in crate::experts::io) read_bytes: usize,
    pub(in crate::experts::io) timeout: Duration,
}

pub(in crate::experts::io) struct ReadQueue {
    pub(super) source: ReadSource,
    pub(super) storage: Arc<dyn Storage>,
    pub(super) limits: QueueLimits,
    /// By slot.
    pub(super) requests: Vec<Option<PendingRequest>>,
    /// Slots whose requests are not completely split into reads, by urgency.
    pub(super) demand: VecDeque<usize>,
    pub(super) prefetch: VecDeque<usize>,
    completions: VecDeque<Completion>,
    /// By I/O slot.
    pub(super) in_flight: Vec<Option<InFlightRead>>,
    pub(super) orphans: Vec<Option<OrphanedBuffer>>,
    pub(super) balancer: LoadBalancer,
    /// By layer and expert: whether the expert was read before.
    read_before: Vec<Vec<bool>>,
    /// Reads in flight that do not hang, and the prefetches among them.
    active: usize,
    active_prefetches: usize,
    busy_since: Instant,
    busy: Duration,
    pub(super) retries: u64,
    /// Experts being finished.
    finishing: usize,
    /// Workers stop after their current read.
    pub(in crate::experts::io) stop: bool,
}

/// Bytes that the queue keeps per slot.
pub(crate) const QUEUE_SLOT_BYTES: usize =
    size_of::<Option<PendingRequest>>() + size_of::<Completion>() + 2 * size_of::<usize>();

impl ReadQueue {
    pub(in crate::experts::io) fn new(
        source: ReadSource,
        storage: Arc<dyn Storage>,
        limits: QueueLimits,
    ) -> Self {
        let QueueLimits { slots, io_slots, .. } = limits;
        Self {
            balancer: LoadBalancer::new(storage.copies()),
            read_before: source.never_read(),
            source,
            storage,
            limits,
            requests: (0..slots).map(|_| None).collect(),
            demand: VecDeque::with_capacity(slots),
            prefetch: VecDeque::with_capacity(slots),
            completions: VecDeque::with_capacity(slots),
            in_flight: (0..io_slots).map(|_| None).collect(),
            orphans: Vec::new(),
            active: 0,
            active_prefetches: 0,
            busy_since: Instant::now(),
            busy: Duration::ZERO,
            retries: 0,
            finishing: 0,
            stop: false,
        }
    }

    /// Queues a request.
    pub(in crate::experts::io) fn start(&mut self, mut request: ReadRequest) {
        let ReadRequest { layer, expert, slot, urgency, .. } = request;
        let record = self.source.record(layer, expert);
        let record = record.filter(|record| record.in_memory <= request.bytes.len());
        let entry = self.requests.get_mut(slot).filter(|entry| entry.is_none());
        let (Some(record), Some(entry)) = (record, entry) else {
            let result = Err(Error::internal(format!(
                "expert {expert} of layer {layer} cannot be read to slot {slot}; please report this"
            )));
            return self.completions.push_back(Completion { request, result });
        };
        let memory = BufferPtr::new(&mut request.bytes);
        let RecordBytes { in_file: bytes, .. } = record;
        let cursor = SplitCursor::default();
        let of_layer =
            self.read_before.get_mut(layer).and_then(|of_layer| of_layer.get_mut(expert));
        let repeated = of_layer.is_some_and(|was_read| std::mem::replace(was_read, true));
        let buffered = repeated && self.limits.pages == PageCache::ReadAgain;
        *entry = Some(PendingRequest {
            request,
            memory,
            cursor,
            bytes,
            buffered,
            in_flight: 0,
            error: None,
            avoid: 0,
            next_copy: 0,
        });
        match bytes {
            0 => self.complete_if_done(slot),
            _ => self.queue(urgency).push_back(slot),
        }
    }

    /// Treats all experts as never read.
    pub(in crate::experts::io) fn forget_reads(&mut self) {
        self.read_before.iter_mut().for_each(|layer| layer.fill(false));
    }

    pub(super) fn queue(&mut self, urgency: Urgency) -> &mut VecDeque<usize> {
        match urgency {
            Urgency::Demand => &mut self.demand,
            Urgency::Prefetch => &mut self.prefetch,
        }
    }

    /// Turns a prefetch into a demand read.
    pub(in crate::experts::io) fn promote(&mut self, slot: usize) {
        if let Some(pending) = self.requests.get_mut(slot).and_then(Option::as_mut) {
            pending.request.urgency = Urgency::Demand;
        }
        if let Some(i) = self.prefetch.iter().position(|s| *s == slot) {
            self.prefetch.remove(i);
            self.demand.push_back(slot);
        }
    }

    /// Cancels prefetches. Requests with reads in flight complete when those have ended.
    pub(in crate::experts::io) fn cancel_prefetches(&mut self) {
        while let Some(slot) = self.prefetch.pop_front() {
            if let Some(pending) = &mut self.requests[slot] {
                pending.error = pending.error.take().or(Some(Error::Cancelled));
                pending.cursor.slot_offset = pending.bytes;
            }
            self.complete_if_done(slot);
        }
    }

    /// Whether a read is queued and the depth is not exhausted.
    pub(in crate::experts::io) fn has_work(&self) -> bool {
        self.active < self.limits.depth && self.front().is_some()
    }

    /// Slot of the next request to read, and whether it is a prefetch.
    fn front(&self) -> Option<(usize, bool)> {
        let max_prefetches = (self.limits.depth / PREFETCH_SHARE).max(1);
        let prefetch = || self.prefetch.front().filter(|_| self.active_prefetches < max_prefetches);
        let demand = self.demand.front().map(|slot| (*slot, false));
        demand.or_else(|| prefetch().map(|slot| (*slot, true)))
    }

    /// Takes the next read for a free I/O slot.
    pub(in crate::experts::io) fn next_op(
        &mut self,
        io_slot: usize,
        now: Instant,
    ) -> Option<ReadOp> {
        if self.active >= self.limits.depth || self.in_flight[io_slot].is_some() {
            return None;
        }
        let (slot, is_prefetch) = self.front()?;
        let pending = self.requests[slot].as_mut()?;
        let range = self.source.split(pending, self.limits.read_bytes)?;
        pending.in_flight += 1;
        let lacking = self.storage.lacking(range.file);
        let avoid = pending.avoid | lacking;
        if pending.cursor.slot_offset == pending.bytes {
            let queue = if is_prefetch { &mut self.prefetch } else { &mut self.demand };
            queue.pop_front();
        }
        let pick = |avoid| self.balancer.pick(range.bytes, avoid);
        let copy = pick(avoid).or_else(|| pick(lacking)).unwrap_or(0);
        let op = ReadOp { range, copy, buffered: pending.buffered };
        self.in_flight[io_slot] = Some(InFlightRead {
            op,
            orphan: None,
            since: now,
            late: None,
            is_prefetch,
            hung: false,
            tries: 0,
            failed: avoid,
        });
        self.balancer.start(copy, range.bytes, now);
        self.count_start(is_prefetch, now);
        Some(op)
    }

    /// Records the end of a read, with the bytes that it received. Returns the worker's next
    /// action.
    pub(in crate::experts::io) fn finish_op(
        &mut self,
        io_slot: usize,
        received: u64,
        result: io::Result<()>,
        now: Instant,
    ) -> ReadOutcome {
        let Some(mut read) = self.in_flight[io_slot].take() else { return ReadOutcome::Done };
        let ReadOp { range, copy, .. } = read.op;
        self.balancer.end(copy, range.bytes, received, now);
        if read.hung {
            self.balancer.hung(copy, false);
        } else {
            self.count_end(read.is_prefetch, now);
        }
        if let Some(i) = read.orphan {
            self.release_orphan(i);
            return ReadOutcome::Done;
        }
        let error = match result {
            Ok(()) => None,
            Err(error) => {
                self.balancer.failed(copy);
                if let Some(op) = self.retry(&mut read, &error) {
                    self.retries += 1;
                    self.count_start(read.is_prefetch, now);
                    self.balancer.start(op.copy, range.bytes, now);
                    self.in_flight[io_slot] =
                        Some(InFlightRead { op, since: now, late: None, ..read });
                    return ReadOutcome::Retry(op);
                }
                Some(self.failure(&read.op, error))
            }
        };
        if let Some(pending) = &mut self.requests[range.slot] {
            pending.in_flight -= 1;
            if error.is_some() {
                // The request fails, so the rest of it is not read.
                pending.cursor.slot_offset = pending.bytes;
                pending.error = pending.error.take().or(error);
                let urgency = pending.request.urgency;
                self.queue(urgency).retain(|slot| *slot != range.slot);
            }
        }
        if let Some(finish) = self.start_finish(range.slot) {
            return ReadOutcome::Finish(finish);
        }
        self.complete_if_done(range.slot);
        ReadOutcome::Done
    }

    /// Finishing of a request that has been read, if its layer needs it.
    fn start_finish(&mut self, slot: usize) -> Option<FinishExpert> {
        let pending = self.requests[slot].as_mut()?;
        let ReadRequest { layer, expert, .. } = pending.request;
        let source = Arc::clone(self.source.needs_finish(layer)?);
        if !pending.is_read() {
            return None;
        }
        pending.in_flight += 1;
        self.finishing += 1;
        let (memory, bytes) = (pending.memory, pending.request.bytes.len());
        Some(FinishExpert { slot, layer, expert, memory, bytes, source })
    }

    /// Records the result of [`FinishExpert`]. An expert whose bytes differ from its digest is read
    /// again, from one copy after the other.
    pub(in crate::experts::io) fn end_finish(
        &mut self,
        finish: &FinishExpert,
        result: Result<(), Error>,
    ) {
        self.finishing -= 1;
        let Some(pending) = &mut self.requests[finish.slot] else { return };
        pending.in_flight -= 1;
        if let Err(error) = result {
            // An expert with a digest is stored in one file.
            let file = finish
                .source
                .layer(finish.layer)
                .and_then(|l| Some(l.segments(finish.expert).next()?.file));
            let lacking = file.map_or(0, |file| self.storage.lacking(file as usize));
            let mut copies = pending.next_copy..self.storage.copies();
            let next = copies.find(|copy| lacking & 1 << copy == 0);
            if let (Some(copy), None) = (next, &pending.error) {
                pending.avoid = !(1 << copy);
                pending.next_copy = copy + 1;
                pending.cursor = SplitCursor::default();
                self.retries += 1;
                let urgency = pending.request.urgency;
                return self.queue(urgency).push_front(finish.slot);
            }
            pending.error = pending.error.take().or(Some(error));
        }
        self.complete_if_done(finish.slot);
    }

    /// The retry of a failed read, if there is one left: on a copy where it has not failed, else
    /// through the page cache, unless the file has ended.
    fn retry(&self, read: &mut InFlightRead, error: &io::Error) -> Option<ReadOp> {
        let ReadOp { range, copy, buffered } = read.op;
        read.failed |= 1 << copy;
        if read.tries >= RETRIES.max(self.storage.copies() as u32) {
            return None;
        }
        read.tries += 1;
        if let Some(copy) = self.balancer.pick(range.bytes, read.failed) {
            return Some(ReadOp { range, copy, buffered });
        }
        let may_pass = error.kind() != io::ErrorKind::UnexpectedEof && read.tries <= RETRIES;
        may_pass.then_some(ReadOp { range, copy, buffered: true })
    }

    fn count_start(&mut self, is_prefetch: bool, now: Instant) {
        if self.active == 0 {
            self.busy_since = now;
        }
        self.active += 1;
        self.active_prefetches += usize::from(is_prefetch);
    }

    pub(super) fn count_end(&mut self, is_prefetch: bool, now: Instant) {
        self.active -= 1;
        self.active_prefetches -= usize::from(is_prefetch);
        if self.active == 0 {
            self.busy += now.saturating_duration_since(self.busy_since);
        }
    }

    /// Completes a request that has been read, or that has failed and has no read in flight.
    pub(super) fn complete_if_done(&mut self, slot: usize) {
        let is_done = |pending: &PendingRequest| {
            pending.is_read() || pending.in_flight == 0 && pending.error.is_some()
        };
        if let Some(PendingRequest { request, error, .. }) =
            self.requests[slot].take_if(|pending| is_done(pending))
        {
            self.completions.push_back(Completion { request, result: error.map_or(Ok(()), Err) });
        }
    }

    pub(in crate::experts::io) fn timeout(&self) -> Duration {
        self.limits.timeout
    }

    pub(in crate::experts::io) fn next_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    pub(in crate::experts::io) fn has_completions(&self) -> bool {
        !self.completions.is_empty()
    }

    /// Whether no request is left that could complete.
    pub(in crate::experts::io) fn is_idle(&self) -> bool {
        self.active + self.finishing == 0 && self.demand.is_empty() && self.prefetch.is_empty()
    }

    pub(in crate::experts::io) fn counters(&self, now: Instant) -> ReadCounters {
        let running = if self.active > 0 {
            now.saturating_duration_since(self.busy_since)
        } else {
            Duration::ZERO
        };
        let mut counters = ReadCounters {
            busy_ns: (self.busy + running).as_nanos() as u64,
            retries: self.retries,
            bytes: 0,
            by_copy: [0; MAX_COPIES],
        };
        self.balancer.count(&mut counters);
        counters
    }
}
