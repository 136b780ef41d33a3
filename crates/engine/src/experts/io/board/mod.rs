//! Which piece is read next, and what becomes of those that fail or hang: the part of a reader that all backends share.
//!
//! A request is a job, and its slot names it. A job is cut into pieces as lanes ask for work; a lane is a place for one read
//! under way: a thread, or an entry of a ring. A job is done when its last piece has landed.

mod cut;
mod deadline;
mod failure;

use std::{
    collections::VecDeque,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use self::{
    cut::{Cursor, cut},
    deadline::OrphanedBuffer,
};
use super::{
    Completion, ReadRequest, Urgency,
    disk::Disk,
    options::PageCache,
    sharing::{Copies, Sharing},
    transfer::{Address, Check, Piece},
};
use crate::{
    base::{
        error::Error,
        stats::{MAX_COPIES, ReadCounters},
    },
    experts::source::ExpertSource,
};

/// A piece that fails is tried so often again, or once on every other copy.
const RETRIES: u32 = 2;

/// Of the reads under way, one in so many may be one ahead: what is wanted now then waits for little, and finds the disk
/// with most of its depth free.
const AHEAD_SHARE: usize = 4;

/// What a lane is to read.
#[derive(Clone, Copy)]
pub(super) struct Order {
    pub(super) piece: Piece,
    pub(super) copy: usize,
    /// Through the page cache even where reads are direct: what is read again, and the last resort.
    pub(super) buffered: bool,
}

struct Job {
    request: ReadRequest,
    memory: Address,
    cursor: Cursor,
    /// Bytes of the expert.
    bytes: usize,
    /// Whether the page cache is to hold it.
    buffered: bool,
    under_way: usize,
    error: Option<Error>,
    /// Copies on which it hung, or which differed.
    avoid: Copies,
    /// The first copy that it is read from by itself when it differs from its digest once more.
    checked: usize,
}

impl Job {
    /// Whether all of it has been read.
    fn has_come(&self) -> bool {
        self.under_way == 0 && self.cursor.at == self.bytes && self.error.is_none()
    }
}

/// What a lane does next.
pub(super) enum ReadOutcome {
    /// Ask for more.
    Done,
    /// Read the piece again.
    Again(Order),
    /// Compare what has come, and tell [`Board::checked`].
    Check(Check),
}

struct InFlightRead {
    order: Order,
    /// Where the memory is: with its job, or in this grave.
    grave: Option<usize>,
    since: Instant,
    /// When it was first seen to have run into its deadline.
    late: Option<Instant>,
    ahead: bool,
    hung: bool,
    tries: u32,
    /// Copies on which it failed.
    failed: Copies,
}

/// How much may be under way, and how long.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) slots: usize,
    pub(super) lanes: usize,
    /// Reads under way at once, at most as many as lanes.
    pub(super) depth: usize,
    pub(super) pages: PageCache,
    pub(super) piece: usize,
    pub(super) deadline: Duration,
}

pub(super) struct Board {
    source: Arc<ExpertSource>,
    disk: Arc<dyn Disk>,
    limits: Limits,
    /// By slot.
    jobs: Vec<Option<Job>>,
    /// Jobs that are not all cut into pieces, by urgency.
    now: VecDeque<usize>,
    ahead: VecDeque<usize>,
    completions: VecDeque<Completion>,
    /// By lane.
    flights: Vec<Option<InFlightRead>>,
    graves: Vec<Option<OrphanedBuffer>>,
    sharing: Sharing,
    /// By layer and expert: whether it has been read before.
    met: Vec<Vec<bool>>,
    /// Flights that do not hang, and those of them that are ahead.
    flying: usize,
    flying_ahead: usize,
    busy_since: Instant,
    busy: Duration,
    retries: u64,
    /// Experts that are being compared with their digests.
    checking: usize,
    /// Lanes end when they can.
    pub(super) stop: bool,
}

/// Bytes that the board keeps per slot.
pub(crate) const BOOKKEEPING: usize =
    size_of::<Option<Job>>() + size_of::<Completion>() + 2 * size_of::<usize>();

impl Board {
    pub(super) fn new(source: Arc<ExpertSource>, disk: Arc<dyn Disk>, limits: Limits) -> Self {
        let Limits { slots, lanes, .. } = limits;
        Self {
            sharing: Sharing::new(disk.copies()),
            met: source
                .layers()
                .iter()
                .map(|l| vec![false; l.as_ref().map_or(0, |l| l.count)])
                .collect(),
            source,
            disk,
            limits,
            jobs: (0..slots).map(|_| None).collect(),
            now: VecDeque::with_capacity(slots),
            ahead: VecDeque::with_capacity(slots),
            completions: VecDeque::with_capacity(slots),
            flights: (0..lanes).map(|_| None).collect(),
            graves: Vec::new(),
            flying: 0,
            flying_ahead: 0,
            busy_since: Instant::now(),
            busy: Duration::ZERO,
            retries: 0,
            checking: 0,
            stop: false,
        }
    }

