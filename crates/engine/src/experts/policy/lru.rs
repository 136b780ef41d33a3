//! Least recently used.

use super::{Policy, queues::Queues};

/// What was used, in the order of last use.
const USED: usize = 0;
/// What came ahead and waits for its first use, in the order of coming.
const AHEAD: usize = 1;

/// Of the slots, what waits for its first use has this share; what is beyond gives way first.
const AHEAD_SHARE: usize = 8;

/// What was used longest ago gives way.
pub(super) struct Lru {
    queues: Queues<2>,
    most_ahead: usize,
}

impl Lru {
    pub(super) fn new(slots: usize) -> Self {
        Self { queues: Queues::new(slots), most_ahead: slots / AHEAD_SHARE }
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

    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        let order = if self.queues.len(AHEAD) > self.most_ahead { [AHEAD, USED] } else { [USED, AHEAD] };
        order.into_iter().find_map(|queue| self.queues.first_free(queue, free))
    }
}
