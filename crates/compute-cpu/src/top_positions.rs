//! Lightning indexer of sparse attention: scores of all entries, and lists of the best.

use std::{cmp::Ordering, mem};

use moeflux_ops::{
    Error, IndexList, IndexQueries, KV_BLOCK, Op,
    seam::{Host, KvKind},
};

use super::{
    attention::{SpanCache, dequantized_scratch, readable_vectors, with_scores},
    cpu::{Cpu, row, vector},
    pool::Grid,
    simd::FloatRows,
};

/// Entries of a tile of scores.
const BLOCK: usize = KV_BLOCK;
/// Rows of a tile of scores. They share the keys that they read.
const TILE_ROWS: usize = 4;
/// Heads that are scored together.
const MAX_HEADS: usize = 16;

/// Runs [`Op::TopPositions`].
pub(super) fn top_positions(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopPositions { queries, k, ratio, list, spans, out } = op else { return Ok(()) };
    let lists = ListWriter { list, ratio, room: list.entries(out.width, ratio).unwrap_or(0) };
    if let Some(IndexQueries { scores, .. }) = queries {
        return with_scores(host, spans, k.as_ref(), [&scores, &out], |host, cache, values| {
            select(host, cpu, cache, op, lists, values)
        });
    }
    host.with(&out, |_, values| {
        let mut first = 0;
        for span in spans {
            let rows = out.slice(first, span.rows);
            cpu.pool.tiles(values, Grid::new(&rows, 1, 1, out.width), |mut tile, _| {
                let i = tile.rows().start;
                lists.write(span.position + i, &[], tile.row(i));
            });
            first += span.rows;
        }
        Ok(())
    })
}

/// Form of the lists of chosen entries.
#[derive(Clone, Copy)]
struct ListWriter {
    list: IndexList,
    /// Positions of an entry.
    ratio: usize,
    /// Maximum number of entries of a list.
    room: usize,
}

impl ListWriter {
    /// Number of entries that a row at a position sees.
    const fn visible(&self, position: usize) -> usize {
        (position + 1) / self.ratio
    }

    /// Writes the list of a row at `position`. `scores` are those of all entries that it sees; they
    /// are not read if the list has room for all.
    fn write(&self, position: usize, scores: &[f32], dst: &mut [f32]) {
        let visible = self.visible(position);
        let chosen = visible.min(self.room);
        // Numbers before the entries, numbers of an entry, number of entry 0, open positions.
        let (recent, each, base, open) = match self.list {
            IndexList::Positions => (0, self.ratio, 0, visible * self.ratio..position + 1),
            IndexList::Window { window, ring } => (window.min(position + 1), 1, ring, 0..0),
        };
        let (last, dst) = dst.split_at_mut(recent);
        for (dst, p) in last.iter_mut().zip(position + 1 - recent..) {
            *dst = (p % base.max(1)) as f32;
        }
        let (entries, dst) = dst.split_at_mut(chosen * each);
        if visible > self.room {
            select_largest(scores, &mut entries[..chosen]);
        } else {
            entries.iter_mut().enumerate().for_each(|(t, dst)| *dst = t as f32);
        }
        // From the last entry on: the numbers of an entry replace the ids of later ones.
        for i in (0..chosen).rev() {
            let first = base + entries[i] as usize * each;
            let numbers = entries[i * each..][..each].iter_mut().zip(first..);
            numbers.for_each(|(dst, number)| *dst = number as f32);
        }
        let (tail, padding) = dst.split_at_mut(open.len());
        tail.iter_mut().zip(open).for_each(|(dst, p)| *dst = p as f32);
        padding.fill(-1.0);
    }
}

