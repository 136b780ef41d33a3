//! Thinking budget: thoughts of an answer end after a number of tokens, by the mark that the model
//! itself ends them with, and the answer goes on with its text.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use moeflux_base::{Error, SessionError};
use moeflux_sampling::{MaskSource, TokenMask};

use crate::{dialect::AnswerFrame, text::Text};

/// Budget of the thoughts of one answer.
#[derive(Debug)]
struct ThinkingBudget {
    /// Most tokens of thoughts.
    tokens: usize,
    /// The token that opens thoughts, if they may still come.
    open: Option<u32>,
    /// Tokens of the mark that ends thoughts.
    close: Arc<[u32]>,
    /// Whether the prompt has opened them.
    is_open: bool,
}

impl Text {
    /// Mask that ends the thoughts of an answer to `prompt` after some tokens; `None` if answers
    /// have no thoughts between two marks, such as those in channels.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn thinking_budget(
        &self,
        prompt: &[u32],
        tokens: usize,
    ) -> Result<Option<Arc<dyn MaskSource>>, Error> {
        let AnswerFrame::Thoughts { open, close, is_open } =
            self.dialect().frame(self.tokenizer(), prompt)?
        else {
            return Ok(None);
        };
        let close = match close.token {
            Some(token) => vec![token],
            None => self.encode_continuation(&close.text)?,
        };
        Ok(Some(Arc::new(ThinkingBudget { tokens, open, close: close.into(), is_open })))
    }
}

impl MaskSource for ThinkingBudget {
    fn start(&self) -> Result<Box<dyn TokenMask>, Error> {
        let Self { tokens, open, is_open, .. } = *self;
        let close = Arc::clone(&self.close);
        let phase = if is_open { ThoughtPhase::Thoughts } else { ThoughtPhase::Before };
        Ok(Box::new(BudgetMask { left: tokens, open, close, written: 0, phase }))
    }
}

/// Part of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThoughtPhase {
    /// Before thoughts, which may not come.
    Before,
    Thoughts,
    /// Behind thoughts.
    After,
}

/// The budget in one answer.
struct BudgetMask {
    /// Tokens of thoughts that are left.
    left: usize,
    open: Option<u32>,
    close: Arc<[u32]>,
    /// Tokens of the closing mark at the end of the answer so far.
    written: usize,
    phase: ThoughtPhase,
}

impl TokenMask for BudgetMask {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), Error> {
        if self.phase != ThoughtPhase::Thoughts || self.left > 0 {
            return Ok(());
        }
        let Some(&token) = self.close.get(self.written) else { return Ok(()) };
        let vocab = logits.len();
        let logit = logits.get(token as usize).copied();
        let logit = logit.ok_or(SessionError::TokenId { id: token, vocab })?;
        logits.fill(f32::NEG_INFINITY);
        // An earlier mask leaves thoughts free; a bias may forbid their end.
        logits[token as usize] = if logit.is_finite() { logit } else { 0.0 };
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), Error> {
        match self.phase {
            ThoughtPhase::Before if Some(token) == self.open => self.phase = ThoughtPhase::Thoughts,
            ThoughtPhase::Before | ThoughtPhase::After => {}
            ThoughtPhase::Thoughts => {
                self.left = self.left.saturating_sub(1);
                let next = self.close.get(self.written) == Some(&token);
                // A mark of several tokens may begin anew.
                let first = usize::from(self.close.first() == Some(&token));
                self.written = if next { self.written + 1 } else { first };
                if self.written == self.close.len() {
                    self.phase = ThoughtPhase::After;
                }
            }
        }
        Ok(())
    }
}
