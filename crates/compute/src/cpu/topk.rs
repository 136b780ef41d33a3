//! The softmax router.

use super::{Cpu, pool::Grid, row};
use crate::{Error, View, host::Host};

/// Rows of a tile.
const ROWS: usize = 4;

/// Runs [`Op::TopK`](crate::Op::TopK).
pub(super) fn top_k(
    host: &mut Host,
    cpu: &mut Cpu,
    (logits, normalize): (&View, bool),
    [ids, weights]: [&View; 2],
) -> Result<(), Error> {
    let all = host.get(logits)?;
    if let Some(row) = (0..logits.rows).find(|i| row(all, logits, *i).iter().any(|x| x.is_nan())) {
        return Err(Error::RouterNan { row });
    }
    let k = ids.width;
    host.with(ids, |host, best| {
        host.with(weights, |host, shares| {
            let all = host.get(logits)?;
            let (grid, other) = (Grid::new(ids, ROWS, 1, k), Grid::new(weights, ROWS, 1, k));
            cpu.pool.tiles2((best, grid), (shares, other), |mut ids, mut weights, _| {
                for i in ids.rows() {
                    choose(row(all, logits, i), normalize, ids.row(i), weights.row(i));
                }
            });
            Ok(())
        })
    })
}

/// The largest logits in order, of equal ones the first, and their shares of the softmax.
fn choose(logits: &[f32], normalize: bool, ids: &mut [f32], weights: &mut [f32]) {
    let k = ids.len();
    let mut found = 0;
    for (id, x) in logits.iter().enumerate() {
        if found == k && *x <= weights[k - 1] {
            continue;
        }
        // What is as large came before, and stays before.
        let at = weights[..found].partition_point(|w| *w >= *x);
        found = (found + 1).min(k);
        weights.copy_within(at..found - 1, at + 1);
        ids.copy_within(at..found - 1, at + 1);
        (weights[at], ids[at]) = (*x, id as f32);
    }
    let max = weights[0];
    let exp = |x: f32| f64::from(x - max).exp();
    let sum: f64 =
        if normalize { weights.iter().map(|x| exp(*x)).sum() } else { logits.iter().map(|x| exp(*x)).sum() };
    weights.iter_mut().for_each(|x| *x = (exp(*x) / sum) as f32);
}
