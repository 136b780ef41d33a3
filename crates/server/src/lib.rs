//! HTTP server of moeflux: the chat completions API of OpenAI on a serving core.
//!
//! - [`Server`] listens, limits connections and ends gracefully: `server.rs`.
//! - Hosts, origins and keys are checked before a body is read: `guard.rs`.
//! - A body becomes a `ChatAsk` (`ask.rs`, `messages.rs`, `json.rs`) and the tokens of a prompt
//!   (`prompt.rs`), which `routes.rs` submits to the serving core.
//! - Events of the core become deltas, whatever the API (`answer.rs`). An encoder makes chunks of
//!   them (`chat.rs`): a stream sends them (`stream.rs`), a whole answer is their fold.
//!
//! Knows: HTTP, JSON, OpenAI's API. Must not know: terminals, inference. Never logs a prompt or a
//! key.

mod answer;
mod ask;
mod chat;
mod error;
mod guard;
mod json;
mod messages;
mod prompt;
mod routes;
mod server;
mod stream;

pub use guard::ApiKeys;
pub use server::{Server, ServerError, ServerOptions, Stopper};
