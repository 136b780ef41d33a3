//! Causal attention with grouped heads.
//!
//! A row's sums are those of blocks of positions, joined in order. A block's part of a row is the same whoever sums it: one
//! tile goes over all blocks where rows and heads make tiles enough; else every block is a tile, and the parts, which lie in
//! [`Cpu`]'s scratch, are joined afterwards.

use std::{mem, ops::Range};

use super::{
    Cpu,
    pool::{Grid, Tile},
    row,
    scratch::WorkerScratch,
    simd::{FloatRows, Kernels, MergeFactors, PrefetchRows, split_rows},
    vector,
};
use crate::{
    Buffer, Error, KV_BLOCK, Op, Scalar, ScratchShape, Span, View,
    host::{Host, KeyValue, Kind},
};

/// Positions of a block, which lie in one piece. Blocks begin at multiples of it, so a row's sums do not depend on the
/// other rows of the op, nor on where a chunk began.
const BLOCK: usize = KV_BLOCK;
/// Most queries of a tile, rows times heads: they read the same keys and values.
const QUERIES: usize = 16;
/// Tiles that one row makes at least, if a tile has no fewer heads than [`MIN_HEADS`].
const MIN_TILES: usize = 8;
/// Heads of a tile, if as many share their keys.
const MIN_HEADS: usize = 4;
/// Tiles that are enough for any number of threads.
const ENOUGH_TILES: usize = 32;
/// Numbers that there is room for in parts of sums: two MiB, which caches hold.
pub(super) const KV_SPLITS: usize = 1 << 19;

/// Runs [`Op::Attention`].
pub(super) fn attention(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::Attention { k, v, spans, out, .. } = op else { return Ok(()) };
    host.with(&out, |host, numbers| {
        write_keys(host, spans, (&k, v.as_ref()))?;
        let Some(common) = Common::of(host, cpu.kernels, op)? else { return Ok(()) };
        if attend_together((host, cpu), &common, op, numbers)? {
            return Ok(());
        }
        of_spans(host, spans).try_for_each(|of_span| attend(cpu, (&common, of_span?), op, numbers))
    })
}

/// Writes the rows of keys and values into the spans' states.
pub(super) fn write_keys(
    host: &mut Host,
    spans: &[Span],
    keys: (&View, Option<&View>),
) -> Result<(), Error> {
    let mut first = 0;
    for span in spans {
        let mut kv = host.states.take_key_value(span.state, span.position, span.rows)?;
        let done = append(host, &mut kv, (span, first), keys);
        host.states.put_key_value(span.state, kv)?;
        done?;
        first += span.rows;
    }
    Ok(())
}

/// Spans with their states and the rows of the op where they begin.
pub(super) fn of_spans<'a>(
    host: &'a Host,
    spans: &'a [Span],
) -> impl Iterator<Item = Result<OfSpan<'a>, Error>> {
    spans.iter().scan(0, |first, span| {
        let begin = std::mem::replace(first, *first + span.rows);
        Some(host.states.key_value(span.state).map(|kv| (kv, begin, span)))
    })
}

/// A span's state, the row of the op where it begins, and the span.
pub(super) type OfSpan<'a> = (&'a KeyValue, usize, &'a Span);

/// Writes keys and values of a span's rows, which begin at row `first` of the op, at their positions.
fn append(
    host: &Host,
    kv: &mut KeyValue,
    (span, first): (&Span, usize),
    (k, v): (&View, Option<&View>),
) -> Result<(), Error> {
    let (k, v) = ((host.get(k)?, k), v.map(|v| Ok::<_, Error>((host.get(v)?, v))).transpose()?);
    for i in 0..span.rows {
        for head in 0..kv.kv_heads {
            kv.write(Kind::Key, span.position + i, head, vector(k.0, k.1, first + i, head));
            if let Some((all, v)) = v {
                kv.write(Kind::Value, span.position + i, head, vector(all, v, first + i, head));
            }
        }
    }
    Ok(())
}

/// The scratch for keys and values that must be widened.
pub(super) fn wide_kv(kv: &KeyValue) -> ScratchShape {
    let wide_kv = if kv.format.scalar().is_none() { kv.key_width + kv.value_width } else { 0 };
    ScratchShape { wide_kv, ..ScratchShape::default() }
}

