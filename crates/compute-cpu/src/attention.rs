//! Causal grouped-query attention: online softmax over blocks of the KV cache, with split-KV.
//!
//! The sums of a row are computed per block of positions and merged in block order. The partial
//! result of a block does not depend on the tiling. If rows and heads make enough tiles, one tile
//! goes over all blocks. Otherwise every block is a tile (split-KV, as in flash-decoding): the
//! partial results are in the scratch memory of [`Cpu`] and merged afterwards.

use std::{mem, ops::Range};

use moeflux_ops::{
    Buffer, Error, KV_BLOCK, Op, Scalar, ScratchShape, Span, View,
    seam::{Host, HostKvCache, KvKind},
};

use super::{
    cpu::{Cpu, SPLIT_SCRATCH_LEN, row, vector},
    pool::{Grid, Tile},
    simd::{FloatRows, Kernels, MergeFactors, PrefetchRows, scratch::WorkerScratch, split_rows},
};

/// Positions of a block, which are contiguous in the KV cache. Blocks start at multiples of it, so
/// the sums of a row depend neither on the other rows of the op nor on the prefill chunking.
const BLOCK: usize = KV_BLOCK;
/// Maximum queries of a tile, rows times heads. They share the keys and values that they read.
const MAX_QUERIES: usize = 16;
/// Minimum tiles per row, as long as tiles have at least [`MIN_HEADS`] heads.
const MIN_TILES: usize = 8;
/// Minimum heads of a tile, if that many share a KV head.
const MIN_HEADS: usize = 4;
/// Number of tiles that keeps any number of threads busy.
const ENOUGH_TILES: usize = 32;

/// Runs [`Op::Attention`].
pub(super) fn attention(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Attention { k, v, spans, out, .. } = op else { return Ok(()) };
    host.with(&out, |host, values| {
        append_kv(host, spans, &k, v.as_ref())?;
        let Some(inputs) = AttentionInputs::new(host, cpu.kernels, op)? else { return Ok(()) };
        if attend_batched(host, cpu, &inputs, op, values)? {
            return Ok(());
        }
        span_caches(host, spans).try_for_each(|cache| attend(cpu, &inputs, cache?, op, values))
    })
}

/// Appends the rows of `k` and `v` to the KV caches of the spans.
pub(super) fn append_kv(
    host: &mut Host,
    spans: &[Span],
    k: &View,
    v: Option<&View>,
) -> Result<(), Error> {
    let mut first = 0;
    for span in spans {
        let mut kv = host.states.take_kv(span.state, span.position, span.rows)?;
        let result = append_rows(host, &mut kv, KvSource { k, v, first }, span);
        host.states.put_kv(span.state, kv)?;
        result?;
        first += span.rows;
    }
    Ok(())
}

/// A span with its KV cache.
#[derive(Clone, Copy)]
pub(super) struct SpanCache<'a> {
    pub(super) kv: &'a HostKvCache,
    /// Row of the op where the span starts.
    pub(super) first: usize,
    pub(super) span: &'a Span,
}

/// Pairs spans with their KV caches.
pub(super) fn span_caches<'a>(
    host: &'a Host,
    spans: &'a [Span],
) -> impl Iterator<Item = Result<SpanCache<'a>, Error>> {
    spans.iter().scan(0, |next, span| {
        let first = mem::replace(next, *next + span.rows);
        Some(host.states.kv_cache(span.state).map(|kv| SpanCache { kv, first, span }))
    })
}

