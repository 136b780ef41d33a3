//! Choice of an answer's tokens from the rows of a step, and the check of drafted tokens.

use std::cell::Cell;

use moeflux_base::Error;
use moeflux_sampling::Sampler;

use crate::runtime::{draft_head::DraftList, logits_request::LogitsOutput};

/// Chooses the tokens of an answer.
pub(crate) trait RowChoice: Send {
    /// Number of the highest logits that probably suffice; `None` if it needs all.
    fn candidates(&self, vocab: usize) -> Option<usize>;

    /// Chooses the token after a row, and records it.
    fn choose(&mut self, output: &LogitsOutput<'_>) -> Result<RowOutcome, Error>;
}

/// Result of [`RowChoice::choose`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowOutcome {
    /// The choice depends on other logits than the highest. Nothing has changed.
    NeedsAll,
    /// The token after the row, and whether the answer ends with it.
    Chosen { token: u32, ends: bool },
}

impl RowChoice for Sampler {
    fn candidates(&self, vocab: usize) -> Option<usize> {
        Sampler::candidates(self, vocab)
    }

    fn choose(&mut self, output: &LogitsOutput<'_>) -> Result<RowOutcome, Error> {
        let token = match *output {
            LogitsOutput::TopK { ids, logits } => self.sample_candidates(ids, logits)?,
            LogitsOutput::Logits(logits) | LogitsOutput::Hidden(logits) => {
                Some(self.sample(logits)?)
            }
            LogitsOutput::Drafts(_) => None,
        };
        let chosen = |token| RowOutcome::Chosen { token, ends: false };
        Ok(token.map_or(RowOutcome::NeedsAll, chosen))
    }
}

/// Outcome of a step for one of its entries.
#[derive(Debug)]
pub(crate) struct CheckOutcome {
    /// Rows that the session takes, once the logits are read.
    pub(crate) accepted: Cell<usize>,
    /// The token after them, if one is chosen with which the answer does not end.
    pub(crate) next: Cell<Option<u32>>,
    /// Drafts that the step has made.
    pub(crate) drafts: Cell<DraftList>,
}

impl CheckOutcome {
    /// Before a step of `rows` rows, which are all accepted unless a [`RowCheck`] decides on them.
    pub(crate) fn new(rows: usize) -> Self {
        Self { accepted: Cell::new(rows), next: Cell::default(), drafts: Cell::default() }
    }
}

/// Choices after the rows of one entry of a step, up to the first draft that differs from its
/// choice.
///
/// Rows are taken in order, and none after that draft, so that the choice is in the same state as
/// without drafts.
pub(crate) struct RowCheck<'a, 's> {
    choice: &'a mut dyn RowChoice,
    tokens: &'a [u32],
    /// Row after which a token is to be chosen, if there is one.
    next: Option<usize>,
    outcome: &'s CheckOutcome,
    chosen: Option<Result<u32, Error>>,
}

impl<'a, 's> RowCheck<'a, 's> {
    /// The check of the last `drafts` tokens, and of drafts that the step makes.
    pub(crate) fn new(
        choice: &'a mut dyn RowChoice,
        tokens: &'a [u32],
        drafts: usize,
        outcome: &'s CheckOutcome,
    ) -> Self {
        let certain = tokens.len() - drafts;
        outcome.accepted.set(certain);
        Self { choice, tokens, next: certain.checked_sub(1), outcome, chosen: None }
    }

    pub(crate) fn candidates(&self, vocab: usize) -> Option<usize> {
        self.choice.candidates(vocab)
    }

    /// Whether a token is to be chosen after this row.
    pub(crate) fn awaits(&self, row: usize) -> bool {
        self.next == Some(row)
    }

    /// Takes the output of a row. Returns whether it suffices.
    pub(crate) fn take(&mut self, row: usize, output: &LogitsOutput<'_>) -> bool {
        if let LogitsOutput::Drafts(made) = output {
            let mut drafts = DraftList::default();
            made.iter().for_each(|token| drafts.push(*token));
            self.outcome.drafts.set(drafts);
            return true;
        }
        if self.next != Some(row) {
            return true;
        }
        self.next = None;
        self.outcome.next.set(None);
        self.chosen = Some(match self.choice.choose(output) {
            Ok(RowOutcome::NeedsAll) => {
                self.next = Some(row);
                return false;
            }
            Ok(RowOutcome::Chosen { token, ends }) => {
                let made = self.outcome.drafts.get();
                let mut tokens = self.tokens.iter().chain(made.as_slice());
                let is_drafted = tokens.nth(row + 1) == Some(&token);
                self.next = (is_drafted && !ends).then_some(row + 1);
                self.outcome.next.set((!ends).then_some(token));
                Ok(token)
            }
            Err(error) => Err(error),
        });
        self.outcome.accepted.set(row + 1);
        true
    }

    /// The token after the last accepted row, or the error of its choice.
    pub(crate) fn into_chosen(self) -> Option<Result<u32, Error>> {
        self.chosen
    }
}
