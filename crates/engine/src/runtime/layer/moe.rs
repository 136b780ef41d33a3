//! Routed experts: router, top-k, expert reads, GEMV or GEMM over slots, weighted sum.
//!
//! [`Moe::select_experts`] picks the experts, [`Moe::start_reads`] requests their bytes from the
//! cache, and [`Moe::run_experts`] multiplies them with the activations.

use std::time::{Duration, Instant};

use moeflux_base::{Error, SessionError};
use moeflux_compute::{
    Activation, Buffer, ExpertShape, ExpertUse, ExpertUses, Op, Router, Shared, SharedChoice,
    SlotTable, View, ViewRead,
};
use moeflux_model::blueprint::MoeBlueprint;

use super::{
    fixed_experts::FixedExperts,
    layer::Input,
    loader::Loader,
    mlp::{Mlp, MlpScratch},
    moe_state::{MoeState, NeededExpert, RouterChoice},
    read_timer::ReadTimer,
    scratch::{PredictionBuffers, ScratchId, ScratchWidths},
    step::{Linear, NextExperts, Step, StreamNorm},
};
use crate::{
    experts::{
        cache::{Lookup, Pin},
        counters::FoundExpert,
        prefetch::{MAX_PREFETCH_ROWS, PrefetchAction},
    },
    runtime::{host_experts::HostExpertsOp, served_step::ServedLayer},
};

#[derive(Debug)]
pub(crate) struct Moe {
    n_experts: usize,
    top_k: usize,
    /// Experts per row in one op: the top k, and a fused shared expert.
    experts_per_row: usize,
    shape: ExpertShape,
    /// Bytes of one expert on disk.
    bytes: u64,
    activation: Activation,
    router_weight: Linear,
    router_norm: Option<Buffer>,
    router: Router,
    /// Experts of each token, where they do not depend on the router's logits.
    fixed: Option<FixedExperts>,
    experts_norm: Option<Buffer>,
    latent: Option<Latent>,
    experts_post_norm: Option<Buffer>,
    /// Orders of the inputs of gate and up, `(experts, hidden)`, where they differ.
    orders: Option<View>,
    /// Gate of the shared expert.
    shared_gate: Option<Linear>,
    shared: SharedExpert,
}

/// Projections to and from the latent of the routed experts.
#[derive(Clone, Copy, Debug)]
struct Latent {
    down_proj: Linear,
    up_proj: Linear,
}

#[derive(Debug)]
enum SharedExpert {
    None,
    /// Computed as an additional routed expert, from a slot.
    Fused,
    /// Computed separately.
    Separate {
        mlp: Mlp,
        post_norm: Option<Buffer>,
        scale: f32,
    },
}

/// Scratch buffers: router logits; ids and weights of the chosen experts; gate and up projection
/// and gate logit of the shared expert; outputs and intermediate activations of the routed experts;
/// their input where it differs from the shared expert's; their sum where it is normed; their
/// inputs in the order of each expert; latents of the routed experts, input and sum.
const LOGITS: ScratchId = ScratchId(0);
const IDS: ScratchId = ScratchId(1);
const WEIGHTS: ScratchId = ScratchId(2);
const SHARED_GATE: ScratchId = ScratchId(3);
const SHARED_UP: ScratchId = ScratchId(4);
const SHARED: MlpScratch = MlpScratch { gate: SHARED_GATE, up: SHARED_UP };
const SHARED_LOGIT: ScratchId = ScratchId(5);
const EXPERT_OUT: ScratchId = ScratchId(6);
const EXPERT_INNER: ScratchId = ScratchId(7);
const NORMED_INPUT: ScratchId = ScratchId(8);
const EXPERT_SUM: ScratchId = ScratchId(9);
const ORDERED_INPUT: ScratchId = ScratchId(10);
const LATENT_INPUT: ScratchId = ScratchId(11);
const LATENT_SUM: ScratchId = ScratchId(12);

/// If a chunk's rows choose at least this many times as many experts as a layer has, all of them
/// are expected to be needed.
const DENSE_ROUTING_FACTOR: usize = 4;

