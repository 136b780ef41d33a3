//! Rows of several sequences in one dispatch: their KV caches as ranges of an arena, in tables that
//! kernels read from the upload buffer.

use std::ops::Range;

use moeflux_ops::{BATCH_INVARIANT_ROWS, Error, Op, Span, View};

use super::{
    attention::{
        HeadTiling, KvBinding, KvSplits, MAX_SCRATCH, MERGE_SPLITS_OF_ROWS, NONE, SplitPolicy,
        bind_kv, encode_general, merge_splits, reduce_position,
    },
    attention_decode::{DecodeKernel, DecodeKv, NewKv},
};
use crate::{
    ops::{context::OpContext, qk_norm_rope::RopeTable},
    store::DeviceBuffer,
};

/// Workgroups on the fast path for more rows than [`BATCH_INVARIANT_ROWS`], which are split as if
/// each were alone.
const MANY_ROWS_GRID: usize = 264;

/// Words of a row in the table of `attention/row_table.wgsl`.
const ROW_WORDS: usize = 7;

/// Rows of one span in an op.
#[derive(Clone, Copy)]
pub(crate) struct SpanRows {
    pub(crate) span: Span,
    /// First row of the span in the op's views.
    pub(crate) first_row: usize,
}

impl SpanRows {
    /// Non-empty spans of an op with their first rows.
    pub(crate) fn all(spans: &[Span]) -> Vec<Self> {
        let mut first_row = 0;
        let all = spans.iter().map(|span| {
            let rows = Self { span: *span, first_row };
            first_row += span.rows;
            rows
        });
        all.filter(|rows| rows.span.rows > 0).collect()
    }

    /// Each row of an op as a separate span.
    pub(crate) fn single(spans: &[Span]) -> Vec<Self> {
        let of_span = |all: Self| {
            let row = move |i| {
                let span = Span { position: all.span.position + i, rows: 1, ..all.span };
                Self { span, first_row: all.first_row + i }
            };
            (0..all.span.rows).map(row)
        };
        Self::all(spans).into_iter().flat_map(of_span).collect()
    }

    /// The rows of the op.
    pub(crate) const fn rows(&self) -> Range<usize> {
        self.first_row..self.first_row + self.span.rows
    }

    /// Positions that its last row sees without a window.
    pub(crate) const fn visible(&self) -> usize {
        self.span.position + self.span.rows
    }

    /// The rows of consecutive spans.
    pub(crate) fn rows_of(spans: &[Self]) -> Range<usize> {
        let [first, last] = [spans.first(), spans.last()].map(|rows| rows.map(Self::rows));
        first.map_or(0, |rows| rows.start)..last.map_or(0, |rows| rows.end)
    }

    /// Parts of spans within a range of the op's rows.
    pub(crate) fn within(spans: &[Self], rows: &Range<usize>) -> Vec<Self> {
        let part = |all: &Self| {
            let first_row = all.first_row.max(rows.start);
            let len = all.rows().end.min(rows.end).checked_sub(first_row).filter(|len| *len > 0)?;
            let position = all.span.position + (first_row - all.first_row);
            Some(Self { span: Span { position, rows: len, ..all.span }, first_row })
        };
        spans.iter().filter_map(part).collect()
    }
}

/// Consecutive spans whose KV caches are in one arena.
pub(crate) struct ArenaRun<'a> {
    pub(crate) arena: DeviceBuffer,
    pub(crate) spans: &'a [SpanRows],
}

impl<'a> ArenaRun<'a> {
    /// Splits spans into runs.
    pub(crate) fn split(
        ctx: &OpContext<'_>,
        mut spans: &'a [SpanRows],
    ) -> Result<Vec<Self>, Error> {
        let arena_of = |rows: &SpanRows| -> Result<DeviceBuffer, Error> {
            let kv = bind_kv(ctx, rows.span.state)?;
            Ok(ctx.store.states.arena(&kv.buffer).unwrap_or(&kv.buffer).clone())
        };
        let mut runs = Vec::new();
        while let Some(first) = spans.first() {
            let arena = arena_of(first)?;
            let shares = |rows: &&SpanRows| arena_of(rows).is_ok_and(|other| other.id == arena.id);
            let (run, others) = spans.split_at(1 + spans[1..].iter().take_while(shares).count());
            runs.push(Self { arena, spans: run });
            spans = others;
        }
        Ok(runs)
    }
}

/// Start of a KV cache in its arena, in vectors of 16 bytes.
pub(super) const fn kv_start(kv: &KvBinding) -> u32 {
    (kv.buffer.start / 16) as u32
}

