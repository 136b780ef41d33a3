//! Handles to models for other languages, shared by the interfaces for Python and C.
//!
//! [`Model`] is a model with its serving core, which [`Model::close`] ends whoever holds handles.
//! [`Request`] is an answer on its way, [`Session`] a sequence on a separate thread, so that the
//! caller can wait for signals meanwhile. [`Fault`] is an error with its kind. Options and messages
//! are JSON.
//!
//! Knows: the library and the Hub. Must not know: Python, C, terminals.

mod fault;
mod host_process;
mod locks;
mod model;
mod open_options;
mod request;
mod request_options;
mod session;
mod session_thread;
mod shared_model;
mod tokenizer;
mod wait;

pub use fault::{Fault, FaultDetails, Kind};
pub use model::{Model, PlanSummary, pull};
pub use moeflux::runtime::parse_size;
pub use open_options::OpenOptions;
pub use request::{Answer, Delta, DeltaSender, NextPart, Request, TokenLogprob, Usage, Wake};
pub use request_options::{Form, RequestOptions};
pub use session::{Mark, Session, TokenScores};
pub use tokenizer::Tokenizer;
pub use wait::{Cancel, Waiting, Work};
