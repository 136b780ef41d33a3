//! Experts computed by the host's processor while a card computes the others.
//!
//! The processor is a second device, on a thread. It borrows the memory of the card's host slots
//! for each op, so that experts are in memory once.
//!
//! Where the card hands work over within a recorded step, the processor's thread serves the whole
//! step (`served_step.rs`), while the next one is recorded. Otherwise a layer starts the thread as
//! soon as the router's ids are read; the card waits for its results when the next ids are read, so
//! the work up to there is recorded meanwhile.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use moeflux_base::{Error, seam::physical_cores};
use moeflux_compute::{
    Activation, BankPlace, Bytes, Device, DeviceOptions, ExpertShape, ExpertUse, HandOverShape,
    ScratchShape, Slot, Ticket, View,
};
use moeflux_model::blueprint::Blueprint;

use crate::{
    experts::{
        cache::{ExpertCache, Pin},
        placement::{ExpertsOnHost, Placement},
        stats::Stats,
    },
    runtime::{
        host_processor::{HostLayer, HostProcessor, ProcessorSizes},
        host_thread::{HostThread, IDLE_SPIN},
        plan::MemoryPlan,
        served_step::{HandOverServer, ServeFailure, Served, ServedLayer, ServedStep},
    },
};

/// Sizes of the processor's buffers, and of the values that go to the card and back.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostExpertsShape {
    /// Maximum uses of experts in a layer.
    uses: usize,
    /// Maximum values of the inputs of a layer's experts.
    input: usize,
    /// Maximum width of an expert's inputs and outputs.
    hidden: usize,
    /// Maximum width of an expert's intermediate activations.
    inner: usize,
}

impl HostExpertsShape {
    /// Shape for steps of up to `rows` rows.
    pub(crate) fn new(blueprint: &Blueprint, rows: usize) -> Self {
        let mut shape = Self::default();
        for (_, moe) in blueprint.moe_layers() {
            let hidden = moe.experts.shape.up.cols;
            let uses = rows * moe.uses();
            let is_ordered = moe.experts.hidden_orders().is_some();
            let input_rows = if is_ordered { uses } else { rows };
            shape.uses = shape.uses.max(uses);
            shape.input = shape.input.max(input_rows * hidden);
            shape.hidden = shape.hidden.max(hidden);
            shape.inner = shape.inner.max(moe.experts.shape.up.rows);
        }
        shape
    }

    /// Scratch of the processor's ops.
    pub(crate) fn scratch(&self) -> ScratchShape {
        ScratchShape {
            // Inputs of second matrices are quantized twice.
            rows: 2 * self.uses,
            cols: self.hidden.max(self.inner),
            ..ScratchShape::default()
        }
    }

    /// Sizes of hand-overs.
    pub(crate) fn hand_over(&self) -> HandOverShape {
        let &Self { uses, input, hidden, .. } = self;
        HandOverShape { ids: uses, input, results: uses * hidden }
    }

    /// Bytes of buffers and lists.
    pub(crate) fn bytes(&self) -> u64 {
        let values = 3 * self.input + self.uses * (2 * self.hidden + self.inner);
        let lists = self.uses * (size_of::<ExpertUse>() + size_of::<Loan>());
        (values * size_of::<f32>() + lists) as u64
            + self.hand_over().bytes()
            + HandOverServer::bytes(self.uses)
    }
}

/// Slots of one size in which borrowed memory is put.
struct BorrowedSlots {
    bytes: u64,
    slots: Vec<Slot>,
}

/// An expert's memory, borrowed from a card's host slot.
struct Loan {
    from: Slot,
    to: Slot,
    /// `None` while the processor's slot has it.
    bytes: Option<Bytes>,
}

/// Experts of a layer for the host to compute.
pub(crate) struct HostExpertsOp<'a> {
    /// Uses of the card's host slots, those of a slot together. Output rows are those of `parts`.
    pub(crate) uses: &'a [ExpertUse],
    /// Rows of the inputs, which were read to [`HostExperts::input`].
    pub(crate) input_rows: usize,
    /// Leading ones that belong to answers.
    pub(crate) answers: usize,
    pub(crate) shape: &'a ExpertShape,
    pub(crate) activation: Activation,
    /// Number of experts of the layer.
    pub(crate) experts: usize,
    /// Results of all experts on the card, `(rows * k, hidden)`.
    pub(crate) parts: View,
}

type Outcome = Result<(), moeflux_compute::Error>;

/// Work of the thread.
enum HostWork {
    None,
    Layer(HostLayer),
    Step(ServedStep),
}

