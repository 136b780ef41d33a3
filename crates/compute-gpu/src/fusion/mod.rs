//! Op fusion: ops that are pending to share a dispatch with the next op.
//!
//! A dispatch that depends on the one before costs some microseconds whatever its size, and a token
//! has hundreds. These sequences are fused:
//! - a norm and the products that read it;
//! - products of the same `x`; gate and up products and their GLU;
//! - a product and its addition to the residual stream;
//! - router top-k and the gate and up stage of its experts;
//! - the down projection of experts and their sum;
//! - an addition and the norm that follows;
//! - norms and RoPE of queries and keys, and the append to the KV cache;
//! - a convolution, the delta rule that reads its output, and the gated norm after it.
//!
//! Any other op flushes the pending one first. Fusion depends only on the sequence of ops.
//!
//! Knows which sequences can be fused and asks the ops whether shapes allow it. Must not know of
//! kernels, parameters or dispatches: encoding is in `ops`.

mod fuser;
mod heads;

pub(crate) use fuser::Fuser;
