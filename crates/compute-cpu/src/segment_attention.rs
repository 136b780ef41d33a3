//! Bidirectional attention within segments of rows: an online softmax over blocks of keys.
//!
//! A tile is a block of rows and one head. The result of a row depends on its query and on the keys
//! and values of its segment only, so tiles may be of any size.

use moeflux_ops::{Error, Op, ScratchShape, seam::Host};

use super::{
    cpu::Cpu,
    pool::Grid,
    simd::{HeadRows, MAX_SEGMENT_QUERIES, SegmentTile},
};

/// Least number of tiles for each thread, as long as tiles have [`MIN_ROWS`] rows.
const THREAD_TILES: usize = 2;
/// Least rows of a tile, which packs all keys and values of its segments.
const MIN_ROWS: usize = 48;

/// Runs [`Op::SegmentAttention`].
pub(super) fn segment_attention(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::SegmentAttention { q, k, v, scale, segments, out } = op else { return Ok(()) };
    cpu.reserve_all(ScratchShape { segment_head: k.width + v.width, ..ScratchShape::default() })?;
    let (kernels, group) = (cpu.kernels, q.heads / k.heads);
    let row_tiles = (THREAD_TILES * cpu.pool.threads()).div_ceil(q.heads);
    let rows = out.rows.div_ceil(row_tiles).clamp(MIN_ROWS, MAX_SEGMENT_QUERIES);
    host.with(&out, |host, values| {
        let inputs = [host.get(&q)?, host.get(&k)?, host.get(&v)?];
        cpu.pool.tiles(values, Grid::new(&out, rows, 1, out.width), |mut tile, lane| {
            let (rows, head) = (tile.rows(), tile.heads().start);
            let mut end = 0;
            for len in segments {
                let segment = end..end + len;
                end = segment.end;
                let queries = rows.start.max(segment.start)..rows.end.min(segment.end);
                if queries.is_empty() {
                    continue;
                }
                let tile_of_segment = SegmentTile {
                    q: HeadRows::new(inputs[0], &q, head, queries.clone()),
                    k: HeadRows::new(inputs[1], &k, head / group, segment.clone()),
                    v: HeadRows::new(inputs[2], &v, head / group, segment),
                    scale,
                };
                let results = kernels.segment_attention(&tile_of_segment, &mut lane.segment);
                for (row, y) in queries.zip(results) {
                    tile.row(row).copy_from_slice(&y[..out.width]);
                }
            }
        });
        Ok(())
    })
}
