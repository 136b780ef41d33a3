//! GPU memory by handle: activations, weights, expert slots, sequence states, scratch.
//!
//! Allocates buffers and resolves handles to buffers and offsets. Writes of new weights and tables
//! go through the queue. Must not know of encoders, passes, kernels or ops: work that must be
//! ordered among ops is recorded by the callers.

mod arenas;
mod buffer;
mod buffers;
pub(in crate::gpu) mod slots;
pub(in crate::gpu) mod states;
pub(super) mod store;
pub(in crate::gpu) mod weights;

pub(in crate::gpu) use self::buffers::OP_BUFFER;
pub(in crate::gpu) use buffer::{DeviceBuffer, write_padded};
pub(in crate::gpu) use store::Store;
