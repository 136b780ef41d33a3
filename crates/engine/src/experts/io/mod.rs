//! Expert I/O: requests go in, completions come out, in any order.
//!
//! The read scheduler in `queue` splits requests into reads and orders them; `threads` or `uring`
//! executes them; `storage` holds the files of the model and of its mirrors.

mod calibrate;
mod file;
mod load_balance;
mod mirrors;
mod open;
mod options;
mod queue;
mod queue_reader;
mod reader;
mod storage;
mod threads;
mod transfer;
#[cfg(all(target_os = "linux", feature = "io-uring"))]
mod uring;
mod waker;

pub(crate) use file::{open_direct, open_random};
pub(crate) use open::{open, open_rows};
pub(crate) use options::reader_memory;
pub use options::{Access, PageCache, ReadOptions, ReaderKind};
pub(crate) use queue::QUEUE_SLOT_BYTES;
pub use reader::{Completion, ReadRequest, Reader, Urgency};
