//! Slots: memory for streamed experts.

use crate::{
    error::Error,
    handle::{Bank, Slot, SlotTable},
    matrix::Bytes,
};

/// Memory in which the slots of a bank are allocated. Without device memory the two are the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BankPlace {
    /// Memory of a discrete GPU. [`SlotStore::copy_slot`] fills the slots.
    Card,
    /// Memory that the host writes. [`SlotStore::take_slot`] and [`SlotStore::put_slot`] fill the
    /// slots.
    Host,
}

/// Allocates banks of slots, and moves slot contents.
pub trait SlotStore {
    /// Returns the maximum number of slots of `bytes` bytes in a bank.
    fn bank_slots(&self, bytes: usize) -> usize;

    /// Allocates a bank of `count` slots of `bytes` bytes each.
    fn bank(&mut self, count: usize, bytes: usize, place: BankPlace) -> Result<Bank, Error>;

    /// Creates the slot table of a layer, indexed by expert id, for
    /// [`ExpertUses::Routed`](crate::ExpertUses::Routed). Experts without a slot are not computed.
    fn slot_table(&mut self, slots: &[Option<Slot>]) -> Result<SlotTable, Error>;

    /// Releases a slot table that no later op uses.
    fn release_table(&mut self, table: SlotTable);

    /// Moves the memory of a slot of [`BankPlace::Host`] out, so that a reader can fill it. Ops
    /// that use the slot fail until [`SlotStore::put_slot`] returns it.
    ///
    /// The caller has waited for the last ticket whose ops or copies used the slot.
    fn take_slot(&mut self, slot: Slot) -> Result<Bytes, Error>;

    /// Returns the memory of a slot, filled or not. It must be the memory that was taken.
    fn put_slot(&mut self, slot: Slot, bytes: Bytes) -> Result<(), Error>;

    /// Copies a slot to a slot of the same size in another bank. The copy is ordered with the ops:
    /// earlier ops read the previous contents, later ones the copy.
    fn copy_slot(&mut self, src: Slot, dst: Slot) -> Result<(), Error>;
}
