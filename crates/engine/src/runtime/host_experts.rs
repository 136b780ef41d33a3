//! Experts computed by the host's processor while a card computes the others.
//!
//! The processor is a second device. It borrows the memory of the card's host slots for each op, so
//! that experts are in memory once.

use moeflux_compute::{
    Activation, BankPlace, Buffer, Device, DeviceOptions, ExpertShape, ExpertUse, ExpertUses, Op,
    ScratchShape, Slot, View,
};

use crate::{
    base::{error::Error, system::physical_cores},
    experts::placement::Placement,
    model::blueprint::Blueprint,
    runtime::plan::MemoryPlan,
};

/// Sizes of the processor's buffers, and of the values that go to the card and back.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HostExpertsShape {
    /// Maximum uses of experts in a layer.
    uses: usize,
    /// Maximum values of the inputs of a layer's experts.
    input: usize,
    hidden: usize,
    /// Maximum width of an expert's intermediate activations.
    inner: usize,
}

impl HostExpertsShape {
    /// Shape for steps of up to `rows` rows.
    pub(crate) fn new(blueprint: &Blueprint, rows: usize) -> Self {
        let mut shape = Self { hidden: blueprint.hidden, ..Self::default() };
        for (_, moe) in blueprint.moe_layers() {
            let uses = rows * moe.uses();
            let is_ordered = moe.experts.hidden_orders().is_some();
            let input_rows = if is_ordered { uses } else { rows };
            shape.uses = shape.uses.max(uses);
            shape.input = shape.input.max(input_rows * blueprint.hidden);
            shape.inner = shape.inner.max(moe.experts.shape.gate.rows);
        }
        shape
    }

    /// Scratch of the processor's ops.
    pub(crate) fn scratch(&self) -> ScratchShape {
        ScratchShape {
            rows: self.uses,
            cols: self.hidden.max(self.inner),
            ..ScratchShape::default()
        }
    }

    /// Bytes of buffers and lists.
    pub(crate) fn bytes(&self) -> u64 {
        let values = 2 * self.input + self.uses * (2 * self.hidden + self.inner);
        let lists = self.uses * (size_of::<ExpertUse>() + size_of::<Loan>());
        (values * size_of::<f32>() + lists) as u64
    }
}

/// Slots of one size in which borrowed memory is put.
struct BorrowedSlots {
    bytes: u64,
    slots: Vec<Slot>,
}

/// An expert's memory, borrowed from a card's host slot.
#[derive(Clone, Copy)]
struct Loan {
    from: Slot,
    to: Slot,
}

/// Experts of a layer for the host to compute.
pub(crate) struct HostExpertsOp<'a> {
    /// Uses of the card's host slots, those of a slot together. Output rows are those of `parts`.
    pub(crate) uses: &'a [ExpertUse],
    /// Rows of the inputs, which were read to [`HostExperts::input`].
    pub(crate) input_rows: usize,
    pub(crate) shape: &'a ExpertShape,
    pub(crate) activation: Activation,
    /// Number of experts of the layer.
    pub(crate) experts: usize,
    /// Results of all experts on the card, `(rows * k, hidden)`.
    pub(crate) parts: View,
}

/// The host's processor as a second device for experts.
pub(crate) struct HostExperts {
    device: Box<dyn Device>,
    placement: Placement,
    hidden: usize,
    x: Buffer,
    inner: Buffer,
    out: Buffer,
    borrowed: Vec<BorrowedSlots>,
    loans: Vec<Loan>,
    /// Uses of borrowed slots.
    uses: Vec<ExpertUse>,
    /// Inputs of the current layer's experts.
    input: Vec<f32>,
    results: Vec<f32>,
}

