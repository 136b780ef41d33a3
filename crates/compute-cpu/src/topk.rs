//! Top-k expert routing.

use moeflux_ops::{Error, ExpertGroups, GroupScore, Op, Router, Scoring, View, seam::Host};

use super::{
    cpu::{Cpu, row},
    pool::Grid,
};

/// Rows of a tile.
const TILE_ROWS: usize = 4;

/// A router and its buffers.
#[derive(Clone, Copy)]
struct RouterInputs<'a> {
    router: Router,
    correction: Option<&'a [f32]>,
    expert_scale: Option<&'a [f32]>,
    shared_gate: Option<(&'a [f32], View)>,
}

/// Runs [`Op::TopK`].
pub(super) fn top_k(host: &mut Host, cpu: &mut Cpu, op: &Op<'_>) -> Result<(), Error> {
    let &Op::TopK { logits, router, ids, weights } = op else { return Ok(()) };
    let (values, correction) =
        (host.get(&logits)?, router.correction.map(|c| host.values(c)).transpose()?);
    let is_invalid = |i: usize| {
        let row = row(values, &logits, i);
        // A softmax of infinities has no scores. Scores are compared only with a correction.
        let infinite = || !row.iter().copied().fold(f32::NEG_INFINITY, f32::max).is_finite();
        let compares_scores = router.scoring == Scoring::Softmax && correction.is_some();
        row.iter().any(|x| x.is_nan()) || (compares_scores && infinite())
    };
    let bad_correction = correction.is_some_and(|c| c[..logits.width].iter().any(|c| c.is_nan()));
    if let Some(row) = (0..logits.rows).find(|i| bad_correction || is_invalid(*i)) {
        return Err(Error::RouterNan { row });
    }
    let k = ids.width;
    host.with(&ids, |host, id_values| {
        host.with(&weights, |host, weight_values| {
            let values = host.get(&logits)?;
            let inputs = RouterInputs {
                router,
                correction: router.correction.map(|c| host.values(c)).transpose()?,
                expert_scale: router.expert_scale.map(|s| host.values(s)).transpose()?,
                shared_gate: match router.shared.and_then(|shared| shared.gate) {
                    Some(gate) => Some((host.get(&gate)?, gate)),
                    None => None,
                },
            };
            let id_grid = Grid::new(&ids, TILE_ROWS, 1, k);
            let weight_grid = Grid::new(&weights, TILE_ROWS, 1, k);
            cpu.pool.tiles2(
                id_values,
                id_grid,
                weight_values,
                weight_grid,
                |mut ids, mut weights, _| {
                    for i in ids.rows() {
                        let (ids, shared_id) = ids.row(i).split_at_mut(k - router.shared_count());
                        let (weights, shared_weight) = weights.row(i).split_at_mut(ids.len());
                        inputs.route(row(values, &logits, i), ids, weights);
                        if let ([id], [weight]) = (shared_id, shared_weight) {
                            *id = logits.width as f32;
                            *weight = inputs.shared_gate.map_or(1.0, |(values, gate)| {
                                1.0 / (1.0 + (-row(values, &gate, i)[0]).exp())
                            });
                        }
                    }
                },
            );
            Ok(())
        })
    })
}