/// The processor, and the experts that it computes.
struct HostJob {
    processor: HostProcessor,
    work: HostWork,
    loans: Vec<Loan>,
    /// Values of the current layer's results.
    results_len: usize,
    /// Outcome of the current layer, once it is computed.
    outcome: Option<Outcome>,
    /// Serves hand-overs, if the card hands work over.
    server: Option<HandOverServer>,
    /// Outcome of the current step.
    served: Option<Served>,
}

impl HostJob {
    fn run(&mut self) {
        match std::mem::replace(&mut self.work, HostWork::None) {
            HostWork::None => {}
            HostWork::Layer(layer) => self.compute(&layer),
            HostWork::Step(step) => {
                let Self { server, processor, .. } = self;
                self.served = server.as_mut().map(|server| server.serve(&step, processor));
            }
        }
    }

    fn compute(&mut self, layer: &HostLayer) {
        let device = &mut self.processor.device;
        let lent = self.loans.iter_mut().try_for_each(|loan| match loan.bytes.take() {
            Some(bytes) => device.put_slot(loan.to, bytes),
            None => Ok(()),
        });
        let computed = lent.and_then(|()| self.processor.compute(layer));
        // The memory goes back also after an error.
        for loan in &mut self.loans {
            loan.bytes = self.processor.device.take_slot(loan.to).ok();
        }
        self.outcome = Some(computed);
    }

    /// Returns the borrowed memory to the card's slots, and the outcome.
    fn give_back(&mut self, card: &mut dyn Device) -> Outcome {
        let mut given = Ok(());
        for loan in self.loans.drain(..) {
            let Some(bytes) = loan.bytes else { continue };
            let put = card.put_slot(loan.from, bytes);
            given = given.and(put);
        }
        self.outcome.take().unwrap_or(Ok(())).and(given)
    }
}

/// The host's processor as a second device for experts.
pub(crate) struct HostExperts {
    thread: HostThread<HostJob>,
    placement: Arc<Placement>,
    borrowed: Vec<BorrowedSlots>,
    /// Inputs of the next layer's experts.
    input: Vec<f32>,
    /// Whether these inputs were read since experts were started last.
    input_is_new: bool,
    /// Views of the card that receive the results of the layer that is computed.
    result_views: Vec<View>,
    /// Pins of the experts that are computed.
    pins: Vec<Pin>,
    is_running: bool,
    shape: HostExpertsShape,
    /// Whether the card hands work over within recorded steps.
    card_hands_over: bool,
    /// Whether the thread serves a step whose outcome was not taken yet.
    is_serving: bool,
}

impl HostExperts {
    /// Opens the processor with `threads` threads, if a plan leaves experts to it. The default
    /// leaves one of the physical cores to the thread that records the card's work.
    pub(crate) fn open(
        plan: &MemoryPlan,
        blueprint: &Blueprint,
        threads: Option<usize>,
    ) -> Result<Option<Self>, Error> {
        let Some(placement) = plan.placement() else { return Ok(None) };
        if plan.experts_on_host() == ExpertsOnHost::Read {
            return Ok(None);
        }
        let threads = threads.unwrap_or_else(|| (physical_cores() - 1).max(1));
        let cpu =
            DeviceOptions::default().threads(threads).fine_expert_inputs(true).idle_spin(IDLE_SPIN);
        let cpu = moeflux_compute::open(&cpu).map_err(Error::at(|| "opening the processor"))?;
        Self::new(cpu, placement, blueprint, plan).map(Some)
    }

    /// Opens the processor with a card that hands work over, if it can and holds all experts
    /// together with the host.
    pub(crate) fn with(
        card: &mut dyn Device,
        plan: &MemoryPlan,
        blueprint: &Blueprint,
        threads: Option<usize>,
    ) -> Result<Option<Self>, Error> {
        let mut host = Self::open(plan, blueprint, threads)?;
        if let Some(host) = host.as_mut().filter(|_| plan.holds_all) {
            host.prepare_hand_overs(card)?;
        }
        Ok(host)
    }