impl Moe {
    /// Widths, where the sum of the experts is added to the residual stream or not.
    pub(crate) fn widths(blueprint: &MoeBlueprint, hidden: usize, is_added: bool) -> ScratchWidths {
        let mut widths = ScratchWidths::default();
        let uses = blueprint.uses();
        widths.set(LOGITS, blueprint.experts.count);
        widths.set(IDS, uses);
        widths.set(WEIGHTS, uses);
        if let Some(shared) = &blueprint.shared {
            widths.set(SHARED_LOGIT, 1);
            if blueprint.fused_shared().is_none() {
                Mlp::set_widths(&shared.mlp, &mut widths, SHARED);
            }
        }
        let shape = &blueprint.experts.shape;
        widths.set(EXPERT_OUT, uses * shape.down.rows);
        widths.set(EXPERT_INNER, uses * shape.up.rows);
        if blueprint.latent.is_some() {
            widths.set(LATENT_INPUT, shape.up.cols);
            widths.set(LATENT_SUM, shape.down.rows);
        }
        if blueprint.router.norm.is_some() || blueprint.experts_norm.is_some() {
            widths.set(NORMED_INPUT, hidden);
        }
        if blueprint.experts.hidden_orders().is_some() {
            widths.set(ORDERED_INPUT, uses * shape.up.cols);
        }
        let is_summed_apart = blueprint.latent.is_some() || blueprint.experts_post_norm.is_some();
        if !is_added || is_summed_apart {
            widths.set(EXPERT_SUM, hidden);
        }
        widths
    }

    pub(crate) fn load(blueprint: &MoeBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        let (shared_gate, shared) = match &blueprint.shared {
            None => (None, SharedExpert::None),
            Some(shared) => {
                let gate = shared.gate.as_ref().map(|g| loader.projection(g)).transpose()?;
                let shared = match blueprint.fused_shared() {
                    Some(_) => SharedExpert::Fused,
                    None => SharedExpert::Separate {
                        mlp: Mlp::load(&shared.mlp, loader)?,
                        post_norm: loader.optional_vector(shared.post_norm.as_ref())?,
                        scale: shared.scale,
                    },
                };
                (gate, shared)
            }
        };
        let router = &blueprint.router;
        let orders = match blueprint.experts.hidden_orders() {
            Some(orders) => {
                let buffer = loader.indexes("orders of experts", orders)?;
                let (count, width) = (blueprint.experts.count, blueprint.experts.shape.up.cols);
                Some(View::rows(buffer, count, width))
            }
            None => None,
        };
        Ok(Self {
            orders,
            n_experts: blueprint.experts.count,
            top_k: router.top_k,
            experts_per_row: blueprint.uses(),
            shape: blueprint.experts.shape,
            bytes: blueprint.experts.file_bytes as u64,
            activation: blueprint.activation,
            router_weight: loader.linear(&router.weight)?,
            router_norm: router
                .norm
                .as_ref()
                .map(|norm| loader.scaled(&norm.weight, norm.scale))
                .transpose()?,
            router: Router {
                scoring: router.scoring,
                correction: loader.optional_vector(router.correction.as_ref())?,
                by_logit: router.by_logit,
                groups: router.groups,
                normalize: router.normalize,
                scale: router.scale,
                expert_scale: loader.optional_vector(router.expert_scale.as_ref())?,
                shared: None,
                given: router.fixed.is_some(),
            },
            fixed: router
                .fixed
                .as_ref()
                .map(|routes| FixedExperts::load(routes, router.top_k, loader))
                .transpose()?,
            experts_norm: loader.optional_vector(blueprint.experts_norm.as_ref())?,
            latent: match &blueprint.latent {
                None => None,
                Some(latent) => Some(Latent {
                    down_proj: loader.projection(&latent.down_proj)?,
                    up_proj: loader.projection(&latent.up_proj)?,
                }),
            },
            experts_post_norm: loader.optional_vector(blueprint.experts_post_norm.as_ref())?,
            shared_gate,
            shared,
        })
    }

