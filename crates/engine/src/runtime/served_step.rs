//! Steps whose hand-overs the host serves: on its thread, layer by layer, it computes experts whose
//! memory the card lends for as long as only such steps run.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::Arc,
};

use moeflux_compute::{
    Activation, BankPlace, Device, Error, ExpertShape, ExpertUse, HandOverPort, Slot,
};

use super::host_processor::{HostLayer, HostProcessor};
use crate::experts::{counters::ExpertCounters, placement::Placement, stats::Stats};

/// Layer whose hand-over the host serves.
#[derive(Clone, Copy)]
pub(crate) struct ServedLayer {
    pub(crate) layer: usize,
    pub(crate) shape: ExpertShape,
    pub(crate) activation: Activation,
    /// Number of experts.
    pub(crate) experts: usize,
    /// Experts that the router chooses for a row, and experts per row in all.
    pub(crate) top_k: usize,
    pub(crate) experts_per_row: usize,
    /// Whether each choice has an input row.
    pub(crate) has_row_per_choice: bool,
}

/// Step whose hand-overs the host serves.
pub(crate) struct ServedStep {
    pub(crate) layers: Vec<ServedLayer>,
    pub(crate) rows: usize,
    /// Leading rows that belong to answers.
    pub(crate) answers: usize,
    pub(crate) counters: Arc<ExpertCounters>,
    pub(crate) placement: Arc<Placement>,
}

/// Failure of a served step.
pub(crate) struct ServeFailure {
    pub(crate) layer: usize,
    pub(crate) source: Error,
}

/// Counts of the experts of a served step, or its failure.
pub(crate) type Served = Result<Stats, ServeFailure>;

/// An expert whose memory a card's host slot lends.
struct LentExpert {
    from: Slot,
    to: Slot,
}

/// Slots of the processor that have been allocated, of one size.
#[derive(Default)]
struct EmptySlots {
    bytes: usize,
    slots: Vec<Slot>,
}

/// Memory of all experts that the host computes.
#[derive(Default)]
pub(crate) struct LentExperts {
    experts: Vec<LentExpert>,
    empty: Vec<EmptySlots>,
    /// By layer and expert: the slot, if it is lent.
    layers: Vec<Vec<Option<Slot>>>,
}

impl LentExperts {
    pub(crate) fn is_empty(&self) -> bool {
        self.experts.is_empty()
    }

    /// Moves an expert's memory from a slot of `card` to one of the processor.
    pub(crate) fn lend(
        &mut self,
        card: &mut dyn Device,
        processor: &mut dyn Device,
        (layer, expert): (usize, usize),
        from: Slot,
    ) -> Result<(), Error> {
        let bytes = card.take_slot(from)?;
        let to = match self.empty_slot(processor, bytes.len()) {
            Ok(to) => to,
            Err(error) => return card.put_slot(from, bytes).and(Err(error)),
        };
        processor.put_slot(to, bytes)?;
        self.experts.push(LentExpert { from, to });
        if self.layers.len() <= layer {
            self.layers.resize_with(layer + 1, Default::default);
        }
        let slots = &mut self.layers[layer];
        if slots.len() <= expert {
            slots.resize(expert + 1, None);
        }
        slots[expert] = Some(to);
        Ok(())
    }

    /// Returns all memory to the card's slots.
    pub(crate) fn recall(
        &mut self,
        card: &mut dyn Device,
        processor: &mut dyn Device,
    ) -> Result<(), Error> {
        let mut recalled = Ok(());
        for LentExpert { from, to, .. } in self.experts.drain(..) {
            let returned = processor.take_slot(to).and_then(|bytes| {
                let same = self.empty.iter_mut().find(|empty| empty.bytes == bytes.len());
                same.into_iter().for_each(|empty| empty.slots.push(to));
                card.put_slot(from, bytes)
            });
            recalled = recalled.and(returned);
        }
        self.layers.clear();
        recalled
    }

    /// An empty slot of the processor.
    fn empty_slot(&mut self, processor: &mut dyn Device, bytes: usize) -> Result<Slot, Error> {
        let i = self.empty.iter().position(|empty| empty.bytes == bytes).unwrap_or_else(|| {
            self.empty.push(EmptySlots { bytes, slots: Vec::new() });
            self.empty.len() - 1
        });
        let empty = &mut self.empty[i].slots;
        if let Some(slot) = empty.pop() {
            return Ok(slot);
        }
        let bank = processor.bank(1, bytes, BankPlace::Host)?;
        let slot = Slot { bank, index: 0 };
        // The slot's own memory is not used.
        processor.take_slot(slot).map(|memory| {
            drop(memory);
            slot
        })
    }

