//! Which slot gives way.

/// A cache policy over a fixed number of slots. It sees slot numbers only, so that it can be replayed without
/// a model.
pub(crate) trait Policy: Send {
    /// The slot was filled with another expert, or used again.
    fn touch(&mut self, slot: usize);

    /// The slot that gives way next, among those for which `free` holds; `None` when it holds for none.
    fn victim(&self, free: &dyn Fn(usize) -> bool) -> Option<usize>;
}

const NONE: usize = usize::MAX;

/// Least recently used: a doubly linked list over the slots, oldest first.
pub(crate) struct Lru {
    before: Vec<usize>,
    after: Vec<usize>,
    oldest: usize,
    newest: usize,
}

impl Lru {
    pub(crate) fn new(slots: usize) -> Self {
        Self {
            before: (0..slots).map(|i| i.wrapping_sub(1)).collect(),
            after: (0..slots).map(|i| if i + 1 < slots { i + 1 } else { NONE }).collect(),
            oldest: if slots > 0 { 0 } else { NONE },
            newest: slots.wrapping_sub(1),
        }
    }
}

impl Policy for Lru {
    fn touch(&mut self, slot: usize) {
        if self.newest == slot {
            return;
        }
        let (before, after) = (self.before[slot], self.after[slot]);
        match before {
            NONE => self.oldest = after,
            b => self.after[b] = after,
        }
        // The newest has no successor, so `after` is a slot.
        self.before[after] = before;
        self.after[self.newest] = slot;
        self.before[slot] = self.newest;
        self.after[slot] = NONE;
        self.newest = slot;
    }

    fn victim(&self, free: &dyn Fn(usize) -> bool) -> Option<usize> {
        let mut slot = self.oldest;
        while slot != NONE {
            if free(slot) {
                return Some(slot);
            }
            slot = self.after[slot];
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn lru_is_a_list_of_slots_by_last_use(slots in 1usize..9, ops in prop::collection::vec((0usize..9, any::<u16>()), 0..200)) {
            let mut lru = Lru::new(slots);
            let mut model: Vec<usize> = (0..slots).collect();
            for (slot, pinned) in ops {
                let slot = slot % slots;
                lru.touch(slot);
                model.retain(|s| *s != slot);
                model.push(slot);
                let free = |s: usize| pinned >> s & 1 == 0;
                prop_assert_eq!(lru.victim(&free), model.iter().copied().find(|s| free(*s)));
            }
        }
    }
}
