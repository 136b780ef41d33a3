//! Places of experts in a memory plan: on a card, in host memory for the card to read, or for the
//! host's processor to compute.

use moeflux_base::Error;
use moeflux_model::{
    blueprint::{Blueprint, MoeBlueprint},
    checkpoint::ModelId,
};

use super::plan::MemoryPlan;
use crate::experts::{
    PlacementOptions,
    counters::ExpertCounters,
    division::{ExpertTime, ExpertTimes, LayerExpertCounts, MIN_GAIN},
    expert_plan::ExpertPlan,
    placement::{ExpertsOnHost, PlacedLayer, Placement, PlacementRule},
    use_counts::UseCounts,
};

/// Seconds that a layer takes longer if a card hands any of its experts over to the host.
const HAND_OVER: f64 = 70e-6;
/// Seconds that a layer takes longer if a card reads any of its experts from host memory: fewer of
/// its kernels are fused.
const READ_LAYER: f64 = 15e-6;
/// Bytes per second at which experts in host memory are computed, before it is measured.
const HOST_SPEED: f64 = 40e9;

impl MemoryPlan {
    fn placed_layers(&self, blueprint: &Blueprint) -> Vec<PlacedLayer> {
        let layers = blueprint.layers.iter().zip(self.slot_classes().of_layers());
        let placed = layers.enumerate().map(|(i, (layer, class))| {
            let experts = layer.moe().map_or(0, |moe| moe.experts.count);
            let top_k = layer.moe().map_or(0, |moe| moe.router.top_k);
            PlacedLayer { experts, top_k, class: *class, is_own: i < blueprint.own_layers() }
        });
        placed.collect()
    }

    /// Gives experts their places beside a card: on it, the ones that make a token fastest, by
    /// earlier `uses` and measured `times` as far as they are known. The host computes the others,
    /// unless the card is to read them. `card_reads`: whether it can.
    pub(super) fn place_experts(
        &mut self,
        blueprint: &Blueprint,
        card_reads: bool,
        uses: Option<&UseCounts>,
        times: Option<&ExpertTimes>,
    ) {
        let ways = self.ways(times);
        let rule = PlacementRule { uses, ways: &ways };
        let layers = self.placed_layers(blueprint);
        let mut placement = Placement::new(&layers, &self.slots_by_class(), card_reads, rule);
        if self.experts_on_host() == ExpertsOnHost::Read {
            (0..layers.len()).for_each(|layer| placement.set_computed(layer, 0));
        }
        self.set_placement(placement);
    }

    /// Times of the experts of a layer in host memory, for each way to compute them.
    fn ways(&self, times: Option<&ExpertTimes>) -> Vec<ExpertTime> {
        let each = self.slot_bytes() as f64 / HOST_SPEED;
        let [read, handed_over] = match times {
            Some(times) => [
                ExpertTime { fixed: READ_LAYER + times.bus.fixed, ..times.bus },
                ExpertTime { fixed: times.wait, each: times.of_expert_on_both_sides() },
            ],
            None => [READ_LAYER, HAND_OVER].map(|fixed| ExpertTime { fixed, each }),
        };
        match self.experts_on_host() {
            ExpertsOnHost::Read => vec![read],
            ExpertsOnHost::Compute => vec![handed_over],
            ExpertsOnHost::Auto => vec![read, handed_over],
        }
    }

    /// The plan with experts placed and divided again by `uses`, if the ones in host memory then
    /// take a shorter time: [`MIN_GAIN`].
    pub(crate) fn corrected(&self, blueprint: &Blueprint, uses: &UseCounts) -> Option<Self> {
        let mut corrected = self.clone();
        let times = self.expert_times().copied();
        corrected.replace_experts(blueprint, Some(uses), times.as_ref());
        if let Some(times) = times {
            corrected.divide_experts(blueprint, times);
        }
        let (ways, layers) = (self.ways(times.as_ref()), self.placed_layers(blueprint));
        let rule = PlacementRule { uses: Some(uses), ways: &ways };
        let seconds = |plan: &Self| plan.placement().map(|p| p.seconds_on_host(&layers, &rule));
        let gains = seconds(self) > seconds(&corrected).map(|seconds| seconds * MIN_GAIN);
        gains.then_some(corrected)
    }

    /// Places experts again, by what became known after the plan was made.
    pub(crate) fn replace_experts(
        &mut self,
        blueprint: &Blueprint,
        uses: Option<&UseCounts>,
        times: Option<&ExpertTimes>,
    ) {
        if let Some(card_reads) = self.placement().map(Placement::card_reads) {
            self.place_experts(blueprint, card_reads, uses, times);
        }
    }

