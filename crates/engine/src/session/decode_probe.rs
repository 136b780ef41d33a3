//! Decode probe: steps of a loaded model that correct the measured times of its experts.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use moeflux_base::Error;
use moeflux_model::blueprint::Blueprint;

use super::{drafts::CheckOutcome, engine::Runtime, steps::BatchResult, timeline::Timeline};
use crate::{
    experts::{
        counters::ExpertCounters,
        division::{ExpertTimes, LayerExpertCounts},
        stats::Stats,
    },
    runtime::{
        control::StepControl,
        expert_placing::{ExpertPlacing, set_placement},
        host_experts::HostExperts,
        logits_request::LogitsRequest,
        plan::MemoryPlan,
        spans::SpanKind,
    },
};

/// Steps before the measured ones: kernels compile, and slots are read for the first time.
const WARM_STEPS: usize = 3;

/// Maximum number of measured steps.
const STEPS: usize = 9;

/// Time after which no further step is measured.
const TIME: Duration = Duration::from_millis(400);

impl Runtime {
    /// Corrects measured times by steps of the loaded model, and divides experts again.
    pub(super) fn correct_division(
        &mut self,
        placing: &ExpertPlacing<'_>,
        plan: &mut MemoryPlan,
        host: Option<HostExperts>,
    ) -> Result<Option<HostExperts>, Error> {
        let is_given = placing.request.expert_times.is_some() || placing.recorded().is_some();
        let times = plan.expert_times().copied().filter(|_| !is_given && plan.divides_experts());
        let (times, processor) = match (times, host) {
            (Some(times), Some(processor)) => (times, processor),
            (_, host) => return Ok(host),
        };
        let blueprint = placing.blueprint;
        let corrected = self.correct_expert_times(blueprint, plan, times, processor);
        let (times, mut processor) = corrected?;
        plan.divide_experts(blueprint, times);
        let Self { device, cache, .. } = self;
        set_placement(&mut **device, cache, Some(&mut processor), plan.placement())?;
        Ok(Some(processor))
    }

    /// Corrects the time that a layer takes longer where the host computes experts, by decode steps
    /// with and without a division. The parts of a layer that the measurement of experts leaves out
    /// make it longer: recording, launches, queues of the driver.
    ///
    /// All experts are in memory. The division of the plan and of the cache is undefined after the
    /// call.
    fn correct_expert_times(
        &mut self,
        blueprint: &Blueprint,
        plan: &mut MemoryPlan,
        times: ExpertTimes,
        processor: HostExperts,
    ) -> Result<(ExpertTimes, HostExperts), Error> {
        let Some(placement) = plan.placement() else { return Ok((times, processor)) };
        let layers = blueprint
            .moe_layers()
            .filter(|(layer, moe)| placement.on_card(*layer).count() < moe.experts.count)
            .count();
        if plan.context < WARM_STEPS + STEPS || layers == 0 {
            return Ok((times, processor));
        }
        let counters = self.model.replace_counters(Arc::new(ExpertCounters::new(blueprint)));
        let divided = |layer: &LayerExpertCounts| times.best_division(layer);
        let measured = self.decode_seconds(blueprint, plan, &|_| 0).and_then(|read| {
            self.host = Some(processor);
            Ok((read, self.decode_seconds(blueprint, plan, &divided)?))
        });
        self.model.replace_counters(counters);
        let (read, computed) = measured?;
        let predicted = plan.seconds_of_experts(blueprint, &times, &divided)
            - plan.seconds_of_experts(blueprint, &times, &|_| 0);
        let missing = (computed - read - predicted) / layers as f64;
        let times = ExpertTimes { wait: (times.wait + missing).max(0.0), ..times };
        let lost = || Error::internal("the processor was lost while it was measured");
        Ok((times, self.host.take().ok_or_else(lost)?))
    }

    /// Median seconds of a decode step where the host computes `computed` of each layer's experts.
    fn decode_seconds(
        &mut self,
        blueprint: &Blueprint,
        plan: &mut MemoryPlan,
        computed: &dyn Fn(&LayerExpertCounts) -> usize,
    ) -> Result<f64, Error> {
        plan.set_computed(blueprint, computed);
        self.model.forget_recorded();
        let Self { device, cache, host, .. } = self;
        set_placement(&mut **device, cache, host.as_mut(), plan.placement())?;
        let mut timeline = self.new_timeline(blueprint, plan)?;
        let measured = self.measure_steps(blueprint, &mut timeline);
        self.drop_timeline(timeline);
        let mut seconds = measured?;
        seconds.sort_by(f64::total_cmp);
        Ok(seconds[seconds.len() / 2])
    }

    fn measure_steps(
        &mut self,
        blueprint: &Blueprint,
        timeline: &mut Timeline,
    ) -> Result<Vec<f64>, Error> {
        let (started, mut seconds) = (Instant::now(), Vec::with_capacity(STEPS));
        for step in 0..WARM_STEPS + STEPS {
            // Any tokens, so that routers choose different experts.
            let token = (step * 7919 + 13) % blueprint.vocab.max(1);
            // A step that waits layer by layer is no measure of later ones.
            self.model.retry_hand_overs();
            let since = Instant::now();
            let wanted = LogitsRequest::TopK(1);
            let (tokens, outcome) = (&[token as u32], &CheckOutcome::new(1));
            let timeline = &mut *timeline;
            let mut entry = [BatchResult::new(timeline, tokens, outcome, wanted, SpanKind::Answer)];
            let mut control = StepControl::default();
            self.step(&mut entry, &mut Stats::default(), &mut control, &mut |_, _, _| true)?;
            if step >= WARM_STEPS {
                seconds.push(since.elapsed().as_secs_f64());
            }
            if started.elapsed() > TIME && !seconds.is_empty() {
                break;
            }
        }
        Ok(seconds)
    }
}
