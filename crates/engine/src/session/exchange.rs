//! Experts that are moved or read by their uses: exchanges between a card and host memory while a
//! model runs, reads while it does not.

use std::sync::{Mutex, TryLockError, Weak};

use moeflux_model::blueprint::Blueprint;

use super::{
    engine::Runtime,
    use_keeper::{IDLE, WarmUp},
};
use crate::{
    experts::{stats::Stats, use_window::UseWindow},
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

    /// Has experts on the card exchanged by their uses, where the card computes all experts and
    /// reads the others from host memory.
    pub(super) fn watch_uses(&mut self, blueprint: &Blueprint, plan: &MemoryPlan) {
        let is_fixed = plan.placement().is_none_or(|placement| !placement.card_reads());
        if is_fixed || plan.computed_on_host() > 0 {
            return;
        }
        self.cache.drop_copies();
        if blueprint.moe_layers().any(|(layer, _)| self.cache.can_exchange(layer)) {
            let counters = self.model.expert_counters();
            self.window = Some(UseWindow::new(counters, blueprint.own_layers()));
        }
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
