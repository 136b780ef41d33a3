//! HTTP server of moeflux: the APIs of OpenAI, Anthropic and Ollama on a serving core.
//!
//! - [`ServerRouter`] answers requests without a socket: `server_router.rs`, `routes.rs`.
//! - [`Server`] listens and ends gracefully: `server.rs`. Connections have places, for which idle
//!   ones end: `connections.rs`, `connection_task.rs`, `watched_stream.rs`, `timed_stream.rs`. A
//!   request that is no valid HTTP gets an error in the shape of its API: `refusal.rs`.
//! - Hosts, origins and keys are checked before a body is read: `guard.rs`, `allowed.rs`. Each
//!   request has an id and a record: `access.rs`.
//! - A body (`body.rs`, `json/`) becomes an `Ask`, whatever its API (`ask.rs`, and the readers in
//!   `openai/`, `responses/`, `anthropic/`, `ollama/` and `native/`), and the tokens of its prompts
//!   (`prompt.rs`), which are submitted to the serving core of a model.
//! - Bodies are read off the threads that wait for clients, large ones in turns and within the
//!   memory of the plan: `work.rs`.
//! - One of the server's models is loaded at a time; requests have leases of it: `models/`.
//! - Events of the core become deltas, whatever the API (`answer.rs`, `answers.rs`). The encoder of
//!   an API makes events of them: a stream sends them, a whole answer is their fold (`respond.rs`).
//! - What of a request is not enforced is named in a header: `notes.rs`.
//! - Prompts with a text behind the answer: `fim.rs`.
//! - Embeddings take no part in this: `embeddings.rs`.
//! - Answers are remembered as they were generated, for the next turn: `turns.rs`; on disk
//!   `turn_folder.rs`, `turn_index.rs`.
//! - A prompt over the context is an error, or loses its oldest turns: `overflow.rs`.
//! - The web page, its live feed and the memory plan: `page/`.
//! - Small paths: `native/`, `metrics.rs` with `latency.rs`.
//!
//! Knows: HTTP, JSON, the APIs. Must not know: terminals, inference. Never logs a prompt or a key.

mod access;
mod allowed;
mod answer;
mod answer_grammar;
mod answer_head;
mod answered_turn;
mod answers;
mod anthropic;
mod app;
mod ask;
mod body;
mod connection_task;
mod connections;
mod counters;
mod delta;
mod embeddings;
mod error;
mod error_shape;
mod fim;
mod form;
mod generation;
mod guard;
mod guarded_body;
mod ids;
mod json;
mod latency;
mod line_limits;
mod metrics;
mod models;
mod native;
mod notes;
mod ollama;
mod openai;
mod overflow;
mod page;
mod plain_path;
mod prompt;
mod query;
mod refusal;
mod respond;
mod responses;
mod routes;
mod server;
mod server_error;
mod server_options;
mod server_router;
mod submit;
mod timed_stream;
mod timeouts;
mod token_ids;
mod turn_folder;
mod turn_index;
mod turns;
mod unix_time;
mod unsupported;
mod watched_stream;
mod with_model;
mod work;

pub use access::{RequestLog, RequestRecord};
pub use allowed::{AllowedHost, AllowedOrigin};
pub use guard::ApiKeys;
pub use models::{
    KeepAlive, LoadError, LoadedModel, ModelLoader, Models, ModelsError, OfferedModel, StartModel,
};
pub use overflow::Overflow;
pub use server::{Server, Stopper};
pub use server_error::ServerError;
pub use server_options::{ServerOptions, request_memory, reserved_bytes};
pub use server_router::ServerRouter;
pub use timeouts::Timeouts;
