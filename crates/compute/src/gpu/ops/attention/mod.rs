//! Attention: append to the KV cache, split-KV kernels (flash-decoding), tiled kernels for prefill.

pub(in crate::gpu) mod attention_decode;
pub(in crate::gpu) mod rows;

use self::{
    attention_decode::{DecodeKernel, DecodeKv, NewKv},
    rows::encode_rows,
};
use super::{
    Constants, DeviceBuffer, Kernel, OpContext, ViewParams, kernel,
    params::{
        AppendKvParams, AttentionSplitParams, AttentionTiledParams, MergeSplitsParams, SplitParams,
    },
};
use crate::{Error, KV_BLOCK, Op, Span, State, View, op_check::stale};

pub(in crate::gpu) static APPEND_KV: Kernel =
    kernel!("append_kv", "attention/append_kv", AppendKvParams, [Write, Write]);
pub(in crate::gpu) static ATTENTION_SPLIT: Kernel = kernel!(
    "attention_split",
    "attention/attention_split",
    AttentionSplitParams,
    [Write, Read, Write]
);
pub(in crate::gpu) static ATTENTION_TILED: Kernel =
    kernel!("attention_tiled", "attention/attention_tiled", AttentionTiledParams, [Write, Read]);
pub(in crate::gpu) static ATTENTION_COOPERATIVE: Kernel = kernel!(
    "attention_cooperative",
    "attention/attention_cooperative",
    AttentionTiledParams,
    [Write, Read]
);
pub(in crate::gpu) static MERGE_SPLITS: Kernel = kernel!(
    "merge_splits",
    "attention/merge_splits",
    MergeSplitsParams,
    { positions: "attention/positions_in_order" },
    [Write, Read]
);
pub(in crate::gpu) static MERGE_SPLITS_OF_ROWS: Kernel = kernel!(
    "merge_splits of rows",
    "attention/merge_splits",
    MergeSplitsParams,
    { positions: "attention/positions_in_table" },
    [Write, Read, Read]
);
/// Columns of a workgroup that merges splits, and its threads.
const MERGE_COLUMNS: usize = 32;
const MERGE_THREADS: usize = 256;

/// Threads of a workgroup.
const THREADS: usize = 256;
/// Offset parameter that means "none".
const NONE: u32 = u32::MAX;
/// Maximum number of heads of a workgroup; they share a KV head.
pub(super) const MAX_HEADS: usize = 16;
/// Maximum pairs of sums per thread.
const MAX_SUMS: usize = 32;
/// Maximum KV splits of a row.
const MAX_SPLITS: usize = 64;
/// Workgroups for one row with a long context on the fast path; fills the largest cards.
const FULL_GRID: usize = 512;
/// Number of positions up to which the fast path does not split: merging takes longer than a second
/// block.
const MAX_UNSPLIT: usize = 64;
/// Minimum positions of a split on the fast path. Splits are multiples of this.
const MIN_SPLIT: usize = 32;
/// f32 values of scratch for the splits of all rows. Rows that need more are encoded in turn.
const MAX_SCRATCH: usize = 8 << 20;
/// Number of rows from which the fast path uses tiled kernels.
const TILED_ROWS: usize = 16;
/// Query and value elements of a tile: 64 for each thread.
const TILE_ELEMENTS: usize = 64 * 256;
/// Queries of a cooperative-matrix tile, and its bytes of workgroup memory.
const COOPERATIVE_QUERIES: usize = 128;
const COOPERATIVE_BYTES: u32 = 48 << 10;
/// Positions above this are reduced modulo the length of a ring buffer.
const MAX_POSITION: usize = 1 << 30;

/// KV cache of a state as kernels bind it.
#[derive(Clone)]
pub(in crate::gpu) struct KvBinding {
    pub(in crate::gpu) buffer: DeviceBuffer,
    /// Offset of the values, in elements of the KV format.
    pub(in crate::gpu) values: u32,
    /// Length of the ring buffer.
    pub(in crate::gpu) positions: usize,
}

/// KV cache of a state that has been written.
pub(in crate::gpu) fn bind_kv(ctx: &OpContext<'_>, state: State) -> Result<KvBinding, Error> {
    let kv = ctx.store.states.kv(state).map_err(|_| stale("state"))?;
    let allocation = kv.allocation.as_ref().ok_or_else(|| stale("state"))?;
    Ok(KvBinding {
        buffer: DeviceBuffer::clone(&allocation.buffer),
        values: allocation.values,
        positions: kv.positions,
    })
}

