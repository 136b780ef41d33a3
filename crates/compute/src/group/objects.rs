//! Objects that have one index on all cards.

use moeflux_ops::{Bank, Buffer, Device, DeviceId, Error, SlotTable, State, Weight};

use super::on_card::on_card;

/// Handle of an object of a card.
pub(super) trait CardObject: Copy {
    /// Returns the index of the object among those of its kind.
    fn index(self, device: DeviceId) -> Result<usize, Error>;
}

impl CardObject for Buffer {
    fn index(self, device: DeviceId) -> Result<usize, Error> {
        self.0.index_on(device, "buffer")
    }
}

impl CardObject for Weight {
    fn index(self, device: DeviceId) -> Result<usize, Error> {
        self.0.index_on(device, "weight")
    }
}

impl CardObject for SlotTable {
    fn index(self, device: DeviceId) -> Result<usize, Error> {
        self.0.index_on(device, "slot table")
    }
}

impl CardObject for Bank {
    fn index(self, device: DeviceId) -> Result<usize, Error> {
        self.index_on(device)
    }
}

impl CardObject for State {
    fn index(self, device: DeviceId) -> Result<usize, Error> {
        self.0.index_on(device, "state")
    }
}

/// Error for a card whose objects have other indexes.
pub(super) fn diverged(card: usize) -> Error {
    Error::Device(format!(
        "card {card} has created objects in another order than the group: a card of a group is \
         used by the group only"
    ))
}

/// Creates objects of one kind that are never freed, with one index on all cards.
///
/// After a failure some cards have an object more than others. The next creation fills the
/// difference with placeholders.
pub(super) struct ObjectCounts {
    /// Number of objects on each card.
    of_cards: Vec<usize>,
}

impl ObjectCounts {
    pub(super) fn new(cards: usize) -> Self {
        Self { of_cards: vec![0; cards] }
    }

    /// Creates an object by calling `create` for all cards, card `owner` last: of these calls it is
    /// the one with large memory, which cannot be freed if another one fails. `placeholder` creates
    /// an object that is not used.
    pub(super) fn create<H: CardObject>(
        &mut self,
        cards: &mut [Box<dyn Device>],
        owner: usize,
        placeholder: impl Fn(&mut dyn Device) -> Result<H, Error>,
        mut create: impl FnMut(usize, &mut dyn Device) -> Result<H, Error>,
    ) -> Result<H, Error> {
        let index = self.of_cards.iter().copied().max().unwrap_or(0);
        for (i, card) in cards.iter_mut().enumerate() {
            while self.of_cards[i] < index {
                self.add(i, &mut **card, &placeholder)?;
            }
        }
        for (i, card) in cards.iter_mut().enumerate().filter(|(i, _)| *i != owner) {
            self.add(i, &mut **card, |card| create(i, card))?;
        }
        self.add(owner, &mut *cards[owner], |card| create(owner, card))
    }

    /// Adds an object to one card.
    fn add<H: CardObject>(
        &mut self,
        index: usize,
        card: &mut dyn Device,
        create: impl FnOnce(&mut dyn Device) -> Result<H, Error>,
    ) -> Result<H, Error> {
        let object = create(card).map_err(on_card(index))?;
        if object.index(card.id())? != self.of_cards[index] {
            return Err(diverged(index));
        }
        self.of_cards[index] += 1;
        Ok(object)
    }
}
