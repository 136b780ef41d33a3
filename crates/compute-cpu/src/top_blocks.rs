//! Block indexer of sparse attention: the best score of each block of positions, and selection of
//! the best blocks.

use std::mem;

use moeflux_ops::{
    Error, KV_BLOCK, Op,
    seam::{Host, KvKind},
};

use super::{
    attention::{SpanCache, dequantized_scratch, readable_vectors, with_scores},
    cpu::{Cpu, row, vector},
    pool::Grid,
    simd::FloatRows,
    top_positions::select_largest,
};

/// Rows of a tile of scores, which are pairs of a row and a head. They share the keys that they
/// read.
const TILE_ROWS: usize = 16;

/// Runs [`Op::TopBlocks`].
pub(super) fn top_blocks(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopBlocks { k, spans, scores, out, .. } = op else { return Ok(()) };
    with_scores(host, spans, Some(&k), [&scores, &out], |host, cache, values| {
        select(host, cpu, cache, op, values)
    })
}

/// Selects the positions of one span, for as many rows at a time as the scratch holds scores of.
fn select(
    host: &Host,
    cpu: &mut Cpu,
    SpanCache { kv, first, span }: SpanCache<'_>,
    op: &Op<'_>,
    [score_values, positions]: [&mut [f32]; 2],
) -> Result<(), Error> {
    let &Op::TopBlocks { q, block, local, scores, out, .. } = op else { return Ok(()) };
    let (kernels, heads, n) = (cpu.kernels, q.heads, out.width / block);
    let queries = host.get(&q)?;
    let room = scores.rows / heads;
    for start in (0..span.rows).step_by(room) {
        let count = room.min(span.rows - start);
        // Positions visible to row `i` of this batch, including its own.
        let visible = |i: usize| span.position + start + i + 1;
        let blocks = |i: usize| visible(i).div_ceil(block);
        let batch = scores.slice(0, count * heads).columns(0, blocks(count - 1));
        if blocks(count - 1) > n {
            cpu.reserve_all(dequantized_scratch(kv))?;
            let grid = Grid::new(&batch, TILE_ROWS, 1, KV_BLOCK / block);
            cpu.pool.tiles(score_values, grid, |mut tile, lane| {
                let tile_blocks = tile.cols();
                let start_position = tile_blocks.start * block;
                let mut scratch = mem::take(&mut lane.kv);
                let (mut keys, mut row_scores) = ([&[][..]; KV_BLOCK], [0.0; KV_BLOCK]);
                // The last row of the batch sees the most positions.
                let len = (tile_blocks.end * block).min(visible(count - 1)) - start_position;
                let keys = &mut keys[..len];
                let vectors = kv.vectors(KvKind::Key, start_position, 0);
                let scalar =
                    readable_vectors(kernels, kv, vectors, &mut scratch, kv.key_width, keys);
                for pair in tile.rows() {
                    let (i, head) = (pair / heads, pair % heads);
                    if blocks(i) <= n || visible(i) <= start_position {
                        continue;
                    }
                    let keys = &keys[..len.min(visible(i) - start_position)];
                    let row_scores = &mut row_scores[..keys.len()];
                    let query = vector(queries, &q, first + start + i, head);
                    kernels.scores(&[query], FloatRows { scalar, rows: keys }, 1.0, row_scores);
                    let best = tile.row(pair).iter_mut().zip(row_scores.chunks(block));
                    for ((best, scores), b) in best.zip(tile_blocks.clone()) {
                        let is_local = b + local >= blocks(i);
                        *best = if is_local { f32::INFINITY } else { kernels.max(scores) };
                    }
                }
                lane.kv = scratch;
            });
        }
        let score_values = &*score_values;
        let out = out.slice(first + start, count);
        cpu.pool.tiles(positions, Grid::new(&out, 1, 1, out.width), |mut tile, _| {
            let (i, head) = (tile.rows().start, tile.heads().start);
            let (dst, visible, blocks) = (tile.vector(i, head), visible(i), blocks(i));
            if blocks > n {
                let scores = &row(score_values, &batch, i * heads + head)[..blocks];
                select_largest(scores, &mut dst[..n]);
                // From the last block on: the positions of a block replace the ids of later ones.
                for j in (0..n).rev() {
                    let first = dst[j] as usize * block;
                    let positions = dst[j * block..][..block].iter_mut().zip(first..);
                    positions.for_each(|(dst, t)| *dst = if t < visible { t as f32 } else { -1.0 });
                }
            } else {
                let (positions, padding) = dst.split_at_mut(visible);
                positions.iter_mut().enumerate().for_each(|(i, position)| *position = i as f32);
                padding.fill(-1.0);
            }
        });
    }
    Ok(())
}
