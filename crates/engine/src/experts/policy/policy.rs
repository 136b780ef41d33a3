//! The trait of eviction policies.

/// Eviction policy over a fixed number of slots. It sees indices only, so that a simulator can run
/// it without a model.
///
/// It tracks filled slots: an expert enters a slot (`insert`), is used again (`hit`), and leaves
/// (`remove`). Nothing is allocated after construction, and every call takes amortized constant
/// time.
pub(crate) trait Policy: Send {
    /// An expert entered an empty slot; `key` is its index among all experts of the model. With
    /// `prefetched` it has not been needed yet: the next hit is its first use, and until then it is
    /// evicted last.
    fn insert(&mut self, slot: usize, key: usize, prefetched: bool);

    /// The expert in a slot was used again.
    fn hit(&mut self, slot: usize);

    /// The expert in a slot was evicted or lost.
    fn remove(&mut self, slot: usize);

    /// Prefetched experts that have not been used were not needed, and lose their protection from
    /// eviction.
    fn expire_prefetched(&mut self);

    /// The next slot to evict among the `evictable` ones; `None` if none is. It stays until
    /// it is removed.
    fn victim(&mut self, evictable: &dyn Fn(usize) -> bool) -> Option<usize>;
}

#[cfg(test)]
mod tests;
