//! Bidirectional attention within segments of rows.

use moeflux_ops::{Error, Op, View};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{SegmentAttentionParams, SegmentCooperativeParams, SegmentF16Params, ViewParams},
    },
    context::OpContext,
};

pub(crate) static SEGMENT_ATTENTION: Kernel = kernel!(
    "segment_attention",
    "attention/segment_attention",
    SegmentAttentionParams,
    [Write, Read]
);

/// On cooperative matrices: queries, keys, values and weights are rounded to f16.
pub(crate) static SEGMENT_COOPERATIVE: Kernel = kernel!(
    "segment_cooperative",
    "attention/segment_cooperative",
    SegmentCooperativeParams,
    [Write, Read, Read]
);

/// Keys and values for [`SEGMENT_COOPERATIVE`].
pub(crate) static SEGMENT_F16: Kernel =
    kernel!("segment_f16", "attention/segment_f16", SegmentF16Params, [Write, Write]);

/// Queries of a tile of [`SEGMENT_COOPERATIVE`], maximum width of its heads, and its bytes of
/// workgroup memory.
const COOPERATIVE_QUERIES: usize = 128;
const COOPERATIVE_WIDTH: usize = 128;
const COOPERATIVE_BYTES: u32 = 48 << 10;

/// Threads of a workgroup.
const THREADS: usize = 256;
/// Query and value elements of a tile: 64 for each thread.
const TILE_ELEMENTS: usize = 64 * THREADS;
/// Words of a tile in the table.
const TILE_WORDS: usize = 3;

/// Encodes [`Op::SegmentAttention`].
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::SegmentAttention { q, k, v, scale, segments, out } = op else { return Ok(()) };
    if uses_cooperative(ctx, k, v) {
        return encode_cooperative(ctx, op);
    }
    let columns = v.width.next_multiple_of(64);
    let queries = 1usize << (TILE_ELEMENTS / columns).clamp(16, 64).ilog2();
    let tiles = QueryTiles::upload(ctx, segments, queries)?;
    let store = &*ctx.store;
    let params = SegmentAttentionParams {
        q: ViewParams::new(store, &q)?,
        k: ViewParams::new(store, &k)?,
        v: ViewParams::new(store, &v)?,
        out: ViewParams::new(store, &out)?,
        table: tiles.table,
        tiles: tiles.count as u32,
        heads: q.heads as u32,
        group: (q.heads / k.heads) as u32,
        scale,
    };
    let constants = tile_constants(THREADS, queries, k, v);
    let upload = ctx.recorder.upload_buffer().clone();
    let buffers = [store.activations(), &upload];
    let groups = tiles.count * q.heads;
    ctx.recorder.dispatch(&SEGMENT_ATTENTION, &constants, &buffers, &params, groups)
}

/// Encodes [`Op::SegmentAttention`] on cooperative matrices. Each tile of queries reads all keys and
/// values, so they are converted before.
fn encode_cooperative(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::SegmentAttention { q, k, v, scale, segments, out } = op else { return Ok(()) };
    let F16Words { values, all } = F16Words::new(k, v);
    let scratch = ctx.scratch(all)?;
    let store = &*ctx.store;
    let params = SegmentF16Params {
        k: ViewParams::new(store, &k)?,
        v: ViewParams::new(store, &v)?,
        heads: k.heads as u32,
        values: values as u32,
        words: all as u32,
    };
    let widths = [("K_WIDTH", k.width as u32), ("V_WIDTH", v.width as u32)];
    let constants = Constants::new(&[&widths[..], &[("WG", THREADS as u32)]].concat());
    let buffers = [store.activations(), &scratch];
    let groups = all.div_ceil(THREADS);
    ctx.recorder.dispatch(&SEGMENT_F16, &constants, &buffers, &params, groups)?;

    let tiles = QueryTiles::upload(ctx, segments, COOPERATIVE_QUERIES)?;
    let store = &*ctx.store;
    let params = SegmentCooperativeParams {
        q: ViewParams::new(store, &q)?,
        out: ViewParams::new(store, &out)?,
        values: values as u32,
        table: tiles.table,
        tiles: tiles.count as u32,
        heads: q.heads as u32,
        group: (q.heads / k.heads) as u32,
        scale,
    };
    let constants = tile_constants(2 * COOPERATIVE_QUERIES, COOPERATIVE_QUERIES, k, v);
    let upload = ctx.recorder.upload_buffer().clone();
    let buffers = [store.activations(), &upload, &scratch];
    let groups = tiles.count * q.heads;
    ctx.recorder.dispatch(&SEGMENT_COOPERATIVE, &constants, &buffers, &params, groups)
}

fn tile_constants(threads: usize, queries: usize, k: View, v: View) -> Constants {
    Constants::new(&[
        ("WG", threads as u32),
        ("QUERIES", queries as u32),
        ("K_WIDTH", k.width as u32),
        ("V_WIDTH", v.width as u32),
    ])
}

/// Table of the tiles of queries of all segments.
struct QueryTiles {
    table: u32,
    count: usize,
}

impl QueryTiles {
    fn upload(ctx: &mut OpContext<'_>, segments: &[usize], queries: usize) -> Result<Self, Error> {
        let mut first_row = 0;
        let mut tiles = Vec::new();
        for rows in segments {
            let entry = |first: usize| [first_row as u32, *rows as u32, first as u32];
            tiles.extend((0..*rows).step_by(queries).map(entry));
            first_row += rows;
        }
        ctx.recorder.reserve_upload(tiles.len() * TILE_WORDS)?;
        let table = ctx.recorder.upload(tiles.iter().flatten().copied());
        Ok(Self { table, count: tiles.len() })
    }
}

/// Words of keys and values in f16.
struct F16Words {
    /// First word of the values, a whole number of vectors of four.
    values: usize,
    all: usize,
}

impl F16Words {
    fn new(k: View, v: View) -> Self {
        let words = |x: View| x.rows * x.heads * x.width / 2;
        Self { values: words(k), all: words(k) + words(v) }
    }
}

/// Whether [`SEGMENT_COOPERATIVE`] takes these keys and values on the fast path.
fn uses_cooperative(ctx: &OpContext<'_>, k: View, v: View) -> bool {
    let target = ctx.target();
    let fits = |width: usize| width.is_multiple_of(4) && width <= COOPERATIVE_WIDTH;
    !ctx.exact
        && target.cooperative
        && target.team == 32
        && ctx.workgroup_bytes() >= COOPERATIVE_BYTES
        && fits(k.width)
        && fits(v.width)
        && ctx.store.can_bind(F16Words::new(k, v).all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{Target, tests::valid};

    #[test]
    fn cooperative_attention_is_valid() {
        let target = Target { team: 32, subgroups: true, dot8: true, f16: true, cooperative: true };
        for (key, value) in [(72, 72), (128, 128), (16, 112), (100, 4)] {
            let constants = Constants::new(&[
                ("WG", 2 * COOPERATIVE_QUERIES as u32),
                ("QUERIES", COOPERATIVE_QUERIES as u32),
                ("K_WIDTH", key),
                ("V_WIDTH", value),
            ]);
            valid(&target.text(&SEGMENT_COOPERATIVE, &constants), COOPERATIVE_BYTES);
        }
    }
}
