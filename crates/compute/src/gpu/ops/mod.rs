//! Encoding of ops: kernel choice, parameters and dispatches for each op.
//!
//! Ops know shapes, handles and kernels. They reach the card only through the parts in
//! [`OpContext`]: buffers from the store, dispatches through the recorder. They must not know which
//! ops are pending for fusion, when work is submitted, or the model that the caller runs.

pub(in crate::gpu) mod attention;
mod context;
pub(in crate::gpu) mod elementwise;
mod encode;
pub(in crate::gpu) mod gemm;
pub(in crate::gpu) mod gemv;
pub(in crate::gpu) mod head_matmul;
mod latent_attention;
pub(in crate::gpu) mod matmul;
pub(in crate::gpu) mod moe;
pub(in crate::gpu) mod norm;
mod operands;
pub(in crate::gpu) mod qk_norm_rope;
pub(in crate::gpu) mod recurrent;
pub(in crate::gpu) mod slot_copy;
pub(in crate::gpu) mod state_io;
pub(in crate::gpu) mod streams;
pub(in crate::gpu) mod top_blocks;
pub(in crate::gpu) mod top_logits;
pub(in crate::gpu) mod top_positions;
pub(in crate::gpu) mod topk;
mod weight_format;

pub(in crate::gpu) use context::OpContext;
pub(in crate::gpu) use encode::encode;
