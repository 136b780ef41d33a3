//! Expert probe: times of experts on either side of the bus, measured on slots when a model is
//! opened. With [`ExpertsOnHost::Auto`](crate::experts::ExpertsOnHost::Auto) they divide the
//! experts in host memory between card and processor.

use std::time::Instant;

use moeflux_base::Error;
use moeflux_compute::{BankPlace, Buffer, Device, ExpertUse, ExpertUses, Op, Slot, View, ViewRead};
use moeflux_model::blueprint::{Blueprint, MoeBlueprint};

use super::host_experts::{HostExperts, HostExpertsOp};
use crate::{
    experts::{
        cache::ExpertCache,
        division::{ExpertTime, ExpertTimes},
    },
    runtime::plan::MemoryPlan,
};

/// Bytes of slots that each measurement reads, at most. More than the caches of most processors
/// hold.
const BYTES: usize = 256 << 20;

/// Maximum ops of a measurement.
const MAX_OPS: usize = 64;

/// Small ops in a row for the time of one.
const SMALL_OPS: usize = 32;

/// Small ops that stand for a layer's ops between two reads of router ids.
const LAYER_OPS: usize = 10;

/// Layers in a row for the time of one whose experts the host computes.
const LAYERS: usize = 16;

/// Measurements of which the median counts, after an untimed one that compiles kernels.
const ROUNDS: usize = 5;

/// Slots for the probe, of the size of one layer's experts. Their contents are lost.
pub(crate) struct ProbeSlots {
    pub(crate) layer: usize,
    pub(crate) host: Vec<Slot>,
    /// Empty if the card has none.
    pub(crate) card: Vec<Slot>,
}

impl ProbeSlots {
    /// Number of slots of `bytes` bytes.
    pub(crate) fn count(bytes: usize) -> usize {
        BYTES.div_ceil(bytes.max(1))
    }

    /// Empty slots of a cache, of its first layer with experts.
    pub(crate) fn of_cache(cache: &ExpertCache, blueprint: &Blueprint) -> Self {
        let first = blueprint.moe_layers().next();
        let (layer, bytes) = first.map_or((0, 0), |(layer, moe)| (layer, moe.experts.slot_bytes));
        let [host, card] = cache.empty_slots(layer, Self::count(bytes));
        Self { layer, host, card }
    }

    /// Slots in new banks.
    pub(crate) fn allocate(
        device: &mut dyn Device,
        layer: usize,
        bytes: usize,
    ) -> Result<Self, Error> {
        let count = Self::count(bytes).min(device.bank_slots(bytes));
        let mut bank = |place| device.bank(count, bytes, place).map_err(Error::at(context));
        let slots = |bank| (0..count as u32).map(|index| Slot { bank, index }).collect();
        let (host, card) = (slots(bank(BankPlace::Host)?), slots(bank(BankPlace::Card)?));
        Ok(Self { layer, host, card })
    }
}

fn context() -> &'static str {
    "measuring the speeds of the card and the processor"
}

/// Measures the times of a layer's experts, with one row, on a card that reads host memory and on
/// the host.
pub(crate) fn measure(
    card: &mut dyn Device,
    host: &mut HostExperts,
    slots: &ProbeSlots,
    blueprint: &Blueprint,
) -> Result<ExpertTimes, Error> {
    let moe = blueprint.layers.get(slots.layer).and_then(|layer| layer.moe());
    let Some(moe) = moe.filter(|_| !slots.host.is_empty()) else {
        return Err(Error::internal("there are no slots to measure"));
    };
    let hidden = moe.experts.shape.up.cols;
    let most = moe.router.top_k;
    card.enter_layer(slots.layer, None).map_err(Error::at(context))?;
    let measured = (|| {
        for slot in &slots.host {
            // The system commits memory at the first write.
            let mut bytes = card.take_slot(*slot)?;
            bytes.fill(0);
            card.put_slot(*slot, bytes)?;
        }
        let (x, out) = (card.buffer(hidden)?, card.buffer(most * hidden)?);
        let inner = card.buffer(most * moe.experts.shape.up.rows)?;
        let mut probe = SpeedProbe { card, moe, hidden, x, out, inner, latency: 0.0 };
        probe.card.write(probe.x, &vec![1.0; hidden])?;
        let few = probe.seconds_of_small_ops(1)?;
        let many = probe.seconds_of_small_ops(1 + SMALL_OPS)?;
        let op = ((many - few) / SMALL_OPS as f64).max(0.0);
        probe.latency = (few - op).max(0.0);
        let of_layers = probe.seconds_of_small_ops(LAYERS * LAYER_OPS)?;
        let of_layer = (of_layers - probe.latency).max(0.0) / LAYERS as f64;
        let on_host = probe.time_on_host(host, &slots.host)?;
        let times = ExpertTimes {
            bytes: moe.experts.slot_bytes as u64,
            card: probe.time_on_card(&slots.card)?,
            bus: probe.time_on_card(&slots.host)?,
            host: ExpertTime { fixed: 0.0, ..on_host },
            wait: (on_host.fixed - of_layer).max(0.0),
            op,
            contention: 1.0,
        };
        let contention = probe.contention(host, &slots.host, &times, on_host.fixed)?;
        Ok(ExpertTimes { contention, ..times })
    })();
    measured.map_err(Error::at(context))
}