    pub(super) fn start(&mut self, mut request: ReadRequest) {
        let ReadRequest { layer, expert, slot, urgency, .. } = request;
        let experts =
            self.source.layer(layer).filter(|l| expert < l.count && l.bytes <= request.bytes.len());
        let place = self.jobs.get_mut(slot).filter(|place| place.is_none());
        let (Some(experts), Some(place)) = (experts, place) else {
            let result = Err(Error::Input(format!(
                "expert {expert} of layer {layer} cannot be read to slot {slot}; please report this"
            )));
            return self.completions.push_back(Completion { request, result });
        };
        let memory = Address::of(&mut request.bytes);
        let (cursor, bytes) = (Cursor::default(), experts.bytes);
        let again = std::mem::replace(&mut self.met[layer][expert], true);
        let buffered = again && self.limits.pages == PageCache::ReadAgain;
        let job = Job {
            request,
            memory,
            cursor,
            bytes,
            buffered,
            under_way: 0,
            error: None,
            avoid: 0,
            checked: 0,
        };
        *place = Some(job);
        match bytes {
            0 => self.settle(slot),
            _ => self.queue(urgency).push_back(slot),
        }
    }

    /// All experts count as never read.
    pub(super) fn forget(&mut self) {
        self.met.iter_mut().for_each(|layer| layer.fill(false));
    }

    fn queue(&mut self, urgency: Urgency) -> &mut VecDeque<usize> {
        match urgency {
            Urgency::Now => &mut self.now,
            Urgency::Ahead => &mut self.ahead,
        }
    }

    /// What was started ahead is wanted now.
    pub(super) fn hurry(&mut self, slot: usize) {
        if let Some(job) = self.jobs.get_mut(slot).and_then(Option::as_mut) {
            job.request.urgency = Urgency::Now;
        }
        if let Some(i) = self.ahead.iter().position(|s| *s == slot) {
            self.ahead.remove(i);
            self.now.push_back(slot);
        }
    }

    /// Gives back what was started ahead. Of what has begun, nothing more is read, and it comes back when that has ended.
    pub(super) fn cancel_ahead(&mut self) {
        while let Some(slot) = self.ahead.pop_front() {
            if let Some(job) = &mut self.jobs[slot] {
                job.error = job.error.take().or(Some(Error::Cancelled));
                job.cursor.at = job.bytes;
            }
            self.settle(slot);
        }
    }

    /// Whether a lane that asks gets something to read.
    pub(super) fn has_work(&self) -> bool {
        self.flying < self.limits.depth && self.front().is_some()
    }

    fn front(&self) -> Option<(usize, bool)> {
        let most_ahead = (self.limits.depth / AHEAD_SHARE).max(1);
        let ahead = || self.ahead.front().filter(|_| self.flying_ahead < most_ahead);
        self.now.front().map(|slot| (*slot, false)).or_else(|| ahead().map(|slot| (*slot, true)))
    }

    /// The next piece for a lane that is free.
    pub(super) fn take(&mut self, lane: usize, now: Instant) -> Option<Order> {
        if self.flying >= self.limits.depth || self.flights[lane].is_some() {
            return None;
        }
        let (slot, ahead) = self.front()?;
        let job = self.jobs[slot].as_mut()?;
        let piece = cut(job, &self.source, self.limits.piece)?;
        job.under_way += 1;
        let lacking = self.disk.lacking(piece.file);
        let avoid = job.avoid | lacking;
        if job.cursor.at == job.bytes {
            let queue = if ahead { &mut self.ahead } else { &mut self.now };
            queue.pop_front();
        }
        let choose = |avoid| self.sharing.choose(piece.bytes, avoid);
        let copy = choose(avoid).or_else(|| choose(lacking)).unwrap_or(0);
        let order = Order { piece, copy, buffered: job.buffered };
        self.flights[lane] = Some(InFlightRead {
            order,
            grave: None,
            since: now,
            late: None,
            ahead,
            hung: false,
            tries: 0,
            failed: avoid,
        });
        self.sharing.begin(copy, piece.bytes, now);
        self.up(ahead, now);
        Some(order)
    }

