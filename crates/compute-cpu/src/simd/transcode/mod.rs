//! Transcoding of ggml's block types to one form: a byte per quant, and a scale and a bias in f32
//! per group of 16 or 32 weights, `w = scale * q + bias`.
//!
//! Every type fits: small integers, entries of codebooks times signs, table values. So one GEMV and
//! one GEMM with int8 activations serve all types. Rows are transcoded a few at a time, to a buffer
//! in L1. A type is a struct with the bytes of its block, and operations on eight bytes at a time
//! that the compiler vectorizes.

mod block;
mod grid_blocks;
mod rows;
mod small_blocks;
mod super_blocks;

pub(super) use rows::{BlockRows, CHUNK, TranscodedRoom, TranscodedRows, range_bits, transcode};
