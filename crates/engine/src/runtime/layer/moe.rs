//! Routed experts: choose, fetch, compute as they arrive, combine.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use moeflux_compute::{
    Activation, Buffer, ExpertShape, ExpertUse, ExpertUses, Op, Router, Shared, SharedChoice,
    SlotTable, View, Weight,
};

use super::{LANES, Layer, Linear, Loader, Mlp, Step, Widths};
use crate::{
    base::{error::Error, stats::Stats},
    experts::{
        cache::{Lookup, Pin},
        prefetch::{Effort, PREFETCH_ROWS, PrefetchMode, Prefetcher},
        trace::Recorder,
    },
    model::blueprint::{Blueprint, MoeBlueprint},
};

#[derive(Debug)]
pub(crate) struct Moe {
    n_experts: usize,
    top_k: usize,
    /// Experts that a row meets in one op: those that are chosen, and a shared one that is one more of them.
    uses: usize,
    shape: ExpertShape,
    /// Of one expert in a file.
    bytes: u64,
    activation: Activation,
    router_weight: Linear,
    router_norm: Option<Buffer>,
    router: Router,
    experts_norm: Option<Buffer>,
    experts_post_norm: Option<Buffer>,
    /// The gate of the shared expert.
    shared_gate: Option<Weight>,
    shared: SharedExpert,
}

#[derive(Debug)]
enum SharedExpert {
    None,
    /// It is one more of the routed ones, in a slot.
    Joined,
    /// It is computed by itself.
    Apart {
        mlp: Mlp,
        post_norm: Option<Buffer>,
    },
}

/// Lanes: router logits, chosen ids, their weights; shared expert; routed experts; what router and routed experts read
/// where it is not what the shared expert reads; the routed experts' sum where it is normed.
const LOGITS: usize = 0;
const IDS: usize = 1;
const WEIGHTS: usize = 2;
const SHARED_GATE: usize = 3;
const SHARED_UP: usize = 4;
const SHARED_LOGIT: usize = 5;
const PARTS: usize = 6;
const INNER: usize = 7;
const OWN_INPUT: usize = 8;
const SUM: usize = 9;

/// One choice of the router: expert, row, rank.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Choice {
    expert: u32,
    row: u32,
    rank: u32,
}

/// An expert that a step needs, with its choices.
struct Needed {
    expert: usize,
    choices: Range<usize>,
    /// It was in memory when the layer began.
    hit: Option<Pin>,
    /// It is there or on its way.
    taken: bool,
}

/// A chunk's rows surely need all experts of a layer between them if they choose so many times as many.
const DENSE_ROUTING_FACTOR: usize = 4;

/// When a layer waited for its reads.
struct Clock {
    /// When the first read was asked for.
    began: Instant,
    /// What was computed before the first wait.
    independent: Option<Duration>,
    stalled: Duration,
    /// From the first request to the last arrival that was waited for.
    reading: Duration,
}

impl Clock {
    fn waited(&mut self, since: Instant) {
        self.stalled += since.elapsed();
        self.reading = self.began.elapsed();
    }

    fn note(&self, stats: &mut Stats) {
        let hideable = self.independent.unwrap_or_default().min(self.reading);
        stats.stalled_ns += self.stalled.as_nanos() as u64;
        stats.reading_ns += self.reading.as_nanos() as u64;
        stats.hideable_ns += hideable.as_nanos() as u64;
        stats.hidden_ns +=
            hideable.min(self.reading.saturating_sub(self.stalled)).as_nanos() as u64;
    }
}

/// What a MoE layer keeps of the router's ids while it runs; kept between layers so that nothing is allocated.
#[derive(Default)]
pub(crate) struct Routing {
    /// Whether the host has waited for a layer's ids since this was last cleared.
    pub(crate) waited: bool,
    read: Vec<f32>,
    ids: Vec<u32>,
    choices: Vec<Choice>,
    needed: Vec<Needed>,
    uses: Vec<ExpertUse>,
    pinned: Vec<Pin>,
    prefetcher: Prefetcher,
    /// Writes down what is needed, if somebody asked for that.
    pub(crate) recorder: Option<Recorder>,
}

