//! Model floor: a checkpoint's config and tensor names become a
//! [`Blueprint`](blueprint::Blueprint).
//!
//! `families` builds the blueprint from `parts`, [`blueprint`] defines it, `opening` opens
//! checkpoints, `packed_experts` points experts to a packed copy, `identity` computes a model's id,
//! `ngram` hashes tokens to rows of a table, `blank_weights` finds weights that were never written,
//! `config_notes` tensors that the config denies, and `expected_reads` announces the dense weights
//! of files that are still arriving.
//!
//! Knows: one file per `model_type`, tensor names of the Hub, layer shapes. Must not know: devices,
//! slots, sessions.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod blank_weights;
pub mod blueprint;
pub mod checkpoint;
mod config_notes;
mod expected_reads;
mod families;
mod identity;
pub mod ngram;
mod opening;
mod packed_experts;
mod parts;
#[doc(hidden)]
pub mod seam;

pub use families::supported as supported_architectures;
