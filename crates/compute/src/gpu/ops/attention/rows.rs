//! Attention of one row of each of several sequences in one dispatch: decode steps of a batch.

use super::{
    DecodeKernel, DecodeKv, KvSplits, MAX_SCRATCH, MERGE_SPLITS_OF_ROWS, NONE, NewKv, SpanRows,
    SplitPolicy, bind_kv, merge_splits, reduce_position,
};
use crate::{
    Error, Op, Span, View,
    gpu::ops::{BATCH_INVARIANT_ROWS, DeviceBuffer, OpContext, qk_norm_rope::RopeTable},
};

/// Workgroups on the fast path for more rows than [`BATCH_INVARIANT_ROWS`], which are split as if
/// each were alone.
const MANY_ROWS_GRID: usize = 264;

/// Words of a row in the table of `attention/kv_of_rows.wgsl`.
const ROW_WORDS: usize = 7;

/// Whether all spans of an op can share a dispatch, and the upload buffer has room for it.
pub(in crate::gpu) fn accepts_rows(ctx: &OpContext<'_>, op: &Op<'_>, spans: &[Span]) -> bool {
    spans.len() > 1
        && ctx.recorder.has_upload_room(spans.len() * ROW_WORDS)
        && spans.iter().all(|span| DecodeKernel::accepts_new_kv(ctx, op, span))
}

/// Encodes attention of consecutive rows, each of another sequence. Their keys and values, of all
/// rows of the op, are appended to the KV caches.
pub(in crate::gpu) fn encode_rows(
    ctx: &mut OpContext<'_>,
    op: &Op<'_>,
    rows: &[SpanRows],
    new_kv: &NewKv,
) -> Result<(), Error> {
    let &Op::Attention { q, gate, window, sinks, out, .. } = op else { return Ok(()) };
    let Some(decode) = DecodeKernel::for_op(ctx, op) else { return Ok(()) };
    let mut policy = SplitPolicy::new(ctx.exact, window.unwrap_or(usize::MAX), decode.tiles);
    if rows.len() > BATCH_INVARIANT_ROWS && !ctx.exact {
        // A card computes few workgroups of this kernel at once.
        let splits = MANY_ROWS_GRID / (decode.tiles * rows.len());
        policy.max_splits = splits.clamp(1, policy.max_splits);
    }
    let sinks = sinks.map(|sinks| ctx.store.buffer_offset(sinks)).transpose()?.unwrap_or(NONE);
    let count = rows.iter().map(|rows| policy.count(rows.span.position)).max().unwrap_or(1);
    let row_scratch = if count == 1 { 0 } else { q.heads * count * (out.width + 2) };
    let max_rows = (MAX_SCRATCH / row_scratch.max(1)).max(1);
    ctx.recorder.reserve_upload(rows.len() * ROW_WORDS)?;
    let mut rest = rows;
    while let Some(first) = rest.first() {
        let arena = arena_of(ctx, first)?;
        let shares = |rows: &&SpanRows| arena_of(ctx, rows).is_ok_and(|other| other.id == arena.id);
        let len = rest.iter().take(max_rows).take_while(shares).count().max(1);
        let (rows, others) = rest.split_at(len);
        rest = others;
        let mut table = Vec::with_capacity(len * ROW_WORDS);
        for &SpanRows { span, first_row } in rows {
            let kv = bind_kv(ctx, span.state)?;
            let [k, v] = [new_kv.k, new_kv.v].map(|view| view.slice(first_row, 1));
            let angles = |rope: RopeTable| rope.offset + (first_row * rope.pairs * 2) as u32;
            table.extend([
                (kv.buffer.start / 16) as u32,
                reduce_position(span.position, &kv) as u32,
                kv.positions as u32,
                kv.values,
                ctx.store.view_offset(&k)?,
                ctx.store.view_offset(&v)?,
                new_kv.rope.map_or(0, angles),
            ]);
        }
        let splits = KvSplits {
            first_row: first.first_row,
            rows: len,
            position: ctx.recorder.upload(table) as usize,
            policy,
            count,
            sinks,
            scratch: ctx.scratch((len * row_scratch).max(1))?,
        };
        decode.encode(ctx, DecodeKv::Rows(&arena), &splits, op, Some(new_kv))?;
        if count > 1 {
            let slice = |view: View| view.slice(first.first_row, len);
            merge_splits(ctx, &MERGE_SPLITS_OF_ROWS, &splits, slice(out), gate.map(slice))?;
        }
    }
    Ok(())
}

/// The arena with the KV cache of a row.
fn arena_of(ctx: &OpContext<'_>, rows: &SpanRows) -> Result<DeviceBuffer, Error> {
    let kv = bind_kv(ctx, rows.span.state)?;
    Ok(ctx.store.states.arena(&kv.buffer).unwrap_or(&kv.buffer).clone())
}
