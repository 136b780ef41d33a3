//! Everything between the router's ids and filled slots.

mod cache;
mod policy;
mod reader;
mod source;

pub(crate) use cache::{BOOKKEEPING, ExpertCache, Lookup, Pin, Tier, Uses};
pub use reader::{Access, Completion, ReadCounters, ReadOptions, ReadRequest, Reader, ReaderKind, Urgency};
pub(crate) use reader::{STACK as READER_STACK, memory as reader_memory, open as open_reader};
pub(crate) use source::{ExpertSource, PartSource};
