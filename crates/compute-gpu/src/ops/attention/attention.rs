//! Attention over a KV cache: kernels, splits and tiles.

use std::{cmp::Reverse, ops::Range};

use moeflux_ops::{Error, KV_BLOCK, Op, Span, State, View, seam::stale};

use super::{
    super::context::OpContext,
    attention_decode::{DecodeKernel, DecodeKv, NewKv},
    rows::{ArenaRun, SpanRows, encode_rows, kv_start},
};
use crate::{
    kernel::{Constants, Kernel, kernel},
    params::{
        AppendKvParams, AttentionSplitParams, AttentionTiledParams, MergeSplitsParams, SplitParams,
        ViewParams,
    },
    store::DeviceBuffer,
};

pub(crate) static APPEND_KV: Kernel =
    kernel!("append_kv", "attention/append_kv", AppendKvParams, [Write, Write, Read]);
pub(crate) static ATTENTION_SPLIT: Kernel = kernel!(
    "attention_split",
    "attention/attention_split",
    AttentionSplitParams,
    [Write, Read, Read, Write]
);
pub(crate) static ATTENTION_TILED: Kernel = kernel!(
    "attention_tiled",
    "attention/attention_tiled",
    AttentionTiledParams,
    [Write, Read, Read]
);
pub(crate) static ATTENTION_COOPERATIVE: Kernel = kernel!(
    "attention_cooperative",
    "attention/attention_cooperative",
    AttentionTiledParams,
    [Write, Read, Read]
);
pub(crate) static MERGE_SPLITS: Kernel = kernel!(
    "merge_splits",
    "attention/merge_splits",
    MergeSplitsParams,
    { positions: "attention/positions_in_order" },
    [Write, Read]
);
pub(crate) static MERGE_SPLITS_OF_ROWS: Kernel = kernel!(
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
pub(super) const THREADS: usize = 256;
/// Words of a segment in the table of `attention/append_kv.wgsl`.
const SEGMENT_WORDS: usize = 8;
/// Words of a tile in the table of `attention/span_tiles.wgsl`.
const TILE_WORDS: usize = 7;
/// Offset parameter that means "none".
pub(super) const NONE: u32 = u32::MAX;
/// Maximum number of heads of a workgroup; they share a KV head.
pub(in crate::ops) const MAX_HEADS: usize = 16;
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
pub(super) const MAX_SCRATCH: usize = 8 << 20;
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
pub(crate) struct KvBinding {
    pub(crate) buffer: DeviceBuffer,
    /// Offset of the values, in elements of the KV format.
    pub(crate) values: u32,
    /// Length of the ring buffer.
    pub(crate) positions: usize,
}

/// KV cache of a state that has been written.
pub(crate) fn bind_kv(ctx: &OpContext<'_>, state: State) -> Result<KvBinding, Error> {
    let kv = ctx.store.states.kv(state).map_err(|_| stale("state"))?;
    let allocation = kv.allocation.as_ref().ok_or_else(|| stale("state"))?;
    Ok(KvBinding {
        buffer: DeviceBuffer::clone(&allocation.buffer),
        values: allocation.values,
        positions: kv.positions,
    })
}

/// Consecutive positions of one sequence's KV cache that an op appends: a segment of
/// `attention/append_kv.wgsl`.
struct AppendSegment {
    rows: Range<usize>,
    /// Position of the first row in the ring buffer.
    kv_row: usize,
    kv_start: u32,
    /// Offset of the values, in elements.
    values: usize,
}

impl AppendSegment {
    /// Segments of a span, each up to the end of the ring buffer.
    fn of_span(kv: &KvBinding, rows: &SpanRows) -> Vec<Self> {
        let SpanRows { span, first_row } = *rows;
        let mut segments = Vec::with_capacity(1);
        let mut done = 0;
        while done < span.rows {
            let kv_row = (span.position + done) % kv.positions;
            let len = (span.rows - done).min(kv.positions - kv_row);
            segments.push(Self {
                rows: first_row + done..first_row + done + len,
                kv_row,
                kv_start: kv_start(kv),
                values: kv.values as usize,
            });
            done += len;
        }
        segments
    }
}

/// Appends the rows of spans to their KV caches.
pub(in crate::ops) fn append_kv(
    ctx: &mut OpContext<'_>,
    spans: &[SpanRows],
    k: &View,
    v: Option<&View>,
) -> Result<(), Error> {
    let elements_per_word = 1 + ctx.kv_half() as usize;
    for ArenaRun { arena, spans } in ArenaRun::split(ctx, spans)? {
        let mut table = Vec::with_capacity(spans.len() * SEGMENT_WORDS);
        let mut groups = 0;
        for span in spans {
            let kv = bind_kv(ctx, span.span.state)?;
            for segment in AppendSegment::of_span(&kv, span) {
                let AppendSegment { rows, kv_row, kv_start, values } = segment;
                // Words of the state that the rows touch from element `base` on.
                let words = |base: usize, width: usize| {
                    let first = base + kv_row * k.heads * width;
                    let end = first + rows.len() * k.heads * width;
                    end.div_ceil(elements_per_word) - first / elements_per_word
                };
                let k_words = words(0, k.width);
                let all_words = k_words + v.map_or(0, |v| words(values, v.width));
                let entry =
                    [groups, kv_start as usize, values, rows.start, rows.len(), kv_row, k_words];
                table.extend(entry.into_iter().chain([all_words]).map(|word| word as u32));
                groups += all_words.div_ceil(THREADS);
            }
        }
        let segments = (table.len() / SEGMENT_WORDS) as u32;
        ctx.recorder.reserve_upload(table.len())?;
        let params = AppendKvParams {
            k: ViewParams::new(ctx.store, k)?,
            v: ViewParams::new(ctx.store, v.unwrap_or(k))?,
            heads: k.heads as u32,
            k_width: k.width as u32,
            v_width: v.map_or(k.width, |v| v.width) as u32,
            table: ctx.recorder.upload(table),
            segments,
        };
        let constants = Constants::new(&[("WG", THREADS as u32), ("KV_F16", ctx.kv_half())]);
        let upload = ctx.recorder.upload_buffer().clone();
        let buffers = [ctx.store.activations(), &arena, &upload];
        ctx.recorder.dispatch(&APPEND_KV, &constants, &buffers, &params, groups)?;
    }
    Ok(())
}

/// Encodes [`Op::Append`].
pub(in crate::ops) fn encode_append(
    ctx: &mut OpContext<'_>,
    k: &View,
    v: Option<&View>,
    spans: &[Span],
) -> Result<(), Error> {
    append_kv(ctx, &SpanRows::all(spans), k, v)
}

/// Encodes [`Op::Attention`].
pub(in crate::ops) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Attention { k, v, spans, .. } = op else { return Ok(()) };
    let all = SpanRows::all(spans);
    let mut rest = &all[..];
    while let Some(first) = rest.first() {
        let appends =
            |rows: &SpanRows| v.filter(|_| DecodeKernel::accepts_new_kv(ctx, op, &rows.span));
        let new_v = appends(first);
        let same = |rows: &&SpanRows| appends(rows).is_some() == new_v.is_some();
        let (run, others) = rest.split_at(rest.iter().take_while(same).count());
        rest = others;
        match (new_v, run) {
            (Some(v), [rows]) => {
                let kv = bind_kv(ctx, rows.span.state)?;
                let new_kv = NewKv::new(k.slice(rows.first_row, 1), v.slice(rows.first_row, 1));
                encode_sequence(ctx, &kv, *rows, op, Some(&new_kv))?;
            }
            (Some(v), _) => encode_rows(ctx, op, run, Some(&NewKv::new(k, v)))?,
            (None, _) => {
                append_kv(ctx, run, &k, v.as_ref())?;
                encode_spans(ctx, op, run)?;
            }
        }
    }
    Ok(())
}

