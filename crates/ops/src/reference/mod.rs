//! Reference device: a naive implementation of every op, which serves as its specification.
//!
//! Inputs are copied, sums are f64, and nothing is fused or optimized. Other devices are compared
//! with this one, op by op.

mod activations;
mod attention;
mod device;
mod router;
mod streams;

pub use device::ReferenceDevice;
