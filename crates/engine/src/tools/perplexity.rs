//! Perplexity of a text under a model.

use moeflux_base::{Error, ToolError};
use moeflux_sampling::seam::LogSoftmax;
use serde::Serialize;

use crate::{
    runtime::{control::StepControl, logits_request::Logits},
    session::session::Session,
};

/// Perplexity of a text.
#[derive(Clone, Copy, Debug, Serialize)]
#[non_exhaustive]
pub struct Perplexity {
    /// Predicted tokens.
    pub tokens: usize,
    /// Mean negative log-likelihood per token, in nats.
    pub nll: f64,
    /// `exp(nll)`.
    pub perplexity: f64,
}

/// Negative log-likelihood of `token` under the softmax of `logits`, in nats, summed in f64.
/// Infinite for a token without a logit.
pub fn negative_log_likelihood(logits: &[f32], token: u32) -> f64 {
    -LogSoftmax::new(logits).logprob(token)
}

/// Measures `tokens` in consecutive windows of the session's context length. In each window every
/// token but the first is predicted from its predecessors.
///
/// # Errors
/// Fewer than two tokens, ids outside the vocabulary, an expert that cannot be read, or
/// cancellation.
pub fn perplexity(
    session: &mut Session,
    tokens: &[u32],
    control: &mut StepControl<'_>,
) -> Result<Perplexity, Error> {
    let mut windows = Windows::new(session, control, tokens.len())?;
    for part in tokens.chunks(windows.window) {
        windows.measure(part)?;
    }
    Ok(windows.finish())
}

/// Measures a text as [`perplexity`] does its tokens, of which it holds one window.
///
/// # Errors
/// As [`perplexity`]; the checkpoint has no tokenizer, or it cannot represent the text.
#[cfg(feature = "text")]
pub fn text_perplexity(
    session: &mut Session,
    text: &str,
    control: &mut StepControl<'_>,
) -> Result<Perplexity, Error> {
    use std::ops::ControlFlow;

    let engine = session.engine().clone();
    let tokenizer = engine.text()?.tokenizer();
    let mut count = 0;
    let _ = tokenizer.encode_pieces(text, true, &mut |ids| {
        count += ids.len();
        ControlFlow::Continue(())
    })?;
    let mut windows = Windows::new(session, control, count)?;
    let (mut tokens, mut measured) = (Vec::new(), Ok(()));
    let _ = tokenizer.encode_pieces(text, true, &mut |ids| {
        tokens.extend_from_slice(ids);
        while tokens.len() >= windows.window && measured.is_ok() {
            measured = windows.measure(&tokens[..windows.window]);
            tokens.drain(..windows.window);
        }
        if measured.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    measured?;
    windows.measure(&tokens)?;
    Ok(windows.finish())
}

/// Windows of a text as they are measured.
struct Windows<'a, 'b> {
    session: &'a mut Session,
    control: &'a mut StepControl<'b>,
    /// Tokens per window.
    window: usize,
    /// Tokens of the text.
    count: usize,
    done: usize,
    /// Sum of the negative log-likelihoods of `predicted` tokens.
    sum: f64,
    predicted: usize,
}

impl<'a, 'b> Windows<'a, 'b> {
    fn new(
        session: &'a mut Session,
        control: &'a mut StepControl<'b>,
        count: usize,
    ) -> Result<Self, Error> {
        let window = session.engine().plan().context;
        if count < 2 || window < 2 {
            return Err(ToolError::TextTooShort.into());
        }
        Ok(Self { session, control, window, count, done: 0, sum: 0.0, predicted: 0 })
    }

    /// Measures the next window. A single token predicts nothing.
    fn measure(&mut self, part: &[u32]) -> Result<(), Error> {
        if part.len() < 2 {
            return Ok(());
        }
        self.session.reset()?;
        let count = self.count as f64;
        let (before, share) = (self.done as f64 / count, part.len() as f64 / count);
        let mut inner =
            self.control.progress.as_mut().map(|p| move |of_part: f64| p(before + share * of_part));
        let mut control = StepControl {
            cancel: self.control.cancel,
            progress: inner.as_mut().map(|p| p as &mut dyn FnMut(f64)),
            observer: None,
        };
        let (sum, predicted) = (&mut self.sum, &mut self.predicted);
        self.session.feed(part, Logits::All, &mut control, &mut |row, logits| {
            if let Some(next) = part.get(row + 1) {
                *sum += negative_log_likelihood(logits, *next);
                *predicted += 1;
            }
        })?;
        self.done += part.len();
        Ok(())
    }

    fn finish(self) -> Perplexity {
        let nll = self.sum / self.predicted as f64;
        Perplexity { tokens: self.predicted, nll, perplexity: nll.exp() }
    }
}
