//! Encoding of ops: kernel choice, parameters and dispatches for each op.
//!
//! Ops know shapes, handles and kernels. They reach the card only through the parts in
//! [`OpContext`]: buffers from the store, dispatches through the recorder. They must not know which
//! ops are pending for fusion, when work is submitted, or the model that the caller runs.

pub(crate) mod attention;
mod context;
pub(crate) mod elementwise;
mod encode;
pub(crate) mod gemm;
pub(crate) mod gemv;
pub(crate) mod hand_over;
pub(crate) mod head_matmul;
mod latent_attention;
pub(crate) mod matmul;
pub(crate) mod moe;
pub(crate) mod norm;
mod operands;
pub(crate) mod qk_norm_rope;
pub(crate) mod recurrent;
pub(crate) mod segment_attention;
pub(crate) mod slot_copy;
pub(crate) mod state_io;
pub(crate) mod streams;
pub(crate) mod top_blocks;
pub(crate) mod top_logits;
pub(crate) mod top_positions;
pub(crate) mod topk;
mod weight_format;

pub(crate) use context::OpContext;
pub(crate) use encode::encode;
