//! The lightning indexer: scores of all positions, and the best of them.

use std::mem;

use super::{
    Cpu,
    attention::{OfSpan, of_spans, readable, wide_kv, write_keys},
    pool::Grid,
    row,
    simd::FloatRows,
    vector,
};
use crate::{
    Error, KV_BLOCK, Op,
    host::{Host, Kind},
};

/// Positions of a tile of scores.
const BLOCK: usize = KV_BLOCK;
/// Rows of a tile of scores: they read the same keys.
const ROWS: usize = 4;
/// Heads that are scored at once.
const HEADS: usize = 16;

/// Runs [`Op::TopPositions`].
pub(super) fn top_positions(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopPositions { k, spans, scores, out, .. } = op else { return Ok(()) };
    host.with(&out, |host, named| {
        host.with(&scores, |host, numbers| {
            write_keys(host, spans, (&k, None))?;
            of_spans(host, spans).try_for_each(|of_span| {
                choose(host, cpu, of_span?, op, [&mut *numbers, &mut *named])
            })
        })
    })
}

/// Names positions for the rows of one span, as many rows at a time as have room for their scores.
fn choose(
    host: &Host,
    cpu: &mut Cpu,
    (kv, first, span): OfSpan<'_>,
    op: &Op<'_>,
    [numbers, named]: [&mut [f32]; 2],
) -> Result<(), Error> {
    let &Op::TopPositions { q, weights, scores, out, .. } = op else { return Ok(()) };
    let (kernels, n) = (cpu.kernels, out.width);
    let (queries, shares) = (host.get(&q)?, host.get(&weights)?);
    for from in (0..span.rows).step_by(scores.rows) {
        let count = scores.rows.min(span.rows - from);
        // Positions that row `i` of these sees, its own among them.
        let seen = |i: usize| span.position + from + i + 1;
        let places = scores.slice(0, count).columns(0, seen(count - 1));
        if seen(count - 1) > n {
            cpu.reserve_all(wide_kv(kv))?;
            cpu.pool.tiles(numbers, Grid::new(&places, ROWS, 1, BLOCK), |mut tile, lane| {
                let (block, mut of_heads) = (tile.cols(), [0.0; HEADS * BLOCK]);
                let mut room = mem::take(&mut lane.kv);
                let mut at = [&[][..]; BLOCK];
                let (keys, at) = (kv.vectors(Kind::Key, block.start, 0), &mut at[..block.len()]);
                let scalar = readable((kernels, kv), keys, (&mut room, kv.key_width), at);
                for i in tile.rows().filter(|i| seen(*i) > n && seen(*i) > block.start) {
                    let len = block.end.min(seen(i)) - block.start;
                    let keys = FloatRows { scalar, rows: &at[..len] };
                    let sums = &mut tile.row(i)[..len];
                    sums.fill(0.0);
                    let at = first + from + i;
                    for (j, shares) in row(shares, &weights, at).chunks(HEADS).enumerate() {
                        let q: [_; HEADS] = std::array::from_fn(|h| {
                            vector(queries, &q, at, j * HEADS + h.min(shares.len() - 1))
                        });
                        let of_heads = &mut of_heads[..shares.len() * len];
                        kernels.scores(&q[..shares.len()], keys, 1.0, of_heads);
                        for (scores, share) in of_heads.chunks_exact(len).zip(shares) {
                            sums.iter_mut()
                                .zip(scores)
                                .for_each(|(sum, x)| *sum += share * x.max(0.0));
                        }
                    }
                }
                lane.kv = room;
            });
        }
        let numbers = &*numbers;
        let out = out.slice(first + from, count);
        cpu.pool.tiles(named, Grid::new(&out, 1, 1, n), |mut tile, _| {
            let i = tile.rows().start;
            let (to, seen) = (tile.row(i), seen(i));
            if seen > n {
                largest(&row(numbers, &places, i)[..seen], to);
            } else {
                let (all, rest) = to.split_at_mut(seen);
                all.iter_mut().enumerate().for_each(|(i, to)| *to = i as f32);
                rest.fill(-1.0);
            }
        });
    }
    Ok(())
}

/// Bits of a number that are looked at together, twice; then the rest.
const DIGIT: u32 = 11;

/// A number's place among all, as a whole number; zeros of both signs are equal.
fn order(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    if bits >> 31 == 0 { bits | 1 << 31 } else { !bits }
}

/// The places of the `named.len()` largest numbers, fewer than there are, in ascending order; of equal ones the last.
fn largest(numbers: &[f32], named: &mut [f32]) {
    // The smallest of them is found digit by digit, from counts of the numbers that agree so far.
    let (mut least, mut wanted, mut surplus) = (0u32, named.len() as u32, 0);
    for (shift, bits) in [(32 - DIGIT, DIGIT), (32 - 2 * DIGIT, DIGIT), (0, 32 - 2 * DIGIT)] {
        let mut counts = [0u32; 1 << DIGIT];
        let agrees = |x: u32| u64::from(x ^ least) >> (shift + bits) == 0;
        for x in numbers.iter().map(|x| order(*x)).filter(|x| agrees(*x)) {
            counts[(x >> shift) as usize & ((1 << bits) - 1)] += 1;
        }
        let mut digit = (1 << bits) - 1;
        while counts[digit] < wanted && digit > 0 {
            wanted -= counts[digit];
            digit -= 1;
        }
        least |= (digit as u32) << shift;
        surplus = counts[digit].saturating_sub(wanted);
    }
    // All that are larger, and of those as large the last ones.
    let mut places = numbers.iter().enumerate().filter(|(_, x)| match order(**x).cmp(&least) {
        std::cmp::Ordering::Greater => true,
        std::cmp::Ordering::Equal if surplus > 0 => {
            surplus -= 1;
            false
        }
        std::cmp::Ordering::Equal => true,
        std::cmp::Ordering::Less => false,
    });
    named.iter_mut().zip(&mut places).for_each(|(to, (i, _))| *to = i as f32);
}
