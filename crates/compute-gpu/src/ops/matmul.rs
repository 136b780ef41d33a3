//! Products with resident weights: choice of GEMM, GEMV or the general kernel; embedding lookup.

use moeflux_ops::{Error, Op, View, Weight};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{EmbedParams, GemvAnyParams, MatrixParams, ViewParams},
    },
    context::OpContext,
    gemm,
    gemv::{self, GemvProduct, MatMulOperands},
    head_matmul,
    operands::WeightShards,
};

pub(crate) static EMBED: Kernel =
    kernel!("embed", "elementwise/embed", EmbedParams, [Write, Read, Read]);
pub(crate) static GEMV_ANY: Kernel =
    kernel!("gemv_any", "gemv/gemv_any", GemvAnyParams, [Write, Read]);
const THREADS: u32 = 256;

/// Token ids of a lookup.
enum LookupIds<'a> {
    Given(&'a [u32]),
    Chosen(View),
}

/// Encodes [`Op::Embed`] or [`Op::EmbedChosen`].
fn encode_embed(
    ctx: &mut OpContext<'_>,
    table: Weight,
    ids: LookupIds<'_>,
    out: View,
) -> Result<(), Error> {
    let (first_id, id_stride) = match ids {
        LookupIds::Given(tokens) => {
            ctx.recorder.reserve_upload(tokens.len())?;
            let offset = ctx.recorder.upload(tokens.iter().copied());
            ctx.recorder.note_lookup(offset, tokens);
            (offset, 1)
        }
        LookupIds::Chosen(ids) => (ctx.store.view_offset(&ids)?, ids.row_stride as u32),
    };
    let WeightShards { shape, shards } = WeightShards::new(ctx.store, table)?;
    let constants = Constants::new(&[
        ("WG", THREADS),
        ("COLS", shape.cols as u32),
        ("HEADS", out.heads as u32),
        ("CHOSEN", matches!(ids, LookupIds::Chosen(_)).into()),
    ])
    .format(shape.format);
    let groups = (out.rows * out.heads * shape.cols).div_ceil(THREADS as usize);
    let upload = ctx.recorder.upload_buffer().clone();
    for (arena, shard) in shards {
        let params = EmbedParams {
            out: ViewParams::new(ctx.store, &out)?,
            m: MatrixParams::new(shard.planes, shape),
            first_id,
            id_stride,
            count: out.rows as u32,
            last_id: shape.rows as u32 - 1,
            first_row: shard.first_row as u32,
            rows: shard.rows as u32,
            // The shader compiler must not know it.
            zero: 0,
        };
        let buffers = [ctx.store.activations(), &arena, &upload];
        ctx.recorder.dispatch(&EMBED, &constants, &buffers, &params, groups)?;
    }
    Ok(())
}

/// Encodes [`Op::MatMul`] with the general kernel.
fn encode_general(ctx: &mut OpContext<'_>, operands: MatMulOperands) -> Result<(), Error> {
    let MatMulOperands { x, weight, bias, out, .. } = operands;
    let WeightShards { shape, shards } = WeightShards::new(ctx.store, weight)?;
    for (arena, shard) in shards {
        let bias = bias.map(|b| ctx.store.buffer_offset(b)).transpose()?;
        let out = out.columns(shard.first_row, shard.rows);
        let params = GemvAnyParams {
            x: ViewParams::new(ctx.store, &x)?,
            out: ViewParams::new(ctx.store, &out)?,
            m: MatrixParams::new(shard.planes, shape),
            first_row: 0,
            outputs: shard.rows as u32,
            cols: shape.cols as u32,
            rows: x.rows as u32,
            heads: 1,
            head_row_stride: 0,
            bias: bias.map_or(0, |b| b + shard.first_row as u32),
        };
        let constants = Constants::new(&[("WG", THREADS), ("BIASED", bias.is_some().into())]);
        let constants = constants.format(shape.format);
        let blocks = shard.rows.div_ceil((THREADS / ctx.target().team) as usize);
        let buffers = [ctx.store.activations(), &arena];
        ctx.recorder.dispatch(&GEMV_ANY, &constants, &buffers, &params, x.rows * blocks)?;
    }
    Ok(())
}

/// Product of few rows of an [`Op::MatMul`]; `None` if it has too many or an unsupported shape.
pub(crate) fn gemv_product(ctx: &OpContext<'_>, op: &Op<'_>) -> Result<Option<GemvProduct>, Error> {
    match *op {
        Op::MatMul { x, weight, bias, exact, out, .. } => {
            let exact = exact || ctx.exact;
            let product = GemvProduct::new(ctx, MatMulOperands { x, weight, bias, exact, out })?;
            Ok(product.filter(|product| !product.is_gemm(ctx)))
        }
        _ => Ok(None),
    }
}

/// Encodes [`Op::Embed`], [`Op::EmbedChosen`], [`Op::MatMul`] or [`Op::HeadMatMul`].
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    match *op {
        Op::Embed { table, tokens, out } => encode_embed(ctx, table, LookupIds::Given(tokens), out),
        Op::EmbedChosen { table, ids, out } => {
            encode_embed(ctx, table, LookupIds::Chosen(ids), out)
        }
        Op::MatMul { x, weight, bias, exact, out, .. } => {
            let exact = exact || ctx.exact;
            let operands = MatMulOperands { x, weight, bias, exact, out };
            if (!exact && gemm::encode_matmul(ctx, operands)?)
                || gemv::encode_matmul(ctx, operands)?
            {
                return Ok(());
            }
            encode_general(ctx, operands)
        }
        Op::HeadMatMul { x, matrix, out } => head_matmul::encode(ctx, x, matrix, out),
        _ => Ok(()),
    }
}
