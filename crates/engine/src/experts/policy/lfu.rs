//! Least frequently used, where the last few tokens count more.

use super::{Policy, queues::Queues};

/// Levels are counted up to one less.
const LEVELS: usize = 64;
/// What came ahead and waits for its first use, in the order of coming. The queues before it are of one level each, in the
/// order of last use.
const AHEAD: usize = LEVELS;

/// Old uses fade: what they count is halved whenever each expert has been used so many times on average.
const OLD_AGE: usize = 8;
/// A recent use counts so much besides,
const RECENT: u8 = 4;
/// which is halved whenever one expert in so many has been used.
const RECENT_AGE: usize = 4;

#[derive(Clone, Copy)]
struct Count {
    old: u8,
    recent: u8,
}

/// Bytes per slot, and per expert.
pub(super) const BYTES: usize = size_of::<u32>() + size_of::<Count>();

/// Who has been used least gives way; of equals, who was used longest ago.
///
/// A model has few experts, so the uses of all of them are counted, in a slot or not: an expert that comes back is worth what
/// it was when it left. Without that, a cache that is small beside what one token needs forgets everybody before they could
/// be counted twice.
pub(super) struct Lfu {
    queues: Queues<{ LEVELS + 1 }>,
    /// A bit for each level that may have a slot.
    levels: u64,
    /// Of each slot the expert.
    keys: Vec<u32>,
    /// Of each expert.
    counts: Vec<Count>,
    /// Since recent and old uses were halved.
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

    /// Puts a slot at the end of its level.
    fn sort(&mut self, slot: usize) {
        let Count { old, recent } = self.counts[self.keys[slot] as usize];
        let level = usize::from(old + recent).min(LEVELS - 1);
        self.queues.shift(level, slot);
        self.levels |= 1 << level;
    }

    fn age(&mut self) {
        self.uses = self.uses.map(|uses| uses + 1);
        let experts = self.counts.len();
        let due = [self.uses[0] * RECENT_AGE >= experts, self.uses[1] >= OLD_AGE * experts];
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
    fn insert(&mut self, slot: usize, key: usize, ahead: bool) {
        self.keys[slot] = key as u32;
        match ahead {
            true => self.queues.shift(AHEAD, slot),
            false => self.hit(slot),
        }
    }

    fn hit(&mut self, slot: usize) {
        let count = &mut self.counts[self.keys[slot] as usize];
        count.old = (count.old + 1).min(LEVELS as u8);
        count.recent = (count.recent + RECENT).min(LEVELS as u8);
        self.sort(slot);
        self.age();
    }

    fn remove(&mut self, slot: usize) {
        self.queues.take(slot);
    }

    fn expire(&mut self) {
        while let Some(slot) = self.queues.first(AHEAD) {
            self.sort(slot);
        }
    }

    fn victim(&mut self, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        let mut levels = self.levels;
        while levels != 0 {
            let level = levels.trailing_zeros() as usize;
            levels &= !(1 << level);
            if self.queues.len(level) == 0 {
                self.levels &= !(1 << level);
            } else if let Some(slot) = self.queues.first_free(level, free) {
                return Some(slot);
            }
        }
        self.queues.first_free(AHEAD, free)
    }
}