/// Rows of one span in an op.
#[derive(Clone, Copy)]
pub(in crate::gpu) struct SpanRows {
    pub(in crate::gpu) span: Span,
    /// First row of the span in the op's views.
    pub(in crate::gpu) first_row: usize,
}

impl SpanRows {
    /// Non-empty spans of an op with their first rows.
    pub(in crate::gpu) fn iterate(spans: &[Span]) -> impl Iterator<Item = Self> {
        let mut first_row = 0;
        spans
            .iter()
            .map(move |span| {
                let rows = Self { span: *span, first_row };
                first_row += span.rows;
                rows
            })
            .filter(|rows| rows.span.rows > 0)
    }
}

/// Appends the rows of a span to the KV cache at its positions.
pub(super) fn append_kv(
    ctx: &mut OpContext<'_>,
    kv: &KvBinding,
    rows: SpanRows,
    k: &View,
    v: Option<&View>,
) -> Result<(), Error> {
    let SpanRows { span, first_row } = rows;
    let elements_per_word = 1 + ctx.kv_half() as usize;
    let mut done = 0;
    while done < span.rows {
        // Up to the end of the ring buffer.
        let position = (span.position + done) % kv.positions;
        let rows = (span.rows - done).min(kv.positions - position);
        // Words of the state that the rows touch from element `base` on.
        let words = |base: usize, width: usize| {
            let first = base + position * k.heads * width;
            (first + rows * k.heads * width).div_ceil(elements_per_word) - first / elements_per_word
        };
        let key_words = words(0, k.width);
        let value_words = v.map_or(0, |v| words(kv.values as usize, v.width));
        let k = k.slice(first_row + done, rows);
        let v = v.map_or(k, |v| v.slice(first_row + done, rows));
        let params = AppendKvParams {
            k: ViewParams::new(ctx.store, &k)?,
            v: ViewParams::new(ctx.store, &v)?,
            heads: k.heads as u32,
            k_width: k.width as u32,
            v_width: v.width as u32,
            rows: rows as u32,
            kv_row: position as u32,
            v_offset: kv.values,
            k_words: key_words as u32,
            words: (key_words + value_words) as u32,
        };
        let constants = Constants::new(&[("WG", THREADS as u32), ("KV_F16", ctx.kv_half())]);
        let groups = (key_words + value_words).div_ceil(THREADS);
        let buffers = [ctx.store.activations(), &kv.buffer];
        ctx.recorder.dispatch(&APPEND_KV, constants, &buffers, &params, groups)?;
        done += rows;
    }
    Ok(())
}

/// Encodes [`Op::Attention`].
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Attention { k, v, spans, .. } = op else { return Ok(()) };
    let mut all = SpanRows::iterate(spans).peekable();
    while let Some(rows) = all.next() {
        if let Some(v) = v
            && DecodeKernel::accepts_new_kv(ctx, op, &rows.span)
        {
            let mut run = vec![rows];
            while let Some(next) =
                all.next_if(|next| DecodeKernel::accepts_new_kv(ctx, op, &next.span))
            {
                run.push(next);
            }
            if run.len() > 1 {
                encode_rows(ctx, op, &run, &NewKv::new(k, v))?;
                continue;
            }
        }
        let kv = bind_kv(ctx, rows.span.state)?;
        match v {
            Some(v) if DecodeKernel::accepts_new_kv(ctx, op, &rows.span) => {
                let new_kv = NewKv::new(k.slice(rows.first_row, 1), v.slice(rows.first_row, 1));
                encode_split(ctx, &kv, rows, op, Some(&new_kv))?;
            }
            _ => {
                append_kv(ctx, &kv, rows, &k, v.as_ref())?;
                encode_span(ctx, &kv, rows, op)?;
            }
        }
    }
    Ok(())
}

/// Encodes attention of one span whose rows are in the KV cache.
pub(in crate::gpu) fn encode_span(
    ctx: &mut OpContext<'_>,
    kv: &KvBinding,
    rows: SpanRows,
    op: &Op<'_>,
) -> Result<(), Error> {
    match !ctx.exact && rows.span.rows >= TILED_ROWS {
        true => encode_tiled(ctx, kv, rows, op),
        false => encode_split(ctx, kv, rows, op, None),
    }
}

