//! Everything between the router's ids and filled slots.

mod cache;
mod foresight;
mod policy;
mod reader;
mod source;
mod tier;

pub(crate) use cache::{BOOKKEEPING, ExpertCache, Lookup, Pin, Uses};
pub use foresight::LookAhead;
pub(crate) use foresight::{Effort, Foresight, ROWS as FORESIGHT_ROWS};
pub(crate) use policy::Policy;
pub use policy::PolicyKind;
pub use reader::{
    Access, Completion, PageCache, ReadCounters, ReadOptions, ReadRequest, Reader, ReaderKind, Urgency,
};
pub(crate) use reader::{
    STACK as READER_STACK, direct_file, memory as reader_memory, open as open_reader, random_file,
};
pub(crate) use source::{ExpertSource, PartSource};
pub(crate) use tier::Tier;
