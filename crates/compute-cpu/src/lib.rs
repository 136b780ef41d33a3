//! CPU device: SIMD kernels on a thread pool.
//!
//! Each op, or family of ops, is a file. An op moves its output buffer out of the `Host`,
//! distributes tiles of it over the thread pool, and returns the buffer.
//!
//! Results do not depend on the number of threads or on the other rows of an op, with one
//! exception: on the fast path, batches of more than four rows sum quantized products in another
//! order.

#![cfg_attr(docsrs, feature(doc_cfg))]

mod aligned_vec;
mod attention;
mod compress;
mod conv1d;
mod cpu;
mod delta_net;
mod device;
mod elementwise;
mod expert_runs;
mod experts;
mod head_gate;
mod head_matmul;
mod keyed_gate;
mod latent_attention;
mod logit_weights;
mod mamba2;
mod matmul;
mod norm;
mod pool;
mod rope;
mod segment_attention;
mod simd;
mod streams;
mod top_blocks;
mod top_logits;
mod top_positions;
mod topk;

pub use cpu::cpu_scratch_bytes;
pub use device::CpuDevice;
pub use logit_weights::{LogitTally, LogitWeights, logits_between, logits_extent};
pub use simd::{CpuPeak, Isa};
