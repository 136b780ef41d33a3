//! Encoding of ops: kernel choice, parameters and dispatches for each op.
//!
//! Ops know shapes, handles and kernels. They reach the card only through the parts in
//! [`OpContext`]: buffers from the store, dispatches through the recorder. They must not know which
//! ops are pending for fusion, when work is submitted, or the model that the caller runs.

pub(in crate::gpu) mod attention;
pub(in crate::gpu) mod elementwise;
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

use super::{
    card::Card,
    kernel::{self, Constants, Kernel, Target, kernel},
    params::{self, MatrixParams, ViewParams},
    recorder::{BufferRef, Recorder},
    store::{DeviceBuffer, Store},
};
use crate::{Error, KvFormat, Op};

/// Rows of an op, or sequences with a row each, up to which every row has the bits of that row
/// alone on the fast path. A step that checks a few drafted tokens relies on it.
const BATCH_INVARIANT_ROWS: usize = 4;

/// Parts of the device that the encoding of an op uses.
pub(in crate::gpu) struct OpContext<'a> {
    pub(in crate::gpu) card: &'a Card,
    pub(in crate::gpu) store: &'a mut Store,
    pub(in crate::gpu) recorder: &'a mut Recorder,
    /// Exact path: f32 activations, results independent of batching.
    pub(in crate::gpu) exact: bool,
}

impl OpContext<'_> {
    /// Features that kernels are written for.
    pub(in crate::gpu) const fn target(&self) -> Target {
        self.recorder.target()
    }

    /// Maximum number of threads of a workgroup.
    fn max_threads(&self) -> u32 {
        self.card.limits.max_compute_invocations_per_workgroup
    }

    /// Bytes of workgroup memory.
    fn workgroup_bytes(&self) -> u32 {
        self.card.limits.max_compute_workgroup_storage_size
    }

    /// `HALF` of kernels: 1 if the KV cache is f16, two elements per word.
    pub(in crate::gpu) fn kv_half(&self) -> u32 {
        (self.store.states.kv_format == KvFormat::F16).into()
    }

    /// Scratch of at least `len` f32 values, valid until the op is encoded.
    fn scratch(&mut self, len: usize) -> Result<DeviceBuffer, Error> {
        let (buffer, replaced) = self.store.scratch(len as u64)?;
        self.recorder.forget_bindings(replaced);
        Ok(buffer)
    }
}

/// Encodes an op that is not fused with another one. Returns the down projection of routed experts
/// where it may be fused with the sum that follows.
pub(in crate::gpu) fn encode(
    ctx: &mut OpContext<'_>,
    op: &Op<'_>,
) -> Result<Option<Box<gemv::DownProjection>>, Error> {
    match *op {
        Op::RmsNorm { .. } | Op::LayerNorm { .. } | Op::GatedRmsNorm { .. } => {
            norm::encode(ctx, op)?;
        }
        Op::Glu { .. }
        | Op::HeadGate { .. }
        | Op::Add { .. }
        | Op::Scale { .. }
        | Op::Silu { .. }
        | Op::GatherColumns { .. }
        | Op::SoftCap { .. }
        | Op::KeyedGate { .. }
        | Op::Combine { .. }
        | Op::Rope { .. } => elementwise::encode(ctx, op)?,
        Op::StreamWeights { .. } | Op::Collapse { .. } | Op::Expand { .. } => {
            streams::encode(ctx, op)?;
        }
        Op::Embed { .. } | Op::MatMul { .. } | Op::HeadMatMul { .. } => matmul::encode(ctx, op)?,
        Op::Attention { .. } => attention::encode(ctx, op)?,
        Op::LatentAttention { .. } => latent_attention::encode(ctx, op)?,
        Op::Append { k, v, spans } => attention::encode_append(ctx, &k, v.as_ref(), spans)?,
        Op::TopPositions { .. } => top_positions::encode(ctx, op)?,
        Op::TopBlocks { .. } => top_blocks::encode(ctx, op)?,
        Op::Experts { .. } => return moe::encode(ctx, op, None),
        Op::Conv1d { .. } => recurrent::encode_conv1d(ctx, op)?,
        Op::Compress { .. } => recurrent::encode_compress(ctx, op)?,
        Op::DeltaNet { .. } => recurrent::encode_delta_net(ctx, op, None)?,
        Op::Mamba2 { .. } => recurrent::encode_mamba2(ctx, op)?,
        Op::TopK { .. } => {
            if let Some(router) = topk::RouterTopK::from_op(op) {
                router.encode(ctx)?;
            }
        }
        Op::TopLogits { .. } => top_logits::encode(ctx, op)?,
    }
    Ok(None)
}
