//! Parts that several families have.
//!
//! `body.rs` has embedding, head and layers; `gqa.rs`, `rope.rs`, `windows.rs`, `kda.rs`,
//! `mamba2.rs`, `softmax_moe.rs`, `grouped_moe.rs`, `expert_tensors.rs`, `hyper_connections.rs` and
//! `ngram_memory.rs` are named after their contents; `drafter.rs` has heads for multi-token
//! prediction. `config.rs` reads configs and checks their values, `scope.rs` looks tensors up by
//! name.

pub(crate) mod body;
pub(crate) mod config;
pub(crate) mod drafter;
pub(crate) mod expert_sizes;
pub(crate) mod expert_tensors;
pub(crate) mod gguf;
pub(crate) mod gqa;
pub(crate) mod grouped_moe;
pub(crate) mod hyper_connections;
pub(crate) mod kda;
pub(crate) mod mamba2;
pub(crate) mod ngram_memory;
pub(crate) mod rope;
pub(crate) mod scope;
pub(crate) mod softmax_moe;
pub(crate) mod windows;