/// Position in the same element of the ring buffer that fits into 32 bits.
const fn reduce_position(position: usize, kv: &KvBinding) -> usize {
    match position > MAX_POSITION {
        true => position % kv.positions + kv.positions,
        false => position,
    }
}

/// Encodes attention of one span with several rows in a workgroup, which reads the KV cache once
/// for all of its queries.
///
/// The bits of a row do not depend on other rows, but differ from those of [`encode_split`]. With
/// cooperative matrices queries and weights are rounded to f16.
pub(super) fn encode_tiled(
    ctx: &mut OpContext<'_>,
    kv: &KvBinding,
    rows: SpanRows,
    op: &Op<'_>,
) -> Result<(), Error> {
    let &Op::Attention { q, k, v, gate, scale, window, sinks, positions, out, .. } = op else {
        return Ok(());
    };
    let SpanRows { span, first_row } = rows;
    let width = out.width.next_multiple_of(64);
    if positions.is_some() || width * 16 > TILE_ELEMENTS {
        return encode_split(ctx, kv, rows, op, None);
    }
    let (kernel, queries, threads) = match uses_cooperative(ctx, kv, op) {
        true => (&ATTENTION_COOPERATIVE, COOPERATIVE_QUERIES, 2 * COOPERATIVE_QUERIES),
        false => (&ATTENTION_TILED, 1 << (TILE_ELEMENTS / width).clamp(16, 64).ilog2(), THREADS),
    };
    let group = q.heads / k.heads;
    let tiles = (span.rows * group).div_ceil(queries);
    let slice = |view: View| view.slice(first_row, span.rows);
    let (q, out) = (slice(q), slice(out));
    let gate_view = gate.map_or(out, slice);
    let store = &*ctx.store;
    let params = AttentionTiledParams {
        q: ViewParams::new(store, &q)?,
        out: ViewParams::new(store, &out)?,
        gate: ViewParams::new(store, &gate_view)?,
        rows: span.rows as u32,
        position: reduce_position(span.position, kv) as u32,
        window: window.unwrap_or(usize::MAX).min(MAX_POSITION * 2) as u32,
        heads: q.heads as u32,
        group: group as u32,
        capacity: kv.positions as u32,
        v_offset: kv.values,
        sinks: sinks.map(|sinks| store.buffer_offset(sinks)).transpose()?.unwrap_or(NONE),
        gated: gate.is_some().into(),
        scale,
        tiles: tiles as u32,
    };
    let constants = Constants::new(&[
        ("WG", threads as u32),
        ("KV_F16", ctx.kv_half()),
        ("QUERIES", queries as u32),
        ("K_WIDTH", k.width as u32),
        ("V_WIDTH", out.width as u32),
        ("LATENT", v.is_none().into()),
    ]);
    let buffers = [store.activations(), &kv.buffer];
    ctx.recorder.dispatch(kernel, constants, &buffers, &params, tiles * k.heads)
}

/// Whether [`ATTENTION_COOPERATIVE`] supports the op: products of queries and keys as cooperative
/// matrices.
fn uses_cooperative(ctx: &OpContext<'_>, kv: &KvBinding, op: &Op<'_>) -> bool {
    let &Op::Attention { k, v: Some(_), out, .. } = op else { return false };
    let target = ctx.target();
    let fits = |width: usize| width.is_multiple_of(16) && width <= 128;
    target.cooperative
        && target.team == 32
        && ctx.workgroup_bytes() >= COOPERATIVE_BYTES
        && ctx.kv_half() == 1
        && kv.values.is_multiple_of(4)
        && fits(k.width)
        && fits(out.width)
}

/// Rule that splits the positions of a row over workgroups: `visible_splits.wgsl`.
#[derive(Clone, Copy)]
struct SplitPolicy {
    window: usize,
    /// Number of positions up to which a row is not split.
    max_unsplit: usize,
    /// Minimum positions of a split.
    min_split: usize,
    max_splits: usize,
}

impl SplitPolicy {
    /// Policy for rows that see `window` positions, of which a split takes `tiles` workgroups.
    fn new(exact: bool, window: usize, tiles: usize) -> Self {
        let window = window.min(MAX_POSITION * 2);
        match exact {
            true => {
                Self { window, max_unsplit: KV_BLOCK, min_split: KV_BLOCK, max_splits: MAX_SPLITS }
            }
            false => Self {
                window,
                max_unsplit: MAX_UNSPLIT,
                min_split: MIN_SPLIT,
                max_splits: (FULL_GRID / tiles).clamp(8, MAX_SPLITS),
            },
        }
    }

