//! Budgets of several cards, in a type that is copied.

use moeflux_base::{Error, PlanError};

/// Maximum number of cards of a device.
pub const MAX_CARDS: usize = 16;

/// Budgets of the cards' own memory in bytes. A single one is for each card.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CardBudgets {
    bytes: [u64; MAX_CARDS],
    count: usize,
}

impl CardBudgets {
    /// Budgets of the cards, in their order.
    ///
    /// # Errors
    /// There are none, or more than [`MAX_CARDS`].
    pub fn new(budgets: &[u64]) -> Result<Self, Error> {
        let count = budgets.len();
        let mut bytes = [0; MAX_CARDS];
        match bytes.get_mut(..count).filter(|_| count > 0) {
            Some(room) => room.copy_from_slice(budgets),
            None => return Err(PlanError::BudgetCount { given: count, most: MAX_CARDS }.into()),
        }
        Ok(Self { bytes, count })
    }

    /// The budgets: a single one, or one for each card.
    pub fn as_slice(&self) -> &[u64] {
        &self.bytes[..self.count]
    }

    /// Budget of a card.
    pub(crate) fn of_card(&self, card: usize) -> Option<u64> {
        let budgets = self.as_slice();
        if budgets.len() == 1 { Some(budgets[0]) } else { budgets.get(card).copied() }
    }
}

impl From<u64> for CardBudgets {
    fn from(budget: u64) -> Self {
        let mut bytes = [0; MAX_CARDS];
        bytes[0] = budget;
        Self { bytes, count: 1 }
    }
}
