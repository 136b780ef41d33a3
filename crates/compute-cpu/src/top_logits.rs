//! Top-n logits of each row.

use moeflux_ops::{Error, View, seam::Host};

use super::{
    cpu::{Cpu, row},
    pool::Grid,
    topk::select_top,
};

/// Runs [`Op::TopLogits`](moeflux_ops::Op::TopLogits).
pub(super) fn top_logits(
    host: &mut Host,
    cpu: &mut Cpu,
    logits: &View,
    best: &View,
) -> Result<(), Error> {
    let values = host.get(logits)?;
    let has_nan = |i: usize| row(values, logits, i).iter().any(|x| x.is_nan());
    if let Some(row) = (0..logits.rows).find(|i| has_nan(*i)) {
        return Err(Error::LogitsNan { row });
    }
    let n = best.width / 2;
    host.with(best, |host, out| {
        let values = host.get(logits)?;
        cpu.pool.tiles(out, Grid::new(best, 1, 1, best.width), |mut tile, _| {
            for i in tile.rows() {
                let (ids, top) = tile.row(i).split_at_mut(n);
                select_top(row(values, logits, i).iter().copied().enumerate(), ids, top);
            }
        });
        Ok(())
    })
}
