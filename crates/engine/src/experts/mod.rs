//! Everything between the router's ids and filled slots.

mod cache;
mod foresight;
mod policy;
mod reader;
mod source;

pub(crate) use cache::{BOOKKEEPING, ExpertCache, Lookup, Pin, Tier, Uses};
pub use foresight::LookAhead;
pub(crate) use foresight::{Effort, Foresight, ROWS as FORESIGHT_ROWS};
pub use reader::{Completion, ReadCounters, ReadRequest, Reader, Urgency};
pub(crate) use reader::{PoolReader, STACK as READER_STACK};
pub(crate) use source::{ExpertSource, PartSource};
