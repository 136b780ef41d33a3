//! Pools of the memory plan: the memory of a card or of the host, with a budget and named lines.

use moeflux_compute::BankPlace;

/// Use of the bytes of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LineName {
    /// The process itself: code, tokenizer, stacks, indexes, drivers.
    Process,
    /// Logits, router outputs and queues on the host, and staging for weights on their way to a
    /// device that copies them.
    Staging,
    /// Buffers and stores of the program beside the engine, such as those of a server.
    Reserved,
    /// Rows of a step's tokens, from tables that stay on disk.
    Rows,
    /// Images: a vision tower on its way through memory, its activations, and rows that are kept.
    Images,
    /// Grammars of constrained answers: the trie of the vocabulary, lexers and parsers.
    Grammars,
    /// Resident weights.
    Dense,
    /// States of all sessions, each of the plan's context unless their bytes were requested.
    State,
    /// States in the prefix cache and of marks, and pages of forks.
    Marks,
    /// Tokens and index of the prefix cache on the host, where its states are on a card.
    PrefixIndex,
    /// Scratch buffers of activations; of experts that the host computes beside a card.
    Scratch,
    /// Slots for experts.
    Slots,
}

/// Line of a pool: `count` parts of `each` bytes.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct PoolLine {
    /// Use of the bytes.
    pub name: LineName,
    /// Bytes of one part.
    pub each: u64,
    /// Number of parts: of slots of a size, otherwise one.
    pub count: usize,
}

impl PoolLine {
    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.each.saturating_mul(self.count as u64)
    }
}

/// Memory of a card or of the host. All sums of the plan are sums of lines.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Pool {
    /// The memory.
    pub place: BankPlace,
    /// Limit in bytes.
    pub budget: u64,
    /// Lines, at most one of a name; the slots last, a line for each size.
    pub lines: Vec<PoolLine>,
}

impl Pool {
    /// A pool without lines.
    pub(crate) fn new(place: BankPlace, budget: u64) -> Self {
        Self { place, budget, lines: Vec::new() }
    }

    fn named(&self, name: LineName) -> impl Iterator<Item = &PoolLine> {
        self.lines.iter().filter(move |line| line.name == name)
    }

    /// Bytes of the lines of a name; zero if the pool has none.
    pub fn bytes(&self, name: LineName) -> u64 {
        sum(self.named(name))
    }

    /// Number of slots.
    pub fn slots(&self) -> usize {
        self.named(LineName::Slots).map(|line| line.count).sum()
    }

    /// Number of slots by size, the largest first.
    pub fn slots_by_size(&self) -> Vec<usize> {
        self.named(LineName::Slots).map(|line| line.count).collect()
    }

    /// Bytes of one slot, of the largest.
    pub fn slot_bytes(&self) -> u64 {
        self.named(LineName::Slots).map(|line| line.each).max().unwrap_or(0)
    }

    /// Bytes of all lines.
    pub fn total(&self) -> u64 {
        sum(self.lines.iter())
    }

    /// Bytes of all lines but the slots.
    pub fn fixed(&self) -> u64 {
        sum(self.lines.iter().filter(|line| line.name != LineName::Slots))
    }

    /// Bytes of the budget that the lines but the slots leave.
    pub(crate) fn room(&self) -> u64 {
        self.budget.saturating_sub(self.fixed())
    }

    /// Appends a line of one part.
    pub(crate) fn push(&mut self, name: LineName, bytes: u64) {
        self.lines.push(PoolLine { name, each: bytes, count: 1 });
    }

    /// Inserts a line of one part in front of the slots.
    pub(crate) fn insert(&mut self, name: LineName, bytes: u64) {
        let slots = self.lines.iter().position(|line| line.name == LineName::Slots);
        let line = PoolLine { name, each: bytes, count: 1 };
        self.lines.insert(slots.unwrap_or(self.lines.len()), line);
    }

    /// Sets the number of slots by size.
    pub(crate) fn set_slots(&mut self, counts: &[usize]) {
        let lines = self.lines.iter_mut().filter(|line| line.name == LineName::Slots);
        lines.zip(counts).for_each(|(line, count)| line.count = *count);
    }

    /// Sets the bytes of a line of one part.
    pub(crate) fn set_bytes(&mut self, name: LineName, bytes: u64) {
        let mut lines = self.lines.iter_mut();
        if let Some(line) = lines.find(|line| line.name == name) {
            line.each = bytes;
        }
    }
}

fn sum<'a>(lines: impl Iterator<Item = &'a PoolLine>) -> u64 {
    lines.map(PoolLine::bytes).fold(0, u64::saturating_add)
}
