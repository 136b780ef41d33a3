//! GEMM dispatch: products of many rows on the fast path (prefill). Activations are f16, weights
//! are dequantized tile by tile, sums are f32.
//!
//! The bits of a row depend neither on the tile size nor on the other rows of the op: every sum is
//! in the order of the inputs. So the experts of a prefill chunk may come in one op or in several,
//! listed or routed.

pub(crate) mod few_rows;
pub(crate) mod gemm;

pub(crate) use gemm::pays;
pub(super) use gemm::{encode_experts, encode_matmul};