/// Selects the entries of one span, for as many rows at a time as the scratch holds scores of.
fn select(
    host: &Host,
    cpu: &mut Cpu,
    SpanCache { kv, first, span }: SpanCache<'_>,
    op: &Op<'_>,
    lists: ListWriter,
    [score_values, numbers]: [&mut [f32]; 2],
) -> Result<(), Error> {
    let &Op::TopPositions { queries: Some(IndexQueries { q, weights, scores }), out, .. } = op
    else {
        return Ok(());
    };
    let (kernels, n) = (cpu.kernels, lists.room);
    let (queries, head_weights) = (host.get(&q)?, host.get(&weights)?);
    for start in (0..span.rows).step_by(scores.rows) {
        let count = scores.rows.min(span.rows - start);
        // Entries visible to row `i` of this batch.
        let visible = |i: usize| lists.visible(span.position + start + i);
        let batch = scores.slice(0, count).columns(0, visible(count - 1));
        if visible(count - 1) > n {
            if !kv.has_entries(visible(count - 1)) {
                return Err(Error::Shape(format!(
                    "TopPositions: {} entries, of which some were never appended",
                    visible(count - 1)
                )));
            }
            cpu.reserve_all(dequantized_scratch(kv))?;
            cpu.pool.tiles(
                score_values,
                Grid::new(&batch, TILE_ROWS, 1, BLOCK),
                |mut tile, lane| {
                    let (block, mut head_scores) = (tile.cols(), [0.0; MAX_HEADS * BLOCK]);
                    let mut scratch = mem::take(&mut lane.kv);
                    let mut keys = [&[][..]; BLOCK];
                    let keys = &mut keys[..block.len()];
                    let vectors = kv.vectors(KvKind::Key, block.start, 0);
                    let scalar =
                        readable_vectors(kernels, kv, vectors, &mut scratch, kv.key_width, keys);
                    for i in tile.rows().filter(|i| visible(*i) > n && visible(*i) > block.start) {
                        let len = block.end.min(visible(i)) - block.start;
                        let keys = FloatRows { scalar, rows: &keys[..len] };
                        let sums = &mut tile.row(i)[..len];
                        sums.fill(0.0);
                        let op_row = first + start + i;
                        let head_weights = row(head_weights, &weights, op_row);
                        for (j, head_weights) in head_weights.chunks(MAX_HEADS).enumerate() {
                            let q: [_; MAX_HEADS] = std::array::from_fn(|h| {
                                let head = j * MAX_HEADS + h.min(head_weights.len() - 1);
                                vector(queries, &q, op_row, head)
                            });
                            let head_scores = &mut head_scores[..head_weights.len() * len];
                            kernels.scores(&q[..head_weights.len()], keys, 1.0, head_scores);
                            for (scores, weight) in head_scores.chunks_exact(len).zip(head_weights)
                            {
                                sums.iter_mut()
                                    .zip(scores)
                                    .for_each(|(sum, x)| *sum += weight * x.max(0.0));
                            }
                        }
                    }
                    lane.kv = scratch;
                },
            );
        }
        let score_values = &*score_values;
        let out = out.slice(first + start, count);
        cpu.pool.tiles(numbers, Grid::new(&out, 1, 1, out.width), |mut tile, _| {
            let i = tile.rows().start;
            let scores = row(score_values, &batch, i);
            lists.write(span.position + start + i, &scores[..visible(i)], tile.row(i));
        });
    }
    Ok(())
}

/// Bits of each of the first two radix digits; the third digit has the remaining bits.
const DIGIT_BITS: u32 = 11;

/// Maps an f32 to a u32 with the same order. Both zeros map to the same key.
fn order_key(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// Selects the indices of the `selected.len()` largest values, in ascending order; of equal values
/// the last ones. There are more values than that.
pub(super) fn select_largest(values: &[f32], selected: &mut [f32]) {
    // Radix selection: finds the smallest selected key digit by digit, from histograms of the keys
    // that match the digits so far.
    let (mut threshold, mut wanted, mut surplus) = (0u32, selected.len() as u32, 0);
    let digits = [
        (32 - DIGIT_BITS, DIGIT_BITS),
        (32 - 2 * DIGIT_BITS, DIGIT_BITS),
        (0, 32 - 2 * DIGIT_BITS),
    ];
    for (shift, bits) in digits {
        let mut counts = [0u32; 1 << DIGIT_BITS];
        let matches = |key: u32| u64::from(key ^ threshold) >> (shift + bits) == 0;
        for key in values.iter().map(|x| order_key(*x)).filter(|key| matches(*key)) {
            counts[(key >> shift) as usize & ((1 << bits) - 1)] += 1;
        }
        let mut digit = (1 << bits) - 1;
        while counts[digit] < wanted && digit > 0 {
            wanted -= counts[digit];
            digit -= 1;
        }
        threshold |= (digit as u32) << shift;
        surplus = counts[digit].saturating_sub(wanted);
    }
    // All larger values, and the last ones that equal the threshold.
    let mut indices =
        values.iter().enumerate().filter(|(_, x)| match order_key(**x).cmp(&threshold) {
            Ordering::Greater => true,
            Ordering::Equal if surplus > 0 => {
                surplus -= 1;
                false
            }
            Ordering::Equal => true,
            Ordering::Less => false,
        });
    selected.iter_mut().zip(&mut indices).for_each(|(dst, (i, _))| *dst = i as f32);
}
