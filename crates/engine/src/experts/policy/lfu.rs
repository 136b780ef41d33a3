//! LFU: evicts the least frequently used expert, with extra weight on recent tokens.

use super::{policy::Policy, queues::Queues};

/// Number of levels; larger counts share the last one.
const LEVELS: usize = 64;
/// Queue of prefetched experts before their first use, in order of arrival. Queues 0 to `LEVELS -
/// 1` hold one level each, in order of last use.
const PREFETCHED: usize = LEVELS;

/// Average uses per expert after which all long-term counts are halved.
const COUNT_HALF_LIFE: usize = 8;
/// Additional weight of a recent use.
const RECENT_WEIGHT: u8 = 4;
/// Recent weights are halved after every `experts / RECENT_HALF_LIFE` uses.
const RECENT_HALF_LIFE: usize = 4;

#[derive(Clone, Copy)]
struct Count {
    old: u8,
    recent: u8,
}

/// Bytes per slot and per expert.
pub(super) const BYTES: usize = size_of::<u32>() + size_of::<Count>();

/// Evicts the slot with the lowest count; among equals, the least recently used.
///
/// Counts of all experts are kept, in memory or not, so a re-read expert has the count that it had
/// when it was evicted. Otherwise a cache that is small compared to a token's working set would
/// evict every expert before its second use.
pub(super) struct Lfu {
    queues: Queues<{ LEVELS + 1 }>,
    /// Bit mask of levels that may have slots.
    levels: u64,
    /// By slot: its expert.
    keys: Vec<u32>,
    /// By expert.
    counts: Vec<Count>,
    /// CountedQueue since recent and long-term counts were halved.
    uses: [usize; 2],
}

impl Lfu {
    pub(super) fn new(slots: usize, experts: usize) -> Self {
        Self {
            queues: Queues::new(slots),
            levels: 0,
            keys: vec![0; slots],
            counts: vec![Count { old: 0, recent: 0 }; experts],
            uses: [0; 2],
        }
    }

    /// Moves a slot to the end of its level.
    fn sort(&mut self, slot: usize) {
        let Count { old, recent } = self.counts[self.keys[slot] as usize];
        let level = usize::from(old + recent).min(LEVELS - 1);
        self.queues.shift(level, slot);
        self.levels |= 1 << level;
    }

    fn age(&mut self) {
        self.uses = self.uses.map(|uses| uses + 1);
        let experts = self.counts.len();
        let due =
            [self.uses[0] * RECENT_HALF_LIFE >= experts, self.uses[1] >= COUNT_HALF_LIFE * experts];
        if due == [false; 2] {
            return;
        }
        for (uses, due) in self.uses.iter_mut().zip(due) {
            *uses = if due { 0 } else { *uses };
        }
        for count in &mut self.counts {
            count.recent >>= u8::from(due[0]);
            count.old >>= u8::from(due[1]);
        }
        self.levels = 0;
        for level in 0..LEVELS {
            for _ in 0..self.queues.len(level) {
                if let Some(slot) = self.queues.first(level) {
                    self.sort(slot);
                }
            }
        }
    }
}

impl Policy for Lfu {
    fn insert(&mut self, slot: usize, key: usize, prefetched: bool) {
        self.keys[slot] = key as u32;
        match prefetched {
            true => self.queues.shift(PREFETCHED, slot),
            false => self.hit(slot),
        }
    }

    fn hit(&mut self, slot: usize) {
        let count = &mut self.counts[self.keys[slot] as usize];
        count.old = (count.old + 1).min(LEVELS as u8);
        count.recent = (count.recent + RECENT_WEIGHT).min(LEVELS as u8);
        self.sort(slot);
        self.age();
    }

    fn remove(&mut self, slot: usize) {
        self.queues.take(slot);
    }

    fn expire_prefetched(&mut self) {
        while let Some(slot) = self.queues.first(PREFETCHED) {
            self.sort(slot);
        }
    }

    fn victim(&mut self, evictable: &dyn Fn(usize) -> bool) -> Option<usize> {
        let mut levels = self.levels;
        while levels != 0 {
            let level = levels.trailing_zeros() as usize;
            levels &= !(1 << level);
            if self.queues.len(level) == 0 {
                self.levels &= !(1 << level);
            } else if let Some(slot) = self.queues.first_evictable(level, evictable) {
                return Some(slot);
            }
        }
        self.queues.first_evictable(PREFETCHED, evictable)
    }
}
