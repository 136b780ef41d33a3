//! Everything between the router's ids and filled slots.

mod cache;
mod policy;
mod prefetch;
mod reader;
mod source;
mod tier;

pub(crate) use cache::{BOOKKEEPING, ExpertCache, Lookup, Pin, Uses};
pub(crate) use policy::Policy;
pub use policy::PolicyKind;
pub use prefetch::PrefetchMode;
pub(crate) use prefetch::{Effort, Prefetcher, ROWS as PREFETCH_ROWS};
pub use reader::{
    Access, Completion, PageCache, ReadCounters, ReadOptions, ReadRequest, Reader, ReaderKind,
    Urgency,
};
pub(crate) use reader::{
    STACK as READER_STACK, direct_file, memory as reader_memory, open as open_reader, random_file,
};
pub(crate) use source::{ExpertSource, ShardLocation};
pub(crate) use tier::Tier;
