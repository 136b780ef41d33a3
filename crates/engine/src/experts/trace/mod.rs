//! Routing traces: files with the experts that each step of a run needed.
//!
//! All integers are little-endian. A file is
//!
//! ```text
//! 16 bytes  "moeflux routing\n"
//! u32       version, 1
//! u32       bytes of the header
//! ...       the header: one JSON object, a TraceHeader
//! ...       the steps, one after another, to the end of the file
//! ```
//!
//! and a step is
//!
//! ```text
//! u32       rows: 1 in decode, more in prefill
//! then for each layer of the header, in its order:
//! u16       n: number of experts that its rows chose
//! n * u16   their ids, ascending
//! ```
//!
//! A step is written when it has finished. If the process is killed, the file ends with the last
//! finished step, or within the next step, which readers ignore.

mod recorder;
pub(crate) mod trace;

pub(crate) use recorder::TraceRecorder;
pub use trace::{Trace, TraceHeader, TraceLayer};