impl MemoryPlan {
    /// Measures the times of experts on new slots. `None` if the plan leaves no expert to the host,
    /// or the card cannot read host memory and so leaves all of them.
    pub(crate) fn measure_experts(
        &self,
        device: &mut dyn Device,
        blueprint: &Blueprint,
        threads: Option<usize>,
    ) -> Result<Option<ExpertTimes>, Error> {
        let Some((layer, _)) = blueprint.moe_layers().next().filter(|_| self.divides_experts())
        else {
            return Ok(None);
        };
        let Some(mut host) = HostExperts::open(self, blueprint, threads)? else { return Ok(None) };
        device
            .split_layers(self.card_of_layer())
            .and_then(|()| device.enter_layer(layer, None))
            .map_err(Error::at(context))?;
        let slots =
            ProbeSlots::allocate(device, layer, self.slot_classes().bytes_for(layer) as usize)?;
        measure(device, &mut host, &slots, blueprint).map(Some)
    }
}

struct SpeedProbe<'a> {
    card: &'a mut dyn Device,
    moe: &'a MoeBlueprint,
    hidden: usize,
    x: Buffer,
    out: Buffer,
    inner: Buffer,
    /// Seconds of a wait for the card, once for each measurement.
    latency: f64,
}

type Computed<T> = Result<T, moeflux_compute::Error>;

