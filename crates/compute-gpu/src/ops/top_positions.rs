//! Lightning indexer of sparse attention: scores of all entries, and lists of the best of each row.

use moeflux_ops::{Error, IndexList, IndexQueries, Op, View};

use super::{
    super::{
        kernel::{Constants, Kernel, kernel},
        params::{IndexerScoresParams, IndexerTopPositionsParams, ViewParams},
    },
    attention::{
        self, MAX_HEADS,
        rows::{ArenaRun, SpanRows, upload_rows},
    },
    context::OpContext,
};

pub(crate) static INDEXER_SCORES: Kernel =
    kernel!("indexer_scores", "attention/indexer_scores", IndexerScoresParams, [Write, Read, Read]);
pub(crate) static INDEXER_TOP_POSITIONS: Kernel = kernel!(
    "indexer_top_positions",
    "attention/indexer_top_positions",
    IndexerTopPositionsParams,
    [Write, Read]
);

/// Threads of a workgroup.
const THREADS: u32 = 256;
/// Entries that a workgroup scores.
const BLOCK: usize = 64;

/// Encodes [`Op::TopPositions`].
pub(super) fn encode(ctx: &mut OpContext<'_>, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopPositions { queries, k, ratio, list, spans, out } = op else { return Ok(()) };
    let all = SpanRows::all(spans);
    if let Some(k) = k {
        attention::append_kv(ctx, &all, &k, None)?;
    }
    let lists = ListEncoder { list, ratio, room: list.entries(out.width, ratio).unwrap_or(0), out };
    let mut rest = &all[..];
    while let Some(first) = rest.first() {
        // A cache without entries may have no memory: it is not bound.
        let scored = |rows: &SpanRows| queries.filter(|_| lists.visible(rows) > lists.room);
        let scores = scored(first);
        let same = |rows: &&SpanRows| scored(rows).is_some() == scores.is_some();
        let (run, others) = rest.split_at(rest.iter().take_while(same).count());
        rest = others;
        match scores {
            Some(queries) => lists.encode_by_scores(ctx, &queries, run)?,
            None => lists.encode(ctx, run, None)?,
        }
    }
    Ok(())
}

/// Dispatches of the lists of chosen entries.
struct ListEncoder {
    list: IndexList,
    /// Positions of an entry.
    ratio: usize,
    /// Maximum number of entries of a list.
    room: usize,
    out: View,
}

impl ListEncoder {
    /// Number of entries that the last row of a span sees.
    const fn visible(&self, rows: &SpanRows) -> usize {
        rows.visible() / self.ratio
    }

    /// Encodes scores and lists, as many rows at a time as `scores` has room for.
    fn encode_by_scores(
        &self,
        ctx: &mut OpContext<'_>,
        &IndexQueries { q, weights, scores }: &IndexQueries,
        spans: &[SpanRows],
    ) -> Result<(), Error> {
        let heads = q.heads.next_power_of_two().min(MAX_HEADS);
        let constants = Constants::new(&[
            ("WG", THREADS),
            ("KV_F16", ctx.kv_half()),
            ("TILE_HEADS", heads as u32),
            ("K_WIDTH", q.width as u32),
        ]);
        for ArenaRun { arena, spans } in ArenaRun::split(ctx, spans)? {
            let all = SpanRows::rows_of(spans);
            for first_row in all.clone().step_by(scores.rows) {
                let rows = scores.rows.min(all.end - first_row);
                let spans = SpanRows::within(spans, &(first_row..first_row + rows));
                let visible = spans.iter().map(|rows| self.visible(rows)).max().unwrap_or(0);
                if visible > self.room {
                    let table = upload_rows(ctx, &spans, None)?;
                    let store = &*ctx.store;
                    let blocks = visible.div_ceil(BLOCK);
                    let params = IndexerScoresParams {
                        q: ViewParams::new(store, &q.slice(first_row, rows))?,
                        weights: ViewParams::new(store, &weights.slice(first_row, rows))?,
                        scores: ViewParams::new(store, &scores)?,
                        rows: rows as u32,
                        table,
                        heads: q.heads as u32,
                        ratio: self.ratio as u32,
                        top_k: self.room as u32,
                        blocks: blocks as u32,
                    };
                    let upload = ctx.recorder.upload_buffer().clone();
                    let buffers = [store.activations(), &arena, &upload];
                    let groups = rows * blocks;
                    ctx.recorder.dispatch(
                        &INDEXER_SCORES,
                        &constants,
                        &buffers,
                        &params,
                        groups,
                    )?;
                }
                self.encode(ctx, &spans, Some(scores))?;
            }
        }
        Ok(())
    }

    /// Encodes the lists of consecutive spans. Without scores, the lists have room for all entries.
    fn encode(
        &self,
        ctx: &mut OpContext<'_>,
        spans: &[SpanRows],
        scores: Option<View>,
    ) -> Result<(), Error> {
        let rows = SpanRows::rows_of(spans);
        let positions = |rows: &SpanRows| rows.span.position..rows.visible();
        let table: Vec<u32> = spans.iter().flat_map(positions).map(|p| p as u32).collect();
        ctx.recorder.reserve_upload(table.len())?;
        let (window, ring) = match self.list {
            IndexList::Positions => (0, 1),
            IndexList::Window { window, ring } => (window, ring),
        };
        let params = IndexerTopPositionsParams {
            scores: ViewParams::new(ctx.store, &scores.unwrap_or(self.out))?,
            out: ViewParams::new(ctx.store, &self.out.slice(rows.start, rows.len()))?,
            rows: rows.len() as u32,
            table: ctx.recorder.upload(table),
            width: self.out.width as u32,
            ratio: self.ratio as u32,
            top_k: self.room as u32,
            window: window as u32,
            ring: ring as u32,
        };
        let constants = Constants::new(&[("WG", THREADS)]);
        let upload = ctx.recorder.upload_buffer().clone();
        let buffers = [ctx.store.activations(), &upload];
        ctx.recorder.dispatch(&INDEXER_TOP_POSITIONS, &constants, &buffers, &params, rows.len())
    }
}