    /// Number of splits of the row at `position`.
    fn count(self, position: usize) -> usize {
        let seen = self.window.min(position + 1);
        if seen <= self.max_unsplit {
            return 1;
        }
        let split = seen.div_ceil(self.max_splits).next_multiple_of(MIN_SPLIT);
        seen.div_ceil(split.max(self.min_split))
    }
}

/// Tiling of the general kernel: heads and value columns of a workgroup.
struct HeadTiling {
    /// Maximum heads of a workgroup, a power of two.
    heads: usize,
    /// Workgroups for the heads that share keys.
    tiles: usize,
    /// Pairs of columns computed side by side.
    columns: usize,
}

impl HeadTiling {
    /// Tiling for `group` heads that share keys, and values of `value_width` elements.
    fn new(group: usize, value_width: usize) -> Self {
        let pairs = value_width.div_ceil(2);
        let columns = pairs.next_power_of_two().clamp(16, THREADS);
        let max_heads = (MAX_SUMS / pairs.div_ceil(columns)).clamp(1, MAX_HEADS);
        let tiles = group.div_ceil(1 << max_heads.ilog2());
        Self { heads: group.div_ceil(tiles).next_power_of_two(), tiles, columns }
    }
}

/// Rows of an op with the same maximum number of KV splits.
pub(in crate::gpu) struct KvSplits {
    first_row: usize,
    rows: usize,
    /// Position of the first row, or offset of the rows' table in the upload buffer.
    position: usize,
    policy: SplitPolicy,
    /// Splits of the row that has most.
    count: usize,
    /// Offset of the sinks in the activations, or [`NONE`].
    sinks: u32,
    /// Partial results of splits, to be merged.
    scratch: DeviceBuffer,
}

impl KvSplits {
    fn params(&self) -> SplitParams {
        let SplitPolicy { window, max_unsplit, min_split, max_splits } = self.policy;
        SplitParams {
            position: self.position as u32,
            window: window as u32,
            max_unsplit: max_unsplit as u32,
            min_split: min_split as u32,
            max_splits: max_splits as u32,
            count: self.count as u32,
        }
    }
}

/// Encodes attention of one span, with positions split over workgroups. Keys and values of a single
/// row may be `new_kv`, which the kernel appends to the KV cache.
pub(in crate::gpu) fn encode_split(
    ctx: &mut OpContext<'_>,
    kv: &KvBinding,
    rows: SpanRows,
    op: &Op<'_>,
    new_kv: Option<&NewKv>,
) -> Result<(), Error> {
    let &Op::Attention { q, k, gate, window, sinks, positions, out, .. } = op else {
        return Ok(());
    };
    let SpanRows { span, first_row } = rows;
    let decode = DecodeKernel::for_op(ctx, op);
    let tiling = HeadTiling::new(q.heads / k.heads, out.width);
    let tiles = decode.as_ref().map_or(k.heads * tiling.tiles, |decode| decode.tiles);
    let window = positions.map_or(window.unwrap_or(usize::MAX), |list| list.width);
    let policy = SplitPolicy::new(ctx.exact, window, tiles);
    let position = reduce_position(span.position, kv);
    let sinks = sinks.map(|sinks| ctx.store.buffer_offset(sinks)).transpose()?.unwrap_or(NONE);
    let mut done = 0;
    while done < span.rows {
        // As many rows as have scratch for their splits.
        let max_count = policy.count(position + span.rows - 1);
        let max_rows = MAX_SCRATCH / (q.heads * max_count * (out.width + 2));
        let rows = max_rows.clamp(1, span.rows - done);
        let count = policy.count(position + done + rows - 1);
        let scratch = if count == 1 { 1 } else { rows * q.heads * count * (out.width + 2) };
        let splits = KvSplits {
            first_row: first_row + done,
            rows,
            position: position + done,
            policy,
            count,
            sinks,
            scratch: ctx.scratch(scratch)?,
        };
        match &decode {
            Some(decode) => decode.encode(ctx, DecodeKv::Sequence(kv), &splits, op, new_kv)?,
            None => encode_general(ctx, kv, &splits, op, &tiling)?,
        }
        if count > 1 {
            let slice = |view: View| view.slice(first_row + done, rows);
            merge_splits(ctx, &MERGE_SPLITS, &splits, slice(out), gate.map(slice))?;
        }
        done += rows;
    }
    Ok(())
}

