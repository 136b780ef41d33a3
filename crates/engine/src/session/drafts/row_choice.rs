//! Choice of an answer's tokens from the rows of a step, and the check of drafted tokens.

use std::cell::Cell;

use moeflux_base::Error;
use moeflux_sampling::Sampler;

use crate::runtime::logits_request::LogitsOutput;

/// Maximum drafted tokens of a session in one step.
pub const MAX_DRAFTS: usize = 3;

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
        };
        let chosen = |token| RowOutcome::Chosen { token, ends: false };
        Ok(token.map_or(RowOutcome::NeedsAll, chosen))
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
    /// Rows that the session takes.
    accepted: &'s Cell<usize>,
    chosen: Option<Result<u32, Error>>,
}

impl<'a, 's> RowCheck<'a, 's> {
    /// The check of the last `drafts` tokens.
    pub(crate) fn new(
        choice: &'a mut dyn RowChoice,
        tokens: &'a [u32],
        drafts: usize,
        accepted: &'s Cell<usize>,
    ) -> Self {
        let certain = tokens.len() - drafts;
        accepted.set(certain);
        Self { choice, tokens, next: certain.checked_sub(1), accepted, chosen: None }
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
        if self.next != Some(row) {
            return true;
        }
        self.next = None;
        self.chosen = Some(match self.choice.choose(output) {
            Ok(RowOutcome::NeedsAll) => {
                self.next = Some(row);
                return false;
            }
            Ok(RowOutcome::Chosen { token, ends }) => {
                let is_drafted = self.tokens.get(row + 1) == Some(&token);
                self.next = (is_drafted && !ends).then_some(row + 1);
                Ok(token)
            }
            Err(error) => Err(error),
        });
        self.accepted.set(row + 1);
        true
    }

    /// The token after the last accepted row, or the error of its choice.
    pub(crate) fn into_chosen(self) -> Option<Result<u32, Error>> {
        self.chosen
    }
}