    /// Slot of an expert.
    fn slot(&self, layer: usize, expert: usize) -> Option<Slot> {
        *self.layers.get(layer)?.get(expert)?
    }
}

/// Choice of an expert by a row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Choice {
    expert: usize,
    row: usize,
    /// Index among the row's choices.
    rank: usize,
}

/// Serves hand-overs with a processor.
pub(crate) struct HandOverServer {
    port: Box<dyn HandOverPort>,
    pub(crate) lent: LentExperts,
    ids: Vec<f32>,
    choices: Vec<Choice>,
    /// Rows of the results.
    result_rows: Vec<usize>,
}

impl HandOverServer {
    /// For up to `uses` uses of experts in a layer.
    pub(crate) fn new(port: Box<dyn HandOverPort>, uses: usize) -> Self {
        Self {
            port,
            lent: LentExperts::default(),
            ids: vec![0.0; uses],
            choices: Vec::with_capacity(uses),
            result_rows: Vec::with_capacity(uses),
        }
    }

    /// Bytes of the lists for a number of uses.
    pub(crate) fn bytes(uses: usize) -> u64 {
        let of_use = size_of::<f32>() + size_of::<Choice>() + size_of::<usize>();
        (uses * of_use) as u64
    }

    /// Prepares for a step that is submitted later.
    pub(crate) fn begin(&mut self) {
        self.port.begin();
    }

    /// Serves all hand-overs of a step. After a failure the card goes on without the host.
    pub(crate) fn serve(&mut self, step: &ServedStep, processor: &mut HostProcessor) -> Served {
        let served = catch_unwind(AssertUnwindSafe(|| self.serve_layers(step, processor)));
        if !matches!(served, Ok(Ok(_))) {
            self.port.abandon();
        }
        served.unwrap_or_else(|cause| resume_unwind(cause))
    }

    fn serve_layers(&mut self, step: &ServedStep, processor: &mut HostProcessor) -> Served {
        let mut stats = Stats::default();
        for layer in &step.layers {
            let served = self.serve_layer(step, layer, processor, &mut stats);
            served.map_err(|source| ServeFailure { layer: layer.layer, source })?;
        }
        Ok(stats)
    }

    /// Serves the hand-over of a layer, and counts its experts.
    fn serve_layer(
        &mut self,
        step: &ServedStep,
        layer: &ServedLayer,
        processor: &mut HostProcessor,
        stats: &mut Stats,
    ) -> Result<(), Error> {
        let &ServedLayer { layer: index, shape, activation, experts, top_k, .. } = layer;
        let rows_per_row = if layer.has_row_per_choice { layer.experts_per_row } else { 1 };
        let input_rows = step.rows * rows_per_row;
        let ids = self.ids.get_mut(..step.rows * top_k);
        let input = processor.input.get_mut(..input_rows * shape.up.cols);
        let (Some(ids), Some(input)) = (ids, input) else {
            return Err(Error::Shape(format!("{} rows, more than are reserved", step.rows)));
        };
        self.port.next(ids, input)?;
        let choices = ids.iter().enumerate().map(|(i, id)| Choice {
            expert: *id as usize,
            row: i / top_k,
            rank: i % top_k,
        });
        self.choices.clear();
        // Ids without an expert come from logits that are no numbers, which the device reports.
        self.choices.extend(choices.filter(|choice| choice.expert < experts));
        self.choices.sort_unstable();
        processor.uses.clear();
        self.result_rows.clear();
        let mut computed = 0;
        for run in self.choices.chunk_by(|a, b| a.expert == b.expert) {
            let expert = run[0].expert;
            step.counters.add_uses(index, expert, run.len());
            stats.add_uses(run.len(), step.placement.is_on_card(index, expert));
            if !step.placement.is_computed(index, expert) {
                continue;
            }
            let Some(slot) = self.lent.slot(index, expert) else {
                return Err(Error::Device(format!("expert {expert} is not in host memory")));
            };
            computed += 1;
            for choice in run {
                let out_row = choice.row * layer.experts_per_row + choice.rank;
                let row = if layer.has_row_per_choice { out_row } else { choice.row };
                let of_results = self.result_rows.len();
                processor.uses.push(ExpertUse { slot, row, out_row: of_results });
                self.result_rows.push(out_row);
            }
        }
        if computed > 0 {
            let answers = step.answers * rows_per_row;
            processor.compute(&HostLayer { input_rows, answers, shape, activation, experts })?;
        }
        let values = &processor.results[..self.result_rows.len() * shape.down.rows];
        self.port.return_results(&self.result_rows, values)?;
        stats.experts_on_host += computed;
        Ok(())
    }
}
