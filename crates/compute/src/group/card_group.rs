//! Cards of one machine, each with the layers that fit into it.

use std::io;

use moeflux_ops::{
    Buffer, Bytes, Device, DeviceId, Error, Format, LateFailure, LateRead, LateValues, LayerSplit,
    MatrixShape, Op, Scalar, Ticket, View, ViewRead, Weight, seam::check_cards,
};

use super::{objects::ObjectCounts, on_card::on_card, states::GroupStates, tickets::GroupTickets};

/// Values that are carried from card to card at a time: 4 MiB of host memory. The cards wait for
/// each other only where there are more.
const CARRIED_VALUES: usize = 1 << 20;

/// Shape of the placeholders of weights.
const PLACEHOLDER_WEIGHT: MatrixShape =
    MatrixShape { rows: 1, cols: 1, format: Format::Plain(Scalar::F32) };

/// Combines devices into one, whose cards they are: see [`LayerSplit`]. Card 0 is the first one.
///
/// The devices have been opened with one [`DeviceOptions::id`](crate::DeviceOptions::id), and have
/// no objects yet. They may be of several kinds, or on one adapter. Errors of a card name it.
///
/// # Errors
/// There are fewer than two devices; their ids or the formats of their KV caches differ.
pub fn group_cards(cards: Vec<Box<dyn Device>>) -> Result<Box<dyn Device>, Error> {
    let [first, _, ..] = &cards[..] else {
        return Err(Error::Device(format!("a group has at least 2 cards, not {}", cards.len())));
    };
    let (id, kv_format) = (first.id(), first.kv_format());
    for (i, card) in cards.iter().enumerate() {
        if card.id() != id {
            return Err(Error::Device(format!("cards 0 and {i} of a group have different ids")));
        }
        if card.kv_format() != kv_format {
            return Err(Error::Device(format!(
                "card 0 of a group keeps KV caches as {}, but card {i} as {}",
                kv_format.name(),
                card.kv_format().name()
            )));
        }
    }
    let counts = || ObjectCounts::new(cards.len());
    Ok(Box::new(CardGroup {
        id,
        current: 0,
        card_of_layer: Vec::new(),
        last_card: 0,
        buffers: counts(),
        weights: counts(),
        banks: counts(),
        tables: counts(),
        bank_cards: Vec::new(),
        states: GroupStates::default(),
        tickets: GroupTickets::default(),
        carried: Vec::new(),
        carries: Vec::new(),
        cards,
    }))
}

/// Several cards as one device.
pub(super) struct CardGroup {
    /// Id of all cards.
    pub(super) id: DeviceId,
    /// At least two.
    pub(super) cards: Vec<Box<dyn Device>>,
    /// Card of the layer that was entered last.
    pub(super) current: usize,
    card_of_layer: Vec<usize>,
    /// Card of the layers that `card_of_layer` does not list.
    last_card: usize,
    buffers: ObjectCounts,
    weights: ObjectCounts,
    pub(super) banks: ObjectCounts,
    pub(super) tables: ObjectCounts,
    /// Card of each bank; `None` for placeholders on all cards.
    pub(super) bank_cards: Vec<Option<usize>>,
    pub(super) states: GroupStates,
    tickets: GroupTickets,
    /// Values on their way from one card to another.
    carried: Vec<f32>,
    /// Copies between cards whose success is not known yet.
    carries: Vec<Carry>,
}

/// Copy from one card to another, which the second one waits for.
struct Carry {
    from: usize,
    to: usize,
    failure: LateFailure,
}

impl CardGroup {
    /// Card of a layer.
    pub(super) fn card_of(&self, layer: usize) -> usize {
        self.card_of_layer.get(layer).copied().unwrap_or(self.last_card)
    }

    /// Waits for copies between cards.
    pub(super) fn finish_carries(&mut self) -> Result<(), Error> {
        self.finish_carries_by(|_| Ok(()))
    }

    /// Waits for copies between cards, of which those to the current one are complete once `f` has
    /// read a result of it. Of two errors, reports that of a copy, which is the earlier one.
    fn finish_carries_by(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let read = f(self);
        let mut first = None;
        for Carry { from, to, failure } in std::mem::take(&mut self.carries) {
            // The card waits for the values before it submits.
            let submitted = self.cards[to].submit().map(drop).map_err(on_card(to));
            let failed = failure.take().map(on_card(from)).or(submitted.err());
            first = first.or(failed);
        }
        first.map_or(read, Err)
    }

    /// Calls `f` with the current card.
    pub(super) fn on_current<T>(
        &mut self,
        f: impl FnOnce(&mut dyn Device) -> Result<T, Error>,
    ) -> Result<T, Error> {
        f(&mut *self.cards[self.current]).map_err(on_card(self.current))
    }

    /// Calls `f` with each card, up to the first error.
    pub(super) fn each_card(
        &mut self,
        mut f: impl FnMut(&mut dyn Device) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut cards = self.cards.iter_mut().enumerate();
        cards.try_for_each(|(i, card)| f(&mut **card).map_err(on_card(i)))
    }

