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

/// On cooperative matrices: queries, keys, values and weights are rounded to f16.
pub(crate) static SEGMENT_COOPERATIVE: Kernel = kernel!(
    "segment_cooperative",
    "attention/segment_cooperative",
    SegmentAttentionParams,
    [Write, Read]
);

/// Queries of a tile of [`SEGMENT_COOPERATIVE`], maximum width of its heads, and its bytes of
/// workgroup memory.
const COOPERATIVE_QUERIES: usize = 64;
const COOPERATIVE_WIDTH: usize = 128;
const COOPERATIVE_BYTES: u32 = 34 << 10;

/// Threads of a workgroup.
const THREADS: usize = 256;
/// Query and value elements of a tile: 64 for each thread.
const TILE_ELEMENTS: usize = 64 * THREADS;
/// Words of a tile in the table.
const TILE_WORDS: usize = 3;

/// Encodes [`Op::SegmentAttention`].
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::SegmentAttention { q, k, v, scale, segments, out } = op else { return Ok(()) };
    let is_cooperative = uses_cooperative(ctx, k.width, v.width);
    let columns = v.width.next_multiple_of(64);
    let (kernel, queries, threads) = match is_cooperative {
        true => (&SEGMENT_COOPERATIVE, COOPERATIVE_QUERIES, 2 * COOPERATIVE_QUERIES),
        false => {
            let queries = 1usize << (TILE_ELEMENTS / columns).clamp(16, 64).ilog2();
            (&SEGMENT_ATTENTION, queries, THREADS)
        }
    };
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
    let buffers = [store.activations(), &upload];
    let groups = tiles.len() * q.heads;
    ctx.recorder.dispatch(kernel, &constants, &buffers, &params, groups)
}

/// Whether [`SEGMENT_COOPERATIVE`] takes heads of these widths on the fast path.
fn uses_cooperative(ctx: &OpContext<'_>, keys: usize, values: usize) -> bool {
    let target = ctx.target();
    let fits = |width: usize| width.is_multiple_of(4) && width <= COOPERATIVE_WIDTH;
    !ctx.exact
        && target.cooperative
        && target.team == 32
        && ctx.workgroup_bytes() >= COOPERATIVE_BYTES
        && fits(keys)
        && fits(values)
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
