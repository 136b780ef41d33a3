//! Queues of slots: doubly linked lists in one array.

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Link {
    before: u32,
    after: u32,
    queue: u32,
}

/// Bytes per slot.
pub(super) const BYTES: usize = size_of::<Link>();

#[derive(Clone, Copy)]
struct QueueEnds {
    first: u32,
    last: u32,
    len: usize,
}

/// `N` queues of slots; each slot is in at most one of them.
pub(super) struct Queues<const N: usize> {
    links: Vec<Link>,
    ends: [QueueEnds; N],
}

impl<const N: usize> Queues<N> {
    /// Empty queues.
    pub(super) fn new(slots: usize) -> Self {
        Self {
            links: vec![Link { before: NONE, after: NONE, queue: NONE }; slots],
            ends: [QueueEnds { first: NONE, last: NONE, len: 0 }; N],
        }
    }

    pub(super) fn len(&self, queue: usize) -> usize {
        self.ends[queue].len
    }

    /// Appends a slot that is in no queue.
    pub(super) fn push(&mut self, queue: usize, slot: usize) {
        let before = self.ends[queue].last;
        self.links[slot] = Link { before, after: NONE, queue: queue as u32 };
        match before {
            NONE => self.ends[queue].first = slot as u32,
            before => self.links[before as usize].after = slot as u32,
        }
        self.ends[queue].last = slot as u32;
        self.ends[queue].len += 1;
    }

    /// Prepends a slot that is in no queue.
    pub(super) fn push_front(&mut self, queue: usize, slot: usize) {
        let after = self.ends[queue].first;
        self.links[slot] = Link { before: NONE, after, queue: queue as u32 };
        match after {
            NONE => self.ends[queue].last = slot as u32,
            after => self.links[after as usize].before = slot as u32,
        }
        self.ends[queue].first = slot as u32;
        self.ends[queue].len += 1;
    }

    /// Removes a slot from its queue, if it is in one. Returns the queue.
    pub(super) fn take(&mut self, slot: usize) -> Option<usize> {
        let Link { before, after, queue } = std::mem::replace(
            &mut self.links[slot],
            Link { before: NONE, after: NONE, queue: NONE },
        );
        let ends = self.ends.get_mut(queue as usize)?;
        ends.len -= 1;
        match before {
            NONE => ends.first = after,
            before => self.links[before as usize].after = after,
        }
        match after {
            NONE => ends.last = before,
            after => self.links[after as usize].before = before,
        }
        Some(queue as usize)
    }

    /// Moves a slot to the end of a queue, from any queue or none.
    pub(super) fn shift(&mut self, queue: usize, slot: usize) {
        self.take(slot);
        self.push(queue, slot);
    }

    /// The queue that a slot is in.
    pub(super) fn queue(&self, slot: usize) -> Option<usize> {
        let queue = self.links[slot].queue as usize;
        (queue < N).then_some(queue)
    }

    pub(super) fn first(&self, queue: usize) -> Option<usize> {
        match self.ends[queue].first {
            NONE => None,
            slot => Some(slot as usize),
        }
    }

    /// The first evictable slot of a queue. Slots before it are in use and move to the end, so that
    /// they are not passed again soon.
    pub(super) fn first_evictable(
        &mut self,
        queue: usize,
        evictable: &dyn Fn(usize) -> bool,
    ) -> Option<usize> {
        for _ in 0..self.len(queue) {
            let slot = self.first(queue)?;
            if evictable(slot) {
                return Some(slot);
            }
            self.shift(queue, slot);
        }
        None
    }
}
