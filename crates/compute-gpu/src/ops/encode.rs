//! The encoder of each op.

use moeflux_ops::{Error, Op};

use super::{
    attention, context::OpContext, elementwise, gemv, latent_attention, matmul, moe, norm,
    recurrent, segment_attention, streams, top_blocks, top_logits, top_positions, topk,
};

/// Encodes an op that is not fused with another one. Returns the down projection of routed experts
/// where it may be fused with the sum that follows.
pub(crate) fn encode(
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
        | Op::ScatterRows { .. }
        | Op::Rope { .. } => elementwise::encode(ctx, op)?,
        Op::StreamWeights { .. } | Op::Collapse { .. } | Op::Expand { .. } => {
            streams::encode(ctx, op)?;
        }
        Op::Embed { .. } | Op::EmbedChosen { .. } | Op::MatMul { .. } | Op::HeadMatMul { .. } => {
            matmul::encode(ctx, op)?
        }
        Op::Attention { .. } => attention::encode(ctx, op)?,
        Op::LatentAttention { .. } => latent_attention::encode(ctx, op)?,
        Op::SegmentAttention { .. } => segment_attention::encode(ctx, op)?,
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
