//! The largest of many numbers.

use super::{Cpu, pool::Grid, row, topk::top};
use crate::{Error, View, host::Host};

/// Runs [`Op::TopLogits`](crate::Op::TopLogits).
pub(super) fn top_logits(
    host: &mut Host,
    cpu: &mut Cpu,
    logits: &View,
    [ids, values]: [&View; 2],
) -> Result<(), Error> {
    let all = host.get(logits)?;
    if let Some(row) = (0..logits.rows).find(|i| row(all, logits, *i).iter().any(|x| x.is_nan())) {
        return Err(Error::LogitsNan { row });
    }
    let n = ids.width;
    host.with(ids, |host, best| {
        host.with(values, |host, largest| {
            let all = host.get(logits)?;
            let (grid, other) = (Grid::new(ids, 1, 1, n), Grid::new(values, 1, 1, n));
            cpu.pool.tiles2((best, grid), (largest, other), |mut ids, mut values, _| {
                for i in ids.rows() {
                    let numbers = row(all, logits, i).iter().copied().enumerate();
                    top(numbers, ids.row(i), values.row(i));
                }
            });
            Ok(())
        })
    })
}