/// Runs an indexer of sparse attention: appends keys to the KV caches of the spans, then calls
/// `select` for each span, with the values of `scores` and of `out`.
pub(super) fn with_scores(
    host: &mut Host,
    spans: &[Span],
    k: Option<&View>,
    [scores, out]: [&View; 2],
    mut select: impl FnMut(&Host, SpanCache<'_>, [&mut [f32]; 2]) -> Result<(), Error>,
) -> Result<(), Error> {
    host.with(out, |host, positions| {
        host.with(scores, |host, scores| {
            if let Some(k) = k {
                append_kv(host, spans, k, None)?;
            }
            span_caches(host, spans)
                .try_for_each(|cache| select(host, cache?, [&mut *scores, &mut *positions]))
        })
    })
}

/// Keys and values to append; the span starts at row `first`.
struct KvSource<'a> {
    k: &'a View,
    v: Option<&'a View>,
    first: usize,
}

/// Appends the rows of one span to its KV cache.
fn append_rows(
    host: &Host,
    kv: &mut HostKvCache,
    KvSource { k, v, first }: KvSource<'_>,
    span: &Span,
) -> Result<(), Error> {
    let keys = host.get(k)?;
    let values = v.map(|v| Ok::<_, Error>((host.get(v)?, v))).transpose()?;
    for i in 0..span.rows {
        let position = span.position + i;
        for head in 0..kv.kv_heads {
            kv.write(KvKind::Key, position, head, vector(keys, k, first + i, head));
            if let Some((values, v)) = values {
                kv.write(KvKind::Value, position, head, vector(values, v, first + i, head));
            }
        }
    }
    Ok(())
}

/// Scratch for keys and values that are dequantized before use.
pub(super) fn dequantized_scratch(kv: &HostKvCache) -> ScratchShape {
    let wide_kv =
        if Scalar::of_kv_cache(kv.format).is_none() { kv.key_width + kv.value_width } else { 0 };
    ScratchShape { wide_kv, ..ScratchShape::default() }
}

/// Sets `dst` to vectors of `width` elements that kernels can read: those of the cache, or copies
/// dequantized to `scratch`.
pub(super) fn readable_vectors<'a>(
    kernels: Kernels,
    kv: &HostKvCache,
    src: impl Iterator<Item = &'a [u8]>,
    scratch: &'a mut [f32],
    width: usize,
    dst: &mut [&'a [u8]],
) -> Scalar {
    if let Some(scalar) = Scalar::of_kv_cache(kv.format) {
        dst.iter_mut().zip(src).for_each(|(dst, vector)| *dst = vector);
        return scalar;
    }
    let copies = src.zip(scratch.chunks_exact_mut(width)).take(dst.len());
    copies.for_each(|(vector, copy)| kernels.widen_kv(kv.format, vector, copy));
    split_rows(scratch, width, dst);
    Scalar::F32
}

/// Positions that are visible to a row.
#[derive(Clone, Copy)]
enum VisiblePositions<'a> {
    /// The last ones: causal or sliding-window attention.
    Window(usize),
    /// Listed ones, by row of the op, and by KV head where each has a list: sparse attention.
    Listed(&'a [f32], View),
}

/// Visible positions of one row and one KV head. `range` is a range of positions, or of indices
/// into a list of positions.
struct VisibleRange {
    row: usize,
    range: Range<usize>,
    kv_head: usize,
}

impl VisiblePositions<'_> {
    /// Range visible to row `row` of the op at position `position`.
    fn range(&self, row: usize, position: usize) -> Range<usize> {
        match self {
            VisiblePositions::Window(window) => {
                (position + 1).saturating_sub(*window)..position + 1
            }
            VisiblePositions::Listed(values, view) => {
                // All lists of a row are as long.
                0..self::row(values, view, row).partition_point(|p| *p >= 0.0)
            }
        }
    }

    /// Sets `dst` to the keys or values of a visible range that is within one block.
    fn vectors<'a>(
        &self,
        kernels: Kernels,
        kv: &'a HostKvCache,
        visible: &VisibleRange,
        kind: KvKind,
        scratch: &'a mut [f32],
        dst: &mut [&'a [u8]],
    ) -> Scalar {
        let (width, head) = (kv.width(kind), visible.kv_head);
        match self {
            VisiblePositions::Window(_) => {
                let vectors = kv.vectors(kind, visible.range.start, head);
                readable_vectors(kernels, kv, vectors, scratch, width, dst)
            }
            VisiblePositions::Listed(values, view) => {
                let list = if view.heads == 1 { 0 } else { head };
                let listed = vector(values, view, visible.row, list)[visible.range.clone()].iter();
                let vectors = listed.map(|p| kv.vector(kind, *p as usize, head));
                readable_vectors(kernels, kv, vectors, scratch, width, dst)
            }
        }
    }
}

