//! Top-k expert routing.

use super::{
    activations::sigmoid,
    device::{ReferenceDevice, descending, softplus},
};
use crate::{
    error::Error,
    handle::Buffer,
    operands::View,
    router::{ExpertGroups, GroupScore, Router, Scoring},
};

impl ReferenceDevice {
    pub(super) fn top_k(
        &mut self,
        logits: View,
        router: Router,
        ids: View,
        weights: View,
    ) -> Result<(), Error> {
        let logits = self.dense(logits)?;
        let values = |buffer: Option<Buffer>, default: f32| match buffer {
            Some(buffer) => Ok::<_, Error>(self.host.values(buffer)?[..logits.view.width].to_vec()),
            None => Ok(vec![default; logits.view.width]),
        };
        let (correction, scales) =
            (values(router.correction, 0.0)?, values(router.expert_scale, 1.0)?);
        for row in 0..logits.view.rows {
            let x = logits.row(row);
            let scores: Vec<f64> = match router.scoring {
                // Those of a sparse mixer depend on the choice.
                Scoring::Softmax | Scoring::SparseMixer { .. } => {
                    let max = f64::from(x.iter().copied().fold(f32::NEG_INFINITY, f32::max));
                    let sum: f64 = x.iter().map(|x| (f64::from(*x) - max).exp()).sum();
                    x.iter().map(|x| (f64::from(*x) - max).exp() / sum).collect()
                }
                Scoring::Sigmoid => x.iter().map(|x| f64::from(sigmoid(*x))).collect(),
                Scoring::SqrtSoftplus => x.iter().map(|x| f64::from(softplus(*x)).sqrt()).collect(),
            };
            let value = |i: usize| if router.selects_by_logit() { x[i] } else { scores[i] as f32 };
            let compared: Vec<f32> =
                correction.iter().enumerate().map(|(i, c)| value(i) + c).collect();
            if compared.iter().any(|x| x.is_nan()) {
                return Err(Error::RouterNan { row });
            }
            let mut order: Vec<usize> = descending(&compared);
            if let Some(ExpertGroups { count, chosen, score }) = router.groups {
                let size = compared.len() / count;
                let group_score = |group: &[f32]| -> f32 {
                    let best = match score {
                        GroupScore::Best => 1,
                        GroupScore::BestTwo => 2,
                    };
                    descending(group).iter().take(best).map(|i| group[*i]).sum()
                };
                let best = descending(&compared.chunks(size).map(group_score).collect::<Vec<_>>());
                order.retain(|i| best[..chosen].contains(&(i / size)));
            }
            let k = ids.width - router.shared_count();
            order.truncate(k);
            if router.given {
                let last = x.len() - 1;
                order = self.dense(ids)?.row(row)[..k]
                    .iter()
                    .map(|id| last.min(*id as usize))
                    .collect();
            }
            let mut scores = scores;
            if let Scoring::SparseMixer { band } = router.scoring {
                for (rank, id) in order.iter().enumerate() {
                    let chosen = x[*id];
                    let is_near = |i: &usize| chosen - x[*i] <= band * x[*i].abs().max(chosen);
                    let others = (0..x.len()).filter(|i| !order[..rank].contains(i));
                    let exp = |i: usize| f64::from(x[i] - chosen).exp();
                    scores[*id] = 1.0 / others.filter(is_near).map(exp).sum::<f64>();
                }
            }
            let sum = if router.normalize {
                order.iter().map(|i| scores[*i]).sum::<f64>().max(1e-20)
            } else {
                1.0
            };
            let weight = |i: &usize| (scores[*i] / sum) as f32 * router.scale * scales[*i];
            let mut shares: Vec<f32> = order.iter().map(weight).collect();
            if let Some(shared) = router.shared {
                order.push(logits.view.width);
                shares.push(match shared.gate {
                    Some(gate) => sigmoid(self.dense(gate)?.row(row)[0]),
                    None => 1.0,
                });
            }
            self.store(weights, row, 0, &shares)?;
            self.store(ids, row, 0, &order.iter().map(|i| *i as f32).collect::<Vec<_>>())?;
        }
        Ok(())
    }
}