    /// A lane's read has ended: the bytes that came with it, and how it went. The result is what the lane does next.
    pub(super) fn land(
        &mut self,
        lane: usize,
        came: u64,
        result: io::Result<()>,
        now: Instant,
    ) -> ReadOutcome {
        let Some(mut flight) = self.flights[lane].take() else { return ReadOutcome::Done };
        let Order { piece, copy, .. } = flight.order;
        self.sharing.end(copy, (piece.bytes, came), now);
        if flight.hung {
            self.sharing.hung(copy, false);
        } else {
            self.down(flight.ahead, now);
        }
        if let Some(i) = flight.grave {
            self.visit(i);
            return ReadOutcome::Done;
        }
        let error = match result {
            Ok(()) => None,
            Err(error) => {
                self.sharing.failed(copy);
                if let Some(order) = self.again(&mut flight, &error) {
                    self.retries += 1;
                    self.up(flight.ahead, now);
                    self.sharing.begin(order.copy, piece.bytes, now);
                    self.flights[lane] =
                        Some(InFlightRead { order, since: now, late: None, ..flight });
                    return ReadOutcome::Again(order);
                }
                Some(self.failure(&flight.order, error))
            }
        };
        if let Some(job) = &mut self.jobs[piece.slot] {
            job.under_way -= 1;
            if error.is_some() {
                // What is not begun need not be.
                job.cursor.at = job.bytes;
                job.error = job.error.take().or(error);
                let urgency = job.request.urgency;
                self.queue(urgency).retain(|slot| *slot != piece.slot);
            }
        }
        if let Some(check) = self.check(piece.slot) {
            return ReadOutcome::Check(check);
        }
        self.settle(piece.slot);
        ReadOutcome::Done
    }

    /// What is to be compared with its digest before it completes.
    fn check(&mut self, slot: usize) -> Option<Check> {
        let job = self.jobs[slot].as_mut()?;
        let ReadRequest { layer, expert, .. } = job.request;
        if !job.has_come() || !self.source.has_digests(layer) {
            return None;
        }
        job.under_way += 1;
        self.checking += 1;
        let (memory, bytes, source) = (job.memory, job.bytes, Arc::clone(&self.source));
        Some(Check { slot, layer, expert, memory, bytes, source })
    }

    /// An expert has been compared with its digest. One that differs is read again, from each copy by itself.
    pub(super) fn checked(&mut self, check: &Check, result: Result<(), Error>) {
        self.checking -= 1;
        let Some(job) = &mut self.jobs[check.slot] else { return };
        job.under_way -= 1;
        if let Err(error) = result {
            // What has digests lies in one file.
            let file = self
                .source
                .layer(check.layer)
                .and_then(|l| Some(l.segments(check.expert).next()?.file));
            let lacking = file.map_or(0, |file| self.disk.lacking(file as usize));
            let next = (job.checked..self.disk.copies()).find(|copy| lacking & 1 << copy == 0);
            if let (Some(copy), None) = (next, &job.error) {
                job.avoid = !(1 << copy);
                job.checked = copy + 1;
                job.cursor = Cursor::default();
                self.retries += 1;
                let urgency = job.request.urgency;
                return self.queue(urgency).push_front(check.slot);
            }
            job.error = job.error.take().or(Some(error));
        }
        self.settle(check.slot);
    }

    /// How a piece that failed is tried again, if it is: on a copy where it has not failed, else once more through the page
    /// cache, unless the file has ended.
    fn again(&self, flight: &mut InFlightRead, error: &io::Error) -> Option<Order> {
        let Order { piece, copy, buffered } = flight.order;
        flight.failed |= 1 << copy;
        if flight.tries >= RETRIES.max(self.disk.copies() as u32) {
            return None;
        }
        flight.tries += 1;
        if let Some(copy) = self.sharing.choose(piece.bytes, flight.failed) {
            return Some(Order { piece, copy, buffered });
        }
        let may_pass = error.kind() != io::ErrorKind::UnexpectedEof && flight.tries <= RETRIES;
        may_pass.then_some(Order { piece, copy, buffered: true })
    }

    fn up(&mut self, ahead: bool, now: Instant) {
        if self.flying == 0 {
            self.busy_since = now;
        }
        self.flying += 1;
        self.flying_ahead += usize::from(ahead);
    }

    fn down(&mut self, ahead: bool, now: Instant) {
        self.flying -= 1;
        self.flying_ahead -= usize::from(ahead);
        if self.flying == 0 {
            self.busy += now.saturating_duration_since(self.busy_since);
        }
    }

    /// Completes a job of which nothing is left to do.
    fn settle(&mut self, slot: usize) {
        let done = |job: &Job| job.has_come() || job.under_way == 0 && job.error.is_some();
        if let Some(Job { request, error, .. }) = self.jobs[slot].take_if(|job| done(job)) {
            self.completions.push_back(Completion { request, result: error.map_or(Ok(()), Err) });
        }
    }

    pub(super) fn deadline(&self) -> Duration {
        self.limits.deadline
    }

    pub(super) fn next(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    pub(super) fn has_completions(&self) -> bool {
        !self.completions.is_empty()
    }

    /// Whether nothing is under way that could complete.
    pub(super) fn is_idle(&self) -> bool {
        self.flying + self.checking == 0 && self.now.is_empty() && self.ahead.is_empty()
    }

    pub(super) fn counters(&self, now: Instant) -> ReadCounters {
        let running = if self.flying > 0 {
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
        self.sharing.count(&mut counters);
        counters
    }
}
