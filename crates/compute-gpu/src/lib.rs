//! GPU device: every op as WGSL kernels, on Metal, Vulkan and DX12 through wgpu.
//!
//! `Device::run` records an op and returns before it is computed; ops run in order. A readback
//! waits for all of them. Small data of ops (tokens, RoPE tables) is copied to an upload buffer
//! that is written before the work that uses it.
//!
//! Parts, with the knowledge that each must not have:
//! - `card`: adapter, queue and limits; nothing of ops or memory contents.
//! - `store`: memory by handle; no encoders, kernels or ops.
//! - `recorder`: encoding, uploads, submission, readback; no ops or handles.
//! - `fusion`: which ops share a dispatch; no kernels or parameters.
//! - `ops`: encoding of each op through recorder and store; nothing pending or submitted.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod ahead;
mod bandwidth;
mod card;
mod device;
mod fusion;
mod kernel;
mod ops;
mod params;
mod pipeline_cache;
mod recorder;
mod store;
mod unroll;
mod wgsl_files;

pub use card::adapter::adapters;
pub use device::GpuDevice;
#[doc(hidden)]
pub use device::open_gpu_of;