    /// Places experts of a model that is not loaded, by the uses of earlier runs, and divides them
    /// as recorded or by times that `measure` measures. `model`: its identity, if it has one.
    pub(crate) fn place_unloaded(
        &mut self,
        blueprint: &Blueprint,
        model: Option<ModelId>,
        options: &PlacementOptions,
        measure: impl FnOnce(&Self) -> Result<Option<ExpertTimes>, Error>,
    ) -> Result<(), Error> {
        let none = UseCounts::of_counters(&ExpertCounters::new(blueprint), blueprint.own_layers());
        let folder = options.use_counts.as_ref().zip(model);
        let uses = folder.and_then(|(folder, model)| folder.load(model, &none).ok().flatten());
        self.replace_experts(blueprint, uses.as_ref(), None);
        if let Some((recorded, model)) = options.recorded.as_deref().zip(model) {
            return self.follow(blueprint, model, recorded);
        }
        if self.divides_experts()
            && let Some(times) = measure(self)?
        {
            self.replace_experts(blueprint, uses.as_ref(), Some(&times));
            self.divide_experts(blueprint, times);
        }
        Ok(())
    }

    /// Divides experts as a recorded plan does.
    ///
    /// # Errors
    /// The plan is of another model, or this device cannot follow it.
    pub(crate) fn follow(
        &mut self,
        blueprint: &Blueprint,
        model: ModelId,
        recorded: &ExpertPlan,
    ) -> Result<(), Error> {
        let layers = self.placed_layers(blueprint);
        let placement = recorded.placement(model, &layers, &self.slots_by_class())?;
        if self.divides_experts() {
            let mut left = self.host_slots_by_class();
            // Where experts come from the disk, a few slots are enough.
            let held = layers.iter().enumerate().filter(|_| self.holds_all);
            for (layer, PlacedLayer { experts, class, .. }) in held {
                let on_host = experts - placement.on_card(layer).count();
                left[*class] = left[*class].checked_sub(on_host).ok_or_else(|| {
                    recorded.does_not_fit(
                        "the host has too few slots for what it leaves to the processor: give the \
                         card less memory, or the host more",
                    )
                })?;
            }
            self.set_expert_times(*recorded.times());
            self.set_placement(placement);
            self.set_follows_recorded();
            return Ok(());
        }
        match (placement.computed(), self.card()) {
            (0, _) => Ok(()),
            (_, None) => Err(recorded.does_not_fit("the device that computes has no own memory")),
            (_, Some(_)) if self.placement().is_some() => {
                Err(recorded.does_not_fit("this card cannot read the host's memory"))
            }
            _ => Err(recorded.does_not_fit("the card holds every expert: give it less memory")),
        }
    }

    /// The division of experts, to be recorded. `None` if card and processor divide none.
    pub(crate) fn expert_plan(&self, model: ModelId) -> Option<ExpertPlan> {
        let times = self.expert_times()?;
        Some(ExpertPlan::new(model, self.placement()?, *times))
    }

    /// Whether measured times can divide experts: some are in host memory, the host may compute
    /// them, and the card can read them.
    pub(crate) fn divides_experts(&self) -> bool {
        self.experts_on_host() == ExpertsOnHost::Auto
            && self.placement().is_some_and(Placement::card_reads)
    }

    /// Divides the experts in host memory between card and processor by measured times.
    pub(crate) fn divide_experts(&mut self, blueprint: &Blueprint, times: ExpertTimes) {
        if self.divides_experts() {
            self.set_expert_times(times);
            self.set_computed(blueprint, &|layer| times.computed(layer));
        }
    }

    /// Leaves to the processor as many of each layer's experts in host memory as `computed` says.
    pub(crate) fn set_computed(
        &mut self,
        blueprint: &Blueprint,
        computed: &dyn Fn(&LayerExpertCounts) -> usize,
    ) {
        let Some(placement) = self.placement_mut() else { return };
        for (layer, moe) in blueprint.moe_layers() {
            let experts = LayerExpertCounts::new(moe, placement, layer);
            let on_host = moe.experts.count - placement.on_card(layer).count();
            // Of expected uses, the share that the host computes.
            let computed = (computed(&experts) * on_host).div_ceil(experts.on_host().max(1));
            placement.set_computed(layer, computed);
        }
    }

    /// Seconds of all layers' experts for one row, by measured times.
    pub(crate) fn seconds_of_experts(
        &self,
        blueprint: &Blueprint,
        times: &ExpertTimes,
        computed: &dyn Fn(&LayerExpertCounts) -> usize,
    ) -> f64 {
        let Some(placement) = self.placement() else { return 0.0 };
        let layers = blueprint.moe_layers().map(|(layer, moe)| {
            let experts = LayerExpertCounts::new(moe, placement, layer);
            times.of_layer(&experts, computed(&experts))
        });
        layers.sum()
    }
}

impl LayerExpertCounts {
    /// Experts of a layer as if all were used as often: as many count as on the card as have its
    /// experts' expected share of uses.
    pub(crate) fn new(moe: &MoeBlueprint, placement: &Placement, layer: usize) -> Self {
        let count = moe.experts.count;
        Self {
            count,
            on_card: (placement.card_share(layer) * count as f64).round() as usize,
            top_k: moe.router.top_k,
            bytes: moe.experts.slot_bytes as u64,
        }
    }
}