    /// Reads `step.normed()`. If `add`, adds the result to `step.x()`; else returns the view of the
    /// sum of all experts.
    ///
    /// If all experts of the layer are in slots and the device supports slot lookups, records all
    /// work without a wait. Otherwise pins hits and starts reads of all misses; then computes the
    /// shared expert, the hits, and each miss when it arrives. Every expert writes its own rows, so
    /// the order of arrival does not change the result.
    pub(crate) fn run(&self, step: &mut Step<'_>, add: bool) -> Result<Option<View>, Error> {
        let weights = step.buffer(WEIGHTS, self.experts_per_row);
        let logits = self.router_logits(step)?;
        let parts = View::rows(
            step.buffer(EXPERT_OUT, 0).buffer,
            step.rows * self.experts_per_row,
            self.shape.down.rows,
        );
        // Observers, traces and experts that the host computes need the ids on the host.
        let is_divided = self.is_divided(step);
        let is_observed = step.observer.is_some() || step.moe_state.recorder.is_some();
        let divided = match is_divided && step.hands_over {
            true => step.cache.divided_table(step.device, step.layer)?,
            false => None,
        };
        let resident = match is_observed || is_divided {
            false => step.cache.resident_table(step.device, step.layer)?,
            true => None,
        };
        let shared = match (divided, resident) {
            (Some(table), _) => {
                let ids = self.select_experts(step, logits, weights)?;
                let input = self.expert_input(step, ids)?;
                self.run_divided(step, input, ids, table, parts)?
            }
            (None, Some(table)) => {
                // Router, experts and sum are recorded consecutively, so that a device can fuse
                // them.
                let shared = self.run_shared(step)?;
                let ids = self.select_experts(step, logits, weights)?;
                let input = self.expert_input(step, ids)?;
                self.run_resident(step, input, ids, table, parts)?;
                shared
            }
            (None, None) => {
                let ids = self.select_experts(step, logits, weights)?;
                let input = self.expert_input(step, ids)?;
                self.read_ids(step, ids, is_divided.then_some(input))?;
                self.run_streamed(step, input, parts)?
            }
        };
        if self.latent.is_some() || self.experts_post_norm.is_some() {
            let out = step.buffer(EXPERT_SUM, step.hidden);
            let sum = match self.latent {
                Some(_) => step.buffer(LATENT_SUM, self.shape.down.rows),
                None => out,
            };
            step.run(&Op::Combine { parts, weights, shared: None, add: false, out: sum })?;
            if let Some(latent) = self.latent {
                step.mat_mul(sum, latent.up_proj, out)?;
            }
            if self.experts_post_norm.is_some() {
                step.norm(out, self.experts_post_norm, step.eps)?;
            }
            return match shared {
                Some(shared) => {
                    step.run(&Op::Add { x: shared.out, y: out })?;
                    Ok(Some(shared.out))
                }
                None => Ok(Some(out)),
            };
        }
        let out = if add { step.x() } else { step.buffer(EXPERT_SUM, step.hidden) };
        step.run(&Op::Combine { parts, weights, shared, add, out })?;
        Ok((!add).then_some(out))
    }

    /// Input of the router or the routed experts: the layer's input, or the residual stream under a
    /// separate norm.
    fn normed_input(&self, step: &mut Step<'_>, norm: Option<Buffer>) -> Result<View, Error> {
        if norm.is_none() {
            return Ok(step.normed());
        }
        let (x, out, eps) = (step.x(), step.buffer(NORMED_INPUT, step.hidden), step.eps);
        step.run(&Op::RmsNorm { x, weight: norm, per_head: false, eps, out })?;
        Ok(out)
    }

    /// Input of the routed experts, `(rows, hidden)` or `(rows, latent)`; where experts have orders
    /// of inputs, a row for each choice.
    fn expert_input(&self, step: &mut Step<'_>, ids: View) -> Result<View, Error> {
        let mut x = self.normed_input(step, self.experts_norm)?;
        if let Some(latent) = self.latent {
            let out = step.buffer(LATENT_INPUT, self.shape.up.cols);
            step.mat_mul(x, latent.down_proj, out)?;
            x = out;
        }
        let Some(orders) = self.orders else { return Ok(x) };
        let buffer = step.buffer(ORDERED_INPUT, 0).buffer;
        let out = View::rows(buffer, step.rows * self.experts_per_row, x.width);
        step.run(&Op::GatherColumns { x, orders, ids: Some(ids), out })?;
        Ok(out)
    }

