//! Model floor: a checkpoint's config and tensor names become a [`Blueprint`](blueprint::Blueprint).
//!
//! Knows: one file per `model_type` in [`arch`], tensor names of the Hub, layer shapes, and where the
//! experts of a packed copy are. Must not know: devices, slots, sessions, or which kind of source the
//! tensors come from beyond what it answers.

pub(crate) mod arch;
pub(crate) mod blueprint;
pub(crate) mod identity;
pub(crate) mod packed_experts;
