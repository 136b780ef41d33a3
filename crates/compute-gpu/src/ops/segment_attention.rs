//! Bidirectional attention within segments of rows.

use moeflux_ops::{Error, Op};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{SegmentAttentionParams, ViewParams},
    },
    context::OpContext,
};

pub(crate) static SEGMENT_ATTENTION: Kernel = kernel!(
    "segment_attention",
    "attention/segment_attention",
    SegmentAttentionParams,
    [Write, Read]
);

/// Threads of a workgroup.
const THREADS: usize = 256;
/// Query and value elements of a tile: 64 for each thread.
const TILE_ELEMENTS: usize = 64 * THREADS;
/// Words of a tile in the table.
const TILE_WORDS: usize = 3;

/// Encodes [`Op::SegmentAttention`].
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::SegmentAttention { q, k, v, scale, segments, out } = op else { return Ok(()) };
    let columns = v.width.next_multiple_of(64);
    let queries = 1usize << (TILE_ELEMENTS / columns).clamp(16, 64).ilog2();
    let mut first_row = 0;
    let mut tiles = Vec::new();
    for rows in segments {
        let entry = |first: usize| [first_row as u32, *rows as u32, first as u32];
        tiles.extend((0..*rows).step_by(queries).map(entry));
        first_row += rows;
    }
    ctx.recorder.reserve_upload(tiles.len() * TILE_WORDS)?;
    let store = &*ctx.store;
    let params = SegmentAttentionParams {
        q: ViewParams::new(store, &q)?,
        k: ViewParams::new(store, &k)?,
        v: ViewParams::new(store, &v)?,
        out: ViewParams::new(store, &out)?,
        table: ctx.recorder.upload(tiles.iter().flatten().copied()),
        tiles: tiles.len() as u32,
        heads: q.heads as u32,
        group: (q.heads / k.heads) as u32,
        scale,
    };
    let constants = Constants::new(&[
        ("WG", THREADS as u32),
        ("QUERIES", queries as u32),
        ("K_WIDTH", k.width as u32),
        ("V_WIDTH", v.width as u32),
    ]);
    let upload = ctx.recorder.upload_buffer().clone();
    let buffers = [store.activations(), &upload];
    let groups = tiles.len() * q.heads;
    ctx.recorder.dispatch(&SEGMENT_ATTENTION, &constants, &buffers, &params, groups)
}
