//! Block indexer of sparse attention: the best score of each block of positions, and the positions
//! of the top blocks of each row and head.

use moeflux_ops::{Error, Op};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{BlockIndexerScoresParams, BlockIndexerTopParams, ViewParams},
    },
    attention::{
        self, MAX_HEADS,
        rows::{ArenaRun, SpanRows, upload_rows},
    },
    context::OpContext,
};

pub(crate) static BLOCK_INDEXER_SCORES: Kernel = kernel!(
    "block_indexer_scores",
    "attention/block_indexer_scores",
    BlockIndexerScoresParams,
    [Write, Read, Read]
);
pub(crate) static BLOCK_INDEXER_TOP: Kernel = kernel!(
    "block_indexer_top",
    "attention/block_indexer_top",
    BlockIndexerTopParams,
    [Write, Read]
);

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
        .clone()
        .with("KV_F16", ctx.kv_half())
        .with("TILE_HEADS", heads.next_power_of_two().min(MAX_HEADS) as u32)
        .with("K_WIDTH", k.width as u32);
    let room = scores.rows / heads;
    let spans = SpanRows::all(spans);
    attention::append_kv(ctx, &spans, &k, None)?;
    for ArenaRun { arena, spans } in ArenaRun::split(ctx, &spans)? {
        let all = SpanRows::rows_of(spans);
        for first_row in all.clone().step_by(room) {
            let rows = room.min(all.end - first_row);
            let spans = SpanRows::within(spans, &(first_row..first_row + rows));
            let visible = spans.iter().map(SpanRows::visible).max().unwrap_or(0);
            let table = upload_rows(ctx, &spans, None)?;
            let store = &*ctx.store;
            let upload = ctx.recorder.upload_buffer().clone();
            let [q, out] = [q, out].map(|view| view.slice(first_row, rows));
            if visible.div_ceil(block) > n {
                let tiles = visible.div_ceil(block.max(TILE));
                let params = BlockIndexerScoresParams {
                    q: ViewParams::new(store, &q)?,
                    scores: ViewParams::new(store, &scores)?,
                    rows: rows as u32,
                    table,
                    heads: heads as u32,
                    local: local as u32,
                    tiles: tiles as u32,
                };
                let buffers = [store.activations(), &arena, &upload];
                let groups = rows * tiles;
                ctx.recorder.dispatch(
                    &BLOCK_INDEXER_SCORES,
                    &score_constants,
                    &buffers,
                    &params,
                    groups,
                )?;
            }
            let params = BlockIndexerTopParams {
                scores: ViewParams::new(store, &scores)?,
                out: ViewParams::new(store, &out)?,
                rows: rows as u32,
                table,
                heads: heads as u32,
            };
            let buffers = [store.activations(), &upload];
            let groups = rows * heads;
            ctx.recorder.dispatch(&BLOCK_INDEXER_TOP, &top_constants, &buffers, &params, groups)?;
        }
    }
    Ok(())
}
