//! Latent attention (MLA) in absorbed form: queries are projected to latents, attend to them, and
//! the results are projected to values.
//!
//! Keys and values of heads are never computed. It is the same sum in another order, and reads only
//! latents.

use moeflux_ops::{Error, Op, RopePairs, RopePositions, View};

use super::{
    attention::{
        self, TiledKernel,
        rows::{SpanRows, encode_rows},
    },
    context::OpContext,
    elementwise, head_matmul,
};
use crate::store::OP_BUFFER;

/// f32 values of intermediate results for all rows. Rows that need more are encoded in turn.
const MAX_INTERMEDIATE: usize = 4 << 20;

/// Encodes [`Op::LatentAttention`].
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::LatentAttention { q, k, keys, values, scale, spans, out } = op else { return Ok(()) };
    let nope = keys.inputs_outputs(ctx.store.matrix(keys.weight)?.shape.cols).1;
    let (rope, heads) = (q.width - nope, q.heads);
    let latent = k.width - rope;
    let row_len = heads * (k.width + latent);
    let max_rows = (MAX_INTERMEDIATE / row_len).max(1);
    reserve_op_buffer(ctx, max_rows.min(q.rows) * row_len)?;
    let spans = SpanRows::all(spans);
    attention::append_kv(ctx, &spans, &k, None)?;
    let all = SpanRows::rows_of(&spans);
    for first_row in all.clone().step_by(max_rows) {
        let rows = max_rows.min(all.end - first_row);
        let slice = |view: View| view.slice(first_row, rows);
        let queries = op_view(0, rows, heads * k.width).split(heads);
        let latents = op_view(rows * heads * k.width, rows, heads * latent).split(heads);
        let query_latents = queries.slice_width(0, latent);
        head_matmul::encode(ctx, slice(q).slice_width(0, nope), keys.transpose(), query_latents)?;
        if rope > 0 {
            copy(ctx, slice(q).slice_width(nope, rope), queries.slice_width(latent, rope))?;
        }
        let attend = Op::Attention {
            q: queries,
            k: slice(k),
            v: None,
            gate: None,
            scale,
            window: None,
            sinks: None,
            positions: None,
            spans: &[],
            out: latents,
        };
        let mut spans = SpanRows::within(&spans, &(first_row..first_row + rows));
        spans.iter_mut().for_each(|rows| rows.first_row -= first_row);
        match TiledKernel::for_op(ctx, &attend).filter(|_| !ctx.exact) {
            Some(kernel) => kernel.encode(ctx, &attend, &spans)?,
            None => encode_rows(ctx, &attend, &spans, None)?,
        }
        head_matmul::encode(ctx, latents, values, slice(out))?;
    }
    Ok(())
}

/// Copies a view: RoPE without pairs.
fn copy(ctx: &mut OpContext<'_>, x: View, out: View) -> Result<(), Error> {
    let (pairs, positions) = (RopePairs::Halves, RopePositions::Spans(&[]));
    elementwise::encode(ctx, &Op::Rope { x, frequencies: &[], pairs, scale: 1.0, positions, out })
}

/// Reserves [`OP_BUFFER`] for `len` f32 values.
fn reserve_op_buffer(ctx: &mut OpContext<'_>, len: usize) -> Result<(), Error> {
    if ctx.store.op_buffer_len() < len {
        ctx.recorder.submit();
        let replaced = ctx.store.grow_op_buffer(len)?;
        ctx.recorder.forget_bindings(replaced);
    }
    Ok(())
}

/// Dense view of [`OP_BUFFER`].
const fn op_view(offset: usize, rows: usize, width: usize) -> View {
    View { offset, ..View::rows(OP_BUFFER, rows, width) }
}
