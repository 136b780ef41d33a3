//! LRU: evicts the least recently used expert.

use super::{policy::Policy, queues::Queues};

/// Queue of used experts, in order of last use.
const USED: usize = 0;
/// Queue of prefetched experts before their first use, in order of arrival.
const PREFETCHED: usize = 1;

/// Evicts the least recently used slot.
pub(super) struct Lru {
    queues: Queues<2>,
}

impl Lru {
    pub(super) fn new(slots: usize) -> Self {
        Self { queues: Queues::new(slots) }
    }
}

impl Policy for Lru {
    fn insert(&mut self, slot: usize, _: usize, prefetched: bool) {
        self.queues.shift(if prefetched { PREFETCHED } else { USED }, slot);
    }

    fn hit(&mut self, slot: usize) {
        self.queues.shift(USED, slot);
    }

    fn remove(&mut self, slot: usize) {
        self.queues.take(slot);
    }

    fn expire_prefetched(&mut self) {
        while let Some(slot) = self.queues.first(PREFETCHED) {
            self.queues.take(slot);
            self.queues.push_front(USED, slot);
        }
    }

    fn victim(&mut self, evictable: &dyn Fn(usize) -> bool) -> Option<usize> {
        self.queues
            .first_evictable(USED, evictable)
            .or_else(|| self.queues.first_evictable(PREFETCHED, evictable))
    }
}
