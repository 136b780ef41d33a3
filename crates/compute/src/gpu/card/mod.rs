//! GPU card: adapter, limits and opened device.

pub(in crate::gpu) mod adapter;
pub(in crate::gpu) mod native;
