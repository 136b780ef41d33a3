//! Benchmarks of single ops in every weight format, on a device without a model.

mod activations;
mod cases;
mod formats;
mod kernel_bench;
mod mixers;
mod op_bench;
mod products;
mod report;

pub use kernel_bench::{KernelBench, KernelRequest, check, compare};
pub use report::{KernelBound, KernelFigure, KernelReport, Peaks};
