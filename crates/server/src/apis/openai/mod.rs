//! API of OpenAI.

pub(crate) mod chat;
pub(crate) mod chat_encoder;
mod completion_encoder;
pub(crate) mod completions;
pub(crate) mod embeddings;
pub(crate) mod logprobs;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod tools;
pub(crate) mod usage;