    /// Allocates buffers and scratch on the processor.
    fn new(
        mut device: Box<dyn Device>,
        placement: &Placement,
        blueprint: &Blueprint,
        plan: &MemoryPlan,
    ) -> Result<Self, Error> {
        let context = || "memory for experts that the host computes";
        let max_rows = Placement::max_rows(placement.card_reads(), plan.chunk);
        let shape = HostExpertsShape::new(blueprint, max_rows);
        let &HostExpertsShape { uses, input, hidden, inner, .. } = &shape;
        device.reserve_scratch(shape.scratch()).map_err(Error::at(context))?;
        let mut borrowed: Vec<BorrowedSlots> = Vec::new();
        for class in plan.slot_classes().iter().filter(|class| class.experts > 0) {
            // Cards have classes of the same size.
            if borrowed.iter().any(|slots| slots.bytes == class.bytes) {
                continue;
            }
            let same = plan.slot_classes().iter().filter(|other| other.bytes == class.bytes);
            let count = uses.min(same.map(|class| class.experts).max().unwrap_or(0));
            let bank = device.bank(count, class.bytes as usize, BankPlace::Host);
            let bank = bank.map_err(Error::at(context))?;
            let slots: Vec<_> = (0..count as u32).map(|index| Slot { bank, index }).collect();
            // The slots stay empty but for loans.
            slots
                .iter()
                .try_for_each(|slot| device.take_slot(*slot).map(drop))
                .map_err(Error::at(context))?;
            borrowed.push(BorrowedSlots { bytes: class.bytes, slots });
        }
        let sizes = ProcessorSizes { uses, input, inner: uses * inner, out: uses * hidden };
        let processor = HostProcessor::new(device, sizes).map_err(Error::at(context))?;
        let job = HostJob {
            processor,
            work: HostWork::None,
            loans: Vec::with_capacity(uses),
            results_len: 0,
            outcome: None,
            server: None,
            served: None,
        };
        Ok(Self {
            thread: HostThread::new(job, HostJob::run)?,
            placement: Arc::new(placement.clone()),
            borrowed,
            input: vec![0.0; input],
            input_is_new: false,
            result_views: Vec::with_capacity(uses),
            pins: Vec::with_capacity(uses),
            is_running: false,
            shape,
            card_hands_over: false,
            is_serving: false,
        })
    }

    /// Has the card hand work over within recorded steps, if it can.
    fn prepare_hand_overs(&mut self, card: &mut dyn Device) -> Result<(), Error> {
        let reserved = card.reserve_hand_overs(self.shape.hand_over());
        let port = reserved.map_err(Error::at(|| "memory for experts that the host computes"))?;
        self.card_hands_over = port.is_some();
        self.thread.finish().server = port.map(|port| HandOverServer::new(port, self.shape.uses));
        Ok(())
    }

    /// Whether the card hands work over in a step of `rows` rows.
    pub(crate) fn hands_over(&self, rows: usize) -> bool {
        self.card_hands_over && self.computes(rows)
    }

    /// Has the card lend the memory of all experts of `layers` that the host computes.
    pub(crate) fn borrow_all(
        &mut self,
        card: &mut dyn Device,
        cache: &ExpertCache,
        layers: &[ServedLayer],
    ) -> Outcome {
        let mut job = self.thread.finish();
        let HostJob { server: Some(server), processor, .. } = &mut *job else { return Ok(()) };
        let (lent, processor) = (&mut server.lent, &mut *processor.device);
        if !lent.is_empty() {
            return Ok(());
        }
        let placement = Arc::clone(&self.placement);
        let experts = layers.iter().flat_map(|layer| {
            placement.computed_in(layer.layer).map(|expert| (layer.layer, expert))
        });
        let mut all = experts.map(|(layer, expert)| {
            let lost = || {
                moeflux_compute::Error::Device(format!(
                    "layer {layer}: expert {expert} is not in host memory"
                ))
            };
            let from = cache.host_slot(layer, expert).ok_or_else(lost)?;
            lent.lend(card, processor, (layer, expert), from)
        });
        let borrowed = all.try_for_each(|lent| lent);
        borrowed.or_else(|error| lent.recall(card, processor).and(Err(error)))
    }

    /// Returns the memory of all experts to the card.
    pub(crate) fn return_all(&mut self, card: &mut dyn Device) -> Result<(), Error> {
        let mut job = self.thread.finish();
        let HostJob { server: Some(server), processor, .. } = &mut *job else { return Ok(()) };
        let returned = server.lent.recall(card, &mut *processor.device);
        returned.map_err(Error::at(|| "experts on the host"))
    }

    /// Starts to serve the hand-overs of a step that is submitted next.
    pub(crate) fn start_serving(&mut self, step: ServedStep) {
        let mut job = self.thread.finish();
        job.served = None;
        job.work = HostWork::Step(step);
        job.server.iter_mut().for_each(HandOverServer::begin);
        drop(job);
        self.is_serving = true;
        self.thread.start();
    }

    /// Waits until the step has been served, if there is one.
    pub(crate) fn finish_serving(&mut self) -> Result<Stats, Error> {
        if !std::mem::take(&mut self.is_serving) {
            return Ok(Stats::default());
        }
        let served = self.thread.finish().served.take().unwrap_or(Ok(Stats::default()));
        served.map_err(|ServeFailure { layer, source }| {
            Error::at(|| format!("layer {layer}, experts on the host"))(source)
        })
    }

    /// Replaces the division of experts between card and host; the card keeps those it has.
    pub(crate) fn set_placement(
        &mut self,
        card: &mut dyn Device,
        placement: Option<&Placement>,
    ) -> Result<(), Error> {
        self.return_all(card)?;
        placement.inspect(|placement| self.placement = Arc::new((*placement).clone()));
        Ok(())
    }