impl Routing {
    /// Room for steps of `rows` rows.
    pub(crate) fn new(blueprint: &Blueprint, rows: usize, prefetch: PrefetchMode) -> Self {
        let k = blueprint.max_uses();
        let n = rows.max(PREFETCH_ROWS) * k;
        Self {
            waited: false,
            read: Vec::with_capacity(n),
            ids: Vec::with_capacity(n),
            choices: Vec::with_capacity(n),
            needed: Vec::with_capacity(n),
            uses: Vec::with_capacity(n),
            pinned: Vec::with_capacity(n),
            prefetcher: Prefetcher::new(prefetch, blueprint.layers.len(), k),
            recorder: None,
        }
    }

    /// Bytes of the room for `rows` rows.
    pub(crate) fn bytes(blueprint: &Blueprint, rows: usize) -> u64 {
        let k = blueprint.max_uses();
        let each = size_of::<f32>()
            + size_of::<u32>()
            + size_of::<Choice>()
            + size_of::<Needed>()
            + size_of::<ExpertUse>()
            + size_of::<Pin>();
        (rows.max(PREFETCH_ROWS) * k * each) as u64 + Prefetcher::bytes(blueprint.layers.len(), k)
    }

    /// Groups the ids by expert.
    fn group(&mut self, k: usize) {
        self.choices.clear();
        let choice = |(i, id): (usize, &u32)| Choice {
            expert: *id,
            row: (i / k) as u32,
            rank: (i % k) as u32,
        };
        self.choices.extend(self.ids.iter().enumerate().map(choice));
        self.choices.sort_unstable();
        self.needed.clear();
        for (i, choice) in self.choices.iter().enumerate() {
            match self.needed.last_mut() {
                Some(last) if last.expert == choice.expert as usize => last.choices.end = i + 1,
                _ => self.needed.push(Needed {
                    expert: choice.expert as usize,
                    choices: i..i + 1,
                    hit: None,
                    taken: false,
                }),
            }
        }
    }
}

impl Moe {
    pub(crate) fn widths(blueprint: &MoeBlueprint, hidden: usize, has_post_norm: bool) -> Widths {
        let mut widths = [0; LANES];
        let uses = blueprint.uses();
        widths[LOGITS] = blueprint.experts.count;
        widths[IDS] = uses;
        widths[WEIGHTS] = uses;
        if let Some(shared) = &blueprint.shared {
            widths[SHARED_LOGIT] = 1;
            if blueprint.fused_shared().is_none() {
                widths[SHARED_GATE] = shared.mlp.gate_proj.shape.rows;
                widths[SHARED_UP] = shared.mlp.gate_proj.shape.rows;
            }
        }
        widths[PARTS] = uses * hidden;
        widths[INNER] = uses * blueprint.experts.shape.gate.rows;
        if blueprint.router.norm.is_some() || blueprint.experts_norm.is_some() {
            widths[OWN_INPUT] = hidden;
        }
        if has_post_norm || blueprint.experts_post_norm.is_some() {
            widths[SUM] = hidden;
        }
        widths
    }

