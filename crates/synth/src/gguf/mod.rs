//! Synthetic GGUF files: the same random models with block types of ggml, under the names and with
//! the metadata of llama.cpp.

mod divisors;
mod hybrid_keys;
mod metadata;
pub(crate) mod plan;
mod recipe;
mod writer;

pub(super) use self::metadata::KeyValue;
pub use self::{recipe::GgufRecipe, writer::write_gguf};