    /// Places of experts.
    pub(crate) fn placement(&self) -> &Arc<Placement> {
        &self.placement
    }

    /// Whether the host computes experts of any layer in a step of `rows` rows.
    pub(crate) fn computes(&self, rows: usize) -> bool {
        self.placement.computes(rows)
    }

    /// Receives the inputs of a layer's experts.
    pub(crate) fn input(&mut self, len: usize) -> &mut [f32] {
        let len = len.min(self.input.len());
        self.input_is_new = true;
        &mut self.input[..len]
    }

    /// Whether experts were started that were not collected yet.
    pub(crate) fn is_running(&self) -> bool {
        self.is_running
    }

    /// Starts to compute experts, after the previous ones. [`HostExperts::announce_results`]
    /// follows.
    pub(crate) fn start(
        &mut self,
        card: &mut dyn Device,
        op: &HostExpertsOp<'_>,
        pins: impl IntoIterator<Item = Pin>,
    ) -> Outcome {
        debug_assert!(!self.is_running, "experts of another layer are being computed");
        let &HostExpertsOp { uses, input_rows, answers, shape, activation, experts, parts } = op;
        let mut job = self.thread.finish();
        self.is_running = true;
        self.pins.extend(pins);
        // Experts of a layer that arrive later have the same inputs.
        if std::mem::take(&mut self.input_is_new) {
            std::mem::swap(&mut job.processor.input, &mut self.input);
        }
        job.work =
            HostWork::Layer(HostLayer { input_rows, answers, shape: *shape, activation, experts });
        job.results_len = uses.len() * shape.down.rows;
        job.processor.uses.clear();
        for run in uses.chunk_by(|a, b| a.slot == b.slot) {
            let from = run[0].slot;
            let bytes = card.take_slot(from)?;
            let size = bytes.len() as u64;
            let same_size = self.borrowed.iter().find(|slots| slots.bytes == size);
            let place = same_size.and_then(|slots| slots.slots.get(job.loans.len()));
            let Some(&to) = place else {
                card.put_slot(from, bytes)?;
                return Err(moeflux_compute::Error::Device(format!(
                    "the host has no place for an expert of {size} bytes"
                )));
            };
            job.loans.push(Loan { from, to, bytes: Some(bytes) });
            let first = job.processor.uses.len();
            let borrowed =
                (first..).zip(run).map(|(out_row, used)| ExpertUse { slot: to, out_row, ..*used });
            job.processor.uses.extend(borrowed);
        }
        drop(job);
        // Results are in the order of the uses; those of consecutive rows are written together.
        self.result_views.clear();
        let runs = uses.chunk_by(|a, b| a.out_row + 1 == b.out_row);
        self.result_views.extend(runs.map(|run| parts.slice(run[0].out_row, run.len())));
        self.thread.start();
        Ok(())
    }

    /// Lets the card's later ops read the results.
    pub(crate) fn announce_results(&mut self, card: &mut dyn Device) -> Outcome {
        let shared = Arc::clone(self.thread.shared());
        let values = move |write: &mut dyn FnMut(&[f32])| {
            shared.wait();
            let job = shared.lock();
            // An error is reported when the experts are collected.
            if let Some(Ok(())) = job.outcome {
                write(&job.processor.results[..job.results_len]);
            }
        };
        card.write_late(&self.result_views, Box::new(values))
    }

    /// Waits for the experts that were started, and returns their memory to the card's slots.
    pub(crate) fn collect(&mut self, card: &mut dyn Device, cache: &mut ExpertCache) -> Outcome {
        if !self.is_running {
            return Ok(());
        }
        let computed = self.finish(card);
        // The card does not use these slots.
        self.pins.drain(..).for_each(|pin| cache.release(pin, Ticket(0)));
        computed
    }

    /// Waits for the experts that were started, and returns their memory to the card's slots. The
    /// caller releases the pins.
    pub(crate) fn finish(&mut self, card: &mut dyn Device) -> Outcome {
        if !self.is_running {
            return Ok(());
        }
        // Writes the results, before those of other experts replace them.
        let submitted = card.submit().map(drop);
        let computed = self.thread.finish().give_back(card);
        self.is_running = false;
        computed.and(submitted)
    }

    /// Does the same as [`HostExperts::finish`] after a failure, which has been reported. Pins are
    /// forgotten.
    pub(crate) fn abandon(&mut self, card: &mut dyn Device) {
        self.pins.clear();
        // A panic of the thread has been passed on, or is worth less than the failure.
        let _ = catch_unwind(AssertUnwindSafe(|| {
            let _ = self.finish(card);
        }));
        let _ = catch_unwind(AssertUnwindSafe(|| self.finish_serving().map(drop)));
    }
}
