//! Serving floor: the decode loop of one answer and the scheduler of many.
//!
//! - Requests and the end of an answer: `request.rs`; the decode loop over token ids: `decode.rs`;
//!   drafts of an answer: `drafts.rs`. The choice of
//!   the next token: `choice.rs`; scripts in place of it: `forced_tokens.rs`. Both and drafts
//!   together: `answer.rs`.
//! - Embeddings of prompts: `embedding.rs`.
//! - Answers in text, on top of it: `generate.rs`. Needs the feature `text`.
//! - Many answers that share steps: `scheduler.rs`.
//! - The thread that serves requests, and handles to it: `core.rs` and `worker.rs`. States that
//!   outlive the process: `saver.rs`.
//!
//! Knows: requests, sampling, stop conditions, how sequences share steps. Must not know: HTTP,
//! async runtimes, terminals.

mod answer;
mod choice;
pub(crate) mod core;
mod decode;
mod drafts;
mod embedding;
mod forced_tokens;
#[cfg(feature = "text")]
pub(crate) mod generate;
mod prefix_search;
pub(crate) mod request;
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
