//! Graphics card: adapter selection, opened device and queue, limits, driver errors.
//!
//! Knows wgpu and the drivers. Must not know of ops, kernels, handles or the
//! contents of buffers.

pub(crate) mod adapter;
mod card;
pub(crate) mod native;

pub(crate) use card::{Card, DriverFault};
pub(crate) use native::STORAGE;