    /// Maximum number of experts that rows use together: all that is known of experts which the
    /// device finds.
    pub(crate) fn most_needed(&self, rows: usize) -> u64 {
        (rows * self.top_k).min(self.n_experts) as u64
    }

    /// Computes the experts, which the device finds by router ids in the slot table.
    fn run_resident(
        &self,
        step: &mut Step<'_>,
        x: View,
        ids: View,
        table: SlotTable,
        parts: View,
    ) -> Result<(), Error> {
        let ids = match self.orders {
            // Each row of `x` is that of one choice.
            Some(_) => View { offset: ids.offset, ..View::rows(ids.buffer, x.rows, 1) },
            None => ids,
        };
        let uses = ExpertUses::Routed { ids, table };
        let needed = self.most_needed(step.rows);
        step.stats.experts_needed += needed;
        step.stats.experts_hit += needed;
        self.run_experts(step, x, uses, parts)
    }

    /// Hands the layer over to the host, which computes the experts without a slot in the table,
    /// and computes the others and the shared expert meanwhile.
    fn run_divided(
        &self,
        step: &mut Step<'_>,
        x: View,
        ids: View,
        table: SlotTable,
        parts: View,
    ) -> Result<Option<Shared>, Error> {
        let layer = step.layer;
        let context = move || format!("layer {layer}, experts on the host");
        let handed = step.device.hand_over(ids.columns(0, self.top_k), x);
        handed.map_err(Error::at(context))?;
        let shared = self.run_shared(step)?;
        self.run_resident(step, x, ids, table, parts)?;
        step.device.take_results(ids, table, parts).map_err(Error::at(context))?;
        Ok(shared)
    }

    /// The layer for a host that serves its hand-overs.
    pub(crate) fn served_layer(&self, layer: usize) -> ServedLayer {
        ServedLayer {
            layer,
            shape: self.shape,
            activation: self.activation,
            experts: self.n_experts,
            top_k: self.top_k,
            experts_per_row: self.experts_per_row,
            has_row_per_choice: self.orders.is_some(),
        }
    }

    /// Computes the experts in `step.moe_state` as they arrive, and the shared expert.
    fn run_streamed(
        &self,
        step: &mut Step<'_>,
        x: View,
        parts: View,
    ) -> Result<Option<Shared>, Error> {
        step.cache.settle_prefetches(step.device, step.stats)?;
        self.pin_hits(step)?;
        let started = Instant::now();
        if step.rows <= MAX_PREFETCH_ROWS && step.moe_state.prefetcher.is_on() {
            let rate = step.cache.read_counters().bytes_per_second() / self.bytes as f64;
            step.moe_state.prefetcher.layer_started(step.layer, started, rate as f32);
        }
        let mut in_flight = self.start_reads(step)?;
        let mut timer = ReadTimer {
            started,
            independent: None,
            stalled: Duration::ZERO,
            reading: Duration::ZERO,
        };
        let mut prefetch_issued = self.prefetch_next_layer(step)?;
        let shared = self.run_shared(step)?;
        loop {
            self.run_ready(step, x, parts)?;
            in_flight += self.start_reads(step)?;
            if !prefetch_issued {
                prefetch_issued = self.prefetch_next_layer(step)?;
            }
            // Released slots may allow experts on the host to be copied to the card without a read.
            if !step.moe_state.uses.is_empty() || !step.moe_state.host_uses.is_empty() {
                continue;
            }
            if in_flight == 0 {
                // Experts that the host computes hold slots.
                let is_done = step.moe_state.needed.iter().all(|needed| needed.taken);
                if is_done || !step.collect_from_host()? {
                    break;
                }
                continue;
            }
            timer.independent.get_or_insert_with(|| started.elapsed());
            in_flight -= self.await_arrivals(step, &mut timer)?;
        }
        if step.moe_state.needed.iter().any(|n| !n.taken) {
            return Err(SessionError::NoFreeSlot { layer: step.layer }.into());
        }
        timer.add_to(step.stats);
        if step.rows <= MAX_PREFETCH_ROWS {
            let next = step.next.map(|next| next.index);
            step.moe_state.prefetcher.reads_finished(next, started, timer.reading);
        }
        Ok(shared)
    }

