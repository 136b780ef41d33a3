//! Serving floor: the decode loop of one answer and the scheduler of many.
//!
//! - Requests, the end of an answer, and the decode loop over token ids: `decode.rs`. The choice of
//!   the next token: `choice.rs`; scripts in place of it: `forced_tokens.rs`.
//! - Embeddings of prompts: `embedding.rs`.
//! - Answers in text, on top of it: `generate.rs`. Needs the feature `text`.
//! - Many answers that share steps: `scheduler.rs`.
//! - The thread that serves requests, and handles to it: `core.rs` and `worker.rs`. States that
//!   outlive the process: `saver.rs`.
//!
//! Knows: requests, sampling, stop conditions, how sequences share steps. Must not know: HTTP,
//! async runtimes, terminals.

pub(crate) mod choice;
pub(crate) mod core;
pub(crate) mod decode;
mod embedding;
mod forced_tokens;
#[cfg(feature = "text")]
pub(crate) mod generate;
mod prefix_search;
mod saver;
pub(crate) mod scheduler;
mod worker;

pub use core::{
    EventSink, Rejected, RequestEvent, RequestHandle, ServingCore, ServingOptions, ServingStats,
    SinkState,
};
pub use decode::Tokens;
pub use embedding::Pooling;
pub use forced_tokens::ForcedTokens;
#[cfg(feature = "text")]
pub use generate::Phase;
pub use scheduler::{Event, RequestId, Scheduler, SchedulerOptions, SubmitError};
