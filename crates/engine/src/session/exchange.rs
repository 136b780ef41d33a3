//! Experts that are moved or read by their uses: exchanges between a card and host memory while a
//! model runs or between answers, reads while it does not.

use std::sync::{Mutex, TryLockError, Weak};

use moeflux_base::Error;
use moeflux_model::blueprint::Blueprint;

use super::{
    engine::Runtime,
    plan_correction::PlanCorrection,
    use_keeper::{IDLE, WarmUp},
};
use crate::{
    experts::{stats::Stats, use_counts::UseCounts, use_window::UseWindow},
    runtime::plan::MemoryPlan,
};

impl Runtime {
    /// Reads experts to empty slots, unless a step runs or ran just now.
    pub(super) fn warm_while_idle(runtime: &Weak<Mutex<Self>>, experts: &[(u32, u32)]) -> WarmUp {
        let Some(runtime) = runtime.upgrade() else { return WarmUp::Done };
        match runtime.try_lock() {
            Ok(mut runtime) if runtime.last_step.elapsed() >= IDLE => {
                let Self { cache, device, .. } = &mut *runtime;
                // A device or disk that fails tells the next step.
                let warmed = cache.warm(&mut **device, experts);
                match warmed.is_ok() && !cache.has_failed_reads() && cache.has_empty_slots() {
                    true => WarmUp::Read,
                    false => WarmUp::Done,
                }
            }
            Err(TryLockError::Poisoned(_)) => WarmUp::Done,
            Ok(_) | Err(TryLockError::WouldBlock) => WarmUp::Busy,
        }
    }

    /// Has experts on the card exchanged by their uses. Where the card computes all experts, they
    /// are exchanged while it does. Where the processor computes some, they are exchanged between
    /// answers, unless the plan `is_fixed`. `earlier`: uses in earlier runs.
    pub(super) fn watch_uses(
        &mut self,
        blueprint: &Blueprint,
        plan: &MemoryPlan,
        earlier: Option<&UseCounts>,
        is_fixed: bool,
    ) {
        if plan.placement().is_none_or(|placement| !placement.card_reads()) {
            return;
        }
        self.cache.drop_copies();
        if !blueprint.moe_layers().any(|(layer, _)| self.cache.can_exchange(layer)) {
            return;
        }
        if plan.computed_on_host() == 0 {
            let counters = self.model.expert_counters();
            self.window = Some(UseWindow::new(counters, blueprint.own_layers()));
        } else if !is_fixed {
            self.correction = Some(PlanCorrection::new(earlier.cloned().unwrap_or_default()));
        }
    }

    /// Places and divides experts again by their uses up to now, if that gains enough. Returns the
    /// new plan.
    pub(super) fn correct_plan(
        &mut self,
        blueprint: &Blueprint,
        plan: &MemoryPlan,
    ) -> Result<Option<MemoryPlan>, Error> {
        let Self { correction: Some(correction), device, cache, host, model, .. } = self else {
            return Ok(None);
        };
        let own = UseCounts::of_counters(model.expert_counters(), blueprint.own_layers());
        let layers = blueprint.moe_layers().take_while(|(i, _)| *i < blueprint.own_layers());
        let of_row: usize = layers.map(|(_, moe)| moe.router.top_k).sum();
        let uses = correction.all_uses(&own, of_row);
        let corrected = uses.and_then(|uses| plan.corrected(blueprint, &uses));
        let Some(mut corrected) = corrected else { return Ok(None) };
        // A step recorded ahead has the slots of before, and the processor the memory of experts.
        model.forget_recorded();
        host.as_mut().map_or(Ok(()), |host| host.return_all(&mut **device))?;
        // An error of the device recurs in the next step.
        if let Some(target) = corrected.placement() {
            let _ = cache.move_experts(&mut **device, target);
        }
        if let Some(reached) = cache.placement() {
            corrected.set_placement(reached.clone());
        }
        let placement = corrected.placement();
        if placement == plan.placement() {
            return Ok(None);
        }
        self.corrections += 1;
        host.as_mut().map_or(Ok(()), |host| host.set_placement(&mut **device, placement))?;
        if corrected.computed_on_host() == 0 {
            (self.host, self.correction) = (None, None);
            self.watch_uses(blueprint, &corrected, None, true);
        }
        Ok(Some(corrected))
    }

    /// Exchanges experts of which others are used more, after some steps.
    pub(super) fn exchange_experts(&mut self, stats: &mut Stats) {
        let Self { window: Some(window), cache, device, model, .. } = self else { return };
        let Some(placement) = cache.placement() else { return };
        let counters = model.expert_counters();
        let class = |layer| cache.can_exchange(layer).then(|| cache.class_of(layer));
        let exchanges = window.step(counters, placement, &class);
        if exchanges.is_empty() {
            return;
        }
        // A step recorded ahead has the slots of before.
        model.forget_recorded();
        for exchange in exchanges {
            // An error of the device recurs in the next step.
            let exchanged = cache.exchange(&mut **device, exchange).unwrap_or(false);
            stats.experts_exchanged += u64::from(exchanged);
        }
    }
}
