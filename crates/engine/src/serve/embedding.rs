//! Embedding of a prompt: its hidden states after the final norm, pooled.

use crate::session::steps::RowSink;

/// Pooling of hidden states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pooling {
    /// The state of the first token.
    First,
    /// The state of the last token.
    Last,
    /// The mean of all tokens.
    Mean,
}

/// Pooled hidden states of the tokens of a prompt that were computed so far.
pub(crate) struct PromptEmbedding {
    pooling: Pooling,
    /// Of the steps that are complete: the first or the last state, or the sum.
    pooled: Vec<f32>,
    tokens: usize,
    /// Of the current step, which may fail.
    of_step: Vec<f32>,
    step_tokens: usize,
}

impl PromptEmbedding {
    pub(crate) fn new(pooling: Pooling) -> Self {
        Self { pooling, pooled: Vec::new(), tokens: 0, of_step: Vec::new(), step_tokens: 0 }
    }

    /// The sink of the next step.
    pub(crate) fn start(&mut self) -> &mut dyn RowSink {
        self.of_step.clear();
        self.step_tokens = 0;
        self
    }

    /// Takes the result of the current step.
    pub(crate) fn end_step(&mut self) {
        let of_step = std::mem::take(&mut self.of_step);
        if self.step_tokens > 0 {
            pool(self.pooling, &mut self.pooled, &of_step);
            self.tokens += std::mem::take(&mut self.step_tokens);
        }
    }

    /// The embedding of all tokens, which is taken out.
    pub(crate) fn take(&mut self) -> Vec<f32> {
        let mut embedding = std::mem::take(&mut self.pooled);
        if self.pooling == Pooling::Mean {
            embedding.iter_mut().for_each(|value| *value /= self.tokens as f32);
        }
        embedding
    }
}

/// Adds a state to pooled ones.
fn pool(pooling: Pooling, pooled: &mut Vec<f32>, state: &[f32]) {
    match pooling {
        Pooling::First if !pooled.is_empty() => {}
        Pooling::Mean if !pooled.is_empty() => {
            pooled.iter_mut().zip(state).for_each(|(sum, value)| *sum += value);
        }
        Pooling::First | Pooling::Mean | Pooling::Last => {
            pooled.clear();
            pooled.extend_from_slice(state);
        }
    }
}

impl RowSink for PromptEmbedding {
    fn row(&mut self, _row: usize, hidden: &[f32]) {
        pool(self.pooling, &mut self.of_step, hidden);
        self.step_tokens += 1;
    }
}
