//! Block indexer of sparse attention: the best score of each block of positions, and the positions
//! of the top blocks of each row and head.

use super::{
    Constants, Kernel, OpContext, ViewParams,
    attention::{self, MAX_HEADS, SpanRows},
    kernel,
    params::{BlockIndexerScoresParams, BlockIndexerTopParams},
};
use crate::{Error, Op};

pub(in crate::gpu) static BLOCK_INDEXER_SCORES: Kernel = kernel!(
    "block_indexer_scores",
    "attention/block_indexer_scores",
    BlockIndexerScoresParams,
    [Write, Read]
);
pub(in crate::gpu) static BLOCK_INDEXER_TOP: Kernel =
    kernel!("block_indexer_top", "attention/block_indexer_top", BlockIndexerTopParams, [Write]);

/// Threads of a workgroup.
const THREADS: u32 = 256;
/// Positions that a workgroup scores at once.
const TILE: usize = 64;

/// Encodes [`Op::TopBlocks`], as many rows at a time as `scores` has room for.
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopBlocks { q, k, block, local, spans, scores, out } = op else { return Ok(()) };
    let (n, heads) = (out.width / block, q.heads);
    let selection = [("WG", THREADS), ("KEY_BLOCK", block as u32), ("TOP_BLOCKS", n as u32)];
    let top_constants = Constants::new(&selection);
    let score_constants = top_constants
        .with("KV_F16", ctx.kv_half())
        .with("TILE_HEADS", heads.next_power_of_two().min(MAX_HEADS) as u32)
        .with("K_WIDTH", k.width as u32);
    for span_rows in SpanRows::iterate(spans) {
        let SpanRows { span, first_row } = span_rows;
        let kv = attention::bind_kv(ctx, span.state)?;
        attention::append_kv(ctx, &kv, span_rows, &k, None)?;
        let store = &*ctx.store;
        let room = scores.rows / heads;
        for done in (0..span.rows).step_by(room) {
            let rows = room.min(span.rows - done);
            let position = span.position + done;
            let [q, out] = [q, out].map(|view| view.slice(first_row + done, rows));
            if (position + rows).div_ceil(block) > n {
                let tiles = (position + rows).div_ceil(block.max(TILE));
                let params = BlockIndexerScoresParams {
                    q: ViewParams::new(store, &q)?,
                    scores: ViewParams::new(store, &scores)?,
                    rows: rows as u32,
                    position: position as u32,
                    heads: heads as u32,
                    local: local as u32,
                    tiles: tiles as u32,
                };
                let buffers = [store.activations(), &kv.buffer];
                let groups = rows * tiles;
                ctx.recorder.dispatch(
                    &BLOCK_INDEXER_SCORES,
                    score_constants,
                    &buffers,
                    &params,
                    groups,
                )?;
            }
            let params = BlockIndexerTopParams {
                scores: ViewParams::new(store, &scores)?,
                out: ViewParams::new(store, &out)?,
                rows: rows as u32,
                position: position as u32,
                heads: heads as u32,
            };
            let buffers = [store.activations()];
            let groups = rows * heads;
            ctx.recorder.dispatch(&BLOCK_INDEXER_TOP, top_constants, &buffers, &params, groups)?;
        }
    }
    Ok(())
}
