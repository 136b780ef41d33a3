//! The `Reader` trait, its requests and their completions.

use moeflux_base::Error;
use moeflux_compute::Bytes;

use crate::experts::stats::ReadCounters;

/// Priority of a read. Demand reads are executed before all prefetches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Urgency {
    /// The current layer waits for it.
    Demand,
    /// A later layer may need it.
    Prefetch,
}

/// Request to read one expert, or a batch of rows of a table, into a slot. It owns the slot's
/// memory until it completes.
pub struct ReadRequest {
    /// Index of the layer, or of the table.
    pub layer: usize,
    /// Index of the expert in the layer, or of the batch.
    pub expert: usize,
    /// Index of the cache's slot.
    pub slot: usize,
    /// Memory of the slot.
    pub bytes: Bytes,
    /// Priority of the read.
    pub urgency: Urgency,
}

/// A request that has finished or failed.
pub struct Completion {
    /// The request with its memory, filled if `result` is `Ok`. After a read that hung it is other
    /// memory of the same size, as the system may still write to the original.
    pub request: ReadRequest,
    /// Outcome of the read.
    pub result: Result<(), Error>,
}

/// Reads experts or batches of rows into slots. Every started request completes exactly once.
pub trait Reader: Send {
    /// Starts a read. Never blocks on the disk.
    fn start(&mut self, request: ReadRequest);

    /// The next completion, in any order. Blocks until there is one if `wait`; callers only wait
    /// while a request is in flight.
    fn next(&mut self, wait: bool) -> Option<Completion>;

    /// Turns the prefetch into a slot into a demand read.
    fn promote(&mut self, slot: usize) {
        let _ = slot;
    }

    /// Cancels all prefetches. Each completes with [`Error::Cancelled`] once none of its reads is
    /// in flight.
    fn cancel_prefetches(&mut self) {}

    /// Treats all experts as never read, after the page cache was made to drop the files.
    fn forget_reads(&mut self) {}

    /// Counters since the reader was opened.
    fn counters(&self) -> ReadCounters {
        ReadCounters::default()
    }

    /// Backend and mode, for users: "io_uring, direct, depth 16".
    fn describe(&self) -> String {
        String::new()
    }
}
#[cfg(test)]
mod tests;
