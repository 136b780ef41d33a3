//! The largest of many numbers.

use super::{Cpu, pool::Grid, row, topk::top};
use crate::{Error, View, host::Host};

/// Runs [`Op::TopLogits`](crate::Op::TopLogits).
pub(super) fn top_logits(
    host: &mut Host,
    cpu: &mut Cpu,
    logits: &View,
    best: &View,
) -> Result<(), Error> {
    let all = host.get(logits)?;
    if let Some(row) = (0..logits.rows).find(|i| row(all, logits, *i).iter().any(|x| x.is_nan())) {
        return Err(Error::LogitsNan { row });
    }
    let n = best.width / 2;
    host.with(best, |host, numbers| {
        let all = host.get(logits)?;
        cpu.pool.tiles(numbers, Grid::new(best, 1, 1, best.width), |mut best, _| {
            for i in best.rows() {
                let (ids, values) = best.row(i).split_at_mut(n);
                top(row(all, logits, i).iter().copied().enumerate(), ids, values);
            }
        });
        Ok(())
    })
}