/// Online softmax: the maximum score so far, and the sum of the weights relative to it.
#[derive(Clone, Copy)]
pub(super) struct OnlineSoftmax {
    max: f32,
    sum: f32,
}

impl OnlineSoftmax {
    /// Softmax of no scores.
    pub(super) const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Replaces scores by their weights.
    pub(super) fn from_scores(kernels: Kernels, scores: &mut [f32]) -> Self {
        let max = kernels.max(scores);
        Self { max, sum: kernels.exp_sum(scores, max) }
    }

    /// Merges a partial softmax. Returns the factors of the accumulated output and of the partial
    /// output.
    pub(super) fn merge(&mut self, partial: Self) -> MergeFactors {
        let factors = if self.sum == 0.0 {
            MergeFactors { keep: 0.0, add: 1.0 }
        } else if partial.max > self.max {
            MergeFactors { keep: (self.max - partial.max).exp(), add: 1.0 }
        } else {
            MergeFactors { keep: 1.0, add: (partial.max - self.max).exp() }
        };
        self.max = self.max.max(partial.max);
        self.sum = self.sum * factors.keep + partial.sum * factors.add;
        factors
    }

    /// Divides the accumulated output by the sum of the weights. A sink adds a weight without a
    /// value.
    pub(super) fn finish(&self, y: &mut [f32], sink: Option<f32>) {
        let sum = self.sum + sink.map_or(0.0, |sink| (sink - self.max).exp());
        let scale = if self.sum == 0.0 { 0.0 } else { 1.0 / sum };
        y.iter_mut().for_each(|y| *y *= scale);
    }
}