    pub(crate) fn load(blueprint: &MoeBlueprint, loader: &mut Loader<'_>) -> Result<Self, Error> {
        let (shared_gate, shared) = match &blueprint.shared {
            None => (None, SharedExpert::None),
            Some(shared) => {
                let gate = shared.gate.as_ref().map(|g| loader.matrix(g)).transpose()?;
                let shared = match blueprint.fused_shared() {
                    Some(_) => SharedExpert::Joined,
                    None => SharedExpert::Apart {
                        mlp: Mlp::load(&shared.mlp, loader)?,
                        post_norm: loader.some(shared.post_norm.as_ref())?,
                    },
                };
                (gate, shared)
            }
        };
        let router = &blueprint.router;
        Ok(Self {
            n_experts: blueprint.experts.count,
            top_k: router.top_k,
            uses: blueprint.uses(),
            shape: blueprint.experts.shape,
            bytes: blueprint.experts.bytes as u64,
            activation: blueprint.activation,
            router_weight: loader.linear(&router.weight)?,
            router_norm: router
                .norm
                .as_ref()
                .map(|norm| loader.scaled(&norm.weight, norm.scale))
                .transpose()?,
            router: Router {
                scoring: router.scoring,
                correction: loader.some(router.correction.as_ref())?,
                groups: router.groups,
                normalize: router.normalize,
                scale: router.scale,
                expert_scale: loader.some(router.expert_scale.as_ref())?,
                shared: None,
            },
            experts_norm: loader.some(blueprint.experts_norm.as_ref())?,
            experts_post_norm: loader.some(blueprint.experts_post_norm.as_ref())?,
            shared_gate,
            shared,
        })
    }

    /// Reads `step.normed()`. Adds to `step.x()` if it may, or else returns where the sum of all experts is.
    ///
    /// Where all experts of the layer are in slots that the device looks up by itself, it is given work and not waited
    /// for. Else hits are pinned, misses go to the reader at once; the shared expert runs, then hits, then arrivals as they
    /// land. Each writes its own part, so the order in which they come changes nothing.
    pub(crate) fn run(&self, step: &mut Step<'_>, add: bool) -> Result<Option<View>, Error> {
        let weights = step.lane(WEIGHTS, self.uses);
        let logits = self.route(step)?;
        let parts = View::rows(step.lane(PARTS, 0).buffer, step.rows * self.uses, step.hidden);
        // Who watches wants to see the ids.
        let resident = match step.observer.is_some() || step.routing.recorder.is_some() {
            false => step.cache.resident(step.device, step.layer)?,
            true => None,
        };
        let shared = match resident {
            Some(table) => {
                // The choice, the experts and their sum come one after another: a device may join them.
                let shared = self.run_shared(step)?;
                let ids = self.choose(step, logits, weights)?;
                let input = self.own_input(step, self.experts_norm)?;
                self.run_resident(step, input, (ids, table), parts)?;
                shared
            }
            None => {
                let ids = self.choose(step, logits, weights)?;
                self.read_ids(step, ids)?;
                let input = self.own_input(step, self.experts_norm)?;
                self.run_streamed(step, input, parts)?
            }
        };
        if self.experts_post_norm.is_some() {
            let out = step.lane(SUM, step.hidden);
            step.run(&Op::Combine { parts, weights, shared: None, add: false, out })?;
            step.norm(out, self.experts_post_norm, step.eps)?;
            return match shared {
                Some(shared) => {
                    step.run(&Op::Add { x: shared.out, y: out })?;
                    Ok(Some(shared.out))
                }
                None => Ok(Some(out)),
            };
        }
        let out = if add { step.x() } else { step.lane(SUM, step.hidden) };
        step.run(&Op::Combine { parts, weights, shared, add, out })?;
        Ok((!add).then_some(out))
    }

    /// What the router or the routed experts read: the input of the layer, or the residual stream under a norm of
    /// their own.
    fn own_input(&self, step: &mut Step<'_>, norm: Option<Buffer>) -> Result<View, Error> {
        if norm.is_none() {
            return Ok(step.normed());
        }
        let (x, out, eps) = (step.x(), step.lane(OWN_INPUT, step.hidden), step.eps);
        step.run(&Op::RmsNorm { x, weight: norm, eps, out })?;
        Ok(out)
    }

    /// Computes the experts, which the device finds by the router's ids.
    fn run_resident(
        &self,
        step: &mut Step<'_>,
        x: View,
        (ids, table): (View, SlotTable),
        parts: View,
    ) -> Result<(), Error> {
        let uses = ExpertUses::Routed { ids, table };
        let distinct = (step.rows * self.top_k).min(self.n_experts) as u64;
        step.stats.experts_needed += distinct;
        step.stats.experts_hit += distinct;
        self.run_experts(step, x, uses, parts)
    }

