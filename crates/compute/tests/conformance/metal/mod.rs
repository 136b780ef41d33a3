//! Metal emulation: a wgpu device that runs Metal's version of the kernels on the CPU.
//!
//! Kernels are translated to MSL with the options of wgpu's Metal backend, compiled as C++ with an
//! emulation of Metal's standard library, and run in simdgroups of 32.
//!
//! It tests on any machine what the kernels compute on a Mac, up to Apple's compiler. It detects
//! divergent barriers and simdgroup operations, reads of uninitialized threadgroup memory, reliance
//! on NaN and infinity, writes outside a buffer, and names that MSL lacks. Every kernel also passes
//! the translation to SPIR-V and HLSL. Timings have no meaning.

mod commands;
mod compile;
mod device;
mod fault_detection;
mod matrix_emulation;
mod translate;

pub(crate) use device::instance;