impl SpeedProbe<'_> {
    /// Median seconds of calls that submit work, until the card has done it.
    fn seconds(&mut self, mut submit: impl FnMut(&mut Self) -> Computed<()>) -> Computed<f64> {
        let (x, out) = (View::rows(self.x, 1, 1), View::rows(self.out, 1, self.hidden));
        let mut row = vec![0.0; self.hidden];
        let mut seconds = Vec::with_capacity(ROUNDS + 1);
        for _ in 0..=ROUNDS {
            let since = Instant::now();
            submit(self)?;
            self.card.read_views(&mut [
                ViewRead { view: x, out: &mut [0.0] },
                ViewRead { view: out, out: &mut row },
            ])?;
            seconds.push(since.elapsed().as_secs_f64());
        }
        let timed = &mut seconds[1..];
        timed.sort_by(f64::total_cmp);
        Ok(timed[ROUNDS / 2])
    }

    fn seconds_of_small_ops(&mut self, count: usize) -> Computed<f64> {
        self.seconds(|probe| probe.run_small_ops(count))
    }

    fn run_small_ops(&mut self, count: usize) -> Computed<()> {
        let x = View::rows(self.x, 1, self.hidden);
        let op = Op::RmsNorm { x, weight: None, per_head: false, eps: 1e-6, out: x };
        (0..count).try_for_each(|_| self.card.run(&op))
    }

    /// The numbers of experts whose times give the time of one: one, and as many as a row has.
    fn counts(&self, slots: &[Slot]) -> Option<[usize; 2]> {
        let many = self.moe.router.top_k.min(slots.len());
        (many > 0).then_some([1, many])
    }

    /// Time of one op with experts in `slots` on the card.
    fn time_on_card(&mut self, slots: &[Slot]) -> Computed<ExpertTime> {
        let Some(counts) = self.counts(slots) else { return Ok(ExpertTime::default()) };
        let mut seconds = |count: usize| {
            let uses = uses_of(slots, count, MAX_OPS);
            let total =
                self.seconds(|probe| uses.iter().try_for_each(|uses| probe.run_on_card(uses)))?;
            Ok((count, (total - self.latency).max(0.0) / uses.len() as f64))
        };
        Ok(ExpertTime::through(seconds(counts[0])?, seconds(counts[1])?))
    }

    /// Time of a layer whose experts are in `slots` and computed by the host: small ops, ids and
    /// inputs read back, experts, and their results on the card.
    fn time_on_host(&mut self, host: &mut HostExperts, slots: &[Slot]) -> Computed<ExpertTime> {
        let Some(counts) = self.counts(slots) else { return Ok(ExpertTime::default()) };
        let mut seconds = |count: usize| {
            let uses = uses_of(slots, count, LAYERS);
            let layers = uses.len() as f64;
            let total = self.seconds(|probe| {
                uses.iter().try_for_each(|uses| probe.run_layer_on_host(host, uses, &[]))?;
                host.finish(probe.card)
            })?;
            Ok((count, (total - self.latency).max(0.0) / layers))
        };
        Ok(ExpertTime::through(seconds(counts[0])?, seconds(counts[1])?))
    }

    /// Factor by which layers take longer than the longer of both sides, where the card reads some
    /// of a row's experts while the host computes the others, in numbers that take either as long.
    /// `fixed`: seconds of a layer besides its experts.
    fn contention(
        &mut self,
        host: &mut HostExperts,
        slots: &[Slot],
        times: &ExpertTimes,
        fixed: f64,
    ) -> Computed<f64> {
        let Some([_, count]) = self.counts(slots).filter(|[_, count]| *count > 1) else {
            return Ok(1.0);
        };
        let (read, computed) = (times.bus.each, times.host.each);
        let share = count as f64 * read / (read + computed).max(f64::MIN_POSITIVE);
        let computed = (share.round() as usize).clamp(1, count - 1);
        let uses = uses_of(slots, count, LAYERS);
        let total = self.seconds(|probe| {
            for uses in &uses {
                let (on_host, on_card) = uses.split_at(computed);
                probe.run_layer_on_host(host, on_host, on_card)?;
            }
            host.finish(probe.card)
        })?;
        let of_layer = (total - self.latency) / uses.len() as f64 - fixed;
        let longer = times.bus.of(count - computed).max(times.host.of(computed));
        Ok((of_layer / longer.max(f64::MIN_POSITIVE)).max(1.0))
    }

    fn run_on_card(&mut self, uses: &[ExpertUse]) -> Computed<()> {
        let shape = &self.moe.experts.shape;
        self.card.run(&Op::Experts {
            x: View::rows(self.x, 1, self.hidden),
            shape,
            activation: self.moe.activation,
            experts: self.moe.experts.count,
            answers: 1,
            uses: ExpertUses::Listed(uses),
            inner: View::rows(self.inner, uses.len(), shape.up.rows),
            out: self.parts(),
        })
    }

    /// Results of all experts of a row.
    fn parts(&self) -> View {
        View::rows(self.out, self.moe.router.top_k, self.hidden)
    }

    fn run_layer_on_host(
        &mut self,
        host: &mut HostExperts,
        on_host: &[ExpertUse],
        on_card: &[ExpertUse],
    ) -> Computed<()> {
        self.run_small_ops(LAYER_OPS)?;
        let ids = View::rows(self.out, 1, self.moe.router.top_k.min(self.hidden));
        let input = View::rows(self.x, 1, self.hidden);
        self.card.read_views(&mut [
            ViewRead { view: ids, out: &mut vec![0.0; ids.width] },
            ViewRead { view: input, out: host.input(self.hidden) },
        ])?;
        host.finish(self.card)?;
        let op = HostExpertsOp {
            uses: on_host,
            input_rows: 1,
            answers: 1,
            shape: &self.moe.experts.shape,
            activation: self.moe.activation,
            experts: self.moe.experts.count,
            parts: self.parts(),
        };
        host.start(self.card, &op, [])?;
        if !on_card.is_empty() {
            self.run_on_card(on_card)?;
        }
        self.card.submit()?;
        host.announce_results(self.card)
    }
}

/// Uses of `count` experts in different slots by one row, for at most `ops` ops.
fn uses_of(slots: &[Slot], count: usize, ops: usize) -> Vec<Vec<ExpertUse>> {
    let of_op = |slots: &[Slot]| {
        let uses = slots.iter().enumerate();
        uses.map(|(out_row, slot)| ExpertUse { slot: *slot, row: 0, out_row }).collect()
    };
    slots.chunks_exact(count).take(ops).map(of_op).collect()
}