/// Inputs of an op that all its spans share.
struct AttentionInputs<'a> {
    kernels: Kernels,
    q: (&'a [f32], View),
    gate: Option<(&'a [f32], View)>,
    sinks: Option<&'a [f32]>,
    visible: VisiblePositions<'a>,
    scale: f32,
    has_values: bool,
}

impl<'a> AttentionInputs<'a> {
    /// Inputs of [`Op::Attention`]; `None` for other ops.
    fn new(host: &'a Host, kernels: Kernels, op: &Op<'_>) -> Result<Option<Self>, Error> {
        let &Op::Attention { q, v, gate, scale, window, sinks, positions, .. } = op else {
            return Ok(None);
        };
        Ok(Some(Self {
            kernels,
            q: (host.get(&q)?, q),
            gate: gate.map(|gate| Ok::<_, Error>((host.get(&gate)?, gate))).transpose()?,
            sinks: sinks.map(|sinks| host.values(sinks)).transpose()?,
            visible: match positions {
                Some(view) => VisiblePositions::Listed(host.get(&view)?, view),
                None => VisiblePositions::Window(window.unwrap_or(usize::MAX)),
            },
            scale,
            has_values: v.is_some(),
        }))
    }

    /// Normalizes the output of a row and head of the op, and applies the gate.
    fn finish(&self, softmax: OnlineSoftmax, y: &mut [f32], row: usize, head: usize) {
        softmax.finish(y, self.sinks.map(|sinks| sinks[head]));
        if let Some((gate, view)) = &self.gate {
            self.kernels.mul_sigmoid(y, vector(gate, view, row, head));
        }
    }

    /// Heads of a tile, given the number of pairs of rows and blocks. The result divides `group`,
    /// the heads that share a KV head.
    fn tile_heads(&self, group: usize, pairs: usize) -> usize {
        let max = (self.q.1.heads * pairs / MIN_TILES).clamp(MIN_HEADS, MAX_QUERIES).min(group);
        (1..=max).rev().find(|n| group.is_multiple_of(*n)).unwrap_or(1)
    }
}

/// Computes all spans in one parallel loop if each has one row, as in a decode step of several
/// sequences. Returns false, and computes nothing, if the longest tile would take more than its
/// share of the time.
fn attend_batched(
    host: &Host,
    cpu: &mut Cpu,
    inputs: &AttentionInputs<'_>,
    op: &Op<'_>,
    values: &mut [f32],
) -> Result<bool, Error> {
    let &Op::Attention { q, spans, out, .. } = op else { return Ok(false) };
    if spans.len() < 2 || spans.iter().any(|span| span.rows != 1) {
        return Ok(false);
    }
    let (mut total, mut longest, mut group) = (0, 0, 1);
    for cache in span_caches(host, spans) {
        let span = SpanAttention::new(inputs, cache?);
        let blocks = span.blocks().len();
        (total, longest, group) = (total + blocks, longest.max(blocks), span.group);
        cpu.reserve_all(dequantized_scratch(span.kv))?;
    }
    let heads = inputs.tile_heads(group, total);
    if longest > 1 && total * (q.heads / heads) < ENOUGH_TILES * longest {
        return Ok(false);
    }
    cpu.pool.tiles(values, Grid::new(&out, 1, heads, out.width), |mut tile, lane| {
        let first = tile.rows().start;
        let span = &spans[first];
        // The loop above has found the state.
        let Ok(kv) = host.states.kv_cache(span.state) else { return };
        let span = SpanAttention::new(inputs, SpanCache { kv, first, span });
        let work = TileWork { rows: 0..1, tile_row: first, blocks: span.blocks(), next: None };
        let softmax = span.accumulate(work, &mut tile, lane);
        for ((row, head), softmax) in tile.coords().zip(softmax) {
            inputs.finish(softmax, tile.vector(row, head), row, head);
        }
    });
    Ok(true)
}

/// Computes the rows of one span.
fn attend(
    cpu: &mut Cpu,
    inputs: &AttentionInputs<'_>,
    cache: SpanCache<'_>,
    op: &Op<'_>,
    values: &mut [f32],
) -> Result<(), Error> {
    let &Op::Attention { q, positions, out, .. } = op else { return Ok(()) };
    let SpanCache { kv, first, span } = cache;
    cpu.reserve_all(dequantized_scratch(kv))?;
    let (kernels, attention) = (cpu.kernels, SpanAttention::new(inputs, cache));
    let (group, blocks) = (attention.group, attention.blocks());
    // A tile has one KV head.
    let heads = inputs.tile_heads(group, blocks.len());
    // Rows with listed positions share no keys.
    let rows = if positions.is_some() { 1 } else { MAX_QUERIES / heads };
    let span_out = out.slice(first, span.rows);
    let tiles = span.rows.div_ceil(rows) * (q.heads / heads);
    let Some(split) =
        SplitLayout::new(span.rows, rows, &out, blocks.len()).filter(|_| tiles < ENOUGH_TILES)
    else {
        cpu.pool.tiles(values, Grid::new(&span_out, rows, heads, out.width), |mut tile, lane| {
            let work =
                TileWork { rows: tile.rows(), tile_row: 0, blocks: blocks.clone(), next: None };
            let softmax = attention.accumulate(work, &mut tile, lane);
            for ((row, head), softmax) in tile.coords().zip(softmax) {
                inputs.finish(softmax, tile.vector(row, head), first + row, head);
            }
        });
        return Ok(());
    };
    let (head_tiles, threads) = (q.heads / heads, cpu.pool.threads());
    let (totals, rest) = cpu.kv_splits.split_at_mut(split.totals.rows * split.totals.row_stride);
    let (maxima, sums) = rest.split_at_mut(split.softmax.rows * split.softmax.row_stride);
    for pass in blocks.clone().step_by(split.blocks) {
        let pass = pass..blocks.end.min(pass + split.blocks);
        let grid = |view: &View| {
            Grid::new(&view.slice(0, pass.len() * split.rows), rows, heads, view.width)
        };
        cpu.pool.tiles2(
            sums,
            grid(&split.sums),
            maxima,
            grid(&split.softmax),
            |mut tile, mut partial, lane| {
                let (i, start) = (tile.rows().start / split.rows, tile.rows().start % split.rows);
                // Threads take tiles in turn, and heads vary fastest: this is likely the next
                // tile of this thread.
                let next_tile =
                    tile.rows().start / rows * head_tiles + tile.heads().start / heads + threads;
                let next_block = pass.start + next_tile / head_tiles * rows / split.rows;
                let next = (next_block < pass.end).then_some(KvBlock {
                    block: next_block,
                    kv_head: next_tile % head_tiles * heads / group,
                });
                let work = TileWork {
                    rows: start..span.rows.min(start + rows),
                    tile_row: i * split.rows,
                    blocks: pass.start + i..pass.start + i + 1,
                    next,
                };
                let softmax = attention.accumulate(work, &mut tile, lane);
                for ((row, head), softmax) in tile.coords().zip(softmax) {
                    partial.vector(row, head).copy_from_slice(&[softmax.max, softmax.sum]);
                }
            },
        );
        let (maxima, sums) = (&*maxima, &*sums);
        let vectors = |view: &View| Grid::new(view, 1, 1, view.width);
        cpu.pool.tiles2(
            values,
            vectors(&span_out),
            totals,
            vectors(&split.totals),
            |mut tile, mut total, _| {
                let (row, head) = (tile.rows().start, tile.heads().start);
                let (y, total) = (tile.vector(row, head), total.vector(row, head));
                let mut softmax = OnlineSoftmax { max: total[0], sum: total[1] };
                if pass.start == blocks.start {
                    softmax = OnlineSoftmax::EMPTY;
                    y.fill(0.0);
                }
                for split_row in (0..pass.len()).map(|i| i * split.rows + row) {
                    let partial = vector(maxima, &split.softmax, split_row, head);
                    let partial = OnlineSoftmax { max: partial[0], sum: partial[1] };
                    // A block that is not visible to the row has no partial result.
                    if partial.sum != 0.0 {
                        kernels.merge(
                            y,
                            softmax.merge(partial),
                            vector(sums, &split.sums, split_row, head),
                        );
                    }
                }
                if pass.end == blocks.end {
                    inputs.finish(softmax, y, first + row, head);
                } else {
                    total.copy_from_slice(&[softmax.max, softmax.sum]);
                }
            },
        );
    }
    Ok(())
}

/// Layout of split-KV partial results in the scratch memory.
struct SplitLayout {
    /// Blocks per pass.
    blocks: usize,
    /// Rows per block, rounded up to whole tiles.
    rows: usize,
    /// `(blocks * rows, heads, value width)`: weighted sums of values.
    sums: View,
    /// `(blocks * rows, heads, 2)`: maximum and sum of the softmax.
    softmax: View,
    /// `(rows of the span, heads, 2)`: maximum and sum over the previous passes.
    totals: View,
}

impl SplitLayout {
    /// Layout for the rows of a span, with `tile_rows` rows per tile. `None` if there is only one
    /// block, or scratch for only one.
    fn new(rows: usize, tile_rows: usize, out: &View, blocks: usize) -> Option<Self> {
        let heads = out.heads;
        let dense = |rows, width| View::rows(Buffer::INTERNAL, rows, heads * width).split(heads);
        let padded = rows.next_multiple_of(tile_rows);
        let left = SPLIT_SCRATCH_LEN.checked_sub(rows.checked_mul(heads)?.checked_mul(2)?)?;
        let blocks =
            blocks.min(left / padded.checked_mul(heads)?.checked_mul(out.width + 2)?.max(1));
        (blocks > 1).then(|| Self {
            blocks,
            rows: padded,
            sums: dense(blocks * padded, out.width),
            softmax: dense(blocks * padded, 2),
            totals: dense(rows, 2),
        })
    }
}

/// Queries and softmax state of a tile.
struct QueryTile<'a> {
    q: [&'a [f32]; MAX_QUERIES],
    /// Row and head of each query's output in the tile.
    coords: [(usize, usize); MAX_QUERIES],
    softmax: [OnlineSoftmax; MAX_QUERIES],
    /// `(queries, positions)`: scores of a block.
    scores: [f32; MAX_QUERIES * BLOCK],
}

/// Keys of one block and one KV head.
#[derive(Clone, Copy)]
struct KvBlock {
    block: usize,
    kv_head: usize,
}

/// Work of a tile.
struct TileWork {
    /// Rows of the span.
    rows: Range<usize>,
    /// Row of the tile that is row 0 of the span.
    tile_row: usize,
    /// Blocks of positions.
    blocks: Range<usize>,
    /// Keys that this thread is likely to read next, to be prefetched.
    next: Option<KvBlock>,
}

/// Attention of one span.
struct SpanAttention<'a> {
    inputs: &'a AttentionInputs<'a>,
    kv: &'a HostKvCache,
    /// Row of the op where the span starts.
    first: usize,
    span: &'a Span,
    /// Query heads per KV head.
    group: usize,
}

