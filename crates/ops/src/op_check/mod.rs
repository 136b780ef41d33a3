//! Validation of ops, the same on every device.

mod mixers;
mod op_check;
mod positions;

pub use op_check::{HandleTable, stale};
pub use op_check::{MAX_SEGMENT_WIDTH, MAX_STREAMS, MAX_TOP_LOGITS};
