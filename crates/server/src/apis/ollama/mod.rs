//! API of Ollama: answers. Models and version are in `models.rs`, paths that change models in
//! `manage.rs`, embeddings in `embed.rs`.

pub(crate) mod details;
pub(crate) mod embed;
mod encoder;
mod endpoints;
mod input;
pub(crate) mod manage;
pub(crate) mod models;

pub(crate) use endpoints::{chat, generate};