    /// Copies a view from one card to another.
    fn carry(&mut self, view: View, from: usize, to: usize) -> Result<(), Error> {
        let Self { cards, carried, .. } = self;
        let width = view.heads.saturating_mul(view.width);
        let count = view.rows.saturating_mul(width);
        view.check_dense(count)?;
        if count <= CARRIED_VALUES {
            let LateRead { values, failure } =
                cards[from].read_late(view).map_err(on_card(from))?;
            self.carries.push(Carry { from, to, failure });
            return cards[to].write_late(&[view], values).map_err(on_card(to));
        }
        let step = (CARRIED_VALUES / width.max(1)).max(1);
        for first in (0..view.rows).step_by(step) {
            let part = view.slice(first, step.min(view.rows - first));
            let values = part.rows * width;
            if values > carried.len() {
                carried.try_reserve(values - carried.len()).map_err(|error| Error::Memory {
                    bytes: values as u64 * 4,
                    source: io::Error::other(error),
                })?;
                carried.resize(values, 0.0);
            }
            let values = &mut carried[..values];
            cards[from].read(part, values).map_err(on_card(from))?;
            cards[to].write_view(part, values).map_err(on_card(to))?;
        }
        Ok(())
    }
}

#[deny(clippy::missing_trait_methods, reason = "a default would be that of a single card")]
impl Device for CardGroup {
    fn id(&self) -> DeviceId {
        self.id
    }

    fn describe(&self) -> String {
        let descriptions: Vec<String> = self.cards.iter().map(|card| card.describe()).collect();
        descriptions.join("; ")
    }

    fn buffer(&mut self, len: usize) -> Result<Buffer, Error> {
        let (placeholder, current) = (|card: &mut dyn Device| card.buffer(0), self.current);
        self.buffers.create(&mut self.cards, current, placeholder, |_, card| card.buffer(len))
    }

    fn weight(&mut self, shape: MatrixShape, bytes: Bytes) -> Result<Weight, Error> {
        let placeholder =
            |card: &mut dyn Device| card.weight(PLACEHOLDER_WEIGHT, Bytes::zeroed(4)?);
        let (owner, mut bytes) = (self.current, Some(bytes));
        self.weights.create(&mut self.cards, owner, placeholder, |i, card| {
            match bytes.take_if(|_| i == owner) {
                Some(bytes) => card.weight(shape, bytes),
                None => placeholder(card),
            }
        })
    }

    fn run(&mut self, op: &Op<'_>) -> Result<(), Error> {
        self.on_current(|card| card.run(op))
    }

    fn submit(&mut self) -> Result<Ticket, Error> {
        self.tickets.submit(&mut self.cards)
    }

    fn done(&mut self, ticket: Ticket) -> Result<bool, Error> {
        self.tickets.is_done(&mut self.cards, ticket)
    }

    /// Copies the values to the buffer of every card: vectors of weights are for any layer.
    fn write(&mut self, buffer: Buffer, values: &[f32]) -> Result<(), Error> {
        self.each_card(|card| card.write(buffer, values))
    }

    fn write_view(&mut self, view: View, values: &[f32]) -> Result<(), Error> {
        self.on_current(|card| card.write_view(view, values))
    }

    fn write_late(&mut self, views: &[View], values: LateValues) -> Result<(), Error> {
        self.on_current(|card| card.write_late(views, values))
    }

    fn read_late(&mut self, view: View) -> Result<LateRead, Error> {
        self.finish_carries()?;
        self.on_current(|card| card.read_late(view))
    }

    fn read(&mut self, view: View, out: &mut [f32]) -> Result<(), Error> {
        self.read_while(&mut [ViewRead { view, out }], &mut |_| ())
    }

    /// Calls `meanwhile` with the card of layer 0, which may record its layers of the next step.
    fn read_while(
        &mut self,
        reads: &mut [ViewRead<'_>],
        meanwhile: &mut dyn FnMut(&mut dyn Device),
    ) -> Result<(), Error> {
        self.finish_carries_by(|group| {
            let (first, current) = (group.card_of(0), group.current);
            let read = match group.cards.get_disjoint_mut([first, current]) {
                Ok([first, card]) => card.read_while(reads, &mut |_| meanwhile(&mut **first)),
                // Layer 0 is on the current card.
                Err(_) => group.cards[current].read_views(reads),
            };
            read.map_err(on_card(current))
        })
    }

    fn read_views(&mut self, reads: &mut [ViewRead<'_>]) -> Result<(), Error> {
        self.read_while(reads, &mut |_| ())
    }
}

#[deny(clippy::missing_trait_methods, reason = "a default would be that of a single card")]
impl LayerSplit for CardGroup {
    fn cards(&self) -> usize {
        self.cards.len()
    }

    fn card(&self, index: usize) -> Option<&dyn Device> {
        self.cards.get(index).map(|card| &**card)
    }

    fn split_layers(&mut self, card_of_layer: &[usize]) -> Result<(), Error> {
        check_cards(card_of_layer, self.cards.len())?;
        self.card_of_layer = card_of_layer.to_vec();
        self.last_card = self.cards.len() - 1;
        self.current = self.card_of(0);
        Ok(())
    }

    fn enter_layer(&mut self, layer: usize, carry: Option<View>) -> Result<(), Error> {
        let card = self.card_of(layer);
        if card != self.current {
            if let Some(view) = carry {
                self.carry(view, self.current, card)?;
            }
            self.current = card;
        }
        Ok(())
    }

    fn is_same_card(&self, layer: usize, other: usize) -> bool {
        self.card_of(layer) == self.card_of(other)
    }

    fn limit_card_states(&mut self, bytes: &[u64]) {
        let limit = |i: usize| bytes.get(i).copied().unwrap_or(0);
        let limits: Vec<u64> = (0..self.cards.len()).map(limit).collect();
        for (card, limit) in self.cards.iter_mut().zip(&limits) {
            card.limit_states(*limit);
        }
        self.states.set_limits(limits);
    }
}