/// Encodes attention of consecutive spans whose rows are in the KV caches.
pub(crate) fn encode_spans(
    ctx: &mut OpContext<'_>,
    op: &Op<'_>,
    spans: &[SpanRows],
) -> Result<(), Error> {
    let tiled = TiledKernel::for_op(ctx, op).filter(|_| !ctx.exact);
    let mut rest = spans;
    while let Some(first) = rest.first() {
        let tiled = |rows: &SpanRows| tiled.as_ref().filter(|_| rows.span.rows >= TILED_ROWS);
        let kernel = tiled(first);
        let same = |rows: &&SpanRows| tiled(rows).is_some() == kernel.is_some();
        let (run, others) = rest.split_at(rest.iter().take_while(same).count());
        rest = others;
        match (kernel, run) {
            (Some(kernel), _) => kernel.encode(ctx, op, run)?,
            (None, [rows]) if DecodeKernel::for_op(ctx, op).is_some() => {
                let kv = bind_kv(ctx, rows.span.state)?;
                encode_sequence(ctx, &kv, *rows, op, None)?;
            }
            (None, _) => encode_rows(ctx, op, run, None)?,
        }
    }
    Ok(())
}

/// Position in the same element of the ring buffer that fits into 32 bits.
pub(super) const fn reduce_position(position: usize, kv: &KvBinding) -> usize {
    match position > MAX_POSITION {
        true => position % kv.positions + kv.positions,
        false => position,
    }
}

