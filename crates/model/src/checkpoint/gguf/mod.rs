//! GGUF: files of llama.cpp, read in place.
//!
//! Tensors get the names that architectures ask for, and metadata become the config and the text
//! files that the Hub has, so that everything above reads one kind of checkpoint.
//!
//! - `header.rs` reads a file's header, `metadata.rs` values of its keys, `types.rs` has numbers of
//!   types.
//! - `parts.rs` finds the files of a model, `names.rs` renames tensors.
//! - `keys.rs` reads keys of an architecture. The tables of the families make its config of them.
//! - `text.rs`, `pre_tokenizers.rs` and `scored_merges.rs` make tokenizers.

mod header;
pub(crate) mod keys;
mod metadata;
mod model;
pub(crate) mod names;
mod parts;
mod pre_tokenizers;
mod scored_merges;
mod text;
pub(crate) mod types;

pub(super) use self::parts::{GgufSet, cut_piece, is_gguf_file};
pub(super) use model::{GGUF, GgufModel, PAIRS_ADJACENT, VALUE_HEADS_DEALT, read_index};
pub use model::{GgufPart, GgufSummary};
