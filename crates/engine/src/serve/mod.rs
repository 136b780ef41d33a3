//! Serving floor: the decode loop of one response and the scheduler of many.
//!
//! Knows: requests, sampling, stop conditions, how sequences share steps. Must not know: HTTP,
//! async runtimes, terminals.

pub(crate) mod generate;
pub(crate) mod scheduler;