/// Kernel with several rows in a workgroup, which reads the KV cache once for all of its queries.
///
/// The bits of a row do not depend on other rows, but differ from those of [`encode_rows`]. With
/// cooperative matrices queries and weights are rounded to f16.
pub(in crate::ops) struct TiledKernel {
    kernel: &'static Kernel,
    /// Queries of a tile.
    queries: usize,
    threads: usize,
}

impl TiledKernel {
    /// Tiling for [`Op::Attention`]; `None` to listed positions and for wide values.
    pub(in crate::ops) fn for_op(ctx: &OpContext<'_>, op: &Op<'_>) -> Option<Self> {
        let &Op::Attention { positions: None, out, .. } = op else { return None };
        let width = out.width.next_multiple_of(64);
        if width * 16 > TILE_ELEMENTS {
            return None;
        }
        Some(match uses_cooperative(ctx, op) {
            true => Self {
                kernel: &ATTENTION_COOPERATIVE,
                queries: COOPERATIVE_QUERIES,
                threads: 2 * COOPERATIVE_QUERIES,
            },
            false => Self {
                kernel: &ATTENTION_TILED,
                queries: 1 << (TILE_ELEMENTS / width).clamp(16, 64).ilog2(),
                threads: THREADS,
            },
        })
    }

    /// Encodes consecutive spans.
    pub(in crate::ops) fn encode(
        &self,
        ctx: &mut OpContext<'_>,
        op: &Op<'_>,
        spans: &[SpanRows],
    ) -> Result<(), Error> {
        let &Op::Attention { q, k, v, gate, scale, window, sinks, out, .. } = op else {
            return Ok(());
        };
        let group = q.heads / k.heads;
        let constants = Constants::new(&[
            ("WG", self.threads as u32),
            ("KV_F16", ctx.kv_half()),
            ("QUERIES", self.queries as u32),
            ("K_WIDTH", k.width as u32),
            ("V_WIDTH", out.width as u32),
            ("LATENT", v.is_none().into()),
        ]);
        for ArenaRun { arena, spans } in ArenaRun::split(ctx, spans)? {
            let mut tiles = Vec::new();
            for &SpanRows { span, first_row } in spans {
                let kv = bind_kv(ctx, span.state)?;
                let position = reduce_position(span.position, &kv) as u32;
                let entry = |query: usize| {
                    let [first_row, rows, query] =
                        [first_row, span.rows, query].map(|value| value as u32);
                    let capacity = kv.positions as u32;
                    [kv_start(&kv), position, capacity, kv.values, first_row, rows, query]
                };
                let queries = span.rows * group;
                let seen =
                    |query: usize| span.position + (query + self.queries).min(queries) / group;
                let all = (0..queries).step_by(self.queries);
                tiles.extend(all.map(|query| (seen(query), entry(query))));
            }
            // Tiles that see the most positions start first.
            tiles.sort_by_key(|(seen, _)| Reverse(*seen));
            ctx.recorder.reserve_upload(tiles.len() * TILE_WORDS)?;
            let store = &*ctx.store;
            let params = AttentionTiledParams {
                q: ViewParams::new(store, &q)?,
                out: ViewParams::new(store, &out)?,
                gate: ViewParams::new(store, &gate.unwrap_or(out))?,
                table: ctx.recorder.upload(tiles.iter().flat_map(|(_, entry)| *entry)),
                window: window.unwrap_or(usize::MAX).min(MAX_POSITION * 2) as u32,
                heads: q.heads as u32,
                group: group as u32,
                sinks: sinks.map(|sinks| store.buffer_offset(sinks)).transpose()?.unwrap_or(NONE),
                gated: gate.is_some().into(),
                scale,
                tiles: tiles.len() as u32,
            };
            let upload = ctx.recorder.upload_buffer().clone();
            let buffers = [store.activations(), &arena, &upload];
            let groups = tiles.len() * k.heads;
            ctx.recorder.dispatch(self.kernel, &constants, &buffers, &params, groups)?;
        }
        Ok(())
    }
}

/// Whether [`ATTENTION_COOPERATIVE`] supports the op: products of queries and keys as cooperative
/// matrices.
fn uses_cooperative(ctx: &OpContext<'_>, op: &Op<'_>) -> bool {
    let &Op::Attention { k, v: Some(_), out, .. } = op else { return false };
    let target = ctx.target();
    let fits = |width: usize| width.is_multiple_of(16) && width <= 128;
    target.cooperative
        && target.team == 32
        && ctx.workgroup_bytes() >= COOPERATIVE_BYTES
        && ctx.kv_half() == 1
        && fits(k.width)
        && fits(out.width)
}

