//! GPU memory by handle: activations, weights, expert slots, sequence states, scratch.
//!
//! Allocates buffers and resolves handles to buffers and offsets. Writes of new weights and tables
//! go through the queue. Must not know of encoders, passes, kernels or ops: work that must be
//! ordered among ops is recorded by the callers.

mod arenas;
mod buffer;
mod buffers;
pub(crate) mod slots;
pub(crate) mod states;
pub(super) mod store;
pub(crate) mod weights;

pub(crate) use self::buffers::OP_BUFFER;
pub(crate) use buffer::{DeviceBuffer, write_padded};
pub(crate) use store::{ExchangeMemory, Store};
