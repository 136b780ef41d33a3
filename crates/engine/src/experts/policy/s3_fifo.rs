//! S3-FIFO: a small queue for newcomers, a main queue, and the memory of who left the small one lately.
//!
//! Yang, Zhang, Qiu, Yue, Rashmi: *FIFO queues are all you need for cache eviction*, SOSP 2023.

use super::{Policy, queues::Queues};

const SMALL: usize = 0;
const MAIN: usize = 1;
/// What came ahead and waits for its first use, in the order of coming.
const AHEAD: usize = 2;

/// The small queue has this share of the slots.
const SMALL_SHARE: usize = 10;

/// Uses are counted up to here.
const MAX_USES: u8 = 3;

#[derive(Clone, Copy)]
struct Entry {
    key: u32,
    uses: u8,
}

/// Bytes per slot, and per expert.
pub(super) const BYTES: usize = size_of::<Entry>() + size_of::<u32>();

/// Newcomers that nobody uses again leave before they push out what is used. One use is enough to go on to the main queue.
pub(super) struct S3Fifo {
    queues: Queues<3>,
    entries: Vec<Entry>,
    most_small: usize,
    /// The ghost queue: of each expert, the number of its departure from the small queue.
    left: Vec<u32>,
    departures: u32,
}

impl S3Fifo {
    pub(super) fn new(slots: usize, experts: usize) -> Self {
        Self {
            queues: Queues::new(slots),
            entries: vec![Entry { key: 0, uses: 0 }; slots],
            most_small: (slots / SMALL_SHARE).max(1),
            left: vec![0; experts],
            departures: 0,
        }
    }

    /// Whether an expert was among the last to leave the small queue: as many as the main queue has slots. It is not any
    /// more.
    fn was_ghost(&mut self, key: usize) -> bool {
        let left = self.left.get_mut(key).map_or(0, std::mem::take);
        left > 0 && ((self.departures - left) as usize) < self.entries.len() - self.most_small
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

    /// Moves on what has been used, until one at the head of a queue has not.
    fn head(&mut self, queue: usize, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        // Each use that was counted buys a slot one more round.
        for _ in 0..=self.queues.len(queue) * (usize::from(MAX_USES) + 1) {
            let slot = self.queues.first(queue)?;
            let uses = &mut self.entries[slot].uses;
            match (queue, *uses) {
                (_, 0) if free(slot) => return Some(slot),
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
    fn insert(&mut self, slot: usize, key: usize, ahead: bool) {
        let queue = match ahead {
            true => AHEAD,
            false if self.was_ghost(key) => MAIN,
            false => SMALL,
        };
        self.entries[slot] = Entry { key: key as u32, uses: 0 };
        self.queues.shift(queue, slot);
    }

    fn hit(&mut self, slot: usize) {
        match self.queues.queue(slot) {
            // As if it came now.
            Some(AHEAD) => self.insert(slot, self.entries[slot].key as usize, false),
            _ => self.entries[slot].uses = (self.entries[slot].uses + 1).min(MAX_USES),
        }
    }

    fn remove(&mut self, slot: usize) {
        if self.queues.take(slot) == Some(SMALL) {
            self.depart(self.entries[slot].key as usize);
        }
    }

    fn expire(&mut self) {
        while let Some(slot) = self.queues.first(AHEAD) {
            self.queues.take(slot);
            self.queues.push_front(SMALL, slot);
        }
    }

    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        let small = self.queues.len(SMALL) >= self.most_small || self.queues.len(MAIN) == 0;
        let order = if small { [SMALL, MAIN] } else { [MAIN, SMALL] };
        let used = order.into_iter().find_map(|queue| self.head(queue, free));
        used.or_else(|| self.queues.first_free(AHEAD, free))
    }
}
