//! Lightning indexer of sparse attention: scores of all positions, and the top positions of each
//! row.

use super::{
    Constants, Kernel, OpContext, ViewParams,
    attention::{
        self, MAX_HEADS,
        rows::{ArenaRun, SpanRows, upload_rows},
    },
    kernel,
    params::{IndexerScoresParams, IndexerTopPositionsParams},
};
use crate::{Error, Op};

pub(in crate::gpu) static INDEXER_SCORES: Kernel =
    kernel!("indexer_scores", "attention/indexer_scores", IndexerScoresParams, [Write, Read, Read]);
pub(in crate::gpu) static INDEXER_TOP_POSITIONS: Kernel = kernel!(
    "indexer_top_positions",
    "attention/indexer_top_positions",
    IndexerTopPositionsParams,
    [Write, Read]
);

/// Threads of a workgroup.
const THREADS: u32 = 256;
/// Positions that a workgroup scores.
const BLOCK: usize = 64;

/// Encodes [`Op::TopPositions`], as many rows at a time as `scores` has room for.
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopPositions { q, k, weights, spans, scores, out } = op else { return Ok(()) };
    let heads = q.heads.next_power_of_two().min(MAX_HEADS);
    let score_constants = Constants::new(&[
        ("WG", THREADS),
        ("KV_F16", ctx.kv_half()),
        ("TILE_HEADS", heads as u32),
        ("K_WIDTH", k.width as u32),
    ]);
    let spans = SpanRows::all(spans);
    attention::append_kv(ctx, &spans, &k, None)?;
    for ArenaRun { arena, spans } in ArenaRun::split(ctx, &spans)? {
        let all = SpanRows::rows_of(spans);
        for first_row in all.clone().step_by(scores.rows) {
            let rows = scores.rows.min(all.end - first_row);
            let spans = SpanRows::within(spans, &(first_row..first_row + rows));
            let visible = spans.iter().map(SpanRows::visible).max().unwrap_or(0);
            let table = upload_rows(ctx, &spans, None)?;
            let store = &*ctx.store;
            let upload = ctx.recorder.upload_buffer().clone();
            let [q, weights, out] = [q, weights, out].map(|view| view.slice(first_row, rows));
            if visible > out.width {
                let blocks = visible.div_ceil(BLOCK);
                let params = IndexerScoresParams {
                    q: ViewParams::new(store, &q)?,
                    weights: ViewParams::new(store, &weights)?,
                    scores: ViewParams::new(store, &scores)?,
                    rows: rows as u32,
                    table,
                    heads: q.heads as u32,
                    top_k: out.width as u32,
                    blocks: blocks as u32,
                };
                let buffers = [store.activations(), &arena, &upload];
                let groups = rows * blocks;
                ctx.recorder.dispatch(
                    &INDEXER_SCORES,
                    score_constants,
                    &buffers,
                    &params,
                    groups,
                )?;
            }
            let params = IndexerTopPositionsParams {
                scores: ViewParams::new(store, &scores)?,
                out: ViewParams::new(store, &out)?,
                rows: rows as u32,
                table,
                top_k: out.width as u32,
            };
            let constants = Constants::new(&[("WG", THREADS)]);
            let buffers = [store.activations(), &upload];
            ctx.recorder.dispatch(&INDEXER_TOP_POSITIONS, constants, &buffers, &params, rows)?;
        }
    }
    Ok(())
}
