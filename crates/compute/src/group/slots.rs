//! Slots of a group: each bank and each table is on one card.

use moeflux_ops::{Bank, BankPlace, Bytes, Device, Error, Slot, SlotStore, SlotTable, seam::stale};

use super::{card_group::CardGroup, on_card::on_card};

/// Bytes of the only slot of a placeholder.
const PLACEHOLDER_BYTES: usize = 4;

fn placeholder_bank(card: &mut dyn Device) -> Result<Bank, Error> {
    card.bank(1, PLACEHOLDER_BYTES, BankPlace::Host)
}

fn placeholder_table(card: &mut dyn Device) -> Result<SlotTable, Error> {
    card.slot_table(&[])
}

impl CardGroup {
    /// Card of a slot.
    fn card_of_slot(&self, slot: Slot) -> Result<usize, Error> {
        let index = slot.bank.index_on(self.id)?;
        self.bank_cards.get(index).copied().flatten().ok_or_else(|| stale("slot"))
    }

    /// Calls `f` with the card of a slot.
    fn with_slot<T>(
        &mut self,
        slot: Slot,
        f: impl FnOnce(&mut dyn Device) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let card = self.card_of_slot(slot)?;
        f(&mut *self.cards[card]).map_err(on_card(card))
    }
}

#[deny(clippy::missing_trait_methods, reason = "a default would be that of a single card")]
impl SlotStore for CardGroup {
    fn bank_slots(&self, bytes: usize) -> usize {
        self.cards.iter().map(|card| card.bank_slots(bytes)).min().unwrap_or(0)
    }

    fn bank(&mut self, count: usize, bytes: usize, place: BankPlace) -> Result<Bank, Error> {
        let owner = self.current;
        let bank = self.banks.create(&mut self.cards, owner, placeholder_bank, |i, card| {
            if i == owner { card.bank(count, bytes, place) } else { placeholder_bank(card) }
        })?;
        let index = bank.index_on(self.id)?;
        self.bank_cards.resize(index, None);
        self.bank_cards.push(Some(owner));
        Ok(bank)
    }

    fn slot_table(&mut self, slots: &[Option<Slot>]) -> Result<SlotTable, Error> {
        let owner = match slots.iter().flatten().next() {
            Some(slot) => self.card_of_slot(*slot)?,
            None => self.current,
        };
        for slot in slots.iter().flatten() {
            let card = self.card_of_slot(*slot)?;
            if card != owner {
                return Err(Error::Device(format!(
                    "a table has slots of cards {owner} and {card}: a layer's experts are on one"
                )));
            }
        }
        self.tables.create(&mut self.cards, owner, placeholder_table, |i, card| {
            if i == owner { card.slot_table(slots) } else { placeholder_table(card) }
        })
    }

    /// Keeps the table: its index names one on every card.
    fn release_table(&mut self, _: SlotTable) {}

    fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error> {
        self.with_slot(slot, |card| card.take_slot(slot))
    }

    fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error> {
        self.with_slot(slot, |card| card.put_slot(slot, bytes))
    }

    fn copy_slot(&mut self, src: Slot, dst: Slot) -> Result<(), Error> {
        let (from, to) = (self.card_of_slot(src)?, self.card_of_slot(dst)?);
        if from != to {
            return Err(Error::Device(format!("a slot of card {from} was copied to card {to}")));
        }
        self.with_slot(dst, |card| card.copy_slot(src, dst))
    }
}
