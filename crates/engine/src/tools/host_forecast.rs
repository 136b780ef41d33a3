//! Host forecast: decode speed beside a card with each way to compute experts in host memory.

use moeflux_base::Error;
use moeflux_compute::Device;
use moeflux_model::{blueprint::Blueprint, checkpoint::ModelId};
use serde::Serialize;

use super::roofline::TokenCosts;
use crate::{
    experts::{
        ExpertPlan, PlacementOptions,
        division::{ExpertTimes, LayerExpertCounts, MIN_GAIN},
        placement::ExpertsOnHost,
    },
    runtime::plan::{MemoryPlan, MemoryRequest},
};

/// Dependent ops of a layer besides its experts: norms, projections, attention, router.
const OPS_PER_LAYER: usize = 10;

/// Predicted decode speeds of one session beside a card, for experts in memory.
#[derive(Clone, Debug, Serialize)]
pub struct HostForecast {
    /// Measured times that the predictions follow from.
    pub times: ExpertTimes,
    /// Experts of the model.
    pub experts: usize,
    /// Of these, experts in the card's own memory.
    pub on_card: usize,
    /// Experts that have a slot neither on the card nor on the host. Their reads are not predicted.
    pub on_disk: usize,
    /// Predictions for [`ExpertsOnHost::ALL`], in this order.
    pub ways: Vec<HostWay>,
    /// The fastest of them, or reading where nothing gains 10 %.
    pub worth_having: &'static str,
    /// The division of [`ExpertsOnHost::Auto`], to be recorded. `None` for a preset, which has no
    /// model digest.
    #[serde(skip)]
    pub plan: Option<ExpertPlan>,
}

/// Prediction for one way to compute experts in host memory.
#[derive(Clone, Debug, Serialize)]
pub struct HostWay {
    /// Name of the [`ExpertsOnHost`].
    pub experts_on_host: &'static str,
    /// Experts that the host computes.
    pub computed: usize,
    /// Number of the division; `None` if the host computes no expert.
    pub number: Option<String>,
    /// Predicted decoded tokens per second.
    pub tokens_per_second: f64,
}

/// A model whose experts are placed.
pub(super) struct PlacedModel<'a> {
    pub(super) blueprint: &'a Blueprint,
    pub(super) model: Option<ModelId>,
    pub(super) placement: &'a PlacementOptions,
}

impl HostForecast {
    /// Measures on new slots and predicts for a token at `position`. `None` if the device
    /// has no separate memory, cannot read host memory, or holds every expert.
    ///
    /// # Errors
    /// There is no plan, or a device failed.
    pub(super) fn new(
        device: &mut dyn Device,
        PlacedModel { blueprint, model, placement }: PlacedModel<'_>,
        request: &MemoryRequest,
        position: usize,
    ) -> Result<Option<Self>, Error> {
        let request = request.experts_on_host(ExpertsOnHost::Auto);
        let mut plan = MemoryPlan::new(blueprint, &request, device)?;
        if !plan.divides_experts() {
            return Ok(None);
        }
        plan.place_unloaded(blueprint, model, placement, |plan| {
            plan.measure_experts(device, blueprint, request.host_threads)
        })?;
        let Some(times) = plan.expert_times().copied() else { return Ok(None) };
        let recorded = model.and_then(|model| plan.expert_plan(model));
        let compute = request.experts_on_host(ExpertsOnHost::Compute);
        let mut all = MemoryPlan::new(blueprint, &compute, device)?;
        let options = placement.followed(ExpertsOnHost::Compute);
        all.place_unloaded(blueprint, model, &options, |_| Ok(None))?;
        let costs = TokenCosts::new(blueprint, device.kv_format());
        let dense = costs.resident_bytes(position) as f64 / times.card_bytes_per_second()
            + (blueprint.layers.len() * OPS_PER_LAYER) as f64 * times.op;
        let counts: Vec<_> = blueprint
            .moe_layers()
            .filter_map(|(layer, moe)| Some(LayerExpertCounts::new(moe, plan.placement()?, layer)))
            .collect();
        let predict = |way: ExpertsOnHost,
                       placed: Option<&MemoryPlan>,
                       computed: &dyn Fn(&LayerExpertCounts) -> usize| {
            let experts: f64 =
                counts.iter().map(|layer| times.of_layer(layer, computed(layer))).sum();
            HostWay {
                experts_on_host: way.name(),
                computed: placed.map_or(0, MemoryPlan::computed_on_host),
                number: placed.and_then(MemoryPlan::experts_number),
                tokens_per_second: 1.0 / (dense + experts),
            }
        };
        let ways = ExpertsOnHost::ALL.map(|way| match way {
            ExpertsOnHost::Read => predict(way, None, &|_| 0),
            ExpertsOnHost::Compute => predict(way, Some(&all), &LayerExpertCounts::on_host),
            ExpertsOnHost::Auto => predict(way, Some(&plan), &|layer| times.computed(layer)),
        });
        let experts = blueprint.experts();
        let on_card = plan.slots();
        Ok(Some(Self {
            times,
            experts,
            on_card,
            on_disk: experts.saturating_sub(on_card + plan.host().slots()),
            worth_having: worth_having(&ways),
            ways: ways.into(),
            plan: recorded,
        }))
    }
}

/// The fastest way, or the first, which reads, where none gains [`MIN_GAIN`].
fn worth_having(ways: &[HostWay]) -> &'static str {
    let speed = |way: &HostWay| way.tokens_per_second;
    let fastest = ways.iter().max_by(|a, b| speed(a).total_cmp(&speed(b)));
    let read = ways.first();
    let gains = |way: &&HostWay| read.is_some_and(|read| speed(way) > MIN_GAIN * speed(read));
    fastest.filter(gains).or(read).map_or("", |way| way.experts_on_host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_way_is_worth_having_if_it_gains_over_reading() {
        let ways = |speeds: [f64; 3]| {
            ExpertsOnHost::ALL.into_iter().zip(speeds).map(|(way, tokens_per_second)| HostWay {
                experts_on_host: way.name(),
                computed: 0,
                number: None,
                tokens_per_second,
            })
        };
        let worth = |speeds| worth_having(&ways(speeds).collect::<Vec<_>>());
        assert_eq!(worth([79.0, 67.0, 97.0]), "auto");
        assert_eq!(worth([79.0, 90.0, 88.0]), "compute");
        assert_eq!(worth([79.0, 50.0, 82.0]), "read");
    }
}