    /// Computes the experts that `step.routing` names as they are there, and the shared one.
    fn run_streamed(
        &self,
        step: &mut Step<'_>,
        x: View,
        parts: View,
    ) -> Result<Option<Shared>, Error> {
        step.cache.settle_ahead(step.device, step.stats)?;
        self.pin_hits(step)?;
        let began = Instant::now();
        if step.rows <= PREFETCH_ROWS && step.routing.prefetcher.is_on() {
            let rate = step.cache.read_counters().bytes_per_second() / self.bytes as f64;
            step.routing.prefetcher.layer_begins(step.layer, began, rate as f32);
        }
        let mut reading = self.start_reads(step)?;
        let mut clock =
            Clock { began, independent: None, stalled: Duration::ZERO, reading: Duration::ZERO };
        let mut prefetch_issued = self.prefetch_next_layer(step)?;
        let shared = self.run_shared(step)?;
        loop {
            self.run_ready(step, x, parts)?;
            reading += self.start_reads(step)?;
            if !prefetch_issued {
                prefetch_issued = self.prefetch_next_layer(step)?;
            }
            // What has just been let go may have made room for some that need no read.
            if !step.routing.uses.is_empty() {
                continue;
            }
            if reading == 0 {
                break;
            }
            clock.independent.get_or_insert_with(|| began.elapsed());
            reading -= self.await_arrivals(step, &mut clock)?;
        }
        if step.routing.needed.iter().any(|n| !n.taken) {
            return Err(Error::Budget(format!(
                "layer {}: no slot is free for an expert",
                step.layer
            )));
        }
        clock.note(step.stats);
        if step.rows <= PREFETCH_ROWS {
            step.routing.prefetcher.layer_has_read(step.layer, began, clock.reading);
        }
        Ok(shared)
    }

    /// When all that this layer needs is in memory or on its way: gives up what was read ahead in vain, and begins to read
    /// what the next layer may need, behind all that this one waits for. Whether it is time for that.
    fn prefetch_next_layer(&self, step: &mut Step<'_>) -> Result<bool, Error> {
        if !step.routing.prefetcher.is_on() {
            return Ok(true);
        }
        if step.routing.needed.iter().any(|n| !n.taken) {
            return Ok(false);
        }
        step.cache.cancel_ahead();
        let Some((moe, norm)) = step.next.and_then(Layer::moe) else { return Ok(true) };
        let layer = step.layer + 1;
        if step.rows <= PREFETCH_ROWS {
            moe.guess(step, layer, norm)?;
        } else if step.rows * moe.top_k >= DENSE_ROUTING_FACTOR * moe.n_experts {
            for expert in 0..moe.n_experts {
                step.cache.prefetch(step.device, layer, expert, step.stats)?;
            }
        }
        Ok(true)
    }

    /// As the next layer: what would be chosen of the residual stream as it is, and reads for that.
    fn guess(&self, step: &mut Step<'_>, layer: usize, norm: Buffer) -> Result<(), Error> {
        let effort = step.routing.prefetcher.effort(layer);
        if effort == Effort::None {
            return Ok(());
        }
        let (x, k) = (step.x(), self.top_k);
        let widths = [step.hidden, self.n_experts, k, k];
        let [input, logits, ids, weights] = std::array::from_fn(|i| step.ahead(i, widths[i]));
        let weight = self.router_norm.or(Some(norm));
        step.run(&Op::RmsNorm { x, weight, eps: step.eps, out: input })?;
        step.exact_mat_mul(input, self.router_weight, logits)?;
        step.run(&Op::TopK { logits, router: self.router, ids, weights })?;
        let mut read = std::mem::take(&mut step.routing.read);
        read.resize(step.rows * k, 0.0);
        let found = step
            .device
            .read(ids, &mut read)
            .map_err(Error::at(|| format!("layer {layer}, router")));
        step.routing.prefetcher.begin(layer);
        // Those that come last in rank are chosen by little: they are the ones that will be others.
        let surest = k - k / 4;
        for expert in read.chunks(k).flat_map(|row| &row[..surest]).map(|id| *id as u32) {
            let Step { device, cache, routing, stats, .. } = step;
            let missing = found.is_ok() && !cache.has(layer, expert as usize);
            if missing && routing.prefetcher.guess(expert) && effort == Effort::Read {
                cache.prefetch(&mut **device, layer, expert as usize, stats)?;
            }
        }
        step.routing.read = read;
        found
    }