impl<'a> SpanAttention<'a> {
    fn new(inputs: &'a AttentionInputs<'a>, SpanCache { kv, first, span }: SpanCache<'a>) -> Self {
        Self { inputs, kv, first, span, group: inputs.q.1.heads / kv.kv_heads }
    }

    /// Blocks of positions that are visible to any row of the span.
    fn blocks(&self) -> Range<usize> {
        let start = (0..self.span.rows).map(|row| self.range(row).start).min().unwrap_or(0);
        let end = (0..self.span.rows).map(|row| self.range(row).end).max().unwrap_or(0);
        start / BLOCK..end.div_ceil(BLOCK)
    }

    /// Range visible to a row of the span.
    fn range(&self, row: usize) -> Range<usize> {
        self.inputs.visible.range(self.first + row, self.span.position + row)
    }

    /// Contiguous keys of a block before position `end`; empty for listed positions.
    fn keys(&self, KvBlock { block, kv_head }: KvBlock, end: usize) -> &[u8] {
        let VisiblePositions::Window(_) = self.inputs.visible else { return &[] };
        let keys = self.kv.contiguous(KvKind::Key, block * BLOCK, kv_head);
        &keys[..keys.len().min((end - block * BLOCK) * self.kv.bytes(KvKind::Key))]
    }