    /// Cancels stale prefetches, and queues prefetches for the next layer with experts after this
    /// layer's reads.
    /// Returns whether all demand reads were issued, which has to precede that.
    fn prefetch_next_layer(&self, step: &mut Step<'_>) -> Result<bool, Error> {
        if !step.moe_state.prefetcher.is_on() {
            return Ok(true);
        }
        if step.moe_state.needed.iter().any(|n| !n.taken) {
            return Ok(false);
        }
        step.cache.cancel_prefetches();
        let Some(NextExperts { index: layer, layer: next }) = step.next else { return Ok(true) };
        let Some((moe, input)) = next.moe() else { return Ok(true) };
        if let Some(fixed) = &moe.fixed {
            for expert in fixed.ids_of(step.tokens, moe.top_k) {
                let Step { device, cache, stats, .. } = step;
                if !cache.contains(layer, expert as usize) {
                    cache.prefetch(&mut **device, layer, expert as usize, stats)?;
                }
            }
        } else if step.rows <= MAX_PREFETCH_ROWS {
            moe.predict(step, layer, input)?;
        } else if step.rows * moe.top_k >= DENSE_ROUTING_FACTOR * moe.n_experts {
            for expert in 0..moe.n_experts {
                step.cache.prefetch(step.device, layer, expert, step.stats)?;
            }
        }
        Ok(true)
    }

    /// Runs this layer's router early, on the current residual stream, and prefetches the predicted
    /// experts.
    fn predict(&self, step: &mut Step<'_>, layer: usize, of_input: &Input) -> Result<(), Error> {
        let action = step.moe_state.prefetcher.action(layer);
        if action == PrefetchAction::Skip {
            return Ok(());
        }
        let (x, k) = (step.x(), self.top_k);
        let PredictionBuffers { input, logits, ids, weights, .. } = step.scratch.prediction;
        let input = View::rows(input, step.rows, step.hidden);
        let logits = View::rows(logits, step.rows, self.n_experts);
        let [ids, weights] = [ids, weights].map(|buffer| View::rows(buffer, step.rows, k));
        let (buffers, eps) = (step.scratch.prediction.shared(), step.eps);
        match self.router_norm {
            Some(norm) => step.run(&StreamNorm::Rms(norm).op(x, eps, input))?,
            None => of_input.read(buffers, step.residual(), input, &mut |op| step.run(op))?,
        }
        step.exact_mat_mul(input, self.router_weight, logits)?;
        match step.run(&Op::TopK { logits, router: self.router, ids, weights }) {
            // The layer reports it when it runs, under its own name.
            Err(Error::Compute { source: moeflux_compute::Error::RouterNan { .. }, .. }) => {
                return Ok(());
            }
            chosen => chosen?,
        }
        let mut read = std::mem::take(&mut step.moe_state.ids_as_f32);
        read.resize(step.rows * k, 0.0);
        let found = step
            .device
            .read(ids, &mut read)
            .map_err(Error::at(|| format!("layer {layer}, router")));
        step.moe_state.prefetcher.start_predictions(layer);
        // The lowest ranks have similar scores, and are the most likely to change.
        let likely = k - k / 4;
        for expert in read.chunks(k).flat_map(|row| &row[..likely]).map(|id| *id as u32) {
            let Step { device, cache, moe_state, stats, .. } = step;
            let missing = found.is_ok() && !cache.contains(layer, expert as usize);
            if missing && moe_state.prefetcher.predict(expert) && action == PrefetchAction::Prefetch
            {
                cache.prefetch(&mut **device, layer, expert as usize, stats)?;
            }
        }
        step.moe_state.ids_as_f32 = read;
        found
    }

