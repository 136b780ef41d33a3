//! Layers of a model divided among several cards.

use super::{device::Device, state_store::StateStore};
use crate::{error::Error, operands::View};

/// Divides the layers of a model among the cards of a device: a pipeline with one residual stream.
/// The defaults suit a device that is a single card.
///
/// Each layer is on one card. A caller enters the layer before it creates the layer's weights,
/// banks and states or runs its ops. Buffers exist on all cards, and each card has other contents.
pub trait LayerSplit: StateStore {
    /// Returns the number of cards.
    fn cards(&self) -> usize {
        1
    }

    /// Returns a card, for the memory plan; `None` if the device is a single card. An object that
    /// belongs to another card is a small placeholder on this one.
    fn card(&self, index: usize) -> Option<&dyn Device> {
        let _ = index;
        None
    }

    /// Sets the card of each layer, and makes that of layer 0 current. Layers past the end of the
    /// list, which stand for the final norm and the head, are on the last card. Objects that exist
    /// stay on their cards. Before the first call all layers are on card 0.
    ///
    /// # Errors
    /// There is no such card.
    fn split_layers(&mut self, card_of_layer: &[usize]) -> Result<(), Error> {
        check_cards(card_of_layer, self.cards())
    }

    /// Makes the card of a layer current. Ops, reads and writes of views run on the current card,
    /// and weights and banks are created there. If another card was current, `carry` is copied from
    /// it through host memory, once its previous ops are complete.
    ///
    /// # Errors
    /// The view has gaps or is not within its buffer; a card fails. The current card stays then.
    fn enter_layer(&mut self, layer: usize, carry: Option<View>) -> Result<(), Error> {
        let _ = (layer, carry);
        Ok(())
    }

    /// Returns whether two layers are on one card.
    fn is_same_card(&self, layer: usize, other: usize) -> bool {
        let _ = (layer, other);
        true
    }

    /// Limits the bytes that the states of each card may hold, as [`StateStore::limit_states`]
    /// limits them of a single one. A card without an entry can hold none.
    ///
    /// [`StateStore::states_held`] and [`StateStore::state_need`] then report bytes of the sum of
    /// the limits: of the fullest card, scaled by the sum to its own limit. The states of a step
    /// fit every card if both together are at most the sum.
    fn limit_card_states(&mut self, bytes: &[u64]) {
        self.limit_states(bytes.iter().copied().fold(0, u64::saturating_add));
    }
}

/// Checks that a list of layers names existing cards only.
pub fn check_cards(card_of_layer: &[usize], cards: usize) -> Result<(), Error> {
    let unknown = card_of_layer.iter().enumerate().find(|(_, card)| **card >= cards);
    match unknown {
        Some((layer, card)) => Err(Error::Device(format!(
            "layer {layer} is assigned to card {card}, but the cards are 0 to {}",
            cards.saturating_sub(1)
        ))),
        None => Ok(()),
    }
}