    /// Accumulates the weighted values of the tile's queries over the blocks, without the final
    /// division. Returns the softmax states.
    fn accumulate(
        &self,
        work: TileWork,
        tile: &mut Tile<'_, f32>,
        lane: &mut WorkerScratch,
    ) -> [OnlineSoftmax; MAX_QUERIES] {
        let TileWork { rows, tile_row, blocks, next } = work;
        let heads = tile.heads();
        let mut queries = QueryTile {
            q: [&[]; MAX_QUERIES],
            coords: [(0, 0); MAX_QUERIES],
            softmax: [OnlineSoftmax::EMPTY; MAX_QUERIES],
            scores: [0.0; MAX_QUERIES * BLOCK],
        };
        for (i, row) in rows.clone().enumerate() {
            for (j, head) in heads.clone().enumerate() {
                let i = i * heads.len() + j;
                queries.q[i] = vector(self.inputs.q.0, &self.inputs.q.1, self.first + row, head);
                queries.coords[i] = (tile_row + row, head);
                tile.vector(tile_row + row, head).fill(0.0);
            }
        }
        let mut scratch = mem::take(&mut lane.kv);
        // Nothing before the first row's range, or after the last row's range, is visible.
        let (start, end) = (self.range(rows.start).start, self.range(rows.end - 1).end);
        let blocks = blocks.start.max(start / BLOCK)..blocks.end.min(end.div_ceil(BLOCK));
        let kv_head = heads.start / self.group;
        for block in blocks.clone() {
            let next = if block + 1 < blocks.end {
                Some(KvBlock { block: block + 1, kv_head })
            } else {
                next
            };
            let next_keys =
                next.map_or(&[][..], |next| self.keys(next, self.span.position + self.span.rows));
            let block_range = |row: usize| {
                let range = self.range(row);
                range.start.max(block * BLOCK)..range.end.min((block + 1).saturating_mul(BLOCK))
            };
            let mut row = rows.start;
            while row < rows.end {
                // Consecutive rows with the same visible range of the block are computed together.
                let range = block_range(row);
                let end = (row + 1..rows.end)
                    .find(|other| block_range(*other) != range)
                    .unwrap_or(rows.end);
                if !range.is_empty() {
                    let visible = VisibleRange { row: self.first + row, range, kv_head };
                    let selected =
                        (row - rows.start) * heads.len()..(end - rows.start) * heads.len();
                    self.add_block(&mut queries, selected, &visible, &mut scratch, next_keys, tile);
                }
                row = end;
            }
        }
        lane.kv = scratch;
        queries.softmax
    }

