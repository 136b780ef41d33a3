//! HTTP server of moeflux: the APIs of OpenAI, Anthropic and Ollama on a serving core.
//!
//! - [`Server`] listens and ends gracefully: `server.rs`, with the options of `server_options.rs`.
//! - [`ServerRouter`] answers requests without a socket. `server_router.rs` builds it from models
//!   and options; `routes.rs` has the paths, and the checks and records of all requests.
//! - `apis/` has the handlers of the paths: readers of requests and encoders of answers.
//! - `requests/` is the same for all APIs: from a request to the serving core of a model, and from
//!   the core's events to a response.
//! - `transport/` has connections, HTTP and JSON.
//!
//! Each of the three folders imports only from the ones after it.
//!
//! Knows: HTTP, JSON, the APIs. Must not know: terminals, inference. Never logs a prompt or a key.

mod apis;
mod requests;
mod routes;
mod server;
mod server_options;
mod server_router;
mod transport;

pub use requests::{
    image_fetches::{IMAGE_FETCH_BYTES, ImageFetcher},
    models::{
        KeepAlive, LoadError, LoadedModel, ModelLoader, Models, ModelsError, OfferedModel,
        StartModel,
    },
    overflow::Overflow,
};
pub use server::{Server, Stopper};
pub use server_options::{ServerOptions, request_memory, reserved_bytes};
pub use server_router::ServerRouter;
pub use transport::{
    access::{RequestLog, RequestRecord},
    allowed::{AllowedHost, AllowedOrigin},
    guard::ApiKeys,
    server_error::ServerError,
    timeouts::Timeouts,
};
