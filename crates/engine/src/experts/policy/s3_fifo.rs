//! S3-FIFO: a small queue for new experts, a main queue, and a ghost queue of experts that left the
//! small one recently.
//!
//! Yang, Zhang, Qiu, Yue, Rashmi: *FIFO queues are all you need for cache eviction*, SOSP 2023.

use super::{policy::Policy, queues::Queues};

const SMALL: usize = 0;
const MAIN: usize = 1;
/// Queue of prefetched experts before their first use, in order of arrival.
const PREFETCHED: usize = 2;

/// Divisor of the slots that gives the small queue's length.
const SMALL_SHARE: usize = 10;

/// CountedQueue are counted up to this value.
const MAX_USES: u8 = 3;

#[derive(Clone, Copy)]
struct S3Entry {
    key: u32,
    uses: u8,
}

/// Bytes per slot and per expert.
pub(super) const BYTES: usize = size_of::<S3Entry>() + size_of::<u32>();

/// Experts that are not used again leave through the small queue before they evict used ones. One
/// use is enough to move to the main queue.
pub(super) struct S3Fifo {
    queues: Queues<3>,
    entries: Vec<S3Entry>,
    max_small: usize,
    /// Ghost queue: by expert, the sequence number of its departure from the small queue; 0 if it
    /// is no ghost.
    left: Vec<u32>,
    departures: u32,
}

impl S3Fifo {
    pub(super) fn new(slots: usize, experts: usize) -> Self {
        Self {
            queues: Queues::new(slots),
            entries: vec![S3Entry { key: 0, uses: 0 }; slots],
            max_small: (slots / SMALL_SHARE).max(1),
            left: vec![0; experts],
            departures: 0,
        }
    }

    /// Whether an expert was among the last to leave the small queue, of as many as the main queue
    /// has slots. Removes it from the ghost queue.
    fn was_ghost(&mut self, key: usize) -> bool {
        let left = self.left.get_mut(key).map_or(0, std::mem::take);
        left > 0 && ((self.departures - left) as usize) < self.entries.len() - self.max_small
    }

    fn depart(&mut self, key: usize) {
        if self.departures == u32::MAX {
            self.departures = 0;
            self.left.fill(0);
        }
        self.departures += 1;
        if let Some(left) = self.left.get_mut(key) {
            *left = self.departures;
        }
    }

    /// Moves used slots on, until the head of a queue is unused and evictable.
    fn advance(&mut self, queue: usize, evictable: &dyn Fn(usize) -> bool) -> Option<usize> {
        // Each counted use gives a slot one more round.
        for _ in 0..=self.queues.len(queue) * (usize::from(MAX_USES) + 1) {
            let slot = self.queues.first(queue)?;
            let uses = &mut self.entries[slot].uses;
            match (queue, *uses) {
                (_, 0) if evictable(slot) => return Some(slot),
                (_, 0) => self.queues.shift(queue, slot),
                (SMALL, _) => {
                    *uses = 0;
                    self.queues.shift(MAIN, slot);
                }
                _ => {
                    *uses -= 1;
                    self.queues.shift(MAIN, slot);
                }
            }
        }
        None
    }
}

impl Policy for S3Fifo {
    fn insert(&mut self, slot: usize, key: usize, prefetched: bool) {
        let queue = match prefetched {
            true => PREFETCHED,
            false if self.was_ghost(key) => MAIN,
            false => SMALL,
        };
        self.entries[slot] = S3Entry { key: key as u32, uses: 0 };
        self.queues.shift(queue, slot);
    }

    fn hit(&mut self, slot: usize) {
        match self.queues.queue(slot) {
            // The first use inserts it as if it had just been read.
            Some(PREFETCHED) => self.insert(slot, self.entries[slot].key as usize, false),
            _ => self.entries[slot].uses = (self.entries[slot].uses + 1).min(MAX_USES),
        }
    }

    fn remove(&mut self, slot: usize) {
        if self.queues.take(slot) == Some(SMALL) {
            self.depart(self.entries[slot].key as usize);
        }
    }

    fn expire_prefetched(&mut self) {
        while let Some(slot) = self.queues.first(PREFETCHED) {
            self.queues.take(slot);
            self.queues.push_front(SMALL, slot);
        }
    }

    fn victim(&mut self, evictable: &dyn Fn(usize) -> bool) -> Option<usize> {
        let small = self.queues.len(SMALL) >= self.max_small || self.queues.len(MAIN) == 0;
        let order = if small { [SMALL, MAIN] } else { [MAIN, SMALL] };
        let used = order.into_iter().find_map(|queue| self.advance(queue, evictable));
        used.or_else(|| self.queues.first_evictable(PREFETCHED, evictable))
    }
}