    /// The router's logits, and that of the shared expert's gate with them.
    fn route(&self, step: &mut Step<'_>) -> Result<View, Error> {
        let logits = step.lane(LOGITS, self.n_experts);
        let x = self.own_input(step, self.router_norm)?;
        step.exact_mat_mul(x, self.router_weight, logits)?;
        if let Some(weight) = self.shared_gate {
            let (x, logit) = (step.normed(), step.lane(SHARED_LOGIT, 1));
            step.exact_mat_mul(x, Linear { weight, bias: None }, logit)?;
        }
        Ok(logits)
    }

    /// Chooses experts; returns where their ids are.
    fn choose(&self, step: &mut Step<'_>, logits: View, weights: View) -> Result<View, Error> {
        let ids = step.lane(IDS, self.uses);
        let shared = match self.shared {
            SharedExpert::Joined => Some(SharedChoice { gate: self.gate_of_shared(step) }),
            SharedExpert::None | SharedExpert::Apart { .. } => None,
        };
        step.run(&Op::TopK { logits, router: Router { shared, ..self.router }, ids, weights })?;
        Ok(ids)
    }

    /// Waits for the ids and groups them in `step.routing`.
    fn read_ids(&self, step: &mut Step<'_>, ids: View) -> Result<(), Error> {
        let routing = &mut *step.routing;
        routing.waited = true;
        routing.read.resize(step.rows * self.top_k, 0.0);
        let layer = step.layer;
        let chosen = ids.columns(0, self.top_k);
        step.device
            .read(chosen, &mut routing.read)
            .map_err(Error::at(|| format!("layer {layer}, router")))?;
        routing.ids.clear();
        routing.ids.extend(routing.read.iter().map(|id| *id as u32));
        if let Some(observer) = &mut step.observer {
            observer.experts(layer, self.top_k, &routing.ids);
        }
        routing.group(self.top_k);
        let Routing { needed, prefetcher, recorder, .. } = routing;
        if let Some(recorder) = recorder {
            recorder.layer(needed.iter().map(|n| n.expert));
        }
        prefetcher
            .judge(layer, |id| needed.binary_search_by_key(&(id as usize), |n| n.expert).is_ok());
        step.stats.experts_needed += needed.len() as u64;
        Ok(())
    }

    /// Pins what is in slots, all of it before anything is read or copied that could push it out.
    fn pin_hits(&self, step: &mut Step<'_>) -> Result<(), Error> {
        let routing = &mut *step.routing;
        routing.uses.clear();
        routing.pinned.clear();
        if let Some(slot) = step.cache.shared(step.layer) {
            let of_row = |row| ExpertUse { slot, row, out_row: row * self.uses + self.top_k };
            routing.uses.extend((0..step.rows).map(of_row));
        }
        let mut missed = 0;
        for needed in &mut routing.needed {
            needed.hit = step.cache.pin(step.layer, needed.expert);
            missed += u64::from(needed.hit.is_none_or(|hit| hit.predicted));
        }
        step.stats.bytes_missed += missed * self.bytes;
        for i in 0..step.routing.needed.len() {
            if let Some(hit) = step.routing.needed[i].hit {
                match hit.predicted {
                    true => step.stats.experts_predicted += 1,
                    false => step.stats.experts_hit += 1,
                }
                if let Some(pin) = step.cache.promote(step.device, hit)? {
                    self.take(step, i, pin);
                }
            }
        }
        Ok(())
    }

