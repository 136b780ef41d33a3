//! Handlers of the paths: each API reads its requests and encodes its answers. No API is
//! translated into another one.
//!
//! - `openai/` has chat, completions, embeddings and models, `responses/` the responses, which
//!   later requests continue. `anthropic/` has messages, `ollama/` and `native/` have the paths of
//!   Ollama and of llama.cpp's server.
//! - `page/` is the web page, its live feed and the memory plan. `metrics.rs` has statistics.

pub(crate) mod anthropic;
pub(crate) mod metrics;
pub(crate) mod native;
pub(crate) mod ollama;
pub(crate) mod openai;
pub(crate) mod page;
pub(crate) mod responses;
