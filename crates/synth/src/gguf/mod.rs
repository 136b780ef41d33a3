//! Synthetic GGUF files: the same random models with block types of ggml, under the names and with
//! the metadata of llama.cpp.

pub(crate) mod plan;
mod recipe;
mod writer;

pub use self::{recipe::GgufRecipe, writer::write_gguf};