impl HostExperts {
    /// Opens the processor with `threads` threads, by default one per physical core, if a plan
    /// leaves experts to it.
    pub(crate) fn open(
        plan: &MemoryPlan,
        blueprint: &Blueprint,
        threads: Option<usize>,
    ) -> Result<Option<Self>, Error> {
        let Some(placement) = plan.placement() else { return Ok(None) };
        let threads = threads.or_else(|| Some(physical_cores()));
        let cpu = DeviceOptions::default().threads(threads).f32_expert_inputs(true);
        let cpu = moeflux_compute::open(&cpu).map_err(Error::at(|| "opening the processor"))?;
        Self::new(cpu, placement, blueprint, plan).map(Some)
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
        let mut buffer = |len| device.buffer(len).map_err(Error::at(context));
        let (x, inner, out) = (buffer(input)?, buffer(uses * inner)?, buffer(uses * hidden)?);
        let mut borrowed = Vec::new();
        for class in plan.slot_classes().iter().filter(|class| class.experts > 0) {
            let count = uses.min(class.experts);
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
        Ok(Self {
            device,
            placement: placement.clone(),
            hidden,
            x,
            inner,
            out,
            borrowed,
            loans: Vec::with_capacity(uses),
            uses: Vec::with_capacity(uses),
            input: vec![0.0; input],
            results: vec![0.0; uses * hidden],
        })
    }

    /// Replaces the division of experts between card and host; the card keeps those it has.
    pub(crate) fn set_placement(&mut self, placement: &Placement) {
        self.placement.clone_from(placement);
    }

    /// The first expert of a layer that the host computes in a step of `rows` rows.
    pub(crate) fn computed_from(&self, layer: usize, rows: usize) -> Option<usize> {
        self.placement.computed_from(layer, rows)
    }

    /// Whether the host computes experts of any layer in a step of `rows` rows.
    pub(crate) fn computes(&self, rows: usize) -> bool {
        self.placement.computes(rows)
    }

    /// Receives the inputs of a layer's experts.
    pub(crate) fn input(&mut self, len: usize) -> &mut [f32] {
        let len = len.min(self.input.len());
        &mut self.input[..len]
    }

    /// Computes experts, and writes their results to the card.
    pub(crate) fn run(
        &mut self,
        card: &mut dyn Device,
        op: HostExpertsOp<'_>,
    ) -> Result<(), moeflux_compute::Error> {
        let ran = self.run_borrowed(card, &op);
        // The memory goes back also after an error.
        let returned = self.loans.drain(..).try_for_each(|Loan { from, to }| {
            let bytes = self.device.take_slot(to)?;
            card.put_slot(from, bytes)
        });
        ran.and(returned)?;
        let HostExpertsOp { uses, parts, .. } = op;
        // Results are in the order of the uses; those of consecutive rows are written together.
        let mut rest = &self.results[..];
        for run in uses.chunk_by(|a, b| a.out_row + 1 == b.out_row) {
            let (values, others) = rest.split_at(run.len() * self.hidden);
            card.write_view(parts.slice(run[0].out_row, run.len()), values)?;
            rest = others;
        }
        Ok(())
    }

    fn run_borrowed(
        &mut self,
        card: &mut dyn Device,
        op: &HostExpertsOp<'_>,
    ) -> Result<(), moeflux_compute::Error> {
        let count = op.uses.len();
        self.uses.clear();
        for run in op.uses.chunk_by(|a, b| a.slot == b.slot) {
            let from = run[0].slot;
            let bytes = card.take_slot(from)?;
            let size = bytes.len() as u64;
            let same_size = self.borrowed.iter().find(|slots| slots.bytes == size);
            let place = same_size.and_then(|slots| slots.slots.get(self.loans.len()));
            let Some(&to) = place else {
                card.put_slot(from, bytes)?;
                return Err(moeflux_compute::Error::Device(format!(
                    "the host has no place for an expert of {size} bytes"
                )));
            };
            self.device.put_slot(to, bytes)?;
            self.loans.push(Loan { from, to });
            let first = self.uses.len();
            let uses = (first..).zip(run);
            self.uses.extend(uses.map(|(out_row, used)| ExpertUse { slot: to, out_row, ..*used }));
        }
        let x = View::rows(self.x, op.input_rows, self.hidden);
        self.device.write(self.x, &self.input[..op.input_rows * self.hidden])?;
        let out = View::rows(self.out, count, self.hidden);
        self.device.run(&Op::Experts {
            x,
            shape: op.shape,
            activation: op.activation,
            experts: op.experts,
            uses: ExpertUses::Listed(&self.uses),
            inner: View::rows(self.inner, count, op.shape.gate.rows),
            out,
        })?;
        self.device.read(out, &mut self.results[..count * self.hidden])
    }
}
