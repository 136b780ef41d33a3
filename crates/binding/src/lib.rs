//! Handles to models for other languages, shared by the interfaces for Python and C.
//!
//! [`Model`] is a model with its serving core, which [`Model::close`] ends whoever holds handles.
//! [`Request`] is an answer on its way, [`Session`] a sequence on a separate thread, so that the
//! caller can wait for signals meanwhile. [`Fault`] is an error with its kind. Options and messages
//! are JSON.
//!
//! Knows: the library and the Hub. Must not know: Python, C, terminals.

mod description;
mod fault;
mod host_process;
mod locks;
mod log;
mod model;
mod open_options;
mod openai;
mod request;
mod request_options;
mod session;
mod session_answer;
mod session_thread;
mod shared_model;
mod tokenizer;
mod wait;

pub use description::{Description, PlanSummary};
pub use fault::{Fault, FaultDetails, Kind};
pub use host_process::HostProcess;
pub use log::{LogReceiver, log_to};
pub use model::{Model, pull};
pub use moeflux::runtime::parse_size;
pub use open_options::OpenOptions;
pub use openai::messages;
pub use request::{Answer, Delta, NextPart, Request, RequestStopper, TokenLogprob, Usage, Wake};
pub use request_options::{Form, RequestOptions, ToolChoice};
pub use session::{Mark, Session, TokenScores};
pub use session_answer::SessionAnswer;
pub use tokenizer::{Tokenizer, chat_tokens, decode, encode, token_bytes};
pub use wait::{Cancel, Waiting, Work};