/// Rule that splits the positions of a row over workgroups: `visible_splits.wgsl`.
#[derive(Clone, Copy)]
pub(super) struct SplitPolicy {
    window: usize,
    /// Number of positions up to which a row is not split.
    max_unsplit: usize,
    /// Minimum positions of a split.
    min_split: usize,
    pub(super) max_splits: usize,
}

impl SplitPolicy {
    /// Policy for rows that see `window` positions, of which a split takes `tiles` workgroups.
    pub(super) fn new(exact: bool, window: usize, tiles: usize) -> Self {
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
    pub(super) fn count(self, position: usize) -> usize {
        let seen = self.window.min(position + 1);
        if seen <= self.max_unsplit {
            return 1;
        }
        let split = seen.div_ceil(self.max_splits).next_multiple_of(MIN_SPLIT);
        seen.div_ceil(split.max(self.min_split))
    }
}

/// Tiling of the general kernel: heads and value columns of a workgroup.
pub(super) struct HeadTiling {
    /// Maximum heads of a workgroup, a power of two.
    heads: usize,
    /// Workgroups for the heads that share keys.
    pub(super) tiles: usize,
    /// Pairs of columns computed side by side.
    columns: usize,
}

impl HeadTiling {
    /// Tiling for `group` heads that share keys, and values of `value_width` elements.
    pub(super) fn new(group: usize, value_width: usize) -> Self {
        let pairs = value_width.div_ceil(2);
        let columns = pairs.next_power_of_two().clamp(16, THREADS);
        let max_heads = (MAX_SUMS / pairs.div_ceil(columns)).clamp(1, MAX_HEADS);
        let tiles = group.div_ceil(1 << max_heads.ilog2());
        Self { heads: group.div_ceil(tiles).next_power_of_two(), tiles, columns }
    }
}

/// Rows of an op with the same maximum number of KV splits.
pub(crate) struct KvSplits {
    pub(super) first_row: usize,
    pub(super) rows: usize,
    /// Position of the first row, or offset of the rows' table in the upload buffer.
    pub(super) position: usize,
    pub(super) policy: SplitPolicy,
    /// Splits of the row that has most.
    pub(super) count: usize,
    /// Offset of the sinks in the activations, or [`NONE`].
    pub(super) sinks: u32,
    /// Partial results of splits, to be merged.
    pub(super) scratch: DeviceBuffer,
}

impl KvSplits {
    pub(super) fn params(&self) -> SplitParams {
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

/// Encodes attention of one span by the decode kernel, with positions split over workgroups. Keys
/// and values of a single row may be `new_kv`, which the kernel appends to the KV cache.
pub(crate) fn encode_sequence(
    ctx: &mut OpContext<'_>,
    kv: &KvBinding,
    rows: SpanRows,
    op: &Op<'_>,
    new_kv: Option<&NewKv>,
) -> Result<(), Error> {
    let &Op::Attention { q, gate, window, sinks, out, .. } = op else { return Ok(()) };
    let Some(decode) = DecodeKernel::for_op(ctx, op) else { return Ok(()) };
    let SpanRows { span, first_row } = rows;
    let policy = SplitPolicy::new(ctx.exact, window.unwrap_or(usize::MAX), decode.tiles);
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
        decode.encode(ctx, DecodeKv::Sequence(kv), &splits, op, new_kv)?;
        if count > 1 {
            let slice = |view: View| view.slice(first_row + done, rows);
            merge_splits(ctx, &MERGE_SPLITS, &splits, slice(out), gate.map(slice))?;
        }
        done += rows;
    }
    Ok(())
}

/// Encodes attention of rows in the table at the splits' position, with any widths, to listed
/// positions, or to latents.
pub(super) fn encode_general(
    ctx: &mut OpContext<'_>,
    arena: &DeviceBuffer,
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
    let upload = ctx.recorder.upload_buffer().clone();
    let buffers = [store.activations(), arena, &upload, &splits.scratch];
    let groups = rows * k.heads * tiling.tiles * splits.count;
    ctx.recorder.dispatch(&ATTENTION_SPLIT, &constants, &buffers, &params, groups)
}

/// Merges the partial results of splits by one of the two kernels.
pub(super) fn merge_splits(
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
    ctx.recorder.dispatch(kernel, &constants, buffers, &params, groups)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{Target, tests::valid};

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
