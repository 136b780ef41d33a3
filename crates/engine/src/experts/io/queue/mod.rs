//! Read scheduler shared by all backends: splits requests into reads, keeps `depth` of them in
//! flight, retries failures, times out hung reads.
//!
//! A slot names a request. Workers take the next read when an I/O slot is free: an I/O slot holds
//! one read in flight, and belongs to a thread or to an io_uring entry. A request completes when
//! its last read has ended.

mod failure;
mod read_queue;
mod read_source;
mod split;
mod timeout;

pub(super) use self::read_source::ReadSource;
pub(crate) use read_queue::QUEUE_SLOT_BYTES;
pub(super) use read_queue::{QueueLimits, ReadOp, ReadOutcome, ReadQueue};
