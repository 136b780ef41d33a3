//! Graphics card: adapter selection, opened device and queue, limits, driver errors, steps in
//! parts.
//!
//! Knows wgpu and the drivers. Must not know of ops, kernels, handles or the
//! contents of buffers.

pub(crate) mod adapter;
mod card;
pub(crate) mod native;
#[cfg(target_vendor = "apple")]
mod no_parts;
mod part_end;
#[cfg(not(target_vendor = "apple"))]
mod parts;

pub(crate) use card::{Card, DriverFault};
pub(crate) use native::{HostExchange, STORAGE, device_buffer};
#[cfg(target_vendor = "apple")]
pub(crate) use no_parts::{
    NoParts as HostTimeline, NoParts as PartEncoder, NoParts as StepParts,
    NoParts as TimelineHandle,
};
pub(crate) use part_end::{PartEnd, PartEndKind, TimelineValues};
#[cfg(not(target_vendor = "apple"))]
pub(crate) use parts::{HostTimeline, PartEncoder, StepParts, TimelineHandle};