    /// Logits of the router, and of the shared expert's gate.
    fn router_logits(&self, step: &mut Step<'_>) -> Result<View, Error> {
        let logits = step.buffer(LOGITS, self.n_experts);
        let x = self.normed_input(step, self.router_norm)?;
        step.exact_mat_mul(x, self.router_weight, logits)?;
        if let Some(gate) = self.shared_gate {
            let (x, logit) = (step.normed(), step.buffer(SHARED_LOGIT, 1));
            step.exact_mat_mul(x, gate, logit)?;
        }
        Ok(logits)
    }

    /// Top-k of the router logits. Returns the view of the ids.
    fn select_experts(
        &self,
        step: &mut Step<'_>,
        logits: View,
        weights: View,
    ) -> Result<View, Error> {
        let width = self.experts_per_row;
        let routed = step.scratch.routed.as_ref();
        let kept = routed.and_then(|routed| routed.of_layer(step.layer, step.rows, width));
        let ids = kept.unwrap_or_else(|| step.buffer(IDS, width));
        let shared = match self.shared {
            SharedExpert::Fused => Some(SharedChoice { gate: self.shared_gate_logit(step) }),
            SharedExpert::None | SharedExpert::Separate { .. } => None,
        };
        if let Some(FixedExperts { table, .. }) = self.fixed {
            let (tokens, out) = (step.tokens, ids.columns(0, self.top_k));
            step.run(&Op::Embed { table, tokens, out })?;
        }
        step.run(&Op::TopK { logits, router: Router { shared, ..self.router }, ids, weights })?;
        Ok(ids)
    }

    /// Whether the host computes some of the layer's experts in this step.
    fn is_divided(&self, step: &Step<'_>) -> bool {
        let Step { host, layer, rows, .. } = step;
        host.as_ref().is_some_and(|host| host.placement().computes_in(*layer, *rows))
    }

    /// Reads the ids back and groups them in `step.moe_state`, and `input` for the host's experts
    /// with them.
    fn read_ids(&self, step: &mut Step<'_>, ids: View, input: Option<View>) -> Result<(), Error> {
        let moe_state = &mut *step.moe_state;
        moe_state.ids_were_read = true;
        moe_state.ids_as_f32.resize(step.rows * self.top_k, 0.0);
        let layer = step.layer;
        let chosen = ids.columns(0, self.top_k);
        let read = match (input, &mut step.host) {
            (None, _) if self.fixed.is_some() => Ok(()),
            (Some(input), Some(host)) => step.device.read_views(&mut [
                ViewRead { view: chosen, out: &mut moe_state.ids_as_f32 },
                ViewRead { view: input, out: host.input(input.rows * input.width) },
            ]),
            _ => step.device.read(chosen, &mut moe_state.ids_as_f32),
        };
        read.map_err(Error::at(|| format!("layer {layer}, router")))?;
        moe_state.see_ids(layer);
        step.collect_from_host()?;
        let moe_state = &mut *step.moe_state;
        moe_state.ids.clear();
        match &self.fixed {
            Some(fixed) => moe_state.ids.extend(fixed.ids_of(step.tokens, self.top_k)),
            None => moe_state.ids.extend(moe_state.ids_as_f32.iter().map(|id| *id as u32)),
        }
        if let Some(observer) = &mut step.observer {
            observer.experts(layer, self.top_k, &moe_state.ids);
        }
        moe_state.group_by_expert(self.top_k);
        let MoeState { needed, prefetcher, counters, recorder, .. } = moe_state;
        for used in &*needed {
            let uses = used.choices.len();
            counters.add_uses(layer, used.expert, uses);
            step.stats.add_uses(uses, step.cache.is_on_card(layer, used.expert));
        }
        if let Some(recorder) = recorder {
            recorder.record_layer(needed.iter().map(|n| n.expert));
        }
        prefetcher
            .score(layer, |id| needed.binary_search_by_key(&(id as usize), |n| n.expert).is_ok());
        step.stats.experts_needed += needed.len() as u64;
        Ok(())
    }

