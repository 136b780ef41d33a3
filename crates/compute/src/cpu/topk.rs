//! The router.

use super::{Cpu, pool::Grid, row};
use crate::{Error, ExpertGroups, Router, Scoring, View, host::Host};

/// Rows of a tile.
const ROWS: usize = 4;

/// A router's numbers in memory.
#[derive(Clone, Copy)]
struct Choice<'a> {
    router: Router,
    correction: Option<&'a [f32]>,
    expert_scale: Option<&'a [f32]>,
    shared_gate: Option<(&'a [f32], View)>,
}

/// Runs [`Op::TopK`](crate::Op::TopK).
pub(super) fn top_k(
    host: &mut Host,
    cpu: &mut Cpu,
    (logits, router): (&View, Router),
    [ids, weights]: [&View; 2],
) -> Result<(), Error> {
    let (all, correction) =
        (host.get(logits)?, router.correction.map(|c| host.all(c)).transpose()?);
    let wrong = |i: usize| {
        let row = row(all, logits, i);
        // A softmax of infinities has no scores; without a correction none are compared.
        let infinite = || !row.iter().copied().fold(f32::NEG_INFINITY, f32::max).is_finite();
        let compares = router.scoring == Scoring::Softmax && correction.is_some();
        row.iter().any(|x| x.is_nan()) || (compares && infinite())
    };
    let bad = correction.is_some_and(|c| c[..logits.width].iter().any(|c| c.is_nan()));
    if let Some(row) = (0..logits.rows).find(|i| bad || wrong(*i)) {
        return Err(Error::RouterNan { row });
    }
    let k = ids.width;
    host.with(ids, |host, best| {
        host.with(weights, |host, shares| {
            let all = host.get(logits)?;
            let choice = Choice {
                router,
                correction: router.correction.map(|c| host.all(c)).transpose()?,
                expert_scale: router.expert_scale.map(|s| host.all(s)).transpose()?,
                shared_gate: match router.shared.and_then(|shared| shared.gate) {
                    Some(gate) => Some((host.get(&gate)?, gate)),
                    None => None,
                },
            };
            let (grid, other) = (Grid::new(ids, ROWS, 1, k), Grid::new(weights, ROWS, 1, k));
            cpu.pool.tiles2((best, grid), (shares, other), |mut ids, mut weights, _| {
                for i in ids.rows() {
                    let (ids, shared) = ids.row(i).split_at_mut(k - router.besides());
                    let (weights, share) = weights.row(i).split_at_mut(ids.len());
                    choice.make(row(all, logits, i), ids, weights);
                    if let ([id], [weight]) = (shared, share) {
                        *id = logits.width as f32;
                        *weight = choice.shared_gate.map_or(1.0, |(all, gate)| {
                            1.0 / (1.0 + (-row(all, &gate, i)[0]).exp())
                        });
                    }
                }
            });
            Ok(())
        })
    })
}

impl Choice<'_> {
    /// What experts are chosen by: the logit of a plain softmax, else the corrected score. `max` and `sum` are the
    /// softmax's.
    fn compared(&self, id: usize, x: f32, [max, sum]: [f64; 2]) -> f32 {
        match (self.router.scoring, self.correction) {
            (Scoring::Softmax, None) => x,
            (_, correction) => {
                self.score(x, [max, sum]) as f32
                    + correction.map_or(0.0, |correction| correction[id])
            }
        }
    }

    /// The score that an expert is weighed by.
    fn score(&self, x: f32, [max, sum]: [f64; 2]) -> f64 {
        match self.router.scoring {
            Scoring::Softmax => (f64::from(x) - max).exp() / sum,
            Scoring::Sigmoid => f64::from(1.0 / (1.0 + (-x).exp())),
        }
    }

    /// The experts of one row in rank order, and their weights.
    fn make(&self, logits: &[f32], ids: &mut [f32], weights: &mut [f32]) {
        let softmax = match self.router.scoring {
            Scoring::Softmax => {
                let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                // Only weights that are not normalised, and corrections, ask for the sum over all.
                let whole = !self.router.normalize || self.correction.is_some();
                let sum = if whole {
                    logits.iter().map(|x| (f64::from(*x) - max).exp()).sum()
                } else {
                    1.0
                };
                [max, sum]
            }
            Scoring::Sigmoid => [0.0, 1.0],
        };
        let compared = |id: usize| self.compared(id, logits[id], softmax);
        match self.router.groups {
            None => top((0..logits.len()).map(|id| (id, compared(id))), ids, weights),
            Some(ExpertGroups { count, chosen }) => {
                let size = logits.len() / count;
                // Groups are few, so each is ranked anew against all others: nothing has to be stored.
                let worth = |group: usize| {
                    let mut best = [f32::NEG_INFINITY; 2];
                    for x in (group * size..(group + 1) * size).map(compared) {
                        if x > best[0] {
                            best = [x, best[0]];
                        } else if x > best[1] {
                            best[1] = x;
                        }
                    }
                    if size > 1 { best[0] + best[1] } else { best[0] }
                };
                let is_chosen = |group: usize| {
                    let own = worth(group);
                    let before = (0..count).filter(|other| {
                        let of_other = worth(*other);
                        of_other > own || (of_other == own && *other < group)
                    });
                    before.count() < chosen
                };
                let candidates = (0..count).filter(|group| is_chosen(*group));
                let candidates = candidates.flat_map(|group| group * size..(group + 1) * size);
                top(candidates.map(|id| (id, compared(id))), ids, weights);
            }
        }
        let sum: f64 = if self.router.normalize {
            ids.iter().map(|id| self.score(logits[*id as usize], softmax)).sum::<f64>().max(1e-20)
        } else {
            1.0
        };
        for (weight, id) in weights.iter_mut().zip(&*ids) {
            let id = *id as usize;
            let scale = self.expert_scale.map_or(1.0, |scale| scale[id]);
            *weight = (self.score(logits[id], softmax) / sum) as f32 * self.router.scale * scale;
        }
    }
}

/// The largest of some numbers in order, of equal ones the first; `best` is where they are kept meanwhile.
pub(super) fn top(numbers: impl Iterator<Item = (usize, f32)>, ids: &mut [f32], best: &mut [f32]) {
    let k = ids.len();
    let mut found = 0;
    for (id, x) in numbers {
        if found == k && x <= best[k - 1] {
            continue;
        }
        // What is as large came before, and stays before.
        let at = best[..found].partition_point(|w| *w >= x);
        found = (found + 1).min(k);
        best.copy_within(at..found - 1, at + 1);
        ids.copy_within(at..found - 1, at + 1);
        (best[at], ids[at]) = (x, id as f32);
    }
}
