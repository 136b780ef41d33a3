//! The lightning indexer: scores of all positions, and the best of them.

use super::{Constants, GpuDevice, Kernel, Params, attention::MAX_HEADS, kernel};
use crate::{Error, Op};

pub(in crate::gpu) static SCORES: Kernel =
    kernel!("indexer_scores", "attention/indexer_scores", [Write, Read]);
pub(in crate::gpu) static CHOOSE: Kernel =
    kernel!("indexer_top_positions", "attention/indexer_top_positions", [Write]);

/// Threads of a workgroup.
const THREADS: u32 = 256;
/// Positions that a workgroup scores.
const BLOCK: usize = 64;

/// Runs [`Op::TopPositions`], as many rows at a time as have room for their scores.
pub(super) fn top_positions(gpu: &mut GpuDevice, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopPositions { q, k, weights, spans, scores, out } = op else { return Ok(()) };
    let heads = q.heads.next_power_of_two().min(MAX_HEADS);
    let scoring = Constants::new(&[
        ("WG", THREADS),
        ("KV_F16", gpu.half()),
        ("TILE_HEADS", heads as u32),
        ("K_WIDTH", k.width as u32),
    ]);
    let mut first = 0;
    for span in spans.iter().filter(|span| span.rows > 0) {
        let kv = gpu.key_values(span.state)?;
        gpu.append(&kv, (span, first), (&k, None))?;
        for from in (0..span.rows).step_by(scores.rows) {
            let rows = scores.rows.min(span.rows - from);
            let position = span.position + from;
            let activations = gpu.activations();
            let [q, weights, out] = [q, weights, out].map(|view| view.slice(first + from, rows));
            if position + rows > out.width {
                let blocks = (position + rows).div_ceil(BLOCK);
                let params = Params::new()
                    .view(gpu.store.place(&q)?, &q)
                    .view(gpu.store.place(&weights)?, &weights)
                    .view(gpu.store.place(&scores)?, &scores)
                    .n(rows)
                    .n(position)
                    .n(q.heads)
                    .n(out.width)
                    .n(blocks);
                gpu.dispatch(
                    &SCORES,
                    scoring,
                    &[&activations, &kv.memory],
                    &params,
                    rows * blocks,
                )?;
            }
            let params = Params::new()
                .view(gpu.store.place(&scores)?, &scores)
                .view(gpu.store.place(&out)?, &out)
                .n(rows)
                .n(position)
                .n(out.width);
            gpu.dispatch(
                &CHOOSE,
                Constants::new(&[("WG", THREADS)]),
                &[&activations],
                &params,
                rows,
            )?;
        }
        first += span.rows;
    }
    Ok(())
}