    /// Adds a visible range to the softmax and the sums of the selected queries. Prefetches
    /// `next_keys`.
    fn add_block(
        &self,
        queries: &mut QueryTile<'_>,
        selected: Range<usize>,
        visible: &VisibleRange,
        scratch: &mut [f32],
        next_keys: &[u8],
        tile: &mut Tile<'_, f32>,
    ) {
        let &AttentionInputs { kernels, has_values, scale, visible: positions, .. } = self.inputs;
        let (kv, len) = (self.kv, visible.range.len());
        let q = &queries.q[selected.clone()];
        let coords = &queries.coords[selected.clone()];
        let softmax = &mut queries.softmax[selected];
        let scores = &mut queries.scores[..q.len() * len];
        let (mut keys, mut values) = ([&[][..]; BLOCK], [&[][..]; BLOCK]);
        let (key_scratch, value_scratch) =
            scratch.split_at_mut(scratch.len().min(BLOCK * kv.key_width));
        let (keys, values) = (&mut keys[..len], &mut values[..len]);
        let scalar = positions.vectors(kernels, kv, visible, KvKind::Key, key_scratch, keys);
        // Without values, the values are prefixes of the keys.
        if has_values {
            positions.vectors(kernels, kv, visible, KvKind::Value, value_scratch, values);
        } else {
            values.copy_from_slice(keys);
        }
        let (keys, values) = (FloatRows { scalar, rows: keys }, FloatRows { scalar, rows: values });
        let value_bytes = if has_values { kv.bytes(KvKind::Value) } else { 0 };
        let prefetch = PrefetchRows { rows: values, bytes: value_bytes };
        kernels.scores_with_prefetch(q, keys, scale, scores, prefetch);
        let mut factors = [MergeFactors::default(); MAX_QUERIES];
        for ((scores, softmax), factors) in
            scores.chunks_exact_mut(len).zip(softmax).zip(&mut factors)
        {
            *factors = softmax.merge(OnlineSoftmax::from_scores(kernels, scores));
        }
        let (mut p, n) = ([&[][..]; MAX_QUERIES], coords.len());
        p.iter_mut().zip(scores.chunks_exact(len)).for_each(|(p, scores)| *p = scores);
        kernels.weighted_sum_with_prefetch(
            &p[..n],
            values,
            &factors[..n],
            &mut tile.vectors_mut::<MAX_QUERIES>(coords)[..n],
            next_keys,
        );
    }
}
