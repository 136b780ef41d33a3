//! Belády's MIN: the optimal offline eviction policy.

use std::collections::BinaryHeap;

use crate::experts::{policy::Policy, trace::Trace};

const NEVER: usize = usize::MAX;

/// Belády's MIN: evicts the expert whose next use is furthest away.
///
/// L. A. Belady: *A study of replacement algorithms for a virtual-storage computer*, IBM Systems
/// Journal 5, 1966.
pub(super) struct Optimum {
    /// For each use in the trace, the index of the next use of the same expert.
    next: Vec<usize>,
    /// Per expert, the index of its next use. `next` at that index gives the following one.
    upcoming: Vec<usize>,
    /// Per slot, the next use of its expert.
    of_slot: Vec<usize>,
    key: Vec<usize>,
    /// Max-heap of next uses with their slots. Entries that differ from `of_slot` are stale.
    order: BinaryHeap<(usize, usize)>,
    in_use: Vec<(usize, usize)>,
}

impl Optimum {
    pub(super) fn new(slots: usize, trace: &Trace) -> Self {
        let mut upcoming = vec![NEVER; trace.header().experts()];
        let mut next = vec![NEVER; trace.keys().len()];
        for (place, key) in trace.keys().iter().enumerate().rev() {
            next[place] = std::mem::replace(&mut upcoming[*key as usize], place);
        }
        Self {
            next,
            upcoming,
            of_slot: vec![NEVER; slots],
            key: vec![0; slots],
            order: BinaryHeap::new(),
            in_use: Vec::new(),
        }
    }
}

impl Policy for Optimum {
    fn insert(&mut self, slot: usize, key: usize, _: bool) {
        self.key[slot] = key;
        self.hit(slot);
    }

    fn hit(&mut self, slot: usize) {
        let upcoming = &mut self.upcoming[self.key[slot]];
        *upcoming = self.next.get(*upcoming).copied().unwrap_or(NEVER);
        self.of_slot[slot] = *upcoming;
        self.order.push((*upcoming, slot));
    }

    fn remove(&mut self, _: usize) {}

    fn expire_prefetched(&mut self) {}

    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        let mut victim = None;
        while let Some((next, slot)) = self.order.pop() {
            if self.of_slot[slot] != next {
                continue;
            }
            if free(slot) {
                victim = Some(slot);
                break;
            }
            self.in_use.push((next, slot));
        }
        self.order.extend(self.in_use.drain(..));
        victim
    }
}