    /// Notes the uses of a needed expert that is there.
    fn take(&self, step: &mut Step<'_>, needed: usize, pin: Pin) {
        let Routing { needed: all, choices, uses, pinned, .. } = &mut *step.routing;
        let needed = &mut all[needed];
        needed.taken = true;
        pinned.push(pin);
        uses.extend(choices[needed.choices.clone()].iter().map(|c| self.expert_use(c, pin.slot)));
    }

    fn expert_use(&self, choice: &Choice, slot: moeflux_compute::Slot) -> ExpertUse {
        let row = choice.row as usize;
        ExpertUse { slot, row, out_row: row * self.uses + choice.rank as usize }
    }

    /// Starts reads until all are under way or no slot is free; returns how many it started.
    fn start_reads(&self, step: &mut Step<'_>) -> Result<usize, Error> {
        let mut started = 0;
        for i in 0..step.routing.needed.len() {
            let Needed { expert, taken, .. } = step.routing.needed[i];
            if taken {
                continue;
            }
            match step.cache.request(step.device, step.layer, expert, step.stats)? {
                Lookup::Ready(pin) => self.take(step, i, pin),
                Lookup::Started => started += 1,
                Lookup::Full => break,
            }
            step.routing.needed[i].taken = true;
        }
        Ok(started)
    }

    /// Waits for one read and takes what else has arrived; returns how many.
    fn await_arrivals(&self, step: &mut Step<'_>, clock: &mut Clock) -> Result<usize, Error> {
        let since = Instant::now();
        let mut arrived = 0;
        while let Some((expert, pin)) = step.cache.arrive(step.device, arrived == 0, step.stats)? {
            if arrived == 0 {
                clock.waited(since);
            }
            arrived += 1;
            if let Ok(i) = step.routing.needed.binary_search_by_key(&expert, |n| n.expert) {
                self.take(step, i, pin);
            }
        }
        Ok(arrived)
    }

    /// Computes the experts that are there and lets their slots go.
    fn run_ready(&self, step: &mut Step<'_>, x: View, parts: View) -> Result<(), Error> {
        if step.routing.uses.is_empty() {
            return Ok(());
        }
        let mut uses = std::mem::take(&mut step.routing.uses);
        // Those of one bank together: a device computes them at once.
        uses.sort_unstable_by_key(|u| (u.slot, u.out_row));
        let ran = self.run_experts(step, x, ExpertUses::Listed(&uses), parts);
        step.routing.uses = uses;
        ran?;
        let layer = step.layer;
        let ticket =
            step.device.submit().map_err(Error::at(|| format!("layer {layer}, experts")))?;
        for pin in step.routing.pinned.drain(..) {
            step.cache.release(pin, ticket);
        }
        step.routing.uses.clear();
        Ok(())
    }

    fn run_experts(
        &self,
        step: &mut Step<'_>,
        x: View,
        uses: ExpertUses<'_>,
        parts: View,
    ) -> Result<(), Error> {
        let inner = View::rows(step.lane(INNER, 0).buffer, uses.len(), self.shape.gate.rows);
        step.run(&Op::Experts {
            x,
            shape: &self.shape,
            activation: self.activation,
            experts: self.n_experts + (self.uses - self.top_k),
            uses,
            inner,
            out: parts,
        })
    }

    /// Where the logit of the shared expert's gate is.
    fn gate_of_shared(&self, step: &Step<'_>) -> Option<View> {
        self.shared_gate.map(|_| step.lane(SHARED_LOGIT, 1))
    }

    /// Computes the shared expert, if that is not one more of the routed ones.
    fn run_shared(&self, step: &mut Step<'_>) -> Result<Option<Shared>, Error> {
        let SharedExpert::Apart { mlp, post_norm } = &self.shared else { return Ok(None) };
        let out = step.mixed();
        mlp.run(step, [SHARED_GATE, SHARED_UP], out)?;
        if post_norm.is_some() {
            step.norm(out, *post_norm, step.eps)?;
        }
        Ok(Some(Shared { out, gate: self.gate_of_shared(step) }))
    }
}
