//! Encoding of ops as kernel dispatches.

pub(in crate::gpu) mod attention;
pub(in crate::gpu) mod elementwise;
pub(in crate::gpu) mod gemm;
pub(in crate::gpu) mod gemv;
pub(in crate::gpu) mod head_matmul;
pub(in crate::gpu) mod latent_attention;
pub(in crate::gpu) mod matmul;
pub(in crate::gpu) mod moe;
pub(in crate::gpu) mod norm;
pub(in crate::gpu) mod qk_norm_rope;
pub(in crate::gpu) mod recurrent;
pub(in crate::gpu) mod top_logits;
pub(in crate::gpu) mod top_positions;
pub(in crate::gpu) mod topk;
pub(in crate::gpu) mod weight_format;
