//! Least recently used.

use super::{Policy, queues::Queues};

/// What was used, in the order of last use.
const USED: usize = 0;
/// What came ahead and waits for its first use, in the order of coming.
const AHEAD: usize = 1;

/// What was used longest ago gives way.
pub(super) struct Lru {
    queues: Queues<2>,
}

impl Lru {
    pub(super) fn new(slots: usize) -> Self {
        Self { queues: Queues::new(slots) }
    }
}

impl Policy for Lru {
    fn insert(&mut self, slot: usize, _: usize, ahead: bool) {
        self.queues.shift(if ahead { AHEAD } else { USED }, slot);
    }

    fn hit(&mut self, slot: usize) {
        self.queues.shift(USED, slot);
    }

    fn remove(&mut self, slot: usize) {
        self.queues.take(slot);
    }

    fn expire(&mut self) {
        while let Some(slot) = self.queues.first(AHEAD) {
            self.queues.take(slot);
            self.queues.push_front(USED, slot);
        }
    }

    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        self.queues.first_free(USED, free).or_else(|| self.queues.first_free(AHEAD, free))
    }
}
