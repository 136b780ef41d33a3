//! Connections, HTTP and JSON: the way of a request before its fields are read.
//!
//! - Connections have places, for which idle ones end: `connections.rs`, `connection_task.rs`,
//!   `watched_stream.rs`, `timed_stream.rs`. A request that is no valid HTTP gets an error in the
//!   shape of its API: `refusal.rs`.
//! - Hosts, origins and keys are checked before a body is read: `guard.rs`, `allowed.rs`. Each
//!   request has an id and a record: `access.rs`.
//! - Bodies are received within limits, and read off the threads that wait for clients, large ones
//!   in turns and within the memory of the plan: `body.rs`, `json/`, `work.rs`. Images among their
//!   fields cost less than texts: `image_fields.rs`, `base64.rs`.
//! - Errors of requests are in `error.rs`, their shapes in the APIs in `error_shape.rs`. The header
//!   of `notes.rs` names the parts of a request that are not enforced.
//!
//! Knows: HTTP, JSON, shapes of errors. Must not know: models, prompts, answers. The paths are a
//! `Router` to it.

pub(crate) mod access;
pub(crate) mod allowed;
pub(crate) mod base64;
pub(crate) mod body;
pub(crate) mod connection_task;
pub(crate) mod connections;
pub(crate) mod error;
pub(crate) mod error_shape;
pub(crate) mod guard;
mod guarded_body;
pub(crate) mod ids;
mod image_fields;
pub(crate) mod json;
pub(crate) mod notes;
pub(crate) mod plain_path;
pub(crate) mod query;
pub(crate) mod refusal;
pub(crate) mod server_error;
mod timed_stream;
pub(crate) mod timeouts;
pub(crate) mod unix_time;
mod watched_stream;
pub(crate) mod work;
