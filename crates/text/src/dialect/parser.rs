//! Parser of an answer.

use moeflux_base::Error;

use super::{
    delta::{Delta, DeltaBuffer},
    machine::Machine,
};
use crate::tokenizer::Decoder;

/// Parser of one answer: tokens in, deltas out. The result does not depend on how the text is
/// split into tokens.
#[derive(Clone, Debug)]
pub struct AnswerParser {
    pub(super) decoder: Decoder,
    pub(super) machine: Machine,
    pub(super) deltas: DeltaBuffer,
}

impl AnswerParser {
    /// Takes the next token. Returns the parts of the answer that it completes, in whole
    /// characters. End tokens are no part of an answer.
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer's decoder fails.
    pub fn push(&mut self, token: u32) -> Result<impl Iterator<Item = Delta<'_>>, Error> {
        self.deltas.clear();
        self.advance(token)?;
        Ok(self.deltas.iter())
    }

    /// Takes an end token. It is no part of the answer, but may complete a call.
    pub fn end_token(&mut self) {
        self.machine.end_token();
    }

    /// Whether the answer so far ends in its thoughts.
    pub(crate) fn is_thinking(&self) -> bool {
        self.machine.is_thinking()
    }

    /// Returns what was held back, at the end of the answer. A call that is not complete has no
    /// [`Delta::CallEnd`].
    ///
    /// # Errors
    /// [`Error::Text`] if the tokenizer's decoder fails.
    pub fn finish(&mut self) -> Result<impl Iterator<Item = Delta<'_>>, Error> {
        self.deltas.clear();
        self.machine.text(self.decoder.finish()?, &mut self.deltas);
        self.machine.finish(&mut self.deltas);
        Ok(self.deltas.iter())
    }

    pub(super) fn advance(&mut self, token: u32) -> Result<(), Error> {
        match self.machine.mark_for(token) {
            // No character continues behind a mark.
            Some(mark) => {
                self.machine.text(self.decoder.finish()?, &mut self.deltas);
                self.machine.mark(mark, &mut self.deltas);
            }
            None => self.machine.text(self.decoder.push(token)?, &mut self.deltas),
        }
        Ok(())
    }
}
