//! Places of experts when a model is opened: by earlier uses and measured speeds, or as recorded.

use moeflux_base::Error;
use moeflux_compute::Device;
use moeflux_model::{blueprint::Blueprint, checkpoint::ModelId};

use super::{
    expert_probe::{ProbeSlots, measure},
    host_experts::HostExperts,
    memory_request::MemoryRequest,
    plan::MemoryPlan,
};
use crate::experts::{
    PlacementOptions, cache::ExpertCache, expert_plan::ExpertPlan, placement::Placement,
    use_counts::UseCounts,
};

/// Knowledge by which a model's experts are placed.
pub(crate) struct ExpertPlacing<'a> {
    pub(crate) blueprint: &'a Blueprint,
    pub(crate) request: &'a MemoryRequest,
    pub(crate) options: &'a PlacementOptions,
    /// `None` while the weights are arriving.
    pub(crate) model: Option<ModelId>,
    /// Uses of experts in earlier runs.
    pub(crate) uses: Option<&'a UseCounts>,
    /// Threads of the host's processor.
    pub(crate) threads: Option<usize>,
}

impl ExpertPlacing<'_> {
    /// A recorded division to follow.
    pub(crate) fn recorded(&self) -> Option<&ExpertPlan> {
        self.options.recorded.as_deref()
    }

    /// Places experts before they are loaded. Opens the processor if it may compute some.
    pub(crate) fn place(
        &self,
        device: &mut dyn Device,
        plan: &mut MemoryPlan,
        cache: &mut ExpertCache,
    ) -> Result<Option<HostExperts>, Error> {
        let Self { blueprint, request, uses, .. } = *self;
        plan.replace_experts(blueprint, uses, None);
        if let Some(recorded) = self.recorded() {
            let unknown = || recorded.does_not_fit("the model's files are still arriving");
            plan.follow(blueprint, self.model.ok_or_else(unknown)?, recorded)?;
        }
        cache.set_placement(device, plan.placement().cloned());
        let mut host = HostExperts::with(device, plan, blueprint, self.threads)?;
        if let Some(processor) = &mut host
            && plan.divides_experts()
            && self.recorded().is_none()
        {
            let times = match request.expert_times {
                Some(times) => times,
                None => {
                    let slots = ProbeSlots::of_cache(cache, blueprint);
                    measure(device, processor, &slots, blueprint)?
                }
            };
            plan.replace_experts(blueprint, uses, Some(&times));
            plan.divide_experts(blueprint, times);
            set_placement(device, cache, Some(processor), plan.placement())?;
        }
        Ok(host)
    }
}

/// Sets the places of experts for the card and for the processor. Experts are not moved.
pub(crate) fn set_placement(
    device: &mut dyn Device,
    cache: &mut ExpertCache,
    host: Option<&mut HostExperts>,
    placement: Option<&Placement>,
) -> Result<(), Error> {
    cache.set_placement(device, placement.cloned());
    host.map_or(Ok(()), |host| host.set_placement(device, placement))
}