    /// Pins all hits before any read or copy could evict them.
    fn pin_hits(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let moe_state = &mut *step.moe_state;
        moe_state.uses.clear();
        moe_state.host_uses.clear();
        moe_state.pinned.clear();
        moe_state.host_pinned.clear();
        if let Some(slot) = step.cache.shared(step.layer) {
            let row_use =
                |row| ExpertUse { slot, row, out_row: row * self.experts_per_row + self.top_k };
            moe_state.uses.extend((0..step.rows).map(row_use));
        }
        let mut missed = 0;
        for needed in &mut moe_state.needed {
            needed.hit = step.cache.pin(step.layer, needed.expert);
            missed += u64::from(needed.hit.is_none_or(|hit| hit.predicted));
        }
        step.stats.bytes_missed += missed * self.bytes;
        for i in 0..step.moe_state.needed.len() {
            if let Some(hit) = step.moe_state.needed[i].hit {
                let found = if hit.predicted {
                    step.stats.experts_predicted += 1;
                    FoundExpert::Prefetched
                } else {
                    step.stats.experts_hit += 1;
                    FoundExpert::InSlot
                };
                let MoeState { needed, counters, .. } = &*step.moe_state;
                counters.add_found(step.layer, needed[i].expert, found);
                if let Some(pin) = step.cache.load_to_card(step.device, hit)? {
                    self.add_uses(step, i, pin);
                }
            }
        }
        Ok(())
    }

    /// Adds the expert uses of a needed expert that is in a slot.
    fn add_uses(&self, step: &mut Step<'_>, needed: usize, pin: Pin) {
        let host = step.host.as_ref().filter(|host| host.computes(step.rows));
        let is_computed =
            |expert| host.is_some_and(|host| host.placement().is_computed(step.layer, expert));
        let MoeState { needed: experts, choices, uses, host_uses, pinned, host_pinned, .. } =
            &mut *step.moe_state;
        let needed = &mut experts[needed];
        let (uses, pinned) = match is_computed(needed.expert) {
            true => (host_uses, host_pinned),
            false => (uses, pinned),
        };
        needed.taken = true;
        pinned.push(pin);
        uses.extend(choices[needed.choices.clone()].iter().map(|c| self.expert_use(c, pin.slot)));
    }

    fn expert_use(&self, choice: &RouterChoice, slot: moeflux_compute::Slot) -> ExpertUse {
        let row = choice.row as usize;
        let out_row = row * self.experts_per_row + choice.rank as usize;
        let row = if self.orders.is_some() { out_row } else { row };
        ExpertUse { slot, row, out_row }
    }

    /// Starts reads until all are in flight or no slot is free. Returns how many it started.
    fn start_reads(&self, step: &mut Step<'_>) -> Result<usize, Error> {
        let mut started = 0;
        for i in 0..step.moe_state.needed.len() {
            let NeededExpert { expert, taken, hit, .. } = step.moe_state.needed[i];
            if taken {
                continue;
            }
            let predicted = match step.cache.request(step.device, step.layer, expert, step.stats)? {
                Lookup::Ready(pin) => {
                    self.add_uses(step, i, pin);
                    pin.predicted
                }
                Lookup::Started { predicted } => {
                    started += 1;
                    predicted
                }
                Lookup::Full => break,
            };
            if hit.is_none() {
                let found = if predicted { FoundExpert::Prefetched } else { FoundExpert::OnDisk };
                step.moe_state.counters.add_found(step.layer, expert, found);
            }
            step.moe_state.needed[i].taken = true;
        }
        Ok(started)
    }

    /// Waits for one read, and takes all others that have finished. Returns how many.
    fn await_arrivals(&self, step: &mut Step<'_>, timer: &mut ReadTimer) -> Result<usize, Error> {
        let since = Instant::now();
        let mut arrived = 0;
        while let Some((expert, pin)) =
            step.cache.next_arrival(step.device, arrived == 0, step.stats)?
        {
            if arrived == 0 {
                timer.waited(since);
            }
            arrived += 1;
            if let Ok(i) = step.moe_state.needed.binary_search_by_key(&expert, |n| n.expert) {
                self.add_uses(step, i, pin);
            }
        }
        Ok(arrived)
    }

