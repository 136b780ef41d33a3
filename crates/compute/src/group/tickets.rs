//! Tickets of a group, each for one submission on all cards.

use std::{collections::VecDeque, ops::Range};

use moeflux_ops::{Device, Error, Ticket};

use super::on_card::on_card;

/// Number of pending submissions from which on completed ones are looked for.
const MAX_PENDING: usize = 64;

/// Submissions that may not be complete.
#[derive(Default)]
pub(super) struct GroupTickets {
    /// Tickets of all cards for each submission, the oldest first.
    pending: VecDeque<Ticket>,
    /// Ticket of the last submission.
    last: u64,
}

impl GroupTickets {
    /// Submits the ops of all cards.
    pub(super) fn submit(&mut self, cards: &mut [Box<dyn Device>]) -> Result<Ticket, Error> {
        let mut start = self.pending.len();
        if start >= MAX_PENDING * cards.len() {
            while !self.pending.is_empty() && self.forget_completed(cards, 1)? {}
            start = self.pending.len();
        }
        for (i, card) in cards.iter_mut().enumerate() {
            match card.submit() {
                Ok(ticket) => self.pending.push_back(ticket),
                Err(error) => {
                    self.pending.truncate(start);
                    return Err(on_card(i)(error));
                }
            }
        }
        let is_repeated = start.checked_sub(cards.len()).is_some_and(|previous| {
            (0..cards.len()).all(|i| self.pending[previous + i] == self.pending[start + i])
        });
        if is_repeated {
            // No card had ops to submit.
            self.pending.truncate(start);
        } else {
            self.last += 1;
        }
        Ok(Ticket(self.last))
    }

    /// Whether all cards have completed their work up to a ticket.
    pub(super) fn is_done(
        &mut self,
        cards: &mut [Box<dyn Device>],
        ticket: Ticket,
    ) -> Result<bool, Error> {
        let completed = self.last - (self.pending.len() / cards.len()) as u64;
        let pending = ticket.0.min(self.last).saturating_sub(completed);
        self.forget_completed(cards, pending as usize)
    }

    /// Forgets the oldest `count` submissions if they are complete. Returns whether they are.
    fn forget_completed(
        &mut self,
        cards: &mut [Box<dyn Device>],
        count: usize,
    ) -> Result<bool, Error> {
        let end = count * cards.len();
        let tickets: Range<usize> = end.saturating_sub(cards.len())..end;
        for ((i, card), ticket) in cards.iter_mut().enumerate().zip(self.pending.range(tickets)) {
            if !card.done(*ticket).map_err(on_card(i))? {
                return Ok(false);
            }
        }
        self.pending.drain(..end);
        Ok(true)
    }
}
