//! Graphics card: adapter selection, opened device and queue, limits, driver errors.
//!
//! Knows wgpu and the drivers. Must not know of ops, kernels, handles or the
//! contents of buffers.

pub(in crate::gpu) mod adapter;
mod card;
pub(in crate::gpu) mod native;

pub(in crate::gpu) use card::{Card, DriverFault};
pub(in crate::gpu) use native::STORAGE;
