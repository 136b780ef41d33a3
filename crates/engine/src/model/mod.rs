//! Model floor: a checkpoint's config and tensor names become a
//! [`Blueprint`](blueprint::Blueprint).
//!
//! `arch` builds the blueprint, [`blueprint`] defines it, `packed_experts` points its experts to a
//! packed copy, and `identity` computes a model's id.
//!
//! Knows: one file per `model_type`, tensor names of the Hub, layer shapes. Must not know: devices,
//! slots, sessions.

pub(crate) mod arch;
pub mod blueprint;
pub(crate) mod identity;
pub(crate) mod packed_experts;

pub use arch::supported as supported_architectures;