impl RouterInputs<'_> {
    /// Corrected logit or score by which experts are ranked. `softmax` is its maximum and sum.
    fn rank_key(&self, id: usize, x: f32, softmax: [f64; 2]) -> f32 {
        let by_logit = self.router.selects_by_logit();
        let value = if by_logit { x } else { self.score(x, softmax) as f32 };
        value + self.correction.map_or(0.0, |correction| correction[id])
    }

    /// Uncorrected score of a logit, from which the weight is computed.
    fn score(&self, x: f32, [max, sum]: [f64; 2]) -> f64 {
        match self.router.scoring {
            Scoring::Softmax | Scoring::SparseMixer { .. } => (f64::from(x) - max).exp() / sum,
            Scoring::Sigmoid => f64::from(1.0 / (1.0 + (-x).exp())),
            Scoring::SqrtSoftplus => f64::from(x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt(),
        }
    }

    /// Selects the experts of one row, in rank order, and computes their weights.
    fn route(&self, logits: &[f32], ids: &mut [f32], weights: &mut [f32]) {
        let softmax = match self.router.scoring {
            Scoring::Softmax => {
                let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                // The full sum matters only without normalization or with a correction.
                let needs_sum = !self.router.normalize || self.correction.is_some();
                let sum = if needs_sum {
                    logits.iter().map(|x| (f64::from(*x) - max).exp()).sum()
                } else {
                    1.0
                };
                [max, sum]
            }
            Scoring::Sigmoid | Scoring::SqrtSoftplus | Scoring::SparseMixer { .. } => [0.0, 1.0],
        };
        let key = |id: usize| self.rank_key(id, logits[id], softmax);
        match self.router.groups {
            _ if self.router.given => {
                let last = (logits.len() - 1) as f32;
                ids.iter_mut().for_each(|id| *id = id.clamp(0.0, last).trunc());
            }
            None => select_top((0..logits.len()).map(|id| (id, key(id))), ids, weights),
            Some(ExpertGroups { count, chosen, score }) => {
                let size = logits.len() / count;
                // There are few groups: comparing each with all others avoids storing the scores.
                let group_score = |group: usize| {
                    let mut best = [f32::NEG_INFINITY; 2];
                    for x in (group * size..(group + 1) * size).map(key) {
                        if x > best[0] {
                            best = [x, best[0]];
                        } else if x > best[1] {
                            best[1] = x;
                        }
                    }
                    let has_two = score == GroupScore::BestTwo && size > 1;
                    if has_two { best[0] + best[1] } else { best[0] }
                };
                let is_chosen = |group: usize| {
                    let score = group_score(group);
                    let better = (0..count).filter(|other| {
                        let other_score = group_score(*other);
                        other_score > score || (other_score == score && *other < group)
                    });
                    better.count() < chosen
                };
                let candidates = (0..count).filter(|group| is_chosen(*group));
                let candidates = candidates.flat_map(|group| group * size..(group + 1) * size);
                select_top(candidates.map(|id| (id, key(id))), ids, weights);
            }
        }
        let sum: f64 = if self.router.normalize {
            ids.iter().map(|id| self.score(logits[*id as usize], softmax)).sum::<f64>().max(1e-20)
        } else {
            1.0
        };
        for (rank, weight) in weights.iter_mut().enumerate() {
            let id = ids[rank] as usize;
            let scale = self.expert_scale.map_or(1.0, |scale| scale[id]);
            let softmax = match self.router.scoring {
                Scoring::SparseMixer { band } => sparse_softmax(logits, &ids[..=rank], band),
                _ => softmax,
            };
            *weight = (self.score(logits[id], softmax) / sum) as f32 * self.router.scale * scale;
        }
    }
}

/// Maximum and sum of the softmax of [`Scoring::SparseMixer`] for the last of `ids`.
fn sparse_softmax(logits: &[f32], ids: &[f32], band: f32) -> [f64; 2] {
    let Some((id, lower)) = ids.split_last() else { return [0.0, 1.0] };
    let chosen = logits[*id as usize];
    let others = logits.iter().enumerate().filter(|(i, x)| {
        chosen - **x <= band * x.abs().max(chosen) && !lower.contains(&(*i as f32))
    });
    let max = f64::from(chosen);
    [max, others.map(|(_, x)| (f64::from(*x) - max).exp()).sum()]
}

/// Selects the `ids.len()` largest values in descending order; of equal values the first wins.
/// `best` receives the values.
pub(super) fn select_top(
    values: impl Iterator<Item = (usize, f32)>,
    ids: &mut [f32],
    best: &mut [f32],
) {
    let k = ids.len();
    let mut found = 0;
    for (id, x) in values {
        if found == k && x <= best[k - 1] {
            continue;
        }
        // Inserts after equal values, which came first.
        let rank = best[..found].partition_point(|w| *w >= x);
        found = (found + 1).min(k);
        best.copy_within(rank..found - 1, rank + 1);
        ids.copy_within(rank..found - 1, rank + 1);
        (best[rank], ids[rank]) = (x, id as f32);
    }
}
