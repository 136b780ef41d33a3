//! A GPU as Metal has it, on the CPU: a device behind wgpu's interface whose kernels are translated to MSL the way wgpu
//! does it for Metal, compiled as C++ with a stand-in for Metal's standard library, and run in simdgroups of 32.
//!
//! It proves on any machine what the kernels compute on a Mac, up to Apple's compiler. It finds barriers and operations of
//! simdgroups that not all threads reach together, reads of workgroup memory that was never written, reliance on
//! NaN and infinity, writes next to a buffer, names that Metal's language does not have in this form; every kernel passes
//! the translations for Vulkan and DX12 too. It says nothing of speed.

mod commands;
mod compile;
mod device;
mod finds;
mod matrices;
mod translate;

pub(crate) use device::instance;
