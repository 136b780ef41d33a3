//! Bidirectional attention within segments of rows.

use moeflux_ops::{Error, Op, View};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{SegmentAttentionParams, SegmentF16Params, ViewParams},
    },
    context::OpContext,
};
use crate::store::DeviceBuffer;

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
    SegmentAttentionParams,
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
    let &Op::SegmentAttention { k, v, .. } = op else { return Ok(()) };
    if uses_cooperative(ctx, k, v) {
        return encode_cooperative(ctx, op);
    }
    let columns = v.width.next_multiple_of(64);
    let queries = 1usize << (TILE_ELEMENTS / columns).clamp(16, 64).ilog2();
    encode_tiles(ctx, op, &SEGMENT_ATTENTION, TileSize { queries, threads: THREADS }, None)
}

/// Encodes [`Op::SegmentAttention`] on cooperative matrices. Each tile of queries reads all keys
/// and values, so they are converted before.
fn encode_cooperative(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::SegmentAttention { k, v, .. } = op else { return Ok(()) };
    let words = f16_words(k, v);
    let scratch = ctx.scratch(words)?;
    let store = &*ctx.store;
    let params = SegmentF16Params {
        k: ViewParams::new(store, &k)?,
        v: ViewParams::new(store, &v)?,
        heads: k.heads as u32,
        words: words as u32,
    };
    let widths = [("K_WIDTH", k.width as u32), ("V_WIDTH", v.width as u32)];
    let constants = Constants::new(&[&widths[..], &[("WG", THREADS as u32)]].concat());
    let buffers = [store.activations(), &scratch];
    let groups = words.div_ceil(THREADS);
    ctx.recorder.dispatch(&SEGMENT_F16, &constants, &buffers, &params, groups)?;
    let size = TileSize { queries: COOPERATIVE_QUERIES, threads: 2 * COOPERATIVE_QUERIES };
    encode_tiles(ctx, op, &SEGMENT_COOPERATIVE, size, Some(&scratch))
}

/// Queries of a tile, and threads of its workgroup.
struct TileSize {
    queries: usize,
    threads: usize,
}

/// Encodes a kernel whose workgroups compute tiles of queries, with keys and values in `scratch` if
/// it reads them there.
fn encode_tiles(
    ctx: &mut OpContext<'_>,
    op: &Op<'_>,
    kernel: &'static Kernel,
    TileSize { queries, threads }: TileSize,
    scratch: Option<&DeviceBuffer>,
) -> Result<(), Error> {
    let &Op::SegmentAttention { q, k, v, scale, segments, out } = op else { return Ok(()) };
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
        ("WG", threads as u32),
        ("QUERIES", queries as u32),
        ("K_WIDTH", k.width as u32),
        ("V_WIDTH", v.width as u32),
    ]);
    let upload = ctx.recorder.upload_buffer().clone();
    let buffers: Vec<_> = [store.activations(), &upload].into_iter().chain(scratch).collect();
    let groups = tiles.len() * q.heads;
    ctx.recorder.dispatch(kernel, &constants, &buffers, &params, groups)
}

/// Words of keys and values in f16.
fn f16_words(k: View, v: View) -> usize {
    let words = |x: View| x.rows * x.heads * x.width / 2;
    words(k) + words(v)
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
        && ctx.store.can_bind(f16_words(k, v))
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