/// Uploads the table of rows whose KV caches are in one arena. Returns its offset.
pub(crate) fn upload_rows(
    ctx: &mut OpContext<'_>,
    spans: &[SpanRows],
    new_kv: Option<&NewKv>,
) -> Result<u32, Error> {
    let mut table = Vec::with_capacity(SpanRows::rows_of(spans).len() * ROW_WORDS);
    for &SpanRows { span, first_row } in spans {
        let kv = bind_kv(ctx, span.state)?;
        let position = reduce_position(span.position, &kv);
        for row in 0..span.rows {
            let [k, v, angles] = match new_kv {
                Some(new_kv) => {
                    let [k, v] = [new_kv.k, new_kv.v].map(|view| view.slice(first_row + row, 1));
                    let angles =
                        |rope: RopeTable| rope.offset + ((first_row + row) * rope.pairs * 2) as u32;
                    let angles = new_kv.rope.map_or(0, angles);
                    [ctx.store.view_offset(&k)?, ctx.store.view_offset(&v)?, angles]
                }
                None => [0; 3],
            };
            let position = (position + row) as u32;
            table.extend([kv_start(&kv), position, kv.positions as u32, kv.values, k, v, angles]);
        }
    }
    ctx.recorder.reserve_upload(table.len())?;
    Ok(ctx.recorder.upload(table))
}

/// Whether all spans of an op can share a dispatch that appends their rows, and the upload buffer
/// has room for it.
pub(crate) fn accepts_rows(ctx: &OpContext<'_>, op: &Op<'_>, spans: &[Span]) -> bool {
    spans.len() > 1
        && ctx.recorder.has_upload_room(spans.len() * ROW_WORDS)
        && spans.iter().all(|span| DecodeKernel::accepts_new_kv(ctx, op, span))
}

/// Whether a row can have a dispatch that appends it, and the upload buffer has room for it.
pub(crate) fn accepts_row(ctx: &OpContext<'_>, op: &Op<'_>, row: &SpanRows) -> bool {
    ctx.recorder.has_upload_room(BATCH_INVARIANT_ROWS * ROW_WORDS)
        && DecodeKernel::accepts_new_kv(ctx, op, &row.span)
}

/// Encodes attention of the rows of consecutive spans, with positions split over workgroups.
/// `new_kv` has keys and values of all rows of the op, one row for each span, to be appended to
/// the KV caches; without it they have been appended.
pub(crate) fn encode_rows(
    ctx: &mut OpContext<'_>,
    op: &Op<'_>,
    spans: &[SpanRows],
    new_kv: Option<&NewKv>,
) -> Result<(), Error> {
    let &Op::Attention { q, k, gate, window, sinks, positions, out, .. } = op else {
        return Ok(());
    };
    // A row sees its list, whatever its position.
    let of_lists = |list: View| -> Vec<SpanRows> {
        let position = list.width - 1;
        let at_end = |rows: &SpanRows| SpanRows { span: Span { position, ..rows.span }, ..*rows };
        spans.iter().map(at_end).collect()
    };
    let listed = positions.map(of_lists);
    let spans = listed.as_deref().unwrap_or(spans);
    let decode = DecodeKernel::for_op(ctx, op);
    let tiling = HeadTiling::new(q.heads / k.heads, out.width);
    let tiles = decode.as_ref().map_or(k.heads * tiling.tiles, |decode| decode.tiles);
    let window = positions.map_or(window.unwrap_or(usize::MAX), |list| list.width);
    let mut policy = SplitPolicy::new(ctx.exact, window, tiles);
    if new_kv.is_some() && spans.len() > BATCH_INVARIANT_ROWS && !ctx.exact {
        // A card computes few workgroups of this kernel at once.
        let splits = MANY_ROWS_GRID / (tiles * spans.len());
        policy.max_splits = splits.clamp(1, policy.max_splits);
    }
    let sinks = sinks.map(|sinks| ctx.store.buffer_offset(sinks)).transpose()?.unwrap_or(NONE);
    let count = spans.iter().map(|rows| policy.count(rows.visible() - 1)).max().unwrap_or(1);
    // As many rows at a time as have scratch for their splits.
    let row_scratch = if count == 1 { 0 } else { q.heads * count * (out.width + 2) };
    let max_rows = (MAX_SCRATCH / row_scratch.max(1)).max(1);
    for ArenaRun { arena, spans } in ArenaRun::split(ctx, spans)? {
        let all = SpanRows::rows_of(spans);
        for first_row in all.clone().step_by(max_rows) {
            let rows = first_row..all.end.min(first_row + max_rows);
            let spans = SpanRows::within(spans, &rows);
            let splits = KvSplits {
                first_row,
                rows: rows.len(),
                position: upload_rows(ctx, &spans, new_kv)? as usize,
                policy,
                count,
                sinks,
                scratch: ctx.scratch((rows.len() * row_scratch).max(1))?,
            };
            match &decode {
                Some(decode) => decode.encode(ctx, DecodeKv::Rows(&arena), &splits, op, new_kv)?,
                None => encode_general(ctx, &arena, &splits, op, &tiling)?,
            }
            if count > 1 {
                let slice = |view: View| view.slice(first_row, rows.len());
                merge_splits(ctx, &MERGE_SPLITS_OF_ROWS, &splits, slice(out), gate.map(slice))?;
            }
        }
    }
    Ok(())
}