    /// Computes the experts that are in memory and releases their slots. The host computes its
    /// experts while the device computes the others.
    fn run_ready(&self, step: &mut Step<'_>, x: View, parts: View) -> Result<(), Error> {
        if step.moe_state.uses.is_empty() && step.moe_state.host_uses.is_empty() {
            return Ok(());
        }
        let computes_on_host = self.start_on_host(step, x, parts)?;
        let mut uses = std::mem::take(&mut step.moe_state.uses);
        // Sorted by bank, as a device computes the experts of one bank at once.
        uses.sort_unstable_by_key(|u| (u.slot, u.out_row));
        let ran = match uses.is_empty() {
            true => Ok(()),
            false => self.run_experts(step, x, ExpertUses::Listed(&uses), parts),
        };
        step.moe_state.uses = uses;
        ran?;
        let layer = step.layer;
        let ticket =
            step.device.submit().map_err(Error::at(|| format!("layer {layer}, experts")))?;
        if let Some(host) = step.host.as_mut().filter(|_| computes_on_host) {
            let announced = host.announce_results(step.device);
            announced.map_err(Error::at(|| format!("layer {layer}, experts on the host")))?;
        }
        for pin in step.moe_state.pinned.drain(..) {
            step.cache.release(pin, ticket);
        }
        step.moe_state.uses.clear();
        Ok(())
    }

    /// Starts to compute experts on the host. Returns whether there are any.
    fn start_on_host(&self, step: &mut Step<'_>, x: View, parts: View) -> Result<bool, Error> {
        if step.moe_state.host_uses.is_empty() {
            return Ok(false);
        }
        step.collect_from_host()?;
        let Step { device, moe_state, stats, layer, rows, kinds, .. } = step;
        let Some(host) = &mut step.host else { return Ok(false) };
        let MoeState { host_uses: uses, host_pinned, .. } = &mut **moe_state;
        uses.sort_unstable_by_key(|u| (u.slot, u.out_row));
        stats.experts_on_host += uses.chunk_by(|a, b| a.slot == b.slot).count() as u64;
        let op = HostExpertsOp {
            uses,
            input_rows: x.rows,
            answers: kinds.answers * (x.rows / *rows),
            shape: &self.shape,
            activation: self.activation,
            experts: self.n_experts,
            parts,
        };
        let started = host.start(&mut **device, &op, host_pinned.drain(..));
        uses.clear();
        started.map_err(Error::at(|| format!("layer {layer}, experts on the host")))?;
        Ok(true)
    }

    fn run_experts(
        &self,
        step: &mut Step<'_>,
        x: View,
        uses: ExpertUses<'_>,
        parts: View,
    ) -> Result<(), Error> {
        let inner = View::rows(step.buffer(EXPERT_INNER, 0).buffer, uses.len(), self.shape.up.rows);
        step.run(&Op::Experts {
            x,
            shape: &self.shape,
            activation: self.activation,
            experts: self.n_experts + (self.experts_per_row - self.top_k),
            answers: step.kinds.answers * (x.rows / step.rows),
            uses,
            inner,
            out: parts,
        })
    }

    /// View of the gate logit of the shared expert.
    fn shared_gate_logit(&self, step: &Step<'_>) -> Option<View> {
        self.shared_gate.map(|_| step.buffer(SHARED_LOGIT, 1))
    }

    /// Computes the shared expert, unless it is fused.
    fn run_shared(&self, step: &mut Step<'_>) -> Result<Option<Shared>, Error> {
        let SharedExpert::Separate { mlp, post_norm, scale } = &self.shared else {
            return Ok(None);
        };
        let out = step.mixed();
        mlp.run(step, SHARED, out)?;
        if post_norm.is_some() {
            step.norm(out, *post_norm, step.eps)?;
        }
        if *scale != 1.0 {
            step.run(&Op::Scale { x: out, factor: *scale })?;
        }
        Ok(Some(Shared { out, gate: self.shared_gate_logit(step) }))
    }
}