/// Encodes attention with any widths, to listed positions, or to latents.
fn encode_general(
    ctx: &mut OpContext<'_>,
    kv: &KvBinding,
    splits: &KvSplits,
    op: &Op<'_>,
    tiling: &HeadTiling,
) -> Result<(), Error> {
    let &Op::Attention { q, k, v, gate, scale, positions, out, .. } = op else { return Ok(()) };
    let group = q.heads / k.heads;
    let rows = splits.rows;
    let slice = |view: View| view.slice(splits.first_row, rows);
    let (q, out) = (slice(q), slice(out));
    let (gate_view, list) = (gate.map_or(out, slice), positions.map_or(out, slice));
    let list = if list.heads == 1 { View { head_stride: 0, ..list } } else { list };
    let store = &*ctx.store;
    let params = AttentionSplitParams {
        q: ViewParams::new(store, &q)?,
        out: ViewParams::new(store, &out)?,
        gate: ViewParams::new(store, &gate_view)?,
        list: ViewParams::new(store, &list)?,
        rows: rows as u32,
        splits: splits.params(),
        heads: q.heads as u32,
        group: group as u32,
        tiles: tiling.tiles as u32,
        capacity: kv.positions as u32,
        v_offset: kv.values,
        sinks: splits.sinks,
        gated: gate.is_some().into(),
        scale,
    };
    let constants = Constants::new(&[
        ("WG", THREADS as u32),
        ("KV_F16", ctx.kv_half()),
        ("TILE_HEADS", tiling.heads as u32),
        ("K_WIDTH", k.width as u32),
        ("V_WIDTH", out.width as u32),
        ("LATENT", v.is_none().into()),
        ("LISTED", positions.is_some().into()),
        ("V_COLUMNS", tiling.columns as u32),
        ("SINGLE_SPLIT", (splits.count == 1).into()),
    ]);
    let buffers = [store.activations(), &kv.buffer, &splits.scratch];
    let groups = rows * k.heads * tiling.tiles * splits.count;
    ctx.recorder.dispatch(&ATTENTION_SPLIT, constants, &buffers, &params, groups)
}

/// Merges the partial results of splits by one of the two kernels.
fn merge_splits(
    ctx: &mut OpContext<'_>,
    kernel: &'static Kernel,
    splits: &KvSplits,
    out: View,
    gate: Option<View>,
) -> Result<(), Error> {
    let gate_view = gate.unwrap_or(out);
    let store = &*ctx.store;
    let columns = out.width.div_ceil(MERGE_COLUMNS);
    let params = MergeSplitsParams {
        out: ViewParams::new(store, &out)?,
        gate: ViewParams::new(store, &gate_view)?,
        rows: out.rows as u32,
        splits: splits.params(),
        heads: out.heads as u32,
        v_width: out.width as u32,
        column_groups: columns as u32,
        sinks: splits.sinks,
        gated: gate.is_some().into(),
    };
    let max_splits = splits.policy.max_splits.next_multiple_of(MERGE_THREADS / MERGE_COLUMNS);
    let constants =
        Constants::new(&[("WG", MERGE_THREADS as u32), ("MAX_SPLITS", max_splits as u32)]);
    let upload = ctx.recorder.upload_buffer().clone();
    let buffers = [store.activations(), &splits.scratch, &upload];
    let groups = out.rows * out.heads * columns;
    let buffers = &buffers[..kernel.bindings.len()];
    ctx.recorder.dispatch(kernel, constants, buffers, &params, groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::kernel::{Target, tests::valid};

    #[test]
    fn cooperative_attention_is_valid() {
        let target = Target { team: 32, subgroups: true, dot8: true, f16: true, cooperative: true };
        for (key, value) in [(128, 128), (16, 112), (96, 64)] {
            let constants = Constants::new(&[
                ("WG", 2 * COOPERATIVE_QUERIES as u32),
                ("KV_F16", 1),
                ("QUERIES", COOPERATIVE_QUERIES as u32),
                ("K_WIDTH", key),
                ("V_WIDTH", value),
                ("LATENT", 0),
            ]);
            valid(&target.text(&ATTENTION_COOPERATIVE, &constants), COOPERATIVE_BYTES);
        }
    }
}
