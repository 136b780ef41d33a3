//! Several cards behind one device, each with some of a model's layers.
//!
//! The cards have one id, and create their objects in the same order: an index names the same
//! object on all of them, so that ops need no translation. Buffers exist on all cards. Weights,
//! banks, tables and states are on one card, and have small placeholders on the others. Ops run on
//! the current card, that of the layer that was entered last.

mod card_group;
mod memory;
mod objects;
mod on_card;
mod slots;
mod states;
mod tickets;

pub use card_group::group_cards;