/// Points `to` to vectors of `width` numbers as kernels read them: in place, or widened to `room`.
pub(super) fn readable<'a>(
    (kernels, kv): (Kernels, &KeyValue),
    from: impl Iterator<Item = &'a [u8]>,
    (room, width): (&'a mut [f32], usize),
    to: &mut [&'a [u8]],
) -> Scalar {
    if let Some(scalar) = kv.format.scalar() {
        to.iter_mut().zip(from).for_each(|(to, vector)| *to = vector);
        return scalar;
    }
    let wide = from.zip(room.chunks_exact_mut(width)).take(to.len());
    wide.for_each(|(vector, wide)| kernels.widen_kv(kv.format, vector, wide));
    split_rows(room, width, to);
    Scalar::F32
}

/// Which positions a row sees: a range of them, or of a list of them.
#[derive(Clone, Copy)]
enum Seen<'a> {
    /// The last ones.
    Window(usize),
    /// Those that are named, by row of the op.
    Named(&'a [f32], View),
}

impl Seen<'_> {
    /// What row `row` of the op at position `position` sees.
    fn range(&self, row: usize, position: usize) -> Range<usize> {
        match self {
            Seen::Window(window) => (position + 1).saturating_sub(*window)..position + 1,
            Seen::Named(all, view) => 0..self::row(all, view, row).partition_point(|p| *p >= 0.0),
        }
    }

    /// Keys or values of a part of such a range, in one block: `scalar` and where they are.
    fn vectors<'a>(
        &self,
        (kernels, kv): (Kernels, &'a KeyValue),
        (row, part, head): (usize, Range<usize>, usize),
        (kind, room): (Kind, &'a mut [f32]),
        to: &mut [&'a [u8]],
    ) -> Scalar {
        let room = (room, kv.width(kind));
        match self {
            Seen::Window(_) => {
                readable((kernels, kv), kv.vectors(kind, part.start, head), room, to)
            }
            Seen::Named(all, view) => {
                let named = self::row(all, view, row)[part].iter();
                readable((kernels, kv), named.map(|p| kv.vector(kind, *p as usize, head)), room, to)
            }
        }
    }
}

/// A softmax under way: the largest score, and the sum of the weights relative to it.
#[derive(Clone, Copy)]
pub(super) struct Softmax {
    max: f32,
    sum: f32,
}

impl Softmax {
    /// Of no scores.
    pub(super) const NONE: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Makes scores weights.
    pub(super) fn of(kernels: Kernels, scores: &mut [f32]) -> Self {
        let max = kernels.max(scores);
        Self { max, sum: kernels.exp_sum(scores, max) }
    }

    /// Takes in a part; the factors are those on values that were summed before, and on the part's.
    pub(super) fn join(&mut self, part: Self) -> MergeFactors {
        let by = if self.sum == 0.0 {
            MergeFactors { keep: 0.0, add: 1.0 }
        } else if part.max > self.max {
            MergeFactors { keep: (self.max - part.max).exp(), add: 1.0 }
        } else {
            MergeFactors { keep: 1.0, add: (part.max - self.max).exp() }
        };
        self.max = self.max.max(part.max);
        self.sum = self.sum * by.keep + part.sum * by.add;
        by
    }

    /// Divides what was summed by the sum of the weights. A sink is a score whose weight belongs to no value.
    pub(super) fn finish(&self, y: &mut [f32], sink: Option<f32>) {
        let sum = self.sum + sink.map_or(0.0, |sink| (sink - self.max).exp());
        let scale = if self.sum == 0.0 { 0.0 } else { 1.0 / sum };
        y.iter_mut().for_each(|y| *y *= scale);
    }
}

/// What the rows of an op share, whatever their span.
struct Common<'a> {
    kernels: Kernels,
    q: (&'a [f32], View),
    gate: Option<(&'a [f32], View)>,
    sinks: Option<&'a [f32]>,
    seen: Seen<'a>,
    scale: f32,
    has_values: bool,
}

impl<'a> Common<'a> {
    /// Of [`Op::Attention`].
    fn of(host: &'a Host, kernels: Kernels, op: &Op<'_>) -> Result<Option<Self>, Error> {
        let &Op::Attention { q, v, gate, scale, window, sinks, positions, .. } = op else {
            return Ok(None);
        };
        Ok(Some(Self {
            kernels,
            q: (host.get(&q)?, q),
            gate: gate.map(|gate| Ok::<_, Error>((host.get(&gate)?, gate))).transpose()?,
            sinks: sinks.map(|sinks| host.all(sinks)).transpose()?,
            seen: match positions {
                Some(view) => Seen::Named(host.get(&view)?, view),
                None => Seen::Window(window.unwrap_or(usize::MAX)),
            },
            scale,
            has_values: v.is_some(),
        }))
    }

    /// Ends the sums of a row of the op.
    fn finish(&self, softmax: Softmax, y: &mut [f32], row: usize, head: usize) {
        softmax.finish(y, self.sinks.map(|sinks| sinks[head]));
        if let Some((gate, view)) = &self.gate {
            self.kernels.mul_sigmoid(y, vector(gate, view, row, head));
        }
    }

    /// Heads of a tile, where rows and blocks of positions make so many pairs: a divisor of those that share keys.
    fn heads(&self, group: usize, pairs: usize) -> usize {
        let most = (self.q.1.heads * pairs / MIN_TILES).clamp(MIN_HEADS, QUERIES).min(group);
        (1..=most).rev().find(|n| group.is_multiple_of(*n)).unwrap_or(1)
    }
}

/// Attends from rows that have a span each, as those of several sessions have, all at once: if no tile then takes longer than
/// all threads together should.
fn attend_together(
    (host, cpu): (&Host, &mut Cpu),
    common: &Common<'_>,
    op: &Op<'_>,
    numbers: &mut [f32],
) -> Result<bool, Error> {
    let &Op::Attention { q, spans, out, .. } = op else { return Ok(false) };
    if spans.len() < 2 || spans.iter().any(|span| span.rows != 1) {
        return Ok(false);
    }
    let (mut all, mut longest, mut group) = (0, 0, 1);
    for of_span in of_spans(host, spans) {
        let of = Attend::new(common, of_span?);
        let blocks = of.blocks().len();
        (all, longest, group) = (all + blocks, longest.max(blocks), of.group);
        cpu.reserve_all(wide_kv(of.kv))?;
    }
    let heads = common.heads(group, all);
    if longest > 1 && all * (q.heads / heads) < ENOUGH_TILES * longest {
        return Ok(false);
    }
    cpu.pool.tiles(numbers, Grid::new(&out, 1, heads, out.width), |mut tile, lane| {
        let row = tile.rows().start;
        // It was there a moment ago.
        let Ok(kv) = host.states.key_value(spans[row].state) else { return };
        let of = Attend::new(common, (kv, row, &spans[row]));
        let softmax = of.sum((0..1, row), (of.blocks(), None), &mut tile, lane);
        for ((row, head), softmax) in tile.places().zip(softmax) {
            common.finish(softmax, tile.vector(row, head), row, head);
        }
    });
    Ok(true)
}

/// Attends from the rows of one span to its keys and values.
fn attend(
    cpu: &mut Cpu,
    (common, (kv, first, span)): (&Common<'_>, OfSpan<'_>),
    op: &Op<'_>,
    numbers: &mut [f32],
) -> Result<(), Error> {
    let &Op::Attention { q, positions, out, .. } = op else { return Ok(()) };
    cpu.reserve_all(wide_kv(kv))?;
    let (kernels, of) = (cpu.kernels, Attend::new(common, (kv, first, span)));
    let (group, blocks) = (of.group, of.blocks());
    // A tile has one head of keys and values.
    let heads = common.heads(group, blocks.len());
    // Rows with positions of their own share nothing.
    let rows = if positions.is_some() { 1 } else { QUERIES / heads };
    let to = out.slice(first, span.rows);
    let tiles = span.rows.div_ceil(rows) * (q.heads / heads);
    let Some(parts) =
        Parts::new((span.rows, rows), &out, blocks.len()).filter(|_| tiles < ENOUGH_TILES)
    else {
        cpu.pool.tiles(numbers, Grid::new(&to, rows, heads, out.width), |mut tile, lane| {
            let softmax = of.sum((tile.rows(), 0), (blocks.clone(), None), &mut tile, lane);
            for ((row, head), softmax) in tile.places().zip(softmax) {
                common.finish(softmax, tile.vector(row, head), first + row, head);
            }
        });
        return Ok(());
    };
    let (of_heads, threads) = (q.heads / heads, cpu.pool.threads());
    let (totals, room) = cpu.parts.split_at_mut(parts.totals.rows * parts.totals.row_stride);
    let (maxima, sums) = room.split_at_mut(parts.softmax.rows * parts.softmax.row_stride);
    for some in blocks.clone().step_by(parts.blocks) {
        let some = some..blocks.end.min(some + parts.blocks);
        let grid = |view: &View| {
            Grid::new(&view.slice(0, some.len() * parts.rows), rows, heads, view.width)
        };
        cpu.pool.tiles2(
            (sums, grid(&parts.sums)),
            (maxima, grid(&parts.softmax)),
            |mut tile, mut to, lane| {
                let (i, begin) = (tile.rows().start / parts.rows, tile.rows().start % parts.rows);
                let of_span = begin..span.rows.min(begin + rows);
                // Threads take tiles in turn, whose heads run fastest.
                let later =
                    tile.rows().start / rows * of_heads + tile.heads().start / heads + threads;
                let then = some.start + later / of_heads * rows / parts.rows;
                let then = (then < some.end).then_some((then, later % of_heads * heads / group));
                let blocks = some.start + i..some.start + i + 1;
                let softmax = of.sum((of_span, i * parts.rows), (blocks, then), &mut tile, lane);
                for ((row, head), softmax) in tile.places().zip(softmax) {
                    to.vector(row, head).copy_from_slice(&[softmax.max, softmax.sum]);
                }
            },
        );
        let (maxima, sums) = (&*maxima, &*sums);
        let each = |view: &View| Grid::new(view, 1, 1, view.width);
        cpu.pool.tiles2(
            (numbers, each(&to)),
            (totals, each(&parts.totals)),
            |mut tile, mut total, _| {
                let (row, head) = (tile.rows().start, tile.heads().start);
                let (y, total) = (tile.vector(row, head), total.vector(row, head));
                let mut softmax = Softmax { max: total[0], sum: total[1] };
                if some.start == blocks.start {
                    softmax = Softmax::NONE;
                    y.fill(0.0);
                }
                for part in (0..some.len()).map(|i| i * parts.rows + row) {
                    let of_part = vector(maxima, &parts.softmax, part, head);
                    let of_part = Softmax { max: of_part[0], sum: of_part[1] };
                    // Of a block that the row does not see there is no part.
                    if of_part.sum != 0.0 {
                        kernels.merge(
                            y,
                            softmax.join(of_part),
                            vector(sums, &parts.sums, part, head),
                        );
                    }
                }
                if some.end == blocks.end {
                    common.finish(softmax, y, first + row, head);
                } else {
                    total.copy_from_slice(&[softmax.max, softmax.sum]);
                }
            },
        );
    }
    Ok(())
}

/// How parts of sums lie in scratch.
struct Parts {
    /// Blocks that there is room for.
    blocks: usize,
    /// Rows of a block: whole tiles.
    rows: usize,
    /// `(blocks * rows, heads, value width)`.
    sums: View,
    /// `(blocks * rows, heads, 2)`: maximum and sum.
    softmax: View,
    /// `(rows of the span, heads, 2)`: those of what has been joined.
    totals: View,
}

impl Parts {
    /// For a span's rows, so many in a tile; `None` if there is one block only, or room for one only.
    fn new((rows, of_tile): (usize, usize), out: &View, blocks: usize) -> Option<Self> {
        let heads = out.heads;
        let dense = |rows, width| View::rows(Buffer(0), rows, heads * width).split(heads);
        let padded = rows.next_multiple_of(of_tile);
        let left = KV_SPLITS.checked_sub(rows.checked_mul(heads)?.checked_mul(2)?)?;
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

/// The queries of a tile.
struct Queries<'a> {
    q: [&'a [f32]; QUERIES],
    /// Rows and heads of the sums in the tile.
    places: [(usize, usize); QUERIES],
    softmax: [Softmax; QUERIES],
    /// `(queries, positions)` of a block.
    scores: [f32; QUERIES * BLOCK],
}

/// What the tiles of one span share.
struct Attend<'a> {
    common: &'a Common<'a>,
    kv: &'a KeyValue,
    /// The row of the op where the span begins.
    first: usize,
    span: &'a Span,
    /// Heads that share keys.
    group: usize,
}

impl<'a> Attend<'a> {
    fn new(common: &'a Common<'a>, (kv, first, span): OfSpan<'a>) -> Self {
        Self { common, kv, first, span, group: common.q.1.heads / kv.kv_heads }
    }

    /// Blocks of positions that any row of the span sees.
    fn blocks(&self) -> Range<usize> {
        let begin = (0..self.span.rows).map(|row| self.range(row).start).min().unwrap_or(0);
        let end = (0..self.span.rows).map(|row| self.range(row).end).max().unwrap_or(0);
        begin / BLOCK..end.div_ceil(BLOCK)
    }

    /// What a row of the span sees.
    fn range(&self, row: usize) -> Range<usize> {
        self.common.seen.range(self.first + row, self.span.position + row)
    }

    /// The keys of a block that lie in one piece, up to a position.
    fn keys(&self, (block, kv_head): (usize, usize), end: usize) -> &[u8] {
        let Seen::Window(_) = self.common.seen else { return &[] };
        let piece = self.kv.piece(Kind::Key, block * BLOCK, kv_head);
        &piece[..piece.len().min((end - block * BLOCK) * self.kv.bytes(Kind::Key))]
    }

    /// Sums over blocks, for the tile's heads and some rows of the span, which are `offset` rows further in the tile. `then` are the
    /// block and the head of the keys that are likely to be read next.
    fn sum(
        &self,
        (rows, offset): (Range<usize>, usize),
        (blocks, then): (Range<usize>, Option<(usize, usize)>),
        tile: &mut Tile<'_, f32>,
        lane: &mut WorkerScratch,
    ) -> [Softmax; QUERIES] {
        let heads = tile.heads();
        let mut all = Queries {
            q: [&[]; QUERIES],
            places: [(0, 0); QUERIES],
            softmax: [Softmax::NONE; QUERIES],
            scores: [0.0; QUERIES * BLOCK],
        };
        for (i, row) in rows.clone().enumerate() {
            for (j, head) in heads.clone().enumerate() {
                let i = i * heads.len() + j;
                all.q[i] = vector(self.common.q.0, &self.common.q.1, self.first + row, head);
                all.places[i] = (offset + row, head);
                tile.vector(offset + row, head).fill(0.0);
            }
        }
        let mut room = mem::take(&mut lane.kv);
        // No row sees what begins before the first one's, or ends after the last one's.
        let (begin, end) = (self.range(rows.start).start, self.range(rows.end - 1).end);
        let blocks = blocks.start.max(begin / BLOCK)..blocks.end.min(end.div_ceil(BLOCK));
        for block in blocks.clone() {
            let kv_head = heads.start / self.group;
            let then = if block + 1 < blocks.end { Some((block + 1, kv_head)) } else { then };
            let next =
                then.map_or(&[][..], |then| self.keys(then, self.span.position + self.span.rows));
            let part = |row: usize| {
                let range = self.range(row);
                range.start.max(block * BLOCK)..range.end.min((block + 1).saturating_mul(BLOCK))
            };
            let mut row = rows.start;
            while row < rows.end {
                // Rows that see the same part of the block.
                let same =
                    (row + 1..rows.end).find(|other| part(*other) != part(row)).unwrap_or(rows.end);
                if !part(row).is_empty() {
                    let seen = (self.first + row, part(row), kv_head);
                    let some = (row - rows.start) * heads.len()..(same - rows.start) * heads.len();
                    self.add(&mut all, some, (seen, &mut room), next, tile);
                }
                row = same;
            }
        }
        lane.kv = room;
        all.softmax
    }

    /// Adds some positions to the softmax and the sums of some queries; `next` is read next.
    fn add(
        &self,
        all: &mut Queries<'_>,
        some: Range<usize>,
        (seen, room): ((usize, Range<usize>, usize), &mut [f32]),
        next: &[u8],
        tile: &mut Tile<'_, f32>,
    ) {
        let &Common { kernels, has_values, scale, seen: sees, .. } = self.common;
        let (kv, len) = (self.kv, seen.1.len());
        let (q, places, softmax) =
            (&all.q[some.clone()], &all.places[some.clone()], &mut all.softmax[some]);
        let scores = &mut all.scores[..q.len() * len];
        let (mut keys, mut values) = ([&[][..]; BLOCK], [&[][..]; BLOCK]);
        let (of_keys, of_values) = room.split_at_mut(room.len().min(BLOCK * kv.key_width));
        let (keys, values) = (&mut keys[..len], &mut values[..len]);
        let scalar = sees.vectors((kernels, kv), seen.clone(), (Kind::Key, of_keys), keys);
        // Without values, they are the keys' first numbers.
        if has_values {
            sees.vectors((kernels, kv), seen, (Kind::Value, of_values), values);
        } else {
            values.copy_from_slice(keys);
        }
        let (keys, values) = (FloatRows { scalar, rows: keys }, FloatRows { scalar, rows: values });
        let of_value = if has_values { kv.bytes(Kind::Value) } else { 0 };
        let prefetch = PrefetchRows { rows: values, bytes: of_value };
        kernels.scores_with_prefetch(q, keys, scale, scores, prefetch);
        let mut by = [MergeFactors::default(); QUERIES];
        for ((scores, softmax), by) in scores.chunks_exact_mut(len).zip(softmax).zip(&mut by) {
            *by = softmax.join(Softmax::of(kernels, scores));
        }
        let (mut p, n) = ([&[][..]; QUERIES], places.len());
        p.iter_mut().zip(scores.chunks_exact(len)).for_each(|(p, scores)| *p = scores);
        kernels.weighted_sum_with_prefetch(
            &p[..n],
            values,
            &by[..n],
            &mut tile.several::<QUERIES>(places)[..n],
            next,
        );
    }
}
