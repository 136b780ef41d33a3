//! Commands of Vulkan in parts, between which card and host wait for each other.
//!
//! A step that hands work to the host is one submission of many parts: each waits for a value of
//! one timeline semaphore, which the host signals, or signals a value of another one, which the
//! host polls. wgpu has no such parts. An encoder and a submission of wgpu for each part cost the
//! host 14 and 10 us, and drivers that queue on a thread (Mesa) block in a submission after one
//! that waits for the host, as wgpu chains submissions by binary semaphores.
//!
//! So some functions of the device, as wgpu calls them, are replaced. While wgpu encodes the pass
//! of such a step, they record its dispatches to command buffers of this module, a new one after
//! each end of a part. When wgpu submits the step, they submit all parts in one call of the driver.
//! Everything else, resources and their lifetimes above all, stays with wgpu.

mod driver;
mod recording;
mod submit_info;
mod timeline;

pub(super) use driver::with_replaced_functions;
pub(crate) use timeline::{HostTimeline, PartEncoder, StepParts, TimelineHandle};
